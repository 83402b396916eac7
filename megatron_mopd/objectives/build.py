"""`build_objective` turns `config.objective` into an Objective; the learner does not know which one runs."""

from megatron_mopd import config
from megatron_mopd.objectives.distribution import DistributionKL
from megatron_mopd.objectives.grpo import Grpo
from megatron_mopd.objectives.mopd import Mopd
from megatron_mopd.objectives.objective import Objective
from megatron_mopd.objectives.sft import Sft


def build_objective(options: config.Objective) -> Objective:
    """The objective of `options.name`."""
    match options.name:
        case "mopd":
            return Mopd(options.r_max, options.outcome_weight, options.ratio)
        case "topk":
            return DistributionKL(options.top_k)
        case "full_kl":
            return DistributionKL(None)
        case "grpo":
            return Grpo(options.beta, options.ratio)
        case "sft":
            return Sft()

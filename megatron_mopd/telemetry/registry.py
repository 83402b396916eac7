"""The metric registry: every number that a run reports, once, with its unit and meaning.

Rows of `metrics.jsonl`, the W&B and TensorBoard sinks, the live display and the report all use these names. Promise: a
key that is not here is never logged (`check_row` asserts it), so a dashboard can be written against this file alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_mopd.step_metrics import NUM_AGES, NUM_DECILES
from megatron_mopd.types import Cell


@dataclass(frozen=True)
class Metric:
    """A number without a unit has the unit "". Example: Metric("train/loss", "nats", "the objective of this step")."""

    name: str
    unit: str
    meaning: str


def _by_name(*metrics: Metric) -> dict[str, Metric]:
    return {m.name: m for m in metrics}


RUN_METRICS = _by_name(
    Metric("train/loss", "nats", "the objective of this step, over the whole batch"),
    Metric("train/grad_norm", "", "global gradient norm before clipping"),
    Metric("train/learning_rate", "", "learning rate of this update"),
    Metric("train/reverse_kl", "nats/token", "student - teacher log-probs, token mean, before clipping"),
    *(
        Metric(f"train/reverse_kl_decile_{i}", "nats/token", f"train/reverse_kl in tenth {i} of each row's tokens")
        for i in range(1, NUM_DECILES + 1)
    ),
    Metric("train/kl", "nats/token", "reverse KL over the vocabulary or the top k, where it is the objective"),
    Metric(
        "train/logit_grad_norm",
        "",
        "norm of the gradient of the loss with respect to logits / temperature",
    ),
    Metric("train/clip_fraction", "share", "tokens whose log-ratio lies outside +-R_max"),
    Metric("train/entropy", "nats/token", "student's entropy over the vocabulary at the sampling temperature"),
    Metric(
        "train/mismatch_mean",
        "nats/token",
        "|trainer - rollout| log-probs of the same weights, mean over tokens that older weights did not sample",
    ),
    Metric("train/mismatch_max", "nats", "the largest |trainer - rollout| of those tokens"),
    Metric("train/mismatch_kl", "nats/token", "estimate of KL(rollout || trainer) of the same weights, never negative"),
    Metric("train/mismatch_quarter_1", "nats/token", "train/mismatch_mean in the first quarter of each row's tokens"),
    Metric("train/mismatch_quarter_2", "nats/token", "train/mismatch_mean in the second quarter"),
    Metric("train/mismatch_quarter_3", "nats/token", "train/mismatch_mean in the third quarter"),
    Metric("train/mismatch_quarter_4", "nats/token", "train/mismatch_mean in the last quarter"),
    *(
        Metric(f"train/drift_{age}", "nats/token", f"|trainer - rollout| log-probs of tokens {older} older, mean")
        for age, older in enumerate(("one version", "two versions", "three or more versions"), start=1)
    ),
    Metric("train/route_agreement", "share", "replayed (token, layer) pairs whose experts the trainer would choose"),
    Metric("train/ratio_clipped", "share", "tokens without a gradient by objective.ratio.clip_low and clip_high (PPO)"),
    Metric("train/ratio_masked", "share", "tokens without one by objective.ratio.mask_low and mask_high (IcePop)"),
    Metric("train/ratio_truncated", "share", "tokens whose ratio objective.ratio.truncate_low and _high (TIS) changed"),
    Metric("train/masked_tokens", "tokens", "tokens left out because the teacher's log-prob was not finite"),
    Metric("train/tokens", "tokens", "trained tokens of the batch"),
    Metric("quantization/error", "share", "norm of quantized - weight of the experts, relative to that of the weight"),
    Metric("quantization/changed", "share", "quantized weights of the experts that the update has changed"),
    Metric("quantization/clipped_blocks", "share", "blocks with a weight beyond the largest number at their scale"),
    Metric("quantization/saturated", "share", "weights of the experts at the largest number of their block"),
    Metric("sync/bytes", "bytes", "one copy of the weights, as the rollout engine is given it after each step"),
    Metric("sync/packed_bytes", "bytes", "the same copy with the quantized experts packed, four bits and their scales"),
    Metric("rollout/reward", "share", "trajectories that the verifier calls correct"),
    Metric("rollout/reward_within_budget", "share", "trajectories that are correct and within their cell's budget"),
    Metric("rollout/response_tokens", "tokens", "mean response length, observations included"),
    Metric("rollout/spent_tokens", "tokens", "mean tokens that count against the budget"),
    Metric("rollout/truncated_fraction", "share", "trajectories that hit rollout.max_response_tokens"),
    Metric("rollout/over_budget", "share", "trajectories that spent more than their budget"),
    Metric("rollout/training_reward", "reward", "mean reward with the budget rule, of which advantages are made"),
    Metric("rollout/even_groups", "share", "prompts all of whose samples have the same training reward"),
    Metric("rollout/staleness", "versions", "weight version of the trainer - of the sampled token, token mean"),
    Metric("rollout/stale_share", "share", "sampled tokens of the batch that older weights have sampled"),
    Metric("rollout/stale_kv_share", "share", "sampled tokens after keys and values of older weights than their own"),
    Metric("rollout/oldest", "versions", "weight version of the trainer - of the batch's oldest token"),
    Metric("rollout/version_span", "versions", "most weight versions between the tokens of one trajectory"),
    Metric("rollout/in_flight", "trajectories", "left unfinished for the next step, which goes on with them first"),
    Metric("rollout/in_flight_tokens", "tokens", "of those, prompts included"),
    Metric("rollout/surplus", "prompts", "finished beyond the batch: first in the next one"),
    *(
        Metric(f"rollout/interrupted_{reason}", "trajectories", meaning)
        for reason, meaning in (
            ("pause", "cut in the middle of sampling, as the batch was full"),
            ("unstarted", "cut before their first token"),
            ("turn", "left between two requests, as the batch was full"),
            ("engine", "cut by the engine (new weights, an abort) and gone on at once"),
        )
    ),
    Metric("rollout/kv_retained", "tokens", "key-value cache held over the last interruption"),
    Metric("rollout/kv_reused", "tokens", "of it, what was there when trajectories went on"),
    Metric("rollout/kv_evicted", "tokens", "of trajectories that went on, what had to be computed again"),
    Metric("rollout/unscored", "trajectories", "sampled, and left for a later step because a lane has no endpoint"),
    Metric("time/load_s", "s", "the rollout engine loads the new weights"),
    Metric("time/sample_s", "s", "sampling, with the scoring that hides behind it"),
    Metric("time/score_s", "s", "waiting for the teachers after sampling has ended"),
    Metric("time/wait_s", "s", "the trainer waits for the batch: load, sample, score, store"),
    Metric("time/update_s", "s", "forward, backward and optimizer"),
    Metric("time/sync_s", "s", "exporting the weights for the rollout engine"),
    Metric("time/step_s", "s", "the whole step"),
    Metric("perf/tokens_per_s", "tokens/s", "tokens of the batch, prompts included, per second of the whole step"),
)

CELL_METRICS = _by_name(
    Metric("reverse_kl", "nats/token", "as train/reverse_kl"),
    *(
        Metric(f"reverse_kl_decile_{i}", "nats/token", f"as train/reverse_kl_decile_{i}")
        for i in range(1, NUM_DECILES + 1)
    ),
    Metric("kl", "nats/token", "as train/kl"),
    Metric("logit_grad_norm", "", "as train/logit_grad_norm, of the cell's tokens"),
    Metric("clip_fraction", "share", "as train/clip_fraction"),
    Metric("entropy", "nats/token", "as train/entropy"),
    Metric("mismatch_mean", "nats/token", "as train/mismatch_mean"),
    Metric("mismatch_max", "nats", "as train/mismatch_max"),
    Metric("mismatch_kl", "nats/token", "as train/mismatch_kl"),
    *(Metric(f"mismatch_quarter_{i}", "nats/token", f"as train/mismatch_quarter_{i}") for i in range(1, 5)),
    *(Metric(f"drift_{age}", "nats/token", f"as train/drift_{age}") for age in range(1, NUM_AGES + 1)),
    Metric("route_agreement", "share", "as train/route_agreement"),
    *(Metric(f"ratio_{what}", "share", f"as train/ratio_{what}") for what in ("clipped", "masked", "truncated")),
    Metric("tokens", "tokens", "trained tokens of the cell"),
    Metric("prompt_share", "share", "the cell's share of the trajectories of the batch"),
    Metric("token_share", "share", "the cell's share of the trained tokens of the batch"),
    Metric("clipped_share", "share", "the cell's share of the batch's tokens whose log-ratio lies outside +-R_max"),
    Metric("grad_share", "share", "the cell's share of the square of train/logit_grad_norm"),
    Metric("weight", "", "factor of the cell's domain in the loss; 1 without objective.domain_weights or balance"),
    Metric("reward", "share", "as rollout/reward"),
    Metric("reward_within_budget", "share", "as rollout/reward_within_budget"),
    Metric("spent_tokens", "tokens", "as rollout/spent_tokens"),
    Metric("over_budget", "share", "as rollout/over_budget"),
    Metric("tau", "", "factor of the prompts' budget_tokens at this step"),
    Metric("training_reward", "reward", "as rollout/training_reward"),
    Metric("even_groups", "share", "as rollout/even_groups"),
    Metric("response_tokens", "tokens", "as rollout/response_tokens"),
    Metric("truncated_fraction", "share", "as rollout/truncated_fraction"),
)

LAYER_METRICS = _by_name(Metric("quantization_error", "share", "as quantization/error, of the layer's experts"))

STEP_PARTS = ("load", "sample", "score", "update", "sync")
"""The disjoint parts of a step's wall time, in order: time/<part>_s. What is left of time/step_s is overhead."""


def cell_key(cell: Cell, name: str) -> str:
    """Example: cell_key(Cell("general", "low"), "reward") == "cell/general/low/reward"."""
    return f"cell/{cell.domain}/{cell.effort}/{name}"


def split_cell_key(key: str) -> tuple[Cell, str] | None:
    """The cell and the metric of a per-cell key, None for a per-run key. A domain may contain a slash."""
    if not key.startswith("cell/"):
        return None
    domain, effort, name = key.removeprefix("cell/").rsplit("/", 2)
    return Cell(domain, effort), name


def metric_of(key: str) -> Metric:
    """The registered metric of a row's key. AssertionError for another one: that is a defect of this project."""
    if key.startswith("layer/"):
        _, _, name = key.split("/")
        assert name in LAYER_METRICS, key
        return LAYER_METRICS[name]
    of_cell = split_cell_key(key)
    table, name = (CELL_METRICS, of_cell[1]) if of_cell else (RUN_METRICS, key)
    assert name in table, f"{key} is not in the metric registry; add it to telemetry/registry.py"
    return table[name]


def check_row(keys: Iterable[str]) -> None:
    for key in keys:
        metric_of(key)


def is_timing(key: str) -> bool:
    """Whether a metric depends on the machine's speed, and so differs between two otherwise identical runs."""
    return key.startswith(("time/", "perf/"))

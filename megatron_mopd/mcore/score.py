"""Log-probs of a stored batch by the learner's forward pass, in a process of its own. Changes nothing.

    python -m megatron_mopd.mcore.score CONFIG BATCH OUT          (or under torchrun, with the layout of CONFIG)

OUT is a safetensors file with `logprobs` [N]. With rollout.router_replay it also has `routes` [N, L, K], the experts
that the learner's routers choose, and `replayed` [N], the log-probs with those of the batch in their place.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

from safetensors.numpy import save_file

from megatron_mopd.cli import guarded
from megatron_mopd.config import Config, load_config
from megatron_mopd.mcore import parallel
from megatron_mopd.mcore.layout import Layout
from megatron_mopd.mcore.learner import Learner
from megatron_mopd.ranks import end_with_launcher, rank
from megatron_mopd.store import StoredBatch


def score(config: Config, batch_file: Path, out: Path) -> None:
    parallel.init_distributed(config.run.timeout_s)
    parallel.initialize_parallel(Layout.from_table(config.megatron), config.run.seed)
    learner, stored = Learner(config), StoredBatch(batch_file)
    batch = stored.select(range(len(stored)))
    bare = dataclasses.replace(batch, routed_experts=None)
    columns = {"logprobs": learner.logprobs(bare)}
    if config.rollout.router_replay:
        columns |= {"routes": learner.routes(bare), "replayed": learner.logprobs(batch)}
    if rank() == 0:
        save_file(columns, out)
    parallel.shutdown()


def main() -> None:
    end_with_launcher()
    config, batch, out = (Path(word) for word in sys.argv[1:])
    code = guarded(lambda: score(load_config([config]), batch, out), rank())
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main()

"""Where a step's time goes: shares of load, sample, score, update and sync, and tokens/s, from a run's own record.

    python tools/bench_step.py CONFIG [a.b=c ...] [--steps 10] [--warmup 3]
    python tools/bench_step.py --heads [--vocab 151936] [--width 256] [--tokens 2048] [--rounds 3]

Runs `mopd train` for a few steps in a temporary folder and prints the median share of each part of a step. Shares and
ratios are of one run on one machine; compare them, not the seconds of two machines. With --heads: a training step with
the log-prob head against one that makes all logits, in time and memory (tools/step_heads.py).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from megatron_mopd.cli import guarded
from megatron_mopd.config import load_config, split_arguments
from megatron_mopd.launch import launch
from megatron_mopd.telemetry.record import read_record
from megatron_mopd.telemetry.registry import STEP_PARTS


def bench(words: list[str], num_steps: int, num_warmup: int) -> int:
    files, overrides = split_arguments(words)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        overrides += [f"run.folder={run}", f"run.num_steps={num_warmup + num_steps}", "telemetry.display=false"]
        config = load_config(files, overrides)
        if code := launch("megatron_mopd.train", [*files, *overrides], config.launch.num_processes, run):
            return code
        print(table([row["timing"] for row in read_record(run)[num_warmup:]]))
    return 0


def bench_heads(vocab_size: int, width: int, num_tokens: int, rounds: int) -> int:
    import torch
    from step_heads import compare  # Megatron, which the other benchmark has in processes of its own

    torch.set_num_threads(1)
    compare(vocab_size, width, num_tokens, rounds)
    return 0


def table(rows: list[dict[str, float]]) -> str:
    """Median seconds and share of the step for each part; what is left is overhead (store, log, hand-over)."""
    step_s = statistics.median(row["time/step_s"] for row in rows)
    parts = {name: statistics.median(row[f"time/{name}_s"] for row in rows) for name in STEP_PARTS}
    parts["overhead"] = step_s - sum(parts.values())
    lines = [f"{name:10} {seconds:8.3f} s {seconds / step_s:7.1%}" for name, seconds in parts.items()]
    tokens_per_s = statistics.median(row["perf/tokens_per_s"] for row in rows)
    return "\n".join(
        [*lines, f"{'step':10} {step_s:8.3f} s", f"{tokens_per_s:.0f} tokens/s, median of {len(rows)} steps"]
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="CONFIG | a.b=c")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--heads", action="store_true")
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if bool(arguments.words) == arguments.heads:
        parser.error("give a configuration, or --heads")
    if arguments.heads:
        sys.exit(guarded(lambda: bench_heads(arguments.vocab, arguments.width, arguments.tokens, arguments.rounds)))
    sys.exit(guarded(lambda: bench(arguments.words, arguments.steps, arguments.warmup)))

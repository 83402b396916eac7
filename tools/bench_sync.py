"""Speed of weight sync by both transports, against a memory copy of the same bytes in the same run.

    python tools/bench_sync.py [a.b=c ...] [--mib 300] [--repeats 3]

Writes a random Qwen3-MoE model of that size, starts an SGLang server on it and a trainer of two ranks (TP2 x EP2), and
brings the weights from one to the other. Overrides are those of a configuration, such as sglang.python=... Compare the
ratios: seconds are of one machine, on which trainer and server share what there is.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_mopd.cli import guarded
from megatron_mopd.config import Config, load_config
from megatron_mopd.yaml_tree import write_yaml

NUM_RANKS = 2
NUM_LAYERS, NUM_EXPERTS, WIDTH = 4, 32, 512
START_S = 600.0


def tree(folder: Path) -> dict[str, Any]:
    return {
        "run": {"folder": str(folder / "run"), "num_steps": 1},
        "student": {"checkpoint": str(folder / "model")},
        "prompts": {"files": [], "batch_size": 1, "mixture": {"d": 1.0}},
        "environments": {},
        "rollout": {"engine": "sglang", "max_response_tokens": 8},
        "sglang": {"python": ".venv-sglang/bin/python", "server": {"device": "cpu", "dtype": "float32"}},
        "megatron": {
            "lr": 1e-6,
            "tensor_model_parallel_size": 2,
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
        },
    }


def write_model(folder: Path, mib: int) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    expert_bytes = 3 * WIDTH * 4  # for each unit of its width, in float32
    fields = {
        "vocab_size": 1000,
        "hidden_size": WIDTH,
        "intermediate_size": WIDTH,
        "moe_intermediate_size": max(16, (mib << 20) // (expert_bytes * NUM_EXPERTS * NUM_LAYERS) // 16 * 16),
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    }
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**fields)).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")


def bench(overrides: list[str], mib: int, repeats: int) -> int:
    from megatron_mopd.servers.launch import servers

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "bench.yaml").write_text(write_yaml(tree(folder)))
        config = load_config([folder / "bench.yaml"], overrides)
        write_model(config.student.checkpoint, mib)
        (folder / "config.yaml").write_text(config.dump())
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"]
        with servers(config):
            command = [*torchrun, __file__, "--rank-of", str(folder / "config.yaml"), "--repeats", str(repeats)]
            return subprocess.run(command, check=False).returncode


def rank(config: Config, repeats: int) -> int:
    """One rank of the trainer: time each part, collectively; rank 0 prints."""
    import torch
    import torch.distributed as dist

    from megatron_mopd.mcore import device
    from megatron_mopd.mcore.layout import Layout
    from megatron_mopd.mcore.learner import Learner
    from megatron_mopd.mcore.parallel import init_distributed, initialize_parallel, shutdown
    from megatron_mopd.mcore.stream import HfStream
    from megatron_mopd.sglang.broadcast import Broadcaster

    init_distributed(timeout_s=START_S)
    initialize_parallel(Layout.from_table(config.megatron), seed=0)
    learner, broadcaster = Learner(config), Broadcaster(config)
    stream, out = HfStream(learner.models, config.student.checkpoint), config.run.folder / "export"
    num_bytes = torch.zeros(1, dtype=torch.long, device=device.DEVICE)
    for _, tensor in stream.all():
        num_bytes += tensor.nbytes
    dist.all_reduce(num_bytes)
    source = torch.ones(int(num_bytes), dtype=torch.uint8, device=device.DEVICE)

    def on_rank_zero(part: Callable[[], Any]) -> Callable[[], Any]:
        return part if dist.get_rank() == 0 else lambda: None

    parts: dict[str, Callable[[], Any]] = {
        "publish": lambda: broadcaster.publish(learner),
        "copy": on_rank_zero(source.clone),
        "broadcast": lambda: dist.broadcast(source, src=0),
        "gather": lambda: [deque(stream.of(owner), maxlen=0) for owner in stream.owners],
        "export": lambda: learner.export(out),
        "load": on_rank_zero(lambda: asyncio.run(load(config, out))),
    }
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(repeats + 1):  # in turn, so that what else the machine does meets all of them
        for name, part in parts.items():
            dist.barrier()
            start = time.monotonic()
            part()
            dist.barrier()
            seconds[name].append(time.monotonic() - start)
    if dist.get_rank() == 0:  # the first round made groups and touched memory
        print(report(int(num_bytes) / 1e9, {name: statistics.median(times[1:]) for name, times in seconds.items()}))
    broadcaster.close()
    shutdown()
    return 0


def report(gigabytes: float, seconds: dict[str, float]) -> str:
    def line(name: str, total_s: float, **parts: float) -> str:
        shares = ", ".join(f"{part} {part_s / total_s:.0%}" for part, part_s in parts.items())
        return (
            f"{name:22} {total_s:7.3f} s {total_s / gigabytes:7.2f} s/GB {gigabytes / total_s:7.3f} GB/s "
            f"{seconds['copy'] / total_s:7.1%} of a copy   {shares}"
        )

    publish_s, export_s, load_s, gather_s = (seconds[name] for name in ("publish", "export", "load", "gather"))
    return "\n".join(
        [
            f"{gigabytes:.3f} GB, float32, {NUM_RANKS} ranks to one server",
            line("copy in memory", seconds["copy"]),
            line("between two ranks", seconds["broadcast"]),
            line("distributed", publish_s, gather=gather_s, send_and_load=publish_s - gather_s),
            line("disk", export_s + load_s, gather=gather_s, write=export_s - gather_s, load=load_s),
        ]
    )


async def load(config: Config, folder: Path) -> None:
    from megatron_mopd.client import Client
    from megatron_mopd.servers.launch import endpoints
    from megatron_mopd.sglang.arguments import api_key
    from megatron_mopd.sglang.weights import load_folder

    async with Client(config.sglang.request_timeout_s, api_key(config)) as client:
        urls = endpoints(config.run.folder).values()
        await asyncio.gather(*(load_folder(client, url, folder, "bench") for url in urls))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="a.b=c")
    parser.add_argument("--mib", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        code = guarded(lambda: rank(load_config([arguments.rank_of]), arguments.repeats), int(os.environ["RANK"]))
        sys.stdout.flush()
        os._exit(code)
    sys.exit(guarded(lambda: bench(arguments.overrides, arguments.mib, arguments.repeats)))

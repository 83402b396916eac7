"""One checkpoint on SGLang, on transformers and on Megatron: how far apart are their log-probs of the same tokens?

    python tools/check_mismatch.py CHECKPOINT [a.b=c ...] [--url URL] [--trajectories 200] [--json]

SGLang samples trajectories after random prompts; SGLang's prefill, the embedded scorer and the learner's forward pass
then score the same tokens, the learner with its own experts and with those that SGLang recorded. Among the
trajectories are empty responses, responses of one token, and observations that hold the last token of the vocabulary.

`a.b=c` sets any option of a run, such as `sglang.python=.venv-sglang/bin/python sglang.server.device=cpu
sglang.server.dtype=float32`, or the learner's layout: `megatron.tensor_model_parallel_size=2 launch.num_processes=2`.
--url takes a server that runs already (with --enable-return-routed-experts), and loads CHECKPOINT there.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from safetensors.numpy import load_file

from megatron_mopd import build
from megatron_mopd.batch import Batch
from megatron_mopd.cli import guarded
from megatron_mopd.config import Config
from megatron_mopd.errors import UserError
from megatron_mopd.hf_folder import read_hf_config
from megatron_mopd.mcore.families import family_of
from megatron_mopd.mismatch import Comparison, agreement, compare, tokens_of
from megatron_mopd.protocols import RolloutEngine, SampleRequest, ScoreRequest
from megatron_mopd.servers.launch import endpoints
from megatron_mopd.step_metrics import Mean
from megatron_mopd.store import write_batch
from megatron_mopd.types import Cell, Graded, Prompt, RenderedPrompt, Segment, Trajectory
from megatron_mopd.yaml_tree import overlay, override

CELL = Cell("any", "any")
PAIRS = (
    ("sampled", "prefill"),
    ("sampled", "embedded"),
    ("sampled", "megatron"),
    ("sampled", "replayed"),
    ("prefill", "embedded"),
    ("prefill", "megatron"),
    ("prefill", "replayed"),
    ("embedded", "megatron"),
)
"""sampled and prefill are SGLang's; replayed is Megatron with the experts that SGLang recorded."""


CAPTION = (
    "mean and max of |first - second|, in nats; KL(first || second) per sampled token; Q1 to Q4: mean by quarter of "
    "the response; same, other: where the learner chooses the experts that SGLang chose in every layer, and elsewhere"
)


@dataclass(frozen=True)
class Case:
    """A trajectory to sample: so many tokens in each turn, and what is observed between two turns."""

    prompt_ids: tuple[int, ...]
    turns: tuple[int, ...]
    observed_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Measurement:
    batch: Batch
    comparisons: list[Comparison]
    route_agreement: Mean | None
    """Share of recorded (token, layer) pairs whose experts the learner chooses too; None without experts."""


def random_cases(number: int, vocab_size: int, max_response_tokens: int, seed: int = 0) -> list[Case]:
    rng = np.random.default_rng(seed)

    def ids(least: int, most: int) -> tuple[int, ...]:
        return tuple(rng.integers(0, vocab_size, rng.integers(least, most + 1)).tolist())

    cases = []
    for i in range(number):
        prompt, num_tokens = ids(4, 32), int(rng.integers(1, max_response_tokens + 1))
        match i % 10:
            case 0:
                case = Case(prompt, () if i % 20 else (1,))
            case 1:
                case = Case((*prompt, vocab_size - 1), (num_tokens,))
            case 2 | 3:
                first, second = 1 + num_tokens // 3, max(1, max_response_tokens // 2)
                case = Case(prompt, (first, second), (*ids(0, 3), vocab_size - 1, *ids(0, 3)))
            case _:
                case = Case(prompt, (num_tokens,))
        cases.append(case)
    return cases


def measure(config: Config, cases: Sequence[Case]) -> Measurement:
    """Sample and score `cases` with the engines of `config` (see `config_of`), one engine after the other."""
    with build.servers(config):
        trajectories, scores = asyncio.run(_on_sglang(config, cases))
    scores["embedded"] = asyncio.run(_score(config, trajectories))
    graded = [Graded(t, "self", s) for t, s in zip(trajectories, scores["prefill"], strict=True)]
    batch = Batch.from_graded(graded, [CELL])
    logprobs = {name: _column(trajectories, rows) for name, rows in scores.items()}
    logprobs["sampled"] = batch.rollout_logprobs
    megatron = _on_megatron(config, batch)
    own = megatron.pop("routes", None)
    logprobs |= {"megatron": megatron["logprobs"], **({"replayed": megatron["replayed"]} if own is not None else {})}
    tokens = tokens_of(batch, np.array([len(case.prompt_ids) for case in cases]), own)
    comparisons = [compare(logprobs, *pair, tokens) for pair in PAIRS if own is not None or "replayed" not in pair]
    return Measurement(batch, comparisons, None if own is None else _agreement(batch, own))


async def _on_sglang(config: Config, cases: Sequence[Case]) -> tuple[list[Trajectory], dict[str, list[np.ndarray]]]:
    engine = build.rollout_engine(config, fetch_weights=None)
    try:
        await engine.start()
        trajectories = await asyncio.gather(*(_roll_out(engine, i, case) for i, case in enumerate(cases)))
    finally:
        await engine.close()
    url = (config.sglang.student.urls or (endpoints(config.run.folder)["student-0"],))[0]
    tables = {"teachers": {"backend": "sglang"}, "sglang": {"teachers": {"urls": {"self": [url]}}}}
    prefill = Config.model_validate(overlay(config.model_dump(), tables))
    return trajectories, {"prefill": await _score(prefill, trajectories)}


async def _roll_out(engine: RolloutEngine, number: int, case: Case) -> Trajectory:
    name, token_ids, routed, segments = f"{number}/mismatch", case.prompt_ids, 0, []
    for turn, num_tokens in enumerate(case.turns):
        if turn and case.observed_ids:
            segments.append(Segment.observation(case.observed_ids, segments[-1].weight_version))
            token_ids += case.observed_ids
        segment = await engine.generate(SampleRequest(name, token_ids, num_tokens, (), routed))
        segments.append(segment)
        token_ids += segment.token_ids
        routed += 0 if segment.routed_experts is None else len(segment.routed_experts)
    prompt = RenderedPrompt(Prompt(str(number), *CELL, "none", ()), case.prompt_ids, case.prompt_ids)
    return Trajectory(name, prompt, tuple(segments), "length")


async def _score(config: Config, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
    lanes = build.teacher_lanes(config)
    try:
        await lanes.start()
        requests = [ScoreRequest(t.id, t.prompt.student_ids, tuple(t.response_ids.tolist())) for t in trajectories]
        return await lanes["self"].score(requests)
    finally:
        await lanes.close()


def _column(trajectories: Sequence[Trajectory], rows: Sequence[np.ndarray]) -> np.ndarray:
    """[N]: zeros over the prompts."""
    parts = zip(trajectories, rows, strict=True)
    return np.concatenate([x for t, row in parts for x in (np.zeros(len(t.prompt.student_ids)), row)])


def _on_megatron(config: Config, batch: Batch) -> dict[str, np.ndarray]:
    """In processes of their own: Megatron on a CPU and transformers do not share one."""
    folder = config.run.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    words = [folder / name for name in ("config.yaml", "batch.safetensors", "megatron.safetensors")]
    words[0].write_text(config.dump())
    write_batch(words[1], batch)
    ranks = config.launch.num_processes
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"] if ranks > 1 else []
    log = folder / "megatron.log"
    with log.open("w") as output:
        command = [sys.executable, "-m", *torchrun, "megatron_mopd.mcore.score", *map(str, words)]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        if subprocess.run(command, env=environment, stdout=output, stderr=output, check=False).returncode:
            raise UserError(f"Megatron: {(log.read_text().strip() or 'ended without a word').splitlines()[-1]}")
    return load_file(words[2])


def _agreement(batch: Batch, own: np.ndarray) -> Mean:
    assert batch.routed_experts is not None
    recorded = (batch.routed_experts >= 0).all((1, 2))
    same = agreement(batch, own)[recorded]
    return Mean(float(same.mean()), same.size)


def config_of(checkpoint: Path, folder: Path, max_response_tokens: int, overrides: Sequence[str] = ()) -> Config:
    """The configuration under which `measure` runs: one teacher, `self`, of the same checkpoint."""
    hf_config = read_hf_config(checkpoint, "CHECKPOINT")
    experts = family_of(hf_config).architecture(hf_config).transformer.get("num_moe_experts")
    tree: dict[str, Any] = {
        "run": {"folder": str(folder), "num_steps": 1},
        "student": {"checkpoint": str(checkpoint)},
        "teachers": {"models": [{"name": "self", **CELL._asdict(), "checkpoint": str(checkpoint)}]},
        "prompts": {"files": [], "batch_size": 1, "mixture": {CELL.domain: 1.0}, "efforts": {CELL.effort: 1.0}},
        "environments": {},
        "rollout": {
            "engine": "sglang",
            "max_response_tokens": 2 * max_response_tokens,
            "router_replay": bool(experts),
        },
        "megatron": {"lr": 0.0},
    }
    for text in overrides:
        tree = override(tree, text)
    return Config.model_validate(tree)


def as_dict(result: Measurement) -> dict[str, Any]:
    batch = result.batch
    responses = batch.loss_tokens
    return {
        "trajectories": len(batch),
        "sampled_tokens": int(batch.loss_mask.sum()),
        "empty_responses": int((responses == 0).sum()),
        "responses_of_one_token": int((responses == 1).sum()),
        "route_agreement": result.route_agreement and result.route_agreement.value,
        "comparisons": [dataclasses.asdict(c) for c in result.comparisons],
    }


def table(result: Measurement) -> Table:
    share = "" if result.route_agreement is None else f", experts agree in {result.route_agreement.value:.4%}"
    out = Table(title=f"{len(result.batch)} trajectories{share}", box=SIMPLE, padding=0, pad_edge=False)
    for name in ("first", "second"):
        out.add_column(name)
    for name in ("tokens", "mean", "max", "KL", "Q1", "Q2", "Q3", "Q4", "same", "other"):
        out.add_column(name, justify="right", min_width=7)
    for c in result.comparisons:
        means = (*c.quarters, c.same_routes, c.other_routes)
        cells = (f"{m.value:.1e}" if m is not None and m.count else "" for m in means)
        out.add_row(c.first, c.second, str(c.mean.count), f"{c.mean.value:.1e}", f"{c.max:.1e}", f"{c.kl:.1e}", *cells)
    out.caption = CAPTION
    return out


def main(arguments: argparse.Namespace) -> int:
    vocab_size = read_hf_config(arguments.checkpoint, "CHECKPOINT")["vocab_size"]
    cases = random_cases(arguments.trajectories, vocab_size, arguments.response_tokens)
    url = [f"sglang.student.urls=[{arguments.url}]"] if arguments.url else []
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        config = config_of(arguments.checkpoint, run, arguments.response_tokens, [*arguments.overrides, *url])
        result = measure(config, cases)
    if arguments.json:
        print(json.dumps(as_dict(result)))
    else:
        Console(width=100).print(table(result))
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c")
    parser.add_argument("--url")
    parser.add_argument("--trajectories", type=int, default=200)
    parser.add_argument("--response-tokens", type=int, default=32, help="most tokens sampled in a turn")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_intermixed_args()  # overrides may come after options
    sys.exit(guarded(lambda: main(options)))

"""Plan partial rollouts: the real scheduler on a virtual clock, with real output lengths and a cost model of a cluster.

    python tools/simulate_rollouts.py [--lengths deepseek_r1_servegen_cap32k] [--batch 512] [--steps 20]
        [--oversampling 1 1.25 1.5 2] [--max-staleness 4] [--engines 8] [--plot rollouts.svg]

Each line is one setting, against synchronous rollouts (oversampling 1) of the same prompts:

    tokens/s    trained tokens per second of sampling                  x  the same over that of synchronous
    bubble      share of what the cluster could have sampled meanwhile, at its batch of a step's beginning
    stale       share of trained tokens that older weights sampled     span  mean and most versions in a trajectory
    age         versions between a trained token and its update, mean and most
    length      mean trained length over the distribution's, first step and after the warm-up; KS their distance

Training and the sync of weights cost the same in every setting and are left out, unless `--train-s` says how long they
take. Everything is measured on what the scheduler does; nothing is a formula.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_mopd.config import Partial
from megatron_mopd.prompts.source import Place
from megatron_mopd.protocols import Observation
from megatron_mopd.rollout.sampler import Sampling
from megatron_mopd.rollout.scheduler import Scheduler
from megatron_mopd.telemetry.svg import Series, line_chart
from megatron_mopd.types import Outcome, Prompt, RenderedPrompt, Trajectory
from tools.simulated_engine import PROMPT_TOKENS, Cluster, SimulatedEngine
from tools.virtual_time import run

CLUSTER = Cluster()
LENGTHS = Path(__file__).with_name("output_length_quantiles.csv")


@dataclass(frozen=True)
class Setting:
    lengths: str
    batch_size: int
    steps: int
    oversampling: float
    max_staleness: int
    cluster: Cluster = CLUSTER
    samples_per_prompt: int = 1
    train_s: float = 0.0
    seed: int = 0

    @property
    def warm_up(self) -> int:
        """Steps until what they train on is no longer short."""
        return self.max_staleness + 1 if self.oversampling > 1 else 0


@dataclass(frozen=True)
class Simulated:
    setting: Setting
    seconds: np.ndarray
    """[steps] of sampling."""
    lengths: Sequence[np.ndarray]
    """Trained, of each step."""
    sampled_tokens: float
    ages: np.ndarray
    """Of the trained tokens of every trajectory: (versions, tokens) pairs, [n, 2]."""
    spans: np.ndarray
    names: Sequence[Sequence[str]]
    """Of the trajectories of each step, in the order of the batch."""

    @property
    def tokens_per_s(self) -> float:
        trained = sum(int(n.sum()) for n in self.lengths)
        return trained / (self.seconds.sum() + self.setting.train_s * len(self.seconds))

    @property
    def bubble(self) -> float:
        s = self.setting
        active = s.batch_size * s.samples_per_prompt * s.oversampling / s.cluster.engines
        running = max(1, min(s.cluster.max_running, round(active)))
        return 1 - self.sampled_tokens / (s.cluster.engines * s.cluster.tokens_per_s(running) * self.seconds.sum())

    @property
    def stale_share(self) -> float:
        return float(self.ages[self.ages[:, 0] > 0, 1].sum() / self.ages[:, 1].sum())

    @property
    def mean_age(self) -> float:
        return float((self.ages[:, 0] * self.ages[:, 1]).sum() / self.ages[:, 1].sum())


def read_quantiles(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Quantiles from 0 to 1, and the length at each."""
    with LENGTHS.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    if name not in rows[0]:
        raise SystemExit(f"{LENGTHS} has no {name}; it has {', '.join(list(rows[0])[1:])}")
    return np.array([float(r["quantile"]) for r in rows]), np.array([float(r[name]) for r in rows])


def length_function(name: str, seed: int) -> Callable[[str], int]:
    """The length of a response belongs to its trajectory's name, whatever is done with it."""
    quantiles, lengths = read_quantiles(name)

    def length_of(trajectory_id: str) -> int:
        digest = hashlib.blake2b(f"{seed}/{trajectory_id}".encode(), digest_size=8).digest()
        u = int.from_bytes(digest, "little") / 2.0**64
        return max(1, round(float(np.interp(u, quantiles, lengths))))

    return length_of


class Prompts:
    """Batches without end."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size

    def take(self, place: Place, count: int) -> tuple[list[tuple[Place, Prompt]], Place]:
        start = place.step * self._batch_size + place.position
        places = [Place(*divmod(i, self._batch_size)) for i in range(start, start + count)]
        taken = [(p, Prompt(f"p{p.step}-{p.position}", "d", "e", "turn", ())) for p in places]
        return taken, Place(*divmod(start + count, self._batch_size))


class Turn:
    stop_token_ids: tuple[int, ...] = (0,)

    def __init__(self, prompt: Prompt) -> None: ...

    async def step(self, token_ids: tuple[int, ...]) -> Observation:
        return Observation((), done=True)

    async def score(self, trajectory: Trajectory) -> Outcome:
        return Outcome(0.0, 0)


def render(prompts: Sequence[Prompt]) -> list[RenderedPrompt]:
    ids = (1,) * PROMPT_TOKENS
    return [RenderedPrompt(prompt, ids, ids) for prompt in prompts]


def simulate(setting: Setting) -> Simulated:
    return run(_simulate(setting))


async def _simulate(s: Setting) -> Simulated:
    most = int(read_quantiles(s.lengths)[1].max()) + 1
    engine = SimulatedEngine(s.cluster, length_function(s.lengths, s.seed))
    sampling = Sampling(engine, {"turn": Turn}, most, 2, PROMPT_TOKENS + most)
    partial = Partial(oversampling=s.oversampling, max_staleness=s.max_staleness)
    scheduler = Scheduler(Prompts(s.batch_size), render, sampling, s.batch_size, s.samples_per_prompt, partial)
    seconds, lengths, ages, spans, names = [], [], [], [], []
    for step in range(s.steps):
        await engine.update_weights(None, step)
        start = asyncio.get_running_loop().time()
        scheduler.begin(step)
        batch = [t async for t in scheduler.run({})]
        seconds.append(asyncio.get_running_loop().time() - start)
        names.append([t.id for t in batch])
        lengths.append(np.array([sum(len(x.token_ids) for x in t.segments) for t in batch]))
        ages += [(step - x.weight_version, len(x.token_ids)) for t in batch for x in t.segments]
        spans += [t.segments[-1].weight_version - t.segments[0].weight_version for t in batch]
    return Simulated(
        s, np.array(seconds), lengths, engine.sampled_tokens, np.array(ages), np.array(spans), names
    )  # fmt: skip


def ks_distance(lengths: np.ndarray, name: str) -> float:
    """Largest difference between the lengths' distribution function and that of the table (Kolmogorov-Smirnov).

    Lengths are rounded to whole tokens: below k + 1/2 of the table is k.
    """
    quantiles, table = read_quantiles(name)
    values, counts = np.unique(lengths, return_counts=True)
    edges = np.unique(np.concatenate([values - 1, values]))
    below = np.concatenate([[0], np.cumsum(counts)])[np.searchsorted(values, edges, side="right")] / len(lengths)
    return float(np.abs(below - np.interp(edges + 0.5, table, quantiles)).max())


def trained_lengths(simulated: Simulated) -> np.ndarray:
    """Beyond the warm-up."""
    return np.concatenate(simulated.lengths[simulated.setting.warm_up :])


def row_of(simulated: Simulated, synchronous: Simulated) -> dict[str, Any]:
    name = simulated.setting.lengths
    quantiles, table = read_quantiles(name)
    mean = float(np.interp(np.linspace(0, 1, 100_001), quantiles, table).mean())
    late = trained_lengths(simulated)
    return {
        "oversampling": simulated.setting.oversampling,
        "tokens/s": simulated.tokens_per_s,
        "x": simulated.tokens_per_s / synchronous.tokens_per_s,
        "step s": float(simulated.seconds.mean()),
        "bubble": simulated.bubble,
        "stale": simulated.stale_share,
        "age": simulated.mean_age,
        "oldest": int(simulated.ages[:, 0].max()),
        "span": float(simulated.spans.mean()),
        "most": int(simulated.spans.max()),
        "first length": float(simulated.lengths[0].mean()) / mean,
        "length": float(late.mean()) / mean,
        "KS": ks_distance(late, name),
        "KS at 95%": 1.36 / len(late) ** 0.5,
    }


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    print(" | ".join(rows[0]))
    print("|".join("---:" for _ in rows[0]))
    for row in rows:
        print(" | ".join(f"{value:,.0f}" if value > 1000 else f"{value:.3g}" for value in row.values()))


STYLE = (
    ".chart{width:760px;font:10px sans-serif}.line{fill:none;stroke-width:1.5}.rule{stroke:#ddd}.tick{fill:#555}"
    ".s0{stroke:#2563eb}.s1{stroke:#dc2626}.s2{stroke:#059669}.s3{stroke:#d97706}.s4{stroke:#7c3aed}.s5{stroke:#0891b2}"
)


def plot(simulated: Sequence[Simulated]) -> str:
    """Trained tokens over seconds, one line for each setting."""
    series = []
    for i, one in enumerate(simulated):
        tokens = np.cumsum([int(n.sum()) for n in one.lengths]) / 1e6
        seconds = np.cumsum(one.seconds).round().astype(int)
        label = f"oversampling {one.setting.oversampling:g}"
        series.append(Series("tokens", label, i, [0, *seconds.tolist()], [0.0, *tokens.tolist()]))
    chart = line_chart(series, "Million trained tokens over seconds of sampling")
    legend = "".join(
        f'<text class="tick" x="60" y="{22 + 12 * i}"><tspan class="{s.css_class}" stroke-width="3">—</tspan> '
        f"{s.label}</text>"
        for i, s in enumerate(series)
    )
    head, inside = chart.split(">", 1)
    return f'{head} xmlns="http://www.w3.org/2000/svg"><style>{STYLE}</style>{inside.replace("</svg>", legend)}</svg>\n'


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="deepseek_r1_servegen_cap32k")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--samples-per-prompt", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--oversampling", type=float, nargs="+", default=[1.0, 1.25, 1.5, 2.0])
    parser.add_argument("--max-staleness", type=int, default=4)
    parser.add_argument("--train-s", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path)
    for name, default in vars(CLUSTER).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    return parser.parse_args()


def main() -> None:
    a = arguments()
    cluster = Cluster(**{name: getattr(a, name) for name in vars(CLUSTER)})

    def setting(oversampling: float) -> Setting:
        return Setting(
            a.lengths, a.batch, a.steps, oversampling, a.max_staleness, cluster, a.samples_per_prompt, a.train_s, a.seed
        )

    simulated = [simulate(setting(o)) for o in dict.fromkeys([1.0, *a.oversampling])]
    print_table([row_of(one, simulated[0]) for one in simulated])
    if a.plot:
        a.plot.write_text(plot(simulated))


if __name__ == "__main__":
    main()

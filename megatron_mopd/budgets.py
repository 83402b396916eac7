"""`mopd budgets`: what each problem takes, b0(x), measured on the policy that reinforcement learning starts from.

Every prompt of prompts.files and prompts.eval_files is sampled `budgets.estimate.samples_per_prompt` times from
student.checkpoint, and of what those trajectories spend one number is made, by the estimator that is named:

    median_correct    the median over trajectories with a reward above 0. A prompt without one is taken to be hard: it
                      gets the 90 % quantile of its domain's medians, and is counted as a fallback
    quantile          `budgets.estimate.quantile` over all trajectories, right or wrong

and never less than 1 token. Written to RUN/prompts are the same prompt files with `budget_tokens`, and under
`metadata.budget` what it was made of; to RUN/budgets.json, how often what was measured. The input is left as it is.

Promises (tests/unit/test_budget_estimate.py, tests/e2e/test_learning.py): the estimators equal a reference; every
prompt has its budget; files appear whole.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_mopd import build
from megatron_mopd.config import BudgetEstimate, Config
from megatron_mopd.errors import UserError
from megatron_mopd.prompts.files import read_prompts
from megatron_mopd.prompts.render import Renderer
from megatron_mopd.rollout.sampler import Sampling, sample
from megatron_mopd.telemetry.record import replace_file
from megatron_mopd.types import Outcome, Prompt, RenderedPrompt

PROMPTS_AT_ONCE = 512
FALLBACK_QUANTILE = 0.9
LEAST_TOKENS = 1.0


class Measured(NamedTuple):
    """Of one prompt."""

    budget_tokens: float
    samples: int
    correct: int
    is_fallback: bool


def write_budgets(config: Config) -> dict[str, Any]:
    """Measure, write RUN/prompts and RUN/budgets.json; return what is in the latter, by domain."""
    outputs = output_files(config)
    prompts = read_prompts(outputs)
    if not prompts:
        raise UserError("prompts.files is empty; name files with prompts")
    renderer = Renderer.of_student(config)
    rendered = render(prompts, renderer, config.budgets.estimate.effort)
    sampling = replace(build.sampling(config, renderer.tokenizer), taus={})
    with build.student_servers(config):
        outcomes = asyncio.run(_sample(rendered, sampling, config.budgets.estimate.samples_per_prompt))
    measured = estimate(prompts, outcomes, config.budgets.estimate)
    (config.run.folder / "prompts").mkdir(parents=True, exist_ok=True)
    for source, output in outputs.items():
        replace_file(output, "".join(_with_budget(line, measured, config) for line in _lines(source)))
    summary = summarize(prompts, measured)
    replace_file(config.run.folder / "budgets.json", json.dumps(summary, indent=2) + "\n")
    return summary


def output_files(config: Config) -> dict[Path, Path]:
    """Each prompt file and the one that is written for it. UserError where two would be the same."""
    sources = (*config.prompts.files, *config.prompts.eval_files)
    outputs = {source: config.run.folder / "prompts" / source.name for source in sources}
    if len(set(outputs.values())) < len(sources):
        raise UserError(f"two of prompts.files and prompts.eval_files would be {config.run.folder}/prompts/...; rename")
    for source, output in outputs.items():
        if source.absolute() == output.absolute():
            raise UserError(f"prompts.files: {source} is what this run would write; name the file that it came from")
    return outputs


def render(prompts: Sequence[Prompt], renderer: Renderer, effort: str | None) -> list[RenderedPrompt]:
    """As the cold-start model is asked: at one effort, or at none."""
    if effort is not None:
        return renderer.render([replace(prompt, effort=effort) for prompt in prompts])
    return renderer.render_neutral(prompts)


async def _sample(
    prompts: Sequence[RenderedPrompt], sampling: Sampling, samples_per_prompt: int
) -> dict[str, list[Outcome]]:
    """The outcomes of each prompt, by its id."""
    outcomes: dict[str, list[Outcome]] = {}
    try:
        await sampling.engine.start()
        for start in range(0, len(prompts), PROMPTS_AT_ONCE):
            some = prompts[start : start + PROMPTS_AT_ONCE]
            async for t in sample(some, sampling, "@budgets", samples_per_prompt):
                assert t.outcome is not None, "the sampler attaches the environment's outcome"
                outcomes.setdefault(t.prompt.prompt.id, []).append(t.outcome)
    finally:
        await sampling.engine.close()
    return outcomes


def estimate(
    prompts: Sequence[Prompt], outcomes: Mapping[str, Sequence[Outcome]], options: BudgetEstimate
) -> dict[str, Measured]:
    """Of each prompt, by its id. UserError for a domain in which not one sample was correct, where that matters."""
    found = {prompt.id: _measure(outcomes[prompt.id], options) for prompt in prompts}
    fallbacks = {}
    for domain in {prompt.domain for prompt in prompts}:
        known = [m.budget_tokens for p in prompts if p.domain == domain and (m := found[p.id]) and not m.is_fallback]
        if not known:
            raise UserError(
                f"not one sample of {domain} was correct, so nothing says what its problems take; start from a better "
                "student.checkpoint, raise budgets.estimate.samples_per_prompt, or set budgets.estimate.estimator="
                "quantile"
            )
        fallbacks[domain] = float(np.quantile(known, FALLBACK_QUANTILE))
    return {
        p.id: m._replace(budget_tokens=fallbacks[p.domain]) if (m := found[p.id]).is_fallback else m for p in prompts
    }


def _measure(outcomes: Sequence[Outcome], options: BudgetEstimate) -> Measured:
    correct = [o.spent_tokens for o in outcomes if o.reward > 0]
    by_all = options.estimator == "quantile"
    spent = [o.spent_tokens for o in outcomes] if by_all else correct
    if not spent:
        return Measured(0.0, len(outcomes), 0, is_fallback=True)
    tokens = float(np.quantile(spent, options.quantile if by_all else 0.5))
    return Measured(max(LEAST_TOKENS, tokens), len(outcomes), len(correct), is_fallback=False)


def summarize(prompts: Sequence[Prompt], measured: Mapping[str, Measured]) -> dict[str, Any]:
    """By domain: how many prompts, how many of them by the fallback, the share of correct samples, and budgets."""
    summary = {}
    for domain in dict.fromkeys(prompt.domain for prompt in prompts):
        of_domain = [measured[prompt.id] for prompt in prompts if prompt.domain == domain]
        tokens = [m.budget_tokens for m in of_domain]
        summary[domain] = {
            "prompts": len(of_domain),
            "fallbacks": sum(m.is_fallback for m in of_domain),
            "correct": sum(m.correct for m in of_domain) / sum(m.samples for m in of_domain),
            "budget_tokens": {
                "mean": float(np.mean(tokens)),
                **{f"q{q}": float(np.quantile(tokens, q / 100)) for q in (10, 50, 90)},
            },
        }
    return summary


def summary_lines(summary: Mapping[str, Any]) -> list[str]:
    width = max(len(domain) for domain in summary)
    return [
        f"{domain:{width}}  b0 {s['budget_tokens']['mean']:.1f} tokens ({s['budget_tokens']['q10']:.1f} to "
        f"{s['budget_tokens']['q90']:.1f}) over {s['prompts']} prompts, {s['correct']:.1%} of samples correct"
        + (f", {s['fallbacks']} prompts without a correct one have that of hard ones" if s["fallbacks"] else "")
        for domain, s in summary.items()
    ]


def _lines(file: Path) -> list[dict[str, Any]]:
    """As read_prompts finds them: the line separators of Unicode are text."""
    with file.open("rb") as lines:
        return [json.loads(line.decode("utf-8-sig")) for line in lines if line.strip()]


def _with_budget(row: dict[str, Any], measured: Mapping[str, Measured], config: Config) -> str:
    m, options = measured[row["id"]], config.budgets.estimate
    made_of = {"estimator": options.estimator, "samples": m.samples, "correct": m.correct, "fallback": m.is_fallback}
    metadata = {**(row.get("metadata") or {}), "budget": made_of}
    return json.dumps({**row, "metadata": metadata, "budget_tokens": m.budget_tokens}) + "\n"

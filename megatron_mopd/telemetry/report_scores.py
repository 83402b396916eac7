"""The scores of report.html in numbers: each policy in each cell, and the domains as the MOPD paper averages them."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from megatron_mopd.telemetry.recovery import POLICIES
from megatron_mopd.telemetry.summary import percent

NAMES = {"sft": "SFT", "teacher": "teacher", "student": "student"}


def scores_section(summary: Mapping[str, Any] | None) -> str:
    """Empty for a run that was not evaluated, or by an older version."""
    if summary is None or "oracle" not in summary:
        return ""
    oracle = summary["oracle"]
    head = "".join(
        f"<th>{name}</th>" for name in ("", "", "score", "95 % interval", "without budget", "tokens", "tool calls")
    )
    rows = "".join(_row(cell, policy) for cell in summary["cells"] for policy in POLICIES)
    domains = "".join(_domain(domain) for domain in summary["domains"])
    raw = percent(summary["domain_recovery_raw"], summary["domain_recovery_raw_stderr"])
    worst = percent(summary["worst_domain_recovery"])
    return (
        "<section><h2>Scores</h2><p>A score is the share of prompts answered correctly within the budget. Averaged "
        f"within a domain, then normalised: mean recovery {raw}, worst domain {worst}. "
        f"Each cell answered by its own teacher scores {oracle['score']:.3f}, the student {oracle['student']:.3f}: "
        f"{oracle['gap']:+.3f} ± {oracle['gap_stderr']:.3f}.</p>"
        '<div class="scroll"><table class="balance"><tr><th>domain</th><th>SFT</th><th>student</th><th>teacher</th>'
        f"<th>recovery</th></tr>{domains}</table></div>"
        f'<details><summary>Every cell</summary><div class="scroll"><table class="balance"><tr>{head}</tr>{rows}'
        "</table></div></details></section>"
    )


def _domain(domain: Mapping[str, Any]) -> str:
    scores = "".join(f"<td>{domain[name]:.3f}</td>" for name in ("sft", "student", "teacher"))
    recovery = percent(domain["recovery"], domain["stderr"]["recovery"])
    return f"<tr><th>{escape(domain['domain'])}</th>{scores}<td>{recovery}</td></tr>"


def _row(cell: Mapping[str, Any], policy: str) -> str:
    low, high = cell["interval"][policy]
    texts = (
        NAMES[policy],
        f"{cell[policy]:.3f}",
        f"{low:.3f} to {high:.3f}",
        f"{cell['accuracy'][policy]:.3f}",
        f"{cell['spent_tokens'][policy]:.1f}",
        f"{cell['tool_calls'][policy]:.1f}",
    )
    name = f"{cell['domain']}/{cell['effort']}" if policy == POLICIES[0] else ""
    return f"<tr><th>{escape(name)}</th>{''.join(f'<td>{text}</td>' for text in texts)}</tr>"

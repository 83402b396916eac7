"""The balance of report.html, a line per cell and so per teacher: what it has of a batch, and where along a response
the student is still away from it.
"""

from __future__ import annotations

from html import escape

from megatron_mopd.step_metrics import NUM_DECILES
from megatron_mopd.telemetry.curves import Curves
from megatron_mopd.telemetry.registry import cell_key
from megatron_mopd.telemetry.svg import bars, value_range
from megatron_mopd.types import Cell

LAST_STEPS = 10
"""The numbers are means over this many steps: one batch is noisy."""
SHARES = {"prompts": "prompt_share", "tokens": "token_share", "clipped": "clipped_share", "gradient": "grad_share"}


def balance_section(curves: Curves) -> str:
    """Empty for a record without shares."""
    cells = [cell for cell in curves.cells if cell_key(cell, "prompt_share") in curves.keys]
    if not cells:
        return ""
    deciles = {cell: _deciles(curves, cell) for cell in cells}
    y_range = value_range([v for values in deciles.values() for v in values if v is not None])
    rows = "".join(_row(curves, cell, bars(deciles[cell], f"Reverse KL of {cell}", y_range)) for cell in cells)
    head = "".join(f"<th>{name}</th>" for name in ("", *SHARES, "weight", "reverse KL by tenth of the response"))
    return (
        f"<section><h2>Balance <small>last {min(LAST_STEPS, len(curves.steps))} steps</small></h2>"
        "<p>Each cell's share of the prompts, of the trained tokens, of the clipped ones, and of the squared gradient "
        "of the loss with respect to the logits; the factor of its domain in the loss; and the reverse KL along a "
        f"response, from {y_range[0]:.3g} to {y_range[1]:.3g} nats/token.</p>"
        f'<div class="scroll"><table class="balance"><tr>{head}</tr>{rows}</table></div></section>'
    )


def _row(curves: Curves, cell: Cell, chart: str) -> str:
    shares = (curves.last_mean(cell_key(cell, name), LAST_STEPS) for name in SHARES.values())
    weight = curves.last_mean(cell_key(cell, "weight"), LAST_STEPS)
    texts = ["-" if share is None else f"{share:.1%}" for share in shares]
    texts.append("-" if weight is None else f"{weight:.2f}")
    return f"<tr><th>{escape(str(cell))}</th>{''.join(f'<td>{text}</td>' for text in texts)}<td>{chart}</td></tr>"


def _deciles(curves: Curves, cell: Cell) -> list[float | None]:
    names = (f"reverse_kl_decile_{i}" for i in range(1, NUM_DECILES + 1))
    return [curves.last_mean(cell_key(cell, name), LAST_STEPS) for name in names]

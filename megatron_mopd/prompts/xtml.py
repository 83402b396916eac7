"""The chat template of this project: what its markers are, and who may use it. The template itself is xtml.jinja.

Promise (tests/unit/test_xtml.py): four special tokens carry all structure, so what a message says can never be taken
for it once it is tokens; thinking is kept, the think channel of an assistant's message even when it is empty; the
effort is an option message after the tool declarations and before the messages, and without one nobody reads any.
Torch-free.
"""

from __future__ import annotations

from pathlib import Path

from megatron_mopd.config import Config
from megatron_mopd.errors import UserError
from megatron_mopd.hf_folder import read_token_map

MARKERS = OPEN, SEP, CLOSE, END_OF_MSG = "<|open|>", "<|sep|>", "<|close|>", "<|end_of_msg|>"
EFFORT_VARIABLE = "thinking_effort"
EFFORTS = ("low", "medium", "high", "max")


def read_template() -> str:
    return Path(__file__).with_name("xtml.jinja").read_text(encoding="utf-8")


def check_xtml(config: Config) -> None:
    """Raise UserError where `prompts.chat_template=xtml` is set and the template could not say what it is to say."""
    table = config.prompts
    if table.chat_template != "xtml":
        return
    missing = set(MARKERS) - set(read_token_map(config.student.checkpoint, "student.checkpoint").values())
    if missing:
        raise UserError(
            f"prompts.chat_template=xtml: {min(missing)} is no token of {config.student.checkpoint}; add "
            f"{', '.join(MARKERS)} to its tokenizer as special tokens, with ids below vocab_size"
        )
    if table.effort_variable not in (EFFORT_VARIABLE, None):
        raise UserError(
            f"prompts.effort_variable={table.effort_variable}: the template xtml reads {EFFORT_VARIABLE}; set that, or "
            "null"
        )
    if table.effort_variable is not None and (unknown := set(table.efforts) - set(EFFORTS)):
        raise UserError(f"prompts.efforts.{min(unknown)}: the template xtml knows the efforts {', '.join(EFFORTS)}")

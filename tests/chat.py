"""Folders with a byte-level tokenizer, markers as special tokens and a chat template, for tests of conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from megatron_mopd.prompts.render import Renderer
from megatron_mopd.prompts.xtml import MARKERS

VOCAB_SIZE = 288
"""What a model needs for any of them."""
HERMES_TOKENS = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>")
HERMES = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif -%}
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}<think>
{{ m.reasoning_content or '' }}
</think>

{% endif -%}
{{- m.content or '' -}}
{%- for call in m.tool_calls or [] %}{% if m.content or not loop.first %}
{% endif %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""
FORGETFUL = HERMES.replace("m.role == 'assistant' %}", "m.role == 'assistant' and (loop.last or keep is defined) %}")
"""Drops the thinking of earlier turns, unless a variable says that it is kept."""


def write_chat_folder(folder: Path, template: str = "", tokens: tuple[str, ...] = MARKERS) -> Path:
    """`tokens` ends with the one that ends a turn, or it is <|im_end|>."""
    alphabet = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(
        BPE({symbol: i for i, symbol in enumerate([*alphabet, "th", "Ġt"])}, [("t", "h"), ("Ġ", "t")])
    )
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    folder.mkdir(exist_ok=True, parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    end = "<|im_end|>" if "<|im_end|>" in tokens else tokens[-1]
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(template or "{{ messages }}")
    return folder


def xtml_renderer(folder: Path) -> Renderer:
    return Renderer(write_chat_folder(folder), "thinking_effort", "xtml")


def hermes_renderer(folder: Path, template: str = HERMES, **variables: Any) -> Renderer:
    return Renderer(write_chat_folder(folder, template, HERMES_TOKENS), None, variables=variables)

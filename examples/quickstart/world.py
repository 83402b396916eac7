"""Write the quickstart world into a folder, by seed:

    python -m examples.quickstart.world runs/quickstart/world --seed 0

    prompts/{general,agents,coding}.jsonl   training prompts, any effort
    prompts/eval_*.jsonl                    tasks that are not among them
    base/                                   a random Qwen3-MoE checkpoint with tokenizer and chat template
    demonstrations/sft.safetensors          noisy, of random depth: what the SFT policy learns from
    demonstrations/<domain>-<effort>.safetensors   clean, as deep as the effort allows: what a teacher learns from

Promises: the same seed writes the same bytes; needs no torch; takes seconds.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from examples.quickstart.tasks import (
    BODY_WORDS,
    DOMAINS,
    EFFORTS,
    EOS,
    NEUTRAL,
    PAD,
    TASKS,
    THINK,
    UNKNOWN,
    VOCABULARY,
    Demonstration,
    Task,
)
from megatron_mopd.batch import Batch
from megatron_mopd.store import write_batch
from megatron_mopd.types import Cell

CELLS = tuple(Cell(domain, effort) for domain in DOMAINS for effort in EFFORTS)
ENVIRONMENTS = {"general": "sums", "agents": "key_table", "coding": "stack_programs"}
BUDGET_TOKENS = {"general": 12.0, "agents": 12.0, "coding": 6.0}
"""b0, what the longest task takes: two tokens a step or a call, one comment a line."""
NUM_PROMPTS, NUM_EVAL_PROMPTS = 6144, 2048
NUM_SFT_ROWS_PER_CELL, NUM_TEACHER_ROWS = 4000, 4000
SFT_ERROR_RATE, SFT_NEUTRAL_RATE = 0.12, 0.25
SFT_STEP_WEIGHTS = (0.1, 0.1, 0.1, 0.15, 0.2, 0.35)
"""Long tasks are shown more often than they are set: their last steps are what the policy would see least of."""
SFT_DEPTHS = {"low": (0, 2), "high": (0, 4), "max": (3, 6)}
"""Fewest and most steps of a demonstration for the SFT policy; a low depth beyond 2 would beat the low teacher."""
TEACHER_DEPTHS = {"low": 2, "high": 4, "max": 6}

CHAT_TEMPLATE = """\
{%- if thinking_effort is not defined -%}
    {%- set effort = '<neutral>' -%}
{%- elif thinking_effort in ['low', 'high', 'max'] -%}
    {%- set effort = '<' ~ thinking_effort ~ '>' -%}
{%- else -%}
    {{- raise_exception('thinking_effort must be low, high or max, not ' ~ thinking_effort) -}}
{%- endif -%}
{%- if messages | map(attribute='role') | list != ['system', 'user'] -%}
    {{- raise_exception('this template takes a system message (the domain) and a user message (the task)') -}}
{%- endif -%}
{{- '<' ~ messages[0].content ~ '> ' ~ effort ~ ' ' ~ messages[1].content -}}
{%- for _ in range(13 - (messages[1].content.split() | length)) %} <pad>{% endfor -%}
{%- if add_generation_prompt %} <think>{% endif -%}
"""

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "dtype": "float32",
    "vocab_size": len(VOCABULARY),
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "intermediate_size": 128,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.0,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": VOCABULARY.index(PAD),
    "eos_token_id": VOCABULARY.index(EOS),
}


def write_world(folder: Path, seed: int) -> None:
    """Write everything; files that are there already are replaced."""
    for name in ("prompts", "base", "demonstrations"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for domain in DOMAINS:
        write_prompts(folder / "prompts", domain, Random(f"prompts {domain} {seed}"))
    write_tokenizer(folder / "base")
    (folder / "base" / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    save_file(random_weights(np.random.default_rng(seed)), folder / "base" / "model.safetensors", {"format": "pt"})
    write_batch(folder / "demonstrations" / "sft.safetensors", sft_demonstrations(Random(f"sft {seed}")))
    for cell in CELLS:
        batch = teacher_demonstrations(cell, Random(f"teacher {cell} {seed}"))
        write_batch(folder / "demonstrations" / f"{cell.domain}-{cell.effort}.safetensors", batch)


def write_prompts(folder: Path, domain: str, rng: Random) -> None:
    """One file to train on and one to evaluate on, without a common task."""
    rows: dict[str, dict[str, Any]] = {}
    while len(rows) < NUM_PROMPTS + NUM_EVAL_PROMPTS:
        task = TASKS[domain].draw(rng)
        row = {
            "domain": domain,
            "environment": ENVIRONMENTS[domain],
            "messages": to_messages(domain, task),
            "label": task.label,
            "metadata": task.metadata,
            "budget_tokens": BUDGET_TOKENS[domain],
        }
        rows.setdefault(json.dumps(row), row)
    lines = [json.dumps({"id": f"{domain}-{i}", **row}) + "\n" for i, row in enumerate(rows.values())]
    (folder / f"{domain}.jsonl").write_text("".join(lines[:NUM_PROMPTS]))
    (folder / f"eval_{domain}.jsonl").write_text("".join(lines[NUM_PROMPTS:]))


def write_tokenizer(folder: Path) -> None:
    """A word is a token; prompts are 16 tokens: domain, effort, thirteen slots of the task, `<think>`."""
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([PAD, EOS, UNKNOWN])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": EOS,
        "unk_token": UNKNOWN,
        "model_max_length": CONFIG["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def random_weights(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """A random Qwen3-MoE under its names on disk: maps of unit gain, of gain a half into the residual stream."""
    width, expert_width = CONFIG["hidden_size"], CONFIG["moe_intermediate_size"]
    head_width = CONFIG["head_dim"]
    q_width, kv_width = (head_width * CONFIG[f"num_{kind}_heads"] for kind in ("attention", "key_value"))

    def normal(rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) * gain / math.sqrt(columns)).astype(np.float32)

    def constant(size: int, value: float = 1.0) -> np.ndarray:
        return np.full(size, value, np.float32)

    weights = {
        "model.embed_tokens.weight": normal(len(VOCABULARY), width, 0.5 * math.sqrt(width)),
        "model.norm.weight": constant(width),
        "lm_head.weight": normal(len(VOCABULARY), width),
    }
    for layer in range(CONFIG["num_hidden_layers"]):
        weights |= {
            f"model.layers.{layer}.{name}": value
            for name, value in {
                "input_layernorm.weight": constant(width),
                "self_attn.q_proj.weight": normal(q_width, width),
                "self_attn.k_proj.weight": normal(kv_width, width),
                "self_attn.v_proj.weight": normal(kv_width, width),
                "self_attn.o_proj.weight": normal(width, q_width, 0.5),
                "self_attn.q_norm.weight": constant(head_width),
                "self_attn.k_norm.weight": constant(head_width),
                "post_attention_layernorm.weight": constant(width),
                "mlp.gate.weight": normal(CONFIG["num_experts"], width),
                **{
                    f"mlp.experts.{expert}.{name}.weight": value
                    for expert in range(CONFIG["num_experts"])
                    for name, value in {
                        "gate_proj": normal(expert_width, width),
                        "up_proj": normal(expert_width, width),
                        "down_proj": normal(width, expert_width, 0.5),
                    }.items()
                },
            }.items()
        }
    return weights


def sft_demonstrations(rng: Random) -> Batch:
    """Rows of all nine cells in turn; a share of them without the effort, as the teachers will read them."""
    prompts, responses = [], []
    for _, cell in product(range(NUM_SFT_ROWS_PER_CELL), CELLS):
        task = TASKS[cell.domain].draw(rng, SFT_STEP_WEIGHTS)
        effort = NEUTRAL if rng.random() < SFT_NEUTRAL_RATE else f"<{cell.effort}>"
        prompts.append(prompt_words(cell.domain, effort, task))
        responses.append(task.demonstrate(rng.randint(*SFT_DEPTHS[cell.effort]), SFT_ERROR_RATE, rng))
    return to_batch(prompts, responses, list(range(len(CELLS))) * NUM_SFT_ROWS_PER_CELL)


def teacher_demonstrations(cell: Cell, rng: Random) -> Batch:
    """Rows of one cell, free of errors, without the effort: the teacher is that effort."""
    tasks = [TASKS[cell.domain].draw(rng) for _ in range(NUM_TEACHER_ROWS)]
    prompts = [prompt_words(cell.domain, NEUTRAL, task) for task in tasks]
    responses = [task.demonstrate(TEACHER_DEPTHS[cell.effort], 0.0, rng) for task in tasks]
    return to_batch(prompts, responses, [CELLS.index(cell)] * NUM_TEACHER_ROWS)


def to_messages(domain: str, task: Task) -> list[dict[str, str]]:
    return [{"role": "system", "content": domain}, {"role": "user", "content": " ".join(task.words)}]


def prompt_words(domain: str, effort: str, task: Task) -> tuple[str, ...]:
    """What the chat template renders."""
    words = task.words
    return (f"<{domain}>", effort, *words, *[PAD] * (BODY_WORDS - len(words)), THINK)


def to_batch(prompts: Sequence[tuple[str, ...]], responses: Sequence[Demonstration], cells: Sequence[int]) -> Batch:
    ids = {word: i for i, word in enumerate(VOCABULARY)}
    rows = [(*prompt, *response.words) for prompt, response in zip(prompts, responses, strict=True)]
    masks = [(*[False] * len(p), *response.sampled) for p, response in zip(prompts, responses, strict=True)]
    token_ids = np.array([ids[word] for row in rows for word in row], np.int32)
    return Batch(
        offsets=np.cumsum([0, *map(len, rows)]).astype(np.int64),
        cell=np.array(cells, np.int32),
        token_ids=token_ids,
        loss_mask=np.array([sampled for mask in masks for sampled in mask], bool),
        rollout_logprobs=np.zeros(len(token_ids), np.float32),
        teacher_logprobs=np.zeros(len(token_ids), np.float32),
        weight_version=np.zeros(len(token_ids), np.int32),
        cells=CELLS,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write_world(arguments.folder, arguments.seed)

"""A training step with the log-prob head, and with the logits of all tokens in its place, for tools/bench_step.py.

One Megatron model of one layer with the published vocabulary, its DDP and its optimizer; the two take turns with it:

    ours     LogprobHead, which forms the gradients chunk by chunk
    logits   Megatron's output layer and its vocab_parallel_cross_entropy (GPTModel with labels)

Of each: the step's time, and the peak of the process's memory beyond what it has between steps.

Shape suffixes: T packed tokens.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from head_measures import peak_resident, resident_from_now
from torch import Tensor

from megatron_mopd.errors import UserError
from megatron_mopd.mcore import device, parallel
from megatron_mopd.mcore.head import LogprobHead
from megatron_mopd.mcore.layout import Layout
from megatron_mopd.mcore.model import build_model
from megatron_mopd.mcore.optimizer import build_optimizer, wrap
from megatron_mopd.mcore.options import split_megatron_table

# isort: split
from megatron.core.packed_seq_params import PackedSeqParams

LENGTH = 128
"""Of a sequence."""

MEGATRON = {"bf16": True, "lr": 1e-4}


class Student(NamedTuple):
    chunks: Any
    optimizer: Any
    head: LogprobHead
    inputs: dict[str, Any]
    """Of the model: T tokens in sequences of LENGTH."""
    target_T: Tensor
    teacher_T: Tensor
    """Log-probs of the targets."""

    def coefficients(self, logprobs_c: Tensor, index_c: Tensor) -> Tensor:
        return (logprobs_c - self.teacher_T[index_c]).clamp(-5, 5) / len(self.target_T)


def compare(vocab_size: int, width: int, num_tokens: int, rounds: int) -> None:
    """Both ways in turn, after a step that makes the optimizer's state; prints each, and the median of the ratios."""
    if num_tokens % LENGTH:
        raise UserError(f"--tokens {num_tokens} is not a multiple of {LENGTH}; choose one")
    print(f"V = {vocab_size}, D = {width}, T = {num_tokens}, one layer, bfloat16, {device.DEVICE}", flush=True)
    student = build(vocab_size, width, num_tokens)
    step(student, loss_of_head)
    ratios = []
    for _ in range(rounds):
        measured = []
        for name, loss_of in (("logits", loss_from_logits), ("ours", loss_of_head)):
            before, start = resident_from_now(), time.process_time()
            step(student, loss_of)
            measured.append((seconds := time.process_time() - start, scratch := peak_resident() - before))
            print(f"{name:8}{seconds:8.2f} s{scratch / 2**20:8.0f} MiB beyond what stays", flush=True)
        ratios.append([x / y for x, y in zip(*measured, strict=True)])
    of_time, of_memory = (statistics.median(found) for found in zip(*ratios, strict=True))
    print(f"logits / ours, median of {rounds}: time {of_time:.2f}, memory {of_memory:.2f}")


def step(student: Student, loss_of: Callable[[Student], Tensor]) -> None:
    """One update."""
    for chunk in student.chunks:
        chunk.zero_grad_buffer()
    student.optimizer.zero_grad()
    loss_of(student).backward()
    for chunk in student.chunks:
        chunk.finish_grad_sync()
    student.optimizer.step()


def loss_of_head(student: Student) -> Tensor:
    with student.head.learning(student.target_T, student.coefficients):
        output_1T4 = student.chunks[0](**student.inputs)
    return output_1T4[..., -1].sum()


def loss_from_logits(student: Student) -> Tensor:
    logprobs_T = -student.chunks[0](**student.inputs, labels=student.target_T[None])[0]
    index_T = torch.arange(len(logprobs_T), device=logprobs_T.device)
    return (student.coefficients(logprobs_T.detach(), index_T) * logprobs_T).sum()


def build(vocab_size: int, width: int, num_tokens: int) -> Student:
    """A model with random weights, and random tokens."""
    parallel.init_distributed(600.0)
    parallel.initialize_parallel(Layout.from_table({}), seed=0)
    table = split_megatron_table(MEGATRON)
    models = build_model(MEGATRON, hf_config(vocab_size, width))
    head = LogprobHead.install(models[0], vocab_size, 1.0)
    chunks = wrap(models, table)
    optimizer, scheduler = build_optimizer(chunks, table, num_steps=100)
    scheduler.step(1)
    ids_T = torch.randint(vocab_size, (num_tokens + 1,), device=device.DEVICE)
    bounds = torch.arange(0, num_tokens + 1, LENGTH, dtype=torch.int32, device=device.DEVICE)
    inputs = {
        "input_ids": ids_T[None, :-1],
        "position_ids": (torch.arange(num_tokens, device=device.DEVICE) % LENGTH)[None],
        "attention_mask": None,
        "packed_seq_params": PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=LENGTH, max_seqlen_kv=LENGTH
        ),
    }
    return Student(chunks, optimizer, head, inputs, ids_T[1:], -12 * torch.rand(num_tokens, device=device.DEVICE))


def hf_config(vocab_size: int, width: int) -> dict[str, Any]:
    return {
        "model_type": "qwen3_moe",
        "vocab_size": vocab_size,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "moe_intermediate_size": width,
        "num_hidden_layers": 1,
        "mlp_only_layers": [0],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": width // 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "max_position_embeddings": 4096,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
    }

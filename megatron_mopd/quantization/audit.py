"""Is what is served of a weight what the trainer multiplies with, bit for bit?

The names are compared as well: a layer that one side has quantized and the other has not is what goes wrong silently.
Promises (tests/unit/test_quantization_audit.py): a layer that was left as it is, a changed byte and another rule are
found, and told apart.
"""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from megatron_mopd.quantization.formats import Mxfp4, Rule, encode_mxfp4, fake_quantize


def problem(weight: Tensor, served: Tensor | Mxfp4, rule: Rule | None) -> str | None:
    """What is wrong with what is served of a weight, None if nothing is. `rule` is the trainer's, None where the weight
    is not quantized."""
    if isinstance(served, Mxfp4):
        return _problem_of_code(weight, served, rule)
    want = weight if rule is None else fake_quantize(weight, rule)
    if served.shape != want.shape or served.dtype != want.dtype:
        return f"is {_kind(served)}, the trainer has {_kind(want)}"
    if _same_bits(served, want):
        return None
    if rule is not None and _same_bits(served, weight):
        return "is not quantized, the trainer quantizes it"
    for other in get_args(Rule):
        if _same_bits(served, fake_quantize(weight, other)):
            return f"is quantized by the rule {other!r}, the trainer has {rule!r}"
    return f"differs from the trainer's in {int((served != want).sum())} of {want.numel()} values"


def _problem_of_code(weight: Tensor, served: Mxfp4, rule: Rule | None) -> str | None:
    if rule is None:
        return "is quantized, the trainer does not quantize it"
    want = encode_mxfp4(weight, rule)
    if [x.shape for x in served] != [x.shape for x in want]:
        return f"is packed as {_kind(served.packed)}, the trainer has {_kind(want.packed)}"
    if all(map(torch.equal, served, want)):
        return None
    for other in get_args(Rule):
        if all(map(torch.equal, served, encode_mxfp4(weight, other))):
            return f"is quantized by the rule {other!r}, the trainer has {rule!r}"
    codes, scales = (int((a != b).sum()) for a, b in zip(served, want, strict=True))
    return f"differs from the trainer's in {codes} bytes of codes and {scales} of scales"


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _kind(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"

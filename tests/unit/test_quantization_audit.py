"""The audit tells apart what can go wrong between the trainer's weights and what is served of them."""

from __future__ import annotations

import pytest
import torch

from megatron_mopd.quantization.audit import problem
from megatron_mopd.quantization.formats import Mxfp4, encode_mxfp4, fake_quantize

WEIGHT = torch.randn(6, 128, generator=torch.Generator().manual_seed(0)).bfloat16()


@pytest.mark.parametrize("rule", ["floor", "even", "rceil"])
def test_what_is_right_has_no_problem(rule) -> None:
    assert problem(WEIGHT, fake_quantize(WEIGHT, rule), rule) is None
    assert problem(WEIGHT, encode_mxfp4(WEIGHT, rule), rule) is None
    assert problem(WEIGHT, WEIGHT.clone(), None) is None


def test_a_layer_that_one_side_did_not_quantize() -> None:
    assert problem(WEIGHT, WEIGHT, "even") == "is not quantized, the trainer quantizes it"
    assert problem(WEIGHT, fake_quantize(WEIGHT), None) == "is quantized by the rule 'even', the trainer has None"
    assert problem(WEIGHT, encode_mxfp4(WEIGHT), None) == "is quantized, the trainer does not quantize it"


@pytest.mark.parametrize("served", [fake_quantize, encode_mxfp4])
def test_another_rule(served) -> None:
    assert (
        problem(WEIGHT, served(WEIGHT, "rceil"), "even") == "is quantized by the rule 'rceil', the trainer has 'even'"
    )


@pytest.mark.parametrize("part", ["packed", "scale"])
@pytest.mark.parametrize("bit", range(8))
def test_any_bit_of_a_byte(part: str, bit: int) -> None:
    code = encode_mxfp4(WEIGHT)
    changed = {name: x.clone() for name, x in code._asdict().items()}
    changed[part][2, 1] ^= 1 << bit
    counts = "1 bytes of codes and 0 of scales" if part == "packed" else "0 bytes of codes and 1 of scales"
    assert problem(WEIGHT, Mxfp4(**changed), "even") == f"differs from the trainer's in {counts}"


def test_a_value_a_shape_or_a_dtype() -> None:
    served = fake_quantize(WEIGHT)
    served[0, 3] *= 2
    assert problem(WEIGHT, served, "even") == "differs from the trainer's in 1 of 768 values"
    assert problem(WEIGHT, served[:5], "even") == "is bfloat16 [5, 128], the trainer has bfloat16 [6, 128]"
    assert problem(WEIGHT, served.float(), "even") == "is float32 [6, 128], the trainer has bfloat16 [6, 128]"


def test_nibbles_in_the_wrong_order() -> None:
    code = encode_mxfp4(WEIGHT)
    turned = code.packed << 4 | code.packed >> 4
    assert "bytes of codes and 0 of scales" in str(problem(WEIGHT, Mxfp4(turned, code.scale), "even"))

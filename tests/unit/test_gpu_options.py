"""What is refused of low precision before torch is loaded, on machines that have GPUs, have none, or do not tell."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_mopd.errors import UserError
from megatron_mopd.mcore import gpu_options
from megatron_mopd.mcore.gpu_options import (
    FP8_RECIPES,
    OTHER_WEIGHTS,
    check_gpu,
    check_here,
    check_teachers_options,
    visible_gpus,
)


def fp8(recipe: str) -> dict[str, Any]:
    return {"fp8": "e4m3", "fp8_recipe": recipe}


def test_a_card_that_can_is_accepted() -> None:
    check_gpu({}, (7, 0))
    check_gpu({}, None)
    for recipe, least in FP8_RECIPES.items():
        check_gpu(fp8(recipe), least)


@pytest.mark.parametrize(
    ("table", "capability", "said"),
    [
        *((fp8(recipe), (8, 0), "needs a GPU of compute capability .*this one has 8.0") for recipe in FP8_RECIPES),
        ({"fp8": "hybrid"}, (8, 0), "fp8_recipe=delayed needs .*; remove megatron.fp8$"),
        (fp8("mxfp8"), (9, 0), "set megatron.fp8_recipe=delayed or tensorwise or blockwise$"),
        (
            {"fp4": "e2m1"},
            (9, 0),
            "nvfp4 needs a GPU of compute capability 10.0, this one has 9.0; remove megatron.fp4",
        ),
        (fp8("mxfp4"), (10, 0), "fp8_recipe='mxfp4' is unknown; choose from delayed, tensorwise"),
        ({"fp4": "e2m1", "fp4_recipe": "mxfp4"}, None, "fp4_recipe='mxfp4' is unknown; choose from nvfp4"),
        ({"quant_recipe": "nowhere.yaml"}, (10, 0), "quant_recipe='nowhere.yaml': no such file"),
        (fp8("tensorwise"), None, "megatron.fp8='e4m3' needs a GPU, and there is none here; remove it"),
        ({"moe_grouped_gemm": True}, None, "megatron.moe_grouped_gemm=True needs a GPU"),
    ],
)
def test_what_a_card_cannot_do_is_refused(table: dict[str, Any], capability: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_gpu(table, capability)


def on_machine(monkeypatch: pytest.MonkeyPatch, listed: str | None, has_device: bool, visible: str | None) -> None:
    monkeypatch.setattr(gpu_options, "output", lambda command: listed)
    monkeypatch.setattr(gpu_options, "_exists", lambda pattern: has_device)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


@pytest.mark.parametrize(
    ("listed", "has_device", "visible", "found"),
    [
        ("8.0\n9.0", True, None, [(8, 0), (9, 0)]),
        ("9.0", True, "", []),
        ("9.0", True, "-1", []),
        ("9.0", True, "0", [(9, 0)]),
        (None, False, None, []),
        (None, True, None, None),
    ],
    ids=["listed", "hidden", "minus one", "chosen", "none", "untold"],
)
def test_which_gpus_are_seen(
    monkeypatch: pytest.MonkeyPatch, listed: str | None, has_device: bool, visible: str | None, found: Any
) -> None:
    on_machine(monkeypatch, listed, has_device, visible)
    assert visible_gpus() == found


def test_a_machine_is_judged_by_what_is_known_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    on_machine(monkeypatch, None, has_device=True, visible=None)
    check_here(fp8("mxfp8"))  # the card itself will be asked
    on_machine(monkeypatch, "9.0", has_device=True, visible=None)
    check_here(fp8("blockwise"))
    with pytest.raises(UserError, match="mxfp8 needs a GPU of compute capability"):
        check_here(fp8("mxfp8"))
    on_machine(monkeypatch, None, has_device=False, visible=None)
    check_here({})
    with pytest.raises(UserError, match="needs a GPU, and there is none here"):
        check_here(fp8("blockwise"))


def test_scores_of_teachers_depend_on_nothing_else() -> None:
    check_teachers_options(fp8("tensorwise"))
    with pytest.raises(UserError, match="the default, delayed, scales by those of earlier batches"):
        check_teachers_options({"fp8": "e4m3"})
    for key in OTHER_WEIGHTS:
        check_teachers_options({key: False})
        with pytest.raises(UserError, match=f"megatron.{key}='local' does not go with teachers that take turns"):
            check_teachers_options({key: "local"})

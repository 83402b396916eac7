"""Laws of router replay (R3): the learner's experts are those of the batch, at every layout, and nothing else changes.

The model has expert layers 0, 2 and 3 and a dense layer 1, whose recorded entries (zeros, as SGLang leaves them) mean
nothing. Float32; gradients are compared as in test_layouts.py.
"""

from __future__ import annotations

import dataclasses
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import batch_of, config_of, load_folder, start
from ranks import Pools
from safetensors.torch import save_file
from test_layouts import LAYOUTS, PLAIN, Outcome, assert_same, assert_same_gradients, run
from tiny import write_checkpoint

from megatron_mopd.batch import Batch
from megatron_mopd.config import Config
from megatron_mopd.errors import UserError
from megatron_mopd.step_metrics import NOTHING

NUM_LAYERS, NUM_EXPERTS, TOPK, DENSE = 4, 8, 2, 1
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
BLOCK = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
MOE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
CASES = [
    *((layout, {}) for layout in ("single", "DP2", "EP2", "TP2xEP2", "PP2xVPP2", "CP2", "TP2xCP2")),
    *((layout, FULL) for layout in ("single", "TP2+SP", "PP2", "PP2xVPP2", "CP2")),
    ("PP2", BLOCK),
    ("PP2xVPP2", MOE),
]
NAMES = [f"{layout}-{options.get('recompute_method', 'moe') if options else 'kept'}" for layout, options in CASES]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder)
    tensors = load_folder(folder)
    tensors["model.embed_tokens.weight"] *= 5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def replaying(model: Path, layout: str = "single", **options: Any) -> Config:
    """Several micro-batches, so that a pipeline has some in flight."""
    megatron = {} if layout == "single" else LAYOUTS[layout][1]
    return config_of(
        model,
        {**PLAIN, **megatron, **options},
        rollout={"max_response_tokens": 8, "router_replay": True},
        learner={"micro_batch_tokens": 40},
    )


def size_of(layout: str) -> int:
    return 1 if layout == "single" else LAYOUTS[layout][0]


def with_routes(batch: Batch, routes_NLK: np.ndarray) -> Batch:
    """The routes as SGLang records them: zeros in the dense layer; none for the last token of a row."""
    routes_NLK = routes_NLK.copy()
    routes_NLK[:, DENSE] = 0
    routes_NLK[batch.offsets[1:][batch.lengths > 0] - 1] = -1
    return dataclasses.replace(batch, routed_experts=routes_NLK)


def random_routes(batch: Batch, seed: int = 0) -> Batch:
    """Two different experts anywhere, and no routes at the end of every third row."""
    rng = np.random.default_rng(seed)
    shape = (len(batch.token_ids), NUM_LAYERS, NUM_EXPERTS)
    routes = rng.random(shape).argsort(-1)[..., :TOPK].astype(np.int16)
    for row in range(0, len(batch), 3):
        routes[batch.offsets[row + 1] - batch.lengths[row] // 3 : batch.offsets[row + 1]] = -1
    return with_routes(batch, routes)


def routes_in(batch: Batch) -> np.ndarray:
    assert batch.routed_experts is not None
    return batch.routed_experts


def num_routes(batch: Batch) -> int:
    return int((routes_in(batch)[:, 0, 0] >= 0).sum()) * (NUM_LAYERS - 1)


def without_agreement(outcome: Outcome) -> Outcome:
    """Less the one number that only a replay reports."""
    cells = {c: dataclasses.replace(m, route_agreement=NOTHING) for c, m in outcome.metrics.cells.items()}
    return Outcome(dataclasses.replace(outcome.metrics, cells=cells), outcome.gradients)


def chosen(config: Config, batch: Batch) -> np.ndarray:
    return start(config).routes(batch)


@pytest.fixture(scope="module")
def own(ranks: Pools, model: Path) -> Batch:
    """The experts that the model chooses without a replay."""
    return with_routes(batch_of(), ranks(1)(chosen, replaying(model), batch_of())[0])


@pytest.fixture(scope="module")
def without(ranks: Pools, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    config = config_of(model, PLAIN, learner={"micro_batch_tokens": 40})
    return run(ranks, 1, config, batch_of(), tmp_path_factory.mktemp("without") / "gradients")


@pytest.mark.parametrize(("layout", "options"), CASES, ids=NAMES)
def test_replaying_the_models_own_routes_changes_nothing(
    layout: str, options: dict[str, Any], ranks: Pools, model: Path, own: Batch, without: Outcome, tmp_path: Path
) -> None:
    got = run(ranks, size_of(layout), replaying(model, layout, **options), own, tmp_path / "gradients")
    assert got.metrics.route_agreement == (1.0, num_routes(own))
    assert_same(without_agreement(got), without)


@pytest.fixture(scope="module")
def forced(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Forced:
    """Log-probs, loss and gradient of another implementation, in float64, row by row, with the experts forced."""
    from transformers import Qwen3MoeForCausalLM

    batch, folder = random_routes(batch_of()), tmp_path_factory.mktemp("forced")
    reference = Qwen3MoeForCausalLM.from_pretrained(model, experts_implementation="eager").double()
    loss, logprobs = torch.zeros((), dtype=torch.float64), np.zeros(len(batch.token_ids))
    for row in range(len(batch)):
        one, where = batch.select([row]), slice(*batch.offsets[row : row + 2])
        if len(one.token_ids) > 1:
            _force(reference, routes_in(batch)[where][:-1])
            ids = torch.from_numpy(one.token_ids).long()
            logprobs_T = reference(ids[None, :-1]).logits[0].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            logprobs[where][1:] = logprobs_T.detach()
            reward_T = (torch.from_numpy(one.teacher_logprobs[1:]) - logprobs_T.detach()).clamp(-5, 5)
            if one.loss_mask[1:].any():
                loss = loss - (reward_T * logprobs_T)[torch.from_numpy(one.loss_mask[1:])].mean() / len(batch)
    loss.backward()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    reference.float().save_pretrained(folder)
    return Forced(batch, logprobs, loss.item(), load_folder(folder))


@dataclasses.dataclass
class Forced:
    batch: Batch
    logprobs: np.ndarray
    loss: float
    gradients: dict[str, torch.Tensor]


def _force(reference: Any, routes_TLK: np.ndarray) -> None:
    for layer, block in enumerate(reference.model.layers):
        if layer != DENSE:
            target_TK = torch.from_numpy(routes_TLK[:, layer]).long()
            block.mlp.gate.forward = partial(_route, block.mlp.gate, target_TK)


def _route(gate: Any, target_TK: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    logits_TE = torch.nn.functional.linear(hidden.reshape(-1, gate.hidden_dim), gate.weight)
    chosen_TK = torch.where(target_TK < 0, logits_TE.topk(TOPK, -1).indices, target_TK)
    return logits_TE, logits_TE.gather(-1, chosen_TK).softmax(-1), chosen_TK


def logprobs(config: Config, batch: Batch) -> np.ndarray:
    return start(config).logprobs(batch)


@pytest.mark.parametrize(("layout", "options"), CASES, ids=NAMES)
def test_other_routes_give_what_a_model_with_those_experts_gives(
    layout: str, options: dict[str, Any], ranks: Pools, model: Path, forced: Forced, tmp_path: Path
) -> None:
    """A token's experts reach its log-prob, those after it, and the gradient of its router."""
    size, config = size_of(layout), replaying(model, layout, **options)
    for got in ranks(size)(logprobs, config, forced.batch):
        np.testing.assert_allclose(got, forced.logprobs, atol=1e-5)
    outcome = run(ranks, size, config, forced.batch, tmp_path / "gradients")
    assert outcome.metrics.loss == pytest.approx(forced.loss, rel=1e-6)
    assert_same_gradients(outcome.gradients, forced.gradients)
    agreement, count = outcome.metrics.route_agreement
    assert count == num_routes(forced.batch)
    assert 0.0 < agreement < 0.2, "two of eight experts at random are the router's own once in 28"


def test_the_reference_sees_the_routes(ranks: Pools, model: Path, forced: Forced) -> None:
    plain = ranks(1)(logprobs, config_of(model, PLAIN), forced.batch)[0]
    assert np.abs(plain - forced.logprobs).max() > 0.1, "an option that is off ignores the routes"


@pytest.mark.parametrize("options", [{}, FULL, {"bf16": True}, {"bf16": True, "moe_router_dtype": None}])
def test_tokens_without_routes_are_bit_for_bit_those_of_no_replay(
    options: dict[str, Any], ranks: Pools, model: Path, own: Batch, tmp_path: Path
) -> None:
    """Own routes too: a gather of the scores is the scores."""
    bare = dataclasses.replace(own, routed_experts=np.full_like(routes_in(own), -1))
    plain = config_of(model, {**PLAIN, **options}, learner={"micro_batch_tokens": 40})
    want = run(ranks, 1, plain, bare, tmp_path / "want")
    own = with_routes(own, ranks(1)(chosen, replaying(model, **options), bare)[0])
    for batch, count in ((bare, 0), (own, num_routes(own))):
        got = run(ranks, 1, replaying(model, **options), batch, tmp_path / f"got-{count}")
        assert got.metrics.route_agreement == (float(count > 0), count)
        assert without_agreement(got).metrics == want.metrics
        assert all(torch.equal(got.gradients[name], g) for name, g in want.gradients.items())


def test_routers_that_ask_nobody_train_without_replay(ranks: Pools, model: Path, tmp_path: Path) -> None:
    config = config_of(model, {**PLAIN, "moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.0})
    assert run(ranks, 1, config, batch_of(), tmp_path / "gradients").metrics.loss_tokens


def one_after_another(config: Config, batches: list[Batch]) -> list[np.ndarray]:
    """Log-probs of each batch after an update by the one before it, of weights that do not move."""
    learner = start(config)
    out = []
    for batch in batches:
        out.append(learner.logprobs(batch))
        if batch.routed_experts is not None:
            learner.update(batch)
            hooks = [hook for hooks in learner.replay._hooks.values() for hook in hooks]
            assert all(hook.idle for hook in hooks)
    return out


@pytest.mark.parametrize("layout", ["TP2+SP", "PP2xVPP2"])
@pytest.mark.parametrize("options", [{}, FULL], ids=["kept", "full"])
def test_nothing_leaks_into_the_next_batch(
    layout: str, options: dict[str, Any], ranks: Pools, model: Path, forced: Forced, without: Outcome
) -> None:
    other = random_routes(batch_of(), seed=7)
    batches = [forced.batch, batch_of(), other, forced.batch, batch_of()]
    still = replaying(model, layout, lr=0.0, **options)
    first, bare, second, again, bare_again = ranks(2)(one_after_another, still, batches)[0]
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(bare, bare_again)
    assert np.abs(first - second).max() > 0.1
    want = ranks(2)(logprobs, config_of(model, {**PLAIN, **LAYOUTS[layout][1]}), batch_of())[0]
    np.testing.assert_allclose(bare, want, atol=1e-5)


@pytest.mark.parametrize("layout", ["single", "TP2+SP", "PP2xVPP2", "CP2", "TP2xEP2"])
def test_routes_are_those_of_the_model_at_every_layout(layout: str, ranks: Pools, model: Path, own: Batch) -> None:
    for got in ranks(size_of(layout))(chosen, replaying(model, layout), batch_of()):
        want = np.where(np.arange(NUM_LAYERS)[:, None] == DENSE, -1, routes_in(own))
        np.testing.assert_array_equal(np.sort(got), np.sort(want))


def refusal(config: Config, batch: Batch) -> str:
    with pytest.raises(UserError) as refused:
        start(config).update(batch)
    return str(refused.value)


@pytest.mark.parametrize(
    ("layer", "experts", "reason"),
    [
        (0, [0, 8], r"routes a token to experts \[0, 8\] in layer 0, which has 8"),
        (3, [-1, 2], r"routes a token to experts \[-1, 2\] in layer 3"),
        (2, [0, 0], r"routes a token to experts \[0, 0\] in layer 2"),
    ],
    ids=["beyond", "half", "zeros of a layer that recorded nothing"],
)
def test_what_no_router_can_choose_is_refused(
    layer: int, experts: list[int], reason: str, ranks: Pools, model: Path, own: Batch
) -> None:
    routes_NLK = routes_in(own).copy()
    routes_NLK[own.offsets[5], layer] = experts
    batch = dataclasses.replace(own, routed_experts=routes_NLK)
    assert re.search(reason, ranks(1)(refusal, replaying(model), batch)[0])


def test_routes_of_another_model_are_refused(ranks: Pools, model: Path, own: Batch) -> None:
    batch = dataclasses.replace(own, routed_experts=routes_in(own)[:, :3])
    assert "layers x top-k (3, 2), the student has (4, 2)" in ranks(1)(refusal, replaying(model), batch)[0]


def test_a_batch_without_routes_is_not_trained_on(ranks: Pools, model: Path) -> None:
    assert "has no routed experts" in ranks(1)(refusal, replaying(model), batch_of())[0]

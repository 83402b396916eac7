"""What weight sync sends: every tensor once, in bounded pieces, and a group that keeps nobody waiting."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Pools
from safetensors.torch import load_file
from tiny import LAYOUTS, write_checkpoint

from megatron_mopd.quantization.formats import encode_mxfp4
from megatron_mopd.quantization.packed_layouts import EXPERT

BUCKET_BYTES = 50_000


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3_moe")
    write_checkpoint(folder)
    return folder


def turns(megatron: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Each owner sends in its turn, as in weight sync. Return what this rank sent: names, bytes of the largest bucket
    and of the largest tensor."""
    from megatron_mopd.hf_folder import read_hf_config
    from megatron_mopd.mcore import stream
    from megatron_mopd.mcore.layout import Layout
    from megatron_mopd.mcore.model import build_model
    from megatron_mopd.mcore.parallel import initialize_parallel
    from megatron_mopd.mcore.weights import load_hf
    from megatron_mopd.sglang.sender import buckets

    initialize_parallel(Layout.from_table(megatron), seed=1)
    models = build_model(megatron, read_hf_config(folder))
    load_hf(models, folder)
    want = load_file(folder / "model.safetensors")
    hf_stream = stream.HfStream(models, folder, bucket_bytes=BUCKET_BYTES)
    sent, largest_bucket, largest_tensor = [], 0, 0
    for owner in hf_stream.owners:
        for bucket in buckets(hf_stream.of(owner), BUCKET_BYTES):
            assert torch.distributed.get_rank() == owner
            assert len({tensor.dtype for _, tensor in bucket}) == 1
            assert all(torch.equal(tensor, want[name]) for name, tensor in bucket)
            sent += [name for name, _ in bucket]
            largest_bucket = max(largest_bucket, sum(tensor.nbytes for _, tensor in bucket))
            largest_tensor = max(largest_tensor, *(tensor.nbytes for _, tensor in bucket))
    assert hf_stream.num_bytes(False) == (hf_stream.num_bytes(True).sent,) * 2
    return {
        "names": sent,
        "bucket": largest_bucket,
        "tensor": largest_tensor,
        "bytes": tuple(hf_stream.num_bytes(with_quantized_experts=True)),
    }


@pytest.mark.parametrize("layout", ["TP2xEP2", "PP2", "DP2", "EP2", "TP2xPP2", "TP2xEP2+ETP2"])
def test_owners_in_turn_send_every_tensor_once_in_bounded_buckets(layout: str, ranks: Pools, checkpoint: Path):
    size, megatron = LAYOUTS[layout]
    of_ranks: list[Any] = ranks(size)(turns, megatron, checkpoint)
    names, tensors = [name for rank in of_ranks for name in rank["names"]], load_file(checkpoint / "model.safetensors")
    assert sorted(names) == sorted(tensors)
    packed = [sum(x.nbytes for x in encode_mxfp4(t)) if EXPERT.fullmatch(n) else t.nbytes for n, t in tensors.items()]
    assert {rank["bytes"] for rank in of_ranks} == {(sum(t.nbytes for t in tensors.values()), sum(packed))}
    assert max(rank["bucket"] for rank in of_ranks) <= max(BUCKET_BYTES, *(rank["tensor"] for rank in of_ranks))


def bucket_names(num_bytes: int, *tensors: tuple[str, torch.Tensor]) -> list[list[str]]:
    from megatron_mopd.sglang.sender import buckets

    return [[name for name, _ in bucket] for bucket in buckets(iter(tensors), num_bytes)]


def test_buckets_hold_one_dtype_and_are_bounded(ranks: Pools):
    tensors = [(str(n), torch.zeros(n, dtype=torch.uint8)) for n in (10, 20, 30, 100, 5, 6)]
    tensors.insert(2, ("float", torch.zeros(2)))
    assert ranks(1)(bucket_names, 40, *tensors) == [[["10", "20"], ["float"], ["30"], ["100"], ["5", "6"]]]
    assert ranks(1)(bucket_names, 40) == [[]]


def other_side(host: str, port: int, name: str, size: int) -> Any:
    """As SGLang's init_custom_process_group joins."""
    from torch.distributed import PrefixStore, distributed_c10d, rendezvous  # pyright: ignore

    store, rank, _ = next(rendezvous(f"tcp://{host}:{port}", 1, size))
    group, _ = distributed_c10d._new_process_group_helper(
        size,
        rank,
        [],
        torch.distributed.Backend("gloo"),
        PrefixStore(name, store),
        group_name=distributed_c10d.GroupName(name),
        timeout=distributed_c10d.default_pg_timeout,
    )
    distributed_c10d._world.pg_group_ranks[group] = {i: i for i in range(size)}
    return group


def hang_up() -> tuple[list[int], str]:
    """Rank 0 sends once and hangs up while rank 1 waits for more: what rank 1 got, and the error that it is told."""
    import torch.distributed as dist

    from megatron_mopd.mcore.outer_group import OuterGroup

    box: list[Any] = [None]
    tensor = torch.arange(5) * (1 - dist.get_rank())
    if dist.get_rank() == 0:
        outer = OuterGroup("127.0.0.1", 2, timeout_s=30.0)
        box = [(outer.host, outer.port, outer.name, outer.size)]
        dist.broadcast_object_list(box)
        outer.connect()
        outer.broadcast(tensor)
        outer.close()
        return tensor.tolist(), ""
    dist.broadcast_object_list(box)
    group = other_side(*box[0])
    dist.broadcast(tensor, src=0, group=group)
    try:
        dist.broadcast(torch.zeros(5), src=0, group=group)
    except RuntimeError as error:
        return tensor.tolist(), str(error)
    finally:
        dist.destroy_process_group(group)
    return tensor.tolist(), ""


def test_who_waits_is_told_when_the_sender_hangs_up(ranks: Pools):
    _, (got, message) = ranks(2)(hang_up)
    assert got == [0, 1, 2, 3, 4]
    assert "Connection" in message


def refusal(**info: Any) -> str:
    from megatron_mopd.errors import UserError
    from megatron_mopd.sglang.sender import Server

    usual = {"version": "0.5.23", "dp_size": 1, "pp_size": 1, "tp_size": 2, "device": "cpu", "startup_time": {}}
    try:
        return str(Server.of("http://a:1", usual | info).num_ranks)
    except UserError as error:
        return str(error)


def test_a_server_that_cannot_take_broadcasts_is_refused(ranks: Pools):
    assert ranks(1)(refusal) == ["2"]
    (message,) = ranks(1)(partial(refusal, dp_size=2))
    assert message.startswith("http://a:1 has dp_size=2, pp_size=1; with sglang.weight_transport=distributed")
    (message,) = ranks(1)(partial(refusal, version=None))  # another program answers there
    assert message.startswith("server http://a:1 is SGLang None")
    (message,) = ranks(1)(partial(refusal, device="cuda"))
    assert message.startswith("http://a:1 computes on cuda, the trainer on cpu; set sglang.weight_transport=disk")

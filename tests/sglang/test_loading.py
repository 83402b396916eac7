"""Weights are loaded whatever was asked of the server a moment ago."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from running import Server

from megatron_mopd.client import Client
from megatron_mopd.errors import UserError
from megatron_mopd.quantization.packed_folder import export_packed
from megatron_mopd.sglang.checksum import read_checksums
from megatron_mopd.sglang.weights import load_folder, read_version

pytestmark = pytest.mark.sglang

NUM_LOADS = 40
SCORED = {
    "input_ids": [list(range(1, 60))] * 4,
    "sampling_params": {"max_new_tokens": 0},
    "return_logprob": True,
    "logprob_start_len": [0] * 4,
}
LONG = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}, "stream": True}


@asynccontextmanager
async def loading(student: Server) -> AsyncIterator[tuple[Client, Callable[[str], Awaitable[Any]]]]:
    async with Client(60.0) as client:
        yield client, lambda version: load_folder(client, student.url, student.checkpoint, version)


def test_a_server_that_has_just_replied_can_be_loaded(student: Server) -> None:
    async def body() -> None:
        async with loading(student) as (client, load):
            for i in range(NUM_LOADS):
                await client.post(student.url, "/generate", SCORED)
                await load(f"after-{i}")
                assert await read_version(client, student.url) == f"after-{i}"

    asyncio.run(body())


def test_what_callers_have_given_up_does_not_hold_up_a_load(student: Server) -> None:
    async def body() -> None:
        async with loading(student) as (client, load):
            async with aclosing(client.stream(student.url, "/generate", LONG)) as replies:
                await anext(replies)
                await load("under-it")  # it is still listened to, as by a caller that hangs
            assert await read_version(client, student.url) == "under-it"

    asyncio.run(body())


def test_packed_experts_are_refused_as_a_server_would_keep_its_old_ones(
    student: Server, checkpoints: list[Path], tmp_path: Path
) -> None:
    """It says that it serves the new version, with the experts of another model. Where this fails, a newer SGLang loads
    what is packed, and weight sync may send it."""
    packed = export_packed(checkpoints[1], tmp_path / "packed").folder

    async def body() -> None:
        async with loading(student) as (client, load):
            await load("plain")
            with pytest.raises(UserError, match=r"packed MXFP4 experts over others; .*import_mxfp4 .* OUT"):
                await load_folder(client, student.url, packed, "packed")
            assert await read_version(client, student.url) == "plain"
            (before,) = (await read_checksums(client, student.url)).ranks
            body = {"model_path": str(packed), "flush_cache": True, "weight_version": "packed"}
            await client.post(student.url, "/update_weights_from_disk", body)
            assert await read_version(client, student.url) == "packed"
            (after,) = (await read_checksums(client, student.url)).ranks
            kept = {name for name, checksum in before.items() if after[name] == checksum}
            assert kept == {name for name in before if ".mlp.experts." in name}
            await load("plain again")

    asyncio.run(body())

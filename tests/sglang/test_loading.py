"""Weights are loaded whatever was asked of the server a moment ago."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
from running import Server

from megatron_mopd.client import Client
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

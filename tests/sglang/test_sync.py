"""Weight sync: what the server serves is what the trainer has, after every update, by both transports.

The trainer's ranks are gloo processes (tests/ranks.py); the server is the session's, the same from first to last. The
judge is the embedded engine on the folder that the trainer exported of the same step.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sync_cases
from conftest import Server, StartServers
from ranks import Pools
from safetensors.torch import load_file, save_file
from tiny import LAYOUTS, VOCAB_SIZE

from megatron_mopd.client import Client
from megatron_mopd.config import Config
from megatron_mopd.errors import UserError
from megatron_mopd.sglang import weights
from megatron_mopd.sglang.placement import INITIAL_VERSION
from megatron_mopd.sglang.weights import PARTIAL_VERSION, check_folder, load_folder, read_version, version_name

pytestmark = pytest.mark.sglang

NEW_TOKENS = 12
PROMPTS = [[int(t) for t in np.random.default_rng(i).integers(0, VOCAB_SIZE, 20 + 5 * i)] for i in range(6)]


@dataclass(frozen=True)
class Sample:
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached_tokens: int = 0
    weight_version: str = ""


def call(function: Any, *args: Any) -> Any:
    """`await function(client, *args)`."""

    async def run() -> Any:
        async with Client(60.0) as client:
            return await function(client, *args)

    return asyncio.run(run())


async def greedy(client: Client, url: str) -> list[Sample]:
    """What the server says to PROMPTS."""

    async def one(prompt: list[int]) -> Sample:
        parameters = {"max_new_tokens": NEW_TOKENS, "temperature": 0.0, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": parameters, "return_logprob": True}
        reply = await client.post(url, "/generate", body)
        info = reply["meta_info"]
        tokens = info["output_token_logprobs"]
        return Sample(
            tuple(t[1] for t in tokens), tuple(t[0] for t in tokens), info["cached_tokens"], info["weight_version"]
        )

    return await asyncio.gather(*(one(prompt) for prompt in PROMPTS))


def embedded(folder: Path) -> list[Sample]:
    """What the embedded engine says to them with the weights of the folder."""
    from megatron_mopd.embedded.engine import EmbeddedEngine
    from megatron_mopd.protocols import SampleRequest

    async def run() -> list[Sample]:
        engine = EmbeddedEngine(folder, seed=0, top_p=1e-9)  # the first token of the sorted ones, and no other
        requests = [SampleRequest(str(i), tuple(p), NEW_TOKENS, ()) for i, p in enumerate(PROMPTS)]
        segments = await asyncio.gather(*(engine.generate(request) for request in requests))
        await engine.close()
        return [Sample(s.token_ids, s.logprobs) for s in segments]

    return asyncio.run(run())


def assert_serves(url: str, folder: Path, version: str) -> list[Sample]:
    """The version, every tensor, and what is generated are those of the folder, with nothing cached from before."""
    assert call(read_version, url) == version
    call(check_folder, url, folder)
    served = call(greedy, url)
    for ours, reference in zip(served, embedded(folder), strict=True):
        assert ours.token_ids == reference.token_ids
        np.testing.assert_allclose(ours.logprobs, reference.logprobs, atol=1e-4, rtol=0)
        assert (ours.cached_tokens, ours.weight_version) == (0, version)
    return served


def trainer_config(server: Server, layout: str, **sglang: Any) -> Config:
    """Of a trainer in the layout whose student servers are that one, unless `sglang` says otherwise."""
    tree = server.config.model_dump(mode="json")
    tree["rollout"]["router_replay"] = False
    tree["megatron"] = {"lr": 1e-2, **LAYOUTS[layout][1]}
    tree["sglang"] = tree["sglang"] | sglang
    return Config.model_validate(tree)


@pytest.fixture
def server(student: Server) -> Iterator[Server]:
    yield student
    call(load_folder, student.url, student.checkpoint, INITIAL_VERSION)


@pytest.mark.parametrize(
    ("layout", "transport", "steps"),
    [
        ("TP2xEP2", "distributed", range(1, 7)),
        ("PP2", "distributed", range(11, 15)),
        ("PP2", "disk", range(21, 25)),
        ("TP2xEP2", "disk", range(31, 37)),
    ],
)
def test_server_serves_each_update(
    layout: str, transport: str, steps: Sequence[int], server: Server, ranks: Pools, tmp_path: Path
):
    config, pool = trainer_config(server, layout), ranks(2)
    before = call(greedy, server.url)
    assert max(sample.cached_tokens for sample in call(greedy, server.url)) > 0, "the server caches nothing"
    source = server.checkpoint
    for step in steps:
        folder = tmp_path / str(step)
        pool(sync_cases.update, config, step, source, folder, transport == "distributed")
        version = version_name(str(config.run.folder.absolute()), step)
        if transport == "disk":
            call(load_folder, server.url, folder, version)
        served = assert_serves(server.url, folder, version)
        assert [s.logprobs for s in served] != [s.logprobs for s in before]
        source, before = folder, served
    pool(sync_cases.finish)


@pytest.mark.timeout(600)  # it starts a server, and one at a time starts on a machine
def test_servers_that_hang_or_die_in_the_middle_are_left_out(
    server: Server, start_servers: StartServers, ranks: Pools, tmp_path: Path
):
    """Each time the other one gets everything; who comes back gets the next version, through new groups.

    That a server that was started again does, too, is shown in test_loop.py.
    """
    pool = ranks(2)
    with start_servers(tmp_path / "run") as other:
        url, group = other.urls["student-0"], other.pid("student-0")
        assert group is not None
        urls = [server.url, url]
        config = trainer_config(server, "TP2xEP2", student={"urls": urls}, request_timeout_s=10.0)

        def serve(step: int) -> list[str]:
            return [u for u in urls if call(read_version, u) == version_name(str(config.run.folder.absolute()), step)]

        assert pool(sync_cases.publish, config, 41)[0] == 0
        assert serve(41) == urls
        assert pool(sync_cases.publish, config, 42, (group, signal.SIGSTOP))[0] == 1
        os.killpg(group, signal.SIGCONT)
        assert serve(42) == [server.url]
        assert call(read_version, url) == PARTIAL_VERSION
        assert pool(sync_cases.publish, config, 43)[0] == 0
        assert serve(43) == urls
        for each in urls:
            assert_serves(each, server.checkpoint, version_name(str(config.run.folder.absolute()), 43))
        assert pool(sync_cases.publish, config, 44, (group, signal.SIGKILL))[0] == 1
        assert_serves(server.url, server.checkpoint, version_name(str(config.run.folder.absolute()), 44))
        pool(sync_cases.finish)


def test_broadcast_without_a_server_is_refused(server: Server, ranks: Pools):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        config = trainer_config(server, "PP2", student={"urls": [url]}, start_timeout_s=1.0)
        for message in ranks(2)(sync_cases.refusal, config):
            assert f"no server took the weights within 1 s: {url} is down" in message


def test_check_names_what_is_not_served(server: Server, tmp_path: Path):
    tensors = load_file(server.checkpoint / "model.safetensors")
    tensors["model.layers.2.mlp.experts.5.up_proj.weight"][3, 4] += 1e-3
    tensors["model.norm.bias"] = tensors["model.norm.weight"].clone()
    del tensors["model.layers.0.self_attn.q_norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError) as error:
        call(check_folder, server.url, tmp_path)
    assert str(error.value) == (
        f"server {server.url} does not serve the weights of {tmp_path}: "
        "model.layers.2.mlp.experts.w13_weight differs; "
        "model.layers.0.self_attn.q_norm.weight is of no tensor in the folder; model.norm.bias is not in the server"
    )


def test_load_says_what_is_wrong(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    torn = tmp_path / "torn"
    shutil.copytree(server.checkpoint, torn)
    os.truncate(torn / "model.safetensors", 100_000)
    with pytest.raises(UserError, match=r"has 100000 bytes, its header says"):
        call(load_folder, server.url, torn, "v")
    monkeypatch.setattr(weights, "check_weight_files", lambda folder, key: None)  # only this machine sees the folder
    monkeypatch.setattr(weights, "read_hf_config", lambda folder, key: {})
    with pytest.raises(UserError, match=f"server {server.url} could not load {tmp_path}/elsewhere.*Failed to get"):
        call(load_folder, server.url, tmp_path / "elsewhere", "v")
    assert call(read_version, server.url) == INITIAL_VERSION

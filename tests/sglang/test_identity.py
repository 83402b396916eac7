"""Is it the right server? Real servers, and one that is no SGLang."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Awaitable, Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from running import Server
from safetensors.torch import load_file, save_file
from tiny import VOCAB_SIZE, write_checkpoint

from megatron_mopd.client import Client
from megatron_mopd.errors import UserError
from megatron_mopd.sglang.identity import (
    BROADCAST,
    LOADING,
    SAMPLING,
    SCORING,
    check_server,
    check_weights,
    first_difference,
)
from megatron_mopd.sglang.weights import load_folder, read_version

pytestmark = pytest.mark.sglang

Result = TypeVar("Result")


def ask(question: Callable[[Client], Awaitable[Result]]) -> Result:
    async def body() -> Result:
        async with Client(30) as client:
            return await question(client)

    return asyncio.run(body())


def difference(server: Server, folder: Path) -> str | None:
    return ask(lambda client: first_difference(client, server.url, folder))


def edited(folder: Path, new: Path, **changes: Any) -> Path:
    """A copy of the checkpoint with another config.json."""
    shutil.copytree(folder, new)
    config = json.loads((folder / "config.json").read_text())
    (new / "config.json").write_text(json.dumps(config | changes))
    return new


def with_one_other_bit(folder: Path, new: Path, name: str) -> Path:
    shutil.copytree(folder, new)
    tensors = load_file(folder / "model.safetensors")
    flat = tensors[name].view(-1)
    flat[-1] = torch.nextafter(flat[-1], torch.tensor(torch.inf))
    save_file(tensors, new / "model.safetensors", metadata={"format": "pt"})
    return new


@pytest.fixture(scope="module")
def server(student: Server) -> Iterator[Server]:
    """The server of the session, with its weights at the beginning and at the end."""

    def load() -> None:
        ask(lambda client: load_folder(client, student.url, student.checkpoint, "identity"))

    load()
    yield student
    load()


@pytest.fixture(scope="module")
def no_sglang() -> Iterator[str]:
    """URL of a server that answers everything with an empty page."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Page) as page:
        thread = threading.Thread(target=page.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{page.server_port}"
        page.shutdown()
        thread.join()


def test_the_right_server_is_accepted_and_left_as_it_was(server: Server) -> None:
    async def look(client: Client) -> None:
        endpoints = SCORING + LOADING + SAMPLING + BROADCAST
        facts = await check_server(client, server.url, server.checkpoint, endpoints=endpoints, min_input_tokens=8000)
        assert 8000 <= facts.max_input_tokens < 8192
        assert facts.prefill_tokens > 0
        await check_weights(client, server.url, server.checkpoint, "student")
        assert await read_version(client, server.url) == "identity"

    ask(look)


def test_nine_teachers_of_one_architecture_are_told_apart_wherever_their_folders_are(
    server: Server, tmp_path: Path
) -> None:
    folders = [tmp_path / f"{seed}" for seed in range(9)]
    for seed, folder in enumerate(folders):
        write_checkpoint(folder, 100 + seed, mlp_only_layers=[])
    for i, folder in enumerate(folders):
        elsewhere = shutil.copytree(folder, tmp_path / f"loaded{i}")
        ask(lambda client, elsewhere=elsewhere: load_folder(client, server.url, elsewhere, "any"))
        assert [difference(server, other) is None for other in folders] == [other == folder for other in folders]
    with pytest.raises(UserError, match=r"does not hold the weights of teacher t0: model\.layers\.0\.\S+ differs"):
        ask(lambda client: check_weights(client, server.url, folders[0], "teacher t0"))
    ask(lambda client: load_folder(client, server.url, server.checkpoint, "identity"))


@pytest.mark.parametrize(
    "name",
    [
        "model.norm.weight",
        "model.layers.2.mlp.gate.weight",
        "model.layers.3.self_attn.k_norm.weight",
        "model.layers.3.self_attn.o_proj.weight",
    ],
)
def test_one_other_bit_is_named(server: Server, tmp_path: Path, name: str) -> None:
    """Such as an attention output that training has moved while it left norms and routers as they were."""
    assert difference(server, with_one_other_bit(server.checkpoint, tmp_path / "other", name)) == name


def test_a_layer_that_the_checkpoint_does_not_have_is_named(server: Server, tmp_path: Path) -> None:
    """SGLang makes a layer of experts where this checkpoint has a dense one."""
    folder = edited(server.checkpoint, tmp_path / "other")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.gate.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert difference(server, folder) == "model.layers.1.mlp.gate.weight"


def refusal(server: Server, url: str, folder: Path | None = None, **needs: Any) -> str:
    with pytest.raises(UserError) as caught:
        ask(lambda client: check_server(client, url, folder or server.checkpoint, **needs))
    return str(caught.value)


def test_each_kind_of_wrong_server_has_its_line(server: Server, no_sglang: str, tmp_path: Path) -> None:
    url = server.url
    assert "is not a URL such as" in refusal(server, "127.0.0.1:30000")
    assert f"{no_sglang} has no /generate; start SGLang 0.5.23 or newer" in refusal(server, no_sglang)
    assert f"{url} has no /reflect" in refusal(server, url, endpoints=("/reflect",))
    assert "with incremental_streaming_output=True; start it with incremental_streaming_output=False" in refusal(
        server, url, arguments={"incremental_streaming_output": False}
    )
    too_long = refusal(server, url, min_input_tokens=9000)
    assert "this run needs 9000; raise its context_length or max_total_tokens" in too_long
    llama = edited(server.checkpoint, tmp_path / "llama", architectures=["LlamaForCausalLM"])
    assert "serves a ['Qwen3MoeForCausalLM']" in refusal(server, url, llama)
    small = edited(server.checkpoint, tmp_path / "small", vocab_size=VOCAB_SIZE - 1)
    assert f"has a vocabulary of {VOCAB_SIZE} tokens, {small} of {VOCAB_SIZE - 1}" in refusal(server, url, small)

"""The weights of one SGLang server: loaded from a folder, read back by name, proven to be those of a folder.

A weight version is a name (`version_name`), so that version 3 of another run is not taken for ours. The server stamps
it on everything it generates.

Promises (tests/sglang/test_sync.py): `load_folder` returns only when the server says that it serves the version; after
an error it is unknown what the server serves, and no caller may use it. `check_folder` accepts a server only if every
one of its parameters is the hash of tensors of the folder, and every tensor of the folder is in one of them.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_mopd.client import Client, RequestRefused
from megatron_mopd.config import Config
from megatron_mopd.errors import UserError
from megatron_mopd.hf_folder import check_weight_files, read_hf_config
from megatron_mopd.quantization.policy import packs_mxfp4
from megatron_mopd.sglang.supported import PACKED_STAYS

if TYPE_CHECKING:
    from torch import Tensor

_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.(?P<index>\d+)\.(?P<part>gate|up|down)_proj\.weight")
_EXPERT_PARTS = {"gate": ("w13_weight", 0), "up": ("w13_weight", 1), "down": ("w2_weight", 0)}
_PROJECTION = re.compile(r"(?P<module>.*\.)(?P<part>q|k|v|gate|up)_proj\.(?P<kind>weight|bias)")
_PROJECTION_PARTS = {
    "q": ("qkv_proj", 0),
    "k": ("qkv_proj", 1),
    "v": ("qkv_proj", 2),
    "gate": ("gate_up_proj", 0),
    "up": ("gate_up_proj", 1),
}
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
_VOCABULARY_ROWS = 64
"""SGLang pads these with zeros to a multiple of so many rows."""

PARTIAL_VERSION = "partial"
"""Of a server that is being given weights in parts: if that breaks off, it must not be taken for what it was."""

_IDLE_S = 30.0
"""How long a server may take to end what was aborted."""

Place = tuple[int, int]
"""Of a Hugging Face tensor in a parameter of the server: (expert, part of the fusion)."""


def version_name(run: str, version: int) -> str:
    """What a server is told to call the weights of this version; `run` is one of the two names below."""
    return f"{run}@{version}"


def trained_name(config: Config) -> str:
    """Of weights that the trainer hands over: the run, and the values that are served of them, as a run may go on with
    another rule."""
    run, quantization = str(config.run.folder.absolute()), config.quantization
    return run if quantization.experts == "none" else f"{run}+{quantization.experts}-{quantization.rule}"


def sampled_name(config: Config) -> str:
    """Of folders that are only sampled, by a gate or an evaluation: of no other call, whatever a server that is kept
    still has of one. The student's own checkpoint is no step 0: trainers quantize it."""
    return f"{config.run.folder.absolute()}+{uuid.uuid4().hex[:8]}"


async def read_version(client: Client, url: str) -> str:
    """The name of the weights that the server serves: placement.INITIAL_VERSION until it is given others."""
    return str((await client.get(url, "/model_info"))["weight_version"])


async def load_folder(client: Client, url: str, folder: Path, version: str, forget: bool = True) -> None:
    """Make the server serve the Hugging Face folder, which it must see under the same path, as `version`.

    What it is generating is aborted. With `forget` its prefix cache is emptied. Raises UserError where it cannot,
    EndpointDown where it dies. SGLang says "Rolling back to original weights" and reads the new folder again: after
    an error the server must be started anew or loaded again before it is used.
    """
    check_weight_files(folder, "weights")  # SGLang dies of a file that is cut short
    if packs_mxfp4(read_hf_config(folder, "weights")):
        raise UserError(f"server {url} cannot take the weights of {folder}: {PACKED_STAYS} {folder} OUT")
    body = {"model_path": str(folder.absolute()), "flush_cache": forget, "weight_version": version}
    try:
        await _become_idle(client, url, forget)
        await client.post(url, "/update_weights_from_disk", body)
    except RequestRefused as error:
        raise UserError(
            f"server {url} could not load {folder}, and what it serves now is unknown: {error}; "
            "all machines must see this folder, and the server must be started on a model of the same shape"
        ) from None
    await check_version(client, url, version)


async def _become_idle(client: Client, url: str, forget: bool) -> None:
    """A request stays in the scheduler for a moment after its reply, longer where its caller has given it up. SGLang
    would load under it, and then fail because it cannot empty the cache."""
    await client.post(url, "/abort_request", {"abort_all": True})
    if forget:
        await client.post(url, f"/flush_cache?timeout={_IDLE_S:g}", {})


async def check_version(client: Client, url: str, version: str) -> None:
    """Raises UserError where the server serves another version than the one it was just given."""
    if (served := await read_version(client, url)) != version:
        raise UserError(f"server {url} serves {served!r} after it was given {version!r}; does another run use it?")


async def begin_update(client: Client, url: str) -> None:
    """Stop generating, and make the server ready to be given weights in parts.

    Requests that are running go back to its queue; they are computed again from their tokens by the new weights.
    """
    await client.post(url, "/pause_generation", {"mode": "retract"})
    await _name(client, url, PARTIAL_VERSION)
    try:
        await client.post(url, "/begin_weight_update", {})
    except RequestRefused:  # an update that broke off left it open
        await client.post(url, "/end_weight_update", {})
        await client.post(url, "/begin_weight_update", {})


async def end_update(client: Client, url: str, version: str, forget: bool = True) -> None:
    """All parts are there: forget what the old weights computed, and generate again, under the new version."""
    await client.post(url, "/end_weight_update", {})
    if forget:
        await client.post(url, "/flush_cache", {})
    await _name(client, url, version)
    await check_version(client, url, version)
    await client.post(url, "/continue_generation", {})


async def _name(client: Client, url: str, version: str) -> None:
    await client.post(url, "/update_weight_version", {"new_version": version, "abort_all_requests": False})


async def check_folder(client: Client, url: str, folder: Path) -> None:
    """Compare a checksum of every parameter of the server with the one that the folder gives. Slow: for debugging.

    Needed where it matters: SGLang takes tensors of a wrong shape or an unknown name without a word. Raises UserError
    that names what differs, what the server did not get from the folder, and what it has no use for.
    Knows the fused layout of servers with one rank and the default kernels of SGLang's experts.
    """
    from megatron_mopd.sglang.checksum import read_checksums

    served = await read_checksums(client, url)
    if len(served.ranks) != 1:
        raise UserError(
            f"sglang.check_weights needs servers with one rank, {url} has {len(served.ranks)}; "
            "set sglang.check_weights=false"
        )
    tensors = Tensors(folder)
    expected = parameters_of_server(tensors.names)
    differs = [
        name
        for name, parts in expected.items()
        if name in served.ranks[0] and served.of(_fused(name, parts, tensors)) != served.ranks[0][name]
    ]
    problems = [
        *(f"{name} differs" for name in differs),
        *(f"{name} is of no tensor in the folder" for name in sorted(served.ranks[0].keys() - expected.keys())),
        *(
            f"{next(iter(expected[name].values()))} is not in the server"
            for name in sorted(expected.keys() - served.ranks[0].keys())
        ),
    ]
    if problems:
        more = f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise UserError(f"server {url} does not serve the weights of {folder}: {'; '.join(problems[:4])}{more}")


def parameters_of_server(hf_names: Iterable[str]) -> dict[str, dict[Place, str]]:
    """SGLang's parameters, and for each the Hugging Face tensors that it fuses, in the order of their places."""
    parameters: dict[str, dict[Place, str]] = {}
    for hf_name in hf_names:
        name, place = _place(hf_name)
        parameters.setdefault(name, {})[place] = hf_name
    return {name: dict(sorted(parts.items())) for name, parts in parameters.items()}


def _place(hf_name: str) -> tuple[str, Place]:
    if match := _EXPERT.fullmatch(hf_name):
        fused, part = _EXPERT_PARTS[match["part"]]
        return f"{match['experts']}.{fused}", (int(match["index"]), part)
    if match := _PROJECTION.fullmatch(hf_name):
        fused, part = _PROJECTION_PARTS[match["part"]]
        return f"{match['module']}{fused}.{match['kind']}", (0, part)
    return hf_name, (0, 0)


def _fused(name: str, parts: Mapping[Place, str], tensors: Tensors) -> Tensor:
    """The parameter as a server with one rank holds it."""
    import torch

    by_expert: dict[int, list[Tensor]] = {}
    for (expert, _), hf_name in parts.items():
        by_expert.setdefault(expert, []).append(tensors[hf_name])
    fused = [torch.cat(of_expert) for of_expert in by_expert.values()]
    if name.endswith(("w13_weight", "w2_weight")):
        return torch.stack(fused)
    (tensor,) = fused
    if name in _VOCABULARY:
        tensor = torch.nn.functional.pad(tensor, (0, 0, 0, -len(tensor) % _VOCABULARY_ROWS))
    return tensor


class Tensors:
    """Single tensors of a Hugging Face folder, by name."""

    def __init__(self, folder: Path):
        from safetensors import safe_open

        files = [safe_open(file, framework="pt") for file in sorted(folder.glob("*.safetensors"))]
        self._file_of = {name: file for file in files for name in file.keys()}  # noqa: SIM118  (no mapping)
        self.names = sorted(self._file_of)

    def __getitem__(self, name: str) -> Tensor:
        return self._file_of[name].get_tensor(name)

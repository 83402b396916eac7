"""Is it the right server? Asked before the first request, and again each time that a server came back.

Promises (tests/sglang/test_identity.py): whatever is wrong is one UserError that names the server and what to change; a
server of other weights is refused whatever folder it loaded them from and however many ranks it has, because hashes of
its tensors are compared with the checkpoint's; nothing on the server changes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_mopd.client import Client, RequestRefused
from megatron_mopd.errors import UserError
from megatron_mopd.hf_folder import read_hf_config

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_mopd.sglang.checksum import ServerChecksums

OLDEST = (0, 5, 23)
SCORING = ("/generate", "/server_info", "/model_info", "/weights_checker")
"""Endpoints that every server needs; one that loads weights needs the next too."""
LOADING = ("/update_weights_from_disk",)
SAMPLING = ("/abort_request", "/pause_generation", "/continue_generation", "/flush_cache")
BROADCAST = (
    "/init_weights_update_group",
    "/destroy_weights_update_group",
    "/begin_weight_update",
    "/end_weight_update",
    "/update_weights_from_distributed",
)
PROBE_SILENCE_S = 10.0
"""Longer silence on a question that takes no time means that nobody is there."""
_NO_TOKEN = (1 << 31) - 1
_VOCABULARY_REFUSAL = re.compile(r"valid range is \[0, (\d+)\)")
_SMALL = re.compile(r".*(norm|\.gate|\.router|e_score_correction_bias)(\.weight|\.bias)?")
"""Norms and routers: every rank has them whole, no server fuses them."""
_ATTENTION_OUTPUT = re.compile(r".*\.o_proj\.weight")
"""Split over columns by tensor parallelism. Training moves it even where it leaves norms as they were."""
_SCALES = ("_scale", "_scale_inv")
"""Names of a checkpoint whose projections are quantized."""


@dataclass(frozen=True)
class ServerFacts:
    """What requests to this server must respect."""

    max_input_tokens: int
    prefill_tokens: int
    """Prompt tokens that it takes up in one pass."""


async def check_server(
    client: Client,
    url: str,
    checkpoint: Path,
    *,
    endpoints: Iterable[str] = SCORING,
    arguments: Mapping[str, Any] | None = None,
    min_input_tokens: int = 1,
) -> ServerFacts:
    """The server is an SGLang that this project can talk to, of the checkpoint's shape.

    `arguments` are ServerArgs that it must have been started with. Raises UserError, or EndpointDown where it is gone.
    """
    info = await client.get(url, "/server_info", PROBE_SILENCE_S)  # its scheduler answers it
    await _check_endpoints(client, url, endpoints)
    check_version(url, info)
    for name, value in (arguments or {}).items():
        if info.get(name) != value:
            raise UserError(f"server {url} was started with {name}={info.get(name)}; start it with {name}={value}")
    await _check_architecture(client, url, checkpoint)
    max_input_tokens = min(info["max_req_input_len"], info["max_total_num_tokens"]) - 1
    if max_input_tokens < min_input_tokens:
        raise UserError(
            f"server {url} takes at most {max_input_tokens} tokens, this run needs {min_input_tokens}; "
            "raise its context_length or max_total_tokens, or lower rollout.max_response_tokens"
        )
    chunk = info["chunked_prefill_size"] or 0
    prefill_tokens = chunk if chunk > 0 else info["max_prefill_tokens"]
    return ServerFacts(max_input_tokens, prefill_tokens * info["dp_size"])


async def check_weights(client: Client, url: str, checkpoint: Path, what: str) -> None:
    """Raise UserError, which names the first tensor that differs, unless the server holds the weights of `checkpoint`.

    `what` says whose they should be. Compared are norms, routers and two attention outputs, in the dtype in which the
    server holds them: what no server fuses (of quantized ones, norms and routers alone). A checkpoint that differs in
    its experts or embeddings alone is not seen.
    """
    if name := await first_difference(client, url, checkpoint):
        raise UserError(
            f"server {url} does not hold the weights of {what}: {name} differs from {checkpoint}; "
            "check the URL, or start the server on this checkpoint"
        )


async def first_difference(client: Client, url: str, checkpoint: Path) -> str | None:
    """The name of the first tensor that differs between server and checkpoint."""
    from megatron_mopd.sglang.checksum import read_checksums
    from megatron_mopd.sglang.weights import Tensors

    served = await read_checksums(client, url, skip=("experts",))
    tensors = Tensors(checkpoint)
    of_checkpoint, of_server = set(tensors.names), {name for rank in served.ranks for name in rank}
    common = _fingerprint(of_checkpoint & of_server)
    if served.quantized or any(name.endswith(_SCALES) for name in of_checkpoint):
        common = [name for name in common if _SMALL.fullmatch(name)]
    if not common:
        raise UserError(f"server {url} has no tensor of {checkpoint}; start it on a checkpoint of this architecture")
    extra = [name for name in sorted(of_server - of_checkpoint) if _SMALL.fullmatch(name)]
    return next((name for name in common if not _is_served(served, name, tensors[name])), *extra[:1] or [None])


def _fingerprint(names: Iterable[str]) -> list[str]:
    """Those that are compared: of two attention outputs one is in the first and one in the last stage of a pipeline."""
    names = sorted(names, key=lambda name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)])
    outputs = [name for name in names if _ATTENTION_OUTPUT.fullmatch(name)]
    return [name for name in names if _SMALL.fullmatch(name)] + outputs[:1] + outputs[1:][-1:]


def _is_served(served: ServerChecksums, name: str, tensor: Tensor) -> bool:
    """Ranks that hold the same part have the same hash, so the number of hashes is the number of parts.

    Servers keep some routers in float32 whatever dtype they were started with, and not all say what "auto" was.
    """
    import torch

    hashes = {rank[name] for rank in served.ranks if name in rank}
    parts = tensor.chunk(len(hashes), dim=tensor.ndim - 1)
    dtypes = (served.dtype, torch.float32, torch.bfloat16, torch.float16)
    return any({served.of(part, dtype) for part in parts} == hashes for dtype in dtypes)


async def _check_endpoints(client: Client, url: str, endpoints: Iterable[str]) -> None:
    description = await client.get(url, "/openapi.json")
    paths = description["paths"] if isinstance(description, dict) and "paths" in description else {}
    for path in endpoints:
        if path not in paths:
            raise UserError(f"server {url} has no {path}; start SGLang 0.5.23 or newer there")


def check_version(url: str, info: object) -> None:
    """Raise UserError unless `info` is the /server_info of an SGLang that this project knows."""
    version = str(info.get("version")) if isinstance(info, dict) else "unknown"
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    if numbers < OLDEST:
        raise UserError(f"server {url} is SGLang {version}; this project needs {'.'.join(map(str, OLDEST))} or newer")


async def _check_architecture(client: Client, url: str, checkpoint: Path) -> None:
    config = read_hf_config(checkpoint)
    served = (await client.get(url, "/model_info"))["architectures"]
    if served != config["architectures"]:
        raise UserError(f"server {url} serves a {served}, {checkpoint} is a {config['architectures']}; check the URL")
    vocab_size = await _vocab_size(client, url)
    if vocab_size != config["vocab_size"]:
        raise UserError(
            f"server {url} has a vocabulary of {vocab_size} tokens, {checkpoint} of {config['vocab_size']}; "
            "check the URL"
        )


async def _vocab_size(client: Client, url: str) -> int:
    """No endpoint tells it, but the refusal of a token that cannot exist does; it never reaches the model."""
    body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 0}, "token_ids_logprob": [_NO_TOKEN]}
    try:
        await client.post(url, "/generate", body | {"return_logprob": True})
    except RequestRefused as refusal:
        if match := _VOCABULARY_REFUSAL.search(str(refusal)):
            return int(match[1])
    raise UserError(f"server {url} does not tell the size of its vocabulary; start SGLang 0.5.23 or newer there")

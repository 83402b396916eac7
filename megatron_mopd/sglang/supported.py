"""Checkpoints that SGLang would serve wrongly without a word, and routed experts that it would get wrong."""

from __future__ import annotations

from pathlib import Path

from megatron_mopd.config import Config
from megatron_mopd.errors import UserError
from megatron_mopd.hf_folder import read_hf_config
from megatron_mopd.quantization.policy import packs_mxfp4
from megatron_mopd.sglang.placement import student_servers, teacher_servers

ALL_SPARSE = ("Qwen3MoeForCausalLM", "Qwen2MoeForCausalLM")
"""SGLang's models/qwen3_moe.py and qwen2_moe.py make every layer a layer of experts, and leave those of a layer that is
dense in the checkpoint as the memory was."""


COSMETIC = {
    *("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "initializer_range"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "attention_dropout", "output_router_logits"),
    *("router_aux_loss_coef", "max_position_embeddings"),
}
"""Of config.json: what changes no log-prob."""


LOSES_ROUTES = "enable_hierarchical_cache"
"""SGLang 0.5.23 records routes by the slot of a token's cache. A token that comes back from the host gets another slot,
and the routes of whatever was there before."""
PACKED_STAYS = (
    "a running SGLang does not load packed MXFP4 experts over others; name plain weights with the same values: "
    "python -m checkpoints_conversion.import_mxfp4"
)
"""SGLang 0.5.23 lays out packed weights for its kernels once they are loaded, and writes later ones into what that has
left of the names, without a word."""


def check_checkpoints(config: Config) -> None:
    """Raise UserError for the first checkpoint of the configuration that SGLang servers, wherever they are, would get
    wrong."""
    if config.rollout.engine == "sglang":
        _check(config.student.checkpoint, "student.checkpoint", "rollout.engine")
        _check_routes(config)
    for i, teacher in enumerate(config.teachers.models):
        if teacher in config.teachers.on("sglang"):
            _check(teacher.checkpoint, f"teachers.models.{i} ({teacher.name})", "teachers.backend")
    _check_shared_servers(config)


def _check_routes(config: Config) -> None:
    student = {**config.sglang.server, **config.sglang.student.server}
    if config.rollout.router_replay and student_servers(config) and student.get(LOSES_ROUTES):
        raise UserError(
            f"sglang: with {LOSES_ROUTES} SGLang mixes up the routed experts of tokens whose cache was on the host; "
            f"set sglang.student.server.{LOSES_ROUTES}=false, or turn rollout.router_replay off"
        )


def _check_shared_servers(config: Config) -> None:
    """A server keeps the config.json that it was started with when it loads the weights of another teacher."""
    checkpoints = {teacher.name: teacher.checkpoint for teacher in config.teachers.models}
    first_of: dict[str, str] = {}
    for teacher, (server, *_) in teacher_servers(config).items():
        first = first_of.setdefault(server, teacher)
        ours, theirs = read_hf_config(checkpoints[first]), read_hf_config(checkpoints[teacher])
        for key in sorted((ours.keys() | theirs.keys()) - COSMETIC):
            if ours.get(key) != theirs.get(key):
                raise UserError(
                    f"teachers {first} and {teacher} share a server, but their config.json differ in {key}: "
                    f"{ours.get(key)!r} and {theirs.get(key)!r}; set sglang.teachers.num_servers=null for one each"
                )
        if first != teacher and packs_mxfp4(ours):
            raise UserError(
                f"teachers {first} and {teacher} share a server; set sglang.teachers.num_servers=null for one each, as "
                f"{PACKED_STAYS} {checkpoints[teacher]} OUT"
            )


def _check(folder: Path, key: str, option: str) -> None:
    hf_config = read_hf_config(folder, key)
    if hf_config["architectures"][0] not in ALL_SPARSE:
        return
    if hf_config.get("mlp_only_layers") or hf_config.get("decoder_sparse_step", 1) != 1:
        raise UserError(
            f"{key}: {folder} has dense layers (mlp_only_layers, decoder_sparse_step), which SGLang takes for layers "
            f"of experts; set {option}=embedded or use a checkpoint with experts in every layer"
        )

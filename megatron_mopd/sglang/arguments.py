"""The command line and environment of each server, and all that can be refused before one is started.

The tables `sglang.server`, `sglang.student.server` and `sglang.teachers.server` hold SGLang's own ServerArgs; names and
values are SGLang's to check. This module adds what the project relies on. Torch-free.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_mopd.config import Config
from megatron_mopd.errors import UserError
from megatron_mopd.servers.addresses import check_host, read_api_key
from megatron_mopd.servers.spec import ServerSpec
from megatron_mopd.sglang.addresses import check_urls
from megatron_mopd.sglang.placement import INITIAL_VERSION, started_teachers, student_servers, teacher_servers
from megatron_mopd.sglang.supported import check_checkpoints

OURS = {
    "model_path": "student.checkpoint and teachers.models",
    "model": "student.checkpoint and teachers.models",
    "host": "sglang.host",
    "port": "nothing: a free port is chosen",
    "api_key": "sglang.api_key_env",
    "weight_version": "nothing: it is how a restarted server is told from the others",
    "config": "the table itself: its keys are the options of that file",
}
"""ServerArgs that the tables must not hold, and what sets them."""

CALLED = {
    **dict.fromkeys(("tp", "tensor_parallel_size"), "tp_size"),
    **dict.fromkeys(("pp", "pipeline_parallel_size"), "pp_size"),
    **dict.fromkeys(("dp", "data_parallel_size"), "dp_size"),
}
"""Other names that SGLang's command line has for what says how many GPUs a server takes."""

RELIED_ON = {
    "skip_tokenizer_init": True,  # token ids in, token ids out
    "incremental_streaming_output": True,  # each token is sent once, not all of them with every new one
    "sleep_on_idle": True,  # an idle server leaves its core to the trainer
}
CPU = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "skip_server_warmup": True,  # it compiles kernels, of which there are none
}
"""What `device: cpu` means without CPU kernels; the tables may say otherwise."""


def check_servers(config: Config) -> None:
    """Raise UserError for whatever can be known before a server is started or asked."""
    if config.rollout.engine != "sglang" and not config.teachers.on("sglang"):
        return
    check_urls(config)
    check_checkpoints(config)
    key = api_key(config)
    if server_specs(config):
        check_host("sglang", config.sglang.host, has_key=key is not None)
        check_interpreter(interpreter(config))


def given_urls(config: Config) -> list[str]:
    """Of servers that run already and that the run will wait for."""
    student = config.sglang.student.urls if config.rollout.engine == "sglang" else ()
    teachers = [config.sglang.teachers.urls.get(teacher.name, ()) for teacher in config.teachers.on("sglang")]
    return list(dict.fromkeys([*student, *(url for replicas in teachers for url in replicas)]))


def server_specs(config: Config) -> list[ServerSpec]:
    """Every server to start, the student's first."""
    table = config.sglang
    student = _merge("student", table.server, table.student.server)
    student["enable_return_routed_experts"] = config.rollout.router_replay or student.get(
        "enable_return_routed_experts"
    )
    teachers = _merge("teachers", table.server, table.teachers.server)
    checkpoints = {teacher.name: teacher.checkpoint for teacher in started_teachers(config)}
    folders: dict[str, Path] = {}  # of a server, that of the first teacher on it
    for teacher, names in teacher_servers(config).items():
        for name in names:
            folders.setdefault(name, checkpoints[teacher])
    return [
        *(_spec(config, name, config.student.checkpoint, i, student) for i, name in enumerate(student_servers(config))),
        *(_spec(config, name, folder, i, teachers) for i, (name, folder) in enumerate(folders.items())),
    ]


def _merge(role: str, common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    for key, place in [(k, "sglang.server") for k in common] + [(k, f"sglang.{role}.server") for k in own]:
        if key in OURS:
            raise UserError(f"{place}.{key} is set by {OURS[key]}; remove it from the table")
        if key in CALLED:
            raise UserError(f"{place}.{key} is called {CALLED[key]} here; write it so")
        if not key.isidentifier():
            raise UserError(f"{place}: {key!r} is no field of SGLang's ServerArgs; write its name, such as tp_size")
    table = {**common, **own}
    return {**RELIED_ON, **(CPU if table.get("device") == "cpu" else {}), **table}


def _spec(config: Config, name: str, checkpoint: Path, index: int, table: Mapping[str, Any]) -> ServerSpec:
    """`index` among the servers of its role: on a machine with several GPUs each has its own, the next after those of
    the one before."""
    table, on_cpu = dict(table), table.get("device") == "cpu"
    if not on_cpu:
        table["base_gpu_id"] = _number(table, "base_gpu_id", 0) + index * _num_gpus(table)
    table |= {"model_path": checkpoint.absolute(), "weight_version": INITIAL_VERSION}
    variables = {"HF_HUB_OFFLINE": "1"}  # local folders only
    if on_cpu:  # which all servers share
        variables |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    return ServerSpec(
        name=name,
        log=f"sglang-{name}.log",
        table="sglang",
        python=interpreter(config),
        module="sglang.launch_server",
        arguments=tuple(word for pair in table.items() for word in _words(*pair)),
        address_arguments=("--host", "{host}", "--port", "{port}"),
        host=config.sglang.host,
        key_variable=config.sglang.api_key_env or None,
        takes_key_as_argument=True,
        start_timeout_s=config.sglang.start_timeout_s,
        on_cpu=on_cpu,
        # With a GPU, SGLang looks every 5 s whether it was asked to end, and then has its schedulers give the memory of
        # the device back; on a CPU there is nothing to give back.
        grace_s=0.0 if on_cpu else 20.0,
        variables=tuple(variables.items()),
    )


def _num_gpus(table: Mapping[str, Any]) -> int:
    """With attention in data parallel, its replicas are among the GPUs of tensor parallelism."""
    replicas = 1 if table.get("enable_dp_attention") else _number(table, "dp_size", 1)
    return _number(table, "tp_size", 1) * _number(table, "pp_size", 1) * replicas


def _number(table: Mapping[str, Any], key: str, otherwise: int) -> int:
    value = table.get(key, otherwise)
    if type(value) is not int or value < otherwise:
        raise UserError(f"sglang: {key}={value!r} in a table of ServerArgs is no number; write one, or remove it")
    return value


def _words(name: str, value: object) -> list[str]:
    """Example: ("tp_size", 2) -> ["--tp-size", "2"]. true is a flag; false and null leave it out."""
    option = "--" + name.replace("_", "-")
    if value is True:
        return [option]
    if value is None or value is False:
        return []
    if isinstance(value, list | tuple):
        return [option, *map(str, value)]
    return [option, json.dumps(value) if isinstance(value, dict) else str(value)]


def interpreter(config: Config) -> Path:
    """Of the environment that has SGLang. Not resolved: a virtual environment is known by the name it is called by."""
    return (config.sglang.python or Path(sys.executable)).absolute()


def check_interpreter(python: Path) -> None:
    advice = (
        "without a GPU run tools/setup_sglang_cpu.sh and set sglang.python=.venv-sglang/bin/python; "
        "with one, pip install -e '.[sglang]'"
    )
    if shutil.which(python) is None:
        raise UserError(f"sglang.python: {python} is no program; {advice}")
    find = "import importlib.util, sys; sys.exit(importlib.util.find_spec('sglang') is None)"
    try:
        found = subprocess.run([python, "-c", find], check=False, stderr=subprocess.DEVNULL).returncode == 0
    except OSError:  # no program of this machine
        found = False
    if not found:
        raise UserError(f"sglang.python: {python} has no sglang; {advice}")


def api_key(config: Config) -> str | None:
    """Of all servers, started or given by URL."""
    return read_api_key("sglang", config.sglang.api_key_env)

"""`mopd doctor`: which of the parts that this project can use are here, and what brings the others.

Promise: imports none of them, so that it answers at once and also where one of them is broken.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

SGLANG_CPU = Path(".venv-sglang/bin/python")
TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Part:
    name: str
    found: str | None
    """Version, and where if that is not this interpreter. None: absent."""
    purpose: str
    brought_by: str

    def __str__(self) -> str:
        line = f"{'ok' if self.found else '--':3} {self.name:19} {self.found or 'absent'}"
        return line if self.found else f"{line:45} {self.purpose}: {self.brought_by}"


def diagnosis(sglang_python: Path | None) -> str:
    """A line for each part. `sglang_python`: the configured interpreter of SGLang, or None for the usual places."""
    gpus = find_gpus()
    parts = [
        Part("GPU", _counted(gpus), "training and serving at full speed", "everything here runs on a CPU too"),
        Part("torch", torch_version(bool(gpus)), "tensors", "pip install torch"),
        Part("megatron-core", version("megatron-core"), "training", "pip install -e ."),
        Part("transformers", version("transformers"), "tokenizers, embedded engine", "pip install -e '.[embedded]'"),
        sglang(sglang_python, bool(gpus)),
        Part(
            "transformer-engine",
            version("transformer-engine"),
            "fused layers, on a GPU",
            "pip install --no-build-isolation -e '.[gpu]'",
        ),
        Part(
            "apex",
            apex_version(),
            "fused kernels, optional, on a GPU",
            "from source, https://github.com/NVIDIA/apex (PyPI's apex is something else)",
        ),
        Part(
            "bubblewrap",
            (output(["bwrap", "--version"]) or "").removeprefix("bubblewrap ") or None,
            "workspaces of agents on this machine",
            "apt-get install -y bubblewrap",
        ),
        Part("wandb", version("wandb"), "telemetry.wandb, optional", "pip install -e '.[wandb]'"),
    ]
    return "\n".join([f"ok  python              {sys.version.split()[0]} ({sys.executable})", *map(str, parts)])


def version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def torch_version(has_gpu: bool) -> str | None:
    found = version("torch")
    if found and has_gpu and found.endswith("+cpu"):
        return f"{found}, which does not use the GPU: pip install --force-reinstall torch"
    return found


def apex_version() -> str | None:
    """NVIDIA's apex. The package of that name on PyPI has none of its modules."""
    spec = importlib.util.find_spec("apex")
    places = (spec.submodule_search_locations or []) if spec else []
    return version("apex") if any((Path(place) / "multi_tensor_apply").is_dir() for place in places) else None


def sglang(python: Path | None, has_gpu: bool) -> Part:
    """In the configured interpreter, else in this one or in the environment that tools/setup_sglang_cpu.sh makes."""
    setup = "pip install -e '.[sglang]'" if has_gpu else "tools/setup_sglang_cpu.sh"
    found = sglang_in(python) if python else version("sglang") or sglang_in(SGLANG_CPU)
    missing_in = f" in sglang.python={python}" if python else ""
    return Part("sglang", found, f"servers for rollouts and teachers{missing_in}", setup)


def sglang_in(python: Path) -> str | None:
    """Version in another interpreter, with its path."""
    ask = "from importlib.metadata import version; print(version('sglang'))"
    found = output([str(python), "-c", ask])
    return f"{found} ({python})" if found else None


def find_gpus() -> list[str]:
    """Names of NVIDIA's GPUs, as the driver has them."""
    return (output(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]) or "").splitlines()


def _counted(gpus: list[str]) -> str | None:
    return ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)) or None


def output(command: list[str]) -> str | None:
    """What a program prints; None where it is absent or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=TIMEOUT_S).stdout.strip()
    except (OSError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return None

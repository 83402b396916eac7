"""Who may import what, read from the source of every module. Imports inside functions count too."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megatron_mopd"
MODULES = sorted(PACKAGE.rglob("*.py"))
TORCH_FREE = (
    "config.py",
    "yaml_tree.py",
    "types.py",
    "batch.py",
    "step_metrics.py",
    "protocols.py",
    "errors.py",
    "cli.py",
    "preflight.py",
)
BACKENDS = ("embedded", "sglang", "service", "mcore")
READ_BY_PREFLIGHT = (
    "megatron_mopd.mcore.families.family_of",
    "megatron_mopd.mcore.gpu_options",
    "megatron_mopd.mcore.layout",
    "megatron_mopd.mcore.options",
    "megatron_mopd.sglang.arguments",
    "megatron_mopd.service.arguments",
)
TOKENIZERS = ("transformers.AutoTokenizer", "transformers.PreTrainedTokenizerBase")


def imports(module: Path) -> Iterator[tuple[str, int]]:
    """Dotted name of everything that a module imports, with the line."""
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: relative import"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def under(name: str, *packages: str) -> bool:
    return any(name == p or name.startswith(p + ".") for p in packages)


def importers(*packages: str, allowed: tuple[str, ...], but: tuple[str, ...] = ()) -> list[str]:
    """Lines outside `allowed` (files or folders of the package) that import `packages`, other than `but` of them."""
    return [
        f"{module.relative_to(ROOT)}:{line} imports {name}"
        for module in MODULES
        if not any(module.is_relative_to(PACKAGE / place) for place in allowed)
        for name, line in imports(module)
        if under(name, *packages) and not under(name, *but)
    ]


def test_megatron_is_imported_under_mcore_only() -> None:
    assert importers("megatron", "transformer_engine", "apex", allowed=("mcore",)) == []


def test_sglang_is_imported_under_sglang_only() -> None:
    assert importers("sglang", allowed=("sglang",)) == []


def test_transformers_models_are_imported_under_embedded_and_families_only() -> None:
    assert importers("transformers", allowed=("embedded", "mcore/families"), but=TOKENIZERS) == []


def test_trackers_are_imported_under_telemetry_only() -> None:
    assert importers("wandb", "tensorboard", "torch.utils.tensorboard", allowed=("telemetry",)) == []


TRAINER_SIDE_OF_SGLANG = ("sglang/broadcast.py", "sglang/sender.py")
"""They run on the trainer's ranks and send what mcore/ holds to the servers."""


FRONT_OF_THE_SERVICE = ("mcore/serve_teacher.py",)
"""Rank 0 of the service has its HTTP front in a thread."""


@pytest.mark.parametrize("backend", BACKENDS)
def test_backends_are_imported_by_build_only(backend: str) -> None:
    """Preflight checks the tables of the engines with those of their modules that import no torch."""
    others = {"mcore": TRAINER_SIDE_OF_SGLANG, "service": FRONT_OF_THE_SERVICE}
    allowed = (backend, "build.py", *others.get(backend, ()))
    assert importers(f"megatron_mopd.{backend}", allowed=allowed, but=READ_BY_PREFLIGHT) == []


@pytest.mark.parametrize("package", ["servers", "service", "pipeline"])
def test_servers_pipelines_and_the_front_of_the_service_know_no_torch(package: str) -> None:
    heavy = ("torch", "transformers", "megatron", "safetensors.torch")
    for module in sorted((PACKAGE / package).glob("*.py")):
        assert [name for name, _ in imports(module) if under(name, *heavy)] == [], module.name


def test_objectives_know_no_engine_and_no_loop() -> None:
    for module in sorted((PACKAGE / "objectives").glob("*.py")):
        names = [name for name, _ in imports(module) if under(name, "megatron_mopd")]
        known = [f"megatron_mopd.{name}" for name in ("objectives", "types", "errors", "config")]
        foreign = [name for name in names if not under(name, *known)]
        assert foreign == [], f"{module.name} imports {foreign}"


def test_modules_that_answer_at_once_import_no_torch() -> None:
    heavy = ("torch", "transformers", "megatron", "safetensors.torch", "wandb", "tensorboard")
    found = [f"{name} imports {x}" for name in TORCH_FREE for x, _ in imports(PACKAGE / name) if under(x, *heavy)]
    assert found == []


def test_every_module_says_what_it_is_for() -> None:
    trees = {m: ast.parse(m.read_text(encoding="utf-8")) for m in MODULES}
    assert [str(m.relative_to(ROOT)) for m, tree in trees.items() if not ast.get_docstring(tree)] == []


def test_the_log_prob_head_and_its_benchmark_need_torch_alone():
    """On a machine with a GPU and nothing else, tools/gpu_check.sh runs from a copy of this repository."""
    absent = ("megatron", "transformers", "pydantic", "yaml", "numpy", "pytest")
    code = f"import sys; sys.modules.update(dict.fromkeys({absent})); import bench_head, head_checks"
    env = {**os.environ, "PYTHONPATH": ":".join(str(ROOT / folder) for folder in (".", "tools", "tests"))}
    done = subprocess.run([sys.executable, "-c", code], env=env, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

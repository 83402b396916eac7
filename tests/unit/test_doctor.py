"""`mopd doctor` says of each part what is true of it, without importing it."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from megatron_mopd import doctor
from megatron_mopd.doctor import apex_version, diagnosis, sglang


def line_of(part: str, text: str) -> str:
    return next(line for line in text.splitlines() if line[4:].startswith(part))


def program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_names_every_part_with_its_version_or_what_brings_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    text = diagnosis(None)
    for part in ("torch", "megatron-core", "transformers"):
        assert line_of(part, text).startswith(f"ok  {part}")
        assert metadata.version(part) in line_of(part, text)
    assert len(text.splitlines()) == 10
    for line in text.splitlines():
        assert line.startswith("ok ") or (line.startswith("-- ") and ": " in line)


def test_a_command_exits_with_0_and_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys; from megatron_mopd.cli import guarded, _dispatch; code = guarded(lambda: _dispatch(['doctor'])); "
        "sys.exit(code or int('torch' in sys.modules or 'transformers' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "megatron-core" in done.stdout


def test_finds_sglang_in_the_environment_beside_the_project(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "version", lambda _: None)
    assert sglang(None, has_gpu=False).found is None
    assert "tools/setup_sglang_cpu.sh" in str(sglang(None, has_gpu=False))
    assert "'.[sglang]'" in str(sglang(None, has_gpu=True))
    program(Path(".venv-sglang/bin/python"), "echo 0.5.23")
    assert sglang(None, has_gpu=False).found == "0.5.23 (.venv-sglang/bin/python)"


def test_a_configured_interpreter_without_sglang_is_named(tmp_path: Path) -> None:
    for python in (tmp_path / "absent", program(tmp_path / "python", "exit 1")):
        part = sglang(python, has_gpu=False)
        assert part.found is None
        assert f"sglang.python={python}" in str(part)


def test_a_torch_that_does_not_see_the_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version", lambda _: "2.13.0+cpu")
    assert "does not use the GPU" in (doctor.torch_version(has_gpu=True) or "")
    assert doctor.torch_version(has_gpu=False) == "2.13.0+cpu"


def test_counts_gpus_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program(tmp_path / "nvidia-smi", "echo H200; echo H200")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert line_of("GPU", diagnosis(None)).split() == ["ok", "GPU", "2", "x", "H200"]


def test_another_apex_is_not_taken_for_nvidias(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(doctor, "version", lambda _: "0.1")
    assert apex_version() is None
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("raise ImportError('imported')")
    assert apex_version() is None
    (tmp_path / "apex" / "multi_tensor_apply").mkdir()
    assert apex_version() == "0.1"

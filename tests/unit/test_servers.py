"""What is decided of SGLang servers before one is started: where the teachers are, the command line, what is refused.
And that `child.py` ends its group, shown on a stand-in for `sglang.launch_server` that only sleeps."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_mopd.config import Config
from megatron_mopd.errors import UserError
from megatron_mopd.run_lock import locked
from megatron_mopd.servers import files
from megatron_mopd.servers.addresses import reserve_port, url_of
from megatron_mopd.servers.launch import check_keeper, servers
from megatron_mopd.servers.process import CHILD
from megatron_mopd.servers.wanted import check_servers, server_lines, server_specs
from megatron_mopd.sglang.placement import student_servers, teacher_servers
from megatron_mopd.sglang.supported import check_checkpoints
from megatron_mopd.yaml_tree import overlay


def checkpoint(folder: Path, **fields: Any) -> Path:
    folder.mkdir(exist_ok=True)
    config = {"architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 250, **fields}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").touch()
    return folder


def make_config(tmp_path: Path, num_teachers: int = 3, engine: str = "sglang", **sglang: Any) -> Config:
    names = [f"t{i}" for i in range(num_teachers)]
    models = [{"name": n, "domain": "d", "effort": n, "checkpoint": str(checkpoint(tmp_path / n))} for n in names]
    return Config.model_validate(
        {
            "run": {"folder": str(tmp_path / "run"), "num_steps": 1},
            "student": {"checkpoint": str(checkpoint(tmp_path / "student"))},
            "teachers": {"backend": "sglang" if num_teachers else "embedded", "models": models},
            "prompts": {"files": [], "batch_size": 1, "mixture": {"d": 1.0}, "efforts": {"t0": 1.0}},
            "environments": {},
            "rollout": {"engine": engine, "max_response_tokens": 8},
            "sglang": {"server": {"device": "cpu"}, **sglang},
        }
    )


def words_of(config: Config, name: str) -> list[str]:
    return list(next(spec for spec in server_specs(config) if spec.name == name).arguments)


def value_of(words: list[str], option: str) -> str:
    return words[words.index(option) + 1]


def test_teachers_take_turns_on_fewer_servers(tmp_path: Path) -> None:
    config = make_config(tmp_path, num_teachers=5)
    assert teacher_servers(config) == {f"t{i}": (f"teachers-{i}",) for i in range(5)}
    config = make_config(tmp_path, num_teachers=5, teachers={"num_servers": 2})
    assert list(teacher_servers(config).values()) == [("teachers-0",), ("teachers-1",)] * 2 + [("teachers-0",)]
    for i in range(2):  # the k-th server begins with the k-th teacher
        assert value_of(words_of(config, f"teachers-{i}"), "--model-path") == str(tmp_path / f"t{i}")


def test_more_servers_than_teachers_are_replicas_of_the_first(tmp_path: Path) -> None:
    config = make_config(tmp_path, num_teachers=2, teachers={"num_servers": 3})
    assert teacher_servers(config) == {"t0": ("teachers-0", "teachers-2"), "t1": ("teachers-1",)}
    for name, teacher in (("teachers-0", "t0"), ("teachers-1", "t1"), ("teachers-2", "t0")):
        assert value_of(words_of(config, name), "--model-path") == str(tmp_path / teacher)


def test_servers_given_by_url_are_not_started(tmp_path: Path) -> None:
    config = make_config(tmp_path, teachers={"urls": {"t1": ["http://a:1"]}}, student={"urls": ["http://b:1"]})
    assert student_servers(config) == ()
    assert teacher_servers(config) == {"t0": ("teachers-0",), "t2": ("teachers-1",)}
    assert server_specs(make_config(tmp_path, num_teachers=0, engine="embedded")) == []


def test_a_user_is_told_what_the_run_will_wait_for(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, reserve_port("127.0.0.1", "sglang") as silent:
        here, nowhere = (f"http://127.0.0.1:{s.getsockname()[1]}" for s in (listening, silent))
        config = make_config(tmp_path, 2, teachers={"urls": {"t0": [nowhere]}}, student={"urls": [here]})
        started, waits = server_lines(config)
    assert "servers to start: teachers-0;" in started
    assert f"nothing answers at {nowhere} yet; the run waits at most 900 s" in waits
    assert server_lines(make_config(tmp_path, num_teachers=0, engine="embedded")) == []


def test_options_are_sglangs_own_and_the_own_table_counts_more(tmp_path: Path) -> None:
    config = make_config(
        tmp_path,
        server={"device": "cpu", "tp_size": 2, "cuda_graph_bs": [1, 2], "sleep_on_idle": False, "dtype": None},
        student={"server": {"tp_size": 4, "json_model_override_args": {"a": 1}}},
    )
    student, teacher = words_of(config, "student-0"), words_of(config, "teachers-0")
    assert (value_of(student, "--tp-size"), value_of(teacher, "--tp-size")) == ("4", "2")
    assert student[student.index("--cuda-graph-bs") :][:3] == ["--cuda-graph-bs", "1", "2"]
    assert value_of(student, "--json-model-override-args") == '{"a": 1}'
    assert {"--skip-tokenizer-init", "--incremental-streaming-output", "--disable-cuda-graph"} <= set(student)
    assert not {"--sleep-on-idle", "--dtype"} & set(student)
    assert value_of(student, "--weight-version") == "initial"


def test_router_replay_asks_the_student_for_its_routes(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    assert "--enable-return-routed-experts" not in words_of(config, "student-0")
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"router_replay": True})})
    assert "--enable-return-routed-experts" in words_of(config, "student-0")
    assert "--enable-return-routed-experts" not in words_of(config, "teachers-0")


def test_each_server_of_a_machine_has_gpus_of_its_own(tmp_path: Path) -> None:
    config = make_config(
        tmp_path, server={"tp_size": 2}, student={"num_servers": 2}, teachers={"server": {"base_gpu_id": 4}}
    )
    first_gpus = [value_of(words_of(config, n), "--base-gpu-id") for n in ("student-0", "student-1", "teachers-1")]
    assert first_gpus == ["0", "2", "6"]
    config = make_config(
        tmp_path,
        server={},
        student={"num_servers": 2, "server": {"tp_size": 4, "dp_size": 4, "enable_dp_attention": True}},
    )
    assert value_of(words_of(config, "student-1"), "--base-gpu-id") == "4"


@pytest.mark.parametrize(
    ("sglang", "said"),
    [
        ({"server": {"port": 1}}, "sglang.server.port is set by"),
        ({"student": {"server": {"host": "0.0.0.0"}}}, "sglang.student.server.host is set by sglang.host"),
        ({"server": {"api_key": "s"}}, "sglang.api_key_env"),
        ({"server": {"--tp": 2}}, "'--tp' is no field"),
        ({"host": "0.0.0.0"}, "sglang.host=0.0.0.0 can be reached from other machines; set sglang.api_key_env"),
        ({"host": "::"}, "can be reached"),
        ({"host": "10.1.2.3", "api_key_env": "MOPD_NOT_SET"}, "MOPD_NOT_SET, which is not set"),
        ({"host": "0.0.0.0", "api_key_env": ""}, "can be reached"),
        ({"host": "203.0.113.7", "api_key_env": "PATH"}, "sglang.host=203.0.113.7: .*; set an address of this machine"),
        ({"student": {"urls": ["http://a:1"]}, "api_key_env": "MOPD_NOT_SET"}, "MOPD_NOT_SET, which is not set"),
        ({"server": {"tensor_parallel_size": 2}}, "tensor_parallel_size is called tp_size here"),
        ({"server": {"device": "cuda", "tp_size": "two"}}, "tp_size='two' in a table of ServerArgs is no number"),
        ({"server": {"device": "cuda", "tp_size": None}}, "tp_size=None"),
        ({"student": {"urls": ["127.0.0.1:30000"]}}, r"sglang.student.urls.0='127.0.0.1:30000' is no URL such as"),
        ({"student": {"urls": ["http://a:1/"]}}, "without a slash at its end"),
        ({"student": {"urls": ["http://a:99999"]}}, "is no URL"),
        ({"student": {"urls": ["http://a:1", "http://a:1"]}}, "sglang.student.urls.1=http://a:1 is there twice"),
        ({"student": {"urls": ["http://a:1"], "num_servers": 2}}, "remove one of the two"),
        ({"teachers": {"urls": {"t0": ["nonsense"]}}}, "sglang.teachers.urls.t0.0='nonsense' is no URL"),
        (
            {"student": {"urls": ["http://a:1"]}, "teachers": {"urls": {"t0": ["http://b:1", "http://a:1"]}}},
            "t0.1=http://a:1 is a student server too",
        ),
        ({"teachers": {"urls": {"t9": ["http://a:1"]}}}, "sglang.teachers.urls.t9"),
        ({"python": "absent/python"}, "is no program; without a GPU run tools/setup_sglang_cpu.sh"),
        ({}, "has no sglang"),  # this interpreter
    ],
)
def test_refuses_before_anything_is_started(tmp_path: Path, sglang: dict[str, Any], said: str) -> None:
    config = make_config(tmp_path, **sglang)
    with pytest.raises(UserError, match=said), servers(config):
        pass
    assert not (tmp_path / "run").exists()


def test_an_interpreter_that_the_machine_cannot_run_has_no_sglang(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("no program")
    python.chmod(0o755)
    with pytest.raises(UserError, match=r"sglang\.python: .* has no sglang"):
        check_servers(make_config(tmp_path, python=str(python)))


def test_urls_of_roles_that_are_embedded_are_not_asked_for(tmp_path: Path) -> None:
    check_servers(make_config(tmp_path, num_teachers=0, engine="embedded", student={"urls": ["?"]}, api_key_env="NO"))


def test_refuses_a_checkpoint_with_dense_layers_that_sglang_would_get_wrong(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    checkpoint(tmp_path / "t1", mlp_only_layers=[1])
    with pytest.raises(UserError, match=r"teachers\.models\.1 \(t1\).* has dense layers"):
        check_servers(config)
    checkpoint(tmp_path / "t1", decoder_sparse_step=2)
    with pytest.raises(UserError, match=r"teachers\.backend=embedded"):
        check_servers(config)


def test_refuses_routes_that_a_cache_on_the_host_would_mix_up(tmp_path: Path) -> None:
    """A prefix of 144 tokens that came back from the host had the routes of others for four in five of them."""
    hicache = {"server": {"enable_hierarchical_cache": True}}

    def check(router_replay: bool, sglang: dict[str, Any]) -> None:
        config = make_config(tmp_path, **sglang).model_dump()
        check_checkpoints(Config.model_validate(overlay(config, {"rollout": {"router_replay": router_replay}})))

    for tables in (hicache, {"student": hicache}):
        with pytest.raises(UserError, match=r"set sglang\.student\.server\.enable_hierarchical_cache=false"):
            check(True, tables)
        check(False, tables)
    check(True, {**hicache, "student": {"server": {"enable_hierarchical_cache": False}}})
    check(True, {"teachers": hicache})


def test_refuses_teachers_of_two_architectures_on_one_server(tmp_path: Path) -> None:
    """The server would go on with the config.json of the first; names and versions in it do not matter."""
    config = make_config(tmp_path, teachers={"num_servers": 2})
    checkpoint(tmp_path / "t2", rope_theta=5e5)
    with pytest.raises(UserError, match=r"teachers t0 and t2 share a server, but .* differ in rope_theta: None and 5"):
        check_servers(config)
    checkpoint(tmp_path / "t2", transformers_version="5.0")
    with pytest.raises(UserError, match=r"sglang\.python"):
        check_servers(config)
    checkpoint(tmp_path / "t1", rope_theta=5e5)
    with pytest.raises(UserError, match=r"sglang\.python"):
        check_servers(config)


def test_refuses_packed_teachers_in_turn_on_one_server(tmp_path: Path) -> None:
    """It would keep the experts of the first (tests/sglang/test_loading.py)."""
    shared, alone = make_config(tmp_path, teachers={"num_servers": 2}), make_config(tmp_path)
    for name in ("t0", "t2"):
        checkpoint(tmp_path / name, quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(UserError, match=r"t0 and t2 share a server; set .*num_servers=null .*import_mxfp4 \S*t2 OUT"):
        check_checkpoints(shared)
    check_checkpoints(alone)


def test_a_reserved_port_can_be_served_on_and_is_given_to_nobody_else() -> None:
    with reserve_port("127.0.0.1", "sglang") as reserved:
        port = reserved.getsockname()[1]
        for _ in range(2):  # also again, after the first server is gone
            with socket.create_server(("127.0.0.1", port)):
                socket.create_connection(("127.0.0.1", port)).close()
        with pytest.raises(OSError, match="in use"), socket.socket() as other:
            other.bind(("127.0.0.1", port))


def test_urls_are_what_clients_can_reach() -> None:
    assert url_of("127.0.0.1", 5) == "http://127.0.0.1:5"
    assert url_of("::1", 5) == "http://[::1]:5"
    assert url_of("0.0.0.0", 5) == f"http://{socket.gethostname()}:5"


def stand_in_python(folder: Path, launch_server: str) -> Path:
    """An interpreter that has this in place of SGLang."""
    package = folder / "packages" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(launch_server)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={package.parent} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


def test_a_server_that_never_comes_up_is_given_up_with_its_last_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # real servers that start on this machine now are not waited for
    python = stand_in_python(tmp_path, "print('loading')\nraise RuntimeError('no memory for it')")
    config = make_config(tmp_path, num_teachers=0, python=str(python))
    with servers(config):
        assert list(files.read_endpoints(tmp_path / "run")) == ["student-0"]  # known before it is up
        wait_until((files.folder(tmp_path / "run") / files.FAILURE).exists)
        with pytest.raises(
            UserError, match="student-0 ended with exit code 1: RuntimeError: no memory for it; given up"
        ):
            check_keeper(tmp_path / "run")
    assert (tmp_path / "run/logs/sglang-student-0.log").read_text().count("loading") == 2


def test_servers_of_mopd_serve_are_used_if_they_are_the_ones_needed(tmp_path: Path) -> None:
    config = make_config(tmp_path, num_teachers=1, python=str(stand_in_python(tmp_path, "")))
    run = tmp_path / "run"
    with locked(files.folder(run)):
        files.mark_foreground(run)
        files.write_endpoint(run, "student-0", "http://a:1", 1)
        with pytest.raises(UserError, match="but no teachers-0; start it with the configuration"), servers(config):
            pass
        files.write_endpoint(run, "teachers-0", "http://a:2", 1)
        with servers(config):
            assert not (run / "logs").exists()
    with pytest.raises(UserError, match=r"the keeper of the servers has ended; .* `mopd serve`"):
        check_keeper(run)


MODULE = "sglang.launch_server"
STAND_IN = """
import logging, os, signal, subprocess, sys, time
logging.basicConfig(level=logging.INFO, format="%(message)s %(args)s")
logging.info("server_args=%s", sys.argv)
logging.info("%s of %s", 1, 2)
if "--fail" in sys.argv:
    sys.exit(7)
def in_order(*_):
    print("in order", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, in_order)
subprocess.Popen(["sleep", "600"])
print("up", flush=True)
time.sleep(600)
"""


class Child:
    """`child.py` on a stand-in, with the keeper's end of the lifeline."""

    def __init__(self, folder: Path, *words: str, grace_s: float = 0.0, key_variable: str = ""):
        package = folder / "sglang"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "launch_server.py").write_text(STAND_IN)
        self.lifeline, theirs = socket.socketpair()
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(CHILD), str(theirs.fileno()), str(grace_s), key_variable, MODULE, *words],
                pass_fds=[theirs.fileno()],
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": str(folder), "MOPD_KEY": "sesame"},
                start_new_session=True,
            )
        theirs.close()

    def group(self) -> list[psutil.Process]:
        """The leader, the server and the server's own child, once all are there."""
        wait_until(lambda: self.log.exists() and "up\n" in self.log.read_text())
        return [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.lifeline.close()


def wait_until(condition: Any, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.02)


def all_gone(processes: list[psutil.Process]) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


@pytest.fixture
def children(tmp_path: Path) -> Iterator[Any]:
    started: list[Child] = []

    def start(*words: str, **options: Any) -> Child:
        started.append(Child(tmp_path, *words, **options))
        return started[-1]

    yield start
    for child in started:
        child.stop()


def test_a_closed_lifeline_ends_the_whole_group(children: Any) -> None:
    child = children()
    group = child.group()
    assert len(group) == 3
    child.lifeline.close()
    wait_until(lambda: all_gone(group))


def test_the_end_of_the_server_ends_the_whole_group(children: Any) -> None:
    child = children()
    leader, server, *others = child.group()
    server.kill()
    wait_until(lambda: all_gone([leader, *others]))
    assert child.lifeline.recv(16) == b"137"


def test_a_server_does_not_outlive_its_leader(children: Any) -> None:
    """The rest of the group is then the keeper's to kill."""
    child = children()
    leader, server, *_ = child.group()
    leader.kill()
    wait_until(lambda: all_gone([server]))


def test_a_server_ends_in_order_where_it_is_given_time(children: Any) -> None:
    child = children(grace_s=10.0)
    group = child.group()
    child.lifeline.shutdown(socket.SHUT_WR)
    child.process.wait()
    assert child.lifeline.recv(16) == b"0"
    assert "in order" in child.log.read_text()
    wait_until(lambda: all_gone(group))


def test_the_exit_code_of_the_server_is_said(children: Any) -> None:
    child = children("--fail")
    child.process.wait()
    assert child.lifeline.recv(16) == b"7"


def test_the_key_is_neither_in_the_command_line_nor_in_the_log(children: Any) -> None:
    child = children(key_variable="MOPD_KEY")
    group = child.group()
    assert not any("sesame" in word for p in group for word in p.cmdline())
    assert "'--api-key', '***'" in child.log.read_text()
    assert "1 of 2 (1, 2)" in child.log.read_text()  # formatters of other records find what they look for

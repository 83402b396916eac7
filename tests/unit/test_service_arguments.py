"""What is decided of a teacher service before it is started: whether a run needs one, its command, what is refused."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from scoring import TEACHERS, config_of
from tiny import LAYOUTS

from megatron_mopd.cli import main
from megatron_mopd.config import Config
from megatron_mopd.errors import UserError
from megatron_mopd.servers import files
from megatron_mopd.servers.launch import servers
from megatron_mopd.servers.wanted import check_servers, server_lines, server_specs
from megatron_mopd.service.arguments import check_port

FIELDS = {
    **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 250, "hidden_size": 64},
    **{"intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True},
    **{"tie_word_embeddings": False, "initializer_range": 0.1, "rms_norm_eps": 1e-6, "rope_theta": 10000.0},
    **{"max_position_embeddings": 2048, "hidden_act": "silu", "attention_bias": False, "decoder_sparse_step": 1},
    "mlp_only_layers": [],
}


def write_folder(folder: Path, **fields: Any) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**FIELDS, **fields}))
    (folder / "model.safetensors").touch()


@pytest.fixture
def make(tmp_path: Path) -> Any:
    for name in TEACHERS:
        write_folder(tmp_path / name)
    processes, megatron = LAYOUTS["TP2xEP2"]

    def config(**service: Any) -> Config:
        return config_of(tmp_path, service={"num_processes": processes, "megatron": megatron, **service})

    return config


def embedded(config: Config) -> Config:
    return config.model_copy(update={"teachers": config.teachers.model_copy(update={"backend": "embedded"})})


def test_a_run_starts_the_service_that_its_teachers_need(make: Any) -> None:
    config = make()
    check_servers(config)
    (spec,) = server_specs(config)
    assert (spec.name, spec.log, spec.module) == ("service", "service.log", "megatron_mopd.cli")
    read = str(files.folder(config.run.folder) / files.CONFIG)
    assert spec.command(5) == ("serve-teacher", read, "service.host=127.0.0.1", "service.port=5")
    assert server_lines(config)[0].startswith("servers to start: service; this takes a while")
    assert server_specs(make(urls=["http://a:1"])) == []
    assert server_specs(embedded(config)) == []


def test_servers_of_both_kinds_may_be_needed(make: Any) -> None:
    rollout = {"max_response_tokens": 8, "engine": "sglang"}
    config = Config.model_validate({**make().model_dump(), "rollout": rollout})
    assert [spec.name for spec in server_specs(config)] == ["student-0", "service"]


def test_a_user_is_told_of_a_service_that_does_not_answer(make: Any) -> None:
    (line,) = server_lines(make(urls=["http://127.0.0.1:9"]))
    assert line == ("nothing answers at http://127.0.0.1:9 yet; the run waits at most 900 s (service.start_timeout_s)")


@pytest.mark.parametrize(
    ("service", "said"),
    [
        ({"urls": ["nonsense"]}, r"service\.urls\.0='nonsense' is no URL such as"),
        ({"urls": ["http://a:1", "http://a:1"]}, r"service\.urls\.1=http://a:1 is there twice"),
        ({"urls": ["http://a:1"], "api_key_env": "MOPD_NOT_SET"}, r"service\.api_key_env names MOPD_NOT_SET, which is"),
        ({"host": "0.0.0.0"}, r"service\.host=0\.0\.0\.0 can be reached from other machines; set service\.api_key_env"),
        ({"host": "203.0.113.7", "api_key_env": "PATH"}, r"service\.host=203\.0\.113\.7: .*; set an address of this"),
        ({"urls": ["http://-a..b:1"]}, r"service\.urls\.0='http://-a\.\.b:1' is no URL such as"),
        ({"host": "a..b", "api_key_env": "PATH"}, r"service\.host='a\.\.b' is no name of a host"),
        ({"megatron": {"bf61": True}}, r"service\.megatron: unknown key megatron\.bf61; did you mean bf16\?"),
        ({"megatron": {"num_layers": 2}}, r"service\.megatron: megatron\.num_layers cannot be set"),
        ({"num_processes": 3}, r"service\.num_processes and service\.megatron: parallel layout: 3 processes do not"),
        ({"megatron": {"expert_model_parallel_size": 3}, "num_processes": 3}, r"experts \(8\) cannot be split"),
    ],
)
def test_refuses_before_anything_is_started(make: Any, tmp_path: Path, service: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said), servers(make(**service)):
        pass
    assert not (tmp_path / "run").exists()


def test_teachers_of_two_architectures_need_two_services(make: Any, tmp_path: Path) -> None:
    write_folder(tmp_path / "b", num_hidden_layers=2)
    with pytest.raises(UserError, match="teachers a and b are of different architectures, and a service serves one"):
        check_servers(make())
    check_servers(make(urls=["http://a:1"]))  # that service knows


def test_a_service_that_nobody_uses_is_not_checked(make: Any) -> None:
    check_servers(embedded(make(urls=["?"], api_key_env="MOPD_NOT_SET")))


def test_a_port_that_is_taken_is_refused_to_serve_teacher_alone(make: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"service\.port={port}: .*in use; set another, or 0"):
            check_port(make(port=port))
        check_servers(make(port=port))  # the keeper has a port of its own


def test_mopd_serve_teacher_without_a_teacher_is_one_line(
    make: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.yaml").write_text(embedded(make()).dump())
    with pytest.raises(SystemExit) as ended:
        main(["serve-teacher", str(tmp_path / "c.yaml")])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("mopd: error: no teacher has backend megatron; set teachers.backend=")

"""What servers are told to call weights: never the same for two that may differ."""

from __future__ import annotations

from pathlib import Path

from scoring import config_of

from megatron_mopd.config import Config, Quantization
from megatron_mopd.sglang.weights import sampled_name, trained_name, version_name


def quantized(config: Config, **options: str) -> Config:
    return config.model_copy(update={"quantization": Quantization.model_validate(options)})


def test_weights_of_another_rule_run_or_version_have_another_name(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    other_run = config.model_copy(update={"run": config.run.model_copy(update={"folder": tmp_path / "other"})})
    rules = [quantized(config, experts="mxfp4", rule=rule) for rule in ("floor", "even", "rceil")]
    names = [version_name(trained_name(c), version) for c in (config, other_run, *rules) for version in (0, 1)]
    assert len(set(names)) == len(names)


def test_a_rule_that_nothing_uses_changes_no_name(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert trained_name(quantized(config, rule="rceil")) == trained_name(config)


def test_what_is_only_sampled_has_a_name_of_its_own_each_time(tmp_path: Path) -> None:
    """A gate and an evaluation number their folders as a trainer numbers its steps."""
    config = config_of(tmp_path)
    assert len({sampled_name(config), sampled_name(config), trained_name(config)}) == 3

"""The `megatron:` table: the names read from Megatron's source are its classes' own, and misspelt ones are refused."""

import dataclasses
import inspect

import pytest

from megatron_mopd.errors import UserError
from megatron_mopd.mcore import options


def names_of_classes():
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    classes = (TransformerConfig, MLATransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
    fields = [{f.name for f in dataclasses.fields(cls)} for cls in classes]
    return [*fields, set(inspect.signature(OptimizerParamScheduler).parameters) - {"optimizer"}]


def test_names_in_the_source_are_the_fields_of_the_classes(ranks):
    (imported,) = ranks(1)(names_of_classes)
    read = [
        options._transformer_fields(False),
        options._transformer_fields(True),
        options._fields("optimizer/optimizer_config.py", "OptimizerConfig"),
        options._fields("distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"),
        options._arguments("optimizer_param_scheduler.py", "OptimizerParamScheduler"),
    ]
    assert [set(names) for names in read] == imported


def test_keys_go_to_their_owners():
    keys = {"moe_router_topk": 3, "lr": 0.1, "overlap_grad_reduce": True, "init_lr": 1, "bf16": True}
    table = options.split_megatron_table(keys)
    assert table.transformer == {"moe_router_topk": 3, "bf16": True}
    assert table.optimizer == {"lr": 0.1, "bf16": True}
    assert table.ddp == {"overlap_grad_reduce": True}
    assert table.scheduler == {"init_lr": 1}


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("tensor_model_paralel_size", "unknown key megatron.tensor_model_paralel_size; did you mean tensor_model_para"),
        ("learning_rate", "unknown key megatron.learning_rate"),
        ("params_dtype", "megatron.params_dtype cannot be set: it follows from megatron.bf16"),
        ("num_layers", "megatron.num_layers cannot be set: it follows from the checkpoint"),
        (
            "cross_entropy_loss_fusion",
            "megatron.cross_entropy_loss_fusion cannot be set: it follows from the log-prob head, which it bypasses; "
            "remove it",
        ),
        ("cross_entropy_fusion_impl", "megatron.cross_entropy_fusion_impl cannot be set: it follows from the log-prob"),
        ("q_lora_rank", "unknown key megatron.q_lora_rank"),  # known only with multi_latent_attention
    ],
)
def test_a_key_that_is_not_megatrons_is_refused(key, reason):
    with pytest.raises(UserError, match=reason):
        options.split_megatron_table({key: 1})


@pytest.mark.parametrize(
    ("schedule", "reason"),
    [
        (
            {"lr_decay_style": "cosinus"},
            "megatron.lr_decay_style='cosinus' is not supported; supported: constant, linear",
        ),
        ({"wd_incr_style": "step"}, "megatron.wd_incr_style='step' is not supported"),
        ({"lr_decay_style": "WSD", "wsd_decay_steps": 4, "lr_wsd_decay_style": "sqrt"}, "lr_wsd_decay_style='sqrt'"),
        ({"lr_decay_style": "WSD", "wsd_decay_steps": 4}, "WSD needs megatron.lr_wsd_decay_style"),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_style": "linear"}, "WSD needs megatron.wsd_decay_steps"),
    ],
)
def test_a_schedule_that_would_fail_in_the_middle_of_a_run_is_refused(schedule, reason):
    with pytest.raises(UserError, match=reason):
        options.check_optimizer_options(options.split_megatron_table({"lr": 1e-3, **schedule}))


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("lr", "abc", "megatron.lr='abc' must be of type float"),
        ("lr", True, "megatron.lr=True must be of type float"),
        ("lr", float("inf"), "megatron.lr=inf must be finite"),
        ("lr", -1, "megatron.lr=-1 must not be negative"),
        ("clip_grad", -1.0, "megatron.clip_grad=-1.0 must not be negative"),
        ("bf16", 1, "megatron.bf16=1 must be of type bool"),
        ("attention_dropout", "x", "must be of type float"),
        ("lr_warmup_steps", 1.5, "megatron.lr_warmup_steps=1.5 must be of type int"),
        ("use_distributed_optimizer", "no", "must be of type bool"),
    ],
)
def test_a_value_of_another_type_is_refused(key, value, reason):
    with pytest.raises(UserError, match=reason):
        options.check_optimizer_options(options.split_megatron_table({"lr": 1e-3, key: value}))


@pytest.mark.parametrize("table", [{"lr_warmup_steps": 5}, {"lr_warmup_steps": -1}, {"lr_decay_steps": 0}])
def test_a_warmup_that_outlasts_the_schedule_is_refused(table):
    with pytest.raises(UserError, match="does not fit a schedule of"):
        options.check_schedule(options.split_megatron_table(table), num_steps=4)
    options.check_schedule(options.split_megatron_table({"lr_warmup_steps": 4}), num_steps=4)


def test_a_schedule_that_megatron_knows_is_accepted():
    wsd = {"lr_decay_style": "WSD", "wsd_decay_steps": 4, "lr_wsd_decay_style": "minus_sqrt"}
    for schedule in ({}, wsd, {"lr_decay_style": "inverse-square-root", "lr_warmup_steps": 2}):
        options.check_optimizer_options(options.split_megatron_table({"lr": 1e-3, **schedule}))

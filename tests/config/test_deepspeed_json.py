"""DeepSpeed's JSON is merged with the flags, and the rest of it is passed on to DeepSpeed."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.base.errors import ConfigError
from megatron.extras.interop.translators import deepspeed_json as keys
from megatron.extras.interop.translators.deepspeed_json import read_json, select_passed_on
from megatron.extras.interop.translators.translator import load_config

SHAPE = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64"
WITHOUT_DEEPSPEED = f"{SHAPE} --train-iters 10 --lr 1e-3"
MODEL = f"{WITHOUT_DEEPSPEED} --deepspeed"
TR8 = {
    "train_micro_batch_size_per_gpu": 1,
    "train_batch_size": 2048,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1},
    "fp16": {
        "enabled": True,
        "loss_scale": 0,
        "loss_scale_window": 500,
        "hysteresis": 2,
        "min_loss_scale": 1,
        "initial_scale_power": 12,
    },
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}  # fmt: skip


def load(folder: Path, content: Any, flags: str = ""):
    path = folder / "ds_config.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return load_config(f"{MODEL} --deepspeed_config {path} {flags}".split())


def error(folder: Path, content: Any, flags: str = "") -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, content, flags)
    return str(caught.value)


def test_json_sets_what_flags_do_not_give(tmp_path: Path) -> None:
    loaded = load(tmp_path, TR8)
    config = loaded.config
    assert config.batch.micro_batch_size == 1
    assert config.batch.global_batch_size == 2048
    precision = config.precision
    assert precision.fp16
    assert precision.loss_scale is None
    assert precision.initial_loss_scale == 4096.0
    assert precision.loss_scale_window == 500
    assert (
        loaded.origin["batch.global_batch_size"] == f"{tmp_path}/ds_config.json: train_batch_size"
    )
    assert not loaded.warnings


def test_zero_stage_0_of_the_json_is_used(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        {"zero_optimization": {"stage": 0}, "bf16": {"enabled": True}},
        "--micro-batch-size 2",
    ).config
    assert config.parallel.zero_stage == 0
    assert config.precision.bf16 is True


@pytest.mark.parametrize(
    "key", ["train_micro_batch_size_per_gpu", "train_batch_size", "gradient_clipping"]
)
def test_auto_takes_the_value_of_the_flags(key: str, tmp_path: Path) -> None:
    flags = "--micro-batch-size 1 --global-batch-size 2048 --clip-grad 1.0"
    assert load(tmp_path, {**TR8, key: "auto"}, flags).config == load(tmp_path, TR8, flags).config


@pytest.mark.parametrize(
    ("flags", "both"),
    [
        ("--micro-batch-size 2", ("--micro-batch-size 2", "train_micro_batch_size_per_gpu is 1")),
        ("--clip-grad 0.5", ("--clip-grad 0.5", "gradient_clipping is 1.0")),
        ("--zero-stage 3", ("--zero-stage 3", "zero_optimization.stage is 1")),
        ("--no-fp16", ("--no-fp16", "fp16.enabled is true")),
        ("--adam-beta2 0.95", ("--adam-beta2 0.95", "optimizer.params.betas is [0.9, 0.999]")),
        ("--no-cpu-optimizer", ("--no-cpu-optimizer", 'offload_optimizer.device is "cpu"')),
    ],
)
def test_values_of_json_and_flags_must_agree(
    flags: str, both: tuple[str, str], tmp_path: Path
) -> None:
    more = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    content = {**TR8, "zero_optimization": more, "optimizer": {"params": {"betas": [0.9, 0.999]}}}
    message = error(tmp_path, content, flags)
    for part in both:
        assert part in message
    assert "ds_config.json" in message


def test_all_contradictions_are_listed_together(tmp_path: Path) -> None:
    assert "2 errors" in error(tmp_path, TR8, "--micro-batch-size 2 --clip-grad 0.5")


def test_loss_scale_of_the_json_has_priority(tmp_path: Path) -> None:
    """The script of tr8-104B has --loss-scale 12 and a dynamic scale of 2 ** 12 in the JSON."""
    loaded = load(tmp_path, TR8, "--fp16 --loss-scale 12")
    assert loaded.config.precision.loss_scale is None
    assert len(loaded.warnings) == 1
    assert "--loss-scale 12.0 is not used" in loaded.warnings[0]
    static = load(tmp_path, {**TR8, "fp16": {"enabled": True, "loss_scale": 128}})
    assert static.config.precision.loss_scale == 128.0


def test_fp16_block_without_a_loss_scale_means_a_dynamic_one(tmp_path: Path) -> None:
    loaded = load(
        tmp_path,
        {"fp16": {"enabled": True}},
        "--loss-scale 12 --micro-batch-size 1 --initial-loss-scale 65536",
    )
    assert loaded.config.precision.loss_scale is None
    assert loaded.config.precision.initial_loss_scale == 65536.0
    assert "--loss-scale 12.0 is not used" in loaded.warnings[0]
    without = load(tmp_path, {}, "--fp16 --loss-scale 128 --micro-batch-size 1")
    assert without.config.precision.loss_scale == 128.0
    assert not without.warnings


def test_blocks_that_hf_trainers_write(tmp_path: Path) -> None:
    """Such files have many "auto", an offloaded optimizer and checkpointing of activations."""
    content = {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "fp16": {"enabled": False, "loss_scale": 128},
        "bf16": {"enabled": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
        },
        "activation_checkpointing": {"partition_activations": True, "number_checkpoints": 4},
    }
    loaded = load(tmp_path, content, "--micro-batch-size 1 --bf16")
    config = loaded.config
    assert config.parallel.zero_stage == 2
    assert config.optimizer.cpu_optimizer is True
    assert config.precision.bf16 is True
    assert config.recompute.partition_activations
    assert config.precision.loss_scale is None
    (warning,) = loaded.warnings
    assert "activation_checkpointing.number_checkpoints has no effect" in warning
    assert select_passed_on(content, 1) == {
        "zero_optimization": {"offload_optimizer": {"pin_memory": True}}
    }


def test_8_bit_moments_turn_the_norm_of_the_embedding_on() -> None:
    argv = f"{MODEL} --micro-batch-size 1 --use-bnb-optimizer".split()
    assert load_config(argv).config.model.embed_layernorm
    assert not load_config([*argv, "--no-embed-layernorm"]).config.model.embed_layernorm


def test_legacy_curriculum_block(tmp_path: Path) -> None:
    block = {
        "enabled": True,
        "curriculum_type": "seqlen",
        "min_difficulty": 16,
        "max_difficulty": 64,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 100, "difficulty_step": 8},
    }
    curriculum = load(tmp_path, {**TR8, "curriculum_learning": block}).config.curriculum
    assert curriculum.curriculum_schedule_type == "fixed_linear"
    assert curriculum.curriculum_min_difficulty == 16
    assert curriculum.curriculum_max_difficulty == 64
    assert curriculum.curriculum_total_step == 100
    assert curriculum.curriculum_difficulty_step == 8
    steps = {
        "schedule_type": "fixed_discrete",
        "schedule_config": {"difficulty": [16, 32, 64], "max_step": [5, 10]},
    }
    discrete = load(
        tmp_path, {**TR8, "curriculum_learning": {"enabled": True, **steps}}
    ).config.curriculum
    assert discrete.curriculum_schedule_type == "fixed_discrete"
    assert discrete.curriculum_difficulties == (16, 32, 64)
    assert discrete.curriculum_max_steps == (5, 10)
    off = load(
        tmp_path, {**TR8, "curriculum_learning": {**block, "enabled": False}}
    ).config.curriculum
    assert off.curriculum_schedule_type is None
    message = error(
        tmp_path, {**TR8, "curriculum_learning": {**block, "curriculum_type": "rarity"}}
    )
    assert 'use "seqlen"' in message
    message = error(
        tmp_path, {**TR8, "curriculum_learning": block}, "--curriculum-min-difficulty 8"
    )
    assert "--curriculum-min-difficulty 8 contradicts" in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{\n "train_batch_size": 1_000\n}', r"ds_config.json:2 is not JSON"),
        ("[1]", "must hold an object"),
        ('{"a": 1,}', "no trailing commas"),
        ('{"train_batch_size": "many"}', 'train_batch_size is "many"'),
        ('{"fp16": {"enabled": 1}}', "fp16.enabled is 1"),
        ('{"fp16": {"enabled": true, "initial_scale_power": "x"}}', 'initial_scale_power is "x"'),
        (
            '{"zero_optimization": {"stage": 4}}',
            "zero_optimization.stage is 4, and must be one of 0, 1, 2, 3",
        ),
        (
            '{"gradient_accumulation_steps": 2.5}',
            "gradient_accumulation_steps is 2.5, and must be a whole number",
        ),
        ('{"scheduler": {"type": "WarmupLR"}}', "scheduler is not accepted"),
        (
            '{"optimizer": {"params": {"freeze_step": 3}}}',
            "optimizer.params.freeze_step is not accepted",
        ),
        ('{"optimizer": {"params": {"betas": 0.9}}}', "optimizer.params.betas is 0.9, and must be"),
        ('{"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}', 'use "cpu" or "none"'),
        (
            '{"fp16": {"enabled": true, "consecutive_hysteresis": true}}',
            "counts all overflows: use false",
        ),
        ('{"data_types": {"grad_accum_dtype": "bf16"}}', "accumulated in fp32"),
        (
            '{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}',
            "weights stay on the device",
        ),
        ('{"curriculum_learning": {"enabled": true}}', "has no schedule_type"),
        ('{"optimizer": {"type": "Lion"}}', 'optimizer.type is "Lion"'),
    ],
)
def test_invalid_files_are_errors(text: str, message: str, tmp_path: Path) -> None:
    found = error(tmp_path, text, "--micro-batch-size 1")
    assert message in found


def test_keys_that_change_no_number_are_passed_to_deepspeed(tmp_path: Path) -> None:
    more = {
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 1000},
        "comms_logger": {"enabled": True},
    }
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({**TR8, **more, "curriculum_learning": {"enabled": False}}))
    assert select_passed_on(read_json(str(path)), 4) == {
        "zero_optimization": {"reduce_bucket_size": 1000},
        "comms_logger": {"enabled": True},
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
    }


REFUSED = [
    # DeepSpeed would compute wrong numbers with these.
    ('{"zero_optimization": {"round_robin_gradients": true}}', "round_robin_gradients is true"),
    ('{"zero_optimization": {"zero_hpz_partition_size": 2}}', "zero_hpz_partition_size is 2"),
    ('{"zero_optimization": {"zero_hpz_partition_size": true}}', "zero_hpz_partition_size is true"),
    ('{"zero_optimization": {"zero_quantized_weights": true}}', "zero_quantized_weights is true"),
    (
        '{"zero_optimization": {"cpu_offload_param": true}}',
        "cpu_offload_param is true; weights stay on the device",
    ),
    (
        '{"zero_optimization": {"cpu_offload_use_pin_memory": true}}',
        "use offload_optimizer.pin_memory",
    ),
    (
        '{"zero_optimization": {"zenflow": {}}}',
        "zero_optimization.zenflow is not accepted; leave it out",
    ),
    (
        '{"torch_autocast": {"enabled": true}}',
        "torch_autocast is not accepted; use --fp16 or --bf16",
    ),
    (
        '{"communication_data_type": "fp16"}',
        "communication_data_type is not accepted; leave it out",
    ),
    ('{"prescale_gradients": 1}', "prescale_gradients is 1; gradients are averaged"),
    ('{"gradient_predivide_factor": 2.0}', "gradient_predivide_factor is 2.0; gradients are"),
    (
        '{"sequence_parallel_size": 2}',
        "sequence_parallel_size is not accepted; use --sequence-parallel",
    ),
    (
        '{"tensor_parallel": {"autotp_size": 2}}',
        "tensor_parallel is not accepted; use --tensor-model-parallel-size",
    ),
    ('{"compile": {"deepcompile": true}}', "compile is not accepted; leave it out"),
    ('{"wandb": {"enabled": true}}', "wandb is not accepted; use --tensorboard-dir"),
    ('{"wandb": {"enbaled": false}}', "wandb is not accepted"),
    # This trainer would override these.
    (
        '{"bf16": {"enabled": true, "bf16_master_weights_and_grads": true}}',
        "master weights, gradients and moments are fp32",
    ),
    ('{"bf16": {"enabled": true, "bf16_optimizer_states": true}}', "bf16_optimizer_states is true"),
    (
        '{"fp16": {"enabled": true, "fp16_master_weights_and_grads": true}}',
        "fp16_master_weights_and_grads is true",
    ),
    (
        '{"bf16": {"enabled": true, "check_grad_overflow": false}}',
        "a step with an infinity is dropped: use true",
    ),
    ('{"compression_training": {"a": {"enabled": true}}}', "compression_training is not accepted"),
    (
        '{"bfloat16": {"enabled": true}, "bf16": {"enabled": true}}',
        "bfloat16 and bf16 are the same block",
    ),
    # Values in place of blocks, and blocks in place of values.
    ('{"zero_optimization": 2}', "zero_optimization is 2, and must be an object"),
    ('{"zero_optimization": true}', "zero_optimization is true, and must be an object"),
    ('{"zero_optimization": [1]}', "zero_optimization is [1], and must be an object"),
    (
        '{"zero_optimization": {"stage": {"a": 1}}}',
        'zero_optimization.stage is {"a": 1}, and must be one of',
    ),
    (
        '{"zero_optimization": {"offload_optimizer": "cpu"}}',
        'offload_optimizer is "cpu", and must be an object',
    ),
    ('{"curriculum_learning": true}', "curriculum_learning is true, and must be an object"),
    (
        '{"activation_checkpointing": true}',
        "activation_checkpointing is true, and must be an object",
    ),
    ('{"fp16": true}', "fp16 is true, and must be an object"),
    ('{"fp16": null}', "fp16 is null, and must be an object"),
    ('{"bf16": true}', "bf16 is true, and must be an object"),
    ('{"bfloat16": true}', "bf16 is true, and must be an object"),
    ('{"pipeline": [1]}', "pipeline is [1], and must be an object"),
    ('{"checkpoint": "x"}', 'checkpoint is "x", and must be an object'),
    (
        '{"gradient_accumulation_steps": {}}',
        "gradient_accumulation_steps is {}, and must be a whole number",
    ),
    ('{"gradient_accumulation_steps": {"a": 1}}', "gradient_accumulation_steps is {"),
    ('{"gradient_accumulation_steps": null}', "gradient_accumulation_steps is null"),
    (
        '{"gradient_accumulation_steps": 0}',
        "gradient_accumulation_steps is 0, and must be at least 1",
    ),
    # Unknown keys.
    (
        '{"gradient_cliping": 1.0}',
        "gradient_cliping is not accepted; perhaps you meant gradient_clipping",
    ),
    ('{"zero_optimisation": {"stage": 1}}', "perhaps you meant zero_optimization"),
    ('{"train_microbatch_size_per_gpu": 1}', "perhaps you meant train_micro_batch_size_per_gpu"),
    ('{"BF16": {"enabled": true}}', "BF16 is not accepted; perhaps you meant bf16"),
    ('{"fp16 ": {"enabled": true}}', '"fp16 " is not accepted; perhaps you meant fp16'),
    ('{"fp16.enabled": true}', "fp16.enabled is not accepted"),
    ('{"stage": 1}', "stage is not accepted; perhaps you meant zero_optimization.stage"),
    ('{"": 1}', '"" is not accepted'),
    ('{"zero_optimization": {"reduce_bucketsize": 5}}', "perhaps you meant reduce_bucket_size"),
    ('{"activation_checkpointing": {"foo": 1}}', "activation_checkpointing.foo is not accepted"),
    ('{"data_types": {"params_dtype": "bf16"}}', "data_types.params_dtype is not accepted"),
    ('{"fp16": {"enabled": false, "loss_scael": 1}}', "perhaps you meant loss_scale"),
    ('{"train_batch_size": 8, "train_batch_size": 16}', "has train_batch_size twice in one object"),
    ('{"fp16": {"enabled": true, "enabled": false}}', "has enabled twice in one object"),
    # Values.
    ('{"optimizer": {"params": {"betas": [0.9, 0.95, 0.99]}}}', "must be a list of two numbers"),
    ('{"optimizer": {"params": {"betas": [[0.9], [0.95]]}}}', "and must be a number"),
    (
        '{"optimizer": {"params": {"lr": [0.1]}}}',
        "optimizer.params.lr is [0.1], and must be a number",
    ),
    (
        '{"fp16": {"enabled": true, "hysteresis": 2.7}}',
        "fp16.hysteresis is 2.7, and must be a whole number",
    ),
    (
        '{"fp16": {"enabled": true, "loss_scale_window": true}}',
        "loss_scale_window is true, and must be a whole number",
    ),
    ('{"fp16": {"enabled": true, "initial_scale_power": 5000}}', "must be between -1000 and 1000"),
    (
        '{"fp16": {"enabled": true, "loss_scale": true}}',
        "fp16.loss_scale is true, and must be a number",
    ),
    ('{"train_batch_size": [8]}', "train_batch_size is [8], and must be a whole number"),
    ('{"steps_per_print": 0}', "steps_per_print is 0, and must be at least 1"),
    ('{"steps_per_print": "auto"}', 'steps_per_print is "auto", which no flag provides'),
    ('{"data_types": {"grad_accum_dtype": "auto"}}', "which no flag provides"),
    ('{"amp": {"enabled": "auto"}}', "amp is not accepted"),
    ('{"elasticity": {"enabled": "auto"}}', "elasticity is not accepted"),
    (
        '{"curriculum_learning": {"enabled": "yes"}}',
        'curriculum_learning.enabled is "yes", and must be true or false',
    ),
    ('{"wall_clock_breakdown": "yes"}', "must be true or false"),
    ('{"comms_logger": {"prof_ops": [1]}}', "must be text"),
    ('{"zero_optimization": {"reduce_bucket_size": -1}}', "must be at least 1"),
    ('{"zero_optimization": {"stage3_max_live_parameters": 0.5}}', "must be a whole number"),
    (
        '{"zero_optimization": {"cpu_offload": true, "offload_optimizer": {"device": "none"}}}',
        "contradicts",
    ),
    ('{"pipeline": {"pipe_partitioned": false}}', "must be equal"),
    # These texts are not JSON.
    ('{"a": 1\n', "ds_config.json:2 is not JSON"),
    ("\n", "is not JSON"),
    ("", "is not JSON"),
    ('{"a": ' + "1" * 5000 + "}", "too many digits"),
    ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
    ('{"gradient_clipping": 1e400}', "the number 1e400, which is not finite"),
    ('{"gradient_clipping": NaN}', "the number NaN, which is not finite"),
    ('{"gradient_clipping": -Infinity}', "the number -Infinity, which is not finite"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED, ids=lambda text: text[:40])
def test_refused_keys_and_values(text: str, message: str, tmp_path: Path) -> None:
    assert message in error(tmp_path, text, "--micro-batch-size 1")


def test_stages_send_unsharded_tensors_with_sequence_parallel(tmp_path: Path) -> None:
    flags = "--micro-batch-size 1 --sequence-parallel --tensor-model-parallel-size 2"
    assert "must be false with --sequence-parallel" in error(
        tmp_path, {"pipeline": {"pipe_partitioned": True}}, flags
    )
    load(tmp_path, {"pipeline": {"pipe_partitioned": False, "grad_partitioned": False}}, flags)


def test_timers_of_deepspeed_are_not_passed_on_in_a_pipeline(tmp_path: Path) -> None:
    content = {"wall_clock_breakdown": True, "flops_profiler": {"enabled": True, "top_modules": 3}}
    assert not load(tmp_path, content, "--micro-batch-size 1").warnings
    assert select_passed_on(content, 1) == content
    flags = "--micro-batch-size 1 --pipeline-model-parallel-size 2"
    assert [warning.split()[1] for warning in load(tmp_path, content, flags).warnings] == [
        "wall_clock_breakdown",
        "flops_profiler.enabled",
    ]
    assert select_passed_on(content, 2) == {"flops_profiler": {"top_modules": 3}}


@pytest.mark.parametrize("name", ["fp32", "float32", "float", "torch.float32", None])
def test_fp32_accumulation_is_accepted_in_every_precision(name: str | None, tmp_path: Path) -> None:
    for block in ("fp16", "bf16"):
        content = {"data_types": {"grad_accum_dtype": name}, block: {"enabled": True}}
        assert not load(tmp_path, content, "--micro-batch-size 1").warnings


@pytest.mark.parametrize("name", ["Adam", "AdamW", "adam", "adamw"])
def test_the_name_of_the_optimizer_has_any_case(name: str, tmp_path: Path) -> None:
    assert not load(tmp_path, {"optimizer": {"type": name}}, "--micro-batch-size 1").warnings


def test_values_that_change_no_number_are_warnings(tmp_path: Path) -> None:
    content = {"prescale_gradients": True, "zero_allow_untested_optimizer": False}
    loaded = load(tmp_path, content, "--micro-batch-size 1")
    prescale, untested = loaded.warnings
    assert "prescale_gradients true has no effect here" in prescale
    assert "zero_allow_untested_optimizer false has no effect here" in untested
    assert select_passed_on(content, 1) == {}


def test_older_names_of_keys_are_read(tmp_path: Path) -> None:
    loaded = load(
        tmp_path,
        {"bfloat16": {"enabled": True}, "zero_optimization": {"cpu_offload": True}},
        "--micro-batch-size 1",
    )
    assert loaded.config.precision.bf16
    assert loaded.config.optimizer.cpu_optimizer
    assert "--no-cpu-optimizer" in error(
        tmp_path,
        {"zero_optimization": {"cpu_offload": True}},
        "--micro-batch-size 1 --no-cpu-optimizer",
    )


def test_auto_and_disabled_blocks_are_not_passed_on(tmp_path: Path) -> None:
    content = {
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": 5e7,
        },
        "amp": {"enabled": False, "opt_level": "O1"},
        "elasticity": {},
        "compression_training": {"layer_reduction": {"enabled": False}},
        "wandb": {"enabled": False},
        "bf16": {"enabled": "auto", "check_grad_overflow": True},
        "zero_allow_untested_optimizer": True,
    }
    assert not load(tmp_path, content, "--micro-batch-size 1").warnings
    assert select_passed_on(content, 1) == {
        "zero_optimization": {"stage3_prefetch_bucket_size": 50_000_000}
    }


def test_keys_without_effect_are_warnings(tmp_path: Path) -> None:
    content = {
        "checkpoint": {"tag_validation": "Warn"},
        "aio": {"block_size": 1},
        "dataloader_drop_last": True,
    }
    warnings = load(tmp_path, content, "--micro-batch-size 1").warnings
    keys = ("checkpoint.tag_validation", "aio.block_size", "dataloader_drop_last")
    for key, warning in zip(keys, warnings, strict=True):
        assert f"{key} has no effect" in warning


def test_byte_order_mark_is_skipped_and_a_folder_is_refused(tmp_path: Path) -> None:
    assert load(tmp_path, "\ufeff" + json.dumps(TR8)).config.batch.global_batch_size == 2048
    with pytest.raises(ConfigError, match="is not a file but a folder"):
        load_config(f"{MODEL} --micro-batch-size 1 --deepspeed_config {tmp_path}".split())


def test_rows_of_the_table_fit_each_other() -> None:
    for name, row in keys.KEYS.items():
        assert len(row.read) == max(1, len(row.to)), name
        assert set(row.ignored_values) <= set(row.allowed or ()), name
        # A key that is ignored would follow no other rule.
        assert row.ignored <= (row.allowed is None and not row.to and not row.passed), name
        assert bool(row.reason) == (row.ignored or row.allowed is not None), name
    assert not keys.KEYS.keys() & keys.BLOCK_NAMES
    known = keys.KEYS.keys() | keys.BLOCK_NAMES
    assert not keys.UNSUPPORTED_BLOCKS.keys() & known
    assert not keys.ALTERNATIVES.keys() & (known | keys.UNSUPPORTED_BLOCKS.keys())


def test_json_is_not_read_without_deepspeed(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text("no JSON")
    config = load_config(
        f"{WITHOUT_DEEPSPEED} --micro-batch-size 4 --deepspeed_config {path}".split()
    ).config
    assert config.batch.micro_batch_size == 4

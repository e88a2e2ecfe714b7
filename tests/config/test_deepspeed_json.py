"""DeepSpeed's JSON and the flags: what agrees, what is filled, what contradicts, what goes on."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.config.cli import load_config
from megatron.config.deepspeed_json import passed_on, read_json
from megatron.errors import ConfigError

MODEL = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --train-iters 10 --lr 1e-3 --deepspeed"
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


def test_the_json_fills_what_flags_leave_open(tmp_path: Path) -> None:
    loaded = load(tmp_path, TR8)
    config = loaded.config
    assert (config.batch.micro_batch_size, config.batch.global_batch_size) == (1, 2048)
    precision = config.precision
    assert precision.fp16
    assert precision.loss_scale is None
    assert (precision.initial_loss_scale, precision.loss_scale_window) == (4096.0, 500)
    assert loaded.origin["batch.global_batch_size"] == f"{tmp_path}/ds_config.json: train_batch_size"
    assert not loaded.warnings


def test_stage_0_of_the_json_is_a_value(tmp_path: Path) -> None:
    config = load(tmp_path, {"zero_optimization": {"stage": 0}, "bf16": {"enabled": True}}, "--micro-batch-size 2").config
    assert (config.parallel.zero_stage, config.precision.bf16) == (0, True)


@pytest.mark.parametrize("key", ["train_micro_batch_size_per_gpu", "train_batch_size", "gradient_clipping"])
def test_auto_is_left_to_the_flags(key: str, tmp_path: Path) -> None:
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
def test_what_both_give_must_agree(flags: str, both: tuple[str, str], tmp_path: Path) -> None:
    more = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    content = {**TR8, "zero_optimization": more, "optimizer": {"params": {"betas": [0.9, 0.999]}}}
    message = error(tmp_path, content, flags)
    assert all(part in message for part in both)
    assert "ds_config.json" in message


def test_all_contradictions_are_listed_together(tmp_path: Path) -> None:
    assert "2 errors" in error(tmp_path, TR8, "--micro-batch-size 2 --clip-grad 0.5")


def test_of_the_loss_scale_the_json_decides(tmp_path: Path) -> None:
    """tr8-104B's script has --loss-scale 12 beside a dynamic scale of 2 ** 12."""
    loaded = load(tmp_path, TR8, "--fp16 --loss-scale 12")
    assert loaded.config.precision.loss_scale is None
    assert len(loaded.warnings) == 1
    assert "--loss-scale 12.0 is not used" in loaded.warnings[0]
    static = load(tmp_path, {**TR8, "fp16": {"enabled": True, "loss_scale": 128}})
    assert static.config.precision.loss_scale == 128.0


def test_an_fp16_block_without_a_loss_scale_means_a_dynamic_one(tmp_path: Path) -> None:
    loaded = load(tmp_path, {"fp16": {"enabled": True}}, "--loss-scale 12 --micro-batch-size 1 --initial-loss-scale 65536")
    assert (loaded.config.precision.loss_scale, loaded.config.precision.initial_loss_scale) == (None, 65536.0)
    assert "--loss-scale 12.0 is not used" in loaded.warnings[0]
    without = load(tmp_path, {}, "--fp16 --loss-scale 128 --micro-batch-size 1")
    assert without.config.precision.loss_scale == 128.0
    assert not without.warnings


def test_blocks_that_hf_trainers_write(tmp_path: Path) -> None:
    """Everything "auto", an offloaded optimizer, checkpointing of activations."""
    content = {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "fp16": {"enabled": False, "loss_scale": 128},
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
        "activation_checkpointing": {"partition_activations": True, "number_checkpoints": 4},
    }
    loaded = load(tmp_path, content, "--micro-batch-size 1 --bf16")
    config = loaded.config
    assert (config.parallel.zero_stage, config.optimizer.cpu_optimizer, config.precision.bf16) == (2, True, True)
    assert config.recompute.partition_activations
    assert config.precision.loss_scale is None
    assert loaded.warnings == [f"{tmp_path}/ds_config.json: activation_checkpointing.number_checkpoints has no effect here."]
    assert passed_on(content) == {"zero_optimization": {"offload_optimizer": {"pin_memory": True}}}


def test_8_bit_moments_come_with_a_norm_of_the_embedding() -> None:
    argv = f"{MODEL} --micro-batch-size 1 --use-bnb-optimizer".split()
    assert load_config(argv).config.model.embed_layernorm
    assert not load_config([*argv, "--no-embed-layernorm"]).config.model.embed_layernorm


def test_the_legacy_curriculum_block(tmp_path: Path) -> None:
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
    assert (curriculum.curriculum_min_difficulty, curriculum.curriculum_max_difficulty) == (16, 64)
    assert (curriculum.curriculum_total_step, curriculum.curriculum_difficulty_step) == (100, 8)
    steps = {"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [16, 32, 64], "max_step": [5, 10]}}
    discrete = load(tmp_path, {**TR8, "curriculum_learning": {"enabled": True, **steps}}).config.curriculum
    assert discrete.curriculum_schedule_type == "fixed_discrete"
    assert (discrete.curriculum_difficulties, discrete.curriculum_max_steps) == ((16, 32, 64), (5, 10))
    off = load(tmp_path, {**TR8, "curriculum_learning": {**block, "enabled": False}}).config.curriculum
    assert off.curriculum_schedule_type is None
    message = error(tmp_path, {**TR8, "curriculum_learning": {**block, "curriculum_type": "rarity"}})
    assert 'say "seqlen"' in message
    message = error(tmp_path, {**TR8, "curriculum_learning": block}, "--curriculum-min-difficulty 8")
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
        ('{"zero_optimization": {"stage": 4}}', "zero_optimization.stage is 4, and must be as for --zero-stage"),
        ('{"gradient_accumulation_steps": 2.5}', "gradient_accumulation_steps is 2.5, and must be an integer"),
        ('{"scheduler": {"type": "WarmupLR"}}', "scheduler is not taken"),
        ('{"optimizer": {"params": {"freeze_step": 3}}}', "optimizer.params.freeze_step is not taken"),
        ('{"optimizer": {"params": {"betas": 0.9}}}', "optimizer.params.betas is 0.9, and must be"),
        ('{"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}', 'say "cpu" or "none"'),
        ('{"fp16": {"enabled": true, "consecutive_hysteresis": true}}', "counts all overflows: say false"),
        ('{"data_types": {"grad_accum_dtype": "bf16"}}', "accumulated in fp32"),
        (
            '{"data_types": {"grad_accum_dtype": "fp32"}, "fp16": {"enabled": true}}',
            "in fp16 DeepSpeed adds microbatches up in fp16",
        ),
        ('{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}', "weights stay on the device"),
        ('{"curriculum_learning": {"enabled": true}}', "has no schedule_type"),
        ('{"optimizer": {"type": "Lion"}}', 'optimizer.type is "Lion"'),
    ],
)
def test_bad_files(text: str, message: str, tmp_path: Path) -> None:
    found = error(tmp_path, text, "--micro-batch-size 1")
    assert message in found


def test_unknown_keys_go_on_to_deepspeed(tmp_path: Path) -> None:
    more = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 1000}, "comms_logger": {"enabled": True}}
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({**TR8, **more, "curriculum_learning": {"enabled": False}}))
    assert passed_on(read_json(str(path))) == {
        "zero_optimization": {"reduce_bucket_size": 1000},
        "comms_logger": {"enabled": True},
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
    }


def test_without_deepspeed_the_json_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text("no JSON")
    config = load_config(f"{MODEL.replace(' --deepspeed', '')} --micro-batch-size 4 --deepspeed_config {path}".split()).config
    assert config.batch.micro_batch_size == 4

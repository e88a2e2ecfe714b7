"""Plans of published runs and of small models, with all their errors and warnings."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from megatron.base.errors import ConfigError, LayoutError
from megatron.config.batch import BatchConfig
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.data import TokenizerConfig
from megatron.config.model import ModelConfig
from megatron.config.optimizer import OptimizerConfig
from megatron.config.tree import Config
from megatron.extras.interop.translators.translator import load_config
from megatron.model.partition import select_stages_of_rank
from megatron.plan.resolve import resolve
from megatron.plan.run_plan import Plan
from megatron.schedule.batch_size import ConstantBatchSize
from megatron.schedule.curriculum import Curriculum

BASE = Config(
    model=ModelConfig(num_layers=4, hidden_size=256, num_attention_heads=4, seq_length=128),
    batch=BatchConfig(micro_batch_size=2, global_batch_size=16, train_iters=100),
    optimizer=OptimizerConfig(lr=1e-3, min_lr=1e-4, lr_warmup_iters=10),
    tokenizer=TokenizerConfig(vocab_size=1000),
)


def with_changes(**groups: dict) -> Config:
    """Return BASE with fields changed, as in with_changes(model={"seq_length": 64})."""
    return dataclasses.replace(
        BASE,
        **{
            group: dataclasses.replace(getattr(BASE, group), **changes)
            for group, changes in groups.items()
        },
    )


def errors_of(world_size: int, origin: dict[str, str] | None = None, **groups: dict) -> str:
    return "\n".join(resolve(with_changes(**groups), world_size, origin).errors)


def warnings_of(world_size: int, **groups: dict) -> str:
    plan = resolve(with_changes(**groups), world_size)
    assert plan.errors == ()
    return "\n".join(plan.warnings)


def test_numbers_that_the_plan_derives():
    plan = resolve(with_changes(parallel={"tensor_model_parallel_size": 2}), 8)
    assert plan.errors == ()
    assert plan.data_parallel_size == 4
    assert plan.vocab_size == 1000
    assert plan.padded_vocab_size == 1024
    assert plan.shape.ffn_hidden_size == 1024
    assert plan.shape.head_dim == 64
    assert plan.shape.query_groups == 4
    assert plan.get_num_microbatches(16) == 2
    assert plan.train_iters == 100
    assert plan.train_samples == 1600
    assert plan.batch_size == ConstantBatchSize(16)
    assert plan.lr_schedule.warmup_steps == 160
    assert plan.lr_schedule.decay_steps == 1600
    assert plan.parameters == 4 * (12 * 256**2 + 13 * 256) + 1024 * 256 + 128 * 256 + 2 * 256
    plan.raise_on_errors()


def test_default_batch_size_is_one_microbatch_for_each_rank():
    plan = resolve(with_changes(batch={"global_batch_size": None}), 4)
    assert plan.batch_size.final == 8
    assert plan.get_num_microbatches(8) == 1


def test_batch_that_cannot_be_divided_into_microbatches_is_an_error():
    with pytest.raises(
        LayoutError,
        match="batch size 12 must be divisible by micro-batch size 2 x data-parallel size 4 = 8",
    ):
        resolve(BASE, 4).get_num_microbatches(12)


@pytest.mark.parametrize(("world", "start"), [(6, "4 or 8"), (3, "4"), (0, "4")])
def test_layout_must_divide_the_number_of_processes(world, start):
    errors = errors_of(
        world, parallel={"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    )
    layout = "--tensor-model-parallel-size 2 x --pipeline-model-parallel-size 2 = 4"
    assert f"{layout} must divide the number of processes, {world}" in errors
    assert f"start {start} processes" in errors


def test_a_single_process_gets_the_launcher():
    layout = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    assert "start 4 processes with torchrun --nproc-per-node 4" in errors_of(1, parallel=layout)
    assert "torchrun" not in errors_of(6, parallel=layout)


def test_tensor_parallel_size_must_divide_heads_groups_and_feed_forward():
    origin = {
        "parallel.tensor_model_parallel_size": "run.yaml:9",
        "model.num_attention_heads": "--num-attention-heads",
    }
    errors = errors_of(
        3,
        origin,
        model={"num_attention_heads": 16},
        batch={"global_batch_size": 6},
        parallel={"tensor_model_parallel_size": 3},
    )
    given = "--tensor-model-parallel-size 3 (run.yaml:9)"
    assert f"{given} must divide --num-attention-heads 16; use 1, 2, 4, 8 or 16." in errors
    assert f"{given} must divide --ffn-hidden-size 1024 (by default); use 1, 2, 4" in errors
    assert "--num-query-groups" not in errors
    narrow = {"ffn_hidden_size": 1002, "num_attention_heads": 4}
    assert "must divide --ffn-hidden-size 1002; use 1 or 2." in errors_of(
        4, model=narrow, parallel={"tensor_model_parallel_size": 4}
    )
    grouped = errors_of(
        4, model={"num_query_groups": 2}, parallel={"tensor_model_parallel_size": 4}
    )
    assert grouped == ""
    grouped = errors_of(
        2,
        model={"num_attention_heads": 6, "num_query_groups": 3, "hidden_size": 384},
        parallel={"tensor_model_parallel_size": 2},
    )
    assert (
        grouped == "--tensor-model-parallel-size 2 must divide --num-query-groups 3 or be a "
        "multiple of it; use 1, 3 or 6."
    )
    together = {"num_query_groups": 2, "qk_norm": "full", "normalization": "RMSNorm"}
    assert "--qk-norm full needs a query group for each tensor-parallel rank" in errors_of(
        4, model=together, parallel={"tensor_model_parallel_size": 4}
    )


def test_muon_needs_a_query_group_for_each_rank() -> None:
    few = {"num_query_groups": 2}
    parallel = {"tensor_model_parallel_size": 4}
    message = "--optimizer muon needs a query group for each tensor-parallel rank"
    muon = {"optimizer": "muon"}
    assert message in errors_of(4, model=few, parallel=parallel, optimizer=muon)
    assert message not in errors_of(4, model=few, parallel=parallel)
    assert message not in errors_of(2, model=few, optimizer=muon)


def test_sequence_parallel():
    parallel = {"sequence_parallel": True, "tensor_model_parallel_size": 4}
    assert "--tensor-model-parallel-size 4 must divide --seq-length 126" in errors_of(
        4, model={"seq_length": 126}, parallel=parallel
    )
    assert "no effect at --tensor-model-parallel-size 1" in warnings_of(
        1, parallel={"sequence_parallel": True}
    )


def test_batch_size_that_the_ranks_cannot_divide():
    error = errors_of(3)
    assert "--global-batch-size 16 must be divisible by --micro-batch-size 2" in error
    assert "data-parallel size 3 = 6; use 12 or 18" in error


def test_first_batch_size_of_the_ramp_that_does_not_fit_is_named():
    batch = {"rampup_batch_size": (8, 4, 64), "global_batch_size": 24}
    errors = errors_of(4, batch=batch)
    assert "--rampup-batch-size 8 4 64: batch size 12 must be divisible by" in errors
    assert "--micro-batch-size 2 x data-parallel size 4 = 8" in errors
    assert "batch size 20" not in errors


def test_batch_sizes_before_a_resume_need_not_fit():
    config = with_changes(batch={"rampup_batch_size": (8, 8, 64), "global_batch_size": 32})
    assert "batch size 8 must" in resolve(config, 8).errors[0]
    assert "batch size 24 must" in resolve(config, 8, consumed_samples=30).errors[0]
    assert resolve(config, 8, consumed_samples=65).errors == ()


def test_unknown_position_allows_a_resume_that_cannot_be_a_start():
    ramp = with_changes(batch={"rampup_batch_size": (8, 8, 64), "global_batch_size": 32})
    # Batch size 8 does not fit 8 ranks of 2 samples, so the run began on fewer processes.
    plan = resolve(ramp, 8, consumed_samples=None)
    assert plan.errors == ()
    assert "this can only be a resume past batch size 24" in "\n".join(plan.warnings)
    assert "batch size 24 must" in resolve(ramp, 4 * 2, consumed_samples=30).errors[0]
    start = with_changes(batch={"rampup_batch_size": (8, 4, 64), "global_batch_size": 24})
    # This run can start here, so a later size that does not fit is an error.
    assert "batch size 12 must" in resolve(start, 4, consumed_samples=None).errors[0]
    assert "--consumed-samples" not in resolve(start, 4, consumed_samples=None).errors[0]
    # With --load, this may be a later part of the run.
    resumed = dataclasses.replace(start, checkpoint=CheckpointConfig(load="runs/a"))
    error = resolve(resumed, 4, consumed_samples=None).errors[0]
    assert "past batch size 20, tools/plan.py --consumed-samples N plans" in error
    assert "--consumed-samples" not in resolve(resumed, 4, consumed_samples=1).errors[0]
    end = with_changes(batch={"rampup_batch_size": (8, 12, 64), "global_batch_size": 20})
    # This run cannot end here, because its final size does not fit.
    assert "batch size 8 must" in resolve(end, 8, consumed_samples=None).errors[0]


def test_step_schedule():
    batch = {"step_batch_size_schedule": ("0:16 1B:36",), "global_batch_size": None}
    assert "0:16 1B:36: batch size 36 must be divisible by" in errors_of(8, batch=batch)
    plan = resolve(
        with_changes(batch={**batch, "step_batch_size_schedule": ("0:16", "800samples:32")}), 8
    )
    assert plan.errors == ()
    assert plan.train_iters == 100
    assert plan.train_samples == 16 * 50 + 32 * 50
    contradiction = errors_of(
        8, batch={**batch, "global_batch_size": 64, "step_batch_size_schedule": ("0:16 1B:32",)}
    )
    assert "--global-batch-size 64 contradicts --step-batch-size-schedule" in contradiction
    assert "ends with 32" in contradiction
    assert "is not THRESHOLD:SIZE" in errors_of(
        8, batch={**batch, "step_batch_size_schedule": ("0:16 x",)}
    )


def test_bare_thresholds_are_planned_for_a_resume_only():
    bare = {"step_batch_size_schedule": ("0:16 800:32",), "global_batch_size": None}
    assert "'800:32' has no unit" in errors_of(8, batch=bare)
    plan = resolve(with_changes(batch=bare), 8, consumed_samples=None)
    assert plan.errors == ()
    assert any("planned as '0:16 800samples:32'" in warning for warning in plan.warnings)
    assert plan.train_samples == 16 * 50 + 32 * 50


def test_ramp_needs_a_global_batch_size():
    errors = errors_of(1, batch={"rampup_batch_size": (8, 4, 64), "global_batch_size": None})
    assert "--rampup-batch-size 8 4 64 needs --global-batch-size" in errors


def test_training_by_samples():
    samples = {"train_iters": None, "train_samples": 1000}
    optimizer = {"lr_warmup_iters": 0, "lr_warmup_samples": 100, "lr_decay_samples": 900}
    plan = resolve(with_changes(batch=samples, optimizer=optimizer), 1)
    assert plan.errors == ()
    assert plan.train_iters == 62
    assert plan.train_samples == 1000
    assert plan.lr_schedule.warmup_steps == 100
    assert plan.lr_schedule.decay_steps == 900
    none = errors_of(1, batch={**samples, "train_samples": 15}, optimizer=optimizer)
    assert "--train-samples 15 is less than one batch; give at least 16" in none


def test_warm_up_as_a_fraction_of_the_decay():
    plan = resolve(with_changes(optimizer={"lr_warmup_iters": 0, "lr_warmup_fraction": 0.05}), 1)
    assert plan.lr_schedule.warmup_steps == 0.05 * 1600
    assert plan.forecast().predict([5])[0].lr == 1e-3


def test_wsd_and_token_schedules_reach_the_plan():
    wsd = {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 20, "lr_wsd_decay_style": "linear"}
    plan = resolve(with_changes(optimizer=wsd), 1)
    assert plan.lr_schedule.wsd_decay_steps == 320
    assert plan.lr_schedule.wsd_decay_style == "linear"
    assert plan.forecast().predict([80, 90, 100])[1].lr == pytest.approx(5.5e-4)
    rising = resolve(with_changes(optimizer={"lr_warmup_init": 1e-5}), 1)
    assert rising.lr_schedule.get_lr(0) == 1e-5
    assert "--lr-warmup-init 0.01 must be" in errors_of(1, optimizer={"lr_warmup_init": 0.01})
    too_long = errors_of(1, optimizer=wsd | {"lr_wsd_decay_iters": 91})
    assert "final decay of 1456 samples" in too_long
    assert "must not reach into the warm-up of 160 samples; use at most 1440" in too_long
    tokens = resolve(
        with_changes(optimizer={"lr_decay_tokens": 150_000}, batch={"train_tokens": 150_000}), 1
    )
    assert tokens.lr_schedule.decay_tokens == 150_000
    assert tokens.forecast().predict([100])[0].lr == 1e-4


def test_invalid_learning_rate_schedule_is_an_error():
    assert "must be shorter than its decay" in errors_of(1, optimizer={"lr_warmup_iters": 100})


def test_vocabulary():
    assert resolve(with_changes(tokenizer={"pad_vocab_size_to": 1152}), 1).padded_vocab_size == 1152
    refused = errors_of(1, tokenizer={"pad_vocab_size_to": 1100})
    assert "must be divisible by --make-vocab-size-divisible-by 128. Use 1152" in refused
    assert "--pad-vocab-size-to 900" in errors_of(1, tokenizer={"pad_vocab_size_to": 900})
    assert "--pad-vocab-size-to 1001" in errors_of(
        2, tokenizer={"pad_vocab_size_to": 1001}, parallel={"tensor_model_parallel_size": 2}
    )
    assert "50257" in warnings_of(1, tokenizer={"vocab_size": None})
    absent = {
        "vocab_size": None,
        "tokenizer_type": "PretrainedFromHF",
        "tokenizer_name_or_path": "nowhere/at-all",
    }
    # A size that nobody knows is not assumed.
    assert "nowhere/at-all does not exist on this machine, so the size" in errors_of(
        1, tokenizer=absent
    )


def test_pipeline_stages():
    def stages(**parallel) -> tuple[int, ...]:
        config = with_changes(
            model={"num_layers": 30}, parallel={"pipeline_model_parallel_size": 4, **parallel}
        )
        return resolve(config, 4).layers_per_stage

    assert sum(stages()) == 30
    assert sorted(stages()) == [7, 7, 8, 8]
    assert stages(pp_partition_method="type:transformer|embedding") == (7, 8, 8, 7)
    # The embedding has a third of the parameters of a layer.
    assert stages(pp_partition_method="parameters") == (7, 8, 8, 7)
    assert "num-layers 30 over" in warnings_of(
        4, model={"num_layers": 30}, parallel={"pipeline_model_parallel_size": 4}
    )
    assert "--pipeline-model-parallel-size 8 must not exceed --num-layers 4" in errors_of(
        8, parallel={"pipeline_model_parallel_size": 8}
    )
    for method, text in (
        ("type:(", "write it as in type:transformer"),
        ("by-hand", "use uniform, parameters, type:REGEX or layers:SIZES"),
    ):
        assert text in errors_of(
            2, parallel={"pipeline_model_parallel_size": 2, "pp_partition_method": method}
        )


def test_large_embedding_reduces_the_layers_of_the_outer_stages():
    config = with_changes(
        model={"num_layers": 12, "hidden_size": 512},
        tokenizer={"vocab_size": 12_288},
        parallel={"pipeline_model_parallel_size": 4, "pp_partition_method": "parameters"},
    )
    plan = resolve(config, 4)
    assert plan.layers_per_stage == (2, 4, 4, 2)
    assert max(plan.stage_parameters) < 1.2 * min(plan.stage_parameters)


@pytest.mark.parametrize(
    ("sizes", "samples", "megatron"),
    [
        ({"step_batch_size_schedule": ("0:4", "100samples:8", "300samples:16")}, 1000, 94),
        ({"step_batch_size_schedule": ("0:4", "100samples:8", "300samples:16")}, 1004, None),
        ({"rampup_batch_size": (4, 4, 400), "global_batch_size": 8}, 100, 26),
        ({"rampup_batch_size": (4, 4, 400), "global_batch_size": 8}, 1001, None),
    ],
)
def test_another_number_of_iterations_in_megatron_lm_is_named(
    sizes: dict, samples: int, megatron: int | None
):
    """`megatron` is the result of its `update_train_iters`, if it is another one."""
    length = {"train_iters": None, "train_samples": samples, "micro_batch_size": 1}
    batch = {"global_batch_size": None, **length, **sizes}
    found = warnings_of(1, batch=batch, optimizer={"lr_warmup_iters": 0})
    assert ("Megatron-LM makes" in found) == (megatron is not None)
    if megatron is not None:
        assert f"gives {megatron - 1} iterations. Megatron-LM makes {megatron}," in found


def test_shapes_that_are_likely_a_mistake_are_warnings():
    assert resolve(BASE, 1).warnings == ()
    assert "head size 32" in warnings_of(1, model={"num_attention_heads": 8})
    assert "--ffn-hidden-size 512 is not 4 x --hidden-size 256 = 1024" in warnings_of(
        1, model={"ffn_hidden_size": 512}
    )
    assert warnings_of(1, model={"ffn_hidden_size": 704, "glu_activation": "swiglu"}) == ""
    assert "--ffn-hidden-size 704 (8/3 x hidden size)" in warnings_of(
        1, model={"glu_activation": "swiglu"}
    )
    assert "= 512 is an unusual ratio" in warnings_of(
        1, model={"num_layers": 32, "hidden_size": 16384, "num_attention_heads": 128}
    )
    assert "= 8 is an unusual ratio" in warnings_of(1, model={"num_layers": 32})


def test_few_microbatches_leave_ranks_idle():
    pipeline = {"pipeline_model_parallel_size": 4}
    alone = warnings_of(4, parallel=pipeline, batch={"global_batch_size": 4})
    assert "pipeline: GPipe, 2 microbatches for 4 stages" in alone
    assert "idle for 60 % of the time at batch size 4; larger batches" in alone
    # With 8 microbatches the ranks are idle for 3/11 of the time.
    assert "idle" not in warnings_of(4, parallel=pipeline, batch={"global_batch_size": 16})
    ramp = {
        "rampup_batch_size": (4, 4, 100),
        "global_batch_size": 40,
        "train_iters": None,
        "train_samples": 1000,
    }
    ramped = warnings_of(4, parallel=pipeline, batch=ramp, optimizer={"lr_warmup_iters": None})
    assert "idle for 60 % of the time at batch size 4, and for 13 % at batch size 40." in ramped


def test_virtual_stages():
    virtual = {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 2}
    plan = resolve(with_changes(model={"num_layers": 8}, parallel=virtual), 2)
    assert plan.errors == ()
    assert plan.warnings == ()
    assert plan.layers_per_stage == (2, 2, 2, 2)
    assert plan.stages_per_rank == 2
    assert plan.pipeline_size == 2
    second = select_stages_of_rank(plan.stages, 1, 2)
    assert [stage.layers for stage in second] == [range(2, 4), range(6, 8)]
    plain = resolve(
        with_changes(model={"num_layers": 8}, parallel={"pipeline_model_parallel_size": 2}), 2
    )
    # The embedding is on the first rank, and its copy is on the last one.
    assert plan.stage_parameters == plain.stage_parameters
    assert sum(plan.stage_parameters) == plan.parameters + plan.padded_vocab_size * 256
    assert plan.choose_pipeline_schedule(16).name == "interleaved 1F1B"
    assert plain.choose_pipeline_schedule(16).name == "1F1B"
    all_layers = {
        "parallel": {**virtual, "num_layers_per_virtual_pipeline_stage": 4},
        "model": {"num_layers": 8},
    }
    assert "--num-layers-per-virtual-pipeline-stage 4 has no effect" in warnings_of(2, **all_layers)


def test_virtual_stages_that_do_not_fit():
    def errors(layers: int, pipeline: int, per_stage: int) -> str:
        parallel = {
            "pipeline_model_parallel_size": pipeline,
            "num_layers_per_virtual_pipeline_stage": per_stage,
        }
        return errors_of(pipeline, model={"num_layers": layers}, parallel=parallel)

    assert errors(24, 4, 4).endswith(
        "x --pipeline-model-parallel-size 4 = 16 must divide --num-layers 24; use 1, 2, 3, 6."
    )
    assert "4 does not divide 30; remove this flag" in errors(30, 4, 2)
    assert "use --pipeline-model-parallel-size 2 or more" in errors(4, 1, 2)
    assert "--num-layers-per-virtual-pipeline-stage 0 must be at least 1" in errors(4, 2, 0)


def test_batch_sizes_that_interleaving_cannot_divide():
    virtual = {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1}
    assert "looped BFS" not in warnings_of(2, parallel=virtual, batch={"global_batch_size": 12})
    ramp = {
        "rampup_batch_size": (4, 2, 100),
        "global_batch_size": 16,
        "train_iters": None,
        "train_samples": 1000,
    }
    warnings = warnings_of(2, parallel=virtual, batch=ramp, optimizer={"lr_warmup_iters": None})
    # 3 microbatches of batch size 6 are one round, which interleaving accepts.
    assert "the 5 microbatches of batch size 10 do not divide into 2 equal rounds" in warnings
    assert warnings.count("looped BFS") == 1


def test_zero_that_communicates_for_every_microbatch():
    def warnings(world_size: int, **parallel) -> str:
        return warnings_of(world_size, parallel={"pipeline_model_parallel_size": 2, **parallel})

    stage_3 = warnings(4, zero_stage=3)
    assert "gathers the parameters again for every microbatch, 4 times a step" in stage_3
    stage_2 = warnings(4, zero_stage=2)
    assert "reduces the gradients for every microbatch, 4 times a step" in stage_2
    assert "every microbatch" not in warnings(4, zero_stage=1)
    # With a data-parallel size of 1 there is no communication.
    assert "every microbatch" not in warnings(2, zero_stage=3)


@pytest.mark.parametrize(
    ("parallel", "size", "copies"),
    [
        ({}, 16, 1),
        ({"zero_stage": 3, "sharding_strategy": "fsdp"}, 16, 1),
        ({"zero_stage": 3, "sharding_strategy": "hsdp"}, 8, 2),
        ({"zero_stage": 3, "sharding_strategy": "hsdp", "hsdp_shard_size": 4}, 4, 4),
        ({"zero_stage": 1, "hsdp_shard_size": 2}, 2, 8),
        ({"zero_stage": 0}, 1, 16),
        ({"zero_stage": 3, "sharding_strategy": "hsdp", "tensor_model_parallel_size": 2}, 4, 2),
        # DeepSpeed runs stage 0 as stage 1.
        ({"zero_stage": 0, "deepspeed": True}, 16, 1),
    ],
)
def test_ranks_that_share_a_copy_of_the_model(parallel: dict, size: int, copies: int):
    config = with_changes(parallel=parallel, batch={"global_batch_size": 32})
    plan = resolve(config, 16, ranks_per_node=8)
    assert plan.errors == ()
    assert (plan.shard_size, plan.copies) == (size, copies)


def test_a_run_on_a_part_of_a_node_has_one_copy():
    config = with_changes(parallel={"zero_stage": 3, "sharding_strategy": "hsdp"})
    assert resolve(config, 4, ranks_per_node=8).shard_size == 4


@pytest.mark.parametrize(
    ("parallel", "ranks_per_node", "message"),
    [
        ({"hsdp_shard_size": 3}, 8, "the group of 3 must divide the 8 data-parallel ranks"),
        ({"sharding_strategy": "hsdp"}, 6, "hsdp on nodes of 6 ranks"),
        (
            {"sharding_strategy": "hsdp", "tensor_model_parallel_size": 4},
            4,
            "a node has no whole group of data-parallel ranks",
        ),
        (
            {"sharding_strategy": "hsdp", "tensor_model_parallel_size": 4},
            6,
            "a node has no whole group of data-parallel ranks",
        ),
    ],
)
def test_groups_that_cannot_divide_the_ranks(parallel: dict, ranks_per_node: int, message: str):
    config = with_changes(parallel={"zero_stage": 3, **parallel})
    plan = resolve(config, 8, ranks_per_node=ranks_per_node)
    assert message in "\n".join(plan.errors)
    assert "--hsdp-shard-size" in "\n".join(plan.errors)


@pytest.mark.parametrize(
    ("parallel", "world", "message"),
    [
        ({}, 6, "--expert-model-parallel-size 4 must divide the 6 ranks of a stage"),
        (
            {"zero_stage": 3, "hsdp_shard_size": 3},
            12,
            "--expert-model-parallel-size 4 must divide the 3 ranks that share a copy",
        ),
    ],
)
def test_ranks_that_experts_cannot_divide(parallel: dict, world: int, message: str):
    plan = resolve(
        with_changes(
            model={"num_experts": 8},
            parallel={"expert_model_parallel_size": 4, **parallel},
            batch={"global_batch_size": 48},
        ),
        world,
    )
    (error,) = plan.errors
    assert error.startswith(message)


def test_skip_ranges():
    plan = resolve(with_changes(batch={"skip_train_iteration_range": ("20-30", "10-25")}), 1)
    assert plan.skip_ranges == ((10, 30),)
    assert plan.forecast().predict([40])[0].lr_samples == 19 * 16
    assert "'20' is not FIRST-LAST" in errors_of(1, batch={"skip_train_iteration_range": ("20",)})
    assert "reaches the end of training at iteration 100" in warnings_of(
        1, batch={"skip_train_iteration_range": ("90-100",)}
    )


def test_curriculum():
    curriculum = {
        "curriculum_schedule_type": "fixed_linear",
        "curriculum_min_difficulty": 12,
        "curriculum_max_difficulty": 128,
        "curriculum_total_step": 50,
        "curriculum_difficulty_step": 4,
    }
    tokens: dict[str, dict] = {
        "batch": {"train_tokens": 10**6},
        "optimizer": {"lr_decay_tokens": 10**6},
        "curriculum": curriculum,
    }
    plan = resolve(with_changes(**tokens), 1)
    assert plan.errors == ()
    assert sum("multiple of 8" in warning for warning in plan.warnings) == 2
    assert plan.forecast().predict([1, 50])[0].consumed_tokens == 16 * 12
    alone = resolve(
        with_changes(batch={"rampup_batch_size": (8, 8, 64)}, curriculum=curriculum), 1
    ).errors
    assert "leave out --rampup-batch-size" in alone[0]
    assert "give --train-tokens and --lr-decay-tokens" in alone[1]
    sharded: dict[str, dict] = {
        **tokens,
        "parallel": {"sequence_parallel": True, "tensor_model_parallel_size": 8},
        "model": {"num_attention_heads": 8},
    }
    error = resolve(with_changes(**sharded), 8).errors[0]
    assert "must divide every sequence length, but iteration 1 has 12" in error
    # After iteration 50 only the full length is left.
    assert resolve(with_changes(**sharded), 8, iteration=50, consumed_samples=800).errors == ()
    # Steps of 8 round the first length up to 16.
    rounded = curriculum | {"curriculum_difficulty_step": 8}
    assert resolve(with_changes(**sharded | {"curriculum": rounded}), 8).errors == ()
    uneven = rounded | {"curriculum_max_difficulty": 100}
    error = resolve(with_changes(**sharded | {"curriculum": uneven}), 8).errors[0]
    assert "has 100; make the lengths" in error


FLAGS: dict[str, dict] = {
    "batch": {"train_tokens": 200_000},
    "optimizer": {"lr_decay_tokens": 200_000},
    "curriculum": {
        "curriculum_schedule_type": "fixed_linear",
        "curriculum_min_difficulty": 16,
        "curriculum_total_step": 50,
    },
}


def curriculum_flags(tokens: int = 150_000, **changes: object) -> dict[str, dict]:
    changed = {f"curriculum_{name}": value for name, value in changes.items()}
    return FLAGS | {"batch": {"train_tokens": tokens}, "curriculum": FLAGS["curriculum"] | changed}


def test_curriculum_that_flags_describe():
    plan = resolve(with_changes(**curriculum_flags()), 1)
    assert plan.errors == ()
    assert plan.curriculum == Curriculum(
        "fixed_linear", 16, 128, total_curriculum_step=50, difficulty_step=8
    )
    assert [plan.get_seq_length(step) for step in (1, 4, 50, 90)] == [16, 24, 128, 128]
    root = curriculum_flags(schedule_type="fixed_root", root_degree=2, max_difficulty=64)
    assert resolve(with_changes(**root), 1).get_seq_length(13) == 40
    discrete = {
        "curriculum_schedule_type": "fixed_discrete",
        "curriculum_difficulties": (8, 128),
        "curriculum_max_steps": (3,),
    }
    plan = resolve(with_changes(**FLAGS | {"curriculum": discrete}), 1)
    assert plan.errors == ()
    assert [plan.get_seq_length(step) for step in (3, 4)] == [8, 128]
    assert resolve(with_changes(), 1).get_seq_length(3) == 128


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"min_difficulty": 256},
            "min_difficulty 256 must be at least 1 and at most max_difficulty 128",
        ),
        ({"total_step": 0}, "--curriculum-total-step 0 must be at least 1"),
        ({"schedule_type": "fixed_root"}, "needs --curriculum-root-degree"),
        ({"min_difficulty": None}, "needs --curriculum-min-difficulty"),
        ({"max_difficulty": 256}, "max_difficulty 256 must not exceed --seq-length 128"),
    ],
)
def test_invalid_curriculum_flags_are_errors(changes: dict[str, Any], message: str):
    (error,) = resolve(with_changes(**curriculum_flags(**changes)), 1).errors
    assert message in error


def test_end_of_a_run_with_a_curriculum():
    """A run that ends too early for its tokens or for the full length gets a warning.

    It has 100 iterations of 16 samples. The length grows in the first 50, which take about 55,000
    tokens. The other 50 have 128 tokens a sample and take 102,400.
    """

    def find_warnings(config: dict[str, dict], **position: Any) -> list[str]:
        return [
            text
            for text in resolve(with_changes(**config), 1, **position).warnings
            if "curriculum" in text
        ]

    assert find_warnings(curriculum_flags()) == []
    (short,) = find_warnings(curriculum_flags(tokens=200_000))
    assert "--train-iters 100 ends the run before --train-tokens 200000" in short
    (early,) = find_warnings(curriculum_flags(tokens=10_000))
    assert "ends at sequences of" in early
    assert "never reaches --seq-length 128" in early
    assert (
        "sequences of 64 tokens"
        in find_warnings(curriculum_flags(tokens=9000, max_difficulty=64, total_step=3))[0]
    )
    # Tokens before a resume count.
    assert (
        find_warnings(
            curriculum_flags(tokens=200_000),
            iteration=60,
            consumed_samples=960,
            consumed_tokens=130_000,
        )
        == []
    )
    assert (
        find_warnings(
            curriculum_flags(), iteration=99, consumed_samples=99 * 16, consumed_tokens=150_001
        )
        == []
    )


def test_absent_deepspeed_configuration_is_a_warning(tmp_path: Path):
    parallel = {"deepspeed": True, "deepspeed_config": str(tmp_path / "ds.json")}
    assert "ds.json does not exist" in warnings_of(1, parallel=parallel)
    (tmp_path / "ds.json").write_text("{}")
    assert "ds.json" not in warnings_of(1, parallel=parallel)


def test_sizes_below_one_are_errors_and_the_plan_is_returned():
    plan = resolve(
        with_changes(
            model={"num_layers": 0, "num_attention_heads": 0, "seq_length": -1},
            batch={"micro_batch_size": 0, "global_batch_size": 0},
            parallel={"tensor_model_parallel_size": 0, "pipeline_model_parallel_size": -2},
        ),
        4,
    )
    text = "\n".join(plan.errors)
    for given in (
        "num-layers 0",
        "num-attention-heads 0",
        "seq-length -1",
        "micro-batch-size 0",
        "global-batch-size 0",
    ):
        assert f"--{given} must be at least 1" in text
    assert plan.config.model.num_layers == 0


def test_all_failures_are_reported_together():
    plan = resolve(
        with_changes(
            model={"num_attention_heads": 6, "num_query_groups": 3, "hidden_size": 384},
            batch={"skip_train_iteration_range": ("x",), "global_batch_size": 15},
            parallel={"tensor_model_parallel_size": 2},
            tokenizer={"pad_vocab_size_to": 10},
            optimizer={"lr_warmup_iters": 1000},
        ),
        8,
    )
    assert len(plan.errors) == 5
    with pytest.raises(ConfigError, match="5 errors in the configuration:") as failure:
        plan.raise_on_errors()
    for error in plan.errors:
        assert error in str(failure.value)
    with pytest.raises(ConfigError, match=r"^--global-batch-size 16 must"):
        resolve(BASE, 3).raise_on_errors()


def published(run: str) -> tuple[dict, Plan]:
    """Return a published run's facts, and its plan on the number of processes that it had."""
    file = Path(__file__).parent / "fixtures" / "published_runs" / f"{run}.json"
    record = json.loads(file.read_text())
    loaded = load_config(record["arguments"])
    world = record["facts"]["nodes"] * record["facts"]["gpus_per_node"]
    return record["facts"], resolve(loaded.config, world, loaded.origin, consumed_samples=None)


@pytest.mark.parametrize("run", ["tr1-13B", "tr8-104B", "tr11-176B-ml"])
def test_plans_of_published_runs(run):
    facts, plan = published(run)
    assert plan.errors == ()
    assert plan.data_parallel_size == facts["data"]
    assert plan.train_iters == facts.get("train_iters", plan.train_iters)
    assert plan.parameters == facts.get("parameters", plan.parameters)
    assert any("ds_config.0.json" in warning for warning in plan.warnings)


def test_unusual_settings_of_published_runs_are_warnings():
    tr8 = "\n".join(published("tr8-104B")[1].warnings)
    assert "head size 145" in tr8
    assert "GPipe, 4 microbatches for 32 stages: ranks are idle for 89 %" in tr8
    tr1 = "\n".join(published("tr1-13B")[1].warnings)
    assert "can only be a resume past batch size 1008" in tr1


def test_stages_of_tr11():
    plan = published("tr11-176B-ml")[1]
    # With the embedding and the output projection there are 72 layers, 6 in each stage.
    assert plan.layers_per_stage == (5, *[6] * 10, 5)
    assert plan.padded_vocab_size == 250_880


def test_ranks_of_traces_must_exist():
    logging = {"profile_iterations": "3-4", "profile_dir": "traces", "profile_ranks": (0, 8)}
    assert "--profile-ranks 0 8 names a rank that does not exist" in errors_of(8, logging=logging)
    assert errors_of(8, logging=logging | {"profile_ranks": (0, 7)}) == ""
    assert errors_of(2, logging=logging | {"profile_ranks": (-1,)}) == ""


def test_a_trace_that_the_run_never_reaches_is_a_warning():
    logging = {"profile_iterations": "100-101", "profile_dir": "traces"}
    assert "profile" not in warnings_of(1, logging=logging)
    logging["profile_iterations"] = "101-102"
    assert "begins after the last iteration, 100" in warnings_of(1, logging=logging)

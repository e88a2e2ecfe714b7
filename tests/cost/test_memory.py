"""Memory against the closed forms of papers, and by what the layout must change."""

from dataclasses import replace

import pytest
from cost.published import make_gpt, make_llama, read_rows
from shared_data import shared_dir

from megatron.config.cli import load_config
from megatron.cost.hardware import load_hardware
from megatron.cost.layout import SOFTWARE, RankLayout
from megatron.cost.memory import estimate_memory
from megatron.model import flops
from megatron.plan import resolve
from megatron.plan_prediction import predict_plan

GIB = 2**30
PLAIN = replace(SOFTWARE["megatron-lm-2022"], fixed_gib=0, held_logit_bytes=0)


@pytest.mark.parametrize("name", ["22B", "530B"])
def test_closed_forms_of_korthikanti(name):
    """Equations 1 to 6 and table 2 of 2205.05198, which count no embeddings and no biases."""
    rows = read_rows(shared_dir("data", "published-runs", "performance.json"))
    row = next(row for row in rows if row.get("name") == name and "heads" in row)
    shape = make_gpt(row["hidden"], row["layers"], row["heads"], row["seq"], row["vocab"])
    layout = RankLayout(
        tensor=row["tp"],
        pipeline=row["pp"],
        virtual=row["interleave"],
        micro_batch=row["micro_batch"],
        zero_stage=0,
    )
    layers = row["layers"] // row["pp"]
    matrices = layers * flops.count_layer_matrix_parameters(shape, row["tp"])
    states = flops.estimate_parameter_memory(matrices, half=True).total
    assert states / GIB == pytest.approx(row["gib_parameters_and_optimizer"], rel=1e-6)
    for key, chosen in (
        ("gib_activations_tp_only", layout),
        (
            "gib_activations_selective_sequence_parallel",
            replace(layout, recompute="selective", sequence_parallel=True),
        ),
    ):
        memory = estimate_memory(shape, chosen, PLAIN, row["batch"])[0]
        assert memory.activations / GIB == pytest.approx(row[key], rel=1e-5)


def test_each_kind_of_memory_of_a_small_pipeline():
    shape = make_gpt(1024, 4, 16, 512, 32000)
    layout = RankLayout(pipeline=2, data=4, micro_batch=2, recompute="full")
    first, last = estimate_memory(shape, layout, SOFTWARE["megatron-core"], 64)
    sbh = 512 * 2 * 1024
    # Two microbatches in flight on the first rank, each with the inputs of two layers.
    assert first.activations == 2 * 2 * 2 * sbh
    assert last.activations == 2 * 2 * sbh
    assert first.logits == 0
    assert last.logits == 8 * 512 * 2 * 32000
    parameters = flops.count_stage_parameters(shape, 1, (2, 2))
    assert first.weights == 2 * parameters[0]
    assert first.optimizer_states == 8 * parameters[0] / 4
    assert first.master_weights == 4 * parameters[0] / 4
    assert first.gradients == 4 * parameters[0]
    assert first.buffers == 4 * 2 * sbh
    parts = vars(first).values()
    assert first.total == pytest.approx(sum(parts))


def test_zero_stage_3_gathers_what_it_shards():
    shape = make_llama(4096, 32, 32, 8, 14336, 4096, 128256)
    software = SOFTWARE["fsdp-compiled"]
    (whole,) = estimate_memory(shape, RankLayout(data=8, zero_stage=1), software, 8)
    (sharded,) = estimate_memory(shape, RankLayout(data=8, zero_stage=3), software, 8)
    assert sharded.weights == pytest.approx(whole.weights / 8, rel=1e-6)
    assert whole.buffers == 0
    # Two layers and what is outside of the layers, in half precision.
    assert 2 * 1.05e9 < sharded.buffers < 6e9
    assert sharded.total < whole.total


@pytest.mark.parametrize(
    "change",
    [
        {"recompute": "full"},
        {"recompute": "selective"},
        {"recompute": "operators"},
        {"micro_batch": 1},
        {"context": 2},
        {"tensor": 2},
        {"tensor": 2, "sequence_parallel": True},
    ],
)
def test_changes_that_need_less_memory(change):
    shape = make_llama(2048, 8, 16, 8, 5632, 2048, 32000)
    layout = RankLayout(data=2, micro_batch=2)
    # Without a flash kernel, so that selective recomputation has something to leave out.
    before = estimate_memory(shape, layout, PLAIN, 8)[0]
    after = estimate_memory(shape, replace(layout, **change), PLAIN, 8)[0]
    assert after.activations < before.activations


LLAMA_7B = (
    "--preset llama2-7b --seq-length 4096 --bf16 --train-iters 10 --lr 3e-4 --micro-batch-size 1 "
    "--global-batch-size 64"
)


@pytest.mark.parametrize(
    ("flags", "gigabytes"),
    [
        ("--zero-stage 1", {0: 38.5}),
        (
            "--zero-stage 1 --tensor-model-parallel-size 4 --sequence-parallel "
            "--pipeline-model-parallel-size 4",
            {0: 11.3, 2: 7.41, 3: 6.12},
        ),
        ("--sharding-strategy fsdp --checkpoint-activations", {0: 5.96}),
        ("--sharding-strategy fsdp --num-layers 16", {0: 14.1}),
        ("--sharding-strategy fsdp", {0: 25.9}),
        (
            "--zero-stage 1 --tensor-model-parallel-size 8 --sequence-parallel "
            "--global-batch-size 256",
            {0: 11.2},
        ),
    ],
)
def test_tensors_of_this_trainer_within_5_percent(flags, gigabytes):
    """The numbers were recorded from steps of this trainer on 64 fake GPUs.

    Those have no context and no libraries, so only tensors are compared.
    """
    loaded = load_config([*LLAMA_7B.split(), *flags.split()])
    plan = resolve(loaded.config, 64, loaded.origin)
    assert plan.errors == ()
    memory = predict_plan(plan, load_hardware("a100-80g")).memory
    for rank, recorded in gigabytes.items():
        tensors = memory[rank].total - memory[rank].fixed
        assert tensors / 1e9 == pytest.approx(recorded, rel=0.05)

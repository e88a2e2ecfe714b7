"""Memory against the closed forms of papers, and by what the layout must change."""

from dataclasses import replace

import pytest
from planner.other_trainers import SOFTWARE, PaperMemory
from planner.published import estimate_memory, make_gpt, make_llama, read_rows
from shared_data import shared_dir

from megatron.extras.planner.cost.layout import Overhead, RankLayout
from megatron.extras.planner.cost.memory import estimate_parameter_memory
from megatron.model import flops
from megatron.model.shape import ModelShape

GIB = 2**30
PLAIN = replace(
    SOFTWARE["megatron-lm-2022"],
    overhead=Overhead(fixed_gib=0),
    memory=PaperMemory(logit_bytes=0),
)


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
    states = estimate_parameter_memory(matrices, half=True).total
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


def test_the_7b_on_one_gpu_by_hand():
    """The sum of docs/dry_run.md."""
    config = make_llama(4096, 32, 32, 32, 11008, 2048, 32000).config
    shape = ModelShape(replace(config, hidden_dropout=0.0, attention_dropout=0.0), 32000, 32000)
    software = replace(SOFTWARE["trainer"], overhead=Overhead(fixed_gib=0))
    (memory,) = estimate_memory(shape, RankLayout(zero_stage=1), software, 2)
    assert memory.total == pytest.approx(133_540_421_632, rel=1e-5)
    assert memory.weights == 2 * 6_738_415_616
    assert memory.gradients == 4 * 6_738_415_616


def test_memory_in_fp32_without_masters():
    shape = make_llama(1024, 4, 8, 8, 2816, 512, 32000)
    parameters = flops.count_parameters(shape)
    software = replace(SOFTWARE["trainer"], half=False)
    (alone,) = estimate_memory(shape, RankLayout(zero_stage=1), software, 2)
    assert (alone.weights, alone.master_weights) == (0, 4 * parameters)
    assert alone.gradients == 4 * parameters
    # FSDP2 holds fp32 shards, and gathers them in fp32.
    (sharded,) = estimate_memory(shape, RankLayout(data=8, zero_stage=1), software, 16)
    assert (sharded.weights, sharded.master_weights) == (4 * parameters, 4 * parameters / 8)

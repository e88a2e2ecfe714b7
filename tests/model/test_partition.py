"""Tests that every layer is on one stage, in order, for all partition methods."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.base.errors import ConfigError
from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.model.partition import (
    Stage,
    count_layers_per_rank,
    make_single_stage,
    partition,
    select_stages_of_rank,
)
from megatron.model.shape import ModelShape


def shape(layers: int, vocab_size: int = 256) -> ModelShape:
    return ModelShape(
        ModelConfig(layers, hidden_size=16, num_attention_heads=1, seq_length=8),
        vocab_size,
        vocab_size,
    )


def parallel(
    ranks: int, method: str | None = None, per_virtual: int | None = None
) -> ParallelConfig:
    return ParallelConfig(
        pipeline_model_parallel_size=ranks,
        pp_partition_method=method,
        num_layers_per_virtual_pipeline_stage=per_virtual,
    )


def counts(stages: tuple[Stage, ...]) -> tuple[int, ...]:
    return tuple(len(stage.layers) for stage in stages)


def assert_every_layer_is_on_one_stage(stages: tuple[Stage, ...], layers: int) -> None:
    assert [layer for stage in stages for layer in stage.layers] == list(range(layers))
    assert [stage.index for stage in stages] == list(range(len(stages)))
    assert all(stage.layers for stage in stages)
    assert [stage.first for stage in stages] == [True] + [False] * (len(stages) - 1)
    assert [stage.last for stage in stages] == [False] * (len(stages) - 1) + [True]


METHODS = st.sampled_from(
    [
        None,
        "uniform",
        "parameters",
        "type:transformer",
        "type:transformer|embedding",
        "TYPE:Embedding",
    ]
)


@given(st.data(), METHODS, st.integers(1, 100_000))
def test_no_layer_is_lost(data, method, vocab_size):
    layers = data.draw(st.integers(1, 90))
    ranks = data.draw(st.integers(1, layers))
    stages = partition(shape(layers, vocab_size), parallel(ranks, method))
    assert len(stages) == ranks
    assert_every_layer_is_on_one_stage(stages, layers)
    assert [select_stages_of_rank(stages, rank, ranks) for rank in range(ranks)] == [
        (stage,) for stage in stages
    ]
    assert count_layers_per_rank(stages, ranks) == counts(stages)


def test_virtual_stages_that_count_the_embedding_and_the_output_layer():
    """70 layers on 6 x 2 stages are those of Megatron-LM with both --account-for flags."""
    method = "type:transformer|embedding"
    stages = partition(shape(70), parallel(6, method, per_virtual=6))
    assert counts(stages) == (5, *(6,) * 10, 5)
    assert_every_layer_is_on_one_stage(stages, 70)
    assert count_layers_per_rank(stages, 6) == (11, 12, 12, 12, 12, 11)
    for layers, per_virtual in ((72, 6), (70, 5), (10, 1)):
        with pytest.raises(ConfigError, match=r"\+ 2 \(--pp-partition-method counts both ends\)"):
            partition(shape(layers), parallel(6, method, per_virtual=per_virtual))


@given(st.integers(2, 9), st.integers(1, 5), st.integers(1, 5))
def test_virtual_stages_are_dealt_in_turn(ranks, per_rank, per_virtual):
    layers = ranks * per_rank * per_virtual
    stages = partition(shape(layers), parallel(ranks, per_virtual=per_virtual))
    assert counts(stages) == (per_virtual,) * (ranks * per_rank)
    assert_every_layer_is_on_one_stage(stages, layers)
    dealt = [select_stages_of_rank(stages, rank, ranks) for rank in range(ranks)]
    assert all(stage.index % ranks == rank for rank in range(ranks) for stage in dealt[rank])
    assert sorted(
        (stage for rank in dealt for stage in rank), key=lambda stage: stage.index
    ) == list(stages)
    assert dealt[0][0].first
    assert dealt[-1][-1].last
    assert count_layers_per_rank(stages, ranks) == (per_rank * per_virtual,) * ranks


@given(st.integers(1, 90), st.integers(1, 90))
def test_uniform_stages_differ_by_a_layer_at_most(layers, ranks):
    if ranks <= layers:
        sizes = counts(partition(shape(layers), parallel(ranks)))
        assert max(sizes) - min(sizes) <= 1


def test_no_pipeline_is_one_stage():
    stage = Stage(0, range(5), first=True, last=True)
    assert partition(shape(5), parallel(1)) == (stage,)
    assert make_single_stage(shape(5)) == stage


def test_the_published_partition_of_bloom():
    stages = partition(shape(70), parallel(12, "type:transformer|embedding"))
    assert counts(stages) == (5, *[6] * 10, 5)
    assert stages[1].layers == range(5, 11)
    assert stages[-1].layers == range(65, 70)


def test_given_sizes_are_those_of_the_stages():
    stages = partition(shape(9), parallel(4, "layers:1,4,2,2"))
    assert counts(stages) == (1, 4, 2, 2)
    assert_every_layer_is_on_one_stage(stages, 9)
    # As with the other methods, capital letters mean the same.
    assert partition(shape(9), parallel(4, "Layers:1,4,2,2")) == stages


def test_a_heavy_embedding_leaves_a_layer_for_each_stage():
    heavy = shape(6, vocab_size=10**6)
    assert counts(partition(heavy, parallel(4, "parameters"))) == (1, 2, 2, 1)
    assert counts(partition(heavy, parallel(6, "parameters"))) == (1,) * 6


@pytest.mark.parametrize(
    ("layers", "requested", "message"),
    [
        (3, parallel(4), "--pipeline-model-parallel-size 4 must not exceed --num-layers 3"),
        (6, parallel(2, "by-hand"), "by-hand is unknown"),
        (6, parallel(2, "type:("), "as in type:transformer|embedding"),
        (6, parallel(2, "layers:3,2"), "2 stages, and their sum must be --num-layers 6"),
        (6, parallel(2, "layers:3,3,0"), "as in layers:3,2,2"),
        (6, parallel(2, "layers:3,x,3"), "as in layers:3,2,2"),
        (6, parallel(3, "layers:3,0,3"), "a number above 0"),
        (12, parallel(2, per_virtual=4), "= 8 must divide --num-layers 12; use 1, 2, 3, 6"),
        (7, parallel(2, per_virtual=1), "2 does not divide 7; remove this flag"),
        (4, parallel(1, per_virtual=2), "use --pipeline-model-parallel-size 2 or more"),
    ],
)
def test_an_impossible_partition_is_an_error(layers, requested, message):
    with pytest.raises(ConfigError) as caught:
        partition(shape(layers), requested)
    assert message in str(caught.value)


def test_the_method_does_not_matter_without_a_pipeline():
    for method in ("uniform", "parameters", "type:embedding"):
        assert partition(shape(4), replace(parallel(1), pp_partition_method=method)) == (
            make_single_stage(shape(4)),
        )

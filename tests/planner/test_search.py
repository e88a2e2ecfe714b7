"""The search of layouts, and the footprint of BLOOM's run."""

import time
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from planner.other_trainers import SOFTWARE
from planner.published import make_gpt

from megatron.base.errors import ConfigError
from megatron.extras.planner.cost.hardware import load_hardware
from megatron.extras.planner.cost.layout import TRAINER, RankLayout, StepJob
from megatron.extras.planner.cost.memory import BALANCED_ENDS, Verdict, build_stages
from megatron.extras.planner.cost.search import (
    SearchSpace,
    find_context_size,
    find_enough_devices,
    iterate_layouts,
    search_layouts,
)
from megatron.extras.planner.cost.step_prediction import StepPrediction

BLOOM = make_gpt(14336, 70, 112, 2048, 250880, position_embedding_type="alibi")
CHOSEN = RankLayout(
    tensor=4,
    pipeline=12,
    data=8,
    micro_batch=2,
    recompute="full",
    partition=BALANCED_ENDS,
)
"""The layout of the run."""


@pytest.mark.parametrize("software", ["megatron-deepspeed-bf16", "trainer"])
def test_the_search_is_at_least_as_fast_as_blooms_layout(software):
    hardware = load_hardware("jean-zay-a100")
    space = SearchSpace(BLOOM, 2048, 384, hardware, SOFTWARE[software])
    result = search_layouts(space)
    best = result.fastest[0]
    theirs = StepPrediction(StepJob(BLOOM, CHOSEN, 2048, SOFTWARE[software], hardware))
    assert theirs.verdict is Verdict.FITS
    assert best.verdict is Verdict.FITS
    assert best.seconds <= theirs.seconds
    assert best.job.layout.ranks == 384
    assert result.too_large > 0
    seconds = [each.seconds for each in result.fastest if each.verdict is Verdict.FITS]
    assert seconds == sorted(seconds)
    assert len(seconds) == 10


def test_the_search_over_1024_devices_takes_less_than_10_seconds():
    space = SearchSpace(BLOOM, 2048, 1024, load_hardware("a100-80g"), TRAINER)
    start = time.process_time()
    assert search_layouts(space).fastest
    assert time.process_time() - start < 10


@pytest.mark.parametrize("layers", [24, 25])
def test_no_layout_is_listed_twice(layers):
    """Two methods that divide the layers into the same stages are one layout."""
    shape = make_gpt(2048, layers, 16, 2048, 51200)
    space = SearchSpace(shape, 64, 16, load_hardware("a100-80g"), TRAINER)
    seen = set()
    methods = set()
    for layout in iterate_layouts(space):
        methods.add(layout.partition)
        stages = build_stages(shape, layout)
        key = (replace(layout, partition="any"), stages)
        assert key not in seen
        seen.add(key)
    assert methods == {"uniform", BALANCED_ENDS}


def test_one_data_parallel_rank_has_one_zero_stage():
    """There is nothing to shard, so all stages are the same."""
    space = SearchSpace(BLOOM, 16, 1, load_hardware("h100"), TRAINER)
    assert {layout.zero_stage for layout in iterate_layouts(space)} == {1}
    space = replace(space, devices=2, tensor=1)
    sharded = {(each.data, each.zero_stage) for each in iterate_layouts(space)}
    assert sharded == {(1, 1), (2, 1), (2, 3)}


def test_enough_devices_are_the_first_multiple_with_a_fit():
    shape = make_gpt(4096, 32, 32, 2048, 51200)
    space = SearchSpace(shape, 96, 1, load_hardware("a100-40g"), TRAINER)
    enough = find_enough_devices(space)
    assert enough == 4
    for devices in (1, 2, 3):
        assert not search_layouts(replace(space, devices=devices)).fitting
    assert search_layouts(replace(space, devices=enough)).fitting


def test_the_search_finds_what_a_simulation_of_all_layouts_finds():
    shape = make_gpt(2048, 24, 16, 2048, 51200)
    space = SearchSpace(shape, 64, 16, load_hardware("a100-40g"), TRAINER)
    found = search_layouts(space, count=5)
    # Of the layouts that differ only in their stages, the fastest counts.
    groups: dict[RankLayout, float] = {}
    for each in found.fitting:
        group = replace(each.job.layout, virtual=1, partition="uniform")
        groups[group] = min(each.seconds, groups.get(group, each.seconds))
    assert [each.seconds for each in found.fastest] == sorted(groups.values())[:5]
    assert len(groups) < len(found.fitting)
    for each in found.fitting:
        # Otherwise the search could leave out the fastest one.
        assert each.lower_bound <= each.seconds * (1 + 1e-9)


def test_each_layout_divides_model_batch_and_devices():
    shape = make_gpt(2048, 24, 16, 2048, 51200)
    layouts = list(iterate_layouts(SearchSpace(shape, 96, 48, load_hardware("h100"), TRAINER)))
    assert len(set(layouts)) == len(layouts)
    for layout in layouts:
        assert layout.ranks == 48
        assert 96 % (layout.data * layout.micro_batch) == 0
        assert 16 % layout.tensor == 0
    assert {layout.recompute for layout in layouts} == {"none", "full"}


def test_each_micro_batch_up_to_16_that_divides_a_ranks_share_is_tried():
    shape = make_gpt(2048, 24, 16, 2048, 51200)
    layouts = iterate_layouts(SearchSpace(shape, 96, 4, load_hardware("h100"), TRAINER, 1, 1))
    assert sorted({layout.micro_batch for layout in layouts}) == [1, 2, 3, 4, 6, 8, 12]


def test_no_layout_is_an_error_that_names_the_batch():
    shape = make_gpt(2048, 24, 16, 2048, 51200)
    with pytest.raises(ConfigError, match="batch of 3 samples"):
        search_layouts(SearchSpace(shape, 3, 1024, load_hardware("h100"), TRAINER))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"network_gb_per_second": 3.0}, "seconds"),
        ({"memory_tb_per_second": 1.0}, "seconds"),
        ({"gemm_share": 0.4}, "seconds"),
        ({"node_gb_per_second": 30.0}, "seconds"),
    ],
)
def test_slower_hardware_is_slower(change, field):
    hardware = load_hardware("jean-zay-a100")
    fast = StepPrediction(StepJob(BLOOM, CHOSEN, 2048, TRAINER, hardware))
    slow = StepPrediction(StepJob(BLOOM, CHOSEN, 2048, TRAINER, replace(hardware, **change)))
    assert getattr(slow, field) > getattr(fast, field)


def test_shares_that_recompute_the_same_layers_are_one_layout():
    shape = make_gpt(1024, 2, 8, 512, 32000)
    space = SearchSpace(shape, 1, 1, load_hardware("a100-80g"), TRAINER)
    layouts = [each.job.layout for each in search_layouts(space).fitting]
    # No layer, one layer and both.
    assert len(layouts) == 3
    assert {layout.recomputed_share for layout in layouts} == {Fraction(1), Fraction(2, 3)}


def test_a_sequence_that_needs_several_ranks():
    shape = make_gpt(4096, 8, 32, 1 << 20, 32000, num_query_groups=8)
    space = SearchSpace(shape, 64, 64, load_hardware("h100"), TRAINER, tensor=1, pipeline=1)
    assert not search_layouts(space).fitting
    found = find_context_size(space)
    assert found is not None
    fitting = search_layouts(found).fitting
    assert fitting
    assert {each.job.layout.context for each in fitting} == {found.context}
    # With fewer samples than ranks, no other layout divides the batch.
    few = find_context_size(replace(space, batch_size=2))
    assert few is not None
    assert few.context == 32
    # Half as many ranks are too few.
    assert not search_layouts(replace(space, context=found.context // 2)).fitting
    assert find_context_size(replace(space, shape=make_gpt(4096, 8, 32, 2048, 32000))) is None


def test_memory_falls_with_the_ranks_of_a_sequence():
    shape = make_gpt(4096, 8, 32, 1 << 17, 32000, num_query_groups=8)
    kept = []
    for size in (1, 2, 4, 8, 16):
        layout = RankLayout(context=size, recompute="full")
        job = StepJob(shape, layout, 8, TRAINER, load_hardware("h100"))
        kept.append(StepPrediction(job).memory[0].activations)
    for before, after in pairwise(kept):
        assert after == pytest.approx(before / 2, rel=0.1)

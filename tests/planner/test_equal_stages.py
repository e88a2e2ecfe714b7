"""Stages of a hybrid that take equal times, though their layers differ."""

import re
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.commands import plan
from megatron.config.model import ModelConfig
from megatron.extras.planner.cost.hardware import load_hardware
from megatron.extras.planner.cost.layout import TRAINER, RankLayout
from megatron.extras.planner.cost.memory import build_stages
from megatron.extras.planner.cost.search import (
    EQUAL_TIMES,
    SearchSpace,
    balance_stages,
    divide_evenly,
    iterate_layouts,
    search_layouts,
)
from megatron.extras.planner.cost.step_prediction import StepJob, StepPrediction
from megatron.model.shape import ModelShape


def make_hybrid(layers: str, number: int) -> ModelShape:
    config = ModelConfig(
        *(number, 4096, 32, 4096),
        ffn_hidden_size=12288,
        num_query_groups=8,
        position_embedding_type="rotary",
        normalization="RMSNorm",
        glu_activation="swiglu",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        untie_embeddings_and_output_weights=True,
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=layers,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
    )
    return ModelShape(config, 150_016, 150_016)


H100 = load_hardware("h100")
IRREGULAR = make_hybrid("([1]*3+[0]*1)*4", 16)


def make_job(layout: RankLayout, shape: ModelShape = IRREGULAR) -> StepJob:
    return StepJob(shape, layout, 64, TRAINER, H100)


def divide(times: list[float], sizes: list[int]) -> list[float]:
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    assert ends[-1] == len(times)
    return [sum(times[slice(*pair)]) for pair in pairwise(ends)]


@given(st.lists(st.sampled_from([1.0, 0.3, 4.7]), min_size=1, max_size=10), st.data())
def test_no_other_division_has_a_shorter_longest_stage(times, data):
    stages = data.draw(st.integers(1, len(times)))
    sizes = divide_evenly(times, stages)
    assert len(sizes) == stages
    assert min(sizes) > 0
    others = (
        divide(times, [b - a for a, b in pairwise((0, *inner, len(times)))])
        for inner in combinations(range(1, len(times)), stages - 1)
    )
    assert max(divide(times, sizes)) == pytest.approx(min(map(max, others)), rel=1e-9)


def test_what_remains_is_divided_too():
    assert divide_evenly([1.0] * 10, 4) == [2, 2, 3, 3]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_no_other_stages_of_an_irregular_hybrid_have_a_shorter_longest_one(recompute):
    """Three of four layers have a delta net, and the last stage has the untied output layer."""
    layout = RankLayout(pipeline=4, data=2, recompute=recompute)
    even = StepPrediction(make_job(layout))
    balanced = StepPrediction(balance_stages(even.job))

    def find_longest(prediction):
        return max(each.total for each in prediction.rank_seconds)

    assert [len(stage.layers) for stage in even.stages] == [4] * 4
    assert balanced.seconds < even.seconds
    longest = find_longest(balanced)
    for inner in combinations(range(1, 16), 3):
        sizes = ",".join(str(b - a) for a, b in pairwise((0, *inner, 16)))
        other = StepPrediction(make_job(replace(layout, partition=f"layers:{sizes}")))
        assert longest <= find_longest(other) * (1 + 1e-9), sizes


def test_the_search_divides_layers_by_their_times():
    space = SearchSpace(IRREGULAR, 64, 8, H100, TRAINER, tensor=1, pipeline=4, micro_batch=1)
    assert EQUAL_TIMES in {each.partition for each in iterate_layouts(space)}
    best, *_ = search_layouts(space).fastest
    assert re.fullmatch(r"layers:\d+,\d+,\d+,\d+", best.job.layout.partition)
    # No layout keeps the place-holder, and equal divisions are one layout.
    found = search_layouts(replace(space, shape=make_hybrid("[1]*16", 16)))
    listed = [each.job.layout for each in (*found.fitting, *found.uncertain)]
    assert EQUAL_TIMES not in {each.partition for each in listed}
    stages = [(replace(each, partition=""), build_stages(IRREGULAR, each)) for each in listed]
    assert len(set(stages)) == len(stages)


def test_ranks_with_other_kinds_of_layers_need_other_memory():
    """The second and the third of four stages have as many layers, of two kinds."""
    shape = make_hybrid("[0]*8+[1]*8", 16)
    prediction = StepPrediction(make_job(RankLayout(pipeline=4, data=2), shape))
    totals = [each.total for each in prediction.memory]
    assert totals[2] == max(totals)
    assert prediction.peak_bytes == max(totals)


COMMAND = (
    "--world-size 8 --hardware h100 --num-layers 16 --hidden-size 4096 --ffn-hidden-size 12288 "
    "--num-attention-heads 32 --num-query-groups 8 --seq-length 4096 --vocab-size 150000 "
    "--position-embedding-type rotary --normalization RMSNorm --glu-activation swiglu "
    "--no-add-bias-linear --hidden-dropout 0 --attention-dropout 0 --mock-data --bf16 --lr 1e-4 "
    "--untie-embeddings-and-output-weights --experimental-attention-variant gated_delta_net "
    "--linear-attention-freq ([1]*3+[0]*1)*4 --linear-num-key-heads 16 --train-iters 100 "
    "--linear-num-value-heads 32 --micro-batch-size 1 --global-batch-size 64 "
    "--pipeline-model-parallel-size 4"
)


def test_a_plan_prints_the_times_and_a_faster_division(capsys):
    def show(*more: str) -> tuple[str, list[float]]:
        assert plan.main([*COMMAND.split(), *more]) == 0
        text = capsys.readouterr().out
        (seconds,) = re.findall(r"by pipeline rank +([\d. ]+) s of computation", text)
        return text, [float(each) for each in seconds.split()]

    text, before = show()
    (advice,) = re.findall(r"give (--pp-partition-method layers:[\d,]+)", text)
    text, after = show(*advice.split())
    assert max(after) < max(before)
    assert max(after) - min(after) < max(before) - min(before)
    assert "give --pp-partition-method" not in text
    assert "is uneven" not in text

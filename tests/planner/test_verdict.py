"""Whether a layout fits, may fit, or does not fit in the memory of a device."""

import math
from dataclasses import replace

import pytest
from planner.published import make_gpt

from megatron.extras.interop.translators.translator import load_config
from megatron.extras.planner.cost.hardware import load_hardware
from megatron.extras.planner.cost.layout import TRAINER
from megatron.extras.planner.cost.memory import Verdict, judge_peak
from megatron.extras.planner.cost.search import SearchResult, SearchSpace, search_layouts
from megatron.extras.planner.cost.step_prediction import StepPrediction
from megatron.extras.planner.prediction import predict_plan
from megatron.plan.resolve import resolve

GIB = 2**30
SEVEN = "--preset llama2-7b --bf16 --micro-batch-size 1 --train-iters 10 --lr 1e-4"
SMALL = make_gpt(2048, 24, 16, 2048, 51200)


def predict(gib: float) -> StepPrediction:
    """Predict a 7B on one device with this memory."""
    plan = resolve(load_config([*SEVEN.split(), "--global-batch-size", "16"]).config, 1)
    return predict_plan(plan, replace(load_hardware("h200"), memory_gib=gib))


def search(gib: float) -> SearchResult:
    hardware = replace(load_hardware("a100-80g"), memory_gib=gib)
    return search_layouts(SearchSpace(SMALL, 16, 2, hardware, TRAINER), count=3)


def test_the_verdict_changes_exactly_at_the_memory_of_the_device() -> None:
    hardware = replace(load_hardware("h200"), memory_gib=128, usable_share=0.75)
    for peak, verdict in (
        (96 * GIB, Verdict.FITS),
        (math.nextafter(96 * GIB, math.inf), Verdict.MAY_FIT),
        (128 * GIB, Verdict.MAY_FIT),
        (math.nextafter(128 * GIB, math.inf), Verdict.DOES_NOT_FIT),
    ):
        assert judge_peak(peak, hardware) is verdict


def test_a_7b_may_fit_on_one_h200() -> None:
    step = predict(load_hardware("h200").memory_gib)
    tensors = max(rank.total - rank.fixed for rank in step.memory)
    assert step.peak_bytes == pytest.approx(tensors + 1.5 * GIB)
    # The number of docs/planner.md.
    assert step.peak_bytes / GIB == pytest.approx(131.6, abs=0.05)
    assert step.verdict is Verdict.MAY_FIT
    assert predict(131.6 / 0.9 + 0.1).verdict is Verdict.FITS
    assert predict(131).verdict is Verdict.DOES_NOT_FIT


def test_a_search_begins_with_layouts_that_fit() -> None:
    # With this memory, the two fastest layouts only may fit.
    found = search(26)
    verdicts = [each.verdict for each in found.fastest]
    assert verdicts[:3] == 3 * [Verdict.FITS]
    assert verdicts[3:] == 2 * [Verdict.MAY_FIT]
    seconds = [each.seconds for each in found.fastest]
    assert seconds[:3] == sorted(seconds[:3])
    assert seconds[3:] == sorted(seconds[3:])
    # Slower ones that may fit are of no use.
    assert seconds[-1] < seconds[0]
    assert len(found.uncertain) > 2
    assert {each.verdict for each in found.fitting} == {Verdict.FITS}
    assert {each.verdict for each in found.uncertain} == {Verdict.MAY_FIT}
    # With all memory of the world, the same layouts fit.
    total = len(found.fitting) + len(found.uncertain) + found.too_large
    assert len(search(1000).fitting) == total


def test_a_search_without_layouts_that_fit_gives_those_that_may_fit() -> None:
    least = min(each.peak_bytes for each in search(1000).fitting) / GIB
    found = search(1.01 * least)
    assert not found.fitting
    assert {each.verdict for each in found.fastest} == {Verdict.MAY_FIT}
    assert search(0.99 * least).fastest == ()

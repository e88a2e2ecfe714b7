"""Whether a layout fits, may fit, or does not fit in the memory of a device."""

import math
from dataclasses import replace

import pytest
from cost.published import make_gpt

from megatron.config.cli import load_config
from megatron.cost.hardware import load_hardware
from megatron.cost.layout import SOFTWARE, TRAINER, Overhead, RankLayout
from megatron.cost.memory import PeakMemory, Verdict
from megatron.cost.search import SearchResult, SearchSpace, search_layouts
from megatron.cost.step import StepJob, StepPrediction
from megatron.plan import resolve
from megatron.plan_prediction import predict_plan

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
    peak = PeakMemory(100.0, 120.0)
    for memory, verdict in (
        (120.0, Verdict.FITS),
        (math.nextafter(120.0, 0), Verdict.MAY_FIT),
        (100.0, Verdict.MAY_FIT),
        (math.nextafter(100.0, 0), Verdict.DOES_NOT_FIT),
    ):
        assert peak.judge(memory) is verdict


def test_a_7b_may_fit_on_one_h200() -> None:
    step = predict(load_hardware("h200").memory_gib)
    tensors = max(rank.total - rank.fixed for rank in step.memory)
    assert step.peak.predicted == pytest.approx(tensors + 1.5 * GIB)
    assert step.peak.with_margin == pytest.approx(1.15 * tensors + 4.5 * GIB)
    # The numbers of docs/planner.md.
    assert step.peak.predicted / GIB == pytest.approx(136.3, abs=0.05)
    assert step.peak.with_margin / GIB == pytest.approx(159.5, abs=0.05)
    assert step.verdict is Verdict.MAY_FIT
    assert predict(160).verdict is Verdict.FITS
    assert predict(136).verdict is Verdict.DOES_NOT_FIT


@pytest.mark.parametrize("name", sorted(SOFTWARE.keys() - {"trainer"}))
def test_other_trainers_have_no_margin(name: str) -> None:
    """Their entries are compared with published runs."""
    job = StepJob(SMALL, RankLayout(), 16, SOFTWARE[name], load_hardware("h200"))
    peak = StepPrediction(job).peak
    assert peak.with_margin == pytest.approx(peak.predicted, rel=1e-12)


def test_the_margin_is_that_of_blooms_rows() -> None:
    assert SOFTWARE["megatron-deepspeed"].overhead == TRAINER.margin == Overhead(1.15, 4.5)


def test_a_search_begins_with_layouts_that_fit() -> None:
    # With this memory, the two fastest layouts only may fit.
    found = search(32)
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
    least = min(each.peak.predicted for each in search(1000).fitting) / GIB
    found = search(1.01 * least)
    assert not found.fitting
    assert {each.verdict for each in found.fastest} == {Verdict.MAY_FIT}
    assert search(0.99 * least).fastest == ()

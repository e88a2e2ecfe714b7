"""The running estimates of the spike guard, without a run."""

import json
import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.extras.watch.guard.spike_estimator import LASTING, SpikeEstimator

VALUES = st.lists(st.floats(min_value=0.01, max_value=100), min_size=1, max_size=80)


def make_estimator(reach: int | None = 1000, *, window: int = 128) -> SpikeEstimator:
    return SpikeEstimator(
        window=window, smoothing=16, min_steps=16, threshold=10.0, min_rise=0.05, reach=reach
    )


def find_spikes(values: Sequence[float], estimator: SpikeEstimator | None = None) -> list[int]:
    """Return the 1-based positions of the spikes."""
    estimator = estimator or make_estimator()
    found = []
    for at, value in enumerate(values, 1):
        low, high = estimator.find_limits()
        if (high is not None and value > high) or (low is not None and value < low):
            found.append(at)
        estimator.record(value, at)
    return found


def make_curve(seed: int, steps: int, noise: float = 0.03) -> list[float]:
    """Return a loss that falls from about 11 as a power law, with normal noise."""
    random_source = random.Random(seed)
    return [1.7 + 9 * (1 + at / 50) ** -0.4 + random_source.gauss(0, noise) for at in range(steps)]


def make_published_like_curve(steps: int) -> list[float]:
    """Return a loss with the batch sizes of BLOOM (tr11-176B-ml) and its kind of noise.

    The batch grows from 192 to 2048 samples, and the noise falls with its root. The curve also
    wanders slowly, and some batches are of another kind.
    """
    random_source = random.Random(176)
    wander = 0.0
    curve = []
    for at in range(steps):
        batch = min(2048, 192 + 16 * (at // 20))
        wander = 0.99 * wander + random_source.gauss(0, 0.002)
        odd = 0.08 * (random_source.random() < 0.01)
        noise = random_source.gauss(0, 0.5 / math.sqrt(batch))
        curve.append(1.9 + 9.5 * (1 + at / 30) ** -0.55 + wander + noise + odd)
    return curve


@pytest.mark.parametrize("seed", range(5))
def test_clean_curves_have_no_spike(seed: int) -> None:
    assert find_spikes(make_curve(seed, 3000)) == []


def test_published_like_curve_has_no_spike() -> None:
    assert find_spikes(make_published_like_curve(5000)) == []


@pytest.mark.parametrize("at", [2, 5, 17, 25, 40, 63, 64, 300, 2000])
def test_jump_is_found_at_once(at: int) -> None:
    """Also in the first steps, in which the loss falls steeply."""
    curve = make_curve(1, at)
    # In the first steps only a jump above the first losses can be told from noise.
    curve[-1] = 13.5 if at < 17 else curve[-2] + 1.5
    assert find_spikes(curve) == [at]


@pytest.mark.parametrize("factor", [0.3, 0.7, 1.5])
def test_stretch_of_bad_data_is_found_to_its_end(factor: float) -> None:
    """Text that repeats itself has a low loss. It must not make later text look bad."""
    curve = make_curve(2, 400)
    curve[200:220] = [factor * loss for loss in curve[200:220]]
    assert find_spikes(curve) == list(range(201, 221))


@pytest.mark.parametrize("factor", [0.3, 0.7, 1.5])
def test_lasting_change_becomes_normal(factor: float) -> None:
    """The old level stays normal too."""
    curve = make_curve(2, 600)
    curve[200:400] = [factor * loss for loss in curve[200:400]]
    assert find_spikes(curve) == list(range(201, 201 + LASTING))


def test_steep_fall_is_no_spike() -> None:
    """A model of an easy language learns it in some steps."""
    noise = random.Random(3)
    fall = [4.17 - 0.21 * at for at in range(12)]
    fall += [1.88, 1.77, 1.72, 1.49, 1.48, 1.23, 1.27, 1.29, 1.07, 1.06, 1.02, 0.96]
    curve = [*fall, *(0.85 + noise.uniform(-0.12, 0.12) for _ in range(100))]
    assert find_spikes(curve) == []


def test_two_kinds_of_data_in_turns_become_normal() -> None:
    curve = [
        loss * (1.5 if at > 200 and at % 2 else 1) for at, loss in enumerate(make_curve(2, 600))
    ]
    found = find_spikes(curve)
    assert found
    assert found[-1] < 350


def test_unusual_first_values_are_forgotten_soon() -> None:
    """A guard that is switched on may see bad data first."""
    found = find_spikes([1.0, 1.0, *make_curve(2, 100)[40:]])
    assert found == [3, 4, 5, 6]


@pytest.mark.parametrize("length", [50, 200, 500])
def test_slow_rise_is_found(length: int) -> None:
    """No step of the rise is far above the one before it."""
    curve = make_curve(3, 1500)
    for at in range(length):
        curve[1000 + at] += 1.0 * at / length
    found = find_spikes(curve)
    assert found
    assert 1000 < found[0] < 1000 + length
    assert max(found) <= 1000 + length


def test_beginning_of_a_slow_rise_is_estimated() -> None:
    estimator = make_estimator()
    curve = make_curve(4, 1400)
    for at in range(400):
        curve[1000 + at] += 1.5 * at / 400
    first = find_spikes(curve, estimator)[0]
    rebuilt = make_estimator()
    for at in range(1, first):
        rebuilt.record(curve[at - 1], at)
    assert 900 < rebuilt.find_last_normal(first) < 1060
    # A jump has no beginning of its own.
    steady = make_estimator()
    for at, value in enumerate(make_curve(5, 500), 1):
        steady.record(value, at)
    assert steady.find_last_normal(501) == 500


def test_signal_without_a_lowest_level_may_rise_slowly() -> None:
    values = [math.exp(at / 1000) for at in range(2000)]
    assert find_spikes(values, make_estimator(None)) == []
    assert find_spikes([*values, 30.0], make_estimator(None)) == [2001]


def test_equal_values_leave_a_limit_above_them() -> None:
    """The noise is zero then."""
    assert find_spikes([2.0] * 100 + [2.09] * 5 + [2.11]) == [106]


@given(values=VALUES, split=st.integers(0, 80))
@settings(max_examples=50, deadline=None)
def test_resumed_estimates_equal_those_of_an_uninterrupted_run(
    values: list[float], split: int
) -> None:
    whole = make_estimator(20, window=16)
    resumed = make_estimator(20, window=16)
    for at, value in enumerate(values, 1):
        if at == split:
            state = json.loads(json.dumps(resumed.state()))
            resumed = make_estimator(20, window=16)
            resumed.load(state)
        whole.record(value, at)
        resumed.record(value, at)
        assert resumed.find_limits() == whole.find_limits()
        assert resumed.find_last_normal(at + 1) == whole.find_last_normal(at + 1)
    assert resumed.state() == whole.state()


@given(values=VALUES, scale=st.floats(min_value=0.1, max_value=10))
@settings(max_examples=50, deadline=None)
def test_limit_has_the_scale_of_the_signal(values: list[float], scale: float) -> None:
    plain = make_estimator(None)
    scaled = make_estimator(None)
    for at, value in enumerate(values, 1):
        plain.record(value, at)
        scaled.record(scale * value, at)
    limit = plain.find_limits()[1]
    assert (limit is None) == (len(values) < 16)
    if limit is not None:
        assert scaled.find_limits()[1] == pytest.approx(scale * limit, rel=1e-9)


@given(values=VALUES)
@settings(max_examples=50, deadline=None)
def test_limits_are_around_the_level(values: list[float]) -> None:
    """A value between the smallest and the largest one so far may be normal."""
    estimator = make_estimator(50)
    for at, value in enumerate(values, 1):
        estimator.record(value, at)
        low, high = estimator.find_limits()
        assert high is not None
        assert high >= min(values[:at])
        assert low is None or low <= max(values[:at])

"""The schedule of a run whose length is a time."""

import itertools
import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.base.errors import ConfigError
from megatron.schedule.clock import (
    ExpectedCosts,
    NextStep,
    TimeBudget,
    TokenForecast,
    format_duration,
    is_due,
    parse_duration,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("45s", 45),
        ("90m", 5400),
        ("90min", 5400),
        ("3h", 10800),
        ("2d", 172800),
        ("1.5h", 5400),
        ("2h30m", 9000),
        ("1d2h3min4s", 93784),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "3", "h", "3 h", "-3h", "3hours", "0s", "0h0m", "1e3s", "inf", "3h2", ".5h"]
)
def test_wrong_durations(text: str) -> None:
    with pytest.raises(ConfigError, match="must be a time above 0 with its unit"):
        parse_duration(text)


def test_a_duration_that_is_too_long_for_a_float_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be a time above 0"):
        parse_duration(f"{'9' * 400}d")


def test_durations_as_text() -> None:
    assert [format_duration(seconds) for seconds in (4.24, 59.9, 185, 7300, 90000)] == [
        "4.2 s",
        "59.9 s",
        "3 min 5 s",
        "2 h 1 min",
        "25 h 0 min",
    ]


def test_intervals_of_time() -> None:
    assert is_due(10.0, 9.9, 10.0)
    assert is_due(10.0, 9.9, 55.0)
    assert not is_due(10.0, 10.0, 19.9)
    assert not is_due(None, 0.0, 1e9)


class Simulation:
    """A run whose parts take given times. The clock is a number."""

    def __init__(self, total: float, step: float, evaluation: float, save: float) -> None:
        self.budget = TimeBudget(total)
        self.step = step
        self.evaluation = evaluation
        self.save = save
        self.now = 0.0
        self.positions: list[float] = []
        self.last: NextStep | None = None

    def train(self, noise: list[float], eval_interval: int) -> None:
        """Train until the end. The slowest of the last steps is what the next one is expected."""
        taken: list[float] = []
        for iteration in itertools.count():
            costs = ExpectedCosts(
                step=max(taken[-16:], default=0.0),
                typical_step=statistics.median(taken[-16:] or [0.0]),
                evaluation=self.evaluation,
                test=self.evaluation,
                save=self.save,
            )
            is_due = (iteration + 1) % eval_interval == 0
            decided = self.budget.place_step(
                self.now,
                costs,
                position=self.positions[-1] if self.positions else 0.0,
                due=self.evaluation if is_due else 0.0,
                is_first=iteration == 0,
            )
            if decided.time_is_up:
                break
            self.positions.append(decided.position)
            taken.append(self.step * noise[iteration % len(noise)])
            self.now += taken[-1]
            evaluated = is_due
            if is_due:
                self.now += self.evaluation
            if decided.is_last:
                break
        self.last = decided
        # The save, the validation unless it has just taken place, and the test.
        self.now += self.save + self.evaluation + (0.0 if evaluated else self.evaluation)


@settings(max_examples=200, deadline=None)
@given(
    total=st.floats(10, 1e5),
    steps=st.floats(30, 3000),
    evaluation=st.floats(0, 0.1),
    save=st.floats(0, 0.05),
    noise=st.lists(st.floats(0.7, 1.3), min_size=3, max_size=40),
    eval_interval=st.integers(5, 10_000),
)
def test_a_run_ends_inside_its_time_at_the_end_of_the_decay(
    total: float,
    steps: float,
    evaluation: float,
    save: float,
    noise: list[float],
    eval_interval: int,
) -> None:
    step = total / steps
    run = Simulation(total, step, evaluation * total, save * total)
    run.train(noise, eval_interval)
    assert run.now <= total
    # What is not used: the reserve, steps that were expected to be slower, and an evaluation that
    # was due after the last step.
    closing = (2 * evaluation + save) * total
    assert run.now >= total - 0.25 * closing - 0.002 * total - 5 * 1.3 * step - evaluation * total
    assert run.positions == sorted(run.positions)
    assert run.last is not None
    assert run.last.is_last
    assert run.positions[-1] == total
    # The position before the last step: at most what a few steps and one evaluation take.
    assert run.positions[-2] >= total * (1 - (6 * 1.3 * step + evaluation * total) / (0.5 * total))


def test_a_stall_near_the_end_is_followed_by_one_more_step_if_it_fits() -> None:
    budget = TimeBudget(100.0)
    costs = ExpectedCosts(step=10.0, typical_step=1.0, save=5.0)
    assert budget.place_step(94.0, costs, position=80.0) == NextStep(100.0, is_last=True)
    assert budget.place_step(94.1, costs, position=80.0) == NextStep(100.0, time_is_up=True)


def test_at_least_one_step_is_trained_if_the_time_is_too_short() -> None:
    costs = ExpectedCosts(0.0, evaluation=30.0, save=5.0)
    first = TimeBudget(10.0).place_step(0.0, costs, is_first=True)
    assert first.is_last
    assert not first.time_is_up


def test_a_step_before_which_an_evaluation_would_not_fit_any_more_is_the_last_one() -> None:
    costs = ExpectedCosts(1.0, evaluation=10.0)
    assert not TimeBudget(100.0).place_step(80.0, costs).is_last
    assert TimeBudget(100.0).place_step(80.0, costs, due=10.0).is_last


def test_positions_do_not_decrease_if_costs_are_expected_to_be_lower() -> None:
    budget = TimeBudget(100.0)
    high = budget.place_step(50.0, ExpectedCosts(1.0, save=20.0))
    low = budget.place_step(50.1, ExpectedCosts(1.0, save=1.0), position=high.position)
    assert low.position == high.position > 50.0


def test_a_decision_survives_as_numbers() -> None:
    decided = NextStep(math.pi * 1e3, is_last=True, evaluation_is_due=True)
    assert NextStep.from_numbers(decided.to_numbers()) == decided


def test_chinchilla_ratio() -> None:
    fitting = TokenForecast(177_000_000, 20 * 177e6)
    assert fitting.tokens_per_parameter == 20
    assert fitting.fitting_parameters == pytest.approx(177e6)
    assert fitting.describe_misfit() is None
    # A hundredth of the tokens: a tenth of the parameters would see 20 times as many.
    large = TokenForecast(1_000_000_000, 0.2e9)
    assert large.fitting_parameters == pytest.approx(1e8)
    warning = large.describe_misfit()
    assert warning is not None
    assert "far too large" in warning
    assert "100,000,000 parameters would see 2,000,000,000 tokens" in warning
    assert "far too small" in str(TokenForecast(1000, 1e6).describe_misfit())

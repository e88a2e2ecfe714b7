"""The clock of a run, with a clock that the test moves."""

import dataclasses

import pytest

from megatron.extras.interop.translators.translator import load_config
from megatron.plan.resolve import resolve
from megatron.plan.run_plan import Plan
from megatron.run.clock import RunClock
from megatron.run.loop import is_finished
from megatron.run.state import TrainState

SIZES = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --micro-batch-size 2 "
    "--global-batch-size 4 --lr 1e-3 --min-lr 1e-4 --vocab-size 5000 --eval-iters 1 "
    "--data-path data --save folder --lr-decay-style linear"
)
STEP_TOKENS = 4 * 32


def make_plan(flags: str) -> Plan:
    plan = resolve(load_config([*SIZES.split(), *flags.split()]).config, 1)
    plan.raise_on_errors()
    return plan


class Hand:
    """The time, in seconds. It begins at any number."""

    def __init__(self) -> None:
        self.seconds = 1e6

    def __call__(self) -> float:
        return self.seconds


class TimedRun:
    """A loop around a clock that does what the training loop does."""

    def __init__(self, flags: str, state: TrainState | None = None, step: float = 1.0) -> None:
        self.plan = make_plan(flags)
        self.state = TrainState() if state is None else state
        self.hand = Hand()
        self.step = step
        self.clock = RunClock(self.plan, self.state, sets=(1, 0), read=self.hand)
        self.rates: list[float] = []
        self.evaluated: list[int] = []
        self.saved: dict[int, TrainState] = {}
        self.clock.start()

    @property
    def is_finished(self) -> bool:
        assert self.plan.train_seconds is not None
        return is_finished(self.plan, self.state)

    def train(self, iterations: int = 10**4) -> None:
        last = self.state.iteration + iterations
        while not self.is_finished and self.state.iteration < last:
            self.rates.append(self.state.compute_learning_rate(self.plan.lr_schedule))
            self.hand.seconds += self.step
            self.state.advance(4, STEP_TOKENS)
            self.state.advance_lr(self.plan.lr_schedule, 4, STEP_TOKENS)
            self.clock.costs.record_step(self.step, STEP_TOKENS)
            self.clock.finish_step()
            self.state.elapsed_seconds = self.clock.read()
            if self.clock.next_step.evaluation_is_due:
                self.evaluate()
            if self.clock.next_step.save_is_due:
                self.save()
            self.clock.accept(self.clock.propose(eval_is_due=False, save_is_due=False))

    def evaluate(self, seconds: float = 2.0) -> None:
        with self.clock.measure_evaluation():
            self.hand.seconds += seconds
        self.evaluated.append(self.state.iteration)

    def save(self, seconds: float = 3.0) -> None:
        self.state.elapsed_seconds = self.clock.begin_save()
        self.saved[self.state.iteration] = TrainState.from_json(self.state.to_json())
        self.hand.seconds += seconds
        self.clock.end_save()


def test_a_run_ends_inside_its_time_at_the_lowest_rate() -> None:
    run = TimedRun("--train-time 100s --eval-interval-time 30s --save-interval-time 40s")
    run.train()
    assert run.is_finished
    run.evaluate()
    run.save()
    assert 90 < run.clock.read() <= 100
    assert run.rates[0] == 1e-3
    assert run.rates[-1] == 1e-4
    assert run.rates == sorted(run.rates, reverse=True)
    # The step before the last one: the decay is at its end except for a few steps.
    assert run.rates[-2] < 1e-4 + 0.05 * 9e-4
    # Multiples of 30 s and 40 s are at these iterations, after the time of evaluations and saves.
    assert len(run.evaluated) == 4
    assert len(run.saved) == 3


def test_a_resumed_run_goes_on_with_what_is_left() -> None:
    flags = "--train-time 100s --save-interval-time 40s"
    first = TimedRun(flags)
    first.train(60)
    (saved,) = first.saved.values()
    # 39 or 40 steps of 1 s, and the save that was expected to take a little more than 1 s.
    assert 40 <= saved.elapsed_seconds <= 42
    second = TimedRun(flags, saved)
    assert second.clock.read() == pytest.approx(saved.elapsed_seconds)
    # The first rate follows from the state alone, on every rank.
    assert 0.5e-3 < second.state.compute_learning_rate(second.plan.lr_schedule) < 0.65e-3
    second.train()
    assert second.is_finished
    second.save()
    assert 90 < second.clock.read() <= 100
    assert second.rates[-1] == 1e-4


def test_a_finished_run_stays_finished_until_it_gets_more_time() -> None:
    run = TimedRun("--train-time 20s")
    run.train()
    again = TimedRun("--train-time 20s", run.state)
    again.train()
    assert again.rates == []
    longer = TimedRun("--train-time 40s --override-lr-scheduler", run.state)
    longer.train()
    assert len(longer.rates) > 10
    assert longer.rates[-1] == 1e-4


def test_a_resume_at_the_end_of_the_time_trains_no_further_step() -> None:
    run = TimedRun("--train-time 100s")
    run.train(50)
    late = dataclasses.replace(run.state, elapsed_seconds=99.9)
    again = TimedRun("--train-time 100s", late)
    again.train()
    assert again.rates == []
    assert again.is_finished


def test_a_warm_up_in_samples_ends_at_its_time() -> None:
    run = TimedRun("--train-time 100s --lr-warmup-samples 40")
    run.train()
    assert run.rates[:3] == pytest.approx([0.0, 1e-4, 2e-4])
    assert max(run.rates) == run.rates[10] == 1e-3
    assert run.state.warmup_seconds > 0
    assert run.rates[-1] == 1e-4


def test_the_first_step_of_a_launch_is_not_taken_for_the_others() -> None:
    """It compiles the model, for example."""
    run = TimedRun("--train-time 1000s", step=200.0)
    run.train(1)
    assert run.clock.costs.expect(STEP_TOKENS).step == 200.0
    run.step = 1.0
    run.train(1)
    assert run.clock.costs.expect(STEP_TOKENS).step == 1.0
    run.train()
    assert run.rates[-1] == 1e-4
    assert 950 < run.clock.read() <= 1000


@pytest.mark.parametrize(("total", "first"), [(1000, 200.0), (180, 60.0)])
def test_a_slow_first_step_does_not_end_the_run(total: int, first: float) -> None:
    """Batches of evaluation that take half as long as this step would not fit."""
    run = TimedRun(f"--train-time {total}s --eval-iters 20", step=first)
    run.train(1)
    assert not run.is_finished
    assert not run.clock.next_step.is_last
    run.step = 1.0
    run.train()
    assert 0.8 * total - first < len(run.rates)
    run.evaluate(10.0)
    run.save()
    assert 0.9 * total < run.clock.read() <= total
    assert run.rates == sorted(run.rates, reverse=True)
    assert run.rates[1] > 0.5e-3
    assert run.rates[-1] == 1e-4


def test_steps_that_fill_the_time_end_at_the_lowest_rate() -> None:
    run = TimedRun("--train-time 15s", step=9.0)
    run.train()
    assert run.rates == [1e-3, 1e-4]


def test_costs_are_expected_before_they_are_measured() -> None:
    run = TimedRun("--train-time 1000s")
    run.train(3)
    costs = run.clock.costs.expect(STEP_TOKENS)
    assert costs.step == 1.0
    # Half a step for the only batch of an evaluation, and at least a second for a save.
    assert costs.evaluation == 0.5
    assert 1.0 < costs.save < 1.1
    run.evaluate(7.0)
    run.evaluate(5.0)
    run.save(9.0)
    costs = run.clock.costs.expect(2 * STEP_TOKENS)
    assert (costs.step, costs.evaluation, costs.save) == (2.0, 7.0, 9.0)


def test_the_forecast_has_the_tokens_of_the_complete_run() -> None:
    run = TimedRun("--train-time 1000s")
    run.train(5)
    assert run.clock.take_forecast() is None
    run.train(10)
    found = run.clock.take_forecast()
    assert found is not None
    tokens, lines = found
    assert tokens == pytest.approx(1000 * STEP_TOKENS, rel=0.02)
    assert "at the measured 128 tokens/s" in lines[0]
    assert "far too large" in lines[1]
    assert run.clock.take_forecast() is None
    assert run.clock.estimate_iterations() == pytest.approx(1000, rel=0.02)


def test_intervals_of_time_without_a_run_by_time() -> None:
    plan = make_plan("--train-iters 100 --save-interval-time 10s")
    state = TrainState(elapsed_seconds=8.0)
    hand = Hand()
    clock = RunClock(plan, state, sets=(1, 1), read=hand)
    clock.start()
    due = []
    for _ in range(15):
        due.append(clock.next_step.save_is_due)
        hand.seconds += 1.0
        clock.costs.record_step(1.0, STEP_TOKENS)
        clock.accept(clock.propose(eval_is_due=False, save_is_due=False))
    # The clock is at 8 s. The step from 9 to 10 s ends at a multiple of 10 s, and so does that from
    # 19 to 20 s.
    assert [number for number, is_due in enumerate(due) if is_due] == [1, 11]
    assert clock.eval_interval == plan.config.batch.eval_interval
    assert clock.estimate_iterations() == 100

"""The clock of a run: its time, what its parts cost, and the end by --train-time.

The time is that of the training loop, summed over all launches. Evaluations, saves and the
compilation in the first step count. The start of a launch does not, and neither does what was
trained after the checkpoint that a launch resumes from, because the model does not contain it.

Invariant: all ranks use the same decisions. The first one of a launch follows from the state, which
all ranks read from the checkpoint. Rank 0 makes the later ones, and `Exits.decide` sends them with
the reason to stop.

`StepClock` measures the wall time of iterations. On a GPU the host queues the optimizer's kernels
and goes on. They run when the host begins the next iteration. A time from the start of an iteration
to its end on the host would leave them out, so TFLOPs and MFU would be too high.

Its invariant: the times of all iterations add up to the time of the loop without its pauses. An
iteration is measured from the same point of the iteration before it to the same point of its own.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from megatron.plan.run_plan import Plan
from megatron.run.state import TrainState
from megatron.schedule.clock import (
    ExpectedCosts,
    NextStep,
    TimeBudget,
    TokenForecast,
    format_duration,
    is_due,
    parse_optional_duration,
)


class StepClock:
    """Measures iterations one after the other, without the pauses between them."""

    def __init__(
        self, device: torch.device, *, read: Callable[[], float] = time.perf_counter
    ) -> None:
        """Create a clock. It runs from `start` on.

        Args:
            device: The device that computes.
            read: Returns a time in seconds.
        """
        self._device = device
        self._read = read
        self._since = 0.0
        self._earlier = 0.0
        """Seconds of this iteration before the last pause."""
        self.has_paused = False
        """Whether there was a pause since the last iteration was finished."""

    def start(self) -> None:
        """Start the first iteration of a launch."""
        self._since = self._read()
        self._earlier = 0.0

    def finish_iteration(self) -> float:
        """Return the seconds of the iteration, and start the next one."""
        now = self._read()
        seconds = self._earlier + now - self._since
        self._since = now
        self._earlier = 0.0
        self.has_paused = False
        return seconds

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Stop the clock during an evaluation or a save."""
        # The optimizer may still run. Its time belongs to the iteration, not to the pause.
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._earlier += self._read() - self._since
        self.has_paused = True
        try:
            yield
        finally:
            self._since = self._read()


_STEPS_IN_WINDOW = 16
"""The slowest of this many latest steps is what the next step is expected to take."""
_EVALUATION_SHARE = 0.5
"""Expected cost of a batch of evaluation as a part of a training step, before one was measured.

A forward pass has a third of the FLOPs of a step.
"""
_SAVED_BYTES_PER_PARAMETER = 12
_SAVED_BYTES_PER_SECOND = 1e8
_SAVE_SECONDS = 1.0
"""Expected cost of a save before one was measured: this and the time to write the bytes."""
_STEPS_OF_FORECAST = 10
"""Steps that are measured before the first forecast."""
_TIME_OF_FORECAST = 0.05
"""Part of the time after which a forecast is made with fewer steps, but at least 3."""


class CostMeter:
    """Measures what steps, evaluations and saves take. `record` keeps it in the state."""

    def __init__(self, plan: Plan, record: dict[str, float], *, sets: tuple[int, int]) -> None:
        """Continue with the measurements of earlier launches.

        Args:
            plan: The plan of the run.
            record: What earlier launches measured. It is updated.
            sets: Number of validation and of test sets.
        """
        self._plan = plan
        self._record = record
        self._sets = sets
        self._window: deque[float] = deque(maxlen=_STEPS_IN_WINDOW)
        if "token_seconds" in record:
            self._window.append(record["token_seconds"])
        record.setdefault("typical_token_seconds", 0.0)
        self.steps = 0
        """Steps of this launch without the first one, which has the costs of a start."""
        self.seconds = 0.0
        """Time of these steps."""
        self.tokens = 0
        """Tokens of these steps."""
        self._is_first = True

    def record_step(self, seconds: float, tokens: int) -> None:
        """Record a step. The first one of a launch counts only until there is another one."""
        if self._is_first:
            self._is_first = False
            self._record.setdefault("token_seconds", seconds / tokens)
            return
        self.steps += 1
        self.seconds += seconds
        self.tokens += tokens
        self._window.append(seconds / tokens)
        # A run must not exceed its time, so the slowest of the last steps counts.
        self._record["token_seconds"] = max(self._window)
        self._record["typical_token_seconds"] = statistics.median(self._window)

    def record_evaluation(self, seconds: float) -> None:
        """Record an evaluation of all validation sets."""
        # The longest one counts, for the same reason as in `record_step`.
        self._record["evaluation"] = max(seconds, self._record.get("evaluation", 0.0))

    def record_save(self, seconds: float) -> None:
        """Record a save."""
        self._record["save"] = max(seconds, self._record.get("save", 0.0))

    def expect(self, step_tokens: int) -> ExpectedCosts:
        """Return what is expected of the parts of the run.

        Args:
            step_tokens: Tokens of the next step.
        """
        token_seconds = self._record.get("token_seconds", 0.0)
        valid, test = self._sets
        batch = self._plan.config.batch
        tokens = batch.eval_iters * self._plan.batch_size.final * self._plan.config.model.seq_length
        one_set = 0.0
        # The first step may have compiled the model for minutes, so its time is no estimate.
        if self._record["typical_token_seconds"] > 0:
            one_set = _EVALUATION_SHARE * token_seconds * tokens
        if valid and "evaluation" in self._record:
            one_set = self._record["evaluation"] / valid
        save = 0.0
        if self._plan.config.checkpoint.save is not None:
            size = _SAVED_BYTES_PER_PARAMETER * self._plan.parameters
            save = self._record.get("save", _SAVE_SECONDS + size / _SAVED_BYTES_PER_SECOND)
        return ExpectedCosts(
            step=token_seconds * step_tokens,
            typical_step=self._record["typical_token_seconds"] * step_tokens,
            evaluation=valid * one_set,
            test=test * one_set,
            save=save,
        )


class RunClock:
    """The clock of a run. Runs without --train-time have one too, for intervals of time."""

    def __init__(
        self,
        plan: Plan,
        state: TrainState,
        *,
        sets: tuple[int, int],
        read: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the clock. It runs from `start` on.

        Args:
            plan: The plan of the run.
            state: The state, which has the time of earlier launches.
            sets: Number of validation and of test sets.
            read: Returns a time in seconds.
        """
        config = plan.config
        self._plan = plan
        self._state = state
        self._read = read
        self._started = 0.0
        self._budget = None if plan.train_seconds is None else TimeBudget(plan.train_seconds)
        self._eval_interval = parse_optional_duration(config.batch.eval_interval_time)
        self._save_interval = parse_optional_duration(config.checkpoint.save_interval_time)
        self.costs = CostMeter(plan, state.costs, sets=sets)
        self.next_step = NextStep()
        """What was decided about the next step."""
        self._looked_at = state.elapsed_seconds
        """Time up to which intervals were looked at."""
        self._save_began: float | None = None
        self._has_forecast = False

    @property
    def eval_interval(self) -> int | None:
        """Iterations between evaluations, or None if a time is between them."""
        if self._eval_interval is not None:
            return None
        return self._plan.config.batch.eval_interval

    @property
    def _has_times(self) -> bool:
        """Whether the length of the run or an interval is a time."""
        times = (self._budget, self._eval_interval, self._save_interval)
        return any(time is not None for time in times)

    def start(self) -> None:
        """Start the clock of this launch, and decide about its first step."""
        # Moved back by the time of earlier launches, so that all of them count.
        self._started = self._read() - self._state.elapsed_seconds
        decided = NextStep()
        if self._has_times:
            elapsed = self._state.elapsed_seconds
            decided = self._place_step(elapsed, due_by_iteration=(False, False))
        self._accept(decided)

    def read(self) -> float:
        """Return the seconds of training over all launches."""
        return self._read() - self._started

    def propose(self, *, eval_is_due: bool, save_is_due: bool) -> list[float]:
        """Return this rank's decision about the next step, as numbers. Only rank 0's is used.

        Args:
            eval_is_due: Whether an evaluation is due after the next step, by its iteration.
            save_is_due: Whether a save is due after the next step, by its iteration.
        """
        if not self._has_times:
            # A run without times adds nothing to the message of the ranks.
            return []
        return self._place_step(
            self.read(), due_by_iteration=(eval_is_due, save_is_due)
        ).to_numbers()

    def accept(self, numbers: list[float]) -> None:
        """Apply rank 0's decision about the next step."""
        if numbers:
            self._accept(NextStep.from_numbers(numbers))

    def finish_step(self) -> None:
        """Record that the step took place. After the last one, the time counts as used up."""
        if self.next_step.is_last:
            self._use_up()

    @contextmanager
    def measure_evaluation(self) -> Iterator[None]:
        """Measure an evaluation of all validation sets."""
        began = self._read()
        yield
        self.costs.record_evaluation(self._read() - began)

    def begin_save(self) -> float:
        """Record that a save begins, and return the time to store in the checkpoint.

        The expected cost of the save is included. A launch that resumes from the checkpoint could
        otherwise use that time again.
        """
        now = self.read()
        self._save_began = now
        if self._budget is None:
            return now
        return now + self.costs.expect(0).save

    def end_save(self) -> None:
        """Record that no save is in progress any more."""
        if self._save_began is not None:
            self.costs.record_save(self.read() - self._save_began)
            self._save_began = None

    def _place_step(self, now: float, *, due_by_iteration: tuple[bool, bool]) -> NextStep:
        """Decide about the next step."""
        state = self._state
        batch_size = self._plan.batch_size.get_size(state.consumed_samples, state.consumed_tokens)
        costs = self.costs.expect(batch_size * self._plan.get_seq_length(state.iteration + 1))
        after = now + costs.step
        evaluate = is_due(self._eval_interval, self._looked_at, after)
        save = is_due(self._save_interval, self._looked_at, after)
        # A step may end before its expected time. The same interval would then be over twice.
        self._looked_at = max(after, self._looked_at)
        if self._budget is None:
            return NextStep(evaluation_is_due=evaluate, save_is_due=save)
        # What follows the step must end within the time too.
        eval_is_due, save_is_due = due_by_iteration
        due = 0.0
        if eval_is_due or evaluate:
            due += costs.evaluation
        if save_is_due or save:
            due += costs.save
        placed = self._budget.place_step(
            now, costs, position=state.lr_seconds, due=due, is_first=state.iteration == 0
        )
        return NextStep(placed.position, placed.is_last, placed.time_is_up, evaluate, save)

    def _accept(self, decided: NextStep) -> None:
        self.next_step = decided
        self._state.lr_seconds = decided.position
        if decided.time_is_up:
            self._use_up()

    def _use_up(self) -> None:
        assert self._plan.train_seconds is not None, "only a time is used up"
        self._state.used_train_time = self._plan.train_seconds

    def estimate_iterations(self) -> int:
        """Return the number of iterations of the complete run. By time, it is an estimate."""
        if self._plan.train_seconds is None:
            return self._plan.train_iters
        # Before a measurement there is no speed, and after the last step nothing follows.
        if self.costs.steps == 0 or self.next_step.is_last:
            return self._state.iteration
        left = max(0.0, self._plan.train_seconds - self.read())
        return self._state.iteration + round(left * self.costs.steps / self._estimate_busy_time())

    def take_forecast(self) -> tuple[float, list[str]] | None:
        """Return the expected tokens of the run and lines about them, once a launch.

        It is None until enough steps were measured, and without --train-time.
        """
        total = self._plan.train_seconds
        costs = self.costs
        if total is None or self._has_forecast or costs.steps < 3:
            return None
        # A run with slow steps would wait too long for its forecast.
        if costs.steps < _STEPS_OF_FORECAST and self.read() < _TIME_OF_FORECAST * total:
            return None
        self._has_forecast = True
        # Nothing is trained during the last save and the evaluations after it.
        left = max(0.0, total - self.read() - costs.expect(0).closing)
        tokens = self._state.consumed_tokens + left * costs.tokens / self._estimate_busy_time()
        forecast = TokenForecast(self._plan.parameters, tokens)
        lines = [
            f"--train-time {self._plan.config.batch.train_time}: at the measured "
            f"{costs.tokens / costs.seconds:,.0f} tokens/s the run will see about {tokens:,.0f} "
            f"tokens in {format_duration(total)}, {forecast.tokens_per_parameter:.3g} for each of "
            f"the {self._plan.parameters:,} parameters (Chinchilla: 20)"
        ]
        misfit = forecast.describe_misfit()
        if misfit is not None:
            lines.append(f"warning: {misfit}")
        return tokens, lines

    def _estimate_busy_time(self) -> float:
        """Return the seconds that the measured steps take with their evaluations and saves."""
        costs = self.costs
        expected = costs.expect(0)
        checkpoint = self._plan.config.checkpoint
        seconds = costs.seconds
        for cost, iterations, interval in (
            (expected.evaluation, self.eval_interval, self._eval_interval),
            (expected.save, checkpoint.save_interval, self._save_interval),
        ):
            if iterations is not None:
                seconds += cost * costs.steps / iterations
            if interval is not None:
                seconds += cost * costs.seconds / interval
        return max(seconds, 1e-9)

"""The position of a run after later iterations, found without a loop over all of them.

`Forecast` gives all training counters after a given iteration of an undisturbed run. Invariant: its
arithmetic is that of a run without overflow or NaN. Each iteration's batch size and sequence length
come from the state before it. Skipped ranges consume their samples but do not change the learning
rate.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megatron.schedule.batch_size import BatchSizeSchedule, count_iterations_of_size
from megatron.schedule.curriculum import FOREVER, Curriculum
from megatron.schedule.lr import LRSchedule
from megatron.schedule.skip import SkipRange, find_range


@dataclass(frozen=True)
class Progress:
    """What a run has consumed after `iteration`, in samples and tokens."""

    iteration: int = 0
    samples: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class Steps:
    """Batch size and sequence length of each iteration of a run. `seq_length` is in tokens.

    With a curriculum, `seq_length` is the final length.
    """

    batch_size: BatchSizeSchedule
    seq_length: int
    curriculum: Curriculum | None = None

    def find_iteration(self, start: Progress, iteration: int) -> Progress:
        """Return the position after `iteration`, or `start` if that is later."""
        at = start
        while at.iteration < iteration:
            at = self._advance(at, iteration - at.iteration)
        return at

    def find_tokens(self, start: Progress, tokens: int, limit: int = FOREVER) -> Progress:
        """Return the first position from `start` on where at least `tokens` are consumed.

        If they are not consumed by iteration `limit`, it is the position after that iteration.
        """
        at = start
        while at.tokens < tokens and at.iteration < limit:
            size, length = self.get_sizes(at)
            needed = -(-(tokens - at.tokens) // (size * length))
            at = self._advance(at, min(needed, limit - at.iteration))
        return at

    def _advance(self, at: Progress, most: int) -> Progress:
        """Return the position after at least one iteration and at most `most`, all of one size.

        A run may have millions of iterations, so those of one batch size and sequence length are
        taken at once.
        """
        size, length = self.get_sizes(at)
        last = at.iteration + most
        if self.curriculum is not None:
            last = self.curriculum.find_end_of_stage(at.iteration + 1, length, last)
        steps = last - at.iteration
        alike = count_iterations_of_size(self.batch_size, at.samples, at.tokens, length)
        if alike is not None:
            steps = min(steps, alike)
        samples = steps * size
        return Progress(at.iteration + steps, at.samples + samples, at.tokens + samples * length)

    def get_sizes(self, at: Progress) -> tuple[int, int]:
        """Return the batch size and the sequence length of the iteration that follows."""
        size = self.batch_size.get_size(at.samples, at.tokens)
        if self.curriculum is None:
            return size, self.seq_length
        return size, self.curriculum.get_seq_length(at.iteration + 1)


class ForecastPoint(NamedTuple):
    """The state after `iteration`.

    The counters are in samples and tokens. The batch size (samples) and sequence length (tokens)
    are those that the iteration ran with. The learning rate is the one after it, which its log line
    shows. Iteration 0 has the sizes of the first iteration.
    """

    iteration: int
    consumed_samples: int
    consumed_tokens: int
    global_batch_size: int
    seq_length: int
    lr_samples: int
    lr_tokens: int
    warmup_tokens: int
    lr: float = math.nan
    """It is computed for the wanted points only. It would cost too much for each of 300,000
    iterations."""
    decoupled_lr: float | None = None
    """Rate of the word embedding and the output matrix. None if they have that of all others."""


@dataclass(frozen=True)
class Forecast:
    """The schedules of one run. `seq_length` is in tokens."""

    batch_size: BatchSizeSchedule
    lr: LRSchedule
    seq_length: int
    curriculum: Curriculum | None = None
    skip_ranges: tuple[SkipRange, ...] = ()

    def predict(self, wanted: Iterable[int]) -> list[ForecastPoint]:
        """Return the states after the `wanted` iterations (0 or later), in the order asked for."""
        wanted = list(wanted)
        remaining = set(wanted)
        found: dict[int, ForecastPoint] = {}
        # The counters never end, so stop as soon as all wanted iterations were seen.
        for counters in self._iterate_counters():
            if counters.iteration in remaining:
                found[counters.iteration] = self._add_lr(counters)
                remaining.remove(counters.iteration)
            if not remaining:
                break
        return [found[iteration] for iteration in wanted]

    def find_iteration_reaching_tokens(self, tokens: int, limit: int) -> int:
        """Return the first iteration after which `tokens` are consumed, at most `limit`.

        `limit` is an iteration. It is returned if the tokens are not consumed by then.
        """
        steps = Steps(self.batch_size, self.seq_length, self.curriculum)
        return steps.find_tokens(Progress(), tokens, limit).iteration

    def _iterate_counters(self) -> Iterator[ForecastPoint]:
        """Yield the counters after iteration 0, 1, 2, ..., without end.

        It is a loop and not a closed form, so that it cannot differ from training's arithmetic.
        """
        steps = Steps(self.batch_size, self.seq_length, self.curriculum)
        iteration = samples = tokens = lr_samples = lr_tokens = warmup_tokens = 0
        # Iteration 0 has no sizes of its own. It shows those of iteration 1.
        size, length = steps.get_sizes(Progress())
        while True:
            yield ForecastPoint(
                iteration, samples, tokens, size, length, lr_samples, lr_tokens, warmup_tokens
            )
            size, length = steps.get_sizes(Progress(iteration, samples, tokens))
            iteration += 1
            samples += size
            tokens += size * length
            # A skipped iteration consumes its batch, and its learning-rate counters stay as they
            # are.
            if self.skip_ranges and find_range(self.skip_ranges, iteration):
                continue
            lr_samples += size
            lr_tokens += size * length
            # The order is that of training: count the step first, then check whether warm-up has
            # ended.
            warmup_tokens = self.lr.compute_warmup_tokens(lr_samples, lr_tokens, warmup_tokens)

    def _add_lr(self, point: ForecastPoint) -> ForecastPoint:
        counters = (point.lr_samples, point.lr_tokens, point.warmup_tokens)
        point = point._replace(lr=self.lr.get_lr(*counters))
        if self.lr.decoupled is not None:
            point = point._replace(decoupled_lr=self.lr.decoupled.get_lr(*counters))
        return point

"""A forecast of the training counters after a given iteration of an undisturbed run.

Invariant: the arithmetic is that of a run without overflow or NaN. Each iteration's batch size and
sequence length come from the state before it. Skipped ranges consume their samples but do not
change the learning rate.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megatron.schedule.batch_size import BatchSizeSchedule
from megatron.schedule.curriculum import Curriculum
from megatron.schedule.lr import LRSchedule
from megatron.schedule.position import Progress, Steps
from megatron.schedule.skip import SkipRange, find_range


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
        iteration = samples = tokens = lr_samples = lr_tokens = warmup_tokens = 0
        # Iteration 0 has no sizes of its own. It shows those of iteration 1.
        size = self.batch_size.get_size(0, 0)
        length = self._get_seq_length(1)
        while True:
            yield ForecastPoint(
                iteration, samples, tokens, size, length, lr_samples, lr_tokens, warmup_tokens
            )
            iteration += 1
            size = self.batch_size.get_size(samples, tokens)
            length = self._get_seq_length(iteration)
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

    def _get_seq_length(self, iteration: int) -> int:
        if self.curriculum:
            return self.curriculum.get_seq_length(iteration)
        return self.seq_length

    def _add_lr(self, point: ForecastPoint) -> ForecastPoint:
        counters = (point.lr_samples, point.lr_tokens, point.warmup_tokens)
        point = point._replace(lr=self.lr.get_lr(*counters))
        if self.lr.decoupled is not None:
            point = point._replace(decoupled_lr=self.lr.decoupled.get_lr(*counters))
        return point

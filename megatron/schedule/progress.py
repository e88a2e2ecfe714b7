"""A forecast of the training counters: what they are after a given iteration of an undisturbed run.

Invariant: the same arithmetic as a run without overflow or NaN; each iteration's batch size and sequence length come from the
state before it. Skipped ranges consume their samples but do not move the learning rate.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megatron.schedule.batch_size import BatchSizeSchedule
from megatron.schedule.curriculum import Curriculum
from megatron.schedule.lr import LRSchedule
from megatron.schedule.skip import SkipRange, range_at


class _Counters(NamedTuple):
    """`Progress` without the learning rate, which costs too much to work out for each of 300,000 iterations."""

    iteration: int
    consumed_samples: int
    consumed_tokens: int
    global_batch_size: int
    seq_length: int
    lr_samples: int
    lr_tokens: int
    warmup_tokens: int


@dataclass(frozen=True)
class Progress:
    """The state after `iteration`: counters in samples and tokens, the batch size (samples) and sequence length (tokens) that it
    ran with, and the learning rate after it, which is what its log line shows. Iteration 0 has the sizes of the first one."""

    iteration: int
    consumed_samples: int
    consumed_tokens: int
    global_batch_size: int
    seq_length: int
    lr_samples: int
    lr_tokens: int
    warmup_tokens: int
    lr: float


@dataclass(frozen=True)
class Forecast:
    """The schedules of one run; `seq_length` in tokens."""

    batch_size: BatchSizeSchedule
    lr: LRSchedule
    seq_length: int
    curriculum: Curriculum | None = None
    skip_ranges: tuple[SkipRange, ...] = ()

    def at(self, wanted: Iterable[int]) -> list[Progress]:
        """The states after the `wanted` iterations (0 or later), in the order asked for."""
        wanted = list(wanted)
        remaining = set(wanted)
        found: dict[int, Progress] = {}
        for counters in self._iterations():
            if counters.iteration in remaining:
                found[counters.iteration] = self._progress(counters)
                remaining.remove(counters.iteration)
            if not remaining:
                break
        return [found[iteration] for iteration in wanted]

    def iteration_reaching_tokens(self, tokens: int, limit: int) -> int:
        """The first iteration after which `tokens` are consumed; `limit` (an iteration) where they are not by then."""
        return next(c.iteration for c in self._iterations() if c.consumed_tokens >= tokens or c.iteration >= limit)

    def _iterations(self) -> Iterator[_Counters]:
        """The counters after iteration 0, 1, 2, ..., without end. A loop, not a closed form: it cannot differ from training's."""
        iteration = samples = tokens = lr_samples = lr_tokens = warmup_tokens = 0
        size, length = self.batch_size.at(0, 0), self._length(1)
        while True:
            yield _Counters(iteration, samples, tokens, size, length, lr_samples, lr_tokens, warmup_tokens)
            iteration += 1
            size, length = self.batch_size.at(samples, tokens), self._length(iteration)
            samples += size
            tokens += size * length
            if self.skip_ranges and range_at(self.skip_ranges, iteration):
                continue
            lr_samples += size
            lr_tokens += size * length
            warmup_tokens = self.lr.warmup_tokens_after(lr_samples, lr_tokens, warmup_tokens)

    def _length(self, iteration: int) -> int:
        return self.curriculum.at(iteration) if self.curriculum else self.seq_length

    def _progress(self, c: _Counters) -> Progress:
        return Progress(*c, lr=self.lr.at(c.lr_samples, c.lr_tokens, c.warmup_tokens))

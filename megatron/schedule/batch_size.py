"""Global batch size as a function of progress: constant, ramp-up, or steps.

Invariant: a size depends on the consumed samples and tokens alone, so a resumed run continues with the size of the
uninterrupted one. It is evaluated before each step, on what has been consumed until then.
Source: Megatron-LM's --rampup-batch-size and --step-batch-size-schedule.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Literal

from megatron.errors import ConfigError

Unit = Literal["samples", "tokens"]

FACTORS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_AMOUNT = r"(?P<number>[\d_]*\.?[\d_]+(?:E\+?\d\d?)?)(?P<suffix>[KMBT]?)"
_SIZE = re.compile(_AMOUNT, re.IGNORECASE)
_THRESHOLD = re.compile(f"{_AMOUNT}(?P<unit>TOKENS|SAMPLES)?", re.IGNORECASE)
_BARE_STEP = re.compile(r"(?P<number>[\d_]*[1-9][\d_]*):(?P<size>.*)")
"""A threshold above 0 without suffix or unit, which earlier versions took for samples."""


@dataclass(frozen=True)
class ConstantBatchSize:
    """The same `size` (samples) in every iteration."""

    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"--global-batch-size {self.size} must be at least 1.")

    @property
    def final(self) -> int:
        """The size that the schedule ends with, samples."""
        return self.size

    def get_size(self, consumed_samples: int, consumed_tokens: int) -> int:
        """Size of the next iteration, samples."""
        return self.size

    def iterate_upcoming(
        self, consumed_samples: int, consumed_tokens: int, seq_length: int
    ) -> Iterator[int]:
        """The distinct sizes from here on, in order."""
        yield self.size


@dataclass(frozen=True)
class RampupBatchSize:
    """From `start` in even steps of `increment` over `ramp_samples` samples to `size`; all in samples."""

    start: int
    increment: int
    ramp_samples: int
    size: int

    def __post_init__(self) -> None:
        given = f"--rampup-batch-size {self.start} {self.increment} {self.ramp_samples} with --global-batch-size {self.size}"
        if min(self.start, self.increment, self.ramp_samples) < 1:
            raise ConfigError(
                f"{given}: START, INCREMENT and SAMPLES must each be at least 1; leave the flag out for no ramp."
            )
        if self.start > self.size:
            raise ConfigError(
                f"{given}: START must not exceed the global batch size; use at most {self.size}."
            )
        if (self.size - self.start) % self.increment:
            fits = self.size - (self.size - self.start) // self.increment * self.increment
            raise ConfigError(
                f"{given}: INCREMENT must divide {self.size} - {self.start} = {self.size - self.start}; START {fits} would fit."
            )

    @property
    def final(self) -> int:
        """The size that the schedule ends with, samples."""
        return self.size

    def get_size(self, consumed_samples: int, consumed_tokens: int) -> int:
        """Size of the next iteration, samples. The division is a floating one: the edges of the ramp's steps depend on it."""
        increments = (self.size - self.start) // self.increment
        if consumed_samples > self.ramp_samples or increments == 0:
            return self.size
        return (
            self.start + int(consumed_samples / (self.ramp_samples / increments)) * self.increment
        )

    def iterate_upcoming(
        self, consumed_samples: int, consumed_tokens: int, seq_length: int
    ) -> Iterator[int]:
        """The distinct sizes that iterations from here on will have, in order."""
        last = None
        while consumed_samples <= self.ramp_samples:
            size = self.get_size(consumed_samples, consumed_tokens)
            if size != last:
                yield size
                last = size
            consumed_samples += size
        if last != self.size:
            yield self.size


@dataclass(frozen=True)
class StepBatchSize:
    """Batch sizes that hold from a threshold on.

    `steps`: (threshold, its unit, size in samples), in order. `parse_step_schedule` checks the order,
    which depends on the sequence length.
    """

    steps: tuple[tuple[int, Unit, int], ...]

    def __post_init__(self) -> None:
        if not self.steps or self.steps[0][0] != 0:
            raise ConfigError(
                "--step-batch-size-schedule must begin with the threshold 0, as in '0:768 250B:1536'."
            )
        if any(size < 1 for _, _, size in self.steps):
            raise ConfigError(
                f"--step-batch-size-schedule: each batch size must be at least 1; given {self.sizes}."
            )

    @property
    def sizes(self) -> list[int]:
        """All sizes in order, samples."""
        return [size for _, _, size in self.steps]

    @property
    def final(self) -> int:
        """The size that the schedule ends with, samples."""
        return self.steps[-1][2]

    def _find_step(self, consumed_samples: int, consumed_tokens: int) -> int:
        """Index of the last step whose threshold has been reached."""
        progress = {"samples": consumed_samples, "tokens": consumed_tokens}
        return max(
            i for i, (threshold, unit, _) in enumerate(self.steps) if progress[unit] >= threshold
        )

    def get_size(self, consumed_samples: int, consumed_tokens: int) -> int:
        """Size of the next iteration, samples."""
        return self.steps[self._find_step(consumed_samples, consumed_tokens)][2]

    def iterate_upcoming(
        self, consumed_samples: int, consumed_tokens: int, seq_length: int
    ) -> Iterator[int]:
        """The distinct sizes from here on, in order."""
        last = None
        for size in self.sizes[self._find_step(consumed_samples, consumed_tokens) :]:
            if size != last:
                yield size
                last = size

    def count_iterations_to_next(
        self, consumed_samples: int, consumed_tokens: int, seq_length: int
    ) -> int | None:
        """Iterations of the present size until a later threshold is reached; None in the last step. `seq_length` in tokens."""
        reached = self._find_step(consumed_samples, consumed_tokens)
        samples_left = [
            threshold - consumed_samples
            if unit == "samples"
            else -(-(threshold - consumed_tokens) // seq_length)
            for threshold, unit, _ in self.steps[reached + 1 :]
        ]
        if not samples_left:
            return None
        return -(-min(samples_left) // self.steps[reached][2])


BatchSizeSchedule = ConstantBatchSize | RampupBatchSize | StepBatchSize


def parse_step_schedule(words: Sequence[str], seq_length: int) -> StepBatchSize:
    """Read '0:768 250B:1536', in one text or in several.

    A threshold with a suffix K, M, B (10^9) or T is in tokens, as in Megatron-LM. It is rounded down
    to whole samples of `seq_length` tokens. 30_000_000samples and 61035156250tokens name a unit.

    Raises:
        ConfigError: an entry cannot be read, has no unit, or is not above the one before it.
    """
    text = " ".join(words)
    steps = [_parse_step(entry, text, seq_length) for entry in step_entries(words)]
    for (threshold, unit, size), (after, after_unit, _) in pairwise(steps):
        if _in_tokens(after, after_unit, seq_length) <= _in_tokens(threshold, unit, seq_length):
            raise ConfigError(
                f"--step-batch-size-schedule '{text}': thresholds must rise, but {after} "
                f"{after_unit} follows {threshold} {unit} (tokens are rounded down to samples of {seq_length}). "
                f"Sort them, and give each one batch size; here {size} would never be used."
            )
    return StepBatchSize(tuple(steps))


def step_entries(words: Sequence[str]) -> tuple[str, ...]:
    """Return the THRESHOLD:SIZE entries of a schedule, which commas or spaces separate."""
    return tuple(" ".join(words).replace(",", " ").split())


def bare_thresholds_as_samples(words: Sequence[str]) -> tuple[str, ...]:
    """Return a schedule's entries with 'samples' after each threshold that has no unit.

    Earlier versions took such thresholds for samples. Megatron-LM takes them for tokens.
    """
    spelled = r"\g<number>samples:\g<size>"
    return tuple(_BARE_STEP.sub(spelled, entry) for entry in step_entries(words))


def _parse_step(entry: str, text: str, seq_length: int) -> tuple[int, Unit, int]:
    threshold_text, _, size_text = entry.partition(":")
    threshold, size = _THRESHOLD.fullmatch(threshold_text), _SIZE.fullmatch(size_text)
    try:
        if threshold is None or size is None:
            raise ValueError
        at, samples = _amount(threshold), _amount(size)
        if samples.denominator != 1:
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"--step-batch-size-schedule '{text}': '{entry}' is not THRESHOLD:SIZE with a "
            "threshold in tokens (250B, 1.5T) or samples (30_000_000samples), as in '0:768 250B:1536'."
        ) from None
    unit = (threshold["unit"] or "").lower()
    if unit == "samples" or at == 0:
        return math.floor(at), "samples", int(samples)
    if not unit and not threshold["suffix"]:
        raise ConfigError(
            f"--step-batch-size-schedule '{text}': the threshold of '{entry}' has no unit. "
            "Megatron-LM reads it as tokens, and earlier versions read it as samples. Write "
            f"{threshold_text}tokens (or with a suffix K, M, B or T) or {threshold_text}samples."
        )
    return math.floor(at) // seq_length * seq_length, "tokens", int(samples)


def _amount(match: re.Match[str]) -> Fraction:
    """Return the number that `match` spells, its suffix included.

    Raises:
        ValueError: it spells none.
    """
    return Fraction(match["number"]) * FACTORS[match["suffix"].upper()]


def _in_tokens(threshold: int, unit: Unit, seq_length: int) -> int:
    return threshold if unit == "tokens" else threshold * seq_length


def count_iterations_for_samples(
    schedule: BatchSizeSchedule,
    train_samples: int,
    seq_length: int,
    consumed_samples: int = 0,
    consumed_tokens: int = 0,
) -> int:
    """Iterations from (consumed_samples, consumed_tokens) until no whole batch fits into `train_samples` any more.

    `seq_length`: tokens a sample. The last, partial batch is dropped, as in Megatron-LM.
    """
    iterations = 0
    while True:
        size = schedule.get_size(consumed_samples, consumed_tokens)
        room = (train_samples - consumed_samples) // size
        if room <= 0:
            return iterations
        steps = min(
            room,
            _count_iterations_of_size(schedule, consumed_samples, consumed_tokens, seq_length)
            or room,
        )
        iterations += steps
        consumed_samples += steps * size
        consumed_tokens += steps * size * seq_length


def count_samples_of_iterations(
    schedule: BatchSizeSchedule,
    iterations: int,
    seq_length: int,
    consumed_samples: int = 0,
    consumed_tokens: int = 0,
) -> int:
    """Samples consumed after `iterations` more, from (consumed_samples, consumed_tokens) on; `seq_length`: tokens a sample."""
    samples, tokens = consumed_samples, consumed_tokens
    while iterations > 0:
        steps = min(
            iterations,
            _count_iterations_of_size(schedule, samples, tokens, seq_length) or iterations,
        )
        taken = steps * schedule.get_size(samples, tokens)
        samples += taken
        tokens += taken * seq_length
        iterations -= steps
    return samples


def _count_iterations_of_size(
    schedule: BatchSizeSchedule, consumed_samples: int, consumed_tokens: int, seq_length: int
) -> int | None:
    """A number of coming iterations that surely have the present size (a ramp: one at a time); None where it stays for good."""
    if isinstance(schedule, StepBatchSize):
        return schedule.count_iterations_to_next(consumed_samples, consumed_tokens, seq_length)
    if isinstance(schedule, RampupBatchSize) and consumed_samples <= schedule.ramp_samples:
        return 1
    return None

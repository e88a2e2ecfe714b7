"""Global batch size as a function of progress: constant, ramp-up, or steps.

Invariant: a size depends on the consumed samples and tokens alone. A resumed run therefore
continues with the size of the uninterrupted one. The size of a step is computed before the step,
from what has been consumed until then.

Source: Megatron-LM's --rampup-batch-size and --step-batch-size-schedule.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Literal

from megatron.base.errors import ConfigError

Unit = Literal["samples", "tokens"]

FACTORS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_AMOUNT = r"(?P<number>[\d_]*\.?[\d_]+(?:E\+?\d\d?)?)(?P<suffix>[KMBT]?)"
_SIZE = re.compile(_AMOUNT, re.IGNORECASE)
_THRESHOLD = re.compile(f"{_AMOUNT}(?P<unit>TOKENS|SAMPLES)?", re.IGNORECASE)
_BARE_STEP = re.compile(r"(?P<number>[\d_]*[1-9][\d_]*):(?P<size>.*)")
"""A threshold above 0 without suffix or unit, which earlier versions read as samples."""


@dataclass(frozen=True)
class ConstantBatchSize:
    """The same `size` in every iteration, in samples."""

    size: int

    def __post_init__(self) -> None:
        """Check the size.

        Raises:
            ConfigError: it is below 1.
        """
        if self.size < 1:
            raise ConfigError(f"--global-batch-size {self.size} must be at least 1.")

    @property
    def final(self) -> int:
        """The size that the schedule ends with, in samples."""
        return self.size

    def get_size(self, consumed_samples: int, consumed_tokens: int) -> int:
        """Return the size of the next iteration, in samples."""
        return self.size

    def iterate_upcoming(
        self, consumed_samples: int, consumed_tokens: int, seq_length: int
    ) -> Iterator[int]:
        """Yield the distinct sizes from here on, in order."""
        yield self.size


@dataclass(frozen=True)
class RampupBatchSize:
    """A ramp from `start` to `size` in even steps of `increment` over `ramp_samples` samples.

    All numbers are in samples.
    """

    start: int
    increment: int
    ramp_samples: int
    size: int

    def __post_init__(self) -> None:
        """Check the numbers of the ramp.

        Raises:
            ConfigError: they do not give a valid ramp-up.
        """
        given = (
            f"--rampup-batch-size {self.start} {self.increment} {self.ramp_samples} with "
            f"--global-batch-size {self.size}"
        )
        if min(self.start, self.increment, self.ramp_samples) < 1:
            raise ConfigError(
                f"{given}: START, INCREMENT and SAMPLES must each be at least 1; leave the flag "
                "out if no ramp-up is wanted."
            )
        if self.start > self.size:
            raise ConfigError(
                f"{given}: START must not exceed the global batch size; use at most {self.size}."
            )
        if (self.size - self.start) % self.increment:
            fits = self.size - (self.size - self.start) // self.increment * self.increment
            raise ConfigError(
                f"{given}: INCREMENT must divide {self.size} - {self.start} = "
                f"{self.size - self.start}; START {fits} would fit."
            )

    @property
    def final(self) -> int:
        """The size that the schedule ends with, in samples."""
        return self.size

    def get_size(self, consumed_samples: int, consumed_tokens: int) -> int:
        """Return the size of the next iteration, in samples.

        The division is in floating point, as in Megatron-LM. An integer division would move the
        edges of the ramp's steps.
        """
        increments = (self.size - self.start) // self.increment
        # Without increments, the division below would be a division by zero.
        if consumed_samples > self.ramp_samples or increments == 0:
            return self.size
        return (
            self.start + int(consumed_samples / (self.ramp_samples / increments)) * self.increment
        )

    def count_iterations_to_next(self, consumed_samples: int) -> int | None:
        """Return how many of the next iterations certainly have the present size.

        None means that the size does not change any more.
        """
        increments = (self.size - self.start) // self.increment
        if consumed_samples > self.ramp_samples or increments == 0:
            return None
        size = self.get_size(consumed_samples, 0)
        edge = ((size - self.start) // self.increment + 1) * self.ramp_samples / increments
        # The last one begins a batch before the edge or earlier, so the rounding of the edge is no
        # matter.
        return max(1, int((edge - consumed_samples) / size))

    def iterate_upcoming(
        self, consumed_samples: int, consumed_tokens: int, seq_length: int
    ) -> Iterator[int]:
        """Yield the distinct sizes that iterations from here on will have, in order."""
        last = None
        # Walk the ramp iteration by iteration. A large batch can step over a size, so the list
        # start, start + increment, ... may have sizes that never occur.
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

    `steps` holds (threshold, its unit, size in samples), in order. `parse_step_schedule` checks the
    order, which depends on the sequence length.
    """

    steps: tuple[tuple[int, Unit, int], ...]

    def __post_init__(self) -> None:
        """Check that the steps start at 0 and that each size is at least 1.

        Raises:
            ConfigError: they do not.
        """
        if not self.steps or self.steps[0][0] != 0:
            raise ConfigError(
                "--step-batch-size-schedule must begin with the threshold 0, as in '0:768 "
                "250B:1536'."
            )
        if any(size < 1 for _, _, size in self.steps):
            raise ConfigError(
                "--step-batch-size-schedule: each batch size must be at least 1; given "
                f"{self.sizes}."
            )

    @property
    def sizes(self) -> list[int]:
        """All sizes in order, in samples."""
        return [size for _, _, size in self.steps]

    @property
    def final(self) -> int:
        """The size that the schedule ends with, in samples."""
        return self.steps[-1][2]

    def _find_step(self, consumed_samples: int, consumed_tokens: int) -> int:
        """Return the index of the last step whose threshold has been reached."""
        progress = {"samples": consumed_samples, "tokens": consumed_tokens}
        return max(
            i for i, (threshold, unit, _) in enumerate(self.steps) if progress[unit] >= threshold
        )

    def get_size(self, consumed_samples: int, consumed_tokens: int) -> int:
        """Return the size of the next iteration, in samples."""
        return self.steps[self._find_step(consumed_samples, consumed_tokens)][2]

    def iterate_upcoming(
        self, consumed_samples: int, consumed_tokens: int, seq_length: int
    ) -> Iterator[int]:
        """Yield the distinct sizes from here on, in order."""
        last = None
        for size in self.sizes[self._find_step(consumed_samples, consumed_tokens) :]:
            if size != last:
                yield size
                last = size

    def count_iterations_to_next(
        self, consumed_samples: int, consumed_tokens: int, seq_length: int
    ) -> int | None:
        """Return how many iterations follow with the present size.

        The result is None in the last step, which has no end. `seq_length` is in tokens.
        """
        reached = self._find_step(consumed_samples, consumed_tokens)
        # Thresholds may have different units, so the nearest one is found in samples. Tokens are
        # rounded up, because a step starts only when its threshold has been reached.
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
    """Read '0:768 250B:1536' from one text or from several.

    A threshold with a suffix K, M, B (10^9) or T is in tokens, as in Megatron-LM. It is rounded
    down to whole samples of `seq_length` tokens. 30_000_000samples and 61035156250tokens name a
    unit.

    Raises:
        ConfigError: an entry cannot be read, has no unit, or is not above the one before it.
    """
    text = " ".join(words)
    steps = [_parse_step(entry, text, seq_length) for entry in step_entries(words)]
    for (threshold, unit, size), (after, after_unit, _) in pairwise(steps):
        # Compare in tokens, because neighbours may have different units.
        if _in_tokens(after, after_unit, seq_length) <= _in_tokens(threshold, unit, seq_length):
            raise ConfigError(
                f"--step-batch-size-schedule '{text}': thresholds must rise, but {after} "
                f"{after_unit} follows {threshold} {unit} (tokens are rounded down to samples of "
                f"{seq_length}). Sort them, and give each one batch size; here the batch size "
                f"{size} would never be used."
            )
    return StepBatchSize(tuple(steps))


def step_entries(words: Sequence[str]) -> tuple[str, ...]:
    """Return the THRESHOLD:SIZE entries of a schedule, which commas or spaces separate."""
    return tuple(" ".join(words).replace(",", " ").split())


def bare_thresholds_as_samples(words: Sequence[str]) -> tuple[str, ...]:
    """Return a schedule's entries with 'samples' after each threshold that has no unit.

    Earlier versions read such thresholds as samples. Megatron-LM reads them as tokens.
    """
    spelled = r"\g<number>samples:\g<size>"
    return tuple(_BARE_STEP.sub(spelled, entry) for entry in step_entries(words))


def _parse_step(entry: str, text: str, seq_length: int) -> tuple[int, Unit, int]:
    """Return threshold, unit and size of one entry.

    `text` is the complete schedule, for messages.
    """
    threshold_text, _, size_text = entry.partition(":")
    threshold = _THRESHOLD.fullmatch(threshold_text)
    size = _SIZE.fullmatch(size_text)
    try:
        if threshold is None or size is None:
            raise ValueError
        at = _amount(threshold)
        samples = _amount(size)
        # A batch size such as 1.5K is a whole number, and 1.5 is not.
        if samples.denominator != 1:
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"--step-batch-size-schedule '{text}': '{entry}' is not THRESHOLD:SIZE with a "
            "threshold in tokens (250B, 1.5T) or samples (30_000_000samples), as in '0:768 "
            "250B:1536'."
        ) from None
    unit = (threshold["unit"] or "").lower()
    # A threshold of 0 needs no unit, because it is the same point in both.
    if unit == "samples" or at == 0:
        return math.floor(at), "samples", int(samples)
    if not unit and not threshold["suffix"]:
        raise ConfigError(
            f"--step-batch-size-schedule '{text}': the threshold of '{entry}' has no unit. "
            "Megatron-LM reads it as tokens, and earlier versions read it as samples. Write "
            f"{threshold_text}tokens (or with a suffix K, M, B or T) or {threshold_text}samples."
        )
    # Round down to whole samples, because the batch size can change between samples only.
    return math.floor(at) // seq_length * seq_length, "tokens", int(samples)


def parse_amount(text: str) -> int:
    """Return the number that a text such as 250B, 1.5T or 6_000_000 spells, rounded down.

    Raises:
        ValueError: the text is no such number.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"'{text}' is no number")
    return math.floor(_amount(match))


def _amount(match: re.Match[str]) -> Fraction:
    """Return the number that `match` spells, its suffix included.

    Raises:
        ValueError: it spells none.
    """
    # A Fraction keeps 1.1T exact, and a float would not.
    return Fraction(match["number"]) * FACTORS[match["suffix"].upper()]


def _in_tokens(threshold: int, unit: Unit, seq_length: int) -> int:
    """Return a threshold in tokens."""
    if unit == "tokens":
        return threshold
    return threshold * seq_length


def count_iterations_for_samples(
    schedule: BatchSizeSchedule,
    train_samples: int,
    seq_length: int,
    consumed_samples: int = 0,
    consumed_tokens: int = 0,
) -> int:
    """Return how many iterations follow until `train_samples` has no complete batch left.

    They are counted from (consumed_samples, consumed_tokens). `seq_length` is the number of tokens
    in a sample. The last, partial batch is dropped, as in Megatron-LM.
    """
    iterations = 0
    while True:
        size = schedule.get_size(consumed_samples, consumed_tokens)
        room = (train_samples - consumed_samples) // size
        if room <= 0:
            return iterations
        # Take all iterations of one size at once. A run may have millions of them.
        steps = min(
            room,
            count_iterations_of_size(schedule, consumed_samples, consumed_tokens, seq_length)
            or room,
        )
        iterations += steps
        consumed_samples += steps * size
        consumed_tokens += steps * size * seq_length


def count_iterations_of_size(
    schedule: BatchSizeSchedule, consumed_samples: int, consumed_tokens: int, seq_length: int
) -> int | None:
    """Return how many of the next iterations certainly have the present size.

    None means that the size does not change any more.
    """
    if isinstance(schedule, StepBatchSize):
        return schedule.count_iterations_to_next(consumed_samples, consumed_tokens, seq_length)
    if isinstance(schedule, RampupBatchSize):
        return schedule.count_iterations_to_next(consumed_samples)
    return None

"""The schedule of a run whose length is a time, and of what happens at intervals of time.

`TimeBudget` decides before each step whether it is the last one, and where the learning rate is.
Everything here is a function of its arguments. `run/clock.py` reads the clock.

Invariant: the last step has the position of the end, so that a learning rate that decays has
reached its minimum. Its save and its evaluation fit into the time, as far as their cost is known.
"""

import math
import re
from dataclasses import astuple, dataclass

from megatron.base.errors import ConfigError

_SECONDS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
"""Unit of a duration -> its length in seconds."""
_PART = r"([0-9]+(?:\.[0-9]+)?)(min|s|m|h|d)"

_CLOSING_RESERVE = 0.25
"""Part of the expected cost of the end that is kept in reserve."""
_TOTAL_RESERVE = 0.002
"""Part of the complete time that is kept in reserve."""

TOKENS_PER_PARAMETER = 20.0
"""Tokens that a parameter needs for the lowest loss at a given cost.

Source: https://arxiv.org/abs/2203.15556 (Chinchilla).
"""
_FAR_FROM_OPTIMUM = 5.0
"""Factor between the ratio and TOKENS_PER_PARAMETER from which on a warning is given."""


def parse_duration(text: str) -> float:
    """Return the seconds of a duration such as 3h, 90m, 90min, 45s, 1.5d or 2h30m.

    Raises:
        ConfigError: The text is no duration, or the duration is not positive.
    """
    seconds = 0.0
    if re.fullmatch(f"(?:{_PART})+", text):
        seconds = sum(float(number) * _SECONDS[unit] for number, unit in re.findall(_PART, text))
    if not 0 < seconds < math.inf:
        raise ConfigError(
            f"'{text}' must be a time above 0 with its unit: s, min (or m), h or d, as in 3h, 90m "
            "or 2h30m"
        )
    return seconds


def parse_optional_duration(text: str | None) -> float | None:
    """Return the seconds of a duration, or None without one or for an empty text.

    The rules of the configuration report an empty text.
    """
    return parse_duration(text) if text else None


def format_duration(seconds: float) -> str:
    """Return a duration as text, as in 3 d 4 h, 2 h 30 min, 12 min 5 s or 4.2 s."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours = minutes // 60
    if hours < 48:
        return f"{hours} h {minutes % 60} min"
    return f"{hours // 24} d {hours % 24} h"


@dataclass(frozen=True)
class ExpectedCosts:
    """Seconds that the parts of a run are expected to take."""

    step: float
    """The next step, if it is as slow as the slowest of late. 0 if nothing is known yet."""
    typical_step: float = 0.0
    """The next step, if it is as slow as most. 0 if only the first step was measured, which may
    have compiled the model. Later steps may be much faster."""
    evaluation: float = 0.0
    """One evaluation of all validation sets."""
    test: float = 0.0
    """The evaluation of all test sets at the end."""
    save: float = 0.0
    """One checkpoint."""

    @property
    def closing(self) -> float:
        """What follows the last step: validation, save and test."""
        return self.evaluation + self.test + self.save


@dataclass(frozen=True)
class NextStep:
    """What rank 0 decides about the next step."""

    position: float = 0.0
    """Position of the learning rate in seconds. At the end it is the complete time."""
    is_last: bool = False
    """Whether the run ends after it."""
    time_is_up: bool = False
    """Whether it does not take place any more."""
    evaluation_is_due: bool = False
    """Whether an evaluation is due after it, by time."""
    save_is_due: bool = False
    """Whether a save is due after it, by time."""

    def to_numbers(self) -> list[float]:
        """Return the fields as numbers, which ranks can exchange."""
        return [float(value) for value in astuple(self)]

    @classmethod
    def from_numbers(cls, numbers: list[float]) -> "NextStep":
        """Return what `to_numbers` described."""
        position, *flags = numbers
        return cls(position, *(flag != 0 for flag in flags))


@dataclass(frozen=True)
class TimeBudget:
    """The complete time of a run, in seconds."""

    seconds: float

    def place_step(
        self,
        now: float,
        costs: ExpectedCosts,
        *,
        position: float = 0.0,
        due: float = 0.0,
        is_first: bool = False,
    ) -> NextStep:
        """Decide whether the next step is the last one, and where the learning rate is.

        The last step has to end before the closing costs and a reserve. Until then, the position
        is the part of that time that has passed, scaled to the complete time.

        Args:
            now: Seconds of training so far.
            costs: What is expected.
            position: The position of the preceding step. Positions do not decrease, although the
                expected costs may.
            due: Seconds of an evaluation and a save that are due after the next step.
            is_first: Whether nothing was trained yet. At least one step takes place.
        """
        step = costs.step if costs.typical_step > 0 else 0.0
        reserve = step + _CLOSING_RESERVE * costs.closing + _TOTAL_RESERVE * self.seconds
        end = self.seconds - costs.closing - reserve
        # A step or a save that took much longer than expected may have used up the time. The decay
        # is completed by one more step as long as that is expected to fit, without a reserve.
        if now + costs.typical_step + costs.closing > self.seconds and not is_first:
            return NextStep(self.seconds, time_is_up=True)
        # After this step there must be time for what is due and for one more step. Without a
        # measured step, nothing is known about the number of steps. The first step may have
        # compiled the model. Until a second one is measured, only this step has to fit.
        if costs.step > 0 and now + costs.step + step + due > end:
            return NextStep(self.seconds, is_last=True)
        if now >= end:
            return NextStep(self.seconds, is_last=True)
        here = self.seconds * now / max(end - step, now, 1e-9)
        return NextStep(min(self.seconds, max(position, here)))


def is_due(interval: float | None, before: float, after: float) -> bool:
    """Return whether a multiple of `interval` lies in (before, after].

    All are iterations, or all are seconds. A skipped range is one jump over several iterations, so
    `after` alone is not enough. With an interval of 0 or None, nothing is ever due.
    """
    return bool(interval) and after // interval > before // interval  # type: ignore[operator]


@dataclass(frozen=True)
class TokenForecast:
    """What a run is expected to see in its time."""

    parameters: int
    tokens: float

    @property
    def tokens_per_parameter(self) -> float:
        """Tokens of the run for each parameter of the model."""
        return self.tokens / self.parameters

    @property
    def fitting_parameters(self) -> float:
        """Size of the model that has the best ratio at the same FLOPs.

        The cost is proportional to parameters x tokens. With tokens = 20 x parameters, it is
        proportional to 20 x parameters^2.
        """
        return math.sqrt(self.parameters * self.tokens / TOKENS_PER_PARAMETER)

    def describe_misfit(self) -> str | None:
        """Return a warning if the model is far too large or too small for its tokens."""
        ratio = self.tokens_per_parameter / TOKENS_PER_PARAMETER
        if 1 / _FAR_FROM_OPTIMUM <= ratio <= _FAR_FROM_OPTIMUM:
            return None
        size = "large" if ratio < 1 else "small"
        return (
            f"the model is far too {size} for its time: {self.parameters:,} parameters see about "
            f"{self.tokens:,.0f} tokens, {self.tokens_per_parameter:.2g} for each parameter instead"
            f" of about {TOKENS_PER_PARAMETER:g}. With the same FLOPs, a model of about "
            f"{self.fitting_parameters:,.0f} parameters would see "
            f"{TOKENS_PER_PARAMETER * self.fitting_parameters:,.0f} tokens"
        )

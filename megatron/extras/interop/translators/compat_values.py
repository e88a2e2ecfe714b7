"""What the rules of `compat_derived` read: the flags of a command line in both spellings."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from megatron.config.fields import ValueWithOrigin

Typed = Mapping[str, tuple[str, ...]]
"""Flag of the compatibility table, with hyphens -> its values as text."""
Given = Mapping[str, ValueWithOrigin]

OTHER_WARMUPS = (
    "optimizer.lr_warmup_fraction",
    "optimizer.lr_warmup_samples",
    "optimizer.lr_warmup_tokens",
)
"""Fields that give the warm-up in another unit than iterations."""


class FlagValues:
    """Read access to the flags of a command line, in their spelling and in this trainer's."""

    def __init__(self, typed: Typed, given: Given) -> None:
        self._typed = typed
        self._given = given

    def get_field(self, dotted: str) -> Any:
        """Return the value of a field of this trainer, or None if it was not given."""
        item = self._given.get(dotted)
        if item is None:
            return None
        return item.value

    def __contains__(self, flag: str) -> bool:
        """Return whether another system's flag is given."""
        return flag in self._typed

    def has(self, flag: str, value: str) -> bool:
        """Return whether another system's flag is given with this value."""
        return self._typed.get(flag) == (value,)

    def get_number(self, flag: str, default: float = math.nan) -> float:
        """Return the value of another system's flag, or nan if it is no number.

        It is `default` if the flag is not given.
        """
        if flag not in self._typed:
            return default
        try:
            return float(self._typed[flag][0])
        # Another rule reports the wrong value.
        except (IndexError, ValueError):
            return math.nan

    def get_words(self, flag: str) -> tuple[str, ...] | None:
        """Return the values of another system's flag, or None if it was not given."""
        return self._typed.get(flag)


Computed = tuple[Any, str]
"""A value and its reason. The value is None if the rule does not apply."""
Derivation = tuple[str, str, Callable[[FlagValues], Computed]]
"""What causes a derivation (a flag, or a system whose defaults apply), the field, and the rule."""

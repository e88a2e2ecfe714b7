"""One row of the compatibility table, which describes what becomes of another system's flag.

Invariant: a renamed flag does exactly what it did there. A derived flag is one of several from
which `compat_derived` computes a value. A harmless flag changes no number. Any other flag is
refused, and the reason names an alternative.
"""

from dataclasses import dataclass
from typing import Literal

from megatron.config.fields import Arity

Kind = Literal["renamed", "derived", "harmless", "refused"]


@dataclass(frozen=True)
class Row:
    """One flag, or some values of it."""

    flag: str
    """The flag, spelled with hyphens. Every flag is brought to this form before it is looked up.
    A flag that ends in `*` stands for all flags that start like it and have no row of their own."""
    kind: Kind
    arity: Arity
    """Number of values that the flag takes there. With 0, `=True` and `=False` may be attached."""
    reason: str = ""
    """Why the flag is harmless or refused, in words that continue after a colon. For a renamed flag
    it holds what else a user should know."""
    to: tuple[str, ...] = ()
    """Flags and fixed values here, for a renamed flag. The given values follow the last one, unless
    `only` picked them."""
    only: tuple[str, ...] = ()
    """The row holds for these values only. The flag's other values mean what they mean here, or are
    errors."""
    needs: str = ""
    """The row holds only if this field is also given and is not its default. `reason` then explains
    why."""


def rename_flag(
    flag: str,
    *to: str,
    arity: Arity = 0,
    only: tuple[str, ...] = (),
    reason: str = "",
    needs: str = "",
) -> Row:
    """Return the row of a flag that has another name here."""
    return Row(flag, "renamed", arity, reason, to, only, needs)


def ignore_flag(
    flag: str, reason: str, arity: Arity = 0, only: tuple[str, ...] = (), needs: str = ""
) -> Row:
    """Return the row of a flag that changes no number here."""
    return Row(flag, "harmless", arity, reason, (), only, needs)


def derive_from(
    flag: str, reason: str, arity: Arity = 1, only: tuple[str, ...] = (), needs: str = ""
) -> Row:
    """Return the row of a flag from which a value is computed, together with other flags.

    Without `only`, the value of a flag that takes one value must be a number above 0.
    """
    return Row(flag, "derived", arity, reason, (), only, needs)


def refuse_flag(flag: str, reason: str, arity: Arity = 0, only: tuple[str, ...] = ()) -> Row:
    """Return the row of a flag that cannot be honoured here."""
    return Row(flag, "refused", arity, reason, (), only)


def ignore_flags(reason: str, flags: str, arity: Arity = 0) -> tuple[Row, ...]:
    """Return a harmless row for each of the flags, which are separated by spaces."""
    return tuple(ignore_flag(flag, reason, arity) for flag in flags.split())


def refuse_flags(reason: str, flags: str, arity: Arity = 0) -> tuple[Row, ...]:
    """Return a refused row for each of the flags, which are separated by spaces."""
    return tuple(refuse_flag(flag, reason, arity) for flag in flags.split())

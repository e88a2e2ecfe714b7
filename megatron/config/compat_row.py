"""One row of the compatibility table: what becomes of another system's flag.

Invariant: a renamed flag does exactly what it did there; a harmless one changes no number; anything else is refused, with
the way out.
"""

from dataclasses import dataclass
from typing import Literal

from megatron.config.fields import Arity

Kind = Literal["renamed", "harmless", "refused"]


@dataclass(frozen=True)
class Row:
    """One flag, or some values of it."""

    flag: str
    """Spelled with hyphens, as all flags are before they are looked up."""
    kind: Kind
    arity: Arity
    """Number of values that the flag takes there; with 0, `=True` and `=False` may be attached."""
    reason: str = ""
    """Why it is harmless or refused, in words that go on after a colon; for a renamed one what else is to know."""
    to: tuple[str, ...] = ()
    """For a renamed one: flags and fixed values here. The given values follow the last, unless `only` picked them."""
    only: tuple[str, ...] = ()
    """The row holds for these values only; the flag's other values mean what they mean here, or are errors."""
    needs: str = ""
    """The row holds only if this field is given, too, and not its default; then `reason` says why."""


def rename_flag(
    flag: str,
    *to: str,
    arity: Arity = 0,
    only: tuple[str, ...] = (),
    reason: str = "",
    needs: str = "",
) -> Row:
    return Row(flag, "renamed", arity, reason, to, only, needs)


def ignore_flag(
    flag: str, reason: str, arity: Arity = 0, only: tuple[str, ...] = (), needs: str = ""
) -> Row:
    return Row(flag, "harmless", arity, reason, (), only, needs)


def refuse_flag(flag: str, reason: str, arity: Arity = 0, only: tuple[str, ...] = ()) -> Row:
    return Row(flag, "refused", arity, reason, (), only)


def ignore_flags(reason: str, flags: str, arity: Arity = 0) -> tuple[Row, ...]:
    """A row for each of the flags, which are separated by spaces."""
    return tuple(ignore_flag(flag, reason, arity) for flag in flags.split())


def refuse_flags(reason: str, flags: str, arity: Arity = 0) -> tuple[Row, ...]:
    """A row for each of the flags, which are separated by spaces."""
    return tuple(refuse_flag(flag, reason, arity) for flag in flags.split())

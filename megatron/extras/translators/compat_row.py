"""One row of the compatibility table, which describes what becomes of another system's flag.

Invariant: a renamed flag does exactly what it did there. A derived flag is one of several from
which `compat_derived` computes a value. A harmless flag changes no number. Any other flag is
refused, and the reason names an alternative.
"""

import tomllib
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal, get_args

from megatron.config.fields import Arity

Kind = Literal["renamed", "derived", "harmless", "refused"]

_TABLES = files(__package__) / "tables"


@dataclass(frozen=True)
class Row:
    """One flag, or some values of it."""

    flag: str
    """The flag, spelled with hyphens. Every flag is brought to this form before it is looked up.
    A flag that ends in `*` stands for all flags that start like it and have no row of their own."""
    kind: Kind
    arity: Arity = 0
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


def read_table(name: str) -> tuple[Row, ...]:
    """Return the rows of the file `tables/NAME.toml`, in its order.

    An item of the file has the fields of `Row`, with these exceptions: the kind is the key of the
    flags, there may be several flags, `because` names a text of the section `reasons`, and `{}` in
    `to` is the flag itself. Flags and words are separated by spaces. Without `arity` it is 0.
    """
    table = tomllib.loads(_TABLES.joinpath(f"{name}.toml").read_text(encoding="utf-8"))
    rows: list[Row] = []
    for item in table["rows"]:
        (kind,) = item.keys() & set(get_args(Kind))
        flags = item.pop(kind).split()
        if "because" in item:
            item["reason"] = table["reasons"][item.pop("because")]
        words = item.pop("to", "").split()
        only = tuple(item.pop("only", ()))
        for flag in flags:
            to = tuple(word.format(flag) for word in words)
            rows.append(Row(flag, kind, to=to, only=only, **item))
    return tuple(rows)

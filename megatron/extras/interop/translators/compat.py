"""The flags of other systems that are renamed, harmless or refused here, and the keys of GPT-NeoX.

A flag that is not in these tables is a field of the configuration under the same name, or unknown.
`python tools/flags.py` prints the tables.

Invariant: a renamed flag does exactly what it did there. A derived flag is one of several from
which `compat_derived` computes a value. A harmless flag changes no number. Any other flag is
refused, and the reason names an alternative. A row for all values of a flag of this trainer would
hide the flag, so the table is not read with one.
"""

import functools
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal, get_args

from megatron.config.fields import Arity, ValueWithOrigin
from megatron.config.normalise import list_known_flags

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


@functools.cache
def load_table(name: str) -> dict[str, Any]:
    """Return the content of the file `tables/NAME.toml`."""
    return tomllib.loads(_TABLES.joinpath(f"{name}.toml").read_text(encoding="utf-8"))


def read_table(name: str) -> tuple[Row, ...]:
    """Return the rows of the file `tables/NAME.toml`, in its order.

    An item of the file has the fields of `Row`, with these exceptions: the kind is the key of the
    flags, there may be several flags, `because` names a text of the section `reasons`, and `{}` in
    `to` is the flag itself. Flags and words are separated by spaces. Without `arity` it is 0.
    """
    table = load_table(name)
    rows: list[Row] = []
    for item in map(dict, table["rows"]):
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


_FILES = {
    "Megatron-LM and Megatron-DeepSpeed (BigScience's and Microsoft's)": (
        "megatron",
        "megatron_core",
        "other_models",
        "forks",
    ),
    "swiss-ai's Megatron-LM (Apertus)": ("swiss_ai",),
    "fms-fsdp": ("fms_fsdp",),
    "llm-baselines": ("llm_baselines",),
}
"""System -> its files in `tables`."""
SYSTEMS: dict[str, tuple[Row, ...]] = {
    system: tuple(row for name in names for row in read_table(name))
    for system, names in _FILES.items()
}
TABLE: tuple[Row, ...] = tuple(row for table in SYSTEMS.values() for row in table)


def find_rows(flag: str) -> list[Row]:
    """Return the rows of a flag, which is spelled with hyphens.

    There are several rows if the flag's values differ in meaning. A flag without a row of its own
    may belong to a family, such as `--moe-*`. A flag of this trainer belongs to none.
    """
    if rows := _index_by_flag().get(flag):
        return rows
    if flag in list_known_flags():
        return []
    return next((rows for start, rows in _list_families() if flag.startswith(start)), [])


def find_row(flag: str, values: Sequence[str]) -> Row | None:
    """Return the row that holds for a flag with these values, or None."""
    return pick_row(find_rows(flag), values)


def pick_row(rows: Sequence[Row], values: Sequence[str]) -> Row | None:
    """Return the first of the rows of a flag that holds for its values, or None.

    A row for all values must come after those for single values.
    """
    fitting = (row for row in rows if not row.only or [*values] in [[each] for each in row.only])
    return next(fitting, None)


@functools.cache
def _list_families() -> list[tuple[str, list[Row]]]:
    """Return (start of the flags, rows) for each family, the longest start first."""
    families = [
        (flag.removesuffix("*"), rows)
        for flag, rows in _index_by_flag().items()
        if flag.endswith("*")
    ]
    return sorted(families, key=lambda family: -len(family[0]))


@functools.cache
def _index_by_flag() -> dict[str, list[Row]]:
    table: dict[str, list[Row]] = {}
    for row in TABLE:
        # Rows are found before fields. So whoever adds such a field must not miss this.
        assert row.only or row.flag not in list_known_flags(), (
            f"{row.flag} is a flag of this trainer, and has the row {row.kind!r} in a table of "
            "megatron/extras/interop/translators/tables, which would hide it. Remove the row, or "
            "give it `only` with the values that mean something else in the other trainer"
        )
        table.setdefault(row.flag, []).append(row)
    return table


@dataclass(frozen=True)
class Trainer:
    """A trainer whose defaults replace those of this one: the section `trainer` of a table."""

    identify: tuple[str, ...]
    """Flags of it that no other trainer has."""
    defaults: str
    """Its defaults, as a command line."""
    shape: tuple[str, ...] = ()
    """Its flags that give the shape of a model."""
    ambiguous: str = ""
    """One of `identify` that may also be used alone, beside flags of this trainer."""


def _read_trainer(name: str) -> Trainer:
    found = load_table(name)["trainer"]
    words = {key: tuple(found[key].split()) for key in ("identify", "shape") if key in found}
    return Trainer(**{**found, **words})


NEOX = "GPT-NeoX"
NEOX_KEYS: tuple[Row, ...] = read_table("gpt_neox")
NEOX_TRAINER = _read_trainer("gpt_neox")
TRAINERS: dict[str, Trainer] = {
    "llm-baselines": _read_trainer("llm_baselines"),
    "fms-fsdp": _read_trainer("fms_fsdp"),
}
"""Trainers that are recognised by their flags."""


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

    def list_warmups(self) -> list[Any]:
        """Return the warm-ups that are given, in any unit."""
        found = map(self.get_field, ("optimizer.lr_warmup_iters", *OTHER_WARMUPS))
        return [value for value in found if value is not None]

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
"""A value and its reason. The value is None if the rule gives none."""


@dataclass(frozen=True)
class Derivation:
    """A rule that computes a field of this trainer from other flags."""

    cause: str
    """A flag that must be given, or a system whose defaults must apply."""
    field: str
    compute: Callable[[FlagValues], Computed]
    only: str = ""
    """The flag must have this value. Empty: any value."""
    needs: tuple[str, ...] = ()
    """Fields that must be given."""

    def applies(self, values: FlagValues, system: str) -> bool:
        """Return whether the rule applies if the defaults of a system do."""
        return (
            (self.cause in values or self.cause == system)
            and (not self.only or values.has(self.cause, self.only))
            and all(values.get_field(dotted) is not None for dotted in self.needs)
        )

"""The flags of other systems that are renamed, harmless or refused here.

A flag that is not in this table is a field of the configuration under the same name, or unknown.
docs/flags.md shows the table.
"""

import functools
from collections.abc import Sequence

from megatron.extras.translators.compat_row import Row, read_table

_FILES = {
    "Megatron-LM and Megatron-DeepSpeed (BigScience's and Microsoft's)": (
        *("megatron", "megatron_core", "other_models", "forks"),
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
    may belong to a family, such as `--moe-*`.
    """
    if rows := _index_by_flag().get(flag):
        return rows
    return next((rows for start, rows in _list_families() if flag.startswith(start)), [])


def find_row(flag: str, values: Sequence[str]) -> Row | None:
    """Return the row that holds for a flag with these values, or None."""
    return next(
        (
            row
            for row in find_rows(flag)
            # The first row that fits wins, so a row for all values must come after those for single
            # values.
            if not row.only or (len(values) == 1 and values[0] in row.only)
        ),
        None,
    )


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
        table.setdefault(row.flag, []).append(row)
    return table

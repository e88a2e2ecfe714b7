"""The flags of other systems that are renamed, harmless or refused here.

A flag that is not in this table is a field of the configuration under the same name, or unknown.
docs/flags.md shows the table.
"""

import functools
from collections.abc import Sequence

from megatron.extras.translators.compat_fms import FMS
from megatron.extras.translators.compat_forks import FORKS
from megatron.extras.translators.compat_llm_baselines import LLM_BASELINES
from megatron.extras.translators.compat_megatron import MEGATRON
from megatron.extras.translators.compat_megatron_core import MEGATRON_CORE
from megatron.extras.translators.compat_models import OTHER_MODELS
from megatron.extras.translators.compat_row import Row
from megatron.extras.translators.compat_swiss_ai import SWISS_AI

SYSTEMS: dict[str, tuple[Row, ...]] = {
    "Megatron-LM and Megatron-DeepSpeed (BigScience's and Microsoft's)": (
        *MEGATRON,
        *MEGATRON_CORE,
        *OTHER_MODELS,
        *FORKS,
    ),
    "swiss-ai's Megatron-LM (Apertus)": SWISS_AI,
    "fms-fsdp": FMS,
    "llm-baselines": LLM_BASELINES,
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

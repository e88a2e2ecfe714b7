"""Every table by name has a row, or a reason for its absence, for every choice of its setting."""

import importlib
import re
import typing
from pathlib import Path
from typing import Any

import pytest

import megatron.config
from megatron.base.errors import ConfigError
from megatron.config.fields import all_fields
from megatron.config.model import AttentionKind, MLPKind
from megatron.config.table import Absent, Table
from megatron.extras.step.kernels.gate import ACTIVATION_KERNELS
from megatron.model.layer_parts import ACTIVATIONS

PACKAGE = Path(megatron.config.__file__).parents[1]


def find_tables() -> dict[str, Table[Any]]:
    """Return each table of the package by its module and name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for name in re.findall(r"^(\w+)(?:: .*)? = Table\(", path.read_text(), re.MULTILINE):
            parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
            table = getattr(importlib.import_module(".".join(parts)), name)
            found[f"{'.'.join(parts[1:])}.{name}"] = table
    return found


TABLES = find_tables()


FLAGS = {"activation": ["--activation", "--glu-activation"]}
"""What a message calls a setting -> the flags that give its choices, if it is not one flag."""


KINDS: dict[str, Any] = {"attention": AttentionKind, "MLP": MLPKind}
"""What a message calls a kind of part, which follows from several settings -> all kinds."""


def find_choices(subject: str) -> set[str]:
    """Return the values that the command line accepts after the flags of a table, or the kinds."""
    if subject in KINDS:
        return set(typing.get_args(KINDS[subject]))
    flags = FLAGS.get(subject, [subject])
    fields = [field for field in all_fields().values() if field.flag in flags]
    assert len(fields) == len(flags)
    return {choice for field in fields for choice in typing.get_args(field.annotation)}


def find_mistakes(table: Table[Any], choices: set[str]) -> list[str]:
    """Return what is wrong with the rows of a table."""
    mistakes = [f"{name}: no such choice" for name in table.rows.keys() - choices]
    if table.otherwise is None:
        mistakes += [f"{name}: no row" for name in choices - table.rows.keys()]
    for name, row in [*table.rows.items(), ("the others", table.otherwise)]:
        if isinstance(row, Absent) and not re.fullmatch(r"[a-z].{20,}[^.]", row.reason):
            mistakes.append(f"{name}: no reason that follows the flag")
    return mistakes


@pytest.mark.parametrize("name", TABLES)
def test_each_choice_has_a_row_or_a_reason(name: str) -> None:
    assert find_mistakes(TABLES[name], find_choices(TABLES[name].subject)) == []


def test_a_missing_row_a_wrong_name_and_an_empty_reason_are_found() -> None:
    table = Table("--qk-norm", {"head": 1, "heads": 2, "full": Absent("")})
    assert find_mistakes(table, {"head", "full", "layer"}) == [
        "heads: no such choice",
        "layer: no row",
        "full: no reason that follows the flag",
    ]


def test_an_absent_row_is_an_error_with_its_reason() -> None:
    reason = "cannot be exported: no class of transformers has it"
    table = Table("--qk-norm", {"head": 1}, otherwise=Absent(reason))
    assert table.require("head") == 1
    assert table.get("full") is None
    with pytest.raises(ConfigError, match=f"--qk-norm full {reason}"):
        table.require("full")


def test_the_plan_knows_which_activations_have_a_kernel() -> None:
    planned = [name for name, row in ACTIVATIONS.list_rows() if row.has_kernel]
    assert planned == [name for name, _ in ACTIVATION_KERNELS.list_rows()]

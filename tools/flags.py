"""Print docs/flags.md, with every flag of pretrain_gpt.py and the flags of other systems.

python tools/flags.py > docs/flags.md
"""

import ast
import inspect
import sys
from collections.abc import Iterator

from megatron.config.compat import SYSTEMS
from megatron.config.compat import find_rows as compat_rows
from megatron.config.compat_row import Row
from megatron.config.fields import Field, all_fields, list_groups
from megatron.config.help import format_help_line
from megatron.config.ranges import RANGES

INTRODUCTION = """# Command-line flags

Made by `python tools/flags.py > docs/flags.md` from the configuration's dataclasses and the \
compatibility table; a test keeps it
current.

Flags may be spelled with hyphens or underscores, and values attached \
(`--train_samples=6_000_000`). Of a flag given twice the last
wins; flags win over the YAML file that `--config FILE` names, which nests the groups below: \
`model: {hidden_size: 384}`. Booleans
are bare flags, each with a `--no-` form (`--fp16`, `--no-fp16`); `--fp16=True` and \
`--fp16=False` are read, too. `None` unsets a
value.

Ranges are in mathematical notation: `[0, 1)` holds 0 but not 1. A whole number without one must \
be at least 1, any other number
finite. What may not go together is checked at the start, and all that is wrong is reported at \
once."""

OTHERS = """## Flags of other systems

A flag of theirs that is in no table below has its name and its meaning here, or is unknown, \
which is an error.

- A *renamed* flag works, and a warning says the new name once. Of a flag that is listed with \
single values, those mean what is said
  here; its other values are those of the flag here, or errors.
- A *harmless* flag changes no number: it warns once, with the reason.
- Any other is *refused*, with the reason and the way out.

A bare flag may have `=True` or `=False` attached; switched off, it asks for nothing."""


def build_page() -> str:
    """Return the text of docs/flags.md."""
    lines = [INTRODUCTION]
    for group, cls in list_groups().items():
        about = _describe_group(cls)
        # Two groups may share a module. Its paragraph is printed once.
        said = about in lines
        lines += ["", f"## {group}", *([] if said else ["", about]), ""]
        lines += _format_table("flag | value | default | meaning", _list_fields(group))
    lines += ["", OTHERS]
    for system, table in SYSTEMS.items():
        # Users of fms-fsdp know its flags with underscores. Both spellings are accepted.
        underscores = system == "fms-fsdp"
        for kind, title, head in (
            ("renamed", "renamed", "there | here | note"),
            ("harmless", "harmless", "flags | why they have no effect"),
            ("refused", "refused", "flags | why, and the way out"),
        ):
            rows = [row for row in table if row.kind == kind]
            if kind == "renamed":
                cells = _list_renamed(rows, underscores)
            else:
                cells = _group_by_reason(rows, underscores)
            lines += ["", f"### {system}: {title}", "", *_format_table(head, cells)]
    return "\n".join(lines) + "\n"


def _describe_group(cls: type) -> str:
    """Return the first paragraph of the docstring of a group's module."""
    module = inspect.getmodule(cls)
    if module:
        text = ast.get_docstring(ast.parse(inspect.getsource(module)))
    else:
        text = None
    return " ".join((text or "").partition("\n\n")[0].split())


def _list_fields(group: str) -> Iterator[list[str]]:
    for field in all_fields().values():
        if field.group == group:
            yield [f"`{field.flag}`", _format_value(field), _format_default(field), field.doc]


def _format_value(field: Field) -> str:
    if field.is_bool:
        return ""
    looks = format_help_line(field)[0].replace("|{", " or ").strip("{}").replace(",", ", ")
    if field.dotted in RANGES:
        return f"{looks} in {RANGES[field.dotted]}"
    return looks


def _format_default(field: Field) -> str:
    if field.is_bool:
        if field.default:
            return "on"
        return "off"
    if field.required:
        return "required"
    # None means that the value follows from others, and a table cell with None would mislead.
    if field.default is None or field.default == ():
        return ""
    if isinstance(field.default, float):
        return f"`{field.default:.10g}`"
    return f"`{field.default}`"


def _list_renamed(rows: list[Row], underscores: bool) -> Iterator[list[str]]:
    for row in rows:
        if row.only or not row.arity:
            values = ""
        else:
            values = " ..."
        if row.needs:
            note = f"needs `{all_fields()[row.needs].flag}`: {row.reason}"
        else:
            note = row.reason
        yield [_format_foreign_flag(row, underscores), f"`{' '.join(row.to)}{values}`", note]


def _group_by_reason(rows: list[Row], underscores: bool) -> Iterator[list[str]]:
    """Yield one row per reason, in the order in which the reasons first appear."""
    reasons = {row.reason: [other for other in rows if other.reason == row.reason] for row in rows}
    for reason, others in reasons.items():
        flags = [
            _format_foreign_flag(row, underscores)
            + (f" beside `{all_fields()[row.needs].flag}`" if row.needs else "")
            for row in others
        ]
        yield [", ".join(flags), reason]


def _format_foreign_flag(row: Row, underscores: bool) -> str:
    if underscores:
        flag = "--" + row.flag[2:].replace("-", "_")
    else:
        flag = row.flag
    # A row without values is the fallback for a flag that also has rows for single values.
    if not row.only and any(other.only for other in compat_rows(row.flag)):
        return f"`{flag}` with other values"
    if underscores:
        joined = "="
    else:
        joined = " "
    values = [value or "''" for value in row.only] or ["..."] * bool(row.arity)
    return " or ".join(f"`{flag}{joined}{value}`" for value in values) or f"`{flag}`"


def _format_table(head: str, rows: Iterator[list[str]]) -> Iterator[str]:
    yield f"| {head} |"
    yield "|" + "---|" * len(head.split(" | "))
    # A bare `|` would start a new column of the Markdown table.
    for cells in rows:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    sys.stdout.write(build_page())

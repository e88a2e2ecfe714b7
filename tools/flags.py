"""Print every flag of pretrain_gpt.py, and what becomes of the flags of other systems.

    python tools/flags.py | less

The documentation site shows this below the text of `docs/flags.md`.
"""

import ast
import inspect
import sys
from collections.abc import Iterator

from megatron.config.fields import Field, all_fields, list_groups
from megatron.config.help import format_help_line
from megatron.console.standard_streams import end_without_reader
from megatron.extras.interop.translators.compat import NEOX, NEOX_KEYS, SYSTEMS, Row
from megatron.extras.interop.translators.compat import find_rows as compat_rows

OTHERS = """## Flags of other systems

A flag of another system that is in no table below has the same name and meaning here, or it is
unknown, which is an error.

- A *renamed* flag works, and a warning gives the new name once. If a flag is listed with single
  values, the row holds for these values only. Other values are those of the flag of the same name
  here, or errors. A flag that ends in `*` stands for all flags with this beginning that have no
  row of their own.
- From a *derived* flag and other flags, a value here is computed. A warning gives the value.
- A *harmless* flag changes no number. It gives one warning with the reason.
- A *refused* flag is an error with the reason and an alternative.

A flag without a value may have `=True` or `=False` attached. With `=False`, a harmless or refused
flag has no effect, and a renamed one turns its booleans off. A renamed flag that sets anything else
must be left out instead.

The last tables are for keys of the YAML files of GPT-NeoX. Keys of DeepSpeed in them are read as in
`--deepspeed-config`. Keys may be spelled with hyphens or underscores. A harmless or refused key
that is null, false or 0 asks for nothing."""


def build_tables() -> str:
    """Return all tables in Markdown."""
    lines: list[str] = []
    for group, cls in list_groups().items():
        about = _describe_group(cls)
        # Two groups may share a module. Its paragraph is printed once.
        lines += [f"## {group}", ""]
        if about not in lines:
            lines += [about, ""]
        lines += [*_format_table("flag | value | default | meaning", _list_fields(group)), ""]
    lines += [OTHERS]
    for system, table in (SYSTEMS | {NEOX: NEOX_KEYS}).items():
        # Users of these know the flags with underscores. Both spellings are accepted.
        underscores = system in ("fms-fsdp", "llm-baselines")
        for kind, title, head in (
            ("renamed", "renamed", "there | here | note"),
            ("derived", "derived", "flags | what follows from it"),
            ("harmless", "harmless", "flags | why they have no effect"),
            ("refused", "refused", "flags | why, and what to use instead"),
        ):
            rows = [row for row in table if row.kind == kind]
            if not rows:
                continue
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
    if field.declared_range is not None:
        return f"{looks} in {field.declared_range.interval}"
    return looks


def _format_default(field: Field) -> str:
    if field.is_switch:
        return "auto"
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
    if isinstance(field.default, tuple):
        return f"`{' '.join(map(str, field.default))}`"
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
            + (f" with `{all_fields()[row.needs].flag}`" if row.needs else "")
            for row in others
        ]
        yield [", ".join(flags), reason]


def _format_foreign_flag(row: Row, underscores: bool) -> str:
    is_key = not row.flag.startswith("--")
    if is_key:
        flag = row.flag.replace("-", "_")
    elif underscores:
        flag = "--" + row.flag[2:].replace("-", "_")
    else:
        flag = row.flag
    # A row without values is the fallback for a flag that also has rows for single values.
    siblings = [other for other in (*compat_rows(row.flag), *NEOX_KEYS) if other.flag == row.flag]
    if not row.only and any(other.only for other in siblings):
        return f"`{flag}` with other values"
    if is_key:
        joined = ": "
    elif underscores:
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
    with end_without_reader():
        sys.stdout.write(build_tables())

"""Print docs/rules.md, with every rule about a configuration and its messages.

python tools/rules.py > docs/rules.md
"""

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from functools import cache
from types import FunctionType, ModuleType

from megatron.config.fields import all_fields
from megatron.extras.deepspeed.kind import DEEPSPEED
from megatron.extras.float8.kind import FLOAT8
from megatron.extras.trackers.trackers import check_trackers_are_installed
from megatron.extras.verify.kept_report import check_report
from megatron.rules.declared import Forbids, IfGiven, OneOf
from megatron.rules.lists import CONFIG_RULES, NEEDED_BY_RUNS, PLAN_RULES, RESUME_RULES
from megatron.rules.tokenizer import check_tokenizer_files
from megatron.run.parts import check_parts

INTRODUCTION = """# Rules

This page lists the messages of all rules about a configuration. To look up a message of a run,
search for its flag or for some of its words. After an error, the run ends before anything is
trained. After a warning, it trains.

VALUE stands for the value of a flag, with its origin if it came from a file or a preset. FLAG
stands for one of several flags, and `…` for any other text that depends on the values. A message
that is only `…` is composed elsewhere. The last column has the description of the rule. It is empty
if the message has the complete rule.

Some errors are not on this page: those of files that cannot be read, and those of numbers that
cannot be computed from the flags, such as the stages of a pipeline or the steps of a ramp-up.

`python tools/rules.py > docs/rules.md` generates this page. A test compares it with the rules.
`CONTRIBUTING.md` explains how to add a rule."""

SECTIONS = {
    "Rules that need only the configuration": CONFIG_RULES,
    "Rules that need the number of ranks, or what follows from it": PLAN_RULES,
    "Rules that need the checkpoint that a run continues": RESUME_RULES,
    "Rules of a run that starts": (check_tokenizer_files, *NEEDED_BY_RUNS, check_parts),
    "Rules of experiment trackers and of verification": (
        check_trackers_are_installed,
        check_report,
    ),
    "What DeepSpeed cannot run": (*DEEPSPEED.file_rules, *DEEPSPEED.rules),
    "What does not run in float8": FLOAT8.rules,
}
"""Title -> rules, in the order of their messages."""


def build_page() -> str:
    """Return the text of docs/rules.md."""
    lines = [INTRODUCTION]
    for title, rules in SECTIONS.items():
        lines += ["", f"## {title}", "", "| | message | rule |", "|---|---|---|"]
        for rule in rules:
            for level, message, about in list_messages(rule):
                # A bare `|` would start a new column of the table.
                cells = (level, f"`{' '.join(message.split())}`", about)
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def list_messages(rule: object) -> Iterator[tuple[str, str, str]]:
    """Yield level, message and description of each finding that a rule can have."""
    match rule:
        case IfGiven():
            yield from list_messages(rule.rule)
        case Forbids():
            for dotted in rule.fields:
                why = re.sub(r"\{(.+?)\}", lambda match: _show(match[1]), rule.why)
                finding = rule.make(f"{_show(dotted)} {why}.")
                yield finding.level, finding.text, ""
        case OneOf():
            flags = " and ".join(map(_show, rule.fields))
            yield "error", f"{flags} exclude each other{rule.why}; give one of them.", ""
        case FunctionType():
            module = inspect.getmodule(rule)
            assert module is not None, rule
            about = (inspect.getdoc(rule) or "").partition("\n\n")[0].replace("\n", " ")
            for level, message in _find_messages(_parse_functions(module), rule.__name__):
                yield level, message, about
        case _:
            raise AssertionError(f"no description of {rule}")


def _show(dotted: str) -> str:
    field = all_fields()[dotted]
    if field.is_bool:
        return field.negative_flag if field.default else field.flag
    return f"{field.flag} VALUE"


@cache
def _parse_functions(module: ModuleType) -> dict[str, ast.FunctionDef]:
    """Return the functions of a module by name."""
    body = ast.parse(inspect.getsource(module)).body
    return {node.name: node for node in body if isinstance(node, ast.FunctionDef)}


def _find_messages(functions: dict[str, ast.FunctionDef], name: str) -> Iterator[tuple[str, str]]:
    """Yield level and message of each finding in a function, and in those that it calls."""
    function = functions[name]
    calls = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    texts = _find_texts(function)
    for call in sorted(calls, key=lambda node: node.lineno):
        assert isinstance(call.func, ast.Name)
        if call.func.id in ("error", "warning"):
            yield call.func.id, re.sub("…+", "…", _render(call.args[0], texts))
        elif call.func.id in functions:
            yield from _find_messages(functions, call.func.id)


def _find_texts(function: ast.FunctionDef) -> dict[str, ast.expr]:
    """Return the variables of a function that are assigned once, and their values."""
    values: dict[str, list[ast.expr]] = {}
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                values.setdefault(name, []).append(value)
            case ast.AugAssign(target=ast.Name(id=name)) | ast.For(target=ast.Name(id=name)):
                values.setdefault(name, []).extend([ast.Constant(...)] * 2)
    return {name: found[0] for name, found in values.items() if len(found) == 1}


def _render(node: ast.expr, texts: dict[str, ast.expr]) -> str:
    """Return the text of an expression as far as it is known."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_render(part, texts) for part in parts)
        case ast.FormattedValue(value=value):
            return _render(value, texts)
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id="settings" | "context"), attr="describe"),
            args=arguments,
        ):
            names = [each.value for each in arguments if isinstance(each, ast.Constant)]
            if len(names) == len(arguments):
                return " and ".join(_show(str(name)) for name in names)
            return "FLAG VALUE"
        case ast.Name(id=name) if name in texts:
            return _render(texts[name], {other: texts[other] for other in texts if other != name})
    return "…"


if __name__ == "__main__":
    sys.stdout.write(build_page())

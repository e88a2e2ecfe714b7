"""Print docs/rules.md, with every rule about a configuration and its messages.

python tools/rules.py > docs/rules.md
"""

import inspect
import re
import sys
from collections.abc import Iterator
from types import FunctionType

from rule_messages import find_messages, show_field

from megatron.config.fields import all_fields
from megatron.extras.deepspeed.kind import DEEPSPEED
from megatron.extras.float8.kind import FLOAT8
from megatron.extras.trackers.trackers import check_trackers_are_installed
from megatron.extras.verify.kept_report import check_report
from megatron.rules import ranges
from megatron.rules.declared import Forbids, IfGiven, OneOf
from megatron.rules.lists import CONFIG_RULES, NEEDED_BY_RUNS, PLAN_RULES, RESUME_RULES
from megatron.rules.tokenizer import check_tokenizer_files
from megatron.run.parts import check_parts

INTRODUCTION = """# Rules

This page lists the messages of all rules about a configuration. To look up a message of a run,
search for its flag or for some of its words. After an error, the run ends before anything is
trained. After a warning, it trains.

VALUE stands for the value of a flag, with its origin if it came from a file or a preset. FLAG
stands for one of several flags, and `…` for any other text that depends on the values. A part in
brackets, as in `[ or 2]`, is only in some messages. The messages are read from the code without
running it, so a few rows combine parts that never occur together.

The last column describes the rule, once for all of its messages. It is empty if the message has the
complete rule. For the range of a number, it has the flags with this range.

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
                why = re.sub(r"\{(.+?)\}", lambda match: show_field(match[1]), rule.why)
                finding = rule.make(f"{show_field(dotted)} {why}.")
                yield finding.level, finding.text, ""
        case OneOf():
            flags = " and ".join(map(show_field, rule.fields))
            yield "error", f"{flags} exclude each other{rule.why}; give one of them.", ""
        case ranges.check_ranges:
            yield from _list_ranges()
        case FunctionType():
            about = (inspect.getdoc(rule) or "").partition("\n\n")[0].replace("\n", " ")
            for level, message in dict.fromkeys(find_messages(rule)):
                yield level, re.sub("…+", "…", message), about
                about = ""
        case _:
            raise AssertionError(f"no description of {rule}")


def _list_ranges() -> Iterator[tuple[str, str, str]]:
    """Yield a message for each range, with the flags that have it."""
    flags: dict[str, list[str]] = {}
    for field in all_fields().values():
        if field.declared_range is not None or field.annotation in (int, float):
            flags.setdefault(field.range.describe(), []).append(f"`{field.flag}`")
    for described, found in sorted(flags.items()):
        yield "error", f"FLAG VALUE must be {described}.", ", ".join(found)


if __name__ == "__main__":
    sys.stdout.write(build_page())

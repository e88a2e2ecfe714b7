"""What a rule finds, and how findings are collected.

A rule is a function of a context. It yields a finding for each mistake. The context has the data
that the rule needs: the configuration, the plan, a checkpoint, or the options of a command.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeVar

from megatron.base.errors import combine_errors, leave_out_middle

C = TypeVar("C")
"""Type of a context, a frozen dataclass."""
Rule = Callable[[C], Iterator["Finding"]]


@dataclass(frozen=True)
class Finding:
    """Something wrong or unexpected."""

    level: Literal["error", "warning"]
    """An error refuses the run. With a warning, the run trains."""
    text: str
    """The value with its origin, the rule, and the fix. See `ConfigWithOrigin.describe`."""


def error(text: str) -> Finding:
    """Return an error."""
    return Finding("error", text)


def warning(text: str) -> Finding:
    """Return a warning."""
    return Finding("warning", text)


def apply_rules(rules: Iterable[Rule[C]], context: C) -> list[Finding]:
    """Return the findings of all rules, in the order of the rules."""
    return [finding for rule in rules for finding in rule(context)]


def list_errors(findings: Iterable[Finding]) -> list[str]:
    """Return the texts of the errors."""
    return [leave_out_middle(each.text) for each in findings if each.level == "error"]


def list_warnings(findings: Iterable[Finding]) -> list[str]:
    """Return the texts of the warnings."""
    return [leave_out_middle(each.text) for each in findings if each.level == "warning"]


def refuse_errors(findings: Iterable[Finding]) -> None:
    """Raise an error that lists all errors among the findings.

    Raises:
        ConfigError: There is an error.
    """
    if errors := list_errors(findings):
        raise combine_errors(errors)

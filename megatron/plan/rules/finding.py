"""What a rule finds, and how findings are collected.

A rule is a function of a context. It yields a finding for each mistake. The context has the data
that the rule needs: the configuration, the plan, a checkpoint, or the options of a command. Rules
that differ only in their fields and texts are objects (`Forbids`, `OneOf`, `IfGiven`).
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from megatron.base.errors import combine_errors, leave_out_middle
from megatron.config.data import TokenizerConfig
from megatron.config.fields import ConfigWithOrigin, all_fields
from megatron.config.tree import Config
from megatron.plan.run_plan import Plan
from megatron.schedule.lr import LRSchedule
from megatron.schedule.position import Progress
from megatron.schedule.skip import SkipRange

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


Condition = Callable[[Config], bool]
S = TypeVar("S", bound=ConfigWithOrigin)


@dataclass(frozen=True)
class Forbids:
    """Reports each of several fields that is given although a condition forbids it."""

    when: Condition
    """Whether the fields must not be given."""
    make: Callable[[str], Finding]
    """`error` or `warning`."""
    why: str
    """Follows the flag and its value, as in "has no effect without --save".

    A dotted name in braces stands for the flag, the value and the origin of that field.
    """
    fields: tuple[str, ...]
    """Dotted names."""

    def __call__(self, settings: ConfigWithOrigin) -> Iterator[Finding]:
        """Yield a finding for each field that is given."""
        if self.when(settings.config):
            why = re.sub(r"\{(.+?)\}", lambda match: settings.describe(match[1]), self.why)
            for dotted in self.fields:
                if settings.is_changed(dotted):
                    yield self.make(f"{settings.describe(dotted)} {why}.")


@dataclass(frozen=True)
class OneOf:
    """Checks that at most one of several fields is given."""

    fields: tuple[str, ...]
    """Dotted names."""
    why: str = ""
    """Follows "exclude each other", and begins with a colon."""

    def __call__(self, settings: ConfigWithOrigin) -> Iterator[Finding]:
        """Yield a message if several fields are given."""
        given = [dotted for dotted in self.fields if settings.is_changed(dotted)]
        if len(given) > 1:
            yield error(
                f"{settings.describe(*given)} exclude each other{self.why}; give one of them."
            )


@dataclass(frozen=True)
class IfGiven(Generic[S]):
    """Applies a rule if one of its fields does not have the default."""

    rule: Rule[S]
    fields: tuple[str, ...]
    """Dotted names."""

    def __call__(self, settings: S) -> Iterator[Finding]:
        """Yield what the rule finds."""
        if any(settings.is_changed(dotted) for dotted in self.fields):
            yield from self.rule(settings)


def if_given(rule: Rule[S], *fields: str) -> IfGiven[S]:
    """Return a rule that finds nothing while these fields have their defaults."""
    return IfGiven(rule, fields)


def needs(dotted: str, why: str, *fields: str) -> Forbids:
    """Return the rule that fields need another field. `why` follows the flag of the latter."""
    text = f"needs {all_fields()[dotted].flag}{why}"
    return Forbids(lambda config: not _is_set(config, dotted), error, text, fields)


def no_effect(why: str, when: Condition, *fields: str) -> Forbids:
    """Return the warning that fields have no effect under a condition."""
    return Forbids(when, warning, f"has no effect {why}", fields)


def no_effect_without(dotted: str, why: str, *fields: str) -> Forbids:
    """Return the warning that fields have no effect without another field. See `needs`."""
    flag = all_fields()[dotted].flag
    return no_effect(f"without {flag}{why}", lambda config: not _is_set(config, dotted), *fields)


def no_effect_unless(dotted: str, values: tuple[str, ...], *fields: str) -> Forbids:
    """Return the warning that fields have no effect unless another field has one of `values`."""
    why = f"without {all_fields()[dotted].flag} {' or '.join(values)}"
    return no_effect(why, lambda config: _get_value(config, dotted) not in values, *fields)


def _is_set(config: Config, dotted: str) -> bool:
    value = _get_value(config, dotted)
    # 0 is a value.
    return value is not None and value is not False and value != ()


def _get_value(config: Config, dotted: str) -> object:
    return ConfigWithOrigin(config, {})[dotted]


@dataclass(frozen=True)
class PlanContext(ConfigWithOrigin):
    """The number of ranks, and what follows from it and the configuration.

    Values that are out of their range are replaced, so that each number of the plan exists.
    """

    plan: Plan
    """The plan of this configuration, without findings."""
    position: Progress | None
    """Where the run starts. None if only its checkpoint knows."""
    may_read_files: bool
    """Whether rules may look for files."""

    @property
    def start(self) -> Progress:
        """Where the run starts. It is the first sample if the position is not known."""
        return self.position or Progress()

    @property
    def iterations_ahead(self) -> range:
        """The iterations still to come, if samples or iterations end the run."""
        return range(self.start.iteration + 1, self.plan.train_iters + 1)


@dataclass(frozen=True)
class TokenizerContext:
    """A tokenizer, and the files of the tokenizer that a checkpoint was trained with."""

    tokenizer: TokenizerConfig
    iteration: int
    """Iteration of the checkpoint."""
    saved_digests: Mapping[str, str]
    """Role of a file -> digest of its content in the checkpoint."""


@dataclass(frozen=True)
class ResumeContext(TokenizerContext):
    """A run, and the checkpoint that it continues."""

    given: Config
    """The configuration of the command line."""
    plan: Plan
    """The plan of the run. Its learning rate and its skipped ranges are those of `given`."""
    saved: Config
    """The configuration of the checkpoint."""
    has_states: bool
    """Whether the checkpoint has the states of an optimizer."""
    saved_schedule: LRSchedule | None
    saved_ranges: tuple[SkipRange, ...]

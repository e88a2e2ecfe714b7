"""Rules that differ only in their fields and texts."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from megatron.config.config_with_origin import ConfigWithOrigin
from megatron.config.fields import all_fields
from megatron.config.tree import Config
from megatron.plan.rules.finding import Finding, Rule, error, warning

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

"""Rules that are the same but for their fields and words."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron.config.config_with_origin import ConfigWithOrigin
from megatron.config.fields import all_fields
from megatron.config.tree import Config
from megatron.rules.finding import Finding, error, warning

Condition = Callable[[Config], bool]


@dataclass(frozen=True)
class NoEffect:
    """Warns about fields that are given although they have no effect."""

    why: str
    """Follows "has no effect", as in "without --save"."""
    when: Condition
    """Whether the fields have no effect in a configuration."""
    fields: tuple[str, ...]
    """Dotted names."""

    def __call__(self, settings: ConfigWithOrigin) -> Iterator[Finding]:
        """Yield a message for each field that is given."""
        if self.when(settings.config):
            for dotted in self.fields:
                if settings.is_changed(dotted):
                    yield warning(f"{settings.describe(dotted)} has no effect {self.why}.")


@dataclass(frozen=True)
class Requires:
    """Checks that fields are given only together with what they need."""

    what: str
    """Follows "needs", as in "--save: without it nothing would be saved"."""
    given: Condition
    """Whether a configuration has what the fields need."""
    fields: tuple[str, ...]
    """Dotted names."""

    def __call__(self, settings: ConfigWithOrigin) -> Iterator[Finding]:
        """Yield a message for each field that is given without it."""
        if not self.given(settings.config):
            for dotted in self.fields:
                if settings.is_changed(dotted):
                    yield error(f"{settings.describe(dotted)} needs {self.what}.")


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


def needs(dotted: str, why: str, *fields: str) -> Requires:
    """Return the rule that fields need another one, with a reason that follows its flag."""
    return Requires(all_fields()[dotted].flag + why, lambda config: _is_set(config, dotted), fields)


def no_effect_without(dotted: str, why: str, *fields: str) -> NoEffect:
    """Return the warning that fields have no effect without another one. See `needs`."""
    flag = all_fields()[dotted].flag
    return NoEffect(f"without {flag}{why}", lambda config: not _is_set(config, dotted), fields)


def _is_set(config: Config, dotted: str) -> bool:
    value = ConfigWithOrigin(config, {})[dotted]
    # 0 is a value.
    return value is not None and value is not False and value != ()

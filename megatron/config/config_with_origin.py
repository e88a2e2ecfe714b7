"""A configuration together with the origin of each value.

Rules read it, and messages take their wording from it.
"""

from dataclasses import dataclass
from typing import Any

from megatron.config.fields import PRESET_ORIGIN, all_fields, flatten
from megatron.config.tree import Config

_SHOWN_VALUES = 8
"""A message shows at most this many values of a flag."""


@dataclass(frozen=True)
class ConfigWithOrigin:
    """A configuration and, for each dotted field, where its value came from.

    `origin` has the form of `LoadedConfig.origin`. It may lack fields or be empty. Messages then
    leave the origin out.
    """

    config: Config
    origin: dict[str, str]

    def __getitem__(self, dotted: str) -> Any:
        """Return the value of a field by its dotted name, as in 'model.hidden_size'."""
        group, _, name = dotted.partition(".")
        return getattr(getattr(self.config, group), name)

    def is_changed(self, dotted: str) -> bool:
        """Return whether the field's value differs from its default."""
        return bool(self[dotted] != all_fields()[dotted].default)

    def is_from_preset(self, dotted: str) -> bool:
        """Return whether the field's value is that of a preset."""
        return self.origin.get(dotted, "").startswith(PRESET_ORIGIN)

    def describe(self, *dotted: str) -> str:
        """Return flag, value and origin of fields, joined with 'and'.

        An example is '--seq-length 512 (run.yaml:9)'. The origin is left out if the value came from
        a flag.
        """
        return " and ".join(map(self._describe_field, dotted))

    def list_values(self) -> dict[str, Any]:
        """Return every value by its dotted name."""
        return flatten(self.config)

    def _describe_field(self, dotted: str) -> str:
        return describe_value(dotted, self[dotted], self.origin.get(dotted, ""))


def describe_value(dotted: str, value: Any, origin: str) -> str:
    """Return the flag, a value and its origin of a field, as `ConfigWithOrigin.describe` does."""
    # A mixture may have hundreds of values.
    if isinstance(value, tuple) and len(value) > _SHOWN_VALUES:
        value = (*value[:_SHOWN_VALUES], f"... ({len(value)} values)")
    shown = all_fields()[dotted].spell(value)
    # A value that came from a flag needs no origin, because the message shows that flag already.
    if origin and not origin.startswith("-"):
        return f"{shown} ({origin})"
    return shown


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration as it was loaded, the origin of each value, and the warnings."""

    config: Config
    origin: dict[str, str]
    """Dotted field -> 'default', 'preset llama2-7b', 'run.yaml:9', or the flag as it was typed."""
    warnings: list[str]

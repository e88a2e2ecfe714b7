"""A configuration together with where its values came from: what rules read, and how messages word it."""

from dataclasses import dataclass
from typing import Any

from megatron.config.fields import all_fields, flatten
from megatron.config.tree import Config


@dataclass(frozen=True)
class ConfigWithOrigin:
    config: Config
    origin: dict[str, str]

    def __getitem__(self, dotted: str) -> Any:
        """The value of the field 'model.hidden_size'."""
        group, _, name = dotted.partition(".")
        return getattr(getattr(self.config, group), name)

    def is_changed(self, dotted: str) -> bool:
        """Whether the field has another value than its default."""
        return bool(self[dotted] != all_fields()[dotted].default)

    def describe(self, *dotted: str) -> str:
        """Flag, value, and origin where it was no flag: '--seq-length 512 (run.yaml:9)'; several are joined with 'and'."""
        return " and ".join(map(self._describe_field, dotted))

    def list_values(self) -> dict[str, Any]:
        """Every value by its dotted name."""
        return flatten(self.config)

    def _describe_field(self, dotted: str) -> str:
        field, value, origin = all_fields()[dotted], self[dotted], self.origin.get(dotted, "")
        note = f" ({origin})" if origin and not origin.startswith("-") else ""
        if isinstance(value, bool):
            return (field.flag if value else field.negative_flag) + note
        return (
            f"{field.flag} {' '.join(map(str, value)) if isinstance(value, tuple) else value}{note}"
        )

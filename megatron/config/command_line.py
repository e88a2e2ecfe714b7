"""What a command line gave, and the interface that reads flags and files of other trainers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from megatron.config.fields import Arity, ValueWithOrigin

Given = Mapping[str, ValueWithOrigin]
"""Dotted field -> its value."""
Found = tuple[dict[str, ValueWithOrigin], list[str], list[str]]
"""Fields, errors and warnings."""


@dataclass
class CommandLine:
    """The values, warnings and errors that a command line gave."""

    given: dict[str, ValueWithOrigin] = field(default_factory=dict)
    config_files: tuple[str, ...] = ()
    preset: ValueWithOrigin | None = None
    """Name of the preset, or None as its value if --preset None was given."""
    help: bool = False
    help_group: str | None = None
    """The group that --help names."""
    typed: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Flag of another trainer, with hyphens -> its values. Flags that are off are left out."""
    foreign: str | None = None
    """The first flag in a spelling that only another trainer has, as typed."""
    conditions: list[tuple[str, str, str]] = field(default_factory=list)
    """(flag as typed, dotted field, reason) of flags that are possible only with another field."""
    refused: dict[str, list[str]] = field(default_factory=dict)
    """Reason -> the flags that are refused for this reason, as typed."""
    warnings: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class Translator(Protocol):
    """Reads what users of other trainers write. Without one, such flags are unknown."""

    def find_arity(self, flag: str) -> Arity | None:
        """Return how many values follow a flag of another trainer, or None for an unknown flag."""

    def read_flag(self, line: CommandLine, typed: str, flag: str, values: list[str]) -> bool:
        """Read a flag with its values into `line`. Return whether it is one of another trainer.

        Args:
            line: It is updated.
            typed: The flag as typed.
            flag: The flag with hyphens.
            values: Its values.
        """

    def explain_values(self, flag: str) -> str | None:
        """Return which values of a flag are possible and why, or None for an unknown flag."""

    def read_files(self, paths: Sequence[str]) -> CommandLine | None:
        """Return the configuration in files of another trainer, or None for other files.

        Raises:
            ConfigError: The files cannot be read as what they seem to be.
        """

    def merge_json(self, path: str, given: Given) -> Found:
        """Return what DeepSpeed's JSON sets beside `given`."""

    def fill(self, line: CommandLine, given: Given) -> Found:
        """Return the fields that the other trainer would set itself beside `given`."""

    def explain_missing(self, line: CommandLine) -> list[str]:
        """Return what to add to the errors about missing fields."""

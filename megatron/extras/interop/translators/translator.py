"""The translator of other trainers' flags, files and defaults, and the way to load with it.

Each rank that trains imports this module. What only a command line of another trainer needs is
imported when it is used.
"""

from collections.abc import Sequence

from megatron.config.cli import FOREIGN_DEFAULT
from megatron.config.cli import load_config as load_with
from megatron.config.fields import Arity, LoadedConfig, ValueWithOrigin, all_fields
from megatron.config.normalise import CommandLine, Found, Given, read_argv
from megatron.extras.interop.translators.compat import NEOX, find_row, find_rows
from megatron.extras.interop.translators.rows import read_row


class OtherTrainers:
    """Reads the flags, files and defaults of all trainers of docs/flags.md. See `Translator`."""

    def find_arity(self, flag: str) -> Arity | None:
        """Return how many values follow a flag of another trainer, or None for an unknown flag."""
        # All rows of one flag take the same number of values.
        return next((row.arity for row in find_rows(flag)), None)

    def read_flag(self, line: CommandLine, typed: str, flag: str, values: list[str]) -> bool:
        """Read a flag with its values into `line`. Return whether it is one of another trainer."""
        row = find_row(flag, values)
        if row is None:
            return False
        read_row(line, typed, flag, row, values)
        return True

    def explain_values(self, flag: str) -> str | None:
        """Return which values of a flag are possible and why, or None for an unknown flag."""
        rows = find_rows(flag)
        if not rows:
            return None
        allowed = " or ".join(value for row in rows for value in row.only)
        return f"only {allowed} is possible here; {rows[0].reason}"

    def read_files(self, paths: Sequence[str]) -> CommandLine | None:
        """Return the configuration in files of another trainer, or None for other files."""
        from megatron.extras.interop.translators.foreign_file import read_foreign_files

        return read_foreign_files(paths, self)

    def merge_json(self, path: str, given: Given) -> Found:
        """Return what DeepSpeed's JSON sets beside `given`."""
        from megatron.extras.interop.translators.deepspeed_json import merge_json

        return merge_json(path, given)

    def fill(self, line: CommandLine, given: Given) -> Found:
        """Return the fields that another system would set itself, the errors and the warnings."""
        from megatron.extras.interop.translators.compat_derived import (
            derive_values,
            describe_dropped_defaults,
            find_defaults,
        )

        filled: dict[str, ValueWithOrigin] = {}
        typed = dict(line.typed)
        warnings: list[str] = []
        found = find_defaults(typed, given)
        system = ""
        if found is None and (dropped := describe_dropped_defaults(typed, given)):
            warnings.append(dropped)
        if found is not None:
            system, words = found
            defaults = read_argv(words, self)
            typed = defaults.typed | typed
            filled = {
                dotted: ValueWithOrigin(item.value, f"{system}{FOREIGN_DEFAULT}")
                for dotted, item in defaults.given.items()
                if dotted not in given
            }
            listed = ", ".join(
                all_fields()[dotted].spell(item.value) for dotted, item in filled.items()
            )
            warnings.append(
                f"the defaults of {system} are used for flags that are not given: "
                f"{listed or 'none'}."
            )
        try:
            derived = list(dict.fromkeys(derive_values(typed, system, dict(given) | filled)))
        except ValueError as error:
            return filled, [str(error)], warnings
        for dotted, value, reason in derived:
            filled[dotted] = ValueWithOrigin(value, "derived")
            warnings.append(f"{reason}.")
        return filled, [], warnings

    def explain_missing(self, line: CommandLine) -> list[str]:
        """Return what to add to the errors about missing fields."""
        if NEOX not in line.typed:
            return []
        return [
            "GPT-NeoX divides a configuration into several files: give all, as in --config "
            "125M.yml local_setup.yml."
        ]


def load_config(argv: Sequence[str] | None = None, *, prog: str | None = None) -> LoadedConfig:
    """Load a command line that may have the flags and files of other trainers.

    See `megatron.config.cli.load_config`.

    Raises:
        ConfigError: The command line has errors.
    """
    return load_with(argv, prog=prog, translator=OtherTrainers())

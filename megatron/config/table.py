"""Tables that give each choice of a setting its row.

The core has a table with what a choice is. Each extra has a table of its own by the same names,
next to its code. So the core does not know its extras, and a new choice does not change their code.
A choice that an extra cannot serve has `Absent` with a reason in place of a row. The user gets the
reason as an error, unless the caller has another way.

`tests/test_tables.py` finds the tables and names each missing row.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from megatron.base.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class Absent:
    """Stands for a row that a table does not have."""

    reason: str
    """Follows the setting and its value, as in "cannot be exported: ..."."""


@dataclass(frozen=True)
class Table(Generic[T]):
    """The rows for the choices of one setting."""

    subject: str
    """What a message calls the setting: its flag, or a word if several flags give the choices."""
    rows: Mapping[str, T | Absent]
    """Choice -> its row."""
    otherwise: T | Absent | None = None
    """Stands for each choice without a row. None: each choice needs one."""

    def get(self, name: str) -> T | None:
        """Return the row of a choice, or None if it is absent."""
        row = self._find(name)
        return None if isinstance(row, Absent) else row

    def require(self, name: str) -> T:
        """Return the row of a choice.

        Raises:
            ConfigError: it is absent. The message has the subject, the choice and the reason.
        """
        row = self._find(name)
        if isinstance(row, Absent):
            raise ConfigError(f"{self.subject} {name} {row.reason}")
        return row

    def list_rows(self) -> Iterator[tuple[str, T]]:
        """Yield the choices that have a row, and the rows."""
        for name, row in self.rows.items():
            if not isinstance(row, Absent):
                yield name, row

    def _find(self, name: str) -> T | Absent:
        if name not in self.rows and self.otherwise is not None:
            return self.otherwise
        return self.rows[name]

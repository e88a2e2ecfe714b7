"""Marks in place of the parts of a script whose values are known only at run time.

Invariant: a mark consists of private characters, so bash never splits it. `Marks.find_unknown`
finds every part of a word that has no value.
"""

import re
from dataclasses import dataclass

MARK = re.compile("\ue000(\\d+)\ue001")
MARK_CHARACTERS = ("\ue000", "\ue001")
CHARACTERS_LIMIT = 16 * 2**20
"""Characters of all unknown parts together."""


class LimitExceededError(Exception):
    """A script takes more time or memory to read than is allowed. The message has the limit."""


@dataclass(frozen=True)
class Unknown:
    """A part of a word whose value is not known.

    `kind` is `variable`, `argument` (of the script), `command` or `placeholder`. `name` is the
    variable's name, or the text of a command. `text` is the part as it is written.
    """

    kind: str
    name: str
    text: str


class Marks:
    """The unknown parts of a script, and the marks that stand for them."""

    def __init__(self) -> None:
        self._unknown: list[Unknown] = []
        self._numbers: dict[Unknown, int] = {}
        self._characters = 0

    def _count(self, characters: int) -> None:
        """Count characters before they are made, because parts can contain other parts."""
        self._characters += characters
        if self._characters > CHARACTERS_LIMIT:
            raise LimitExceededError(f"its values have more than {CHARACTERS_LIMIT:,} characters")

    def mark(self, kind: str, name: str, text: str) -> str:
        """Return the mark that stands for a part whose value is not known. See `Unknown`.

        Equal parts have one mark, so a second reading of a script has the words of the first one.
        """
        part = Unknown(kind, name, text)
        if part not in self._numbers:
            self._count(len(text))
            self._numbers[part] = len(self._unknown)
            self._unknown.append(part)
        return f"\ue000{self._numbers[part]}\ue001"

    def find_unknown(self, text: str) -> list[Unknown]:
        """Return the parts of `text` whose values are not known."""
        return [self._unknown[int(number)] for number in MARK.findall(text)]

    def is_dropped(self, word: str) -> bool:
        """Return whether `word` is an unset variable and nothing else. bash removes such a word."""
        match = MARK.fullmatch(word)
        return match is not None and self._unknown[int(match[1])].kind == "variable"

    def render(self, text: str) -> str:
        """Return `text` with each mark replaced by the part that it stands for, as written."""
        while found := MARK.search(text):
            # The text of one part may have the mark of another part.
            part = self._unknown[int(found[1])].text
            self._count(len(part))
            text = text[: found.start()] + part + text[found.end() :]
        return text

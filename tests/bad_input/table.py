"""Reader of `table.md`, the table of bad inputs."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from string import Template

_TABLE = Path(__file__).with_name("table.md")
_VARIABLE = re.compile(r"[A-Z_]+=")
_BORDER = re.compile(r"(?:^| )\|(?= |$)")
_COLUMNS = 5


@dataclass(frozen=True)
class BadInput:
    """One row of the table. `table.md` describes the columns."""

    what: str
    before: str
    command: str
    code: int
    phrase: str

    def split_command(self, words: dict[str, str]) -> tuple[dict[str, str], list[str]]:
        """Return the variables before the command, and its words. All `$` words are replaced."""
        text = self.command
        # The replacement of a word may contain further words.
        while "$" in text:
            text = Template(text).substitute(words)
        command = shlex.split(text)
        variables = {}
        while _VARIABLE.match(command[0]):
            name, _, value = command.pop(0).partition("=")
            variables[name] = value
        return variables, command


def read_table() -> tuple[dict[str, str], list[BadInput]]:
    """Return the words that commands may use (name -> replacement), and the rows."""
    words = {"LONG_NAME": "n" * 300, "MANY_DIGITS": "9" * 5000}
    rows = []
    for line in _TABLE.read_text(encoding="utf-8").splitlines():
        if not line.startswith("| "):
            continue
        cells = [cell.strip().strip("`") for cell in _BORDER.split(line)[1:-1]]
        if len(cells) == _COLUMNS and cells[3].isdecimal():
            what, before, command, code, phrase = cells
            rows.append(BadInput(what, before, command, int(code), phrase))
        elif len(cells) == 2 and cells[0].startswith("$") and "," not in cells[0]:
            words[cells[0][1:]] = cells[1]
    return words, rows

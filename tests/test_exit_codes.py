"""The exit codes are in one module, and docs/commands.md has them as a table."""

import re
from pathlib import Path

from megatron.base import exit_codes

ROOT = Path(__file__).parents[1]
CODES = {name: value for name, value in vars(exit_codes).items() if name.isupper()}


def test_page_has_each_code() -> None:
    page = (ROOT / "docs" / "commands.md").read_text()
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", page, re.MULTILINE)
    assert {name: int(code) for code, name in rows} == CODES
    assert len(set(CODES.values())) == len(CODES)


def test_no_command_has_a_code_of_its_own() -> None:
    own = re.compile(r"(?:\breturn|_exit\(|sys\.exit\(|SystemExit\() ?[1-9]\d*\b(?! [-+*/])")
    files = [
        *(ROOT / "megatron").glob("**/commands/*.py"),
        *(ROOT / "megatron" / "console").glob("*.py"),
        ROOT / "megatron" / "run" / "leaving.py",
    ]
    found = {str(file): own.findall(file.read_text()) for file in files}
    assert len(found) > 30
    assert {name: codes for name, codes in found.items() if codes} == {}

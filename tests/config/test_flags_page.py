"""docs/flags.md agrees with the configuration and the compatibility table."""

import subprocess
import sys
from pathlib import Path

from megatron.config.compat import TABLE
from megatron.config.fields import all_fields

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "flags.md"


def test_page_is_up_to_date():
    printed = subprocess.run(
        [sys.executable, "tools/flags.py"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    assert PAGE.read_text() == printed, "run: python tools/flags.py > docs/flags.md"


def test_page_has_every_flag():
    text = PAGE.read_text().replace("_", "-")
    assert [
        field.flag for field in all_fields().values() if f"| `{field.flag}` |" not in text
    ] == []
    named = [row for row in TABLE if not any(f"`{row.flag}{end}" in text for end in "` =")]
    assert named == []


def test_rows_of_a_table_have_equal_columns():
    columns = 0
    for line in PAGE.read_text().splitlines():
        if line.startswith("|---"):
            assert line.count("|") == columns
        elif line.startswith("|"):
            cells = line.replace("\\|", "").count("|")
            columns = columns or cells
            assert cells == columns, line
        else:
            columns = 0

"""Tests of the table of torch versions in docs/tests.md."""

import platform
from pathlib import Path

import pytest
import torch_row


def test_a_run_replaces_the_row_of_its_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_row, "version", {"torch": "2.11.0", "deepspeed": "0.19.8"}.get)
    tests = tmp_path / "tests.xml"
    tests.write_text(
        '<testsuites><testsuite tests="1234" failures="2" errors="1" skipped="3" time="90.0"/>'
        "</testsuites>"
    )
    row = torch_row.format_row(tests)
    python = platform.python_version()
    assert row.startswith(f"| 2.11.0 | {python} | 0.19.8 | 20")
    assert row.endswith(" | 1,228 | 3 | 3 | 1.5 |")
    page = tmp_path / "tests.md"
    rows = [f"| 2.11.0 | {python} | - | old |", "| 2.15.0 | 3.13.0 | - | other |"]
    page.write_text("\n".join(["# A page", torch_row.HEADER, "|---|", *rows, "", "After.\n"]))
    torch_row.write_row(page, row)
    expected = ["# A page", torch_row.HEADER, "|---|", row, rows[1], "", "After."]
    assert page.read_text().splitlines() == expected


def test_the_documentation_has_the_table() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "tests.md"
    assert torch_row.HEADER in page.read_text().splitlines()

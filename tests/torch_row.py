"""Print the row of a test run for the table of torch versions, and write it to a page.

    python tests/torch_row.py TESTS_XML [PAGE]

Run it with the Python that ran the tests.
"""

import platform
import sys
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from xml.etree import ElementTree

HEADER = "| torch | Python | DeepSpeed | date | passed | failed | skipped | minutes |"


def find_version(package: str) -> str:
    """Return the version of an installed package, or a dash."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "-"


def format_row(tests_xml: Path) -> str:
    """Return the row of the tests that a JUnit file lists."""
    suite = ElementTree.parse(tests_xml).getroot()[0]
    skipped = int(suite.get("skipped", 0))
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    passed = int(suite.get("tests", 0)) - failed - skipped
    cells = [version("torch"), platform.python_version(), find_version("deepspeed")]
    cells += [date.today().isoformat(), f"{passed:,}", str(failed), str(skipped)]
    return "| {} |".format(" | ".join([*cells, f"{float(suite.get('time', 0)) / 60:.1f}"]))


def write_row(page: Path, row: str) -> None:
    """Add a row to the page's table, or replace the one with the same torch and Python."""
    lines = page.read_text().splitlines()
    first = lines.index(HEADER) + 2
    end = first
    while lines[end].startswith("|"):
        end += 1
    others = [line for line in lines[first:end] if line.split("|")[1:3] != row.split("|")[1:3]]
    lines[first:end] = sorted([*others, row])
    page.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    new_row = format_row(Path(sys.argv[1]))
    print(HEADER, new_row, sep="\n")
    for page in sys.argv[2:]:
        write_row(Path(page), new_row)

"""Rows of measurements as JSON, for programs that make tables of them.

A benchmark prints its results, and adds each of them to the file $BENCHMARK_RESULTS if that is set.
Each line of the file is one row. A benchmark that is killed leaves the rows that it has measured.
"""

import json
import os
from typing import Any

VARIABLE = "BENCHMARK_RESULTS"
"""The environment variable with the name of the file."""


def add_row(table: str, **values: Any) -> None:
    """Add a row to a table of the results file, if there is one.

    Args:
        table: Name of the table.
        values: Column -> a number, a text, a boolean or None.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        return
    line = json.dumps({"table": table, **values})
    # One write of a complete line: rows of several processes do not mix.
    with open(path, "a", encoding="utf-8") as file:
        file.write(line + "\n")


def read_rows(text: str) -> list[dict[str, Any]]:
    """Return the rows of a results file. A line that a killed program left incomplete is dropped.

    Raises:
        ValueError: A line other than the last one is no JSON object.
    """
    rows = []
    lines = text.split("\n")
    # After the last complete line comes the rest of the file, which is empty or incomplete.
    for number, line in enumerate(lines[:-1], 1):
        row = json.loads(line)
        if not isinstance(row, dict):
            raise ValueError(f"line {number} of the results is no object: {line[:80]}")
        rows.append(row)
    return rows

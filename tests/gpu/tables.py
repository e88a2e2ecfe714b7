"""Make Markdown tables of the reports of `first_hour.py`.

    python tests/gpu/tables.py gpu-report              print all tables
    python tests/gpu/tables.py gpu-report --page       print those of docs/gpu_results.md

FOLDER may have the reports of several parts, and of parts that were killed. The documentation site
shows the tables of the newest folder in `tests/fixtures/gpu`, without `ONLY_PRINTED`.
"""

import argparse
import json
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from results import read_rows  # noqa: E402

Row = dict[str, Any]
_LONGEST_CELL = 80
"""Characters of a cell, such as the name of a kernel."""
_SMALLEST_SHARE = 0.01
"""Kernels with a smaller share of a step are left out."""


class ReportError(Exception):
    """A report that cannot be read, or must not be shown in the pages."""


@dataclass(frozen=True)
class Part:
    """The report of one part."""

    name: str
    date: str
    tiny: bool
    steps: list[Row]

    def get_rows(self, table: str) -> list[Row]:
        """Return the rows of a table from all steps."""
        return [row for step in self.steps for row in step["rows"] if row["table"] == table]


def read_part(path: Path) -> Part:
    """Return the report of a part. The rows of a step that was killed are in another file.

    Raises:
        ReportError: The report is no JSON of `first_hour.py`.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        steps = report["steps"]
        part = Part(path.stem, report["date"], report["tiny"], steps)
        left = path.with_suffix(".rows.jsonl")
        running = [step for step in steps if step["status"] == "running"]
        if left.exists() and running:
            known = sum(len(step["rows"]) for step in steps)
            running[0]["rows"] = read_rows(left.read_text(encoding="utf-8"))[known:]
            running[0]["status"] = "killed"
    except (ValueError, KeyError, TypeError) as error:
        raise ReportError(f"{path} is no report of first_hour.py: {error!r}") from error
    return part


def format_number(value: Any) -> str:
    """Return a cell: three significant digits, or a dash for None."""
    if value is None:
        return "-"
    if not isinstance(value, float):
        text = str(value).replace("|", "/").replace("\n", " ")
        return text if len(text) <= _LONGEST_CELL else f"{text[:_LONGEST_CELL]} ..."
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return f"{value:.2e}" if abs(value) < 1 or abs(value) >= 1e15 else f"{value:.0f}"


def format_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a Markdown table, or an empty text without rows."""
    lines = ["| " + " | ".join(map(format_number, row)) + " |" for row in rows]
    if not lines:
        return ""
    head = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join([*head, *lines])


def make_columns(*keys: str) -> Callable[[Sequence[Part], str], str]:
    """Return a function that makes a table of some columns of the rows, in their order."""

    def make(parts: Sequence[Part], table: str) -> str:
        rows = [row for part in parts for row in part.get_rows(table)]
        return format_table([key.replace("_", " ") for key in keys], [
            [row.get(key, row.get("error") if key == keys[-1] else None) for key in keys]
            for row in rows
        ])  # fmt: skip

    return make


def make_steps(parts: Sequence[Part], table: str) -> str:
    """Return the medians of the contestants of step_time.py."""
    found: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for part in parts:
        for row in part.get_rows(table):
            # Times of other runs must not mix: only those of one run took turns.
            key = (part.name, row["size"], row["shape"], row["precision"], row["microbatches"])
            found[*key, row["contestant"]].append(row)
    cells = []
    for key, rows in found.items():
        seconds = [row["seconds"] for row in rows if "seconds" in row]
        if not seconds:
            cells.append([*key, None, None, None, None, rows[0].get("error"), None])
            continue
        middle = statistics.median(seconds)
        spread = f"{1e3 * min(seconds):.1f} / {1e3 * middle:.1f} / {1e3 * max(seconds):.1f}"
        rate = rows[0]["tokens"] / middle
        gib = max(row["gib"] for row in rows if "seconds" in row)
        enqueued = [row["enqueue_seconds"] for row in rows if "enqueue_seconds" in row]
        enqueue = 1e3 * statistics.median(enqueued) if enqueued else None
        cells.append([*key, rate, spread, enqueue, rate * rows[0]["tflop"], gib, len(seconds)])
    columns = ("part", "size", "shape", "precision", "microbatches", "program", "tokens/s")
    return format_table((*columns, "ms", "ms to enqueue", "TFLOPs", "GiB", "rounds"), cells)


def make_large_model(parts: Sequence[Part], table: str) -> str:
    """Return the variants of large_model.py, with the errors of their predictions."""
    cells = []
    for row in (row for part in parts for row in part.get_rows(table)):
        if "seconds" not in row:
            names = [row.get(key) for key in ("model", "variant", "microbatches")]
            cells.append([*names, *[None] * 6, row["error"]])
            continue
        errors = [
            f"{name} {100 * (seconds / row['seconds'] - 1):+.1f} %"
            for name, seconds in row["predicted_seconds"].items()
        ]
        cells.append(
            [
                *(row["model"], row["variant"], row["microbatches"]),
                *(row["tokens_per_second"], row["mfu"]),
                *(row["start_seconds"], row["allocated_gib"], row["reserved_gib"]),
                *(row["predicted_gib"], ", ".join(errors)),
            ]
        )
    columns = ("model", "variant", "microbatches", "tokens/s", "MFU", "start, s", "tensors, GiB")
    return format_table((*columns, "reserved, GiB", "predicted, GiB", "error of the time"), cells)


def make_clocks(parts: Sequence[Part], table: str) -> str:
    """Return the range of clocks and power during timed steps, and the reasons of throttling."""
    cells = []
    for row in (row for part in parts for row in part.get_rows(table)):
        ranges = []
        for key in ("clocks.sm", "power.draw"):
            values = [float(each) for each in row[key]]
            ranges.append(f"{min(values):g} to {max(values):g}")
        reasons = ", ".join(sorted({*row["clocks_event_reasons.active"]}))
        cells.append([row["variant"], row["samples"], *ranges, reasons])
    return format_table(("variant", "samples", "clock, MHz", "power, W", "reasons"), cells)


def make_kernels(parts: Sequence[Part], table: str) -> str:
    """Return the kernels that take most of the time of a traced step."""
    keys = ("size", "shape", "name", "kind", "count", "ms", "share")
    rows = [row for part in parts for row in part.get_rows(table)]
    return format_table(
        keys, [[row[key] for key in keys] for row in rows if row["share"] >= _SMALLEST_SHARE]
    )


def make_verdicts(parts: Sequence[Part], table: str) -> str:
    """Return the verdicts about the order of kernels as a list."""
    rows = [(part.name, row) for part in parts for row in part.get_rows(table)]
    return "\n".join(f"- {name}, {row['device']}: {row['verdict']}." for name, row in rows)


def make_outcomes(parts: Sequence[Part], table: str) -> str:
    """Return what became of each step."""
    return format_table(
        ("part", "step", "result", "seconds", "rows"),
        [
            [part.name, *(step[key] for key in ("title", "status", "seconds")), len(step["rows"])]
            for part in parts
            for step in part.steps
        ],
    )


def name_group(name: str) -> str:
    """Return the name of a check without its shape, so that its shapes share a row."""
    if name.startswith("float8 "):
        return " ".join(name.split()[:4])
    first, *others = name.split(", ")
    return ", ".join([first, *others[-1:]])


def make_comparisons(parts: Sequence[Part], table: str) -> str:
    """Return the losses of runs, and the largest error of each kernel over its shapes."""
    rows = [row for part in parts for row in part.get_rows(table)]
    runs = [row for row in rows if row.get("losses") is not None]
    keys = ("name", "losses", "norms")
    blocks = [format_table(keys, [[row[key] for key in keys] for row in runs])]
    errors: dict[tuple[str, str], float] = {}
    others: dict[str, str] = {}
    for row in rows:
        if row in runs:
            continue
        note = row.get("note") or row.get("error", "")
        group = name_group(row["name"])
        numbers = [float(each) for each in re.findall(r"\b\d+(?:\.\d+)?(?:e[-+]\d+)?", note)]
        if numbers:
            key = (group, " units of rounding" * ("units of rounding" in note))
            errors[key] = max(*numbers, errors.get(key, 0.0))
        else:
            others[row["name"]] = note
    cells = [(name, format_number(value) + unit) for (name, unit), value in errors.items()]
    columns = ("without a training", "largest error, or operators")
    blocks.append(format_table(columns, [*cells, *others.items()]))
    return "\n\n".join(block for block in blocks if block)


def make_machine(parts: Sequence[Part], table: str) -> str:
    """Return the machines of the reports as a list."""
    lines = []
    for part in parts:
        for row in (*part.get_rows(table), *part.get_rows("device")):
            values = [f"{key} {format_number(row[key])}" for key in row if key != "table"]
            lines.append(f"- {part.name}, {part.date}: {', '.join(values)}")
    return "\n".join(lines)


MAKERS: dict[str, Callable[[Sequence[Part], str], str]] = {
    "machine": make_machine,
    "copy": make_columns("mib", "tb_per_second"),
    "products": make_columns(
        *("name", "shape", "forward", "input", "weight", "weight + sum", "weight, fused sum"),
        "forward, padded",
    ),
    "attention": make_columns(
        *("heads", "groups", "width", "length", "batch", "kernel", "forward", "backward"),
        "differing",
    ),
    "attention order": make_verdicts,
    "float8 products": make_columns("name", "bf16", "fast", "exact", "rounding_ms"),
    "float8": make_columns(
        *("name", "bf16_ms", "tensorwise_ms", "rowwise_ms", "tensorwise_speed", "rowwise_speed")
    ),
    "model parts": make_columns("name", "ms", "products_ms", "bytes_of_a_copy"),
    "steps": make_steps,
    "peer": make_columns(
        "script", "tokens_per_second", "ms", "low_ms", "high_ms", "steps", "sha256"
    ),
    "large model": make_large_model,
    "cube": make_columns("variant", "size", "tflops"),
    "clocks": make_clocks,
    "idle": make_columns("size", "shape", "ms", "idle"),
    "gaps": make_columns("size", "shape", "name", "ms", "share"),
    "kinds": make_columns("size", "shape", "kind", "ms", "share"),
    "kernels": make_kernels,
    "hardware": make_columns(
        *("name", "peak_tflops", "memory_tb_per_second", "memory_gib"),
        *("gemm_share", "attention_share", "memory_share"),
    ),
    "calibration": make_columns("line"),
    "node check": make_columns("line"),
    "layouts": make_columns(
        *("layout", "processes x threads", "cores used", "ms", "speed", "at most"),
        "core-seconds",
    ),
    "bubble": make_columns(
        *("schedule", "m", "ms", "ms / m", "idle by the fit", "idle by the clock"),
        "idle in theory",
    ),
    "save": make_columns("who", "ranks", "gb", "seconds"),
    "load": make_columns("who", "cold", "gb", "seconds"),
    "pin": make_columns("gb", "seconds", "refusals"),
    "stall": make_columns("what", "median"),
    "collectives": make_columns("name", "ranks", "backend", "mib", "seconds", "gb_per_second"),
    "outcomes": make_outcomes,
    "one gpu": make_comparisons,
    "losses": make_columns("layout", "ranks", "backend", "difference", "outcome"),
}
"""Table -> what makes it."""
TITLES = {
    "machine": "Machine",
    "copy": "Copies",
    "products": "Matrix products, TFLOPs",
    "attention": "Attention, TFLOPs, and repeated backward passes with other bits",
    "attention order": "Order of the kernels of attention",
    "float8 products": "Products in float8, TFLOPs, and the time to round an input",
    "float8": "Linear layers in float8: both passes, and the speed relative to bf16",
    "model parts": "Model parts",
    "steps": "Training steps",
    "peer": "Other trainers' programs",
    "large model": "Large models on one GPU",
    "cube": "A product directly after steps, TFLOPs",
    "clocks": "Clocks and power during steps",
    "idle": "Idle share of the GPU",
    "gaps": "Idle time by the next kernel",
    "kinds": "Kinds of kernels",
    "kernels": "Kernels of a step",
    "hardware": "Hardware file",
    "calibration": "Calibration",
    "node check": "Check of the node",
    "layouts": "Step time by layout",
    "bubble": "Idle time of pipelines",
    "save": "Saves",
    "load": "Loads",
    "pin": "Pinned memory",
    "stall": "Asynchronous save",
    "collectives": "Collectives",
    "outcomes": "Steps",
    "one gpu": "Runs on the GPU against the CPU: largest relative differences",
    "losses": "Several ranks against one process: largest relative difference of a loss",
}
ONLY_PRINTED = ("gaps", "kernels", "outcomes")
"""Tables that only explain a report: names of kernels, idle time, and the time of each step."""
PAGE_TABLES = tuple(table for table in MAKERS if table not in ONLY_PRINTED)


def make_page(parts: Sequence[Part], tables: Iterable[str] = tuple(MAKERS)) -> str:
    """Return the tables that have rows."""
    blocks = []
    for name in tables:
        text = MAKERS[name](parts, name)
        if text:
            blocks.append(f"### {TITLES[name]}\n\n{text}")
    return "\n\n".join(blocks)


def main(argv: list[str] | None = None) -> int:
    """Print the tables, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="the folder of --report")
    parser.add_argument("--page", action="store_true", help="only the tables of the page")
    arguments = parser.parse_args(argv)
    try:
        paths = sorted(arguments.folder.glob("*.json"))
        if not paths:
            raise ReportError(f"{arguments.folder} has no reports such as part1.json")
        parts = [read_part(path) for path in paths]
        if arguments.page and any(part.tiny for part in parts):
            raise ReportError("numbers of --tiny mean nothing; they are not shown in the pages")
        print(make_page(parts, PAGE_TABLES if arguments.page else tuple(MAKERS)))
    except KeyError as error:
        print(f"error: a row of {arguments.folder} has no {error}", file=sys.stderr)
        return 1
    except (ReportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

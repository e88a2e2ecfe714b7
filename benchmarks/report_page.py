"""Measure how long the report of a long run takes: to write, and to open in a browser.

    python benchmarks/report_page.py                      a run of 1,000,000 iterations
    python benchmarks/report_page.py --iterations 10000

The run is synthetic. Its records have all numbers that a run on GPUs writes. Chromium opens the
page without a window and without network. The time is that of the page's own clock, from the start
of the navigation until the charts are drawn and laid out. The start of Chromium is left out.
"""

import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import tyro

from megatron.commands import chronicle
from megatron.observe.chronicle import CHRONICLE, append_event

_BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
_CLOCK = (
    "<script>window.addEventListener('load',()=>{document.body.getBoundingClientRect();"
    "document.title='opened '+performance.now()})</script>"
)
"""Writes the time into the title, where --dump-dom shows it."""


@dataclass(frozen=True)
class Arguments:
    """The command line."""

    iterations: int = 1_000_000
    """Length of the run."""
    events: int = 2000
    """Number of warnings in the chronicle."""
    rounds: int = 5
    """How often the page is opened."""


def write_run(folder: Path, arguments: Arguments) -> None:
    """Write the records of a run."""
    with open(folder / "metrics.jsonl", "w") as file:
        for iteration in range(1, arguments.iterations + 1):
            record = {
                "kind": "train",
                "iteration": iteration,
                "consumed_samples": 512 * iteration,
                "consumed_tokens": 512 * 2048 * iteration,
                "global_batch_size": 512,
                "learning_rate": 1e-4 * (1 - iteration / arguments.iterations),
                "lm_loss": 2 + 9 / iteration + 0.01 * (iteration % 97),
                "grad_norm": 0.3 + 0.001 * (iteration % 89),
                "seconds": 2.0,
                "tokens_per_second": 5e5 + iteration % 83,
                "tflops": 150.0,
                "mfu": 0.4 + 0.0001 * (iteration % 79),
                "time": (_BEGAN + timedelta(seconds=2 * iteration)).isoformat(),
            }
            file.write(json.dumps(record) + "\n")
    for number in range(arguments.events):
        append_event(folder / CHRONICLE, "alert", number, {"text": f"warning {number}"})


def open_page(chromium: str, page: Path, profile: str) -> float:
    """Return the seconds from the navigation until the charts are laid out."""
    done = subprocess.run(
        [
            chromium,
            *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
            *(f"--user-data-dir={profile}", "--timeout=60000", "--dump-dom", page.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )
    found = re.search(r"<title>opened ([\d.]+)</title>", done.stdout)
    assert found is not None, "the page did not finish loading"
    return float(found[1]) / 1000


def main() -> int:
    """Run the benchmark and return the exit code."""
    arguments = tyro.cli(Arguments, description=__doc__)
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        print("SKIPPED: Chromium is not installed")
        return 0
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home) / "run"
        folder.mkdir()
        write_run(folder, arguments)
        page = Path(home) / "report.html"
        start = time.perf_counter()
        assert chronicle.main([str(folder), "--html", str(page)]) == 0
        written = time.perf_counter() - start
        timed = Path(home) / "timed.html"
        # The policy of the page would refuse the script of the clock.
        text = re.sub("<meta http-equiv=[^>]*>", "", page.read_text())
        timed.write_text(text.replace("</body>", f"{_CLOCK}</body>"))
        seconds = [open_page(chromium, timed, f"{home}/profile") for _ in range(arguments.rounds)]
        print(
            f"{arguments.iterations:,} iterations: {page.stat().st_size / 1e6:.2f} MB, written in "
            f"{written:.1f} s, opened in {min(seconds):.2f} / {statistics.median(seconds):.2f} / "
            f"{max(seconds):.2f} s (min / median / max of {arguments.rounds})"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Measure how long the index of the samples takes to build, and compare the bytes of versions.

    python benchmarks/index.py                           this code
    python benchmarks/index.py --checkouts /tmp/before . two versions, interleaved

The sizes of the documents are random, and there are no tokens. CPU time depends less on other jobs
than the elapsed time, which includes the sync to disk.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parents[1]

# Runs in a process of its own with the code of a checkout.
RUN = """
import json, sys, time
from pathlib import Path
from types import SimpleNamespace
import numpy as np
from megatron.data.cache import IndexCache
from megatron.data.gpt_dataset import GPTDataset
documents, epochs, seq_length = map(int, sys.argv[1:4])
sizes = np.random.RandomState(1).randint(1, 1000, documents).astype(np.int32)
samples = int(int(sizes.sum()) * (epochs - 0.01) / seq_length)
indexed = type("Documents", (SimpleNamespace,), {"__len__": lambda self: documents})(
    prefix="random", sizes=sizes, compute_fingerprint=lambda: {"random": documents}
)
cpu, started = time.process_time(), time.perf_counter()
GPTDataset(indexed, (0, documents), seq_length, 1234, samples, IndexCache(sys.argv[4]))
(manifest,) = Path(sys.argv[4]).glob("*.json")
print(json.dumps({
    "cpu": time.process_time() - cpu,
    "elapsed": time.perf_counter() - started,
    "digests": json.loads(manifest.read_text())["whole"],
}))
"""


@dataclass(frozen=True)
class Arguments:
    """The command line."""

    checkouts: tuple[Path, ...] = (ROOT,)
    """Folders with the versions of this repository that are compared."""
    documents: int = 5_000_000
    """Number of documents, with 500 tokens on average."""
    epochs: int = 2
    """How often each document is read."""
    seq_length: int = 2048
    """Tokens of a sample."""
    rounds: int = 5
    """Interleaved rounds."""


def main() -> int:
    """Run the benchmark and return the exit code."""
    arguments = tyro.cli(Arguments, description=__doc__)
    found = defaultdict(list)
    given = [str(arguments.documents), str(arguments.epochs), str(arguments.seq_length)]
    print(f"{date.today()}, load average at the start {os.getloadavg()[0]:.1f}\n")
    for _ in range(arguments.rounds):
        for checkout in arguments.checkouts:
            with tempfile.TemporaryDirectory() as folder:
                done = subprocess.run(
                    [sys.executable, "-c", RUN, *given, folder],
                    env=os.environ | {"PYTHONPATH": str(checkout.resolve())},
                    # Python searches the working folder first.
                    cwd=checkout,
                    stdout=subprocess.PIPE,
                    text=True,
                    check=True,
                )
            found[checkout].append(json.loads(done.stdout))
    digests = {json.dumps(run["digests"]) for runs in found.values() for run in runs}
    assert len(digests) == 1, "all runs must give the same bytes"
    print("| code | CPU s, min / median / max | elapsed s |\n|---|--:|--:|")
    for checkout, runs in found.items():
        cells = [
            f"{min(values):.2f} / {statistics.median(values):.2f} / {max(values):.2f}"
            for values in ([run[name] for run in runs] for name in ("cpu", "elapsed"))
        ]
        print(f"| {checkout} | {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

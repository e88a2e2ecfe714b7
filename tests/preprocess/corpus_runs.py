"""Runs of `tools/preprocess_data.py --engine`, with faults, and what they wrote."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tiny_corpus import MERGES, ROOT, VOCAB

_MEASURE = """
import resource, subprocess, sys
code = subprocess.call(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(code)
"""
FAULTS = Path(__file__).with_name("faults")


@dataclass(frozen=True)
class Made:
    """What a run of the tool gave."""

    code: int
    output: str
    seconds: float
    peak: int
    """Largest resident memory of a process on this machine, in bytes. Slurm's are not included."""
    manifest: Path

    @property
    def digests(self) -> list[list[str]]:
        """The digests of .bin and .idx of each shard, in order."""
        return [shard["sha256"] for shard in json.loads(self.manifest.read_text())["shards"]]


def make_environment(faults: Path | None) -> dict[str, str]:
    """Return the environment of the tool. `faults` is a folder, see faults/sitecustomize.py."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}
    path = [str(ROOT)]
    if faults is not None:
        environment["CORPUS_FAULTS"] = str(faults)
        path.insert(0, str(FAULTS))
    return {**environment, "PYTHONPATH": os.pathsep.join(path)}


def make_corpus(prefix: Path, *flags: str, environment: dict[str, str] | None = None) -> Made:
    """Run the tool with the tests' tokenizer. The manifest is PREFIX.json."""
    started = time.monotonic()
    done = subprocess.run(
        [
            *(sys.executable, "-c", _MEASURE),
            *(sys.executable, "tools/preprocess_data.py", "--output-prefix", str(prefix)),
            *("--vocab-file", VOCAB, "--merge-file", MERGES, "--append-eod", *flags),
        ],
        cwd=ROOT,
        env=environment or make_environment(None),
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.monotonic() - started
    output, _, peak = done.stdout.rstrip().rpartition("\n")
    manifest = Path(f"{prefix}.json")
    return Made(done.returncode, output + done.stderr, seconds, int(peak) * 1024, manifest)


def when_stopped(file: Path, act: Callable[[str], object]) -> threading.Thread:
    """Call `act` with the content of a file as soon as the file exists, in a thread."""

    def wait() -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if file.exists() and file.read_text().endswith("\n"):
                act(file.read_text().strip())
                return
            time.sleep(0.1)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread

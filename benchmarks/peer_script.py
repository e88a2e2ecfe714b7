"""Run modded-nanogpt's `train_gpt_simple.py`, unchanged, for some time, and report its step times.

    python benchmarks/peer_script.py --script .peers/train_gpt_simple.py

The script is not part of this repository (https://github.com/KellerJordan/modded-nanogpt, in the
folder records/track_3_optimization). It runs on one GPU as torchrun would start it, on random ids,
and would train for thousands of steps. So it is ended after `--enough` steps, or after `--seconds`.
The first steps wait for the compiler, and are left out of the median. The script does not wait for
the GPU before it prints a time. The queue of a GPU is limited, so the median of the differences
between steps is that of the GPU's steps.
"""

import hashlib
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from results import add_row

_MAGIC = 20240520
_VERSION = 1
_HEADER_WORDS = 256
_VALIDATION_STEPS = 20
"""The script evaluates as many tokens as this number of steps trains."""
_VOCAB = 50257
_FIRST_STEPS = 4
"""Steps that are not counted. They wait for the compiler."""
_LINE = re.compile(r"^step:(\d+)/\d+ train_time:([\d.]+)(ms|s)\b", re.MULTILINE)
"""The line of a step. That of an evaluation has the loss in between."""
_POLL_SECONDS = 0.2
_TAIL = 1500
"""Characters of the script's output that are printed if it fails."""


@dataclass(frozen=True)
class Arguments:
    """The command line."""

    script: Path = Path(".peers/train_gpt_simple.py")
    """The copy of the script."""
    seconds: float = 45
    """Time after which the script is ended."""
    enough: int = 25
    """Timed steps after which the script is ended."""
    tokens: int = 524_288
    """Tokens of one of its steps."""
    steps: int = 200
    """Steps for which there are ids. The script fails after them."""


def write_ids(path: Path, count: int, seed: int) -> None:
    """Write a file of random ids: 256 words of 32 bits, then `count` ids of 16 bits."""
    header = np.zeros(_HEADER_WORDS, dtype=np.int32)
    header[:3] = (_MAGIC, _VERSION, count)
    ids = np.random.default_rng(seed).integers(0, _VOCAB, count, dtype=np.uint16)
    with open(path, "wb") as file:
        file.write(header.tobytes())
        file.write(ids.tobytes())


def run_script(arguments: Arguments, folder: Path) -> tuple[str, int | None]:
    """Run the script in a folder. Return its output, and its exit code, or None if it was ended."""
    data = folder / "data/fineweb10B"
    data.mkdir(parents=True)
    # The script reads a token more than it trains on, and stops one before the end.
    for kind, steps in (("train", arguments.steps), ("val", _VALIDATION_STEPS)):
        write_ids(data / f"fineweb_{kind}_000000.bin", steps * arguments.tokens + 8, len(kind))
    launcher = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        # Any free port.
        "MASTER_PORT": "0",
        "PYTHONUNBUFFERED": "1",
    }
    log = folder / "output.txt"
    with open(log, "wb") as output:
        # It has the process group of this program, so whoever ends the group ends it too.
        process = subprocess.Popen(
            [sys.executable, str(arguments.script.resolve())], cwd=folder,
            env={**os.environ, **launcher}, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        end = time.monotonic() + arguments.seconds
        while process.poll() is None and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
            if len(read_step_seconds(log.read_text("utf-8", "replace"))) >= arguments.enough:
                break
        code = process.poll()
        if code is None:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    return log.read_text("utf-8", "replace"), code


def read_step_seconds(printed: str) -> list[float]:
    """Return the seconds of each step but the first ones, from what the script printed."""
    times = {
        int(step): float(value) / (1000 if unit == "ms" else 1)
        for step, value, unit in _LINE.findall(printed)
    }
    return [
        times[step] - times[step - 1]
        for step in sorted(times)
        if step > _FIRST_STEPS and step - 1 in times
    ]


def report(seconds: Sequence[float], arguments: Arguments, digest: str) -> None:
    """Print and record the step times."""
    middle = statistics.median(seconds)
    rate = arguments.tokens / middle
    low, median, high = (1e3 * each for each in (min(seconds), middle, max(seconds)))
    print(
        f"{arguments.script.name} ({digest}): {rate:.0f} tokens/s, {low:.1f} / {median:.1f} / "
        f"{high:.1f} ms, {len(seconds)} steps",
        flush=True,
    )
    add_row(
        "peer", script=arguments.script.name, sha256=digest, tokens_per_second=rate, ms=median,
        low_ms=low, high_ms=high, steps=len(seconds), tokens=arguments.tokens,
    )  # fmt: skip


def main() -> int:
    """Run the script and return the exit code: 1 if it failed, or printed too few steps."""
    arguments = tyro.cli(Arguments, description=__doc__)
    if not arguments.script.is_file():
        print(f"LEFT OUT: there is no {arguments.script}; put a copy of the script there")
        add_row("peer", script=arguments.script.name, error="left out: there is no copy")
        return 0
    digest = hashlib.sha256(arguments.script.read_bytes()).hexdigest()[:12]
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        printed, code = run_script(arguments, Path(folder))
    seconds = read_step_seconds(printed)
    if seconds:
        report(seconds, arguments, digest)
        return 0
    ended = f"was ended after {time.perf_counter() - start:.0f} s"
    if code is not None:
        ended = f"ended with exit code {code}"
    reason = f"it {ended}, before step {_FIRST_STEPS + 1}"
    print(f"FAILED: {arguments.script}: {reason}\n{printed[-_TAIL:]}", flush=True)
    add_row("peer", script=arguments.script.name, sha256=digest, error=reason)
    return 1


if __name__ == "__main__":
    sys.exit(main())

"""Measure the speed of preprocessing, and the CPU time of each of its phases.

    python benchmarks/preprocessing.py --input corpus.jsonl              this code
    python benchmarks/preprocessing.py --checkouts /tmp/before .         two versions, interleaved
    python benchmarks/preprocessing.py --quick          check that it runs; the numbers mean nothing

Each run preprocesses a small and a large corpus, and the rates are for the difference of the two.
They do not include the start, which takes a second of CPU for each process. Rates are in MB of
jsonl a second of CPU time, because the elapsed time depends on the other jobs of the machine. All
runs of a corpus must give the same bytes.

5 % of the words are changed in each copy of the texts. Repeated text would make the encoder's cache
look faster than it is.
"""

import json
import os
import pickle
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import tyro

from megatron.config.data import TokenizerConfig
from megatron.preprocess import workers
from megatron.preprocess.bpe_training import train_bpe
from megatron.preprocess.inputs import read_blocks
from megatron.preprocess.resumable import ResumableWriter

ROOT = Path(__file__).resolve().parents[1]
TEXTS = ROOT / "tests/fixtures/openwebtext-100/openwebtext-100.jsonl"
_KEYS = ("text",)
_CHANGED_WORDS = 0.05

# Runs in a process of its own. A program that is given by -c is not imported again by workers.
RUN = """
import hashlib, json, resource, sys, time
from pathlib import Path
from megatron.config.data import TokenizerConfig
from megatron.preprocess.pipeline import PreprocessJob, preprocess
def read_cpu(whose):
    usage = resource.getrusage(whose)
    return usage.ru_utime + usage.ru_stime
corpus, output, tokenizer, workers, encoder = sys.argv[1:]
job = PreprocessJob(
    input=(corpus,),
    output_prefix=output,
    tokenizer=TokenizerConfig(
        vocab_file=tokenizer + "/vocab.json", merge_file=tokenizer + "/merges.txt"
    ),
    append_eod=True,
    workers=int(workers),
    overwrite=True,
)
started = time.perf_counter()
preprocess(job, say=lambda line: None, choose=lambda *_: encoder)
digest = hashlib.sha256()
for path in sorted(Path(output).parent.glob("out_*")):
    digest.update(path.name.encode() + path.read_bytes())
print(json.dumps({
    "parent": read_cpu(resource.RUSAGE_SELF),
    "workers": read_cpu(resource.RUSAGE_CHILDREN),
    "elapsed": time.perf_counter() - started,
    "digest": digest.hexdigest(),
}))
"""


@dataclass(frozen=True)
class Arguments:
    """The command line."""

    input: Path = TEXTS
    """A jsonl file with texts, from which the corpora are made."""
    checkouts: tuple[Path, ...] = (ROOT,)
    """Folders with the versions of this repository that are compared."""
    encoder: str = "gigatoken"
    """The library that encodes."""
    vocab_size: int = 32_000
    """Ids of the tokenizer, which is trained on the texts."""
    megabytes: tuple[int, int] = (40, 120)
    """Sizes of the two corpora. Two workers are used only from 34 MB on."""
    rounds: int = 5
    """Interleaved rounds."""
    quick: bool = False
    """Small corpora and a single round."""


def write_corpora(source: Path, folder: Path, megabytes: tuple[int, int]) -> list[Path]:
    """Write the corpora, of which the small one is the beginning of the large one."""
    texts = [json.loads(line)["text"] for line in source.read_bytes().splitlines()]
    generator = random.Random(1)
    paths = [folder / f"{size}.jsonl" for size in megabytes]
    with open(paths[0], "w") as small, open(paths[1], "w") as large:
        written = 0
        while written < megabytes[1] * 1e6:
            for text in texts:
                record = json.dumps({"text": change_words(text, generator)}) + "\n"
                large.write(record)
                if written < megabytes[0] * 1e6:
                    small.write(record)
                written += len(record)
    return paths


def change_words(text: str, generator: random.Random) -> str:
    """Return a text with the letters of some words in another order."""
    # White space is kept as it is.
    words = re.split(r"(\s+)", text)
    for place in range(0, len(words), 2):
        if generator.random() < _CHANGED_WORDS:
            words[place] = "".join(generator.sample(words[place], len(words[place])))
    return "".join(words)


def run(checkout: Path, corpus: Path, folder: Path, count: int, encoder: str) -> dict[str, Any]:
    """Preprocess a corpus with the code of a checkout, in a process of its own."""
    with tempfile.TemporaryDirectory(dir=folder) as outputs:
        output = f"{outputs}/out"
        given = [str(corpus), output, str(folder / "tokenizer"), str(count), encoder]
        done = subprocess.run(
            [sys.executable, "-c", RUN, *given],
            env=os.environ | {"PYTHONPATH": str(checkout.resolve())},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


def measure_runs(arguments: Arguments, corpora: list[Path], folder: Path) -> None:
    """Let the checkouts take turns with one and two workers, and print the table."""
    # For each row and column the rates of all rounds.
    rates: dict[tuple[int, Path], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    digests: dict[Path, set[str]] = defaultdict(set)
    added = (corpora[1].stat().st_size - corpora[0].stat().st_size) / 1e6
    for _ in range(arguments.rounds):
        for count in (1, 2):
            for checkout in arguments.checkouts:
                small, large = (
                    run(checkout, corpus, folder, count, arguments.encoder) for corpus in corpora
                )
                digests[corpora[0]].add(small["digest"])
                digests[corpora[1]].add(large["digest"])
                row = rates[count, checkout]
                # One worker is the process itself.
                names = ("parent", "elapsed") if count == 1 else ("workers", "parent", "elapsed")
                for name in names:
                    row[name].append(added / max(large[name] - small[name], 1e-3))
    assert all(len(found) == 1 for found in digests.values()), "all runs give the same bytes"
    print(
        "| code | one process, MB per CPU second | two workers, each | their parent "
        "| one process, MB/s elapsed | two workers, MB/s elapsed |\n|---|--:|--:|--:|--:|--:|"
    )
    for checkout in arguments.checkouts:
        one = rates[1, checkout]
        two = rates[2, checkout]
        columns = (one["parent"], two["workers"], two["parent"], one["elapsed"], two["elapsed"])
        print(f"| {checkout} | {' | '.join(map(format_rates, columns))} |", flush=True)


def format_rates(rates: list[float]) -> str:
    """Format minimum, median and maximum."""
    return " / ".join(f"{of(rates):.0f}" for of in (min, statistics.median, max))


class PhaseTimes:
    """The CPU time of phases that do not overlap."""

    def __init__(self) -> None:
        """Start without phases."""
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Add the CPU time of the context to a phase."""
        started = time.process_time()
        yield
        self.seconds[phase] += time.process_time() - started

    def wrap(self, phase: str, function: Callable) -> Callable:
        """Return the function with its CPU time added to a phase."""

        def measured(*given: Any) -> Any:
            with self.measure(phase):
                return function(*given)

        return measured


def measure_phases(arguments: Arguments, corpus: Path, folder: Path) -> dict[str, float]:
    """Return the CPU seconds of each phase, when one process does everything."""
    times = PhaseTimes()
    tokenizer = TokenizerConfig(
        vocab_file=str(folder / "tokenizer/vocab.json"),
        merge_file=str(folder / "tokenizer/merges.txt"),
    )
    with times.measure("start: tokenizer and library"):
        encode = workers.BlockEncoder(
            workers.EncodingJob(tokenizer, arguments.encoder, _KEYS, True, "uint16")
        )
    writer = ResumableWriter(str(folder / "phases"), np.dtype(np.uint16))
    blocks = read_blocks([str(corpus)], _KEYS)
    of_encoder = workers.BlockEncoder
    with (
        patch.object(workers, "extract_texts", times.wrap("JSON", workers.extract_texts)),
        patch.object(workers, "run_encoder", times.wrap("library", workers.run_encoder)),
        patch.object(of_encoder, "_check", times.wrap("check of the library", of_encoder._check)),
        patch.object(
            of_encoder, "_end_documents", times.wrap("end of documents", of_encoder._end_documents)
        ),
    ):
        while True:
            with times.measure("reading"):
                block = next(blocks, None)
            if block is None:
                break
            with times.measure("all of a worker"):
                encoded = encode(block)
            with times.measure("pickling for a worker"):
                pickle.loads(pickle.dumps(block))
                pickle.loads(pickle.dumps(encoded))
            with times.measure("writing"):
                writer.add_documents(encoded.tokens[0], encoded.sizes[0])
    with times.measure("sync and index"):
        writer.write_index()
    seconds = times.seconds
    inner = ("JSON", "library", "check of the library", "end of documents")
    rest = seconds.pop("all of a worker") - sum(seconds[phase] for phase in inner)
    seconds["size of the texts"] = rest
    return dict(seconds)


def report_phases(arguments: Arguments, corpus: Path, folder: Path) -> None:
    """Print the median CPU time of each phase."""
    rounds = [measure_phases(arguments, corpus, folder) for _ in range(arguments.rounds)]
    megabytes = corpus.stat().st_size / 1e6
    print("\n| phase | CPU ms for 100 MB of jsonl | MB per CPU second |\n|---|--:|--:|")
    for phase in rounds[0]:
        seconds = max(statistics.median(each[phase] for each in rounds), 1e-6)
        print(f"| {phase} | {1e5 * seconds / megabytes:.0f} | {megabytes / seconds:.0f} |")


def describe(arguments: Arguments) -> str:
    """Return date, machine, versions and rounds as one line."""
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    name = found[1] if found else platform.machine()
    packages = ("gigatoken", "orjson", "tokenizers", "numpy")
    versions = ", ".join(f"{package} {version(package)}" for package in packages)
    return (
        f"{date.today()}, {name}, {os.cpu_count()} cores (load average at the start "
        f"{os.getloadavg()[0]:.1f}), Python {platform.python_version()}, {versions}. "
        f"{arguments.rounds} interleaved rounds; min / median / max.\n"
    )


def main() -> int:
    """Run the benchmark and return the exit code."""
    arguments = tyro.cli(Arguments, description=__doc__)
    if arguments.quick:
        arguments = replace(arguments, rounds=1, megabytes=(1, 3), vocab_size=1000)
    print(describe(arguments))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train_bpe([str(arguments.input)], arguments.vocab_size, str(folder / "tokenizer"))
        corpora = write_corpora(arguments.input, folder, arguments.megabytes)
        report_phases(arguments, corpora[1], folder)
        print(flush=True)
        measure_runs(arguments, corpora, folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

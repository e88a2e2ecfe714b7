"""Measure the speed of preprocessing, and the CPU time of each of its phases.

    python benchmarks/preprocessing.py --input corpus.jsonl              this code
    python benchmarks/preprocessing.py --checkouts /tmp/before .         two versions, interleaved
    python benchmarks/preprocessing.py --quick          check that it runs; the numbers mean nothing

Rates are in MB of jsonl a second of CPU time, because the elapsed time depends on the other jobs of
the machine. The first table has the phases of one process. There the versions take turns after each
block, which makes their ratio reliable also on a busy machine. The second table has complete runs
with several processes. It subtracts the medians of a small corpus from those of a large one, so
that the start is left out. The third table has the complete runs of the large corpus. What two free
cores could give at most follows from the CPU time. All runs of a corpus must give the same bytes.

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
from megatron.extras.preparation.commands.train_tokenizer import train_bpe
from megatron.extras.preparation.preprocess import workers
from megatron.extras.preparation.preprocess.inputs import read_blocks
from megatron.extras.preparation.preprocess.journal import ResumableWriter

ROOT = Path(__file__).resolve().parents[1]
TEXTS = ROOT / "tests/fixtures/openwebtext-100/openwebtext-100.jsonl"
_KEYS = ("text",)
_CHANGED_WORDS = 0.05

# Runs in a process of its own. A program that is given by -c is not imported again by workers.
RUN = """
import hashlib, json, resource, sys, time
started = time.perf_counter()
from pathlib import Path
from megatron.config.data import TokenizerConfig
from megatron.extras.preparation.preprocess.build_dataset import PreprocessJob, preprocess
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
preprocess(job, log=lambda line: None, choose=lambda *_: encoder)
result = {
    "parent": read_cpu(resource.RUSAGE_SELF),
    "workers": read_cpu(resource.RUSAGE_CHILDREN),
    "elapsed": time.perf_counter() - started,
}
digest = hashlib.sha256()
for path in sorted(Path(output).parent.glob("out_*")):
    digest.update(path.name.encode() + path.read_bytes())
print(json.dumps(result | {"digest": digest.hexdigest()}))
"""

# Measures the phases of one checkout. Each line of its input starts a block.
MEASURE = """
import json, sys
sys.path.insert(0, sys.argv[1])
import preprocessing
def wait():
    print(flush=True)
    sys.stdin.readline()
print(json.dumps(preprocessing.measure_phases(*sys.argv[2:], wait)), flush=True)
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
            # Python searches the working folder first.
            cwd=checkout,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


def measure_runs(arguments: Arguments, corpora: list[Path], folder: Path) -> None:
    """Let the checkouts take turns with one and two workers, and print the table."""
    # The results of all rounds, for each number of workers, version and corpus.
    results: dict[tuple[int, Path, Path], list[dict[str, Any]]] = defaultdict(list)
    for _ in range(arguments.rounds):
        for count in (1, 2):
            for checkout in arguments.checkouts:
                for corpus in corpora:
                    result = run(checkout, corpus, folder, count, arguments.encoder)
                    results[count, checkout, corpus].append(result)
    for corpus in corpora:
        same = [found for key, found in results.items() if key[2] == corpus]
        digests = {result["digest"] for found in same for result in found}
        assert len(digests) == 1, f"{corpus}: all runs must give the same bytes"
    small, large = corpora
    megabytes = (large.stat().st_size - small.stat().st_size) / 1e6

    def get_rate(count: int, checkout: Path, name: str) -> float:
        """Return the MB a second of what the large corpus has more than the small one."""
        seconds = [
            statistics.median(result[name] for result in results[count, checkout, corpus])
            for corpus in corpora
        ]
        return megabytes / max(seconds[1] - seconds[0], 1e-3)

    print(
        "\n| code | one process, MB per CPU second | two workers, each | their parent "
        "| one process, MB/s elapsed | two workers, MB/s elapsed |\n|---|--:|--:|--:|--:|--:|"
    )
    columns = ((1, "parent"), (2, "workers"), (2, "parent"), (1, "elapsed"), (2, "elapsed"))
    for checkout in arguments.checkouts:
        cells = [f"{get_rate(count, checkout, name):.0f}" for count, name in columns]
        print(f"| {checkout} | {' | '.join(cells)} |", flush=True)
    print(
        f"\n| {large.stat().st_size / 1e6:.0f} MB with the start | one process, CPU s "
        "| two workers and their parent, CPU s | speed on two free cores, at most | one, s elapsed "
        "| two, s elapsed |\n|---|--:|--:|--:|--:|--:|"
    )
    for checkout in arguments.checkouts:
        one, two = (
            {
                "cpu": statistics.median(run["parent"] + run["workers"] for run in runs),
                "elapsed": statistics.median(run["elapsed"] for run in runs),
            }
            for runs in (results[count, checkout, large] for count in (1, 2))
        )
        bound = 2 * one["cpu"] / two["cpu"]
        print(
            f"| {checkout} | {one['cpu']:.2f} | {two['cpu']:.2f} | {bound:.2f} "
            f"| {one['elapsed']:.1f} | {two['elapsed']:.1f} |"
        )


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


def measure_phases(
    encoder: str, corpus: str, folder: str, wait: Callable[[], None]
) -> dict[str, float]:
    """Return the CPU seconds of each phase, when one process does everything.

    Args:
        encoder: The library that encodes.
        corpus: A jsonl file.
        folder: Has the tokenizer, and receives the output.
        wait: Called before each block.
    """
    times = PhaseTimes()
    tokenizer = TokenizerConfig(
        vocab_file=f"{folder}/tokenizer/vocab.json", merge_file=f"{folder}/tokenizer/merges.txt"
    )
    with times.measure("start: tokenizer and library"):
        encode = workers.BlockEncoder(
            workers.EncodingJob(tokenizer, encoder, _KEYS, True, "uint16")
        )
    writer = ResumableWriter(f"{folder}/phases-{os.getpid()}", np.dtype(np.uint16))
    blocks = read_blocks([corpus], _KEYS)
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
            wait()
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


def take_turns(arguments: Arguments, corpus: Path, folder: Path) -> list[dict[str, float]]:
    """Return the phases of each checkout. The checkouts take turns after each block."""
    given = [str(ROOT / "benchmarks"), arguments.encoder, str(corpus), str(folder)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", MEASURE, *given],
            env=os.environ | {"PYTHONPATH": str(checkout.resolve())},
            # Python searches the working folder first.
            cwd=checkout,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for checkout in arguments.checkouts
    ]
    # An empty line means that the process waits for its turn. All have the same number of blocks.
    lines = [read_line(process) for process in processes]
    while lines[0] == "\n":
        for number, process in enumerate(processes):
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
            lines[number] = read_line(process)
    for process in processes:
        assert process.wait() == 0, "a process that measures phases failed"
    return [json.loads(line) for line in lines]


def read_line(process: subprocess.Popen[str]) -> str:
    """Return the next line that a process prints."""
    assert process.stdout is not None
    return process.stdout.readline()


def report_phases(arguments: Arguments, corpus: Path, folder: Path) -> None:
    """Print the median CPU time of each phase for each checkout."""
    rounds = [take_turns(arguments, corpus, folder) for _ in range(arguments.rounds)]
    megabytes = corpus.stat().st_size / 1e6
    names = " | ".join(str(checkout) for checkout in arguments.checkouts)
    print(f"| CPU ms for 100 MB of jsonl | {names} |\n|---|{'--:|' * len(arguments.checkouts)}")
    for phase in rounds[0][0]:
        cells = [
            f"{1e5 * statistics.median(found[phase] for found in each) / megabytes:.0f}"
            for each in zip(*rounds, strict=True)
        ]
        print(f"| {phase} | {' | '.join(cells)} |", flush=True)


def describe(arguments: Arguments) -> str:
    """Return date, machine, versions and rounds as one line."""
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    name = found[1] if found else platform.machine()
    packages = ("gigatoken", "orjson", "tokenizers", "numpy")
    versions = ", ".join(f"{package} {version(package)}" for package in packages)
    return (
        f"{date.today()}, {name}, {os.cpu_count()} cores (load average at the start "
        f"{os.getloadavg()[0]:.1f}), Python {platform.python_version()}, {versions}. "
        f"{arguments.rounds} interleaved rounds; medians.\n"
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
        measure_runs(arguments, corpora, folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

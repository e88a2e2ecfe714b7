"""Compare the reading of Parquet files with other readers, on the same documents.

    python benchmarks/streaming.py                          this project and `datasets`
    python benchmarks/streaming.py --grain VENV/bin/python  also Grain, which has its environment
    python benchmarks/streaming.py --mosaic VENV/bin/python also MosaicML streaming
    python benchmarks/streaming.py --quick                  check that it runs

Each reader packs lists of token ids into samples of 2048 tokens, in a shuffled order, in a process
of its own. MosaicML streaming reads only its own format, MDS. The conversion of the files is timed
alone. This project and `datasets` read nothing ahead while the others run. They take turns, and the
first round warms up. Medians are quoted.
"""

import statistics
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import tyro
from layouts import describe_machine, table

SEQUENCE = 2048
VOCABULARY = 50_000


@dataclass(frozen=True)
class Arguments:
    """The command line."""

    grain: str | None = None
    """Python of an environment with grain, pyarrow and torch."""
    mosaic: str | None = None
    """Python of an environment with mosaicml-streaming, pyarrow and torch."""
    files: int = 16
    documents: int = 20_000
    """Documents in all files together. Their mean length is 600 tokens."""
    samples: int = 1024
    """Samples that each reader packs in a round. This project reads them in batches of 64."""
    rounds: int = 5
    quick: bool = False


# Each reader is a program that packs samples when it gets a line, and prints the seconds and the
# seconds of CPU of all its threads.
_LOOP = """
import sys, time
iterator = make()
for line in sys.stdin:
    begin, cpu = time.perf_counter(), time.process_time()
    for _ in range(int(line)):
        next(iterator)
    print(time.perf_counter() - begin, time.process_time() - cpu, flush=True)
"""

_OURS = """
from megatron.data.source import BatchSlice
from megatron.extras.stream.listing import list_dataset
from megatron.extras.stream.streamed_dataset import Specials, StreamedDataset
from megatron.extras.stream.shard_order import MixturePhase
from megatron.parallel.ranks import Ranks
from megatron.extras.stream.source import StreamSource

def make():
    listing = list_dataset({folder!r}, "parquet", "tokens", None)
    rows = (0, int(listing.rows.sum()))
    dataset = StreamedDataset("data", listing, rows, 1, 64, Specials(eos=0), None, {vocabulary})
    phases = [MixturePhase(0, {{"data": 1.0}})]
    source = StreamSource("train", [dataset], phases, {sequence}, BatchSlice(1), 0, Ranks())
    while True:
        yield from source.read_batch(64)
"""

_GRAIN = """
import glob
import grain
import numpy as np
from grain import experimental

def make():
    files = sorted(glob.glob({folder!r} + "/*.parquet"))
    readers = [experimental.ParquetIterDataset(path) for path in files]
    stream = experimental.InterleaveIterDataset(readers, cycle_length=len(readers))
    stream = experimental.WindowShuffleIterDataset(stream, window_size=256, seed=1)
    stream = stream.map(lambda row: {{"ids": np.asarray(list(row["tokens"]) + [0], np.int64)}})
    stream = experimental.ConcatThenSplitIterDataset(stream, length_struct={{"ids": {sequence}}})
    return iter(experimental.RepeatIterDataset(stream))
"""

# The readers that return rows one by one pack them in the same way.
_PACK = """
import numpy as np

def make():
    stream = open_stream()
    rest = np.empty(0, np.int64)
    while True:
        parts, size = [rest], len(rest)
        for row in stream:
            ids = add_eos(row["tokens"])
            parts.append(ids)
            size += len(ids)
            while size > {sequence}:
                whole = np.concatenate(parts)
                yield whole[: {sequence} + 1]
                parts, size = [whole[{sequence}:]], size - {sequence}
        rest = np.concatenate(parts)
"""

_DATASETS = (
    """
from datasets import load_dataset

def add_eos(ids):
    return np.asarray(ids + [0], np.int64)

def open_stream():
    files = {folder!r} + "/*.parquet"
    stream = load_dataset("parquet", data_files=files, split="train", streaming=True)
    return stream.shuffle(seed=1, buffer_size=256)
"""
    + _PACK
)

_MOSAIC = (
    """
from streaming import StreamingDataset

def add_eos(ids):
    return np.append(ids, 0).astype(np.int64)

def open_stream():
    return StreamingDataset(
        local={folder!r} + "/mds", shuffle=True, shuffle_seed=1, batch_size=64,
        # With the default, it waits most of the time for its thread that looks ahead.
        predownload=20_000, num_canonical_nodes=1,
    )
"""
    + _PACK
)

_CONVERT_TO_MDS = """
import glob, time
import pyarrow.parquet as parquet
from streaming import MDSWriter

begin = time.perf_counter()
with MDSWriter(out={folder!r} + "/mds", columns={{"tokens": "ndarray:int32"}}) as writer:
    for path in sorted(glob.glob({folder!r} + "/*.parquet")):
        for batch in parquet.ParquetFile(path).iter_batches(columns=["tokens"]):
            for ids in batch.column(0):
                writer.write({{"tokens": ids.values.to_numpy()}})
print(time.perf_counter() - begin)
"""


def write_files(folder: Path, arguments: Arguments) -> None:
    """Write the Parquet files with documents of random ids."""
    random = np.random.default_rng(1)
    documents = 2000 if arguments.quick else arguments.documents
    for number in range(arguments.files):
        sizes = random.geometric(1 / 600, documents // arguments.files)
        ids = random.integers(1, VOCABULARY, int(sizes.sum()), np.int32)
        column = pa.ListArray.from_arrays(pa.array(np.cumsum([0, *sizes]), pa.int32()), ids)
        parquet.write_table(
            pa.table({"tokens": column}), folder / f"{number:02}.parquet", row_group_size=500
        )


def convert_to_mds(python: str, facts: Mapping[str, object]) -> float:
    """Write the documents as MDS, and return the seconds that it took without imports."""
    program = _CONVERT_TO_MDS.format(**facts)
    done = subprocess.run([python, "-c", program], stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout)


def list_programs(arguments: Arguments) -> dict[str, tuple[str, str]]:
    """Return Python and the program of each reader."""
    programs = {"this project": (sys.executable, _OURS), "datasets": (sys.executable, _DATASETS)}
    if arguments.grain is not None:
        programs["Grain"] = (arguments.grain, _GRAIN)
    if arguments.mosaic is not None:
        programs["MosaicML streaming"] = (arguments.mosaic, _MOSAIC)
    return programs


def main() -> None:
    """Run the benchmark and print the table."""
    arguments = tyro.cli(Arguments, description=__doc__)
    programs = list_programs(arguments)
    samples = 64 if arguments.quick else arguments.samples
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in programs}
    with tempfile.TemporaryDirectory() as name:
        write_files(Path(name), arguments)
        facts = {"folder": name, "sequence": SEQUENCE, "vocabulary": VOCABULARY}
        conversion = None
        if arguments.mosaic is not None:
            conversion = convert_to_mds(arguments.mosaic, facts)
        processes = {}
        for reader, (python, program) in programs.items():
            text = textwrap.dedent(program).format(**facts)
            processes[reader] = subprocess.Popen(
                [python, "-c", text + _LOOP],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        for number in range(1 + (1 if arguments.quick else arguments.rounds)):
            for reader, process in processes.items():
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(f"{samples}\n")
                process.stdin.flush()
                taken, of_cpu = map(float, process.stdout.readline().split())
                if number > 0:
                    seconds[reader].append(taken)
                    cpu_seconds[reader].append(of_cpu)
        for process in processes.values():
            process.communicate()
    print(describe_machine(arguments))
    if conversion is not None:
        print(f"The conversion to MDS took {conversion:.1f} s.")
    rows = []
    for reader, each in seconds.items():
        median = statistics.median(each)
        rows.append(
            f"| {reader} | {samples * SEQUENCE / median / 1e6:.2f} | {samples / median:,.0f} "
            f"| {min(each):.2f} to {max(each):.2f} | {statistics.median(cpu_seconds[reader]):.2f} |"
        )
    table("| reader | million tokens/s | samples/s | seconds a round | CPU seconds |", rows)


if __name__ == "__main__":
    main()

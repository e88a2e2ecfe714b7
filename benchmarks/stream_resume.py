"""Measure what a resume and a start of streamed data cost.

    python benchmarks/stream_resume.py --documents 1000000 --files 10000

It writes synthetic Parquet files of token ids, and prints medians of interleaved measurements. The
page cache is warm, so the figures are those of the reader, and not those of a disk.
"""

import argparse
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from megatron.data.source import BatchSlice
from megatron.extras.stream.listing import list_dataset
from megatron.extras.stream.shard_order import MixturePhase
from megatron.extras.stream.source import StreamSource
from megatron.extras.stream.streamed_dataset import Specials, StreamedDataset
from megatron.parallel.ranks import Ranks

SEQ_LENGTH = 1024
LONGEST = 60
BATCH = 256


def write_files(folder: Path, documents: int, files: int, group: int) -> None:
    """Write documents of 1 to 60 tokens, evenly divided among files."""
    folder.mkdir()
    random = np.random.default_rng(1)
    bounds = np.linspace(0, documents, files + 1).astype(int)
    for number, rows in enumerate(np.diff(bounds)):
        lengths = random.integers(1, LONGEST, rows)
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        ids = pa.array(random.integers(0, 50_000, lengths.sum()).astype(np.uint16))
        table = pa.table({"tokens": pa.ListArray.from_arrays(offsets, ids)})
        parquet.write_table(table, folder / f"{number:05}.parquet", row_group_size=group)


def open_source(folder: Path, cache: Path, shards: int) -> StreamSource:
    """List the files and open the source, as the start of a run does."""
    listing = list_dataset(str(folder), "parquet", "tokens", str(cache))
    rows = (0, int(listing.rows.sum()))
    dataset = StreamedDataset("web", listing, rows, 1, shards, Specials(eos=50_000), None, 50_001)
    phases = [MixturePhase(0, {"web": 1.0})]
    return StreamSource("train", [dataset], phases, SEQ_LENGTH, BatchSlice(1), 2, Ranks())


def measure(work: Callable[[], None]) -> tuple[float, float]:
    """Return wall and CPU seconds."""
    wall = time.perf_counter()
    cpu = time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    """Print one line of JSON for each measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--shards", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=7)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(folder / "few", given.documents, 20, 1000)
        source = open_source(folder / "few", folder / "cache", given.shards)
        samples = given.documents * (LONGEST // 2 + 1) // SEQ_LENGTH
        states = {}
        for part in (1, 50, 99):
            source.advance(samples * part // 100 - source.consumed_samples)
            states[f"resume at {part} %"] = json.loads(json.dumps(source.state()))
        source.close()
        results: dict[str, list[tuple[float, float]]] = {}

        def resume(state: dict | None, data: str) -> None:
            opened = open_source(folder / data, folder / "cache", given.shards)
            if state is not None:
                opened.load(state)
            opened.read_batch(BATCH)
            opened.close()

        for _ in range(given.repeats):
            for label, state in states.items():
                seconds = measure(functools.partial(resume, state, "few"))
                results.setdefault(label, []).append(seconds)
        write_files(folder / "many", given.documents, given.files, 1000)
        results["first batch, cold list"] = [measure(lambda: resume(None, "many"))]
        for _ in range(given.repeats):
            seconds = measure(lambda: resume(None, "many"))
            results.setdefault("first batch, warm list", []).append(seconds)
    for label, measured in results.items():
        wall, cpu = (statistics.median(column) for column in zip(*measured, strict=True))
        print(json.dumps({"what": label, "seconds": round(wall, 3), "cpu": round(cpu, 3)}))


if __name__ == "__main__":
    main()

"""Data sets of rows for the tests of streamed data, in each format."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

Documents = Sequence[Sequence[int]] | Sequence[str | None]


def write_rows(path: Path, column: str, documents: Documents, group: int = 100) -> None:
    """Write one file. Its ending chooses the format: `.stream.arrow` is Arrow's stream format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps({column: list_or_text(d)}) + "\n" for d in documents))
        return
    kind = pa.string() if documents and isinstance(documents[0], str) else pa.list_(pa.int32())
    table = pa.table({"other": list(range(len(documents))), column: pa.array(documents, kind)})
    if path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=group)
        return
    make = pa.ipc.new_stream if path.name.endswith(".stream.arrow") else pa.ipc.new_file
    with make(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=group)


def list_or_text(document: Sequence[int] | str | None) -> list[int] | str | None:
    """Return a document as a JSON value."""
    if document is None or isinstance(document, str):
        return document
    return list(document)


def make_documents(count: int, seed: int, first: int = 1000, longest: int = 40) -> list[list[int]]:
    """Return documents of 1 to `longest` tokens. The first token is a number of its own."""
    random = np.random.default_rng(seed)
    return [
        [first + number, *random.integers(0, 100, random.integers(0, longest)).tolist()]
        for number in range(count)
    ]


def make_dirty_documents(count: int, seed: int, first: int = 1000) -> list[list[int]]:
    """Return documents of which some are long, repetitive, empty or copies of earlier ones."""
    random = np.random.default_rng(seed)
    documents = make_documents(count, seed, first)
    for number in range(count):
        kind = random.integers(0, 8)
        if kind == 0:
            documents[number] += random.integers(0, 100, 60).tolist()
        elif kind == 1:
            documents[number] += list(range(12)) * 3
        elif kind == 2:
            documents[number] = list(documents[max(0, number - 3)])
        elif kind == 3 and number % 5 == 0:
            documents[number] = []
    return documents


def write_dataset(folder: Path, documents: Documents, files: int = 3, group: int = 100) -> None:
    """Write a data set of several Parquet files of different sizes."""
    bounds = [round(len(documents) * (number / files) ** 1.3) for number in range(files + 1)]
    for number in range(files):
        write_rows(
            folder / f"part-{number}.parquet",
            "tokens",
            documents[bounds[number] : bounds[number + 1]],
            group,
        )

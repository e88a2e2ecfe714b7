"""Irregular files of streamed data: odd lines, empty files, links, names, and extreme ids."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from data.row_files import make_documents, write_dataset, write_rows
from data.test_stream_remote import read_all

from megatron.base.errors import DataError
from megatron.extras.samples.stream.listing import list_dataset
from megatron.extras.samples.stream.reader import Cursor, ShardReader
from megatron.extras.samples.stream.streamed_dataset import Specials, StreamedDataset


def test_carriage_returns_and_blank_lines_of_jsonl(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"t": [1]}\r\n\r\n{"t":\r[2]}\r\n\n{"t": [3]}')
    (tmp_path / "b.jsonl").write_bytes(b"")
    listing = list_dataset(str(tmp_path), "jsonl", "t", None)
    assert listing.rows.sum() == 5
    assert read_all(listing) == [[1], [], [2], [], [3]]
    assert listing.kind == "tokens"
    (tmp_path / "a.jsonl").write_bytes(b'\n{"t": "text"}\n')
    assert list_dataset(str(tmp_path), "jsonl", "t", None).kind == "text"
    # All lines but the first one would be lost if they were counted as one.
    (tmp_path / "a.jsonl").write_bytes(b'{"t": [1]}\r{"t": [2]}\r')
    with pytest.raises(DataError, match="is not JSON"):
        list_dataset(str(tmp_path), "jsonl", "t", None)


def test_half_a_surrogate_pair(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"t": "\\ud83d\\ude42 \\u00e4"}\n{"t": "\\ud800"}\n')
    with pytest.raises(DataError, match="half a surrogate pair"):
        list_dataset(str(tmp_path), "jsonl", "t", None)
    (tmp_path / "a.jsonl").write_text('{"t": "\\ud83d\\ude42 \\u00e4"}\n')
    assert read_all(list_dataset(str(tmp_path), "jsonl", "t", None)) == ["\U0001f642 \u00e4"]


def test_empty_files_and_empty_row_groups(tmp_path: Path) -> None:
    empty = pa.table({"t": pa.array([], pa.list_(pa.int32()))})
    three = pa.table({"t": pa.array([[1], [2], [3]], pa.list_(pa.int32()))})
    with parquet.ParquetWriter(tmp_path / "a.parquet", three.schema) as writer:
        for table in (empty, three, empty):
            writer.write_table(table)
    parquet.write_table(empty, tmp_path / "b.parquet")
    assert read_all(list_dataset(str(tmp_path), "parquet", "t", None)) == [[1], [2], [3]]
    (tmp_path / "c.parquet").write_bytes(b"")
    with pytest.raises(DataError, match=r"c\.parquet cannot be read as Parquet"):
        list_dataset(str(tmp_path), "parquet", "t", None)
    (tmp_path / "only" / "empty").mkdir(parents=True)
    (tmp_path / "only" / "empty" / "a.jsonl").write_bytes(b"")
    with pytest.raises(DataError, match="have no rows"):
        list_dataset(str(tmp_path / "only"), "jsonl", "t", None)


def test_links_pipes_and_names(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", "t", [[1]])
    os.symlink(tmp_path, tmp_path / "self")
    assert read_all(list_dataset(str(tmp_path), "jsonl", "t", None)) == [[1]]
    os.symlink(tmp_path / "b.jsonl", tmp_path / "b.jsonl")
    with pytest.raises(DataError, match="link"):
        list_dataset(str(tmp_path), "jsonl", "t", None)
    (tmp_path / "b.jsonl").unlink()
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(DataError, match="no regular file"):
        list_dataset(str(tmp_path), "jsonl", "t", None)
    (tmp_path / "pipe.jsonl").unlink()
    os.rename(tmp_path / "a.jsonl", os.fsencode(tmp_path) + b"/a\xff.jsonl")
    with pytest.raises(DataError, match="not UTF-8") as raised:
        list_dataset(str(tmp_path), "jsonl", "t", None)
    assert "dcff" in str(raised.value).encode().decode()


def test_hidden_and_unfinished_files_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / ".cache").mkdir()
    for number, name in enumerate(("a", "_b", ".c", "below/d", "below/_e", ".cache/f")):
        write_rows(tmp_path / f"{name}.jsonl", "t", [[number]])
    assert read_all(list_dataset(str(tmp_path), "jsonl", "t", None)) == [[0], [3]]


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_ids_that_no_vocabulary_has(tmp_path: Path, suffix: str) -> None:
    def write(ids: list[int], kind: pa.DataType) -> None:
        if suffix == "parquet":
            parquet.write_table(
                pa.table({"t": pa.array([ids], pa.list_(kind))}), tmp_path / "a.parquet"
            )
        else:
            (tmp_path / "a.jsonl").write_text(json.dumps({"t": ids}) + "\n")

    def read(vocab_size: int | None) -> list[int]:
        listing = list_dataset(str(tmp_path), suffix, "t", None)
        dataset = StreamedDataset("d", listing, (0, 1), 1, 1, Specials(), None, vocab_size)
        return ShardReader(dataset, 0, Cursor()).read_sample(1).tokens.tolist()

    write([1, 9], pa.int64())
    assert read(10) == [1, 9]
    write([1, 10], pa.int64())
    with pytest.raises(DataError, match="token id 10"):
        read(10)
    write([1, -5], pa.int64())
    with pytest.raises(DataError, match="token id -5"):
        read(10)
    write([1, 2**64 - 3], pa.uint64())
    with pytest.raises(DataError, match="beyond 64 bits"):
        read(10)
    write([1, 2**63 - 1], pa.uint64())
    assert read(None) == [1, 2**63 - 1]


def test_a_document_of_many_samples(tmp_path: Path) -> None:
    """Each sample of a long document costs the same."""
    long = np.arange(1_000_000) % 100
    table = pa.table({"t": pa.array([long, [7]], pa.list_(pa.int32()))})
    parquet.write_table(table, tmp_path / "a.parquet")
    listing = list_dataset(str(tmp_path), "parquet", "t", None)
    dataset = StreamedDataset("d", listing, (0, 2), 1, 1, Specials(), None, 100)
    reader = ShardReader(dataset, 0, Cursor())
    stream = np.concatenate([reader.read_sample(1000).tokens[:-1] for _ in range(1000)])
    expected = np.concatenate([long, [7]])
    if stream[0] == 7:
        expected = np.concatenate([[7], long])
    assert np.array_equal(stream, expected[:1_000_000])


OPEN_FILES = """
import resource, sys
from megatron.config.data import DataConfig
from megatron.data.build_sources import build_sources
from megatron.data.source import BatchSlice
from megatron.data.source import SourceRequest
from megatron.extras.samples.stream.build import StreamedData

resource.setrlimit(resource.RLIMIT_NOFILE, (100, int(sys.argv[2])))
data = DataConfig(
    data_path=(sys.argv[1],), dataset_format="parquet", col_name="tokens", logical_shards=120,
    split="1", num_workers=0,
)
sources = build_sources(SourceRequest(
    data=data, seq_length=16, seed=1, train_samples=120, valid_samples=0, test_samples=0,
    batch_slice=BatchSlice(1),
), StreamedData())
print(len(sources.train.read_batch(120)), "samples")
"""


@pytest.mark.parametrize(("hard", "expected"), [(2000, "120 samples"), (110, "ulimit -n")])
def test_each_shard_keeps_a_file_open(tmp_path: Path, hard: int, expected: str) -> None:
    """The limit of open files is raised where the system permits it, and named where not."""
    # Groups are larger than what is read at once, so a reader keeps its file open.
    write_dataset(tmp_path, make_documents(60_000, 1), group=20_000)
    command = [sys.executable, "-c", OPEN_FILES, str(tmp_path), str(hard)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert expected in found.stdout + found.stderr

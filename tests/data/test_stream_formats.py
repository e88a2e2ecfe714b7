"""Parquet, Arrow and JSONL files give the same rows, from any row on, or a clear error."""

import itertools
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from data.row_files import make_documents, write_dataset, write_rows

from megatron.base.errors import DataError
from megatron.extras.samples.stream.formats import FORMATS
from megatron.extras.samples.stream.listing import list_dataset

NAMES = ("a.parquet", "a.file.arrow", "a.stream.arrow", "a.jsonl")
TEXTS = ["", "one", "zwei\nLinien", "три 漢字 🙂", " blanks  ", "\u2028 separator"] * 500
TOKENS = [[], *make_documents(2500, seed=1), []]


def format_of(path: Path) -> str:
    return {".parquet": "parquet", ".arrow": "arrow", ".jsonl": "jsonl"}[path.suffix]


def read_all(path: Path, column: str, first_row: int = 0) -> list:
    """Return the rows of all groups. The first `first_row` rows of each group are left out."""
    files = FORMATS[format_of(path)]
    groups = files.list_groups(str(path), column)
    rows = []
    for begin, end in zip(groups.begin.tolist(), groups.end.tolist(), strict=True):
        for chunk in files.read_rows(str(path), column, begin, end, first_row):
            rows += [row if isinstance(row, str) else row.tolist() for row in chunk]
    return rows


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("column", "documents"), [("text", TEXTS), ("ids", TOKENS)])
def test_each_format_gives_the_documents(tmp_path: Path, name: str, column: str, documents: list):
    path = tmp_path / name
    write_rows(path, column, documents, group=700)
    groups = FORMATS[format_of(path)].list_groups(str(path), column)
    assert groups.rows.sum() == len(documents)
    assert len(groups.rows) > 1
    assert read_all(path, column) == documents
    left_out = sum(min(513, rows) for rows in groups.rows.tolist())
    assert len(read_all(path, column, 513)) == len(documents) - left_out
    begin = int(groups.rows[0])
    in_first = min(513, begin)
    assert read_all(path, column, 513)[: begin - in_first] == documents[in_first:begin]


@pytest.mark.parametrize("name", NAMES[:3])
def test_the_number_of_tokens_is_known_without_reading(tmp_path: Path, name: str):
    path = tmp_path / name
    write_rows(path, "ids", TOKENS, group=700)
    groups = FORMATS[format_of(path)].list_groups(str(path), "ids")
    assert groups.tokens.sum() == sum(map(len, TOKENS))
    bounds = np.cumsum([0, *groups.rows.tolist()])
    for number, (first, last) in enumerate(itertools.pairwise(bounds)):
        assert groups.tokens[number] == sum(map(len, TOKENS[first:last]))


@pytest.mark.parametrize("name", NAMES)
def test_null_texts_are_empty_documents(tmp_path: Path, name: str):
    """A column whose values are all null has a type of its own."""
    path = tmp_path / name
    write_rows(path, "text", ["one", None, "two"])
    assert read_all(path, "text") == ["one", [], "two"]
    if path.suffix == ".jsonl":
        write_rows(path, "text", [None, None])
    else:
        table = pa.table({"text": pa.array([None, None], pa.null())})
        if path.suffix == ".parquet":
            parquet.write_table(table, path)
        else:
            make = pa.ipc.new_stream if path.name.endswith(".stream.arrow") else pa.ipc.new_file
            with make(str(path), table.schema) as writer:
                writer.write_table(table)
    assert FORMATS[format_of(path)].list_groups(str(path), "text").kind == "text"
    assert read_all(path, "text") == [[], []]


def test_missing_lists_are_empty_documents(tmp_path: Path):
    rows = [[1, 2], None, [], [3]]
    for number, kind in enumerate([pa.list_(pa.uint16()), pa.large_list(pa.int64())]):
        path = tmp_path / f"{number}.parquet"
        parquet.write_table(pa.table({"ids": pa.array(rows, kind)}), path)
        assert read_all(path, "ids") == [[1, 2], [], [], [3]]
        assert FORMATS["parquet"].list_groups(str(path), "ids").tokens.tolist() == [3]


def test_one_row_in_each_record_batch(tmp_path: Path):
    path = tmp_path / "a.file.arrow"
    write_rows(path, "tokens", TOKENS, group=1)
    groups = FORMATS["arrow"].list_groups(str(path), "tokens")
    assert groups.rows.tolist() == [1024, 1024, len(TOKENS) - 2048]
    assert read_all(path, "tokens") == TOKENS


def test_record_batches_that_are_documents(tmp_path: Path):
    """The Arrow files of fms-fsdp: the rows of a record batch are the ids of one document."""
    documents = [*TOKENS, [], [7]]
    schema = pa.schema([("tokens", pa.uint32())])
    for name, make in (("a.arrow", pa.ipc.new_file), ("b.arrow", pa.ipc.new_stream)):
        path = tmp_path / name
        with make(str(path), schema) as writer:
            for document in documents:
                writer.write(pa.record_batch([pa.array(document, pa.uint32())], schema=schema))
        groups = FORMATS["arrow"].list_groups(str(path), "tokens")
        assert groups.kind == "tokens"
        assert int(groups.rows.sum()) == len(documents)
        assert int(groups.tokens.sum()) == sum(map(len, documents))
        assert read_all(path, "tokens") == documents
        begin = int(groups.begin[0])
        end = int(groups.end[0])
        rows = FORMATS["arrow"].read_rows(str(path), "tokens", begin, end, 3)
        assert np.asarray(next(rows)[0]).tolist() == documents[3]


def test_integers_beside_other_columns_are_no_documents(tmp_path: Path):
    path = tmp_path / "a.arrow"
    write_rows(path, "tokens", TOKENS)
    with pytest.raises(DataError, match="neither texts nor lists of integers"):
        FORMATS["arrow"].list_groups(str(path), "other")


def test_last_line_without_an_end(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": str(number)}) for number in range(2048)]
    path.write_text("\n".join(lines))
    assert read_all(path, "text") == [str(number) for number in range(2048)]
    path.write_text("\n".join(lines)[:-3])
    with pytest.raises(DataError, match="still being written"):
        FORMATS["jsonl"].list_groups(str(path), "text")


@pytest.mark.parametrize("name", NAMES)
def test_missing_column(tmp_path: Path, name: str):
    write_rows(tmp_path / name, "text", TEXTS)
    with pytest.raises(DataError, match="--col-name"):
        read_all(tmp_path / name, "tokens")


@pytest.mark.parametrize("name", NAMES)
def test_torn_file(tmp_path: Path, name: str):
    path = tmp_path / name
    write_rows(path, "text", TEXTS)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 2 // 3 - 5])
    with pytest.raises(DataError, match="still being written"):
        read_all(path, "text")


def test_a_column_of_another_type(tmp_path: Path):
    write_rows(tmp_path / "a.parquet", "text", TEXTS)
    with pytest.raises(DataError, match="neither texts nor lists"):
        read_all(tmp_path / "a.parquet", "other")
    write_rows(tmp_path / "b.parquet", "text", TOKENS)
    with pytest.raises(DataError, match="two folders"):
        list_dataset(str(tmp_path), "parquet", "text", None)


def test_listing_uses_its_cache_and_notices_changes(tmp_path: Path):
    write_dataset(tmp_path, make_documents(900, seed=2))
    first = list_dataset(str(tmp_path), "parquet", "tokens", None)
    (cache,) = (tmp_path / ".index-cache").glob("listing-*.npz")
    written = cache.stat().st_mtime_ns
    again = list_dataset(str(tmp_path), "parquet", "tokens", None)
    assert again.compute_fingerprint() == first.compute_fingerprint()
    assert cache.stat().st_mtime_ns == written
    cache.write_bytes(cache.read_bytes()[:-30])
    damaged = list_dataset(str(tmp_path), "parquet", "tokens", None)
    assert damaged.compute_fingerprint() == first.compute_fingerprint()
    write_rows(tmp_path / "part-9.parquet", "tokens", make_documents(50, seed=3))
    more = list_dataset(str(tmp_path), "parquet", "tokens", None)
    assert more.rows.sum() == 950
    assert more.compute_fingerprint() != first.compute_fingerprint()
    write_rows(tmp_path / "part-9.parquet", "tokens", make_documents(60, seed=3))
    with pytest.raises(DataError, match="has changed since the run started"):
        more.get_path(3)


def test_a_cache_that_cannot_be_written_is_reported(tmp_path: Path):
    write_dataset(tmp_path / "data", make_documents(90, seed=2))
    (tmp_path / "file").write_text("")
    lines: list[str] = []
    found = list_dataset(
        str(tmp_path / "data"), "parquet", "tokens", str(tmp_path / "file"), lines.append
    )
    assert found.rows.sum() == 90
    assert len(lines) == 1
    assert "--data-cache-path" in lines[0]


@pytest.mark.parametrize("folder", ["missing", "empty"])
def test_no_files(tmp_path: Path, folder: str):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="--data-path"):
        list_dataset(str(tmp_path / folder), "parquet", "text", None)

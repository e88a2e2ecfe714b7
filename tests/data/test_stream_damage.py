"""Damaged values of Arrow and Parquet files are errors that name the file and the row."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from data.test_stream_formats import format_of, read_all

from megatron.base.errors import DataError
from megatron.extras.preparation.conversations.rows import read_rows
from megatron.extras.preparation.preprocess.inputs import read_blocks
from megatron.extras.preparation.preprocess.row_inspection import inspect_rows
from megatron.extras.samples.stream.formats import FORMATS

ROW = 123
TEXTS = [f"row{number:04d}" for number in range(500)]
# Each row has as many ids as a text has bytes, so both have the same offsets.
TOKENS = [[number, 1, 2, 3, 4, 5, 6] for number in range(500)]


def offsets(*values: int) -> bytes:
    return b"".join(value.to_bytes(4, "little", signed=True) for value in values)


RIGHT = offsets(7 * ROW, 7 * (ROW + 1), 7 * (ROW + 2))
DAMAGE = {
    "outside": (RIGHT, offsets(7 * ROW, 2**31 - 1, 7 * (ROW + 2))),
    "negative": (RIGHT, offsets(7 * ROW, -(2**31), 7 * (ROW + 2))),
    "not UTF-8": (b"row0123", b"row\xff123"),
}
CASES = [
    ("a.file.arrow", "text", "outside"),
    ("a.file.arrow", "text", "negative"),
    ("a.stream.arrow", "text", "outside"),
    ("a.stream.arrow", "text", "not UTF-8"),
    ("a.file.arrow", "ids", "outside"),
    ("a.stream.arrow", "ids", "negative"),
    ("a.parquet", "text", "not UTF-8"),
]


def write(path: Path, *columns: str) -> None:
    """Write a file whose values are not compressed."""
    values = pa.array(TEXTS)
    if columns == ("ids",):
        values = pa.array(TOKENS, pa.list_(pa.int32()))
    table = pa.table(dict.fromkeys(columns, values))
    if path.suffix == ".parquet":
        parquet.write_table(table, path, compression="none", use_dictionary=False)
        return
    make = pa.ipc.new_stream if path.name.endswith(".stream.arrow") else pa.ipc.new_file
    with make(str(path), table.schema) as writer:
        writer.write_table(table)


def damage(path: Path, right: bytes, wrong: bytes) -> None:
    data = path.read_bytes()
    assert right in data
    path.write_bytes(data.replace(right, wrong))


@pytest.mark.parametrize(("name", "column", "kind"), CASES)
def test_damaged_value_names_file_and_row(
    name: str, column: str, kind: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    write(path, column)
    assert len(read_all(path, column)) == 500
    damage(path, *DAMAGE[kind])
    # Rows are counted from 0. With an offset outside, the row before it is damaged as well.
    message = rf"{path.name} is damaged: row {ROW} of "
    with pytest.raises(DataError, match=message):
        read_all(path, column)
    assert path.name in "".join(inspect_rows(str(path), format_of(path), column).damaged)
    if column == "text" and name != "a.file.arrow":
        with pytest.raises(DataError, match=rf"{path.name} is damaged: row {ROW + 1} of the file"):
            list(read_blocks([str(path)], [column]))


@pytest.mark.parametrize("name", ["a.stream.arrow", "a.parquet"])
def test_damaged_conversation_names_file_and_row(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    write(path, "prompt", "completion")
    assert sum(len(rows.values) for rows in read_rows([str(path)])) == 500
    damage(path, *DAMAGE["not UTF-8"])
    with pytest.raises(DataError, match=rf"{path.name} is damaged: row {ROW + 1} of the file"):
        list(read_rows([str(path)]))


def test_parquet_checksums_are_verified(tmp_path: Path) -> None:
    """A flipped bit that gives other valid texts is found if the writer has stored checksums."""
    path = tmp_path / "a.parquet"
    table = pa.table({"text": pa.array(TEXTS)})
    for checksums in (False, True):
        parquet.write_table(
            table,
            path,
            compression="none",
            use_dictionary=False,
            write_page_checksum=checksums,
        )
        damage(path, b"row0123", b"row0122")
        if not checksums:
            assert read_all(path, "text") != TEXTS
            continue
        with pytest.raises(DataError, match=r"a\.parquet.*CRC"):
            read_all(path, "text")
        with pytest.raises(DataError, match=r"a\.parquet.*CRC"):
            list(read_blocks([str(path)], ["text"]))


def test_column_names_that_are_not_text(tmp_path: Path) -> None:
    path = tmp_path / "a.file.arrow"
    write(path, "text")
    damage(path, b"text", b"te\xfft")
    with pytest.raises(DataError, match=path.name):
        FORMATS["arrow"].describe_columns(str(path))

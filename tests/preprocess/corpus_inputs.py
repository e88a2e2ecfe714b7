"""A small corpus of files in several formats, some of which are empty or damaged."""

import gzip
from pathlib import Path

import pyarrow as pa
import zstandard
from pyarrow import parquet
from tiny_corpus import JSONL, texts


def write_inputs(folder: Path) -> list[Path]:
    """Write uneven files with the 100 documents of the fixture, in order, and an empty one."""
    folder.mkdir()
    lines = JSONL.read_bytes().splitlines(keepends=True)
    plain = folder / "a.jsonl"
    plain.write_bytes(b"".join(lines[:37]))
    zipped = folder / "b.jsonl.gz"
    zipped.write_bytes(gzip.compress(b"".join(lines[37:60])))
    empty = folder / "c.jsonl"
    empty.write_bytes(b"")
    packed = folder / "d.jsonl.zst"
    packed.write_bytes(zstandard.ZstdCompressor().compress(b"".join(lines[60:61])))
    table = folder / "e.parquet"
    parquet.write_table(pa.table({"text": texts()[61:]}), table)
    return [plain, zipped, empty, packed, table]

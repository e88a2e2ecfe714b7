"""An indexed data set that is written over several runs: begun, cut back to where the journal says it was safe, gone on with.

Invariant: the final names appear last, and only for files that are whole; the steps that give them can be repeated.
Documents are one sequence each. The layout of both files is that of `megatron.data.indexed`.
"""

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from megatron.data.indexed import DTYPES, MAGIC, VERSION, get_bin_path, get_idx_path
from megatron.durable import sync_folder
from megatron.errors import DataError

_CHUNK = 1 << 20  # documents whose index entries are in memory at once
_HEADER = struct.Struct("<9sQBQQ")


class ResumableWriter:
    """Appends documents to PREFIX.bin.partial and their sizes to PREFIX.sizes.partial.

    Raises DataError where these files hold less than `tokens` and `documents`, which an earlier run had made safe.
    """

    def __init__(self, prefix: str, dtype: np.dtype, tokens: int = 0, documents: int = 0) -> None:
        self.prefix, self.dtype = prefix, dtype.newbyteorder("<")
        self.num_tokens, self.num_documents = tokens, documents
        self._bin = self._open("bin", tokens * dtype.itemsize)
        self._sizes = self._open("sizes", documents * 4)

    def add_documents(self, tokens: NDArray, sizes: NDArray[np.int64]) -> None:
        """All tokens of some documents end to end, and the size of each. Raises DataError where one exceeds int32."""
        assert int(sizes.sum()) == tokens.size, (
            f"sizes add up to {int(sizes.sum())}, there are {tokens.size} tokens"
        )
        if len(sizes) and int(sizes.max()) > np.iinfo(np.int32).max:
            raise DataError(
                f"a document of {int(sizes.max())} tokens is longer than the format's limit of 2147483647; cut the document."
            )
        self._bin.write(tokens.astype(self.dtype, copy=False).tobytes())
        self._sizes.write(sizes.astype("<i4").tobytes())
        self.num_tokens += tokens.size
        self.num_documents += len(sizes)

    def sync(self) -> None:
        """Bring what was added to the disk."""
        for file in (self._bin, self._sizes):
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        self._bin.close()
        self._sizes.close()

    def write_index(self) -> None:
        """Close the data and write PREFIX.idx.partial from the sizes, in pieces."""
        self.sync()
        self.close()
        code = next(code for code, known in DTYPES.items() if known == self.dtype)
        with open(_get_partial_path(self.prefix, "idx"), "wb") as out:
            out.write(
                _HEADER.pack(MAGIC, VERSION, code, self.num_documents, self.num_documents + 1)
            )
            for sizes in self._read_stored_sizes():
                out.write(sizes.tobytes())
            place = 0
            for sizes in self._read_stored_sizes():
                ends = place + np.cumsum(sizes, dtype=np.int64) * self.dtype.itemsize
                out.write(np.concatenate(([place], ends[:-1])).astype("<i8").tobytes())
                place = int(ends[-1])
            for start in range(0, self.num_documents + 1, _CHUNK):
                out.write(
                    np.arange(
                        start, min(start + _CHUNK, self.num_documents + 1), dtype="<i8"
                    ).tobytes()
                )
            out.flush()
            os.fsync(out.fileno())

    def _read_stored_sizes(self) -> Iterator[NDArray[np.int32]]:
        with open(_get_partial_path(self.prefix, "sizes"), "rb") as file:
            while block := file.read(4 * _CHUNK):
                yield np.frombuffer(block, "<i4")

    def _open(self, part: str, length: int) -> BinaryIO:
        path = _get_partial_path(self.prefix, part)
        if length == 0:
            return open(path, "wb")
        found = path.stat().st_size if path.exists() else 0
        if found < length:
            raise DataError(
                f"{path} has {found} bytes, but the journal of the interrupted run says {length}; it was changed "
                "or removed since. Delete the journal to start over."
            )
        file = open(path, "r+b")  # noqa: SIM115 (the writer closes it)
        file.truncate(length)
        file.seek(length)
        return file


def publish(prefix: str) -> None:
    """Give the finished files their names, .idx last; harmless where that was done already, entirely or in part."""
    if _get_partial_path(prefix, "bin").exists():
        get_idx_path(prefix).unlink(
            missing_ok=True
        )  # an old index must never stand beside the new .bin
        os.replace(_get_partial_path(prefix, "bin"), get_bin_path(prefix))
    if _get_partial_path(prefix, "idx").exists():
        os.replace(_get_partial_path(prefix, "idx"), get_idx_path(prefix))
    _get_partial_path(prefix, "sizes").unlink(missing_ok=True)
    sync_folder(get_idx_path(prefix).parent)


def _get_partial_path(prefix: str, part: str) -> Path:
    return Path(f"{prefix}.{part}.partial")

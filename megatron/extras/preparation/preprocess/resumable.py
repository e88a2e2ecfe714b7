"""An indexed data set that several runs write, each continuing where the journal ends.

A run truncates the files to the length that the journal has recorded, and appends to them.

Invariant: the final names appear last, and only on complete files. The steps that rename files can
be repeated. Documents are one sequence each. The layout of both files is that of
`megatron.data.indexed`.
"""

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from megatron.base.durable import sync_folder, without_links
from megatron.base.errors import DataError
from megatron.base.outside_file import open_regular
from megatron.data.indexed import DTYPES, MAGIC, VERSION, get_bin_path, get_idx_path

# Documents whose index entries are in memory at once.
_CHUNK = 1 << 20
_HEADER = struct.Struct("<9sQBQQ")


class ResumableWriter:
    """Appends documents to PREFIX.bin.partial and their sizes to PREFIX.sizes.partial."""

    def __init__(self, prefix: str, dtype: np.dtype, tokens: int = 0, documents: int = 0) -> None:
        """Open the partial files, and truncate them to what an earlier run had synced.

        Args:
            prefix: PREFIX, the path of the data set.
            dtype: Type of the tokens.
            tokens: Tokens that the journal has recorded.
            documents: Documents that the journal has recorded.

        Raises:
            DataError: the files hold less than that.
        """
        self.prefix = prefix
        self.dtype = dtype.newbyteorder("<")
        self.num_tokens = tokens
        self.num_documents = documents
        self._bin = self._open("bin", tokens * dtype.itemsize)
        self._sizes = self._open("sizes", documents * 4)

    def add_documents(self, tokens: NDArray, sizes: NDArray[np.int64]) -> None:
        """Append documents.

        Args:
            tokens: All their tokens end to end.
            sizes: The number of tokens of each document.

        Raises:
            DataError: a document has more tokens than an int32 can count.
        """
        assert int(sizes.sum()) == tokens.size, (
            f"sizes add up to {int(sizes.sum())}, there are {tokens.size} tokens"
        )
        if len(sizes) and int(sizes.max()) > np.iinfo(np.int32).max:
            raise DataError(
                f"a document of {int(sizes.max())} tokens is longer than the format's limit of "
                "2147483647. Split the document."
            )
        self._bin.write(tokens.astype(self.dtype, copy=False).data)
        self._sizes.write(sizes.astype("<i4").tobytes())
        self.num_tokens += tokens.size
        self.num_documents += len(sizes)

    def sync(self) -> None:
        """Sync everything that was added to disk."""
        for file in (self._bin, self._sizes):
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        """Close both files."""
        self._bin.close()
        self._sizes.close()

    def discard(self) -> None:
        """Remove the partial files of a run that has no documents."""
        for part in ("bin", "sizes"):
            _get_partial_path(self.prefix, part).unlink(missing_ok=True)

    def write_index(self) -> None:
        """Close the data files, and write PREFIX.idx.partial from the sizes."""
        self.sync()
        self.close()
        # `choose_dtype` returns only types that the format has a code for.
        code = next(code for code, known in DTYPES.items() if known == self.dtype)
        with open(_get_partial_path(self.prefix, "idx"), "wb", opener=without_links) as out:
            out.write(
                _HEADER.pack(MAGIC, VERSION, code, self.num_documents, self.num_documents + 1)
            )
            for sizes in self._read_stored_sizes():
                out.write(sizes.tobytes())
            # Pointers are the running sum of the sizes, in bytes.
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
        """Yield the sizes of all documents in chunks."""
        with open_regular(_get_partial_path(self.prefix, "sizes")) as file:
            while block := file.read(4 * _CHUNK):
                yield np.frombuffer(block, "<i4")

    def _open(self, part: str, length: int) -> BinaryIO:
        """Open a partial file for appending after its first `length` bytes."""
        path = _get_partial_path(self.prefix, part)
        # A new output. What an earlier run left there was never recorded.
        if length == 0:
            return open(path, "wb", opener=without_links)
        if path.exists():
            found = path.stat().st_size
        else:
            found = 0
        if found < length:
            raise DataError(
                f"{path} has {found} bytes, but the journal of the interrupted run records "
                f"{length}. The file was changed or removed since. Delete the journal to start "
                "from scratch."
            )
        file = open(path, "r+b", opener=without_links)  # noqa: SIM115 (the writer closes it)
        # What follows was written after the last journal entry, and will be written again.
        file.truncate(length)
        file.seek(length)
        return file


def publish(prefix: str) -> None:
    """Give the finished files their final names, .idx last.

    The call may be repeated. It does nothing for files that were renamed already.
    """
    if _get_partial_path(prefix, "bin").exists():
        # An old .idx does not describe the new .bin, so a crash here must not leave both.
        get_idx_path(prefix).unlink(missing_ok=True)
        os.replace(_get_partial_path(prefix, "bin"), get_bin_path(prefix))
    if _get_partial_path(prefix, "idx").exists():
        os.replace(_get_partial_path(prefix, "idx"), get_idx_path(prefix))
    _get_partial_path(prefix, "sizes").unlink(missing_ok=True)
    sync_folder(get_idx_path(prefix).parent)


def _get_partial_path(prefix: str, part: str) -> Path:
    """Return the path of a file that is not finished."""
    return Path(f"{prefix}.{part}.partial")

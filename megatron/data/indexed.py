"""The indexed data set: token sequences end to end in PREFIX.bin, their sizes and places in PREFIX.idx.

Invariant: what opens is whole. Header, sizes, byte pointers and document offsets are checked against each other and against
the length of both files before a token is read, and a writer's files appear under their names only when complete.

Layout of .idx, little endian (Megatron's mmap format): magic, version uint64, dtype code uint8, number of sequences n uint64,
number of document offsets d uint64, sizes int32[n], byte pointers int64[n], document offsets int64[d].
"""

import hashlib
import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron.durable import sync_folder
from megatron.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPES: dict[int, np.dtype] = {
    code: np.dtype(name).newbyteorder("<")
    for code, name in (
        (1, "uint8"),
        (2, "int8"),
        (3, "int16"),
        (4, "int32"),
        (5, "int64"),
        (8, "uint16"),
    )
}
_HEADER = struct.Struct("<9sQBQQ")
_AGAIN = "Preprocess the data again."
_CHUNK = 1 << 20  # items that a pass over the index holds in memory at once


def choose_dtype(vocab_size: int) -> np.dtype:
    """uint16 where every id below vocab_size fits (the limit is Megatron's 65500, not 65536), else int32."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


def get_bin_path(prefix: str | os.PathLike) -> Path:
    return Path(f"{os.fspath(prefix)}.bin")


def get_idx_path(prefix: str | os.PathLike) -> Path:
    return Path(f"{os.fspath(prefix)}.idx")


class IndexedDataset:
    """Read-only, memory-mapped view of PREFIX.bin and PREFIX.idx; opening costs one pass over the .idx and none over the .bin.

    Attributes: sizes int32[n], tokens of each sequence; pointers int64[n], bytes; document_offsets int64[d], the sequence at
    which each document begins, closed by n; tokens dtype[total], all tokens end to end.
    Raises DataError where a file is missing, cut off, foreign, or disagrees with the other one.
    """

    def __init__(self, prefix: str | os.PathLike) -> None:
        self.prefix = os.fspath(prefix)
        self._idx, self._bin = get_idx_path(prefix), get_bin_path(prefix)
        for path in (self._idx, self._bin):
            if not path.is_file():
                raise DataError(
                    f"{path} does not exist; a data set is given by its path without .bin and .idx, and needs both."
                )
        raw, self.dtype, count, offsets = self._read_header()
        at = _HEADER.size
        self.sizes: NDArray[np.int32] = np.frombuffer(raw, "<i4", count, at)
        self.pointers: NDArray[np.int64] = np.frombuffer(raw, "<i8", count, at + 4 * count)
        self.document_offsets: NDArray[np.int64] = np.frombuffer(
            raw, "<i8", offsets, at + 12 * count
        )
        total = self._check_index()
        self._check_bin(total)
        self.tokens: NDArray = (
            np.memmap(self._bin, self.dtype, "r").view(np.ndarray)
            if total
            else np.empty(0, self.dtype)
        )
        self._fingerprint: str | None = None

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> NDArray:
        return self.get(index)

    @property
    def num_documents(self) -> int:
        return len(self.document_offsets) - 1

    def get(self, index: int, offset: int = 0, length: int | None = None) -> NDArray:
        """Tokens [offset, offset + length) of a sequence, to its end by default: a view of the file, dtype[length]."""
        size = int(self.sizes[index])
        length = size - offset if length is None else length
        assert 0 <= offset <= offset + length <= size, (
            f"tokens {offset} + {length} of sequence {index}, which has {size}"
        )
        start = int(self.pointers[index]) // self.dtype.itemsize + offset
        return self.tokens[start : start + length]

    def compute_fingerprint(self) -> str:
        """32 hex digits that change with the data: all of the .idx, the size of the .bin and 4 KiB at 64 places of it.

        Neither path nor time of change take part, so that a data set may be copied or moved.
        """
        if self._fingerprint is None:
            digest = hashlib.blake2b(digest_size=16)
            with open(self._idx, "rb") as file:
                while block := file.read(_CHUNK):
                    digest.update(block)
            size = self._bin.stat().st_size
            digest.update(struct.pack("<Q", size))
            with open(self._bin, "rb") as file:
                for place in range(64):
                    file.seek(max(0, size - 4096) * place // 63)
                    digest.update(file.read(4096))
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def _read_header(self) -> tuple[NDArray[np.uint8], np.dtype, int, int]:
        found = self._idx.stat().st_size
        if found < _HEADER.size:
            raise DataError(
                f"{self._idx} has {found} bytes, less than the {_HEADER.size} of its header: it is cut off. {_AGAIN}"
            )
        raw = np.memmap(self._idx, np.uint8, "r").view(np.ndarray)
        magic, version, code, count, offsets = _HEADER.unpack(raw[: _HEADER.size].tobytes())
        if magic != MAGIC:
            raise DataError(
                f"{self._idx} begins with {magic!r}, not with {MAGIC!r}: it is not the index of an mmap data set."
            )
        if version != VERSION:
            raise DataError(
                f"{self._idx} has format version {version}; only version {VERSION} is known."
            )
        if code not in DTYPES:
            reason = (
                " (6 and 7 mean different types in different programs)" if code in (6, 7) else ""
            )
            known = ", ".join(f"{c} {d.name}" for c, d in DTYPES.items())
            raise DataError(
                f"{self._idx} has dtype code {code}{reason}; known are {known}. {_AGAIN}"
            )
        expected = _HEADER.size + 12 * count + 8 * offsets
        if found != expected:
            what = "cut off" if found < expected else "longer than it says"
            raise DataError(
                f"{self._idx} has {found} bytes, but {count} sequences and {offsets} document offsets need {expected}: "
                f"it is {what}. {_AGAIN}"
            )
        return raw, DTYPES[code], count, offsets

    def _check_index(self) -> int:
        """Sizes, pointers and document offsets agree; returns the number of tokens."""
        width, expected = self.dtype.itemsize, 0
        for start in range(0, len(self.sizes), _CHUNK):
            sizes = self.sizes[start : start + _CHUNK].astype(np.int64)
            if sizes.min() < 0:
                raise DataError(
                    f"{self._idx}: sequence {start + int(sizes.argmin())} has size {sizes.min()}. {_AGAIN}"
                )
            ends = expected + np.cumsum(sizes) * width
            begins = ends - sizes * width
            wrong = np.flatnonzero(begins != self.pointers[start : start + _CHUNK])
            if len(wrong):
                which = start + int(wrong[0])
                raise DataError(
                    f"{self._idx}: sequence {which} points to byte {self.pointers[which]}, but the sizes before it add up to "
                    f"{begins[wrong[0]]}. {_AGAIN}"
                )
            expected = int(ends[-1])
        ends = self.document_offsets
        ordered = (
            len(ends) > 0
            and ends[0] == 0
            and ends[-1] == len(self.sizes)
            and bool(np.all(ends[1:] >= ends[:-1]))
        )
        if not ordered:
            described = f"from {ends[0]} to {ends[-1]}" if len(ends) else "none"
            raise DataError(
                f"{self._idx}: document offsets ({described}) must rise from 0 to the number of sequences, "
                f"{len(self.sizes)}. {_AGAIN}"
            )
        return expected // width

    def _check_bin(self, total: int) -> None:
        found, expected = self._bin.stat().st_size, total * self.dtype.itemsize
        if found != expected:
            what = "cut off" if found < expected else "not the file that this index was made for"
            raise DataError(
                f"{self._bin} has {found} bytes, but the {total} {self.dtype.name} tokens of {self._idx.name} need "
                f"{expected}: it is {what}. "
                "Copy both files again, or preprocess the data again."
            )


class IndexedDatasetWriter:
    """Writes PREFIX.bin and PREFIX.idx; memory does not grow with the corpus. Use as a context manager, or call `finalize`.

    Until `finalize` everything is in PREFIX.*.partial; leaving the context by an exception removes those.
    """

    def __init__(self, prefix: str | os.PathLike, dtype: np.dtype | type | str) -> None:
        self.prefix = os.fspath(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        codes = [code for code, known in DTYPES.items() if known == self.dtype]
        if not codes:
            raise DataError(
                f"tokens cannot be stored as {self.dtype.name}; use one of {', '.join(d.name for d in DTYPES.values())}."
            )
        self._code = codes[0]
        self._limits = (int(np.iinfo(self.dtype).min), int(np.iinfo(self.dtype).max))
        self._partial = {
            part: Path(f"{self.prefix}.{part}.partial")
            for part in ("bin", "idx", "sizes", "documents")
        }
        self._files: dict[str, BinaryIO] = {
            part: _create(path) for part, path in self._partial.items()
        }
        self._files["documents"].write(struct.pack("<q", 0))
        self.num_sequences = 0
        self.num_documents = 0
        self.num_tokens = 0

    def __enter__(self) -> "IndexedDatasetWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.finalize()
        else:
            self.discard()

    def add_document(self, ids: ArrayLike) -> None:
        """Append one document of one sequence. Raises DataError where an id does not fit the dtype."""
        tokens = np.asarray(ids)
        self.add_documents(tokens, [len(tokens)])

    def add_documents(self, tokens: ArrayLike, sizes: Sequence[int] | NDArray) -> None:
        """Append documents of one sequence each: all their tokens end to end, and the size of each."""
        lengths = np.asarray(sizes, np.int64)
        first = self.num_sequences + 1
        self._append(np.asarray(tokens), lengths)
        self._add_offsets(np.arange(first, first + len(lengths), dtype=np.int64))

    def add_dataset(self, other: IndexedDataset) -> None:
        """Append all sequences and documents of another data set."""
        before = self.num_sequences
        for start in range(0, len(other), _CHUNK):
            sizes = other.sizes[start : start + _CHUNK].astype(np.int64)
            begin = int(other.pointers[start]) // other.dtype.itemsize
            end = begin + int(sizes.sum())
            for at in range(begin, end, 16 * _CHUNK):
                self._write_tokens(other.tokens[at : min(at + 16 * _CHUNK, end)])
            self._write_sizes(sizes)
        self._add_offsets(other.document_offsets[1:] + before)

    def finalize(self) -> None:
        """Write the index, bring everything to the disk and give both files their names, the .idx last."""
        if not self._files:
            return
        self._write_index()
        for part in ("bin", "idx"):
            self._files[part].flush()
            os.fsync(self._files[part].fileno())
        self._close()
        get_idx_path(self.prefix).unlink(
            missing_ok=True
        )  # an old index must never stand beside the new .bin
        os.replace(self._partial["bin"], get_bin_path(self.prefix))
        os.replace(self._partial["idx"], get_idx_path(self.prefix))
        self._partial["sizes"].unlink()
        self._partial["documents"].unlink()
        sync_folder(get_idx_path(self.prefix).parent)

    def discard(self) -> None:
        """Give up: remove what was written so far."""
        self._close()
        for path in self._partial.values():
            path.unlink(missing_ok=True)

    def _append(self, tokens: NDArray, sizes: NDArray[np.int64]) -> None:
        assert int(sizes.sum()) == tokens.size, (
            f"sizes add up to {int(sizes.sum())}, there are {tokens.size} tokens"
        )
        self._write_tokens(tokens)
        self._write_sizes(sizes)

    def _write_tokens(self, tokens: NDArray) -> None:
        if tokens.size and tokens.dtype != self.dtype:
            low, high = int(tokens.min()), int(tokens.max())
            if low < self._limits[0] or high > self._limits[1]:
                raise DataError(
                    f"token ids {low} to {high} do not fit {self.dtype.name}, the type that {self.prefix}.bin is written in."
                )
        self._files["bin"].write(tokens.astype(self.dtype, copy=False).tobytes())
        self.num_tokens += tokens.size

    def _write_sizes(self, sizes: NDArray[np.int64]) -> None:
        if len(sizes) and int(sizes.max()) > np.iinfo(np.int32).max:
            raise DataError(
                f"a sequence of {int(sizes.max())} tokens is longer than the format's limit of "
                f"{np.iinfo(np.int32).max}; cut the document."
            )
        self._files["sizes"].write(sizes.astype("<i4").tobytes())
        self.num_sequences += len(sizes)

    def _add_offsets(self, offsets: NDArray[np.int64]) -> None:
        self._files["documents"].write(offsets.astype("<i8").tobytes())
        self.num_documents += len(offsets)

    def _write_index(self) -> None:
        for part in ("sizes", "documents"):
            self._files[part].flush()
        out = self._files["idx"]
        out.write(
            _HEADER.pack(MAGIC, VERSION, self._code, self.num_sequences, self.num_documents + 1)
        )
        for block in _read_blocks(self._partial["sizes"]):
            out.write(block)
        place = 0
        for block in _read_blocks(self._partial["sizes"]):
            ends = (
                place + np.cumsum(np.frombuffer(block, "<i4"), dtype=np.int64) * self.dtype.itemsize
            )
            out.write(np.concatenate(([place], ends[:-1])).astype("<i8").tobytes())
            place = int(ends[-1])
        for block in _read_blocks(self._partial["documents"]):
            out.write(block)

    def _close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files = {}


def _create(path: Path) -> BinaryIO:
    """Open a fresh file. What stands there is removed: through a link, writing would empty another file."""
    path.unlink(missing_ok=True)
    return os.fdopen(
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666),
        "wb",
    )


def _read_blocks(path: Path) -> Iterable[bytes]:
    with open(path, "rb") as file:
        while block := file.read(4 * _CHUNK):
            yield block

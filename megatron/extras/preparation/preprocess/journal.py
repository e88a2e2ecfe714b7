"""The progress and the output of a preprocessing run on disk, so that another run can continue.

Invariant: what the journal records was on disk before the journal recorded it. The journal file is
replaced atomically, so it is never half written. A run with other inputs, tokenizer or flags never
continues it. The final names appear last, and only on complete files.
"""

import hashlib
import json
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from megatron.base.durable import replace_file, sync_folder, without_links
from megatron.base.errors import ConfigError, DataError
from megatron.base.file_lock import LockResult, try_lock
from megatron.base.outside_file import INDEX_BYTES, load_bytes, load_json, open_regular
from megatron.config.data import TokenizerConfig
from megatron.data.indexed import DTYPES, MAGIC, VERSION, get_bin_path, get_idx_path
from megatron.extras.preparation.preprocess.inputs import Position

_JOURNAL_VERSION = 1


@dataclass(frozen=True)
class PreprocessProgress:
    """How far a run has come.

    Attributes:
        position: Where the next block begins.
        outputs: For each key the number of tokens and of documents.
        lines: Lines that were read.
        bad_lines: Lines that gave no document.
        text_bytes: Size of the texts.
        disk_bytes: Bytes of the input files on disk.
        special_tokens: Special tokens that the texts spell.
        rejected: Encoders that gave wrong ids.
        complete: Whether everything is written, and only the final names are missing.
    """

    position: Position = field(default_factory=Position)
    outputs: dict[str, tuple[int, int]] = field(default_factory=dict)
    lines: int = 0
    bad_lines: int = 0
    text_bytes: int = 0
    disk_bytes: int = 0
    special_tokens: int = 0
    rejected: tuple[str, ...] = ()
    complete: bool = False

    @property
    def documents(self) -> int:
        """Number of documents of all keys."""
        return sum(documents for _, documents in self.outputs.values())

    def restart(self, rejected: str) -> "PreprocessProgress":
        """Return the progress of a run that starts again without another encoder."""
        return replace(PreprocessProgress(), rejected=(*self.rejected, rejected))


class Journal:
    """The file PREFIX.journal."""

    def __init__(self, prefix: str, fingerprint: dict[str, str]) -> None:
        """Use the journal of an output.

        Args:
            prefix: PREFIX.
            fingerprint: What must stay the same for a run to be continued.
        """
        self.path = Path(f"{prefix}.journal")
        self._fingerprint = fingerprint

    def load(self) -> PreprocessProgress | None:
        """Return the progress of an earlier run, or None if there is nothing to continue.

        If the earlier run has no documents, nothing can be lost. A command with other flags then
        starts from scratch, so that a wrong command can be corrected.

        Raises:
            ConfigError: the earlier run had other inputs or flags.
            DataError: the journal is damaged.
        """
        if not self.path.exists():
            return None
        try:
            found = load_json(self.path)
            # A key that is missing is a damaged journal, and is reported below.
            version = found["version"]
            fingerprint = dict(found["fingerprint"])
            progress = dict(found["progress"])
            # JSON has neither classes nor tuples, so both are restored here.
            position = Position(**progress.pop("position"))
            outputs = {
                key: (int(tokens), int(documents))
                for key, (tokens, documents) in progress.pop("outputs").items()
            }
            loaded = PreprocessProgress(
                position=position,
                outputs=outputs,
                **(progress | {"rejected": tuple(progress["rejected"])}),
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{self.path}, the journal of an interrupted run, cannot be read ({error}). Delete "
                "it to start from scratch."
            ) from error
        if version != _JOURNAL_VERSION or fingerprint != self._fingerprint:
            if not loaded.documents:
                return None
            changed = [
                name
                for name in self._fingerprint
                if fingerprint.get(name) != self._fingerprint[name]
            ] or ["version"]
            raise ConfigError(
                f"{self.path} belongs to an interrupted run with other {', '.join(changed)}; this "
                "one cannot continue it. Give the same inputs and flags, give another "
                "--output-prefix, or delete the journal to start from scratch."
            )
        return loaded

    def save(self, progress: PreprocessProgress) -> None:
        """Replace the journal with this progress."""
        content = {
            "version": _JOURNAL_VERSION,
            "fingerprint": self._fingerprint,
            "progress": asdict(progress),
        }
        # The rename is atomic. A reader finds the old journal or the new one.
        replace_file(self.path, json.dumps(content, indent=1))

    def delete(self) -> None:
        """Remove the journal after the outputs were published."""
        self.path.unlink(missing_ok=True)


def compute_run_fingerprint(
    paths: Sequence[str], keys: Sequence[str], append_eod: bool, tokenizer: TokenizerConfig
) -> dict[str, str]:
    """Return what must stay the same for a run to be continued, as names and hashes."""
    # Hashing the inputs themselves would read the complete corpus. Size and time of change must do.
    inputs = [
        (os.path.abspath(path), os.stat(path).st_size, os.stat(path).st_mtime_ns) for path in paths
    ]
    return {
        "--input": _digest(inputs),
        "--json-keys": " ".join(keys),
        "--append-eod": str(append_eod),
        "tokenizer": _digest(
            [tokenizer.tokenizer_type, *map(_digest_file, _list_tokenizer_files(tokenizer))]
        ),
        "--special-tokens-in-text": str(tokenizer.special_tokens_in_text),
    }


@contextmanager
def lock_output(prefix: str) -> Iterator[None]:
    """Hold PREFIX.lock inside the context. The folder is created if it does not exist.

    The kernel releases the lock when the process ends. A folder that was created and is empty at
    the end is removed, so that a run that failed at its first line leaves nothing.

    Raises:
        ConfigError: another run writes the same output, or the folder cannot be written.
    """
    path = Path(f"{prefix}.lock")
    created: list[Path] = []
    try:
        created += [folder for folder in path.parents if not folder.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        # A link in the place of the lock is refused: opening it would empty the file it leads to.
        file = open(path, "w", opener=without_links)  # noqa: SIM115 (closed below)
    except OSError as error:
        raise ConfigError(
            f"--output-prefix {prefix} cannot be written: {error}. Give a prefix in a folder that "
            "can be written."
        ) from error
    with file:
        if try_lock(file.fileno(), path) is not LockResult.HELD:
            raise ConfigError(
                f"--output-prefix {prefix}: another run is writing it ({path} is locked). Wait "
                "until that run ends."
            )
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            for folder in created:
                # It holds the output, unless the run failed.
                with suppress(OSError):
                    folder.rmdir()


def _list_tokenizer_files(tokenizer: TokenizerConfig) -> list[Path]:
    """Return the files that define a tokenizer."""
    if tokenizer.has_two_files:
        return [Path(file) for file in (tokenizer.vocab_file, tokenizer.merge_file) if file]
    # A Hugging Face tokenizer may have any files, so all of its folder are hashed.
    path = Path(tokenizer.tokenizer_name_or_path or "")
    if path.is_dir():
        return sorted(item for item in path.iterdir() if item.is_file())
    return [path]


def _digest_file(path: Path) -> Any:
    """Return the digest of a file, or its path if it is not a file."""
    if path.is_file():
        return hashlib.sha256(load_bytes(path, INDEX_BYTES)).hexdigest()
    return str(path)


def _digest(content: Any) -> str:
    """Return the digest of JSON values."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]


# Documents whose index entries are in memory at once.
_CHUNK = 1 << 20
_HEADER = struct.Struct("<9sQBQQ")


class ResumableWriter:
    """Appends documents to PREFIX.bin.partial and their sizes to PREFIX.sizes.partial.

    Several runs may write one data set. Each truncates the files to the length that the journal has
    recorded, and appends to them. Documents are one sequence each. The layout of both files is that
    of `megatron.data.indexed`.
    """

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

"""The input files of a corpus, on this machine or at a URL."""

import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from megatron.base.errors import ConfigError, DataError
from megatron.base.plain_text import has_secret, is_url, redact
from megatron.extras.preparation.preprocess.input_files import FOLDER_SUFFIXES, expand_inputs
from megatron.extras.samples.stream.remote import (
    BlockCache,
    RemoteDataFile,
    RemoteFolder,
    RemoteStatus,
)

_COPY_BYTES = 1 << 24
_STEM_BYTES = 100
"""Part of a file's name that is in the name of its shard. Names have at most 255 bytes."""


@dataclass(frozen=True)
class InputFile:
    """An input file as it was listed."""

    path: str
    """Absolute path, or URL."""
    size: int
    version: int
    """Time of the last change in ns. For a URL, see `RemoteStatus`."""

    def __str__(self) -> str:
        """Return the path without secrets of a URL."""
        return redact(self.path)

    @property
    def has_secret(self) -> bool:
        """Whether the path is a URL with a user, a password or a query."""
        return is_url(self.path) and has_secret(self.path)

    @property
    def label(self) -> str:
        """A name without secrets that no other input file has."""
        return f"{self} (shard {self.shard_name})" if self.has_secret else str(self)

    @property
    def facts(self) -> dict[str, Any]:
        """What identifies the file in the record of its shard, without secrets."""
        return {**asdict(self), "path": str(self)}

    @property
    def file_name(self) -> str:
        """The last part of the path."""
        return PurePosixPath(_cut_query(self.path)).name

    @property
    def shard_name(self) -> str:
        """Name of the shard. It depends on the path alone, so files may be added to a corpus."""
        # A path on this machine may have bytes that are not UTF-8.
        digest = hashlib.sha256(self.path.encode("utf-8", "surrogateescape")).hexdigest()
        stem = self.file_name.partition(".")[0].encode("utf-8", "replace")[:_STEM_BYTES]
        return f"{stem.decode('utf-8', 'ignore')}-{digest[:16]}"

    def fetch(self, folder: Path, log: Callable[[str], None]) -> str:
        """Return the path of the file on this machine. A file at a URL is copied into `folder`.

        Raises:
            DataError: The file cannot be read, or has changed since it was listed.
        """
        if not is_url(self.path):
            self.check_unchanged(log)
            return self.path
        remote = _open_folder(self.path, log)
        status = self._describe(remote)
        target = folder / self.file_name
        with RemoteDataFile(remote, status).open() as source, open(target, "wb") as copy:
            shutil.copyfileobj(source, copy, _COPY_BYTES)
        # The parts of the copy would otherwise be of two different contents.
        self._describe(remote)
        return str(target)

    def check_unchanged(self, log: Callable[[str], None]) -> None:
        """Check that a file on this machine is as it was listed.

        Raises:
            DataError: It has changed.
        """
        self._compare(list_inputs([self.path], log)[0])

    def _describe(self, remote: RemoteFolder) -> RemoteStatus:
        """Return the status of a file at a URL, and check that it is as it was listed."""
        status = remote.describe("")
        self._compare(InputFile(self.path, status.size, status.version))
        return status

    def _compare(self, found: "InputFile") -> None:
        if found != self:
            raise DataError(f"{self} has changed since it was listed. Run the same command again.")


def list_inputs(patterns: Sequence[str], log: Callable[[str], None]) -> list[InputFile]:
    """Return the input files of files, globs, folders and URLs, in the order of the output.

    The files of a folder, a glob or a URL are sorted by name.

    Raises:
        ConfigError: A pattern matches no file.
        DataError: A folder cannot be listed.
    """
    found = list[InputFile]()
    for pattern in patterns:
        if is_url(pattern):
            folder = _open_folder(pattern, log)
            # A signed URL of a file ends with its query and not with the suffix.
            if "?" in pattern and _cut_query(pattern).lower().endswith(FOLDER_SUFFIXES):
                files = [folder.describe("")]
            else:
                files = sorted(folder.list_files(FOLDER_SUFFIXES), key=lambda status: status.name)
            if not files:
                raise ConfigError(
                    f"--input {redact(pattern)} has no file with one of the suffixes "
                    f"{' '.join(FOLDER_SUFFIXES)}."
                )
            found += [InputFile(folder.get_url(s.name), s.size, s.version) for s in files]
            continue
        for path in expand_inputs([pattern], log):
            facts = os.stat(path)
            found.append(InputFile(os.path.abspath(path), facts.st_size, facts.st_mtime_ns))
    return found


def _open_folder(url: str, log: Callable[[str], None]) -> RemoteFolder:
    """Return the folder or file at a URL. Nothing is cached, because each file is read once."""
    return RemoteFolder(url, BlockCache(str(Path()), 0, log), log)


def _cut_query(path: str) -> str:
    """Return a URL without its query. A question mark may be part of a name on this machine."""
    return path.partition("?")[0] if is_url(path) else path

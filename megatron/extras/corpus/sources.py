"""The input files of a corpus, on this machine or at a URL."""

import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from megatron.base.errors import ConfigError, DataError
from megatron.config.url import is_url, redact
from megatron.extras.preprocess.input_files import FOLDER_SUFFIXES, expand_inputs
from megatron.extras.stream.block_cache import BlockCache
from megatron.extras.stream.remote import RemoteDataFile, RemoteFolder

_COPY_BYTES = 1 << 24


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
    def file_name(self) -> str:
        """The last part of the path."""
        return PurePosixPath(self.path.partition("?")[0]).name

    @property
    def shard_name(self) -> str:
        """Name of the shard. It depends on the path alone, so files may be added to a corpus."""
        digest = hashlib.sha256(self.path.encode()).hexdigest()
        return f"{self.file_name.partition('.')[0]}-{digest[:16]}"

    def fetch(self, folder: Path, log: Callable[[str], None]) -> str:
        """Return the path of the file on this machine. A file at a URL is copied into `folder`.

        Raises:
            DataError: The file cannot be read, or has changed since it was listed.
        """
        remote = _open_folder(self.path, log) if is_url(self.path) else None
        if remote is None:
            found = list_inputs([self.path], log)[0]
        else:
            status = remote.describe("")
            found = InputFile(self.path, status.size, status.version)
        if found != self:
            raise DataError(f"{self} has changed since it was listed. Run the same command again.")
        if remote is None:
            return self.path
        target = folder / self.file_name
        with RemoteDataFile(remote, status).open() as source, open(target, "wb") as copy:
            shutil.copyfileobj(source, copy, _COPY_BYTES)
        return str(target)


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

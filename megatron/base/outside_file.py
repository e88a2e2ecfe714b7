"""Opens and reads files that a command line, a folder or another file names.

Somebody else may have made such a file, or put something else in its place.

Invariant: only regular files are opened, links to them included. No call waits for a FIFO or acts
on a device. The functions `load_...` bound the bytes of a file, and `iterate_lines` those of a
line. JSON has a bound of levels. `.ci/check_reads.py` finds files that are opened in another way.
"""

import errno
import json
import os
import stat
from collections.abc import Iterator, ValuesView
from typing import Any, BinaryIO

POINTER_BYTES = 64 << 10
"""Limit of a file with a name, a number or a few fields, such as `latest`."""
SETTINGS_BYTES = 1 << 20
"""Limit of what people write, such as YAML, which is slow to parse."""
RECORD_BYTES = 64 << 20
"""Limit of what programs write about a run or a data set, such as a manifest, or of a line."""
INDEX_BYTES = 1 << 30
"""Limit of what grows with the data or the model, such as an index or a vocabulary."""
_LEVELS = 100
"""Levels of JSON that are read. Code that walks a deeper value could exceed Python's stack."""
_TOO_DEEP = f"it is nested too deeply, in more than {_LEVELS} levels"


def open_regular(
    path: str | os.PathLike[str], *, flags: int = 0, dir_fd: int | None = None, limit: int = 0
) -> BinaryIO:
    """Open a regular file for reading. The caller closes it.

    Args:
        path: The file. A link to a regular file is followed, unless `flags` has O_NOFOLLOW.
        flags: Flags of `os.open`, in addition to those for reading.
        dir_fd: Descriptor of the folder of a relative path.
        limit: The largest size in bytes. 0 means any.

    Raises:
        OSError: It cannot be read, is no regular file, or is larger. The error names the file.
    """
    follow = not flags & os.O_NOFOLLOW
    try:
        status = os.stat(path, dir_fd=dir_fd, follow_symlinks=follow)
    # The file that names this one has the character NUL in the name, or half a surrogate pair.
    except ValueError as error:
        raise OSError(errno.EINVAL, f"its name is not possible ({error})", repr(path)) from None
    # Opening a device can have effects, for example rewind a tape. So check before.
    _check(path, status, limit)
    # The name may be replaced after the check. O_NONBLOCK does not wait for the writer of a FIFO.
    flags |= os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    file = os.fdopen(os.open(path, flags, dir_fd=dir_fd), "rb")
    try:
        _check(path, os.fstat(file.fileno()), limit)
    except OSError:
        file.close()
        raise
    return file


def check_regular(path: str | os.PathLike[str], limit: int = 0) -> None:
    """Check what `open_regular` checks, before a library opens the file by its name."""
    open_regular(path, limit=limit).close()


def load_bytes(path: str | os.PathLike[str], limit: int = RECORD_BYTES) -> bytes:
    """Return the content of a file of at most `limit` bytes.

    Raises:
        OSError: As of `open_regular`.
    """
    with open_regular(path, limit=limit) as file:
        size = os.fstat(file.fileno()).st_size
        # This takes the memory of `size` bytes, and not of `limit`.
        content = file.read(size + 1)
        # The file has grown.
        if len(content) > size:
            content += file.read(limit - size)
    if len(content) > limit:
        raise _make_size_error(path, limit)
    return content


def load_text(
    path: str | os.PathLike[str], limit: int = RECORD_BYTES, *, decoding: str = "strict"
) -> str:
    r"""Return the text of a UTF-8 file, with each end of a line as \n.

    Raises:
        OSError: As of `open_regular`, or it is not UTF-8, unless `decoding` handles that.
    """
    try:
        text = load_bytes(path, limit).decode("utf-8", decoding)
    except UnicodeDecodeError as error:
        raise OSError(errno.EILSEQ, "it is not UTF-8 text", os.fspath(path)) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def load_json(path: str | os.PathLike[str], limit: int = RECORD_BYTES) -> Any:
    """Return the value in a JSON file.

    Raises:
        OSError: As of `open_regular`.
        ValueError: It is not JSON, or has too many levels.
    """
    return parse_json(load_bytes(path, limit))


def parse_json(text: str | bytes, **options: Any) -> Any:
    """Return the value of a JSON text. `options` are those of `json.loads`.

    Raises:
        ValueError: It is not JSON, or has too many levels.
    """
    try:
        value = json.loads(text, **options)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    level = [value]
    for _ in range(_LEVELS):
        values = [each.values() if isinstance(each, dict) else each for each in level]
        level = [each for items in values if isinstance(items, list | ValuesView) for each in items]
        # Most values have few levels, and many calls are for one line of a file.
        if not level:
            return value
    if any(isinstance(each, dict | list) for each in level):
        raise ValueError(_TOO_DEEP)
    return value


def iterate_lines(path: str | os.PathLike[str], begin: int = 0) -> Iterator[bytes]:
    """Yield the lines of a file with their ends, from byte `begin` on.

    Raises:
        OSError: As of `open_regular`, or a line has more than `RECORD_BYTES`.
    """
    with open_regular(path) as file:
        file.seek(begin)
        while line := file.readline(RECORD_BYTES + 1):
            if len(line) > RECORD_BYTES:
                raise _make_size_error(path, RECORD_BYTES, "a line of it")
            yield line


def _check(path: str | os.PathLike[str], status: os.stat_result, limit: int) -> None:
    """Raise an OSError for a folder, a FIFO, a device, a socket or a file above the limit."""
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
    if limit and status.st_size > limit:
        raise _make_size_error(path, limit)


def _make_size_error(path: str | os.PathLike[str], limit: int, what: str = "it") -> OSError:
    return OSError(errno.EFBIG, f"{what} has more than {limit:,} bytes", os.fspath(path))

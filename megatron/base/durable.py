"""Files that stay consistent after a kill or a power failure.

Invariant: a reader sees the complete old content or the complete new one. A rename within a folder
is atomic. It is durable when the folder has been synced.
"""

import contextlib
import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO


def replace_file(path: Path, text: str, confirm: Callable[[], None] = lambda: None) -> None:
    """Replace the text of a small file atomically and durably. See `replace_file_by`.

    Raises:
        OSError: If the file cannot be written.
    """
    # Always UTF-8, because digests are computed from these bytes. Text mode would use the encoding
    # of the locale.
    replace_file_by(path, lambda file: file.write(text.encode()), confirm)


def replace_file_by(
    path: Path, write: Callable[[BinaryIO], object], confirm: Callable[[], None] = lambda: None
) -> None:
    """Replace a file atomically and durably by what a function writes.

    Args:
        path: The file. It need not exist.
        write: Writes the new content to the open file that it gets.
        confirm: Called when the content is on the disk and only the rename is left. If it raises,
            the old content stays. A lease is checked here, so that little time is left to lose it.

    Raises:
        OSError: If the file cannot be written.
    """
    # A rename would replace a device such as /dev/null by a file.
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a file", str(path))
    temporary = path.with_name(path.name + ".new")
    try:
        # This syncs the bytes before the rename. In the other order, a power failure could leave an
        # empty file under the final name.
        _write_synced(temporary, write)
        confirm()
        os.replace(temporary, path)
    except BaseException:
        # Otherwise a partial file would stay, often on a full disk. If it cannot be removed, the
        # first error is still the one to report.
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def write_file(path: Path, text: str) -> None:
    """Write a small file into a folder that no reader uses yet.

    The bytes are synced. The file is durable when its folder has been synced as well.

    Raises:
        OSError: If it cannot be written, or is a symbolic link.
    """
    _write_synced(path, lambda file: file.write(text.encode()))


def _write_synced(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file and sync its bytes."""
    with open(path, "wb", opener=without_links) as file:
        write(file)
        # `fsync` syncs only what has left Python's buffer.
        file.flush()
        os.fsync(file.fileno())


def without_links(path: str, flags: int) -> int:
    """Open a file for `open(..., opener=without_links)`, and refuse a symbolic link.

    Writing through a link would overwrite a file somewhere else. Writing into a FIFO would wait for
    a reader.

    Args:
        path: The file.
        flags: Flags of `os.open`.

    Raises:
        OSError: If the file is a symbolic link or a FIFO without a reader, or cannot be opened.
    """
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)


def append_lines(path: Path, lines: Sequence[str]) -> None:
    """Append lines to a file in one write, and sync it.

    If a kill or a full disk has cut off the last line, the new lines start after a line break.

    Args:
        path: The file. It is made if it does not exist.
        lines: The lines without line breaks.

    Raises:
        OSError: If it cannot be written.
    """
    if not lines:
        return
    # Mode "a" writes at the end even if another process appends, and "+" allows reading the last
    # byte.
    with open(path, "ab+") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        torn = end > 0 and file.read(1) != b"\n"
        file.write((("\n" if torn else "") + "\n".join(lines) + "\n").encode())
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Sync the entries of a folder to the disk. This makes a rename or a new file durable.

    Raises:
        OSError: If the folder cannot be synced.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

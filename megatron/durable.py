"""Files that survive a cut: whole or not at all. A rename within a folder is atomic, and durable once the folder is synced."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path


def replace_file(path: Path, text: str, confirm: Callable[[], None] = lambda: None) -> None:
    """Replace a small file so that a reader sees the old or the new text, whole, whenever this is cut off.

    `confirm` is asked at the last instant, when the text is on the disk and only the rename is left; where it raises, the old text
    stays.
    """
    temporary = path.with_name(path.name + ".new")
    write_file(temporary, text)
    try:
        confirm()
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    os.replace(temporary, path)
    sync_folder(path.parent)


def write_file(path: Path, text: str) -> None:
    """Write a small file whose folder nobody looks into yet; durable once the folder is synced, too."""
    with open(path, "wb", opener=without_links) as file:
        file.write(text.encode())  # UTF-8 in any locale: digests are of these bytes
        file.flush()
        os.fsync(file.fileno())


def without_links(path: str, flags: int) -> int:
    """Open a file as `open(..., opener=without_links)` asks, but refuse a link: it would have another file overwritten."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def append_lines(path: Path, lines: Sequence[str]) -> None:
    """Append in one write; a last line that was cut off, by a kill or a full disk, does not swallow the first of these.

    Raises:
        OSError: it cannot be written.
    """
    if not lines:
        return
    with open(path, "ab+") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        torn = end > 0 and file.read(1) != b"\n"
        file.write((("\n" if torn else "") + "\n".join(lines) + "\n").encode())
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Bring a folder's entries (a rename, a new file) to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

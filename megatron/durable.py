"""Files that survive a cut: whole or not at all. A rename within a folder is atomic, and durable once the folder is synced."""

import os
from collections.abc import Callable
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
    with open(path, "wb") as file:
        file.write(text.encode())  # UTF-8 in any locale: digests are of these bytes
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Bring a folder's entries (a rename, a new file) to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

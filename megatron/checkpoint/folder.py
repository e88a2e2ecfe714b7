"""The names inside a checkpoint folder, and its pointers, which operators may edit by hand.

`latest` (as DeepSpeed writes it) decides; `latest_checkpointed_iteration.txt` (as Megatron writes it) is used where it is missing.
Only who holds the folder's lease renames or removes anything in it; readers look, and take what they find.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint.manifest import MANIFEST
from megatron.durable import replace_file, sync_folder
from megatron.errors import CheckpointError

LATEST = "latest"
LATEST_ITERATION = "latest_checkpointed_iteration.txt"
UNFINISHED = ".unfinished"
REPLACED = ".replaced"
DELETING = ".deleting"
DAMAGED = ".damaged"
STARTED_MARKER = "no_checkpoint_yet"
"""A run has begun here and has saved nothing so far: what it left may be begun over, by the same command."""


def step_folder(root: Path, iteration: int) -> Path:
    return root / f"global_step{iteration}"


def parse_iteration(name: str) -> int | None:
    """300 for `global_step300`, None for any other name."""
    match = re.fullmatch(r"global_step(0|[1-9]\d{0,14})", name, re.ASCII)
    return int(match[1]) if match else None


def find_stored_folder(root: Path, iteration: int) -> Path:
    """Where a checkpoint is: its folder, or the one it was moved to while a save of the same iteration replaces it."""
    folder = step_folder(root, iteration)
    replaced = _add_suffix(folder, REPLACED)
    return replaced if not folder.exists() and (replaced / MANIFEST).is_file() else folder


def list_saved_iterations(root: Path) -> list[int]:
    """Iterations with a finished checkpoint, in order."""
    if not root.is_dir():
        return []
    named = (
        (parse_iteration(entry.name.removesuffix(REPLACED)), entry) for entry in root.iterdir()
    )
    return sorted(
        {
            iteration
            for iteration, entry in named
            if iteration is not None and (entry / MANIFEST).is_file()
        }
    )


def point_to(root: Path, iteration: int, confirm: Callable[[], None] = lambda: None) -> None:
    """Move the pointers, as the last act of a save; `confirm` is asked before each."""
    replace_file(root / LATEST_ITERATION, str(iteration), confirm)
    replace_file(root / LATEST, f"global_step{iteration}", confirm)


@dataclass(frozen=True)
class Pointer:
    iteration: int
    contradiction: str | None
    """What the other pointer says, where the two differ: somebody edited one of them."""


def read_pointer(root: Path) -> Pointer | None:
    """What the pointers name; None where there are none.

    Raises:
        CheckpointError: one holds something else, or names a checkpoint that is not there.
    """
    latest, number = root / LATEST, root / LATEST_ITERATION
    by_number = _read_pointer_text(number)
    number_iteration = None if by_number is None else parse_iteration(f"global_step{by_number}")
    text = _read_pointer_text(latest)
    pointer, iteration = (
        (latest, parse_iteration(text)) if text is not None else (number, number_iteration)
    )
    if text is None and by_number is None:
        return None
    there = ", ".join(f"global_step{i}" for i in list_saved_iterations(root)) or "none"
    if iteration is None:
        held = text if text is not None else by_number
        raise CheckpointError(
            f"{pointer} holds {held!r}, which names no checkpoint; write one of those that are there: {there}"
        )
    if not find_stored_folder(root, iteration).is_dir():
        raise CheckpointError(
            f"{pointer} names global_step{iteration}, which is not a finished checkpoint; there are: {there}"
        )
    contradiction = None
    if text is not None and by_number is not None and number_iteration != iteration:
        contradiction = f"{LATEST} says global_step{iteration}, {LATEST_ITERATION} {by_number!r}; {LATEST} decides"
    return Pointer(iteration, contradiction)


def _read_pointer_text(path: Path) -> str | None:
    if path.is_dir():
        raise CheckpointError(
            f"{path} is a folder; it must be a file that names a checkpoint: remove it"
        )
    return path.read_text(errors="replace").strip() if path.is_file() else None


def read_pointed_iteration(root: Path) -> int | None:
    """The iteration that the pointers name; None where there is no pointer.

    Raises:
        CheckpointError: as `read_pointer`.
    """
    pointer = read_pointer(root)
    return None if pointer is None else pointer.iteration


def locate_checkpoint(path: Path, iteration: int | None = None) -> tuple[Path, int]:
    """(run's folder, iteration) for a run's folder or one of its checkpoints; without `iteration` the one pointed to.

    Raises:
        CheckpointError: neither.
    """
    named = parse_iteration(path.name)
    if named is not None and iteration is None:
        return path.parent, named
    iteration = read_pointed_iteration(path) if iteration is None else iteration
    if iteration is None:
        there = ", ".join(f"global_step{i}" for i in list_saved_iterations(path)) or "none"
        raise CheckpointError(
            f"{path} has no pointer {LATEST} to a checkpoint; name an iteration; there are: {there}"
        )
    return path, iteration


def has_no_checkpoint_yet(root: Path) -> bool:
    """Whether what an earlier run left is all that there ever was: it ended before its first checkpoint."""
    return (root / STARTED_MARKER).is_file()


def mark_started(root: Path) -> None:
    """See `STARTED_MARKER`."""
    replace_file(root / STARTED_MARKER, "a run has begun here and not saved a checkpoint yet\n")


def unmark_begun(root: Path) -> None:
    """Remove the mark, once the pointers name a checkpoint.

    Raises:
        OSError: it could not be removed.
    """
    (root / STARTED_MARKER).unlink(missing_ok=True)


def list_run_leftovers(root: Path) -> list[str]:
    """What an earlier run left in a folder that has no pointer."""
    if not root.is_dir():
        return []
    names = (entry.name for entry in root.iterdir())
    return sorted(
        name for name in names if name.startswith("global_step") or name == "metrics.jsonl"
    )


# For the holder of the lease


def put_in_place(fresh: Path, final: Path) -> None:
    """Give a finished folder its name. One of the same name stays beside it until the pointers are
    safe: see `remove_interrupted_leftovers`.

    Raises:
        OSError: after it, `final` may hold the new folder, or what it held before.
    """
    replaced = _add_suffix(final, REPLACED)
    replaces = final.exists()
    if replaces:
        remove(replaced)
        os.rename(final, replaced)
    try:
        os.rename(fresh, final)
    except OSError:
        if replaces:
            with contextlib.suppress(
                OSError
            ):  # readers find it under either name, and `remove_interrupted_leftovers` renames it later
                os.rename(replaced, final)
        raise
    sync_folder(final.parent)


def remove_interrupted_leftovers(root: Path) -> list[str]:
    """Remove what a save, a replacement or a deletion that was cut off has left; no pointer names any of it.

    Returns what went wrong: it takes room, and harms nothing else.
    """
    troubles: list[str] = []
    try:
        entries = sorted(root.iterdir())
    except OSError as error:
        return [f"{root} could not be cleared up: {error}"]
    for entry in entries:
        if not entry.name.startswith("global_step"):
            continue
        try:
            if entry.name.endswith((UNFINISHED, DELETING)):
                remove(entry)
            elif entry.name.endswith(REPLACED):
                final = entry.with_name(entry.name.removesuffix(REPLACED))
                if (final / MANIFEST).is_file():
                    remove(entry)
                else:  # cut off between the two renames
                    os.rename(entry, final)
                    sync_folder(root)
        except OSError as error:
            troubles.append(f"{entry} could not be removed: {error}; remove it by hand")
    return troubles


def remove(folder: Path) -> None:
    """A folder that may or may not be there; it loses its name first, so that no half of it can be taken for a checkpoint.

    Of a symbolic link the link only: what it leads to is somebody's own arrangement.
    """
    if folder.is_symlink() or not folder.is_dir():
        folder.unlink(missing_ok=True)
        return
    if not folder.name.endswith(
        (UNFINISHED, DELETING)
    ):  # `remove_interrupted_leftovers` gives what is left of a replaced one its name back
        going, number = _add_suffix(folder, DELETING), 1
        while going.exists():  # of an earlier one that could not be removed
            number += 1
            going = _add_suffix(folder, f".{number}{DELETING}")
        os.rename(folder, going)
        folder = going
    shutil.rmtree(folder)


def set_aside(root: Path, iteration: int) -> Path:
    """Rename a damaged checkpoint, so that nothing takes it for a good one; returns its new name. No pointer may name it."""
    folder = find_stored_folder(root, iteration)
    aside, number = _add_suffix(step_folder(root, iteration), DAMAGED), 1
    while aside.exists():
        number += 1
        aside = _add_suffix(step_folder(root, iteration), f"{DAMAGED}{number}")
    os.rename(folder, aside)
    sync_folder(root)
    return aside


def _add_suffix(folder: Path, suffix: str) -> Path:
    return folder.with_name(folder.name + suffix)

"""The names inside a checkpoint folder, and its pointers, which operators may edit by hand.

The pointers are two files that name the checkpoint to start from. `latest`, as in DeepSpeed, has
priority. If it does not exist, `latest_checkpointed_iteration.txt` is used, as in Megatron-LM.

Invariant: only the holder of the folder's lease renames or removes anything in it. Readers change
nothing and must accept any state that an interrupted writer left.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron.base.durable import replace_file, sync_folder
from megatron.base.errors import CheckpointError
from megatron.base.outside_file import POINTER_BYTES, load_text
from megatron.checkpoint.manifest import MANIFEST

LATEST = "latest"
LATEST_ITERATION = "latest_checkpointed_iteration.txt"
UNFINISHED = ".unfinished"
REPLACED = ".replaced"
DELETING = ".deleting"
DAMAGED = ".damaged"
_FOREIGN_FILES = {
    "DeepSpeed": ("*mp_rank_*_model_states.pt", "*/*mp_rank_*_model_states.pt"),
    "Megatron-LM": ("iter_*/mp_rank_*", "iter_*/.metadata", "release/mp_rank_*"),
    "Hugging Face": (
        "model*.safetensors",
        "pytorch_model*.bin",
        "checkpoint-*/model*.safetensors",
        "checkpoint-*/pytorch_model*.bin",
    ),
    "PyTorch": ("*.distcp", "*/*.distcp"),
}
"""Program -> files that show that it wrote a checkpoint, as patterns."""
STARTED_MARKER = "no_checkpoint_yet"
"""File that exists while a run has started in the folder and has no checkpoint yet.

Nothing can have been lost then, so the same command may start from scratch again.
"""


def step_folder(root: Path, iteration: int) -> Path:
    """Return the final name of the checkpoint of an iteration."""
    return root / f"global_step{iteration}"


def parse_iteration(name: str) -> int | None:
    """Return 300 for `global_step300`, and None for any other name."""
    # No leading zeros and at most 15 digits. So each iteration has one name, and `re.ASCII` keeps
    # out other scripts' digits, which `int` would accept.
    match = re.fullmatch(r"global_step(0|[1-9]\d{0,14})", name, re.ASCII)
    if match:
        return int(match[1])
    return None


def find_stored_folder(root: Path, iteration: int) -> Path:
    """Return the folder of a checkpoint, whether it exists or not.

    This is the `.replaced` folder if a save of the same iteration was interrupted between its two
    renames.
    """
    folder = step_folder(root, iteration)
    replaced = _add_suffix(folder, REPLACED)
    if not folder.exists() and (replaced / MANIFEST).is_file():
        return replaced
    return folder


def list_saved_iterations(root: Path) -> list[int]:
    """Return the iterations that have a finished checkpoint, in ascending order."""
    if not root.is_dir():
        return []
    named = (
        (parse_iteration(entry.name.removesuffix(REPLACED)), entry) for entry in root.iterdir()
    )
    # The manifest is written last, so a folder without one is not finished. A set, because an
    # iteration can be on the disk twice, once with the suffix `.replaced`.
    return sorted(
        {
            iteration
            for iteration, entry in named
            if iteration is not None and (entry / MANIFEST).is_file()
        }
    )


def point_to(root: Path, iteration: int, confirm: Callable[[], None] = lambda: None) -> None:
    """Move the pointers to a checkpoint.

    Args:
        root: Folder of the checkpoints.
        iteration: Iteration of a checkpoint that has its final name.
        confirm: Called before each of the two renames. If it raises, the pointer stays.

    Raises:
        OSError: If a pointer cannot be written.
    """
    # `latest` last, because it decides.
    replace_file(root / LATEST_ITERATION, str(iteration), confirm)
    replace_file(root / LATEST, f"global_step{iteration}", confirm)


@dataclass(frozen=True)
class Pointer:
    """The checkpoint that the pointer files name."""

    iteration: int
    contradiction: str | None
    """A note if the two files differ, because somebody edited one of them. Otherwise None."""


def read_pointer(root: Path) -> Pointer | None:
    """Return the checkpoint that the pointers name, or None if there is no pointer.

    Raises:
        CheckpointError: If the deciding pointer holds anything else, or names a checkpoint that
            does not exist.
    """
    by_number = read_pointer_text(root / LATEST_ITERATION)
    text = read_pointer_text(root / LATEST)
    if text is None and by_number is None:
        return None
    return _parse_pointers(root, text, by_number)


def _parse_pointers(root: Path, text: str | None, by_number: str | None) -> Pointer:
    """Return what the texts of the two files name. `text` decides if it is not None."""
    number_iteration = None
    if by_number is not None:
        number_iteration = parse_iteration(f"global_step{by_number}")
    if text is not None:
        pointer = root / LATEST
        held: str | None = text
        iteration = parse_iteration(text)
    else:
        pointer = root / LATEST_ITERATION
        held = by_number
        iteration = number_iteration
    saved = ", ".join(f"global_step{i}" for i in list_saved_iterations(root)) or "none"
    if iteration is None:
        raise CheckpointError(
            f"{pointer} holds {held!r}, which names no checkpoint; write the name of one into it; "
            f"there are: {saved}"
        )
    if not find_stored_folder(root, iteration).is_dir():
        raise CheckpointError(
            f"{pointer} names global_step{iteration}, which is not a finished checkpoint; "
            f"there are: {saved}"
        )
    contradiction = None
    if text is not None and by_number is not None and number_iteration != iteration:
        contradiction = (
            f"{LATEST} names global_step{iteration}, and {LATEST_ITERATION} holds {by_number!r}; "
            f"{LATEST} is used"
        )
    return Pointer(iteration, contradiction)


def read_pointer_text(path: Path) -> str | None:
    """Return the text of a pointer file, or None if the file does not exist.

    Raises:
        CheckpointError: It cannot be read.
    """
    try:
        return load_text(path, POINTER_BYTES, decoding="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}; it must be a file that names a checkpoint"
        ) from error


def read_pointed_iteration(root: Path) -> int | None:
    """Return the iteration that the pointers name, or None if there is no pointer.

    Raises:
        CheckpointError: See `read_pointer`.
    """
    pointer = read_pointer(root)
    if pointer is None:
        return None
    return pointer.iteration


def find_foreign_maker(root: Path) -> str | None:
    """Return the program whose checkpoints a folder holds, or None if none is recognised.

    Only names are looked at, because such files are often pickles.
    """
    for maker, patterns in _FOREIGN_FILES.items():
        if any(any(root.glob(pattern)) for pattern in patterns):
            return maker
    return None


def has_no_checkpoint_yet(root: Path) -> bool:
    """Return whether earlier runs in this folder ended before their first checkpoint."""
    return (root / STARTED_MARKER).is_file()


def mark_started(root: Path) -> None:
    """Write the file that `STARTED_MARKER` names, when a run starts.

    Raises:
        OSError: If it cannot be written.
    """
    replace_file(
        root / STARTED_MARKER, "a run has started here and has not saved a checkpoint yet\n"
    )


def remove_started_marker(root: Path) -> None:
    """Remove the file that `STARTED_MARKER` names, after the pointers name a checkpoint.

    Raises:
        OSError: If it could not be removed.
    """
    (root / STARTED_MARKER).unlink(missing_ok=True)


def list_run_leftovers(root: Path) -> list[str]:
    """Return the names of all files that show that a run was in this folder."""
    if not root.is_dir():
        return []
    names = (entry.name for entry in root.iterdir())
    return sorted(
        name for name in names if name.startswith("global_step") or name == "metrics.jsonl"
    )


# Only the holder of the lease may call the functions below. They rename and remove.


def put_in_place(fresh: Path, final: Path) -> None:
    """Rename a finished folder to its final name.

    A folder that had this name is kept with the suffix `.replaced` until the pointers are safe.
    `remove_interrupted_leftovers` then removes it.

    Raises:
        OSError: If a rename fails. `final` may then hold the new folder or the earlier one.
    """
    replaced = _add_suffix(final, REPLACED)
    replaces = final.exists()
    if replaces:
        # A rename cannot replace a folder that is not empty, so the earlier one moves away first.
        # `find_stored_folder` finds it between the two renames.
        remove(replaced)
        os.rename(final, replaced)
    try:
        os.rename(fresh, final)
    except OSError:
        if replaces:
            # If this fails as well, readers still find the checkpoint under its second name, and
            # `remove_interrupted_leftovers` renames it later.
            with contextlib.suppress(OSError):
                os.rename(replaced, final)
        raise
    # Otherwise a power failure could bring back the state before the rename, while the pointers
    # already name the new folder.
    sync_folder(final.parent)


def remove_interrupted_leftovers(root: Path) -> list[str]:
    """Remove what an interrupted save, replacement or deletion left. No pointer names any of it.

    Returns:
        One line for each failure. A failure only leaves disk space in use.
    """
    troubles: list[str] = []
    try:
        entries = sorted(root.iterdir())
    except OSError as error:
        return [f"{root} could not be cleaned up: {error}"]
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
                else:
                    # The save was interrupted between its two renames, so this is the checkpoint.
                    os.rename(entry, final)
                    sync_folder(root)
        except OSError as error:
            troubles.append(f"{entry} could not be removed: {error}; remove it by hand")
    return troubles


def remove(folder: Path) -> None:
    """Remove a folder, if it exists.

    The folder is renamed first, so that a partly removed one is never taken for a checkpoint. If
    the path is a symbolic link, only the link is removed, because somebody made it on purpose.

    Raises:
        OSError: If it cannot be renamed or removed completely.
    """
    if folder.is_symlink() or not folder.is_dir():
        folder.unlink(missing_ok=True)
        return
    # A `.replaced` folder is renamed as well. Otherwise `remove_interrupted_leftovers` could give
    # the rest of it the name of a checkpoint.
    if not folder.name.endswith((UNFINISHED, DELETING)):
        going = _add_suffix(folder, DELETING)
        number = 1
        # The name may be taken by a folder that could not be removed earlier.
        while going.exists():
            number += 1
            going = _add_suffix(folder, f".{number}{DELETING}")
        os.rename(folder, going)
        folder = going
    shutil.rmtree(folder)


def set_aside(root: Path, iteration: int) -> Path:
    """Rename a damaged checkpoint, so that no run starts from it. Return its new path.

    It is not removed, so that people can examine it. No pointer may name it when this is called.

    Raises:
        OSError: If it cannot be renamed.
    """
    folder = find_stored_folder(root, iteration)
    aside = _add_suffix(step_folder(root, iteration), DAMAGED)
    number = 1
    # A checkpoint of this iteration may have been damaged before.
    while aside.exists():
        number += 1
        aside = _add_suffix(step_folder(root, iteration), f"{DAMAGED}{number}")
    os.rename(folder, aside)
    sync_folder(root)
    return aside


def _add_suffix(folder: Path, suffix: str) -> Path:
    return folder.with_name(folder.name + suffix)

"""The names inside a checkpoint folder, and its pointers, which operators may edit by hand.

`latest` (as DeepSpeed writes it) decides; `latest_checkpointed_iteration.txt` (as Megatron writes it) is used where it is missing.
"""

import contextlib
import re
from pathlib import Path

from megatron.durable import replace_file
from megatron.errors import CheckpointError

LATEST = "latest"
LATEST_ITERATION = "latest_checkpointed_iteration.txt"
UNFINISHED = ".unfinished"
REPLACED = ".replaced"


def step_folder(root: Path, iteration: int) -> Path:
    return root / f"global_step{iteration}"


def iteration_of(name: str) -> int | None:
    """300 for `global_step300`, None for any other name."""
    match = re.fullmatch(r"global_step(\d+)", name)
    return int(match[1]) if match else None


def saved_iterations(root: Path) -> list[int]:
    """Iterations with a finished checkpoint, in order."""
    if not root.is_dir():
        return []
    found = (iteration_of(entry.name) for entry in root.iterdir() if (entry / "manifest.json").is_file())
    return sorted(iteration for iteration in found if iteration is not None)


def point_to(root: Path, iteration: int) -> None:
    """Move the pointers, as the last act of a save."""
    replace_file(root / LATEST_ITERATION, str(iteration))
    replace_file(root / LATEST, f"global_step{iteration}")


def pointed_iteration(root: Path) -> int | None:
    """The iteration that the pointers name; None where there is no pointer.

    Raises:
        CheckpointError: a pointer holds something else, or names a checkpoint that is not there.
    """
    latest, number = root / LATEST, root / LATEST_ITERATION
    if latest.is_file():
        pointer, text = latest, latest.read_text(errors="replace").strip()
        iteration = iteration_of(text)
    elif number.is_file():
        pointer, text = number, number.read_text(errors="replace").strip()
        iteration = int(text) if text.isascii() and text.isdigit() else None
    else:
        return None
    there = ", ".join(f"global_step{i}" for i in saved_iterations(root)) or "none"
    if iteration is None:
        raise CheckpointError(f"{pointer} holds {text!r}, which names no checkpoint; write one of those that are there: {there}")
    _undo_half_a_replacement(step_folder(root, iteration))
    if not (step_folder(root, iteration) / "manifest.json").is_file():
        raise CheckpointError(f"{pointer} names global_step{iteration}, which is not a finished checkpoint; there are: {there}")
    return iteration


def _undo_half_a_replacement(folder: Path) -> None:
    """A save that replaced a checkpoint of the same iteration was cut off between its two renames: bring the old one back."""
    replaced = folder.with_name(folder.name + REPLACED)
    if not folder.exists() and (replaced / "manifest.json").is_file():
        with contextlib.suppress(FileNotFoundError):  # another rank was faster
            replaced.rename(folder)


def traces(root: Path) -> list[str]:
    """What an earlier run left in a folder that has no pointer."""
    if not root.is_dir():
        return []
    names = (entry.name for entry in root.iterdir())
    return sorted(name for name in names if name.startswith("global_step") or name == "metrics.jsonl")

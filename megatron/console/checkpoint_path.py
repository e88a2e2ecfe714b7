"""The checkpoint that a tool's path means."""

from pathlib import Path

from megatron.base.errors import CheckpointError
from megatron.checkpoint.folder import (
    LATEST,
    find_foreign_maker,
    list_saved_iterations,
    parse_iteration,
    read_pointed_iteration,
)


def locate_checkpoint(path: Path, iteration: int | None = None) -> tuple[Path, int]:
    """Return (folder of the run, iteration) for a path that a user gave.

    Args:
        path: Folder of a run, or of one of its checkpoints.
        iteration: The iteration to choose. Default: the one that `path` or the pointers name.

    Raises:
        CheckpointError: If there is no such folder, neither the path nor a pointer names an
            iteration, or the folder has no checkpoint of `iteration`.
    """
    if not path.is_dir():
        what = "is not a folder" if path.exists() else "does not exist"
        raise CheckpointError(
            f"{path} {what}; give the folder that a run saved to, or a checkpoint in it"
        )
    named = parse_iteration(path.name)
    if named is not None and iteration is None:
        return path.parent, named
    iterations = list_saved_iterations(path)
    saved = ", ".join(f"global_step{i}" for i in iterations) or "none"
    if iteration is not None:
        if iteration not in iterations:
            raise CheckpointError(
                f"{path} has no such checkpoint, global_step{iteration}; there are: {saved}"
            )
        return path, iteration
    iteration = read_pointed_iteration(path)
    if iteration is None:
        maker = None if iterations else find_foreign_maker(path)
        if maker is not None:
            raise CheckpointError(
                f"{path} holds a checkpoint of {maker}; convert it first with "
                "tools/convert_checkpoint.py (docs/huggingface.md, docs/migrating.md)"
            )
        if not iterations:
            raise CheckpointError(
                f"{path} has no pointer {LATEST} and no checkpoint, because no run has saved here "
                "yet; give the --save folder of a run that has saved"
            )
        raise CheckpointError(
            f"{path} has no pointer {LATEST} to a checkpoint; give an iteration; there are: {saved}"
        )
    return path, iteration

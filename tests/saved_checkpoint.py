"""Saves a checkpoint from the process of a test."""

from collections.abc import Sequence
from pathlib import Path

from megatron.checkpoint.contents import CheckpointContents
from megatron.checkpoint.folder import step_folder
from megatron.checkpoint.save import Saver
from megatron.config.checkpoint import CheckpointConfig
from megatron.parallel.shard import TensorShard


def save_checkpoint(
    root: Path, contents: CheckpointContents, shards: Sequence[TensorShard]
) -> Path:
    """Save a checkpoint from one process, and return its folder when it is safe.

    Args:
        root: Folder of the checkpoints. It is made if it does not exist.
        contents: The contents of the checkpoint, except its tensors.
        shards: All tensors.

    Raises:
        CheckpointError: If it could not be written.
    """
    root.mkdir(parents=True, exist_ok=True)
    saver = Saver(root, CheckpointConfig(max_save_failures=1))
    saver.begin(contents, shards)
    saver.complete()
    return step_folder(root, contents.iteration)

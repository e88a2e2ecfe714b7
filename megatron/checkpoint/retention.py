"""Which checkpoints a run may remove."""

from collections.abc import Sequence

from megatron.config.checkpoint import CheckpointConfig


def superfluous(saved: Sequence[int], iteration: int, config: CheckpointConfig) -> list[int]:
    """Of `saved` those to remove, now that `iteration` is safe.

    Kept are the newest --keep-latest-checkpoints, multiples of --keep-every, those of --save-at, and all that are later than
    `iteration`: they belong to a course that the run was rolled back from, so they neither count as newest nor are ours to remove.
    """
    if config.keep_latest_checkpoints is None:
        return []
    behind = sorted(old for old in saved if old <= iteration)[: -config.keep_latest_checkpoints]
    return [old for old in behind if old not in config.save_at and not (config.keep_every and old % config.keep_every == 0)]

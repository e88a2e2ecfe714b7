"""The course of a run: the checkpoints that it came through, each known by its manifest's digest.

After a rollback, or a fresh start over an old run, a folder holds checkpoints of several courses, and their iterations do not say
which is which: a later course passes an earlier one. What a run may fall back to, count, or remove is its own ancestors only.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint.digest import digest_of_text
from megatron.checkpoint.folder import stored_folder
from megatron.checkpoint.manifest import Manifest, is_count, read_manifest
from megatron.config.checkpoint import CheckpointConfig
from megatron.durable import replace_file
from megatron.errors import CheckpointError, DamagedError

COURSE = "course.json"
"""A copy of what the newest checkpoint's manifest says of its ancestors, in case that manifest is damaged."""


@dataclass(frozen=True)
class Ancestor:
    iteration: int
    digest: str
    """Of its manifest."""
    keep: bool
    """For ever: it was saved for --save-at or --keep-every, if only at the end of a jump over their iteration."""


Course = tuple[Ancestor, ...]
"""In the order in which they were saved."""


def course_of(manifest: Manifest) -> Course:
    """That led to a checkpoint, itself last."""
    return (*(Ancestor(*entry) for entry in manifest.course), Ancestor(manifest.iteration, manifest.digest, manifest.keep))


def write_course(root: Path, manifest: Manifest, confirm: Callable[[], None]) -> None:
    """Beside the pointers, before they move; `confirm` is asked before it changes."""
    record = {"iteration": manifest.iteration, "course": manifest.course}
    replace_file(root / COURSE, json.dumps({**record, "digest": digest_of_text(json.dumps(record))}) + "\n", confirm)


def ancestors(root: Path, iteration: int) -> Course | None:
    """Of a checkpoint, without itself; None where nothing whole tells."""
    try:
        return course_of(read_manifest(stored_folder(root, iteration)))[:-1]
    except DamagedError:
        pass
    try:
        record = json.loads((root / COURSE).read_text())
        digest = record.pop("digest")
        if digest != digest_of_text(json.dumps(record)) or record["iteration"] != iteration:
            return None
        course = tuple(Ancestor(*entry) for entry in record["course"])
        return course if all(is_count(ancestor.iteration) for ancestor in course) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def is_there(root: Path, ancestor: Ancestor) -> bool:
    """And is no other course's checkpoint of the same iteration. What cannot be read is not: it is left alone."""
    try:
        return read_manifest(stored_folder(root, ancestor.iteration)).digest == ancestor.digest
    except (CheckpointError, OSError):
        return False


def superfluous(course: Sequence[Ancestor], config: CheckpointConfig) -> list[Ancestor]:
    """Which of a course may go, now that its last one is safe.

    Kept are the newest --keep-latest-checkpoints, and for ever those that were saved for --save-at or --keep-every, or have such an
    iteration.
    """
    if config.keep_latest_checkpoints is None:
        return []

    def keeps(ancestor: Ancestor) -> bool:
        multiple = config.keep_every is not None and ancestor.iteration % config.keep_every == 0
        return ancestor.keep or multiple or ancestor.iteration in config.save_at

    return [ancestor for ancestor in course[: -config.keep_latest_checkpoints] if not keeps(ancestor)]

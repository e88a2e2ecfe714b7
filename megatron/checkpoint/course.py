"""The course of a run: the checkpoints that it came through, each known by its manifest's digest.

After a rollback, or a fresh start over an old run, a folder holds checkpoints of several courses, and their iterations do not say
which is which: a later course passes an earlier one. What a run may fall back to, count, or remove is its own ancestors only.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from megatron.checkpoint.digest import digest_of_text
from megatron.checkpoint.folder import stored_folder
from megatron.checkpoint.manifest import APPLIED_STEPS, Manifest, is_count, read_manifest
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
    applied: int | None = None
    """Steps that the run had applied by then. None: checkpoints of format 2 do not say."""


Course = tuple[Ancestor, ...]
"""In the order in which they were saved."""


def course_of(manifest: Manifest) -> Course:
    """That led to a checkpoint, itself last."""
    return (*(Ancestor(*entry) for entry in manifest.course), as_ancestor(manifest))


def as_ancestor(manifest: Manifest) -> Ancestor:
    """Return the entry by which later checkpoints know this one."""
    return Ancestor(
        manifest.iteration, manifest.digest, manifest.keep, manifest.state.get(APPLIED_STEPS)
    )


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
    """Return whether the folder of its iteration holds this checkpoint, and not one of another
    course.

    A checkpoint with a damaged manifest is not there: it is left alone.

    Raises:
        OSError: its manifest cannot be read.
    """
    try:
        return read_manifest(stored_folder(root, ancestor.iteration)).digest == ancestor.digest
    except DamagedError:
        return False
    except CheckpointError as error:
        if isinstance(error.__cause__, OSError):
            raise OSError(str(error)) from error
        return False


def counting(course: Sequence[Ancestor], there: Callable[[Ancestor], bool]) -> Iterator[Ancestor]:
    """Yield the checkpoints that count for --keep-latest-checkpoints, the newest first.

    A checkpoint counts if it is there and a step was applied since the one before it. Else its
    weights equal those of the one before it, and a run whose every step is dropped would push out
    all older weights. `there` is called only as far as needed.
    """
    present = filter(there, reversed(course))
    newer = next(present, None)
    while newer is not None:
        older = next(present, None)
        if older is None or newer.applied is None or newer.applied != (older.applied or 0):
            yield newer
        newer = older


def superfluous(
    course: Sequence[Ancestor],
    config: CheckpointConfig,
    there: Callable[[Ancestor], bool] = lambda ancestor: True,
) -> list[Ancestor]:
    """Return which of a course may go, now that its last one is safe.

    Kept are the last one, the newest --keep-latest-checkpoints that count, and for ever those that
    were saved for --save-at or --keep-every, or have such an iteration. `there`: whether a
    checkpoint is on the disk.
    """
    if config.keep_latest_checkpoints is None:
        return []

    def keeps(ancestor: Ancestor) -> bool:
        multiple = config.keep_every is not None and ancestor.iteration % config.keep_every == 0
        return ancestor.keep or multiple or ancestor.iteration in config.save_at

    newest = {*course[-1:], *islice(counting(course, there), config.keep_latest_checkpoints)}
    return [ancestor for ancestor in course if ancestor not in newest and not keeps(ancestor)]

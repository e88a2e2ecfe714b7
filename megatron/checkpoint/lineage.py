"""The lineage of a run: the checkpoints that it came through, each known by its manifest's digest.

After a rollback, or a fresh start over an old run, a folder holds checkpoints of several lineages, and their iterations do not say
which is which: a later lineage passes an earlier one. What a run may fall back to, count, or remove is its own ancestors only.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from megatron.checkpoint.digest import digest_of_text
from megatron.checkpoint.folder import find_stored_folder
from megatron.checkpoint.manifest import APPLIED_STEPS, Manifest, is_count, read_manifest
from megatron.config.checkpoint import CheckpointConfig
from megatron.durable import replace_file
from megatron.errors import CheckpointError, DamagedError

LINEAGE_FILE = "course.json"
"""A copy of what the newest checkpoint's manifest says of its ancestors, in case that manifest is damaged."""


@dataclass(frozen=True)
class LineageEntry:
    iteration: int
    digest: str
    """Of its manifest."""
    keep: bool
    """For ever: it was saved for --save-at or --keep-every, if only at the end of a jump over their iteration."""
    applied: int | None = None
    """Steps that the run had applied by then. None: checkpoints of format 2 do not say."""


Lineage = tuple[LineageEntry, ...]
"""In the order in which they were saved."""


def read_lineage(manifest: Manifest) -> Lineage:
    """That led to a checkpoint, itself last."""
    return (*(LineageEntry(*entry) for entry in manifest.course), make_entry(manifest))


def make_entry(manifest: Manifest) -> LineageEntry:
    """Return the entry by which later checkpoints know this one."""
    return LineageEntry(
        manifest.iteration, manifest.digest, manifest.keep, manifest.state.get(APPLIED_STEPS)
    )


def write_lineage(root: Path, manifest: Manifest, confirm: Callable[[], None]) -> None:
    """Beside the pointers, before they move; `confirm` is asked before it changes."""
    record = {"iteration": manifest.iteration, "course": manifest.course}
    replace_file(
        root / LINEAGE_FILE,
        json.dumps({**record, "digest": digest_of_text(json.dumps(record))}) + "\n",
        confirm,
    )


def find_lineage_before(root: Path, iteration: int) -> Lineage | None:
    """Of a checkpoint, without itself; None where nothing whole tells."""
    try:
        return read_lineage(read_manifest(find_stored_folder(root, iteration)))[:-1]
    except DamagedError:
        pass
    try:
        record = json.loads((root / LINEAGE_FILE).read_text())
        digest = record.pop("digest")
        if digest != digest_of_text(json.dumps(record)) or record["iteration"] != iteration:
            return None
        lineage = tuple(LineageEntry(*entry) for entry in record["course"])
        return lineage if all(is_count(entry.iteration) for entry in lineage) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def is_entry_on_disk(root: Path, entry: LineageEntry) -> bool:
    """Return whether the folder of its iteration holds this checkpoint, and not one of another
    course.

    A checkpoint with a damaged manifest is not there: it is left alone.

    Raises:
        OSError: its manifest cannot be read.
    """
    try:
        return read_manifest(find_stored_folder(root, entry.iteration)).digest == entry.digest
    except DamagedError:
        return False
    except CheckpointError as error:
        if isinstance(error.__cause__, OSError):
            raise OSError(str(error)) from error
        return False


def iterate_counting(
    lineage: Sequence[LineageEntry], there: Callable[[LineageEntry], bool]
) -> Iterator[LineageEntry]:
    """Yield the checkpoints that count for --keep-latest-checkpoints, the newest first.

    A checkpoint counts if it is there and a step was applied since the one before it. Else its
    weights equal those of the one before it, and a run whose every step is dropped would push out
    all older weights. `there` is called only as far as needed.
    """
    present = filter(there, reversed(lineage))
    newer = next(present, None)
    while newer is not None:
        older = next(present, None)
        if older is None or newer.applied is None or newer.applied != (older.applied or 0):
            yield newer
        newer = older


def select_removable_entries(
    lineage: Sequence[LineageEntry],
    config: CheckpointConfig,
    there: Callable[[LineageEntry], bool] = lambda entry: True,
) -> list[LineageEntry]:
    """Return which of a lineage may go, now that its last one is safe.

    Kept are the last one, the newest --keep-latest-checkpoints that count, and for ever those that
    were saved for --save-at or --keep-every, or have such an iteration. `there`: whether a
    checkpoint is on the disk.
    """
    if config.keep_latest_checkpoints is None:
        return []

    def is_kept(entry: LineageEntry) -> bool:
        multiple = config.keep_every is not None and entry.iteration % config.keep_every == 0
        return entry.keep or multiple or entry.iteration in config.save_at

    newest = {
        *lineage[-1:],
        *islice(iterate_counting(lineage, there), config.keep_latest_checkpoints),
    }
    return [entry for entry in lineage if entry not in newest and not is_kept(entry)]

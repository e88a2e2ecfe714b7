"""The lineage of a run: the checkpoints that it came through, each identified by a digest.

After a rollback, or a new run over an old one, a folder holds checkpoints of several lineages.
Their iterations do not show to which lineage they belong. The digests of their manifests do.

Invariant: a run falls back to, counts and removes only checkpoints of its own lineage.

On the disk, the lineage is called "course".
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from megatron.base.durable import replace_file
from megatron.base.errors import CheckpointError, DamagedError
from megatron.base.outside_file import load_json
from megatron.checkpoint.digest import digest_of_text
from megatron.checkpoint.folder import find_stored_folder
from megatron.checkpoint.manifest import APPLIED_STEPS, Manifest, is_count, read_manifest
from megatron.config.checkpoint import CheckpointConfig

LINEAGE_FILE = "course.json"
"""File with a copy of the newest checkpoint's lineage, in case its manifest is damaged."""
UNPUBLISHED_FILE = "unpublished.json"
"""File that lists checkpoints which may have their final name before the pointers name them.

It exists only while a checkpoint is published, and after an interruption of that.
"""


@dataclass(frozen=True)
class LineageEntry:
    """One checkpoint of a lineage."""

    iteration: int
    digest: str
    """Digest of its manifest."""
    keep: bool
    """Retention never removes it, because it was saved for --save-at or --keep-every.

    Its iteration may be a later one, if the run jumped over the one that was asked for.
    """
    applied: int | None = None
    """Number of steps that the run had applied. None for checkpoints of format 2."""


Lineage = tuple[LineageEntry, ...]
"""Checkpoints in the order in which they were saved."""


def read_lineage(manifest: Manifest) -> Lineage:
    """Return the lineage of a checkpoint, with the checkpoint itself last."""
    # The `*` accepts entries of three values, as format 2 has them.
    return (*(LineageEntry(*entry) for entry in manifest.course), make_entry(manifest))


def make_entry(manifest: Manifest) -> LineageEntry:
    """Return the entry by which later checkpoints know this one."""
    return LineageEntry(
        manifest.iteration, manifest.digest, manifest.keep, manifest.state.get(APPLIED_STEPS)
    )


def write_lineage(root: Path, manifest: Manifest, confirm: Callable[[], None]) -> None:
    """Write the lineage of a checkpoint, without itself, to the file next to the pointers.

    Args:
        root: Folder of the checkpoints.
        manifest: The manifest of the checkpoint.
        confirm: Called before the file is replaced. If it raises, the file stays.

    Raises:
        OSError: If it cannot be written.
    """
    # The iteration shows the reader for which checkpoint the copy is, after a kill between this
    # write and the pointers.
    record = {"iteration": manifest.iteration, "course": manifest.course}
    replace_file(
        root / LINEAGE_FILE,
        json.dumps({**record, "digest": digest_of_text(json.dumps(record))}) + "\n",
        confirm,
    )


def find_lineage_before(root: Path, iteration: int) -> Lineage | None:
    """Return the lineage of a checkpoint, without itself.

    None if its manifest is damaged and `LINEAGE_FILE` has no valid copy for it.
    """
    try:
        manifest = read_manifest(find_stored_folder(root, iteration))
        # A folder that was renamed by hand holds another checkpoint, with another lineage.
        if manifest.iteration == iteration:
            return read_lineage(manifest)[:-1]
    except DamagedError:
        pass
    try:
        record = load_json(root / LINEAGE_FILE)
        digest = record.pop("digest")
        if digest != digest_of_text(json.dumps(record)) or record["iteration"] != iteration:
            return None
        lineage = tuple(LineageEntry(*entry) for entry in record["course"])
        if all(is_count(entry.iteration) for entry in lineage):
            return lineage
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def record_unpublished(root: Path, manifest: Manifest, confirm: Callable[[], None]) -> None:
    """Add a checkpoint to `UNPUBLISHED_FILE`. See `write_lineage` for arguments and errors."""
    records = _read_unpublished(root)
    records.append([manifest.iteration, manifest.digest])
    replace_file(root / UNPUBLISHED_FILE, json.dumps(records) + "\n", confirm)


def _read_unpublished(root: Path) -> list[Any]:
    """Return [iteration, digest] of each checkpoint in `UNPUBLISHED_FILE`, the newest last."""
    try:
        records = load_json(root / UNPUBLISHED_FILE)
        return [[i, digest] for i, digest in records if is_count(i)]
    except (OSError, ValueError, TypeError):
        return []


def find_run_lineage(root: Path, manifest: Manifest) -> Lineage:
    """Return the lineage of a run that continues in its folder.

    The run may have saved checkpoints after the one that it starts from, without moving the
    pointers to them, because the disk was full. They belong to the run. A checkpoint that the
    pointers did name, and that was rolled back, does not.

    Args:
        root: Folder of the checkpoints.
        manifest: The manifest of the checkpoint that the run starts from.
    """
    own = read_lineage(manifest)
    unpublished = _read_unpublished(root)
    for iteration, digest in reversed(unpublished):
        try:
            found = read_manifest(find_stored_folder(root, iteration))
        except CheckpointError:
            continue
        lineage = read_lineage(found)
        if found.digest != digest or own[-1] not in lineage:
            continue
        later = lineage[lineage.index(own[-1]) + 1 :]
        if all([entry.iteration, entry.digest] in unpublished for entry in later):
            return (*own, *later)
    return own


def is_entry_on_disk(root: Path, entry: LineageEntry) -> bool:
    """Return whether the folder of its iteration holds this checkpoint and not another one.

    False if the manifest is damaged. Such a checkpoint is neither counted nor removed.

    Raises:
        OSError: If the manifest cannot be read.
    """
    try:
        return read_manifest(find_stored_folder(root, entry.iteration)).digest == entry.digest
    except DamagedError:
        return False
    except CheckpointError as error:
        # An I/O error does not show that the checkpoint is another one. Callers must distinguish
        # the two, because they remove checkpoints.
        if isinstance(error.__cause__, OSError):
            raise OSError(str(error)) from error
        return False


def iterate_counting(
    lineage: Sequence[LineageEntry], is_on_disk: Callable[[LineageEntry], bool]
) -> Iterator[LineageEntry]:
    """Yield the checkpoints that count for --keep-latest-checkpoints, the newest first.

    A checkpoint counts if it exists and a step was applied since the checkpoint before it. If no
    step was applied, both have the same weights. A run that drops every step would otherwise push
    out all older weights.

    Args:
        lineage: Checkpoints in the order in which they were saved.
        is_on_disk: Return whether a checkpoint is on the disk. It reads a manifest, so it is called
            only as often as needed.
    """
    present = filter(is_on_disk, reversed(lineage))
    newer = next(present, None)
    while newer is not None:
        older = next(present, None)
        if older is None or newer.applied is None or newer.applied != (older.applied or 0):
            yield newer
        newer = older


def select_removable_entries(
    lineage: Sequence[LineageEntry],
    config: CheckpointConfig,
    is_on_disk: Callable[[LineageEntry], bool] = lambda entry: True,
    rollback_distance: int | None = None,
) -> list[LineageEntry]:
    """Return the checkpoints of a lineage that may be removed when the last one is safe.

    The last one and the newest --keep-latest-checkpoints that count are kept. Those that were saved
    for --save-at or --keep-every, or have such an iteration, are kept permanently.

    Args:
        lineage: Checkpoints in the order in which they were saved.
        config: The flags of retention.
        is_on_disk: Return whether a checkpoint is on the disk.
        rollback_distance: Iterations by which a rollback or a rehearsal may go back from the last
            one. The newest checkpoint that is at least as old is kept too, and the one that follows
            it.
    """
    if config.keep_latest_checkpoints is None:
        return []

    def is_kept(entry: LineageEntry) -> bool:
        multiple = config.keep_every is not None and entry.iteration % config.keep_every == 0
        return entry.keep or multiple or entry.iteration in config.save_at

    # The last one stays even if it does not count, because the pointers name it.
    newest = {
        *lineage[-1:],
        *islice(iterate_counting(lineage, is_on_disk), config.keep_latest_checkpoints),
    }
    if rollback_distance is not None:
        newest |= _find_for_rollback(lineage, rollback_distance, is_on_disk)
    return [entry for entry in lineage if entry not in newest and not is_kept(entry)]


def _find_for_rollback(
    lineage: Sequence[LineageEntry], distance: int, is_on_disk: Callable[[LineageEntry], bool]
) -> set[LineageEntry]:
    """Return the newest checkpoint that is old enough for a rollback, and the one that follows it.

    The second one will be old enough later. If all those between the first and the last one were
    removed, the first one would have to stay permanently.
    """
    oldest = lineage[-1].iteration - distance
    before = [entry for entry in lineage if entry.iteration <= oldest]
    later = [entry for entry in lineage if entry.iteration > oldest]
    return {
        *islice(filter(is_on_disk, reversed(before)), 1),
        *islice(filter(is_on_disk, later), 1),
    }

"""Publishing of a checkpoint, and removal of what it makes superfluous. Only rank 0 does this.

A written checkpoint gets its final name, and then the pointers move to it.

Invariants:

- A kill at any time leaves the pointers at one complete checkpoint, the old or the new one.
- Nothing is renamed or removed unless this run still holds the lease of the folder.
- Nothing is removed before the pointers name the new checkpoint.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from megatron.base.outside_file import POINTER_BYTES, load_text
from megatron.base.plain_text import is_url
from megatron.checkpoint.folder import (
    LATEST,
    point_to,
    put_in_place,
    remove,
    remove_interrupted_leftovers,
    remove_started_marker,
    step_folder,
)
from megatron.checkpoint.lease import Lease
from megatron.checkpoint.lineage import (
    UNPUBLISHED_FILE,
    Lineage,
    LineageEntry,
    is_entry_on_disk,
    make_entry,
    read_lineage,
    record_unpublished,
    select_removable_entries,
    write_lineage,
)
from megatron.checkpoint.manifest import Manifest
from megatron.checkpoint.store import NO_STORE, Store
from megatron.config.checkpoint import CheckpointConfig


@dataclass(frozen=True)
class Published:
    """A saved checkpoint that the pointers name."""

    iteration: int
    lineage: Lineage
    """Checkpoints that the run came through, this one last, without those that were removed."""
    lines: list[str]
    """Messages and warnings to log."""


class Publisher:
    """Publishes the checkpoints of a run."""

    def __init__(
        self,
        root: Path,
        config: CheckpointConfig,
        lease: Lease | None,
        in_use: Callable[[], Collection[int]] = tuple,
        rollback_distance: int | None = None,
        store: Store = NO_STORE,
    ) -> None:
        """Create a publisher without an unfinished attempt.

        Args:
            root: Folder of the run's checkpoints.
            config: The flags of retention.
            lease: The lease of `root`. None in tests and tools.
            in_use: Returns the iterations of checkpoints that must stay for now. It is called from
                any thread.
            rollback_distance: See `select_removable_entries`.
            store: Where checkpoints are kept besides `root`. Default: nowhere.
        """
        self._store = store
        self._root = root
        self._rollback_distance = rollback_distance
        self._config = config
        self._lease = lease
        self._in_use = in_use
        self._interrupted: Manifest | None = None
        """The checkpoint that `publish` could not finish because of an I/O error.

        It may have its final name already, and the pointers do not name it. `publish_earlier` takes
        it up again.
        """

    def confirm_lease(self) -> None:
        """Raise CheckpointError if another run has taken the folder over.

        Call it before each rename or removal. The process may have been suspended since the last
        call, and another run may own the folder now.
        """
        if self._lease is not None:
            self._lease.confirm()

    def publish(self, manifest: Manifest, fresh: Path | None) -> Published:
        """Rename the folder, move the pointers to it and clean up.

        After an I/O error, the state of the disk decides. The save has succeeded if `latest` names
        the checkpoint. Otherwise it has failed. In that case a checkpoint that has its final name
        stays, and the next attempt moves the pointers to it first.

        Args:
            manifest: The manifest of the checkpoint.
            fresh: The folder to rename. None if it has its final name already.

        Raises:
            OSError: If `latest` does not name the checkpoint.
            CheckpointError: If another run took the folder over.
        """
        # Set before the first rename, so that no error below can lose track of the checkpoint.
        self._interrupted = manifest
        problem = self._move_into_place(manifest, fresh)
        self._interrupted = None
        lineage = read_lineage(manifest)
        if problem is None:
            return self._clean_up(manifest.iteration, lineage)
        warning = (
            f"warning: global_step{manifest.iteration} is saved in spite of an error: {problem}; "
            "nothing is removed before the next save"
        )
        return Published(manifest.iteration, lineage, [warning])

    def _move_into_place(self, manifest: Manifest, fresh: Path | None) -> str | None:
        """Rename the folder and move the pointers to it. See `publish` for arguments and errors.

        Returns:
            The text of an I/O error in spite of which `latest` names the checkpoint, or None.
        """
        iteration = manifest.iteration
        # The order of the writes below matters. The pointers move last. Otherwise a kill could
        # leave them at a folder without its final name, or without the copy of its lineage.
        try:
            if fresh is not None:
                # Otherwise a start after an interruption below could not distinguish the checkpoint
                # from one that was rolled back, and retention would never remove it.
                record_unpublished(self._root, manifest, self.confirm_lease)
                put_in_place(fresh, step_folder(self._root, iteration))
            write_lineage(self._root, manifest, self.confirm_lease)
            point_to(self._root, iteration, self.confirm_lease)
            self.confirm_lease()
            self._store.publish()
        except OSError as error:
            if not self._is_in_place(manifest):
                raise
            if not self._is_pointed_to(iteration):
                by_hand = f". You can also write global_step{iteration} there by hand"
                where = str(self._root / LATEST)
                if is_url(save := self._config.save or ""):
                    # Nobody can write the pointer of an address with an editor.
                    by_hand, where = "", save
                raise OSError(
                    f"{error}; global_step{iteration} is complete and stays, but {where} does not "
                    f"name it. The next attempt first moves the pointers to it{by_hand}"
                ) from error
            return str(error)
        return None

    def publish_earlier(self) -> Published | None:
        """Move the pointers to the checkpoint that an earlier attempt left without them.

        Returns:
            The checkpoint, or None if no attempt left one.

        Raises:
            OSError: See `publish`.
            CheckpointError: See `publish`.
        """
        manifest = self._interrupted
        if manifest is None:
            return None
        self.confirm_lease()
        # An operator may have removed or replaced it meanwhile.
        if not is_entry_on_disk(self._root, make_entry(manifest)):
            self._interrupted = None
            return None
        return self.publish(manifest, None)

    def _is_in_place(self, manifest: Manifest) -> bool:
        """Return whether the checkpoint has its final name. False if that cannot be read."""
        try:
            return is_entry_on_disk(self._root, make_entry(manifest))
        except OSError:
            return False

    def _is_pointed_to(self, iteration: int) -> bool:
        """Return whether `latest` names the iteration. False if that cannot be read."""
        if not self._store.has_published(iteration):
            return False
        try:
            text = load_text(self._root / LATEST, POINTER_BYTES, decoding="replace")
        except OSError:
            return False
        return text.strip() == f"global_step{iteration}"

    def _clean_up(self, iteration: int, lineage: Lineage) -> Published:
        """Remove what the checkpoint of `iteration`, the last of `lineage`, makes superfluous.

        A failure here does not harm the checkpoint and does not stop the next removal. The next
        save tries again.
        """
        messages = [f"warning: {trouble}" for trouble in remove_interrupted_leftovers(self._root)]
        try:
            remove_started_marker(self._root)
            (self._root / UNPUBLISHED_FILE).unlink(missing_ok=True)
        except OSError as error:
            messages.append(f"warning: {error}; the next save tries again to remove it")
        removed: list[LineageEntry] = []
        gone: list[int] = []

        def is_on_disk(entry: LineageEntry) -> bool:
            try:
                return entry == lineage[-1] or is_entry_on_disk(self._root, entry)
            except OSError:
                # A checkpoint that cannot be read may be lost. It does not count, so one more of
                # the others stays.
                return False

        in_use = self._in_use()
        for entry in select_removable_entries(
            lineage, self._config, is_on_disk, self._rollback_distance
        ):
            # It stays in the lineage, so a later save removes it.
            if entry.iteration in in_use:
                continue
            try:
                # The folder may hold a checkpoint of another lineage, which is not ours to remove.
                if is_entry_on_disk(self._root, entry):
                    remove(step_folder(self._root, entry.iteration))
                    gone.append(entry.iteration)
                    messages.append(
                        f"removed by --keep-latest-checkpoints: global_step{entry.iteration}"
                    )
                removed.append(entry)
            except OSError as error:
                messages.append(
                    f"warning: global_step{entry.iteration} could not be removed: {error}"
                )
        messages += self._store.clean_up(gone)
        remaining = tuple(entry for entry in lineage if entry not in removed)
        return Published(iteration, remaining, messages)

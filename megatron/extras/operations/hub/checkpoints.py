"""Push of finished checkpoints to the Hub, one branch for each checkpoint.

The branch `global_step300` holds that checkpoint and no logs.

Invariant: a branch gets all files of a checkpoint in one commit, and the manifest is one of them.
So a branch that has a manifest is complete, no matter when an earlier push was interrupted.
"""

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from megatron.base.errors import CheckpointError, OperationsError
from megatron.base.plain_text import format_bytes
from megatron.checkpoint.folder import find_stored_folder, list_saved_iterations
from megatron.checkpoint.manifest import MANIFEST, Manifest, check_size, read_manifest
from megatron.extras.operations.hub.client import (
    Hub,
    HubUnavailableError,
    UnknownRepositoryError,
)
from megatron.extras.operations.hub.inside import OutsideError, open_inside, real_name
from megatron.extras.operations.hub.push import IN_MEMORY_BYTES, SyncRequest
from megatron.extras.operations.hub.queue import SyncState, digest

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd


@dataclass(frozen=True)
class FinishedCheckpoint:
    """A checkpoint that is complete on the disk."""

    branch: str
    folder: Path
    manifest: Manifest


def push_checkpoints(request: SyncRequest, run: Path, every: int) -> list[str]:
    """Push the finished checkpoints of a run, the oldest first.

    Args:
        request: Arguments of the sync. Its state lists the checkpoints that are on the Hub.
        run: The run's `--save` folder.
        every: Push the checkpoints whose iteration is a multiple of this.

    Returns:
        One line for each checkpoint that was left out.

    Raises:
        OperationsError: The folder does not exist, or the Hub refuses.
        HubUnavailableError: The Hub did not answer in time. Run the push again.
    """
    if not run.is_dir():
        raise OperationsError(
            f"--checkpoints {run} is not a folder; give the run's --save folder, which has "
            "global_step... folders"
        )
    state = request.read_state()
    left_out: list[str] = []
    branches: Collection[str] | None = None
    for iteration in list_saved_iterations(run):
        if iteration % every:
            continue
        try:
            checkpoint = _open_finished(run, iteration)
            # One listing serves all checkpoints. It is made late, so that a run without finished
            # checkpoints needs no Hub.
            if branches is None:
                branches = _list_branches(request, state)
            # The state alone is not enough. Somebody may have deleted the branch on the Hub.
            if (
                checkpoint.branch in branches
                and state.checkpoints.get(checkpoint.branch) == checkpoint.manifest.digest
            ):
                continue
            if request.dry_run:
                request.log(
                    f"would send {checkpoint.branch} ({checkpoint.manifest.bytes} bytes) to its "
                    "own branch, unless that branch has it already"
                )
                continue
            _push(checkpoint, state, request)
            # Written after each checkpoint. A push of terabytes may be interrupted before the next.
            state.write(request.state)
        # One bad checkpoint does not keep the others from the Hub.
        except (CheckpointError, FileNotFoundError, OutsideError) as error:
            # The text of an OSError without a number has "[Errno 0]".
            reason = str(error).removeprefix("[Errno 0] ")
            left_out.append(f"global_step{iteration} is left out: {reason}")
            request.warn(left_out[-1])
    return left_out


def _open_finished(run: Path, iteration: int) -> FinishedCheckpoint:
    """Check that a checkpoint is complete and may be published.

    Its folder may be reached through links that stay in `run`.

    Raises:
        CheckpointError: The checkpoint is damaged.
        OutsideError: The checkpoint, or one of its files, is outside of its folder.
        FileNotFoundError: The checkpoint is being deleted.
    """
    folder = find_stored_folder(run, iteration)
    # Called only for its error. A link to a folder outside of the run is not published.
    real_name(run, folder.name)
    manifest = read_manifest(folder)
    for name, facts in manifest.files.items():
        check_size(folder, name, facts["bytes"])
        # All files are opened once before a branch is made. Otherwise a file that cannot be read
        # would leave a branch without a checkpoint on the Hub.
        open_inside(folder, name).close()
    return FinishedCheckpoint(f"global_step{iteration}", folder, manifest)


def _list_branches(request: SyncRequest, state: SyncState) -> Collection[str]:
    """Return the names of the branches, and wait while the Hub is unavailable.

    A missing repository is created if the request allows it. A dry run that cannot ask the Hub
    returns the branches that earlier syncs have sent.
    """
    created = False
    while True:
        try:
            return request.hub.list_branches().keys()
        except (UnknownRepositoryError, HubUnavailableError) as trouble:
            if created and isinstance(trouble, UnknownRepositoryError):
                raise
            if request.goes_on_without_hub(trouble):
                request.warn(
                    f"{trouble}; the checkpoints are compared with the state of the last sync, and "
                    "not with the Hub"
                )
                return state.checkpoints.keys()
            if isinstance(trouble, HubUnavailableError):
                request.patience.wait(trouble)
                continue
            # A dry run with patterns has reported it already.
            if request.create and request.dry_run and request.patterns:
                return ()
            if not request.create_missing_repository(trouble):
                return ()
            created = True


def _push(checkpoint: FinishedCheckpoint, state: SyncState, request: SyncRequest) -> None:
    """Push one checkpoint to its branch, unless the branch holds it already.

    Raises:
        CheckpointError: The checkpoint was replaced during the push.
        OperationsError: The Hub refuses, or its .gitignore excludes a file.
    """
    hub = request.hub
    branch = checkpoint.branch
    manifest = checkpoint.manifest
    with _CheckpointFiles(checkpoint.folder) as contents:
        while True:
            try:
                # The branch is listed again in each attempt. The last commit may have succeeded
                # although its answer was lost.
                branches = hub.list_branches()
                remote = {}
                if branch in branches:
                    remote = hub.list_files(branches[branch])
                (blob,) = digest(checkpoint.folder / MANIFEST, rotated=False).blobs
                if blob.has(remote.get(MANIFEST)):
                    break
                # The parent of the commit below is the new branch's commit, so list it again.
                if branch not in branches:
                    hub.create_branch(branch)
                    branches = hub.list_branches()
                for name in [*sorted(manifest.files), MANIFEST]:
                    if ignored := hub.upload(branch, [contents.addition(name)]):
                        raise OperationsError(
                            f"the .gitignore of {hub.repo} excludes {min(ignored)} of {branch}; "
                            "change the .gitignore there"
                        )
                    contents.release(name)
                    request.patience.note_progress()
                # A rollback may save this iteration again while files are sent. The commit would
                # then mix files of two checkpoints.
                if read_manifest(checkpoint.folder).digest != manifest.digest:
                    raise CheckpointError(
                        f"{checkpoint.folder} was replaced while it was sent; the next sync sends "
                        "the new one"
                    )
                _commit(hub, checkpoint, branches[branch], contents.additions, remote)
                request.log(
                    f"sent {branch} ({format_bytes(manifest.bytes)}) to the branch {branch}"
                )
                break
            except HubUnavailableError as trouble:
                request.patience.wait(trouble)
    state.checkpoints[branch] = manifest.digest


class _CheckpointFiles:
    """The files of one checkpoint, as the additions of a commit.

    Nothing writes to a finished checkpoint, so its large files are sent without a copy.

    The client reads a file more than once. It gets the open file and not the name, because the name
    may belong to another file by then. So it sends the file that was checked. A file is closed as
    soon as its content is on the Hub, because a checkpoint may have thousands of files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, CommitOperationAdd] = {}
        self._open: dict[str, BinaryIO] = {}

    def __enter__(self) -> "_CheckpointFiles":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            file.close()

    @property
    def additions(self) -> list["CommitOperationAdd"]:
        """Additions that were made so far."""
        return list(self._made.values())

    def addition(self, name: str) -> "CommitOperationAdd":
        """Return the addition of a file, the same object each time.

        The object records whether its content is on the Hub. A new one would be sent again.

        Raises:
            OutsideError: The name leads out of the checkpoint's folder.
            OSError: The file cannot be read.
        """
        from huggingface_hub import CommitOperationAdd

        if name not in self._made:
            file = open_inside(self._folder, name)
            # Small files go into memory, so that few files are open at once.
            if os.fstat(file.fileno()).st_size > IN_MEMORY_BYTES:
                self._open[name] = file
                self._made[name] = CommitOperationAdd(name, file)
            else:
                with file:
                    self._made[name] = CommitOperationAdd(name, file.read())
        return self._made[name]

    def release(self, name: str) -> None:
        """Close a file whose content is in the Hub's large file storage.

        The commit refers to such a content by its digest. Other contents are part of the commit, so
        their files stay open until it is made.
        """
        # The client has no public way to learn whether a content was uploaded.
        if self._made[name]._is_uploaded and name in self._open:
            self._open.pop(name).close()


def _commit(
    hub: Hub,
    checkpoint: FinishedCheckpoint,
    parent: str,
    additions: list["CommitOperationAdd"],
    remote: Mapping[str, str],
) -> None:
    """Make the commit that completes a branch.

    The branch may hold an earlier checkpoint of this iteration, from before a rollback. The same
    commit deletes those of its files that the new checkpoint does not have.
    """
    from huggingface_hub import CommitOperationDelete

    names = {addition.path_in_repo for addition in additions}
    # Without a manifest no checkpoint was ever committed here. What the branch holds came with the
    # repository's first commit, and stays.
    stale = []
    if MANIFEST in remote:
        stale = sorted(remote.keys() - names)
    operations: list[CommitOperationAdd | CommitOperationDelete] = [*additions]
    # The Hub writes .gitattributes itself. Large files need it.
    operations += [
        CommitOperationDelete(name, is_folder=False) for name in stale if name != ".gitattributes"
    ]
    title = f"Checkpoint of iteration {checkpoint.manifest.iteration}"
    hub.commit(
        checkpoint.branch, parent, operations, title, format_bytes(checkpoint.manifest.bytes)
    )

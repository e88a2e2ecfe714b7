"""Finished checkpoints on the Hub: `global_step300` is a branch of its own, which holds that checkpoint and no logs.

A branch gets its files in one commit, the manifest with them: one that has a manifest is whole, whenever a push was cut off.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from megatron.checkpoint.folder import find_stored_folder, list_saved_iterations
from megatron.checkpoint.manifest import MANIFEST, Manifest, check_size, read_manifest
from megatron.errors import CheckpointError, OperationsError
from megatron.operations.hub import Hub, HubUnavailable, RetryPolicy, Say
from megatron.operations.hub_push import IN_MEMORY_BYTES, format_size
from megatron.operations.hub_queue import SyncState, digest, read_state
from megatron.operations.inside import OutsideError, open_inside, real_name

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd


@dataclass(frozen=True)
class FinishedCheckpoint:
    """A checkpoint that is whole on the disk."""

    branch: str
    folder: Path
    manifest: Manifest


def push_checkpoints(
    run: Path,
    every: int,
    state_path: Path,
    hub: Hub,
    patience: RetryPolicy,
    *,
    dry_run: bool,
    say: Say,
    warn: Say,
) -> list[str]:
    """Push the finished checkpoints of a run's folder whose iteration `every` divides, oldest first; returns what was left out.

    Raises:
        OperationsError: there is no such folder, or the Hub refuses. HubUnavailable: it did not answer in time; run again.
    """
    if not run.is_dir():
        raise OperationsError(
            f"--checkpoints {run} is no folder; give the run's --save folder, which holds global_step... folders"
        )
    state = read_state(state_path, f"{hub.host}/{hub.repo}", warn)
    left_out: list[str] = []
    there: Mapping[str, str] | None = None
    for iteration in (
        iteration for iteration in list_saved_iterations(run) if iteration % every == 0
    ):
        try:
            checkpoint = _open_finished(run, iteration)
            there = _list_branches(hub, patience) if there is None else there
            if (
                checkpoint.branch in there
                and state.checkpoints.get(checkpoint.branch) == checkpoint.manifest.digest
            ):
                continue
            if dry_run:
                say(
                    f"would send {checkpoint.branch} ({checkpoint.manifest.bytes} bytes) to a branch of its own, unless it is there"
                )
                continue
            _push(checkpoint, state, hub, patience, say)
            state.write(state_path)
        except OutsideError as error:
            left_out.append(f"global_step{iteration} is left out: {error.strerror}")
            warn(left_out[-1])
        except (CheckpointError, FileNotFoundError) as error:
            left_out.append(f"global_step{iteration} is left out: {error}")
            warn(left_out[-1])
    return left_out


def _open_finished(run: Path, iteration: int) -> FinishedCheckpoint:
    """Look at a checkpoint; its folder may be reached through links that stay in `run`.

    Raises:
        CheckpointError: it is damaged. OutsideError: it lies outside of `run`. FileNotFoundError: it is being deleted.
    """
    folder = find_stored_folder(run, iteration)
    real_name(run, folder.name)
    manifest = read_manifest(folder)
    for name, facts in manifest.files.items():
        check_size(folder, name, facts["bytes"])
        open_inside(folder, name).close()  # before a branch is made: it may be sent
    return FinishedCheckpoint(f"global_step{iteration}", folder, manifest)


def _list_branches(hub: Hub, patience: RetryPolicy) -> Mapping[str, str]:
    while True:
        try:
            return hub.list_branches()
        except HubUnavailable as trouble:
            patience.wait(trouble)


def _push(
    checkpoint: FinishedCheckpoint, state: SyncState, hub: Hub, patience: RetryPolicy, say: Say
) -> None:
    branch, manifest = checkpoint.branch, checkpoint.manifest
    contents = _Contents(checkpoint.folder)
    with contents:
        while True:
            try:
                branches = hub.list_branches()
                there = hub.list_files(branches[branch]) if branch in branches else {}
                if (
                    digest(checkpoint.folder / MANIFEST, rotated=False)
                    .blobs[0]
                    .has(there.get(MANIFEST))
                ):
                    break
                if branch not in branches:
                    hub.create_branch(branch)
                    branches = hub.list_branches()
                for name in [*sorted(manifest.files), MANIFEST]:
                    if ignored := hub.upload(branch, [contents.addition(name)]):
                        raise OperationsError(
                            f"the .gitignore of {hub.repo} keeps {min(ignored)} of {branch} out; change that there"
                        )
                    contents.release(name)
                    patience.note_progress()
                if read_manifest(checkpoint.folder).digest != manifest.digest:
                    raise CheckpointError(
                        f"{checkpoint.folder} was replaced while it was sent; the next sync sends the new one"
                    )
                _commit(hub, checkpoint, branches[branch], contents.additions, there)
                say(f"sent {branch} ({format_size(manifest.bytes)}) to the branch {branch}")
                break
            except HubUnavailable as trouble:
                patience.wait(trouble)
    state.checkpoints[branch] = manifest.digest


class _Contents:
    """What is sent of a checkpoint. Nothing writes to a finished one: its large files are sent from where they are.

    The client reads a file more than once. It is given the opened file and not its name, so that it sends what was looked at,
    whatever has its name by then. A file is closed as soon as its content is on the Hub: a checkpoint may have thousands.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, CommitOperationAdd] = {}
        self._open: dict[str, BinaryIO] = {}

    def __enter__(self) -> "_Contents":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            file.close()

    @property
    def additions(self) -> list["CommitOperationAdd"]:
        """Return those made so far."""
        return list(self._made.values())

    def addition(self, name: str) -> "CommitOperationAdd":
        """Return the addition of a file, the same one each time: it knows whether its content is on the Hub.

        Raises:
            OutsideError: the name leads out of the checkpoint's folder. OSError: it cannot be read.
        """
        from huggingface_hub import CommitOperationAdd

        if name not in self._made:
            file = open_inside(self._folder, name)
            if os.fstat(file.fileno()).st_size > IN_MEMORY_BYTES:
                self._open[name] = file
                self._made[name] = CommitOperationAdd(name, file)
            else:
                with file:
                    self._made[name] = CommitOperationAdd(name, file.read())
        return self._made[name]

    def release(self, name: str) -> None:
        """Close a file whose content is in the Hub's large storage: a commit only names it."""
        if self._made[name]._is_uploaded and name in self._open:
            self._open.pop(name).close()


def _commit(
    hub: Hub,
    checkpoint: FinishedCheckpoint,
    parent: str,
    additions: list["CommitOperationAdd"],
    there: Mapping[str, str],
) -> None:
    """Files of an earlier checkpoint of this iteration, from before a rollback, go in the same commit."""
    from huggingface_hub import CommitOperationDelete

    names = {addition.path_in_repo for addition in additions}
    stale = sorted(there.keys() - names) if MANIFEST in there else []
    operations: list[CommitOperationAdd | CommitOperationDelete] = [*additions]
    operations += [
        CommitOperationDelete(name, is_folder=False) for name in stale if name != ".gitattributes"
    ]
    title = f"Checkpoint of iteration {checkpoint.manifest.iteration}"
    hub.commit(checkpoint.branch, parent, operations, title, format_size(checkpoint.manifest.bytes))

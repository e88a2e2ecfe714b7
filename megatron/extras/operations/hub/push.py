"""Sync of a folder to a repository: scan, compare, and commit what differs, until nothing differs.

Invariant: nothing is sent twice. A commit is made on top of the head that the folder was compared
with. When an answer is lost, the head is read again before anything else is sent.

So a sync may be killed at any time. The next one continues with what still differs.
"""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.base.durable import without_links
from megatron.base.errors import OperationsError
from megatron.base.file_lock import LockResult, try_lock
from megatron.base.plain_text import format_bytes, format_count
from megatron.extras.operations.hub.client import (
    MAIN,
    Hub,
    HubMovedError,
    HubUnavailableError,
    RetryPolicy,
    Say,
    UnknownRepositoryError,
)
from megatron.extras.operations.hub.inside import open_inside
from megatron.extras.operations.hub.queue import (
    CommitGroup,
    FolderScan,
    RemoteFile,
    SentFile,
    SyncState,
    adopt,
    find_deletions,
    get_known_oid,
    look,
    plan_commit,
    plan_remote_files,
    read_state,
)

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

OWN_FOLDER = ".hub_sync"
"""Folder of the sync's own files, in the folder that is synced."""
IN_MEMORY_BYTES = 8 << 20
"""A larger content is copied to a temporary file before it is sent.

The client reads a file more than once, and a log may grow in between."""
_NAMED = 20
"""A line or message names at most this many files."""


class SyncInProgressError(OperationsError):
    """Another sync of this folder is running."""


@dataclass(frozen=True)
class SyncRequest:
    """Arguments of a sync."""

    hub: Hub
    """The repository."""
    patience: RetryPolicy
    """When to stop if the Hub does not answer."""
    log: Say
    """Receives lines about the work."""
    warn: Say
    """Receives a line for each problem."""
    folder: Path
    """Folder to copy."""
    patterns: tuple[str, ...]
    """Files to copy, as patterns relative to `folder`."""
    state: Path
    """File that keeps the sync's state between two syncs."""
    create: bool = False
    """Create the repository if it does not exist."""
    private: bool = True
    """Whether a repository that is created is private."""
    dry_run: bool = False
    """Only report what would be done."""

    def read_state(self) -> SyncState:
        """Return the state of the last sync with this repository."""
        return read_state(self.state, f"{self.hub.host}/{self.hub.repo}", self.warn)

    def create_missing_repository(self, missing: UnknownRepositoryError) -> bool:
        """Create the repository that the Hub did not find, if that is allowed.

        Args:
            missing: The error of the Hub.

        Returns:
            Whether it was created. A dry run creates nothing.

        Raises:
            UnknownRepositoryError: The request does not allow to create it.
        """
        if not self.create:
            raise UnknownRepositoryError(f"{missing}, or create it with --create") from missing
        what = f"the repository {self.hub.repo}, {'private' if self.private else 'public'}"
        if self.dry_run:
            self.log(f"would create {what}")
            return False
        self.hub.create(private=self.private)
        self.log(f"created {what}")
        return True

    def goes_on_without_hub(self, trouble: OperationsError) -> bool:
        """Return whether an error makes a dry run compare with the state of the last sync instead.

        That is so if the Hub does not answer, or if it needs a token to show the repository.
        """
        # If a branch has changed in the meantime, the caller lists it again immediately.
        if not self.dry_run or isinstance(trouble, HubMovedError):
            return False
        return isinstance(trouble, HubUnavailableError) or not self.hub.has_token


@dataclass
class SyncResult:
    """Counts of what a sync did."""

    files: int = 0
    """Local files that match the patterns and can be copied."""
    added: int = 0
    """Remote files that were added or replaced."""
    added_bytes: int = 0
    """Size of the contents of these."""
    deleted: int = 0
    """Remote files that were deleted."""
    commits: int = 0
    left_out: list[str] = field(default_factory=list)
    """One line for each thing that could not be done. Each was logged as a warning already."""


def get_default_state_path(folder: Path, repo: str) -> Path:
    """Return the default path of the state file, in a folder inside `folder`.

    The folder's name begins with a dot, so that no pattern matches the state.
    """
    return folder / OWN_FOLDER / f"{repo.replace('/', '--')}.json"


@contextmanager
def hold_sync_lock(state: Path, log: Say) -> Iterator[None]:
    """Hold the lock of a sync's state. The kernel releases it when the process ends.

    Args:
        state: The state file. The lock is a file next to it, which is never deleted.
        log: Receives a line if the file system has no locks.

    Raises:
        SyncInProgressError: Another sync holds the lock.
        OperationsError: The folder of the state cannot be written.
    """
    lock = state.with_name(state.name + ".lock")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = open(lock, "w", opener=without_links)  # noqa: SIM115 (closed below)
    except OSError as error:
        raise OperationsError(
            f"{lock} cannot be written ({error.strerror}); give --state a file in a folder that "
            "can be written"
        ) from error
    with file:
        try:
            result = try_lock(file.fileno(), lock)
        # Some network file systems have no locks. The sync is safe without one, because the Hub
        # refuses a commit on top of an old head.
        except OSError as error:
            log(f"{lock} cannot be locked ({error.strerror}); continuing without a lock")
        else:
            if result is not LockResult.HELD:
                raise SyncInProgressError(
                    f"another sync of this folder is running ({lock} is locked), so this one exits"
                )
        yield


class FolderSync:
    """One sync of one folder. The caller holds the lock."""

    def __init__(self, request: SyncRequest) -> None:
        """Read the sync's state."""
        self._request = request
        self._hub = request.hub
        self._state = request.read_state()
        self._outcome = SyncResult()
        # Local files that this sync does not send any more, after a first failure.
        self._skipped: set[str] = set()
        # Whether this sync has listed the repository's files.
        self._listed = False
        # The head in the state file, to see whether the file has to be written again.
        self._written_head = self._state.head
        # Title and content of a commit that was sent and not answered.
        self._unanswered: tuple[str, Sequence[CommitGroup]] | None = None

    def run(self) -> SyncResult:
        """Sync the folder, and wait while the Hub is unavailable.

        Raises:
            OperationsError: No file matches, or the Hub refuses.
            HubUnavailableError: The Hub did not answer in time. Run the sync again.
        """
        state = self._state
        found = self._look()
        wanted, complaints = plan_remote_files(found.files)
        self._leave_out(complaints)
        self._outcome.files = len(wanted)
        # None means that the deletions have to be computed, from the newest listing.
        deletions: list[CommitGroup] | None = None
        while True:
            try:
                # The order matters. A lost commit can be recognized only after the listing is new,
                # and deletions and additions are differences to that listing.
                self._update_listing(wanted)
                self._report_lost_answer()
                if deletions is None:
                    deletions = self._find_deletions(found)
                pending = {
                    local: pieces for local, pieces in wanted.items() if local not in self._skipped
                }
                groups = [*deletions, *plan_commit(pending, state)]
                if not groups or self._request.dry_run:
                    break
                self._commit(groups)
                # All of these deletions were in this commit.
                deletions = []
                self._request.patience.note_progress()
            except (HubUnavailableError, UnknownRepositoryError) as trouble:
                if self._request.goes_on_without_hub(trouble):
                    self._request.warn(
                        f"{trouble}; the files are compared with the state of the last sync, and "
                        "not with the Hub"
                    )
                    deletions = self._find_deletions(found)
                    break
                if not isinstance(trouble, HubUnavailableError):
                    raise
                # It is unknown whether the deletions were made. Compute them again.
                deletions = None
                if isinstance(trouble, HubMovedError):
                    state.head = None
                self._request.patience.wait(trouble)
        if self._request.dry_run:
            self._report_dry_run(deletions, wanted)
        else:
            self._keep(found)
        return self._outcome

    # Comparing

    def _look(self) -> FolderScan:
        """Scan the folder.

        Raises:
            OperationsError: No file matches any pattern.
        """
        request = self._request
        found = look(request.folder, request.patterns, self._state.files)
        # An unmounted disk looks like an empty folder. Without this check everything on the Hub
        # would be deleted.
        if not found.present:
            patterns = " ".join(request.patterns)
            raise OperationsError(
                f"--patterns {patterns} match no file in {request.folder}; nothing is sent, and "
                "nothing is deleted on the Hub; check that the disk is mounted and that the "
                "patterns are relative to --folder"
            )
        empty = [f"the pattern {each} matches no file in {request.folder}" for each in found.empty]
        self._leave_out([*empty, *found.complaints])
        return found

    def _update_listing(self, wanted: Mapping[str, Sequence[RemoteFile]]) -> None:
        """Bring `state.sent` up to date with the repository.

        The head alone is enough if the last sync left the branch there and sent all of the wanted
        files. This is the frequent case, and costs one small request. Otherwise the files are
        listed, which takes many requests in a large repository.
        """
        state = self._state
        head = self._head()
        ours = {sent.local for sent in state.sent.values()}
        # A file that was never sent may still be in the repository. One listing in a sync is enough
        # to find out.
        if head is None:
            state.sent = {}
        elif head != state.head or (not self._listed and not ours.issuperset(wanted)):
            adopt(state, head, self._hub.list_files(head), wanted)
            self._listed = True

    def _head(self) -> str | None:
        """Return the head of the main branch, and create the repository if that was asked for.

        Returns:
            The commit, or None in a dry run if the repository does not exist.
        """
        try:
            return self._hub.head()
        except UnknownRepositoryError as error:
            if not self._request.create_missing_repository(error):
                return None
        return self._hub.head()

    def _find_deletions(self, found: FolderScan) -> list[CommitGroup]:
        """Return what to delete on the Hub, and log what is withheld."""
        deletions, withheld = find_deletions(self._state, found, self._request.patterns)
        for local in withheld:
            self._skip(
                local,
                f"{local} does not exist any more, and its pattern matches no file; it is not "
                "deleted on the Hub",
            )
        return deletions

    # Sending

    def _commit(self, groups: Sequence[CommitGroup]) -> None:
        """Make one commit, and record in the state what it changed."""
        state = self._state
        with self._make_copies_folder() as copies:
            operations, groups = self._build_operations(groups, copies)
            # No file is left to commit. The next round of `run` continues without them.
            if not operations:
                return
            title = _format_title(groups)
            lines = _format_lines(groups)
            assert state.head is not None, "a commit is made upon the head that was compared with"
            # Set before the request and cleared after the answer. If the request raises, `run`
            # finds here what may have been committed.
            self._unanswered = title, groups
            head = self._hub.commit(MAIN, state.head, operations, title, _shorten(lines, "\n"))
            self._unanswered = None
        for group in groups:
            state.sent |= {
                piece.remote: SentFile(f"sha256:{piece.blob.sha256}", piece.local)
                for piece in group.adds
            }
            for remote in group.deletes:
                del state.sent[remote]
        # The Hub makes no commit if nothing changes. Then there is nothing to count.
        has_moved = head != state.head
        state.head = head
        self._write()
        if has_moved:
            self._report_commit(title, groups)

    def _report_lost_answer(self) -> None:
        """Count and report an unanswered commit, if the new listing shows that it was made."""
        if self._unanswered is not None:
            title, groups = self._unanswered
            self._unanswered = None
            sent = self._state.sent
            # A commit is made completely or not at all. It was made if every addition is present
            # and every deletion is absent.
            if all(
                piece.blob.has(get_known_oid(self._state, piece.remote))
                for group in groups
                for piece in group.adds
            ) and not any(remote in sent for group in groups for remote in group.deletes):
                self._report_commit(f"{title} (committed, but the answer was lost)", groups)

    def _write(self) -> None:
        """Write the state file, and note which head is in it."""
        self._state.write(self._request.state)
        self._written_head = self._state.head

    def _build_operations(
        self, groups: Sequence[CommitGroup], copies: Path
    ) -> tuple[list["CommitOperationAdd | CommitOperationDelete"], list[CommitGroup]]:
        """Return the operations of a commit, with the contents that were compared, and upload them.

        A local file that has changed since is skipped, and left to the next sync. So is one that
        the repository's .gitignore excludes. All operations of a local file are made or none is:
        with a part missing, the copy of a log would have a gap.

        Args:
            groups: What to commit.
            copies: Folder for copies of large contents.

        Returns:
            The operations, and the groups that they cover.
        """
        from huggingface_hub import CommitOperationDelete

        additions: list[tuple[CommitGroup, list[CommitOperationAdd]]] = []
        for group in groups:
            try:
                adds = [self._build_addition(piece, copies) for piece in group.adds]
            except OSError as error:
                reason = f"cannot be sent ({error.strerror})"
                if isinstance(error, FileNotFoundError):
                    reason = "vanished before it was sent"
                self._skip(group.local, f"{group.local} {reason}; left to the next sync")
            else:
                additions.append((group, adds))
        ignored = self._hub.upload(MAIN, [addition for _, adds in additions for addition in adds])
        operations: list[CommitOperationAdd | CommitOperationDelete] = []
        kept = []
        for group, adds in additions:
            if any(addition.path_in_repo in ignored for addition in adds):
                self._skip(
                    group.local,
                    f"{group.local} is excluded by the .gitignore of {self._hub.repo}; change the "
                    ".gitignore there",
                )
                continue
            operations += adds
            operations += [
                CommitOperationDelete(remote, is_folder=False) for remote in group.deletes
            ]
            kept.append(group)
        return operations, kept

    def _build_addition(self, piece: RemoteFile, copies: Path) -> "CommitOperationAdd":
        """Read the content of one remote file.

        Raises:
            OSError: The content cannot be read, or is no longer the one that was compared.
        """
        from huggingface_hub import CommitOperationAdd

        content: bytes | Path
        with open_inside(self._request.folder, piece.local) as file:
            file.seek(piece.offset)
            if piece.blob.size <= IN_MEMORY_BYTES:
                content = file.read(piece.blob.size)
            else:
                # Copies are deleted only after the commit, so the number of entries is a new name.
                content = copies / f"{len(os.listdir(copies)):06d}"
                with open(content, "wb") as copy:
                    shutil.copyfileobj(file, copy)
                    copy.truncate(piece.blob.size)
        addition = CommitOperationAdd(piece.remote, content)
        # The client's digest covers a file that was rewritten, and one that got shorter. A log that
        # grew has the same bytes here, and passes.
        if addition.upload_info.sha256.hex() != piece.blob.sha256:
            raise InterruptedError(0, "it was rewritten meanwhile")
        return addition

    @contextmanager
    def _make_copies_folder(self) -> Iterator[Path]:
        """Provide an empty folder for copies, and delete it at the end.

        Copies that a killed sync left there are deleted first. The lock on the state ensures that
        no running sync uses them.

        Raises:
            OperationsError: A link has the folder's name.
        """
        folder = self._request.state.with_name(self._request.state.name + ".copies")
        # Through a link, the files of another folder would be deleted below.
        if folder.is_symlink():
            raise OperationsError(
                f"{folder} is a link, and the files in its target would be deleted; remove the link"
            )
        if folder.is_dir():
            shutil.rmtree(folder)
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder)

    # Reporting

    def _skip(self, local: str, line: str) -> None:
        """Leave a local file out for the rest of this sync, and log the reason once."""
        if local not in self._skipped:
            self._skipped.add(local)
            self._leave_out([line])

    def _leave_out(self, lines: Sequence[str]) -> None:
        """Log warnings about what could not be done, and keep them for the result."""
        self._outcome.left_out += lines
        for line in lines:
            self._request.warn(line)

    def _report_commit(self, title: str, groups: Sequence[CommitGroup]) -> None:
        """Count and report a commit: one line for the additions, and one for each deletion."""
        added = [piece.remote for group in groups for piece in group.adds]
        deleted = [remote for group in groups for remote in group.deletes]
        self._outcome.commits += 1
        self._outcome.added += len(added)
        self._outcome.added_bytes += _count_bytes(groups)
        self._outcome.deleted += len(deleted)
        self._request.log(f"{title}: {_shorten(added, ' ')}" if added else title)
        for remote in deleted:
            self._request.log(f"deleted on the Hub: {remote}")

    def _report_dry_run(
        self, deletions: Sequence[CommitGroup] | None, wanted: Mapping[str, Sequence[RemoteFile]]
    ) -> None:
        """Report every file that a sync would send or delete."""
        # The bounds of a commit are lifted, so that one plan has all commits of the sync.
        everything = plan_commit(wanted, self._state, commit_bytes=1 << 62, commit_files=1 << 62)
        for group in [*(deletions or ()), *everything]:
            for piece in group.adds:
                self._request.log(f"would send {piece.remote} ({piece.blob.size} bytes)")
            for remote in group.deletes:
                self._request.log(f"would delete on the Hub: {remote}")

    def _keep(self, found: FolderScan) -> None:
        """Write the state file, if the scan or the head has changed.

        Digests are kept for files that exist, and for files whose copy is still on the Hub. Without
        this, the state would list deleted files permanently.
        """
        state = self._state
        copied = {sent.local for sent in state.sent.values()}
        files = {
            name: file
            for name, file in state.files.items()
            if name in found.present or name in copied
        } | found.files
        if files != state.files or state.head != self._written_head:
            state.files = files
            self._write()


def _format_title(groups: Sequence[CommitGroup]) -> str:
    """Return the first line of a commit's message, with counts and size."""
    added = sum(len(group.adds) for group in groups)
    deleted = sum(len(group.deletes) for group in groups)
    done = []
    if added:
        done.append(f"{format_count(added, 'file')}, {format_bytes(_count_bytes(groups))}")
    if deleted:
        done.append(f"{format_count(deleted, 'file')} deleted")
    return f"Sync {'; '.join(done)}"


def _format_lines(groups: Sequence[CommitGroup]) -> list[str]:
    """Return one line for each remote file that a commit adds or deletes."""
    added = [
        f"+ {piece.remote} ({piece.blob.size} bytes)" for group in groups for piece in group.adds
    ]
    return added + [f"- {remote}" for group in groups for remote in group.deletes]


def _count_bytes(groups: Sequence[CommitGroup]) -> int:
    """Return the size of all contents that a commit adds."""
    return sum(piece.blob.size for group in groups for piece in group.adds)


def _shorten(names: Sequence[str], between: str) -> str:
    """Join the first names, and add the number of the others."""
    more = len(names) - _NAMED
    return between.join([*names[:_NAMED], *([f"and {more} more"] if more > 0 else [])])

"""Bringing a repository in step with a folder: look, compare, commit what differs, until nothing does.

Nothing is sent twice: a commit is made upon the head that was compared with, and whenever an answer fails to come the head is asked
for again before anything else. So a sync may be killed at any instant; the next one goes on with what still differs.
"""

import fcntl
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.durable import without_links
from megatron.errors import OperationsError
from megatron.operations.hub import (
    MAIN,
    Hub,
    HubMoved,
    HubUnavailable,
    RetryPolicy,
    Say,
    UnknownRepository,
)
from megatron.operations.hub_queue import (
    CommitGroup,
    FolderScan,
    RemoteFile,
    SentFile,
    adopt,
    find_deletions,
    get_known_oid,
    look,
    plan_commit,
    plan_remote_files,
    read_state,
)
from megatron.operations.inside import open_inside

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

OWN_FOLDER = ".hub_sync"
IN_MEMORY_BYTES = 8 << 20
"""A file larger than this is copied aside before it is sent: the client reads a file more than once, and it may grow meanwhile."""
_NAMED = 20


class SyncInProgress(OperationsError):
    """Another sync of this folder is at work."""


@dataclass(frozen=True)
class SyncRequest:
    """What to bring in step."""

    folder: Path
    patterns: tuple[str, ...]
    state: Path
    create: bool = False
    private: bool = True
    dry_run: bool = False


@dataclass
class SyncResult:
    """What a sync did; bytes are those of the files' contents."""

    files: int = 0
    added: int = 0
    added_bytes: int = 0
    deleted: int = 0
    commits: int = 0
    left_out: list[str] = field(default_factory=list)
    """What could not be done, each told already."""


def get_default_state_path(folder: Path, repo: str) -> Path:
    """Beside what it describes; hidden, so that no pattern takes it."""
    return folder / OWN_FOLDER / f"{repo.replace('/', '--')}.json"


@contextmanager
def hold_sync_lock(state: Path, say: Say) -> Iterator[None]:
    """Hold the state's lock, which the kernel frees when we die.

    Raises:
        SyncInProgress: another sync holds it. OperationsError: the folder of the state cannot be written.
    """
    lock = state.with_name(state.name + ".lock")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = open(lock, "w", opener=without_links)  # noqa: SIM115 (closed below)
    except OSError as error:
        raise OperationsError(
            f"{lock} cannot be written ({error.strerror}); give a --state in a folder that can"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise SyncInProgress(
                f"another sync is at work here ({lock} is locked); it does the work, this one leaves"
            ) from error
        except OSError as error:  # some network file systems have no locks; a commit upon the head compared with is safe without
            say(f"{lock} cannot be locked ({error.strerror}); going on without")
        yield


class FolderSync:
    """One sync of one folder. The caller holds the lock."""

    def __init__(
        self, request: SyncRequest, hub: Hub, patience: RetryPolicy, *, say: Say, warn: Say
    ) -> None:
        self._request, self._hub, self._patience = request, hub, patience
        self._say, self._warn = say, warn
        self._state = read_state(request.state, f"{hub.host}/{hub.repo}", warn)
        self._outcome = SyncResult()
        self._skipped: set[str] = set()
        self._listed = False
        self._written_head = self._state.head
        self._unanswered: tuple[str, Sequence[CommitGroup]] | None = None

    def run(self) -> SyncResult:
        """
        Raises:
            OperationsError: nothing matches, or the Hub refuses. HubUnavailable: it did not answer in time; run again.
        """
        state = self._state
        found = self._look()
        wanted, complaints = plan_remote_files(found.files)
        self._leave_out(complaints)
        self._outcome.files = len(wanted)
        deletions: list[CommitGroup] | None = None
        while True:
            try:
                self._update_listing(wanted)
                self._tell_if_landed()
                if deletions is None:
                    deletions = self._find_deletions(found)
                pending = {
                    local: pieces for local, pieces in wanted.items() if local not in self._skipped
                }
                groups = [*deletions, *plan_commit(pending, state)]
                if not groups or self._request.dry_run:
                    break
                self._commit(groups)
                deletions = []
                self._patience.note_progress()
            except HubUnavailable as trouble:
                deletions = None
                if isinstance(trouble, HubMoved):
                    state.head = None
                self._patience.wait(trouble)
        if self._request.dry_run:
            self._tell_dry_run(deletions, wanted)
        else:
            self._keep(found)
        return self._outcome

    # Looking

    def _look(self) -> FolderScan:
        request = self._request
        found = look(request.folder, request.patterns, self._state.files)
        if not found.present:
            patterns = " ".join(request.patterns)
            raise OperationsError(
                f"--patterns {patterns} match no file in {request.folder}; nothing is sent, and nothing deleted on the Hub: "
                "look whether the disk is mounted and the patterns are relative to --folder"
            )
        self._leave_out(
            [
                f"the pattern {pattern} matches no file in {request.folder}"
                for pattern in found.empty
            ]
        )
        self._leave_out(found.complaints)
        return found

    def _update_listing(self, wanted: Mapping[str, Sequence[RemoteFile]]) -> None:
        """Know what the Hub holds: by its head alone where that is the one we left, and we sent all these files before."""
        state = self._state
        head = self._head()
        ours = {sent.local for sent in state.sent.values()}
        if head is None:
            state.sent = {}
        elif head != state.head or (not self._listed and not ours.issuperset(wanted)):
            adopt(state, head, self._hub.list_files(head), wanted)
            self._listed = True

    def _head(self) -> str | None:
        """None: there is no repository yet, and this is a dry run."""
        request = self._request
        try:
            return self._hub.head()
        except UnknownRepository as error:
            if not request.create:
                raise UnknownRepository(f"{error}, or make it: --create") from error
        kind = "private" if request.private else "public"
        if request.dry_run:
            self._say(f"would make {self._hub.repo}, {kind}")
            return None
        self._hub.create(private=request.private)
        self._say(f"made {self._hub.repo}, {kind}")
        return self._hub.head()

    def _find_deletions(self, found: FolderScan) -> list[CommitGroup]:
        deletions, withheld = find_deletions(self._state, found, self._request.patterns)
        for local in withheld:
            self._skip(
                local,
                f"{local} is gone here, and its pattern matches nothing now; it is not deleted on the Hub",
            )
        return deletions

    # Sending

    def _commit(self, groups: Sequence[CommitGroup]) -> None:
        state = self._state
        with self._make_copies_folder() as aside:
            operations, groups = self._build_operations(groups, aside)
            if not operations:
                return  # all of them are left out for now
            title, lines = _format_title(groups), _format_lines(groups)
            assert state.head is not None, "a commit is made upon the head that was compared with"
            self._unanswered = title, groups
            done = self._hub.commit(MAIN, state.head, operations, title, _shorten(lines, "\n"))
            self._unanswered = None
        landed = []
        for group in groups:
            if any(piece.remote in done.ignored for piece in group.adds):
                self._skip(
                    group.local,
                    f"{group.local} is kept out by the .gitignore of {self._hub.repo}; change that there",
                )
                continue
            landed.append(group)
            state.sent |= {
                piece.remote: SentFile(f"sha256:{piece.blob.sha256}", piece.local)
                for piece in group.adds
            }
            for remote in group.deletes:
                del state.sent[remote]
        unmoved, state.head = done.head == state.head, done.head
        self._write()
        if landed and not unmoved:
            self._count(landed)
            self._tell(_format_title(landed), landed)

    def _tell_if_landed(self) -> None:
        """A commit without an answer may have been made all the same."""
        if self._unanswered is not None:
            title, groups = self._unanswered
            self._unanswered = None
            sent = self._state.sent
            if all(
                piece.blob.has(get_known_oid(self._state, piece.remote))
                for group in groups
                for piece in group.adds
            ) and not any(remote in sent for group in groups for remote in group.deletes):
                self._count(groups)
                self._tell(f"{title} (had landed, its answer was lost)", groups)

    def _count(self, groups: Sequence[CommitGroup]) -> None:
        self._outcome.commits += 1
        self._outcome.added += sum(len(group.adds) for group in groups)
        self._outcome.added_bytes += _count_bytes(groups)
        self._outcome.deleted += sum(len(group.deletes) for group in groups)

    def _write(self) -> None:
        self._state.write(self._request.state)
        self._written_head = self._state.head

    def _build_operations(
        self, groups: Sequence[CommitGroup], aside: Path
    ) -> tuple[list["CommitOperationAdd | CommitOperationDelete"], list[CommitGroup]]:
        """Their contents, as they were compared; a file that is no longer so is left to the next sync."""
        from huggingface_hub import CommitOperationDelete

        operations: list[CommitOperationAdd | CommitOperationDelete] = []
        whole = []
        for group in groups:
            try:
                adds = [self._build_addition(piece, aside) for piece in group.adds]
            except FileNotFoundError:
                self._skip(
                    group.local, f"{group.local} vanished before it was sent; left to the next sync"
                )
            except OSError as error:
                self._skip(
                    group.local,
                    f"{group.local} cannot be sent ({error.strerror}); left to the next sync",
                )
            else:
                operations += [
                    *adds,
                    *(CommitOperationDelete(remote, is_folder=False) for remote in group.deletes),
                ]
                whole.append(group)
        return operations, whole

    def _build_addition(self, piece: RemoteFile, aside: Path) -> "CommitOperationAdd":
        from huggingface_hub import CommitOperationAdd

        content: bytes | Path
        sha256 = hashlib.sha256()
        with open_inside(self._request.folder, piece.local) as file:
            file.seek(piece.offset)
            if piece.blob.size <= IN_MEMORY_BYTES:
                content = file.read(piece.blob.size)
                sha256.update(content)
            else:
                content = aside / f"{len(os.listdir(aside)):06d}"
                left = piece.blob.size
                with open(content, "wb") as copy:
                    while left and (data := file.read(min(left, IN_MEMORY_BYTES))):
                        sha256.update(data)
                        copy.write(data)
                        left -= len(data)
        if sha256.hexdigest() != piece.blob.sha256:
            raise InterruptedError(0, "it was rewritten meanwhile")
        return CommitOperationAdd(piece.remote, content)

    @contextmanager
    def _make_copies_folder(self) -> Iterator[Path]:
        """A folder for copies, empty: what a killed sync left in it goes."""
        folder = self._request.state.with_name(self._request.state.name + ".copies")
        if folder.is_symlink():
            raise OperationsError(
                f"{folder} is a link; what lies in it would be deleted: remove the link"
            )
        folder.mkdir(exist_ok=True)
        try:
            for copy in folder.iterdir():
                copy.unlink()
            yield folder
        finally:
            for copy in folder.iterdir():
                copy.unlink()
            folder.rmdir()

    # Telling

    def _skip(self, local: str, line: str) -> None:
        if local not in self._skipped:
            self._skipped.add(local)
            self._leave_out([line])

    def _leave_out(self, lines: Sequence[str]) -> None:
        self._outcome.left_out += lines
        for line in lines:
            self._warn(line)

    def _tell(self, title: str, groups: Sequence[CommitGroup]) -> None:
        added = [piece.remote for group in groups for piece in group.adds]
        self._say(f"{title}: {_shorten(added, ' ')}" if added else title)
        for group in groups:
            for remote in group.deletes:
                self._say(f"deleted on the Hub: {remote}")

    def _tell_dry_run(
        self, deletions: Sequence[CommitGroup] | None, wanted: Mapping[str, Sequence[RemoteFile]]
    ) -> None:
        everything = plan_commit(wanted, self._state, commit_bytes=1 << 62, commit_files=1 << 62)
        for group in [*(deletions or ()), *everything]:
            for piece in group.adds:
                self._say(f"would send {piece.remote} ({piece.blob.size} bytes)")
            for remote in group.deletes:
                self._say(f"would delete on the Hub: {remote}")

    def _keep(self, found: FolderScan) -> None:
        """Write what we know, where it is news."""
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
    added, deleted = (
        sum(len(group.adds) for group in groups),
        sum(len(group.deletes) for group in groups),
    )
    done = [f"{_format_count(added, 'file')}, {format_size(_count_bytes(groups))}"] if added else []
    done += [f"{_format_count(deleted, 'file')} deleted"] if deleted else []
    return f"Sync {'; '.join(done)}"


def _format_lines(groups: Sequence[CommitGroup]) -> list[str]:
    added = [
        f"+ {piece.remote} ({piece.blob.size} bytes)" for group in groups for piece in group.adds
    ]
    return added + [f"- {remote}" for group in groups for remote in group.deletes]


def _count_bytes(groups: Sequence[CommitGroup]) -> int:
    return sum(piece.blob.size for group in groups for piece in group.adds)


def _format_count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def format_size(size: int) -> str:
    """1536 -> 1.5 KiB"""
    amount, unit = float(size), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.0f} {unit}" if unit == "bytes" else f"{amount:.1f} {unit}"


def _shorten(names: Sequence[str], between: str) -> str:
    more = len(names) - _NAMED
    return between.join([*names[:_NAMED], *([f"and {more} more"] if more > 0 else [])])

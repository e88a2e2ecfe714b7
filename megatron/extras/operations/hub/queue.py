"""Comparison of a folder with its copy on the Hub. The difference is what a sync must send.

A growing log is copied as parts, `main_log.txt.000000` and so on. Parts end at line ends, and
joined they are the log. Other files are copied as one remote file.

Invariant: where a part ends depends only on the PART_BYTES bytes from its beginning on. So a part
before the last one does not change while the log grows, and is sent once.
"""

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from megatron.base.durable import replace_file
from megatron.base.outside_file import INDEX_BYTES, load_json
from megatron.extras.operations.hub.inside import OutsideError, open_inside, real_name

PART_BYTES = 1 << 20
"""Largest size of a part of a log."""
ROTATED = (".txt", ".log", ".out", ".err", ".jsonl")
"""Suffixes of files that grow by lines."""
COMMIT_BYTES = 64 << 20
"""Largest size of a commit, unless it has one larger file. A lost connection costs one commit."""
COMMIT_FILES = 1_000
"""Largest number of files in a commit."""
_FORMAT = 1
_FRESH_NS = 2_000_000_000
"""A file that was modified so recently may change again under the same time stamp.

The next sync does not trust its digest."""
_READ = 1 << 20
"""Bytes to read at once."""


@dataclass(frozen=True)
class Blob:
    """The content of one remote file."""

    size: int
    git: str
    """Id of the content as a git blob, as the Hub reports it for small files."""
    sha256: str
    """Digest of the content, as the Hub reports it for files in large file storage."""

    def has(self, oid: str | None) -> bool:
        """Return whether the Hub's `oid` (see `hub.get_oid`) belongs to this content."""
        # Which of the two ids is used is the Hub's decision.
        return oid in (f"git:{self.git}", f"sha256:{self.sha256}")


@dataclass(frozen=True)
class LocalFile:
    """A local file, up to the size that it had when it was read. It may have grown since."""

    size: int
    mtime_ns: int
    """Time of the last modification, or 0 if it was too recent to be trusted."""
    blobs: tuple[Blob, ...]
    """Contents of the file's parts in order, or the one content of a file without parts."""


@dataclass(frozen=True)
class RemoteFile:
    """Content that one remote file must have: the bytes of a local file from `offset` on."""

    remote: str
    local: str
    offset: int
    blob: Blob


@dataclass(frozen=True)
class SentFile:
    """Known content of a remote file, and the local file that it is a copy of."""

    oid: str
    local: str


@dataclass(frozen=True)
class CommitGroup:
    """Operations of one commit that belong to one local file."""

    local: str
    adds: tuple[RemoteFile, ...]
    deletes: tuple[str, ...]


@dataclass
class FolderScan:
    """Result of a scan of the folder. Names are relative, with forward slashes."""

    files: dict[str, LocalFile] = field(default_factory=dict)
    """Matching files that could be read, name -> content."""
    present: set[str] = field(default_factory=set)
    """All matching files. Those that could not be read are not deleted on the Hub."""
    empty: list[str] = field(default_factory=list)
    """Patterns that match nothing."""
    complaints: list[str] = field(default_factory=list)
    """One line for each file or folder that could not be read."""
    complete: bool = True
    """Whether every folder could be listed. Only then is a missing file known to be deleted."""


@dataclass
class SyncState:
    """Memory of the last sync. If it is lost, the next sync compares everything again."""

    repository: str = ""
    """Host and name, so that the state of another repository is not used."""
    head: str | None = None
    """Commit of the main branch that `sent` describes."""
    files: dict[str, LocalFile] = field(default_factory=dict)
    """Local name -> content. An unchanged file is not read again."""
    sent: dict[str, SentFile] = field(default_factory=dict)
    """Remote path -> content there, for the remote files that a sync has sent."""
    checkpoints: dict[str, str] = field(default_factory=dict)
    """Branch -> digest of the manifest that is on it."""

    def write(self, path: Path) -> None:
        """Replace the state file at `path`."""
        # The file is replaced by a rename, so that a killed sync leaves the old or the new state.
        replace_file(path, json.dumps({"format": _FORMAT, **asdict(self)}, separators=(",", ":")))


def read_state(path: Path, repository: str, log: Callable[[str], None]) -> SyncState:
    """Return the state in a file, or an empty one if it is missing, damaged or not ours.

    Args:
        path: The state file.
        repository: Host and name of the repository. The state of another one is not used.
        log: Receives a line if the state cannot be used.
    """
    try:
        record = load_json(path, INDEX_BYTES)
        if record.pop("format") == _FORMAT and record["repository"] == repository:
            files = {
                name: LocalFile(
                    file["size"], file["mtime_ns"], tuple(Blob(**blob) for blob in file["blobs"])
                )
                for name, file in record.pop("files").items()
            }
            sent = {remote: SentFile(**ours) for remote, ours in record.pop("sent").items()}
            return SyncState(files=files, sent=sent, **record)
        log(
            f"{path} is for another repository or has another format; every file is compared with "
            f"{repository} again"
        )
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as damage:
        log(f"{path} is damaged ({damage}); every file is compared with {repository} again")
    return SyncState(repository=repository)


# The folder


def look(folder: Path, patterns: Sequence[str], known: Mapping[str, LocalFile]) -> FolderScan:
    """Scan a folder, and read the files that have changed.

    Args:
        folder: Folder to scan.
        patterns: Patterns of the files to find, see `convert_pattern`.
        known: Files as the last scan read them. One with the same size and time is not read again.
    """
    found = FolderScan()
    matching = [re.compile(convert_pattern(pattern)) for pattern in patterns]
    matched = [False] * len(patterns)

    def note_unlisted(error: OSError) -> None:
        found.complete = False
        found.complaints.append(
            f"{error.filename} cannot be listed ({error.strerror}); nothing is deleted on the Hub "
            "this time"
        )

    for name in _iterate_names(
        folder,
        # The fixed folders that each pattern starts with. Other folders need not be listed, which
        # matters if checkpoints with thousands of files are next to the logs.
        [re.split(r"[*?[]", pattern)[0].rpartition("/")[0] for pattern in patterns],
        note_unlisted,
    ):
        hits = [number for number, regex in enumerate(matching) if regex.fullmatch(name)]
        if hits:
            for number in hits:
                matched[number] = True
            _take(folder, name, known.get(name), found)
    found.empty = [pattern for pattern, hit in zip(patterns, matched, strict=True) if not hit]
    return found


def convert_pattern(pattern: str) -> str:
    """Return the regular expression of a shell pattern.

    `*` matches within one folder, and `**` matches over any number of folders. Neither matches a
    name that begins with a dot. `?` and `[...]` match one character.
    """
    pieces = []
    position = 0
    visible = r"(?!\.)"
    # `fnmatch` is no alternative, because its `*` also matches slashes and leading dots.
    for match in re.finditer(r"(?:^|(?<=/))\*\*(/|$)|\*|\?|\[!?[^\]/]+\]", pattern):
        pieces.append(re.escape(pattern[position : match.start()]))
        starts = match.start() == 0 or pattern[match.start() - 1] == "/"
        if match[0] == "**/":
            pieces.append(rf"(?:{visible}[^/]+/)*")
        elif match[0] == "**":
            pieces.append(rf"(?:{visible}[^/]+/)*{visible}[^/]+")
        elif match[0] == "*":
            pieces.append(rf"{visible}[^/]*" if starts else "[^/]*")
        elif match[0] == "?":
            pieces.append(rf"{visible}[^/]" if starts else "[^/]")
        else:
            # Escape the characters, but keep the hyphen of a range like [0-9].
            one_of = re.escape(match[0].strip("[]!")).replace(r"\-", "-")
            pieces.append(f"[^/{one_of}]" if match[0][1] == "!" else f"[{one_of}]")
        position = match.end()
    return "".join(pieces) + re.escape(pattern[position:])


def _iterate_names(
    folder: Path, tops: Sequence[str], note_unlisted: Callable[[OSError], None]
) -> Iterator[str]:
    """Yield the files in the folders `tops`, in their subfolders, and in the folders above them.

    Links to folders are followed, and each real folder is listed once. A link that leads out of
    `folder` is not followed. It is unknown which files were sent through it, so it is reported to
    `note_unlisted` like a folder that cannot be listed.
    """
    seen: set[str] = set()

    def is_on_path(name: str) -> bool:
        # The folder is inside one of `tops`, or one of `tops` is inside the folder.
        return any(
            f"{name}/".startswith(f"{top}/" if top else "") or f"{top}/".startswith(f"{name}/")
            for top in tops
        )

    for root, folders, files in os.walk(folder, onerror=note_unlisted, followlinks=True):
        real = os.path.realpath(root)
        below = "" if root == os.fspath(folder) else f"{os.path.relpath(root, folder)}/"
        wanted = sorted(name for name in folders if is_on_path(below + name))
        # `os.walk` descends into the folders that this same list holds after the loop body.
        folders[:] = []
        # This ends loops of links, which `os.walk` does not detect.
        if real in seen:
            continue
        seen.add(real)
        for name in wanted:
            try:
                real_name(folder, below + name)
                folders.append(name)
            except OutsideError as error:
                note_unlisted(OSError(0, error.strerror, os.path.join(root, name)))
        yield from (below + name for name in files)


def _take(folder: Path, name: str, known: LocalFile | None, found: FolderScan) -> None:
    """Add a file to the scan, as it is known or after reading it."""
    # The file is present even if it cannot be read below. Its copy must not be deleted.
    found.present.add(name)
    try:
        # Raises UnicodeEncodeError for a name that the Hub cannot have.
        name.encode()
        with open_inside(folder, name) as file:
            status = os.fstat(file.fileno())
        if known is not None and (known.size, known.mtime_ns) == (
            status.st_size,
            status.st_mtime_ns,
        ):
            found.files[name] = known
        else:
            found.files[name] = digest(folder / name, rotated=is_rotated(name), folder=folder)
    except OutsideError as error:
        found.complaints.append(f"{name} {error.strerror}; left out")
    except FileNotFoundError:
        found.complaints.append(f"{name} vanished during the scan; left out")
    except UnicodeEncodeError:
        found.complaints.append(f"{name!a} has a name that is not UTF-8; left out")
    except OSError as error:
        found.complaints.append(f"{name} cannot be read ({error.strerror}); left out")


def is_rotated(name: str) -> bool:
    """Return whether a file is a growing log, which is copied in parts."""
    return name.endswith(ROTATED)


def format_part_name(name: str, number: int) -> str:
    """Return the remote name of a log's part, like `main_log.txt.000012`."""
    return f"{name}.{number:06d}"


def parse_part_name(remote: str) -> tuple[str, int] | None:
    """Return the log and the number of a part's name, or None for another name."""
    match = re.fullmatch(r"(.+)\.(\d{6})", remote, re.ASCII | re.DOTALL)
    if match and is_rotated(match[1]):
        return (match[1], int(match[2]))
    return None


def digest(
    path: Path, *, rotated: bool, part_bytes: int | None = None, folder: Path | None = None
) -> LocalFile:
    """Read a file up to the size that it has when it is opened, and return its digests.

    Args:
        path: File to read.
        rotated: Whether to divide it into parts.
        part_bytes: Largest size of a part. Default: PART_BYTES.
        folder: Folder that the file must be in. Default: the file's own folder.

    Raises:
        OSError: The file cannot be read.
        OutsideError: The file is outside of `folder`.
        InterruptedError: The file got shorter while it was read.
    """
    top = folder or path.parent
    with open_inside(top, os.fspath(path.relative_to(top))) as file:
        status = os.fstat(file.fileno())
        fresh = time.time_ns() - status.st_mtime_ns < _FRESH_NS
        if rotated:
            blobs: Iterable[Blob] = _split_parts(
                file.read, status.st_size, part_bytes or PART_BYTES
            )
        else:
            blobs = [_digest_blob(_stream(file.read, status.st_size), status.st_size)]
        # No file has the time stamp 0, so the next scan reads a fresh file again.
        return LocalFile(status.st_size, 0 if fresh else status.st_mtime_ns, tuple(blobs))


def _split_parts(read: Callable[[int], bytes], size: int, part_bytes: int) -> Iterator[Blob]:
    """Yield the contents of a log's parts.

    A part is closed as soon as the log has more than `part_bytes` bytes from the part's beginning
    on. It then ends at the last line end within these `part_bytes`. A longer line is divided. The
    last part is open, and grows.
    """
    pending = b""
    left = size
    while left or pending:
        if len(pending) < part_bytes and left:
            more = b"".join(_stream(read, min(left, part_bytes - len(pending))))
            pending += more
            left -= len(more)
        # `rfind` gives -1 if there is no line end. The last part has all that is left.
        end = pending.rfind(b"\n") + 1 if left else 0
        end = end or len(pending)
        yield _digest_blob([pending[:end]], end)
        pending = pending[end:]
    # An empty log has one empty part, so that its copy exists.
    if size == 0:
        yield _digest_blob([], 0)


def _stream(read: Callable[[int], bytes], size: int) -> Iterator[bytes]:
    """Yield the next `size` bytes in pieces.

    Raises:
        InterruptedError: The file ends earlier, because it was shortened.
    """
    left = size
    while left:
        data = read(min(left, _READ))
        if not data:
            raise InterruptedError(0, "it got shorter while it was read")
        left -= len(data)
        yield data


def _digest_blob(chunks: Iterable[bytes], size: int) -> Blob:
    """Return the `Blob` of a content, with its size and both digests."""
    # git hashes the header "blob SIZE\0" with the content. The size must be known before.
    git = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    sha256 = hashlib.sha256()
    for chunk in chunks:
        git.update(chunk)
        sha256.update(chunk)
    return Blob(size, git.hexdigest(), sha256.hexdigest())


# The difference


def plan_remote_files(
    files: Mapping[str, LocalFile],
) -> tuple[dict[str, list[RemoteFile]], list[str]]:
    """Return what the Hub must hold.

    Returns:
        The remote files of each local name, and one line for each file that the Hub cannot take.
    """
    pieces: dict[str, list[RemoteFile]] = {}
    complaints = []
    for name in sorted(files):
        parts = parse_part_name(name)
        # Two local files would have one remote name, and replace each other in every sync.
        if parts is not None and parts[0] in files:
            complaints.append(f"{name} has the name of a part of {parts[0]}; left out, rename it")
            continue
        # huggingface_hub raises a ValueError for such a path, which would stop the complete sync.
        if any(part in (".git", ".cache") for part in name.split("/")):
            complaints.append(
                f"{name} is in a folder that the Hub does not accept (.git, .cache); left out"
            )
            continue
        offset = 0
        pieces[name] = []
        for number, blob in enumerate(files[name].blobs):
            remote = format_part_name(name, number) if is_rotated(name) else name
            pieces[name].append(RemoteFile(remote, name, offset, blob))
            offset += blob.size
    return pieces, complaints


def adopt(
    state: SyncState,
    head: str,
    listing: Mapping[str, str],
    wanted: Mapping[str, Sequence[RemoteFile]],
) -> None:
    """Replace `state.sent` by what a listing of the repository shows.

    Files of other people stay out of it, so that a sync never deletes them. A remote file counts as
    ours in three cases. The state has it, it equals the local file, or it is a part of a local log.

    Args:
        state: State to change.
        head: Commit of the listing.
        listing: Remote path -> the Hub's id of the content.
        wanted: Local name -> the remote files that it must have.
    """
    sent = {
        remote: SentFile(listing[remote], ours.local)
        for remote, ours in state.sent.items()
        if remote in listing
    }
    for pieces in wanted.values():
        sent |= {
            p.remote: SentFile(listing[p.remote], p.local)
            for p in pieces
            if p.blob.has(listing.get(p.remote))
        }
    # Parts of a local log are ours even where they differ. After a rollback, the log is shorter and
    # its surplus parts have to be deleted.
    for remote, oid in listing.items():
        part = parse_part_name(remote)
        if part is not None and part[0] in wanted:
            sent[remote] = SentFile(oid, part[0])
    state.head = head
    state.sent = sent


def find_deletions(
    state: SyncState, found: FolderScan, patterns: Sequence[str]
) -> tuple[list[CommitGroup], list[str]]:
    """Find what to delete on the Hub because it was deleted here.

    Only files that a sync has sent are deleted, and only if they match one of `patterns`. If a
    pattern matches nothing at all, its files are kept, because a disk may not be mounted.

    Returns:
        The deletions, and the local names whose deletion is withheld.
    """
    # A file in a folder that could not be listed looks like a deleted one.
    if not found.complete:
        return [], []
    alive = [
        re.compile(convert_pattern(pattern)) for pattern in patterns if pattern not in found.empty
    ]
    silent = [re.compile(convert_pattern(pattern)) for pattern in found.empty]
    groups = []
    withheld = []
    for local, remotes in sorted(_list_copies(state).items()):
        if local in found.present:
            continue
        if any(regex.fullmatch(local) for regex in alive):
            groups.append(CommitGroup(local, (), tuple(sorted(remotes))))
        elif any(regex.fullmatch(local) for regex in silent):
            withheld.append(local)
    return groups, withheld


def plan_commit(
    wanted: Mapping[str, Sequence[RemoteFile]],
    state: SyncState,
    *,
    commit_bytes: int | None = None,
    commit_files: int | None = None,
) -> list[CommitGroup]:
    """Plan the next commit, of bounded size. The plan is empty if nothing differs.

    Invariant: after each commit, the parts of a log that are on the Hub are the beginning of the
    log. If a log does not fit into the commit, the same commit deletes its later parts on the Hub.
    They belong to an older state of the log.

    Args:
        wanted: Local name -> the remote files that it must have.
        state: What the Hub has.
        commit_bytes: Size of a commit. A larger file has a commit of its own. Default:
            COMMIT_BYTES.
        commit_files: Number of files in a commit. Default: COMMIT_FILES.
    """
    commit_bytes = commit_bytes or COMMIT_BYTES
    copies = _list_copies(state)
    groups: list[CommitGroup] = []
    left_bytes = commit_bytes
    left_files = commit_files or COMMIT_FILES
    for local, pieces in wanted.items():
        differing = [
            piece for piece in pieces if not piece.blob.has(get_known_oid(state, piece.remote))
        ]
        names = {piece.remote for piece in pieces}
        surplus = sorted(remote for remote in copies.get(local, ()) if remote not in names)
        if not differing and not surplus:
            continue
        adds: list[RemoteFile] = []
        for piece in differing:
            # The last condition lets a file that is larger than a commit into an empty one.
            # Otherwise it would never be sent.
            if left_files < 1 or (left_bytes < piece.blob.size and left_bytes < commit_bytes):
                # Numbers of parts have leading zeros, so names compare like numbers.
                beyond = sorted(
                    remote for remote in copies.get(local, ()) if remote >= piece.remote
                )
                if adds:
                    return [*groups, CommitGroup(local, tuple(adds), tuple(beyond))]
                return groups
            adds.append(piece)
            left_bytes -= piece.blob.size
            left_files -= 1
        groups.append(CommitGroup(local, tuple(adds), tuple(surplus)))
    return groups


def _list_copies(state: SyncState) -> dict[str, list[str]]:
    """Return the remote files of each local file that a sync has sent."""
    copies: dict[str, list[str]] = {}
    for remote, ours in state.sent.items():
        copies.setdefault(ours.local, []).append(remote)
    return copies


def get_known_oid(state: SyncState, remote: str) -> str | None:
    """Return the Hub's id of a remote file that we sent, or None."""
    ours = state.sent.get(remote)
    return None if ours is None else ours.oid

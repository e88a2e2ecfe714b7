"""What a folder holds, and where a repository's copy of it differs: the queue of a sync is this difference, and nothing else.

A growing log is copied as parts, `main_log.txt.000000` and so on, cut at line ends; joined, they are the log. Where a cut lies
depends on the part's own bytes alone, so a part that is closed stays as it is while the log grows. Other files are copied whole.
"""

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from megatron.durable import replace_file
from megatron.operations.inside import OutsideError, open_inside, real_name

PART_BYTES = 1 << 20
ROTATED = (".txt", ".log", ".out", ".err", ".jsonl")
"""Suffixes of files that grow by lines."""
COMMIT_BYTES = 64 << 20
COMMIT_FILES = 1_000
_FORMAT = 1
_FRESH_NS = 2_000_000_000
"""A file touched so recently may change again under the same time stamp: its digest is not trusted at the next sync."""
_READ = 1 << 20


@dataclass(frozen=True)
class Blob:
    """The content of one remote file."""

    size: int
    git: str
    sha256: str

    def has(self, oid: str | None) -> bool:
        """Whether the Hub's `oid` (see `hub.get_oid`) is of this content."""
        return oid in (f"git:{self.git}", f"sha256:{self.sha256}")


@dataclass(frozen=True)
class LocalFile:
    """A file as far as we have read it: it may have grown since."""

    size: int
    mtime_ns: int
    blobs: tuple[Blob, ...]
    """Of its parts, or of the whole."""


@dataclass(frozen=True)
class RemoteFile:
    """What one remote file must hold: bytes of a local file from `offset` on."""

    remote: str
    local: str
    offset: int
    blob: Blob


@dataclass(frozen=True)
class SentFile:
    """What we know a remote file to hold, and which local file it is a copy of."""

    oid: str
    local: str


@dataclass(frozen=True)
class CommitGroup:
    """What one local file asks of one commit."""

    local: str
    adds: tuple[RemoteFile, ...]
    deletes: tuple[str, ...]


@dataclass
class FolderScan:
    """What a look at the folder gave. Names are relative, with forward slashes."""

    files: dict[str, LocalFile] = field(default_factory=dict)
    present: set[str] = field(default_factory=set)
    """Also those that could not be read: they are not deleted on the Hub."""
    empty: list[str] = field(default_factory=list)
    """Patterns that match nothing."""
    complaints: list[str] = field(default_factory=list)
    complete: bool = True
    """Every folder could be listed: what is not there has been deleted."""


@dataclass
class SyncState:
    """What the last sync knew; losing it costs time, and nothing else."""

    repository: str = ""
    """Host and name, so that another repository's state is not taken for this one's."""
    head: str | None = None
    """The main branch's commit for which `sent` holds."""
    files: dict[str, LocalFile] = field(default_factory=dict)
    sent: dict[str, SentFile] = field(default_factory=dict)
    """Remote path -> ours there."""
    checkpoints: dict[str, str] = field(default_factory=dict)
    """Branch -> digest of the manifest that is on it."""

    def write(self, path: Path) -> None:
        replace_file(path, json.dumps({"format": _FORMAT, **asdict(self)}, separators=(",", ":")))


def read_state(path: Path, repository: str, say: Callable[[str], None]) -> SyncState:
    """The state, or a blank one where it is lost, damaged or another repository's."""
    try:
        record = json.loads(path.read_bytes())
        if record.pop("format") == _FORMAT and record["repository"] == repository:
            files = {
                name: LocalFile(
                    file["size"], file["mtime_ns"], tuple(Blob(**blob) for blob in file["blobs"])
                )
                for name, file in record.pop("files").items()
            }
            sent = {remote: SentFile(**ours) for remote, ours in record.pop("sent").items()}
            return SyncState(files=files, sent=sent, **record)
        say(f"{path} is of another repository; what is on {repository} is compared file by file")
    except FileNotFoundError:
        pass
    except (ValueError, KeyError, TypeError, AttributeError) as damage:
        say(f"{path} is damaged ({damage}); what is on {repository} is compared file by file")
    return SyncState(repository=repository)


# The folder


def look(folder: Path, patterns: Sequence[str], known: Mapping[str, LocalFile]) -> FolderScan:
    """Find the files that match; read those that are not as `known`."""
    found = FolderScan()
    matching = [re.compile(convert_pattern(pattern)) for pattern in patterns]
    matched = [False] * len(patterns)

    def note_unlisted(error: OSError) -> None:
        found.complete = False
        found.complaints.append(
            f"{error.filename} cannot be listed ({error.strerror}); nothing is deleted on the Hub this time"
        )

    for name in _iterate_names(
        folder,
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
    """As in a shell: `*` stays within a folder, `**` does not; neither takes a name that begins with a dot."""
    pieces, position = [], 0
    visible = r"(?!\.)"
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
            one_of = re.escape(match[0].strip("[]!")).replace(r"\-", "-")
            pieces.append(f"[^/{one_of}]" if match[0][1] == "!" else f"[{one_of}]")
        position = match.end()
    return "".join(pieces) + re.escape(pattern[position:])


def _iterate_names(
    folder: Path, tops: Sequence[str], note_unlisted: Callable[[OSError], None]
) -> Iterator[str]:
    """Files that lie in or on the way to one of the folders `tops`; through links to folders too, each real folder once.

    A link to a folder outside is not followed. What was sent through it cannot be known, so it counts as one that is note_unlisted.
    """
    seen: set[str] = set()

    def is_on_path(name: str) -> bool:
        return any(
            f"{name}/".startswith(f"{top}/" if top else "") or f"{top}/".startswith(f"{name}/")
            for top in tops
        )

    for root, folders, files in os.walk(folder, onerror=note_unlisted, followlinks=True):
        real = os.path.realpath(root)
        below = "" if root == os.fspath(folder) else f"{os.path.relpath(root, folder)}/"
        wanted = (
            [] if real in seen else sorted(name for name in folders if is_on_path(below + name))
        )
        folders[:] = []
        for name in wanted:
            try:
                real_name(folder, below + name)
                folders.append(name)
            except OutsideError as error:
                note_unlisted(OSError(0, error.strerror, os.path.join(root, name)))
        if real not in seen:
            yield from (below + name for name in files)
        seen.add(real)


def _take(folder: Path, name: str, known: LocalFile | None, found: FolderScan) -> None:
    found.present.add(name)
    try:
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
        found.complaints.append(f"{name} vanished while we looked; left out")
    except UnicodeEncodeError:
        found.complaints.append(f"{name!a} has a name that is no UTF-8; left out")
    except OSError as error:
        found.complaints.append(f"{name} cannot be read ({error.strerror}); left out")


def is_rotated(name: str) -> bool:
    """Whether it is copied in parts."""
    return name.endswith(ROTATED)


def format_part_name(name: str, number: int) -> str:
    """main_log.txt.000012"""
    return f"{name}.{number:06d}"


def parse_part_name(remote: str) -> tuple[str, int] | None:
    """(log, number) of a part's name; None for any other."""
    match = re.fullmatch(r"(.+)\.(\d{6})", remote, re.ASCII | re.DOTALL)
    return (match[1], int(match[2])) if match and is_rotated(match[1]) else None


def digest(
    path: Path, *, rotated: bool, part_bytes: int = PART_BYTES, folder: Path | None = None
) -> LocalFile:
    """Read a file up to the size that it has when we open it. It must lie in `folder`, by default its own.

    Raises:
        OSError: it cannot be read, lies elsewhere (`OutsideError`), or got shorter meanwhile (`InterruptedError`).
    """
    top = path.parent if folder is None else folder
    with open_inside(top, os.fspath(path.relative_to(top))) as file:
        status = os.fstat(file.fileno())
        fresh = time.time_ns() - status.st_mtime_ns < _FRESH_NS
        blobs = (
            _split_parts(file.read, status.st_size, part_bytes)
            if rotated
            else [_digest_blob(_stream(file.read, status.st_size), status.st_size)]
        )
        return LocalFile(status.st_size, 0 if fresh else status.st_mtime_ns, tuple(blobs))


def _split_parts(read: Callable[[int], bytes], size: int, part_bytes: int) -> Iterator[Blob]:
    """A part is closed as soon as the log is longer than the most a part may have; its end is the last line's end in that."""
    pending, left = b"", size
    while left or pending:
        if len(pending) < part_bytes and left:
            more = b"".join(_stream(read, min(left, part_bytes - len(pending))))
            pending, left = pending + more, left - len(more)
        end = pending.rfind(b"\n") + 1 if left else len(pending)
        end = end or len(pending)
        yield _digest_blob([pending[:end]], end)
        pending = pending[end:]
    if size == 0:
        yield _digest_blob([], 0)


def _stream(read: Callable[[int], bytes], size: int) -> Iterator[bytes]:
    left = size
    while left:
        data = read(min(left, _READ))
        if not data:
            raise InterruptedError(0, "it got shorter while it was read")
        left -= len(data)
        yield data


def _digest_blob(chunks: Iterable[bytes], size: int) -> Blob:
    git, sha256 = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False), hashlib.sha256()
    for chunk in chunks:
        git.update(chunk)
        sha256.update(chunk)
    return Blob(size, git.hexdigest(), sha256.hexdigest())


# The difference


def plan_remote_files(
    files: Mapping[str, LocalFile],
) -> tuple[dict[str, list[RemoteFile]], list[str]]:
    """Local name -> what the Hub must hold of it, and complaints about names that two files would have there."""
    pieces: dict[str, list[RemoteFile]] = {}
    complaints = []
    for name in sorted(files):
        parts = parse_part_name(name)
        if parts is not None and parts[0] in files:
            complaints.append(f"{name} has the name of a part of {parts[0]}; rename it: left out")
            continue
        if any(part in (".git", ".cache") for part in name.split("/")):
            complaints.append(
                f"{name} lies in a folder that the Hub does not take (.git, .cache); left out"
            )
            continue
        offset, mine = 0, []
        for number, blob in enumerate(files[name].blobs):
            mine.append(
                RemoteFile(
                    format_part_name(name, number) if is_rotated(name) else name, name, offset, blob
                )
            )
            offset += blob.size
        pieces[name] = mine
    return pieces, complaints


def adopt(
    state: SyncState,
    head: str,
    listing: Mapping[str, str],
    wanted: Mapping[str, Sequence[RemoteFile]],
) -> None:
    """Take what the Hub says for what is there. Ours is what we sent, what equals ours, and parts of logs that are ours."""
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
    for remote, oid in listing.items():
        part = parse_part_name(remote)
        if part is not None and part[0] in wanted:
            sent[remote] = SentFile(oid, part[0])
    state.head, state.sent = head, sent


def find_deletions(
    state: SyncState, found: FolderScan, patterns: Sequence[str]
) -> tuple[list[CommitGroup], list[str]]:
    """What to delete on the Hub because it was deleted here, and the local names whose deletion is withheld.

    Only ours, only under these patterns, and not where a pattern finds nothing at all: the disk may not be mounted.
    """
    if not found.complete:
        return [], []
    alive = [
        re.compile(convert_pattern(pattern)) for pattern in patterns if pattern not in found.empty
    ]
    silent = [re.compile(convert_pattern(pattern)) for pattern in found.empty]
    copies: dict[str, list[str]] = {}
    for remote, ours in state.sent.items():
        if ours.local not in found.present:
            copies.setdefault(ours.local, []).append(remote)
    groups, withheld = [], []
    for local, remotes in sorted(copies.items()):
        if any(regex.fullmatch(local) for regex in alive):
            groups.append(CommitGroup(local, (), tuple(sorted(remotes))))
        elif any(regex.fullmatch(local) for regex in silent):
            withheld.append(local)
    return groups, withheld


def plan_commit(
    wanted: Mapping[str, Sequence[RemoteFile]],
    state: SyncState,
    *,
    commit_bytes: int = COMMIT_BYTES,
    commit_files: int = COMMIT_FILES,
) -> list[CommitGroup]:
    """The files of one commit of bounded size; empty where nothing differs. After it, and each that follows, every log's parts
    joined are its beginning: where a log does not fit, what the Hub holds beyond the cut goes in the same commit."""
    copies: dict[str, list[str]] = {}
    for remote, ours in state.sent.items():
        copies.setdefault(ours.local, []).append(remote)
    groups: list[CommitGroup] = []
    left_bytes, left_files = commit_bytes, commit_files
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
            if left_files < 1 or (left_bytes < piece.blob.size and left_bytes < commit_bytes):
                beyond = sorted(
                    remote for remote in copies.get(local, ()) if remote >= piece.remote
                )
                return [*groups, CommitGroup(local, tuple(adds), tuple(beyond))] if adds else groups
            adds.append(piece)
            left_bytes, left_files = left_bytes - piece.blob.size, left_files - 1
        groups.append(CommitGroup(local, tuple(adds), tuple(surplus)))
    return groups


def get_known_oid(state: SyncState, remote: str) -> str | None:
    ours = state.sent.get(remote)
    return None if ours is None else ours.oid

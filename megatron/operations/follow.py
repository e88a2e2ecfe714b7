"""`tail -f` of a log that a sync keeps on a Hub in parts.

Each look asks for the branch's commit; only where that has moved is the last part fetched, at that commit, so that what is read is
of one state of the log. Bytes are handed on once, in order, but for a log that was cut: that is told, and followed from the cut.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron.errors import OperationsError
from megatron.operations.hub import Hub, HubMoved
from megatron.operations.hub_queue import format_part_name, parse_part_name

_ASKED_AT_ONCE = 500


@dataclass(frozen=True)
class LogUpdate:
    """What one look gave."""

    data: bytes = b""
    cut: str | None = None
    """Told before `data`: the log was cut, and where it goes on."""


@dataclass
class Follower:
    """Reads one log. A look that fails changes nothing: look again."""

    hub: Hub
    path: str
    lines: int
    """How many of its last lines to begin with."""
    _commit: str | None = None
    _oids: list[str] = field(default_factory=list)
    """Of the parts up to the one that is open."""
    _open: bytes = b""
    """What was read of the last part."""

    def look(self) -> LogUpdate:
        """
        Raises:
            OperationsError: there is no such log. HubUnavailable: no answer.
        """
        commit = self.hub.head()
        if commit == self._commit:
            return LogUpdate()
        news = self._begin(commit) if self._commit is None else self._go_on(commit)
        self._commit = commit
        return news

    def _begin(self, commit: str) -> LogUpdate:
        oids = self._list_oids(commit)
        data, opened = b"", None
        for number in range(len(oids) - 1, -1, -1):
            part = self.hub.download_file(commit, format_part_name(self.path, number))
            opened = part if opened is None else opened
            data = part + data
            if data.count(b"\n", 0, -1) >= self.lines:
                break
        self._oids, self._open = oids, opened or b""
        return LogUpdate(_take_last_lines(data, self.lines))

    def _list_oids(self, commit: str) -> list[str]:
        folder = self.path.rpartition("/")[0]
        try:
            there = self.hub.list_files(commit, folder or None)
        except HubMoved:  # no such folder
            there = {}
        parts = {format_part_name(self.path, number) for number in range(len(there))}
        oids = [there[name] for name in sorted(parts & there.keys())]
        if not oids:
            logs = sorted(
                {
                    part[0]
                    for name in self.hub.list_files(commit)
                    if (part := parse_part_name(name)) is not None
                }
            )
            raise OperationsError(
                f"{self.hub.repo} holds no log {self.path} in parts, as tools/hub_sync.py stores one; "
                f"it holds: {', '.join(logs) or 'none'}"
            )
        return oids

    def _go_on(self, commit: str) -> LogUpdate:
        last = len(self._oids) - 1
        now = self._fetch_oids(commit, last)
        if not now:  # the part itself is gone
            return self._resume_after_cut(commit)
        if now[0] == self._oids[last]:
            fresh = [
                self.hub.download_file(commit, format_part_name(self.path, last + 1 + number))
                for number in range(len(now) - 1)
            ]
            data = b"".join(fresh)
        else:
            fresh = [
                self.hub.download_file(commit, format_part_name(self.path, last + number))
                for number in range(len(now))
            ]
            if not fresh[0].startswith(self._open):
                return self._resume_after_cut(commit)
            data = b"".join(fresh)[len(self._open) :]
        self._oids[last:] = now
        self._open = fresh[-1] if fresh else self._open
        return LogUpdate(data)

    def _fetch_oids(self, commit: str, first: int) -> list[str]:
        """Of the part `first` and those that follow it without a gap."""
        oids: list[str] = []
        asked = 2
        while True:
            names = [
                format_part_name(self.path, first + len(oids) + number) for number in range(asked)
            ]
            found = self.hub.fetch_oids(commit, names)
            more = _take_until_gap([found.get(name) for name in names])
            oids += more
            if len(more) < asked:
                return oids
            asked = _ASKED_AT_ONCE

    def _resume_after_cut(self, commit: str) -> LogUpdate:
        """Go on where the log differs from what was read: to the line in the last part, to the part in those before it."""
        oids = self._list_oids(commit)
        same = 0
        while same < min(len(oids), len(self._oids)) and oids[same] == self._oids[same]:
            same += 1
        fresh = [
            self.hub.download_file(commit, format_part_name(self.path, number))
            for number in range(same, len(oids))
        ]
        data = b"".join(fresh)
        if same == len(self._oids) - 1:
            data = data[_count_common_bytes(data, self._open) :]
        where = f"part {same}" if same < len(oids) else f"the end of part {same - 1}"
        self._oids = oids
        self._open = (
            fresh[-1]
            if fresh
            else self.hub.download_file(commit, format_part_name(self.path, len(oids) - 1))
        )
        return LogUpdate(data, f"{self.path} was cut (a rollback?); it goes on in {where}")


def _take_until_gap(oids: list[str | None]) -> list[str]:
    return list(_iterate_until_gap(oids))


def _iterate_until_gap(oids: list[str | None]) -> Iterator[str]:
    for oid in oids:
        if oid is None:
            return
        yield oid


def _take_last_lines(data: bytes, lines: int) -> bytes:
    return b"".join(data.splitlines(keepends=True)[-lines:]) if lines else b""


def _count_common_bytes(one: bytes, other: bytes) -> int:
    """Bytes of the lines that both begin with."""
    same = 0
    for mine, yours in zip(one.split(b"\n"), other.split(b"\n"), strict=False):
        if mine != yours:
            break
        same += len(mine) + 1
    return min(same, len(one))

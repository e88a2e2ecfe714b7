"""`tail -f` of a log that a sync keeps on a Hub in parts.

Each look asks for the branch's commit; only where that has moved is the last part fetched, at that commit, so that what is read is
of one state of the log. Bytes are handed on once, in order, but for a log that was cut: that is told, and followed from the cut.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron.errors import OperationsError
from megatron.operations.hub import Hub, HubMoved
from megatron.operations.hub_queue import part_name, part_of

_ASKED_AT_ONCE = 500


@dataclass(frozen=True)
class News:
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

    def look(self) -> News:
        """
        Raises:
            OperationsError: there is no such log. HubUnavailable: no answer.
        """
        commit = self.hub.head()
        if commit == self._commit:
            return News()
        news = self._begin(commit) if self._commit is None else self._go_on(commit)
        self._commit = commit
        return news

    def _begin(self, commit: str) -> News:
        oids = self._listing(commit)
        data, opened = b"", None
        for number in range(len(oids) - 1, -1, -1):
            part = self.hub.content(commit, part_name(self.path, number))
            opened = part if opened is None else opened
            data = part + data
            if data.count(b"\n", 0, -1) >= self.lines:
                break
        self._oids, self._open = oids, opened or b""
        return News(_last_lines(data, self.lines))

    def _listing(self, commit: str) -> list[str]:
        folder = self.path.rpartition("/")[0]
        try:
            there = self.hub.listing(commit, folder or None)
        except HubMoved:  # no such folder
            there = {}
        parts = {part_name(self.path, number) for number in range(len(there))}
        oids = [there[name] for name in sorted(parts & there.keys())]
        if not oids:
            logs = sorted({part[0] for name in self.hub.listing(commit) if (part := part_of(name)) is not None})
            raise OperationsError(
                f"{self.hub.repo} holds no log {self.path} in parts, as tools/hub_sync.py stores one; "
                f"it holds: {', '.join(logs) or 'none'}"
            )
        return oids

    def _go_on(self, commit: str) -> News:
        last = len(self._oids) - 1
        now = self._oids_now(commit, last)
        if not now:  # the part itself is gone
            return self._after_cut(commit)
        if now[0] == self._oids[last]:
            fresh = [self.hub.content(commit, part_name(self.path, last + 1 + number)) for number in range(len(now) - 1)]
            data = b"".join(fresh)
        else:
            fresh = [self.hub.content(commit, part_name(self.path, last + number)) for number in range(len(now))]
            if not fresh[0].startswith(self._open):
                return self._after_cut(commit)
            data = b"".join(fresh)[len(self._open) :]
        self._oids[last:] = now
        self._open = fresh[-1] if fresh else self._open
        return News(data)

    def _oids_now(self, commit: str, first: int) -> list[str]:
        """Of the part `first` and those that follow it without a gap."""
        oids: list[str] = []
        asked = 2
        while True:
            names = [part_name(self.path, first + len(oids) + number) for number in range(asked)]
            found = self.hub.oids(commit, names)
            more = _until_gap([found.get(name) for name in names])
            oids += more
            if len(more) < asked:
                return oids
            asked = _ASKED_AT_ONCE

    def _after_cut(self, commit: str) -> News:
        """Go on where the log differs from what was read: to the line in the last part, to the part in those before it."""
        oids = self._listing(commit)
        same = 0
        while same < min(len(oids), len(self._oids)) and oids[same] == self._oids[same]:
            same += 1
        fresh = [self.hub.content(commit, part_name(self.path, number)) for number in range(same, len(oids))]
        data = b"".join(fresh)
        if same == len(self._oids) - 1:
            data = data[_common_lines(data, self._open) :]
        where = f"part {same}" if same < len(oids) else f"the end of part {same - 1}"
        self._oids = oids
        self._open = fresh[-1] if fresh else self.hub.content(commit, part_name(self.path, len(oids) - 1))
        return News(data, f"{self.path} was cut (a rollback?); it goes on in {where}")


def _until_gap(oids: list[str | None]) -> list[str]:
    return list(_taken(oids))


def _taken(oids: list[str | None]) -> Iterator[str]:
    for oid in oids:
        if oid is None:
            return
        yield oid


def _last_lines(data: bytes, lines: int) -> bytes:
    return b"".join(data.splitlines(keepends=True)[-lines:]) if lines else b""


def _common_lines(one: bytes, other: bytes) -> int:
    """Bytes of the lines that both begin with."""
    same = 0
    for mine, yours in zip(one.split(b"\n"), other.split(b"\n"), strict=False):
        if mine != yours:
            break
        same += len(mine) + 1
    return min(same, len(one))

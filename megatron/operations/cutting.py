"""What of a run's records belongs to iterations behind the one it goes back to, and cutting it out of their files.

Invariant: no byte is lost. What goes is on the disk in a file of its own before the other changes, which is then replaced whole;
done again after a cut-off, or with nothing left to cut, it changes nothing more.

Rules. TensorBoard: each record by its own iteration (see `_EventSteps`). Metrics: a line's iteration; a start at the iteration itself
goes, with what followed it. Emissions: rows of a later second than the moment given. Log: everything behind the last line that
belongs to the iteration or to an earlier one. A line that cannot be read goes or stays with the one before it.
"""

import csv
import filecmp
import json
import os
import re
import shutil
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatron.durable import sync_folder, without_links
from megatron.errors import OperationsError
from megatron.observe.log_line import parse_log_line, parse_validation_log_line
from megatron.observe.report import Axes

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event

Span = tuple[int, int]
"""(first byte, the one behind the last)."""

_CHUNK = 1 << 20


@dataclass(frozen=True)
class CutSpans:
    """Where a file is to be cut."""

    stamp: tuple[int, int]
    """Size and time of change of the file that was looked at."""
    gone: tuple[Span, ...] = ()
    """In order; empty: nothing goes."""
    head: Span = (0, 0)
    """Stays, and heads what is cut out, too: a table's column names, an event file's version."""
    unreadable: tuple[Span, ...] = ()
    """Damage in a file that is cut: it goes to a file of its own, so that what stays and what goes is whole."""
    whole: bool = False
    """Nothing but the head would stay: the file itself goes."""
    count: int = 0
    total: int = 0
    unit: str = "lines"

    @property
    def said(self) -> str:
        """For people."""
        damage = (
            f", {sum(end - begin for begin, end in self.unreadable)} unreadable bytes apart"
            if self.unreadable
            else ""
        )
        return f"{self.count:,} of {self.total:,} {self.unit}{', the whole file' if self.whole else ''}{damage}"


def _read_stamp(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


# Lines


def _iterate_lines(path: Path) -> Iterator[tuple[Span, bytes]]:
    begin = 0
    with open(path, "rb") as file:
        for line in file:
            yield (begin, begin + len(line)), line
            begin += len(line)


def _merge_spans(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Neighbours as one."""
    merged: list[Span] = []
    for begin, end in spans:
        if merged and merged[-1][1] == begin:
            merged[-1] = merged[-1][0], end
        else:
            merged.append((begin, end))
    return tuple(merged)


def _find_lines_cut(
    path: Path, is_later: Callable[[bytes], bool | None], head: Span = (0, 0)
) -> CutSpans:
    """`is_later` says whether a line goes; None: as the one before it."""
    stamp, gone, total, later = _read_stamp(path), [], 0, False
    for span, line in _iterate_lines(path):
        if span[0] < head[1]:
            continue
        total += 1
        found = is_later(line)
        later = later if found is None else found
        if later:
            gone.append(span)
    return CutSpans(stamp, _merge_spans(gone), head, count=len(gone), total=total)


def _parse_metrics_record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:  # torn, or not text
        return None
    return record if isinstance(record, dict) and isinstance(record.get("iteration"), int) else None


def find_metrics_cut(path: Path, iteration: int) -> CutSpans:
    """Lines of later iterations; a start behind `iteration` itself is a later launch's, and goes too."""

    def is_later(line: bytes) -> bool | None:
        record = _parse_metrics_record(line)
        if record is None:
            return None
        return bool(record["iteration"] >= iteration + (record.get("kind") != "start"))

    return _find_lines_cut(path, is_later)


@dataclass(frozen=True)
class PassedIteration:
    """What a metrics file says of when a run passed an iteration."""

    to: int
    """The last iteration that it has."""
    passed: bool
    """It has iterations up to the one asked about; where not, the moment is not known."""
    moment: datetime | None
    """When the first later iteration was done, behind the last time that the run stood at that one; None: there is none."""


def find_when_passed(path: Path, iteration: int) -> PassedIteration:
    """As above, for `iteration`."""
    to, passed, moment = 0, False, None
    for _, line in _iterate_lines(path):
        record = _parse_metrics_record(line)
        if record is None or record.get("kind") == "start":
            continue
        to = max(to, record["iteration"])
        if record["iteration"] <= iteration:
            passed, moment = True, None
        elif moment is None:
            try:
                moment = datetime.fromisoformat(record["time"])
            except (KeyError, TypeError, ValueError):
                continue  # the next one tells
    return PassedIteration(to, passed, moment)


def find_emissions_cut(path: Path, moment: datetime | None) -> CutSpans:
    """Rows of a later second than `moment`; None: no row goes. codecarbon writes the host's local time without a zone, in seconds.

    Raises:
        OperationsError: it has no column `timestamp`.
    """
    first = next(_iterate_lines(path), None)
    if first is None or moment is None:
        return CutSpans(_read_stamp(path), unit="rows")
    head, line = first
    names = _parse_row(line)
    if "timestamp" not in names:
        raise OperationsError(
            f"{path} has no column 'timestamp' in its first line; it must be a table of codecarbon's: restore it"
        )
    column, boundary = (
        names.index("timestamp"),
        moment.astimezone().replace(tzinfo=None, microsecond=0),
    )

    def is_later(line: bytes) -> bool | None:
        try:
            written = datetime.fromisoformat(_parse_row(line)[column])
        except (IndexError, ValueError):
            return None
        return (
            written if written.tzinfo is None else written.astimezone().replace(tzinfo=None)
        ) > boundary

    cut = _find_lines_cut(path, is_later, head)
    return CutSpans(cut.stamp, cut.gone, head, count=cut.count, total=cut.total, unit="rows")


def _parse_row(line: bytes) -> list[str]:
    return next(csv.reader([line.decode("utf-8", "replace").rstrip("\r\n")]), [])


_SAVED = re.compile(r"successfully saved checkpoint at iteration +(\d+) to")


def find_log_cut(path: Path, iteration: int) -> CutSpans:
    """Everything behind the last line that belongs to `iteration` or an earlier one.

    Training and validation lines tell, and `successfully saved checkpoint` where no later iteration stands before it (an
    --async-save is done some iterations late). Over several launches the last one that went through the iteration counts.

    Raises:
        OperationsError: it has no such lines.
    """
    stamp, keep, later, seen = _read_stamp(path), 0, False, False
    total = kept_lines = 0
    for span, raw in _iterate_lines(path):
        total += 1
        if b"iteration" not in raw:
            continue
        text = raw.decode("utf-8", "replace")
        step = parse_log_line(text) or parse_validation_log_line(text)
        saved = _SAVED.search(text)
        if step is None and saved is None:
            continue
        seen, at = True, int(step["iteration"]) if step is not None else int(saved[1])  # type: ignore[index]
        if step is not None:
            later = at > iteration
        if not later and at <= iteration:
            keep, kept_lines = span[1], total
    if not seen and stamp[0]:
        raise OperationsError(f"{path} has no line of an iteration; give the run's own main log")
    gone = ((keep, stamp[0]),) if keep < stamp[0] else ()
    return CutSpans(stamp, gone, count=total - kept_lines, total=total)


# TensorBoard's records: length (8 bytes), its CRC (4), data, its CRC (4), all little-endian


def find_events_cut(path: Path, at: Axes) -> CutSpans:
    """Records of iterations behind `at`, wherever their step axis puts them.

    Raises:
        OperationsError: the package tensorboard, which knows what is in a record, is not installed.
    """
    try:
        from google.protobuf.message import DecodeError
        from tensorboard.compat.proto.event_pb2 import Event
    except ImportError as absent:
        raise OperationsError(
            f"the package tensorboard is not installed, to cut {path}: pip install -e '.[observe]'"
        ) from absent
    stamp, data = _read_stamp(path), path.read_bytes()
    records, unreadable = _find_records(data)
    steps, head, gone, later = _EventSteps(at), (0, 0), [], False
    for number, (begin, end) in enumerate(records):
        try:
            event = Event.FromString(data[begin + 12 : end - 4])
        except DecodeError:
            event = None
        if number == 0 and begin == 0 and event is not None and event.file_version:
            head = begin, end
            continue
        found = None if event is None else steps.is_later(event)
        later = later if found is None else found
        if later:
            gone.append((begin, end))
    total = len(records) - (head != (0, 0))
    if not gone:
        return CutSpans(stamp, total=total, unit="records")
    return CutSpans(
        stamp,
        _merge_spans(gone),
        head,
        _merge_spans(unreadable),
        len(gone) == total,
        len(gone),
        total,
        "records",
    )


_COUNTED = {
    " vs samples": lambda at: at.consumed_samples,
    " vs tokens": lambda at: at.consumed_tokens,
    " vs gigaflos (without embeddings)": lambda at: int(at.gigaflops_without_embeddings),
}
_ITERATION_IS_VALUE = {
    "steps-vs-samples/y=steps,x=samples": " vs samples",
    "steps-vs-tokens/y=steps,x=tokens": " vs tokens",
}


@dataclass
class _EventSteps:
    """Which iteration a record belongs to, in the order of one launch's file.

    A tag with another axis follows the tag without (`lm loss`, then `lm loss vs samples`), so it has that one's iteration; the
    charts of steps over samples and tokens hold the iteration as their value. Only where neither tells, the checkpoint's own
    counter of that axis decides: a launch with another ramp-up of the batch size had another one at this iteration.
    """

    at: Axes
    _last: dict[str, int] = field(default_factory=dict)

    def is_later(self, event: "Event") -> bool | None:
        """None: it has no step."""
        later = None
        for value in event.summary.value:
            later = bool(later) or self._is_value_later(value, event.step)
        return later

    def _is_value_later(self, value: Any, step: int) -> bool:
        axis, base = _split_axis(value.tag)
        if axis is None:
            self._last[base] = step
            return step > self.at.iteration
        if base in _ITERATION_IS_VALUE and value.WhichOneof("value") == "simple_value":
            return round(value.simple_value) > self.at.iteration
        iteration = self._last.get(base)
        return (
            iteration > self.at.iteration
            if iteration is not None
            else step > _COUNTED[axis](self.at)
        )


@cache
def _split_axis(tag: str) -> tuple[str | None, str]:
    """What a tag has for steps, None being the iteration, and the tag of the record with the iteration."""
    axis = _ITERATION_IS_VALUE.get(tag) or next(
        (suffix for suffix in _COUNTED if tag.endswith(suffix)), None
    )
    return axis, tag.removesuffix(axis or "")


def _find_records(data: bytes) -> tuple[list[Span], list[Span]]:
    """(whole records, what cannot be read): a record with damaged data is passed over; behind a damaged length nothing is found."""
    begins, lengths, at = array("q"), array("q"), 0
    while at + 16 <= len(data):
        size = int.from_bytes(data[at : at + 8], "little")
        if at + 16 + size > len(data):
            break
        begins.append(at)
        lengths.append(size)
        at += 16 + size
    numbers = np.frombuffer(data, np.uint8)
    begin, length = np.array(begins, np.int64), np.array(lengths, np.int64)
    sound = _compute_crcs(numbers, begin, 8) == _read_stored_crcs(numbers, begin + 8)
    readable = len(begin) if sound.all() else int(np.argmin(sound))
    begin, length = begin[:readable], length[:readable]
    right = np.zeros(readable, bool)
    for size in np.unique(length):
        chosen = np.flatnonzero(length == size)
        right[chosen] = _compute_crcs(numbers, begin[chosen] + 12, size) == _read_stored_crcs(
            numbers, begin[chosen] + 12 + size
        )
    spans = list(zip(begin.tolist(), (begin + length + 16).tolist(), strict=True))
    unreadable = [span for span, is_right in zip(spans, right, strict=True) if not is_right]
    end = spans[-1][1] if spans else 0
    if end < len(data):
        unreadable.append((end, len(data)))
    return [span for span, is_right in zip(spans, right, strict=True) if is_right], unreadable


def _build_crc_table() -> NDArray[np.uint32]:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(0x82F63B78), table >> 1)
    return table


_TABLE = _build_crc_table()


def _compute_crcs(
    data: NDArray[np.uint8], begins: NDArray[np.int64], length: int
) -> NDArray[np.uint32]:
    """Masked CRC-32C of pieces of one length, all at once: a file may have millions, and TensorBoard's own takes 0.25 s/MB."""
    crc = np.full(len(begins), 0xFFFFFFFF, np.uint32)
    for at in range(length):
        crc = _TABLE[(crc ^ data[begins + at]) & np.uint32(0xFF)] ^ (crc >> np.uint32(8))
    crc ^= np.uint32(0xFFFFFFFF)
    return ((crc >> np.uint32(15)) | (crc << np.uint32(17))) + np.uint32(0xA282EAD8)


def _read_stored_crcs(data: NDArray[np.uint8], begins: NDArray[np.int64]) -> NDArray[np.uint32]:
    found = np.zeros(len(begins), np.uint32)
    for at in range(4):
        found |= data[begins + at].astype(np.uint32) << np.uint32(8 * at)
    return found


# Cutting


def cut_out(path: Path, part: Path, cut: CutSpans, temporary: str) -> None:
    """Move what goes to `part`, whose folder is made; the two may be on different file systems.

    `temporary` is the name under which the file is written anew, beside it. A `part` that is there already and holds something
    else is left, and the next one numbered.

    Raises:
        OperationsError: somebody writes to the file. OSError: a disk is full or does not answer; nothing is lost.
    """
    if not cut.gone:
        return
    made = [folder for folder in (part.parent, *part.parent.parents) if not folder.is_dir()]
    part.parent.mkdir(parents=True, exist_ok=True)
    for folder in reversed(made):
        sync_folder(folder.parent)
    size = cut.stamp[0]
    _write_part(path, part, [(0, size)] if cut.whole else [cut.head, *cut.gone])
    if cut.whole:
        _refuse_changed(path, cut)
        path.unlink()
        sync_folder(path.parent)
        return
    if cut.unreadable:
        _write_part(path, part.with_name(f"{part.name}.unreadable"), cut.unreadable)
    away = sorted([*cut.gone, *cut.unreadable])
    edges = [(0, 0), *away, (size, size)]
    replace_by(
        path,
        [(path, [(before[1], after[0]) for before, after in pairwise(edges)])],
        temporary,
        lambda: _refuse_changed(path, cut),
    )


def _refuse_changed(path: Path, cut: CutSpans) -> None:
    if _read_stamp(path) != cut.stamp:
        raise OperationsError(
            f"{path} changed while it was being cut: end what writes to it, and give the same command again"
        )


def _write_part(source: Path, part: Path, spans: Sequence[Span]) -> None:
    fresh = part.with_name("part.new")
    with open(fresh, "wb", opener=without_links) as file:
        _copy(source, spans, file)
        file.flush()
        os.fsync(file.fileno())
    target, number = part, 1
    while target.exists() and not filecmp.cmp(target, fresh, shallow=False):
        number += 1
        target = part.with_name(f"{part.name}.{number}")
    os.replace(fresh, target)
    sync_folder(part.parent)


def replace_by(
    path: Path,
    pieces: Sequence[tuple[Path, Sequence[Span]] | bytes],
    temporary: str,
    confirm: Callable[[], None] = lambda: None,
) -> None:
    """Replace a file by pieces of files (itself) and bytes, whole or not at all, its permissions kept. `confirm` is asked last."""
    fresh = path.with_name(temporary)
    with open(fresh, "wb", opener=without_links) as file:
        for piece in pieces:
            if isinstance(piece, bytes):
                file.write(piece)
            else:
                _copy(piece[0], piece[1], file)
        file.flush()
        os.fsync(file.fileno())
    if path.exists():
        shutil.copymode(path, fresh)
    try:
        confirm()
    except OperationsError:
        fresh.unlink()
        raise
    os.replace(fresh, path)
    sync_folder(path.parent)


def _copy(source: Path, spans: Sequence[Span], target: Any) -> None:
    with open(source, "rb") as file:
        for begin, end in spans:
            file.seek(begin)
            left = end - begin
            while left:
                piece = file.read(min(left, _CHUNK))
                if not piece:
                    raise OperationsError(
                        f"{source} became shorter while it was being cut: end what writes to it, and try again"
                    )
                target.write(piece)
                left -= len(piece)

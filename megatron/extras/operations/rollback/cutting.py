"""Find the records of later iterations in a run's files, and cut them out.

Invariant: no byte is lost. What is removed is on the disk in a file of its own before the original
changes. The original is then replaced by one rename. Repeating it after an interruption, or with
nothing left to cut, changes nothing more.

Rules:

- TensorBoard: each record is judged by its own iteration (see `_EventSteps`).
- Metrics: a line is judged by its iteration. A start record at the target iteration itself is
  removed, together with what followed it.
- Log: everything after the last line that belongs to the target iteration or an earlier one is
  removed.
- A line that cannot be read is treated like the line before it.
"""

import filecmp
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.base.durable import sync_folder, without_links
from megatron.base.errors import OperationsError
from megatron.base.outside_file import (
    INDEX_BYTES,
    iterate_lines,
    load_bytes,
    open_regular,
    parse_json,
)
from megatron.observe.log_line import parse_log_line, parse_validation_log_line
from megatron.observe.report import Axes

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event

Span = tuple[int, int]
"""(first byte, byte after the last)."""
Piece = tuple[Path, Sequence[Span]] | bytes
"""Content of a new file: bytes, or a file and its ranges."""

_CHUNK = 1 << 20
"""Bytes that are copied at a time."""


@dataclass(frozen=True)
class CutSpans:
    """The byte ranges at which a file is to be cut."""

    stamp: tuple[int, int]
    """Size and modification time of the file when it was examined."""
    gone: tuple[Span, ...] = ()
    """Ranges to remove, in order. Empty: nothing is removed."""
    head: Span = (0, 0)
    """Range that stays and is also copied to the removed part.

    It holds the version of an event file.
    """
    unreadable: tuple[Span, ...] = ()
    """Damaged ranges in a file that is cut.

    They are moved to a file of their own, so that the two other parts can be read completely.
    """
    removes_file: bool = False
    """Nothing but the head would stay, so the file itself is removed."""
    count: int = 0
    """Number of lines or records to remove."""
    total: int = 0
    """Number of lines or records in the file, without the head."""
    unit: str = "lines"
    """What is counted, for the message."""

    @property
    def description(self) -> str:
        """Description of the cut for people."""
        text = f"{self.count:,} of {self.total:,} {self.unit}"
        if self.removes_file:
            text += ", the complete file"
        if self.unreadable:
            damaged = sum(end - begin for begin, end in self.unreadable)
            text += f", and separately {damaged} unreadable bytes"
        return text


def _read_stamp(path: Path) -> tuple[int, int]:
    """Return the size and modification time. Another value later means that somebody wrote."""
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


# Files of lines


def _iterate_lines(path: Path) -> Iterator[tuple[Span, bytes]]:
    """Yield the byte range and the content of each line."""
    begin = 0
    for line in iterate_lines(path):
        yield (begin, begin + len(line)), line
        begin += len(line)


def _merge_spans(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Join adjacent ranges."""
    merged: list[Span] = []
    for begin, end in spans:
        if merged and merged[-1][1] == begin:
            merged[-1] = merged[-1][0], end
        else:
            merged.append((begin, end))
    return tuple(merged)


def _parse_metrics_record(line: bytes) -> dict[str, Any] | None:
    """Parse a line of metrics. Return None if it holds no record with an iteration."""
    try:
        record = parse_json(line)
    # The line is torn, or it is not text. UnicodeDecodeError is a ValueError.
    except ValueError:
        return None
    if isinstance(record, dict) and isinstance(record.get("iteration"), int):
        return record
    return None


def find_metrics_cut(path: Path, iteration: int) -> CutSpans:
    """Find the lines of later iterations.

    A start record at `iteration` itself belongs to a later launch, so it is removed too.
    """
    # The stamp is read before the content, so that a write in between is noticed.
    stamp = _read_stamp(path)
    gone = []
    total = 0
    later = False
    for span, line in _iterate_lines(path):
        total += 1
        record = _parse_metrics_record(line)
        # A line that cannot be read goes with the line before it.
        if record is not None:
            # A start record has the iteration at which its launch began, so it is later at
            # `iteration` too.
            later = bool(record["iteration"] >= iteration + (record.get("kind") != "start"))
        if later:
            gone.append(span)
    return CutSpans(stamp, _merge_spans(gone), count=len(gone), total=total)


def find_last_iteration(path: Path) -> int:
    """Return the last iteration in a metrics file, or 0 if it has none."""
    last = 0
    for _, line in _iterate_lines(path):
        record = _parse_metrics_record(line)
        if record is not None and record.get("kind") != "start":
            last = max(last, record["iteration"])
    return last


_SAVED = re.compile(r"successfully saved checkpoint at iteration +(\d+) to")
"""Line of the log after a checkpoint is complete."""


def find_log_cut(path: Path, iteration: int) -> CutSpans:
    """Find everything after the last line that belongs to `iteration` or an earlier one.

    Training and validation lines decide. A line `successfully saved checkpoint` counts only if no
    later iteration was logged before it, because an --async-save ends some iterations late. If
    several launches went through the iteration, the last one counts.

    Raises:
        OperationsError: The log has no such lines.
    """
    stamp = _read_stamp(path)
    keep = 0
    later = False
    seen = False
    total = 0
    kept_lines = 0
    for span, raw in _iterate_lines(path):
        total += 1
        # Most lines are dropped here, because the regular expressions are slow on a large log.
        if b"iteration" not in raw:
            continue
        text = raw.decode("utf-8", "replace")
        step = parse_log_line(text) or parse_validation_log_line(text)
        saved = _SAVED.search(text)
        if step is not None:
            at = int(step["iteration"])
            # Only a line of training or validation shows where the run is. A save may be reported
            # late.
            later = at > iteration
        elif saved is not None:
            at = int(saved[1])
        else:
            continue
        seen = True
        if not later and at <= iteration:
            keep = span[1]
            kept_lines = total
    # An empty log has nothing to cut. Another log without such lines is probably the wrong file.
    if not seen and stamp[0]:
        raise OperationsError(f"{path} has no line of an iteration; give the run's main log")
    gone = ((keep, stamp[0]),) * (keep < stamp[0])
    return CutSpans(stamp, gone, count=total - kept_lines, total=total)


# TensorBoard's records. Each holds a length (8 bytes), its CRC (4), data, and its CRC (4). All
# numbers are little-endian.


def find_events_cut(path: Path, at: Axes) -> CutSpans:
    """Find the records of iterations after `at`, whatever their step axis is."""
    # The import takes a second, and only event files need it.
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event

    stamp = _read_stamp(path)
    data = load_bytes(path, INDEX_BYTES)
    records, unreadable = _find_records(data)
    steps = _EventSteps(at)
    head = (0, 0)
    gone = []
    later = False
    for number, (begin, end) in enumerate(records):
        try:
            # The length and its CRC take 12 bytes before the data. The CRC of the data takes 4
            # bytes after it.
            event = Event.FromString(data[begin + 12 : end - 4])
        except DecodeError:
            event = None
        # TensorBoard reads no file without its version record, so both parts get it.
        if number == 0 and begin == 0 and event is not None and event.file_version:
            head = begin, end
            continue
        found = None
        if event is not None:
            found = steps.is_later(event)
        if found is not None:
            later = found
        if later:
            gone.append((begin, end))
    total = len(records) - (head != (0, 0))
    # A file with nothing to remove is left as it is, including damage in it.
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
"""Suffix of a tag -> the checkpoint's counter for that step axis."""
_ITERATION_IS_VALUE = {
    "steps-vs-samples/y=steps,x=samples": " vs samples",
    "steps-vs-tokens/y=steps,x=tokens": " vs tokens",
}
"""Tag of a chart that holds the iteration as its value -> suffix of its step axis."""


@dataclass
class _EventSteps:
    """Find the iteration of each record, in the order of one launch's file.

    A tag with another axis follows the tag without one (`lm loss`, then `lm loss vs samples`). So
    its iteration is that of the tag without one. The charts of steps over samples and tokens hold
    the iteration as their value.

    If neither gives the iteration, the checkpoint's own counter of that axis decides. It is the
    last choice, because a launch with another ramp-up of the batch size had another counter at this
    iteration.
    """

    at: Axes
    """Counters of the checkpoint that the run goes back to."""
    _last: dict[str, int] = field(default_factory=dict)
    """Tag without an axis -> iteration of its newest record."""

    def is_later(self, event: "Event") -> bool | None:
        """Return whether a record belongs to a later iteration, or None if it has no step."""
        later = None
        for value in event.summary.value:
            # Every value is examined, because its step counts for the records that follow.
            is_later = self._note_value(value, event.step)
            # One later value makes the record later, because a record cannot be divided.
            later = bool(later) or is_later
        return later

    def _note_value(self, value: Any, step: int) -> bool:
        """Note the step of one value, and return whether it belongs to a later iteration."""
        axis, base = _split_axis(value.tag)
        # The launch writes this tag first. Its step is the iteration of the tags with another axis.
        if axis is None:
            self._last[base] = step
            return step > self.at.iteration
        if base in _ITERATION_IS_VALUE and value.WhichOneof("value") == "simple_value":
            return round(value.simple_value) > self.at.iteration
        iteration = self._last.get(base)
        if iteration is not None:
            return iteration > self.at.iteration
        return step > _COUNTED[axis](self.at)


# A file has millions of records and few tags.
@cache
def _split_axis(tag: str) -> tuple[str | None, str]:
    """Split a tag into its step axis and the tag of the record with the iteration.

    The axis is None if the step is the iteration.
    """
    axis = _ITERATION_IS_VALUE.get(tag) or next(
        (suffix for suffix in _COUNTED if tag.endswith(suffix)), None
    )
    return axis, tag.removesuffix(axis or "")


def _find_records(data: bytes) -> tuple[list[Span], list[Span]]:
    """Return the ranges of readable records and the ranges that cannot be read.

    A record with damaged data is skipped. After a damaged length no further record is found,
    because the length gives the position of the next record.
    """
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    def is_intact(begin: int, end: int) -> bool:
        """Return whether these bytes have the CRC that follows them."""
        return masked_crc32c(data[begin:end]) == int.from_bytes(data[end : end + 4], "little")

    records = []
    unreadable = []
    at = 0
    while at + 16 <= len(data) and is_intact(at, at + 8):
        begin = at + 12
        end = begin + int.from_bytes(data[at : at + 8], "little")
        if end + 4 > len(data):
            break
        span = (at, end + 4)
        if is_intact(begin, end):
            records.append(span)
        else:
            unreadable.append(span)
        at = end + 4
    # The rest is a record that was cut off, or what follows a damaged length.
    if at < len(data):
        unreadable.append((at, len(data)))
    return records, unreadable


# Cutting


def cut_out(path: Path, part: Path, cut: CutSpans, temporary: str) -> None:
    """Move the ranges to remove from `path` to `part`, whose folder is created.

    The two may be on different file systems. A `part` that already exists with another content is
    kept, and the new one gets a number.

    Args:
        path: The file to cut.
        part: File for what is removed.
        cut: The ranges.
        temporary: Name under which the new content is written first, in the folder of `path`.

    Raises:
        OperationsError: Somebody writes to the file.
        OSError: A disk is full or does not answer. Nothing is lost.
    """
    if not cut.gone:
        return
    # The entry of a new folder is durable only when its parent is synced.
    made = [folder for folder in (part.parent, *part.parent.parents) if not folder.is_dir()]
    part.parent.mkdir(parents=True, exist_ok=True)
    for folder in reversed(made):
        sync_folder(folder.parent)
    size = cut.stamp[0]
    # The removed part is written before the file changes. An interruption leaves it twice.
    _write_part(path, part, [(0, size)] if cut.removes_file else [cut.head, *cut.gone])
    if cut.removes_file:
        _refuse_changed(path, cut)
        path.unlink()
        sync_folder(path.parent)
        return
    if cut.unreadable:
        _write_part(path, part.with_name(f"{part.name}.unreadable"), cut.unreadable)
    away = sorted([*cut.gone, *cut.unreadable])
    # What stays lies between the removed ranges.
    edges = [(0, 0), *away, (size, size)]
    replace_by(
        path,
        [(path, [(before[1], after[0]) for before, after in pairwise(edges)])],
        temporary,
        lambda: _refuse_changed(path, cut),
    )


def _refuse_changed(path: Path, cut: CutSpans) -> None:
    """Raise OperationsError if the file changed since it was examined."""
    if _read_stamp(path) != cut.stamp:
        raise OperationsError(
            f"{path} changed while it was being cut; stop the process that writes to it, and give "
            "the same command again"
        )


def _write_part(source: Path, part: Path, spans: Sequence[Span]) -> None:
    """Copy ranges of a file to `part`, or to the next number if `part` differs."""
    # The name is fixed, so an interrupted copy is overwritten by the next one.
    fresh = part.with_name("part.new")
    _write(fresh, [(source, spans)])

    def is_taken(name: str) -> bool:
        # A part with the same content is from an interrupted cut of the same file.
        other = part.with_name(name)
        return other.exists() and not filecmp.cmp(other, fresh, shallow=False)

    os.replace(fresh, part.with_name(find_unused_name(part.name, is_taken)))
    sync_folder(part.parent)


def find_unused_name(name: str, is_taken: Callable[[str], bool]) -> str:
    """Return the name, with a number from 2 on appended if it is taken."""
    if not is_taken(name):
        return name
    return next(each for number in count(2) if not is_taken(each := f"{name}.{number}"))


def replace_by(
    path: Path,
    pieces: Sequence[Piece],
    temporary: str,
    confirm: Callable[[], None] = lambda: None,
) -> None:
    """Replace a file, completely or not at all, and keep its permissions.

    Args:
        path: The file.
        pieces: New content. A file in it may be `path`.
        temporary: Name under which the content is written first, in the same folder.
        confirm: Function that is called right before the rename. It may raise to prevent it.

    Raises:
        OperationsError: `confirm` raised it, or a source became shorter.
        OSError: The content cannot be written.
    """
    fresh = path.with_name(temporary)
    _write(fresh, pieces)
    if path.exists():
        # The new file would have the permissions of this process otherwise.
        shutil.copymode(path, fresh)
    try:
        confirm()
    except OperationsError:
        fresh.unlink()
        raise
    os.replace(fresh, path)
    sync_folder(path.parent)


def _write(path: Path, pieces: Sequence[Piece]) -> None:
    """Write a new file durably."""
    with open(path, "wb", opener=without_links) as file:
        for piece in pieces:
            if isinstance(piece, bytes):
                file.write(piece)
            else:
                _copy(*piece, file)
        file.flush()
        os.fsync(file.fileno())


def _copy(source: Path, spans: Sequence[Span], target: Any) -> None:
    """Copy ranges of a file to an open file."""
    with open_regular(source) as file:
        for begin, end in spans:
            file.seek(begin)
            left = end - begin
            while left:
                piece = file.read(min(left, _CHUNK))
                # Without this check a file that became shorter would never end the loop.
                if not piece:
                    raise OperationsError(
                        f"{source} became shorter while it was being cut; stop the process that "
                        "writes to it, and try again"
                    )
                target.write(piece)
                left -= len(piece)

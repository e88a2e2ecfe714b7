"""TensorBoard, with the tags of Megatron-DeepSpeed (BigScience), so that old and new runs share their charts.

Invariant: one event file for each launch. A tag that ends in ' vs samples', ' vs tokens' or ' vs gigaflos (without embeddings)'
has that quantity as its step axis, others the iteration. The package is optional: without it one line says so.

The file is written here and not by TensorBoard's own writer, whose thread ends at the first error of the disk and cannot be
started again. The records are TensorBoard's.
"""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.config.logging import LoggingConfig
from megatron.errors import ConfigError
from megatron.observe.log_line import compute_perplexity
from megatron.observe.report import Axes, IterationReport

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event


_SECONDS = 120.0
"""Events wait no longer than this in memory."""
_MEMORY_BYTES = 64 << 20
"""Of events that the disk does not take; about 300,000."""
_RETRY_SECONDS = 10.0
"""Between two attempts at a disk that does not take them."""


class TensorBoard:
    """Writes reports; does nothing where `--tensorboard-dir` was not given or the package is absent. Use from one rank only."""

    def __init__(self, logging: LoggingConfig, *, say: Callable[[str], None] = print) -> None:
        self._logging = logging
        self._say = say
        self._file = _open(logging, say) if logging.tensorboard_dir is not None else None

    @property
    def enabled(self) -> bool:
        return self._file is not None

    def write_training(self, report: IterationReport) -> None:
        """One iteration, if it is due by --tensorboard-log-interval."""
        if self._file is None or report.iteration % self._logging.tensorboard_log_interval != 0:
            return
        at = report.axes
        self._add_counters(at)
        if report.lm_loss is not None:
            self._add_with_axes(at, "lm-loss-training/lm loss", report.lm_loss, gigaflops=True)
        if self._logging.log_learning_rate_to_tensorboard:
            self._add_with_axes(at, "learning-rate/learning-rate", report.learning_rate)
        if self._logging.log_batch_size_to_tensorboard:
            self._add_with_axes(at, "batch-size/batch-size", report.global_batch_size)
        if self._logging.log_loss_scale_to_tensorboard and report.loss_scale is not None:
            self._add_with_axes(at, "loss-scale/loss-scale", report.loss_scale)
        if report.grad_norm is not None:
            self._add_with_axes(at, "grad-norm/grad-norm", report.grad_norm)
        if report.num_zeros is not None:
            self._add_with_axes(at, "num-zeros/num-zeros", report.num_zeros)
        if report.params_norm is not None:
            self._add_with_axes(at, "params-norm/params-norm", report.params_norm)
        if report.curriculum_seqlen is not None:
            self._add("curriculum_seqlen", report.curriculum_seqlen, report.iteration)
        if self._logging.log_timers_to_tensorboard:
            self._add_with_axes(at, "iteration-time/iteration-time", report.seconds)
            self._add_phases(report.iteration, report.phase_seconds)

    def write_validation(self, at: Axes, lm_loss: float, name: str | None = None) -> None:
        """One evaluation; `name` is the set's where there are several."""
        tag = (
            f"lm-loss-validation/{name}/lm loss validation"
            if name is not None
            else "lm-loss-validation/lm loss validation"
        )
        self._add_with_axes(at, tag, lm_loss, gigaflops=True)
        if self._logging.log_validation_ppl_to_tensorboard:
            self._add_with_axes(at, f"{tag} ppl", compute_perplexity(lm_loss), gigaflops=True)

    def flush(self) -> None:
        """Write what is in memory."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Write what is in memory, and end the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _add_counters(self, at: Axes) -> None:
        self._add("steps-vs-samples/y=steps,x=samples", at.iteration, at.consumed_samples)
        self._add("steps-vs-samples/y=samples,x=steps", at.consumed_samples, at.iteration)
        self._add("steps-vs-tokens/y=steps,x=tokens", at.iteration, at.consumed_tokens)
        self._add("steps-vs-tokens/y=tokens,x=steps", at.consumed_tokens, at.iteration)

    def _add_phases(self, iteration: int, phase_seconds: Mapping[str, float]) -> None:
        for phase, seconds in phase_seconds.items():
            self._add(f"{phase}-time", seconds, iteration)

    def _add_with_axes(self, at: Axes, tag: str, value: float, *, gigaflops: bool = False) -> None:
        self._add(tag, value, at.iteration)
        self._add(f"{tag} vs samples", value, at.consumed_samples)
        self._add(f"{tag} vs tokens", value, at.consumed_tokens)
        if gigaflops:
            self._add(
                f"{tag} vs gigaflos (without embeddings)",
                value,
                int(at.gigaflops_without_embeddings),
            )

    def _add(self, tag: str, value: float, step: int) -> None:
        if self._file is None:
            return
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        # `simple_value`, not the newer tensor form: scripts read these with EventAccumulator.Scalars.
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=float(value))])
        self._file.add(Event(wall_time=time.time(), step=step, summary=summary))


class EventFile:
    """An event file that a full disk does not end: what could not be written stays in memory and is written later.

    Records are written at the offset behind the last whole one, so that a record that was cut off is written again. A reader
    finds nothing behind a damaged record.
    """

    def __init__(self, folder: Path, queue_size: int, say: Callable[[str], None]) -> None:
        """Make the folder and the file.

        Args:
            queue_size: number of events in memory after which they are written.

        Raises:
            OSError: the folder or the file cannot be written.
        """
        from tensorboard.compat.proto.event_pb2 import Event

        self._folder, self._queue_size, self._say = folder, queue_size, say
        self._pending = io.BytesIO()
        self._events = 0
        """In memory."""
        self._lost_events = 0
        self._failing = False
        self._offset = 0
        """Bytes of whole records in the file."""
        self._write_at = time.monotonic() + _SECONDS
        folder.mkdir(parents=True, exist_ok=True)
        self._descriptor = _create(folder)
        self._record(Event(wall_time=time.time(), file_version="brain.Event:2"))
        self._write()

    def add(self, event: Event) -> None:
        """Keep an event, and write all that are kept when it is time."""
        if self._pending.tell() > _MEMORY_BYTES:  # the disk has been full for long
            self._lost_events += self._events
            self._forget()
        self._record(event)
        full = self._events >= self._queue_size and not self._failing
        if full or time.monotonic() >= self._write_at:
            self.flush()

    def flush(self) -> None:
        """Write the events in memory. Where that fails it is reported once, and tried again later."""
        try:
            self._write()
        except OSError as error:
            self._write_at = time.monotonic() + _RETRY_SECONDS
            if not self._failing:
                way_on = "training goes on without them until it can"
                self._say(
                    f"cannot write TensorBoard events to {self._folder}: {error.strerror}; {way_on}"
                )
            self._failing = True
            return
        if self._failing:
            self._say(
                f"TensorBoard events are written to {self._folder} again; {self._lost_events} were lost"
            )
            self._failing, self._lost_events = False, 0

    def close(self) -> None:
        """Write the events in memory a last time, and close the file."""
        self.flush()
        try:
            os.close(self._descriptor)
        except OSError as error:  # a network file system may report here what it could not write
            self._say(
                f"cannot write TensorBoard events to {self._folder}: {error.strerror}; the last ones may be lost"
            )
        if self._failing:
            self._say(f"{self._lost_events + self._events} TensorBoard events were lost")

    def _record(self, event: Event) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        RecordWriter(self._pending).write(event.SerializeToString())
        self._events += 1

    def _write(self) -> None:
        """Raises OSError: not all is on the disk; all of it stays in memory."""
        left = self._pending.getbuffer()[: self._pending.tell()]
        at = self._offset
        while left:
            written = os.pwrite(self._descriptor, left, at)
            left, at = left[written:], at + written
        del left  # the buffer cannot be emptied while it is looked at
        self._offset = at
        self._forget()
        self._write_at = time.monotonic() + _SECONDS

    def _forget(self) -> None:
        self._pending = io.BytesIO()
        self._events = 0


def _create(folder: Path) -> int:
    """Create an event file of a name that is free. Returns its descriptor. Raises OSError."""
    stem, number = (
        f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}",
        0,
    )
    while True:
        try:
            return os.open(
                folder / f"{stem}.{number}",
                os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC,
                0o644,
            )
        except FileExistsError:  # an earlier file of this process and second
            number += 1


def _open(logging: LoggingConfig, say: Callable[[str], None]) -> EventFile | None:
    try:
        import tensorboard.summary.writer.record_writer  # noqa: F401
    except ImportError:
        say(
            "--tensorboard-dir is given, but the package tensorboard is not installed: no TensorBoard (pip install tensorboard)"
        )
        return None
    folder = str(logging.tensorboard_dir)
    if "://" in folder:
        raise ConfigError(
            f"--tensorboard-dir {folder} must be a folder of a file system; sync it from there (tools/hub_sync.py)"
        )
    try:
        return EventFile(Path(folder), logging.tensorboard_queue_size, say)
    except OSError as error:
        raise ConfigError(
            f"--tensorboard-dir {folder} cannot be written: {error}; give another folder"
        ) from error

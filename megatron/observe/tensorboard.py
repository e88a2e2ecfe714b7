"""TensorBoard, with the tags of Megatron-DeepSpeed (BigScience), so that old charts still work.

Invariant: each launch has one event file. The step axis of a tag is the iteration. A tag that ends
in ' vs samples', ' vs tokens' or ' vs gigaflos (without embeddings)' has that quantity as its step
axis.

The file is not written by TensorBoard's own writer. Its thread ends at the first disk error and
cannot be started again. The format of the records is TensorBoard's.
"""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.base.errors import ConfigError
from megatron.base.plain_text import print_line
from megatron.config.logging import LoggingConfig
from megatron.observe.log_line import compute_perplexity
from megatron.observe.report import (
    Axes,
    EvaluationReport,
    Flush,
    IterationReport,
    NamedNumbers,
    ReportEvent,
    Sink,
)

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event


_SECONDS = 120.0
"""Maximum time in seconds for which events stay in memory."""
_MEMORY_BYTES = 64 << 20
"""Memory for events that the disk does not accept. It holds about 300,000 events."""
_RETRY_SECONDS = 10.0
"""Seconds between two attempts if the disk does not accept events."""


class TensorBoard(Sink):
    """Writer of training and evaluation reports to TensorBoard. Use it from one rank only."""

    def __init__(self, logging: LoggingConfig, *, log: Callable[[str], None] = print_line) -> None:
        """Open the event file.

        Args:
            logging: The settings, with --tensorboard-dir.
            log: Prints a line of the log.

        Raises:
            ConfigError: The folder cannot be written.
        """
        self._logging = logging
        self._log = log
        self._file = _open(logging, log)

    def write(self, event: ReportEvent) -> None:
        """Write an iteration, an evaluation or the scores of a task."""
        match event:
            case IterationReport():
                self._write_training(event)
            case EvaluationReport():
                self._write_evaluation(event)
            case NamedNumbers(kind="task"):
                # The tags are those of `tools/evaluate.py`.
                for metric, value in event.numbers.items():
                    self._add(f"eval/{event.name}/{metric}", value, event.iteration)
            case Flush():
                self.flush()

    def _write_training(self, report: IterationReport) -> None:
        """Write one iteration, if it is due by --tensorboard-log-interval.

        The statistics of layers have their own interval.
        """
        self._add_layers(report.iteration, report.layer_statistics)
        if report.iteration % self._logging.tensorboard_log_interval != 0:
            return
        at = report.axes
        self._add_counters(at)
        if report.lm_loss is not None:
            self._add_with_axes(at, "lm-loss-training/lm loss", report.lm_loss, gigaflops=True)
        for tag, value in self._select_training_values(report).items():
            if value is not None:
                self._add_with_axes(at, tag, value)
        if report.curriculum_seqlen is not None:
            self._add("curriculum_seqlen", report.curriculum_seqlen, report.iteration)
        if self._logging.log_timers_to_tensorboard:
            self._add_with_axes(at, "iteration-time/iteration-time", report.seconds)
            for phase, seconds in report.phase_seconds.items():
                self._add(f"{phase}-time", seconds, report.iteration)

    def _select_training_values(self, report: IterationReport) -> dict[str, float | None]:
        """Return the values that the settings ask for, by tag. A value may be None."""
        values: dict[str, float | None] = {}
        if self._logging.log_learning_rate_to_tensorboard:
            values["learning-rate/learning-rate"] = report.learning_rate
            values["learning-rate/decoupled-learning-rate"] = report.decoupled_learning_rate
        if self._logging.log_batch_size_to_tensorboard:
            values["batch-size/batch-size"] = report.global_batch_size
        if self._logging.log_loss_scale_to_tensorboard:
            values["loss-scale/loss-scale"] = report.loss_scale
        values["lm-loss-training/lm loss of dropped steps"] = report.dropped_loss
        values["grad-norm/grad-norm"] = report.grad_norm
        values["num-zeros/num-zeros"] = report.num_zeros
        values["params-norm/params-norm"] = report.params_norm
        values["experts/largest load"] = report.experts.get("largest_expert_load")
        values["experts/smallest load"] = report.experts.get("smallest_expert_load")
        values["experts/load balancing loss"] = report.experts.get("expert_balancing_loss")
        values["experts/router z loss"] = report.experts.get("router_z_loss")
        values["experts/router entropy"] = report.experts.get("router_entropy")
        return values

    def _write_evaluation(self, found: EvaluationReport) -> None:
        folder = "lm-loss-validation"
        if found.is_one_of_several:
            folder = f"{folder}/{found.name}"
        tag = f"{folder}/lm loss validation"
        self._add_with_axes(found.at, tag, found.loss, gigaflops=True)
        if self._logging.log_validation_ppl_to_tensorboard:
            perplexity = compute_perplexity(found.loss)
            self._add_with_axes(found.at, f"{tag} ppl", perplexity, gigaflops=True)
        if found.accuracy is not None:
            self._add(f"{folder}/next-token accuracy", found.accuracy, found.at.iteration)
        if found.bits_per_byte is not None:
            self._add(f"{folder}/bits per byte", found.bits_per_byte, found.at.iteration)

    def flush(self) -> None:
        """Write the events in memory to disk."""
        self._file.flush()

    def close(self) -> None:
        """Write the events in memory to disk, and close the file."""
        self._file.close()

    def _add_counters(self, at: Axes) -> None:
        self._add("steps-vs-samples/y=steps,x=samples", at.iteration, at.consumed_samples)
        self._add("steps-vs-samples/y=samples,x=steps", at.consumed_samples, at.iteration)
        self._add("steps-vs-tokens/y=steps,x=tokens", at.iteration, at.consumed_tokens)
        self._add("steps-vs-tokens/y=tokens,x=steps", at.consumed_tokens, at.iteration)

    def _add_layers(
        self, iteration: int, statistics: Mapping[str, float | Sequence[float]]
    ) -> None:
        """Write each statistic as one chart for each layer, such as `layer-grad-norm/07`."""
        for key, values in statistics.items():
            tag = key.replace("_", "-")
            if isinstance(values, Sequence):
                # TensorBoard sorts tags by their text, so all numbers have the same width.
                width = len(str(len(values) - 1))
                for layer, value in enumerate(values):
                    self._add(f"{tag}/{layer:0{width}}", value, iteration)
            else:
                self._add(f"{tag}/{tag}", values, iteration)

    def _add_with_axes(self, at: Axes, tag: str, value: float, *, gigaflops: bool = False) -> None:
        """Write a value once for each step axis."""
        self._add(tag, value, at.iteration)
        self._add(f"{tag} vs samples", value, at.consumed_samples)
        self._add(f"{tag} vs tokens", value, at.consumed_tokens)
        if gigaflops:
            # "gigaflos" is the spelling of Megatron-DeepSpeed. Another one would split the charts.
            self._add(
                f"{tag} vs gigaflos (without embeddings)",
                value,
                int(at.gigaflops_without_embeddings),
            )

    def _add(self, tag: str, value: float, step: int) -> None:
        """Write one value at one step."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        # Scripts read these events with EventAccumulator.Scalars, which knows `simple_value` only
        # and not the newer tensor form.
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=float(value))])
        self._file.add(Event(wall_time=time.time(), step=step, summary=summary))


class EventFile:
    """An event file that tolerates a full disk.

    Events that could not be written stay in memory and are written later. Records are written at
    the offset after the last complete record. A record that was cut off is thus overwritten. This
    matters because a reader finds nothing after a damaged record.
    """

    def __init__(self, folder: Path, queue_size: int, log: Callable[[str], None]) -> None:
        """Create the folder and the file.

        Args:
            folder: The folder of the file.
            queue_size: Number of events in memory after which they are written.
            log: Prints a line of the log.

        Raises:
            OSError: The folder or the file cannot be written.
        """
        from tensorboard.compat.proto.event_pb2 import Event

        self._folder = folder
        self._queue_size = queue_size
        self._log = log
        self._pending = io.BytesIO()
        self._events = 0
        """Number of events in memory."""
        self._lost_events = 0
        self._failing = False
        self._offset = 0
        """Bytes of complete records in the file."""
        self._write_at = time.monotonic() + _SECONDS
        folder.mkdir(parents=True, exist_ok=True)
        self._descriptor = _create(folder)
        # TensorBoard expects the version as the first record of a file.
        self._record(Event(wall_time=time.time(), file_version="brain.Event:2"))
        self._write()

    def add(self, event: Event) -> None:
        """Add an event, and write all events in memory when it is time."""
        # This many events collect only if the disk was full for a long time. They are dropped,
        # because charts must not use up the memory of training.
        if self._pending.tell() > _MEMORY_BYTES:
            self._lost_events += self._events
            self._forget()
        self._record(event)
        # While the disk fails, a full queue triggers no attempt, only the time does. An attempt for
        # each event would slow down training.
        full = self._events >= self._queue_size and not self._failing
        if full or time.monotonic() >= self._write_at:
            self.flush()

    def flush(self) -> None:
        """Write the events in memory. A failure is reported once, and the write is tried again."""
        try:
            self._write()
        except OSError as error:
            self._write_at = time.monotonic() + _RETRY_SECONDS
            if not self._failing:
                self._log(
                    f"cannot write TensorBoard events to {self._folder}: {error.strerror}; "
                    "training continues, and the events are kept in memory and written later"
                )
            self._failing = True
            return
        if self._failing:
            self._log(
                f"TensorBoard events are written to {self._folder} again; {self._lost_events} were "
                "lost"
            )
            self._failing = False
            self._lost_events = 0

    def close(self) -> None:
        """Write the events in memory a last time, and close the file."""
        self.flush()
        try:
            os.close(self._descriptor)
        except OSError as error:
            # A network file system may report a failed write only at this point.
            self._log(
                f"cannot write TensorBoard events to {self._folder}: {error.strerror}; the last "
                "ones may be lost"
            )
        if self._failing:
            self._log(f"{self._lost_events + self._events} TensorBoard events were lost")

    def _record(self, event: Event) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        RecordWriter(self._pending).write(event.SerializeToString())
        self._events += 1

    def _write(self) -> None:
        """Write all events in memory.

        Raises:
            OSError: Not all of them are on the disk. All of them stay in memory.
        """
        left = self._pending.getbuffer()[: self._pending.tell()]
        at = self._offset
        # pwrite may write less than asked for, so the rest is written by the next call.
        while left:
            written = os.pwrite(self._descriptor, left, at)
            left = left[written:]
            at = at + written
        # The buffer cannot be released while a view of it exists.
        del left
        self._offset = at
        self._forget()
        self._write_at = time.monotonic() + _SECONDS

    def _forget(self) -> None:
        self._pending = io.BytesIO()
        self._events = 0


def _create(folder: Path) -> int:
    """Create an event file with a free name and return its descriptor.

    Raises:
        OSError: The file cannot be created.
    """
    stem = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
    number = 0
    while True:
        try:
            return os.open(
                folder / f"{stem}.{number}",
                os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC,
                0o644,
            )
        except FileExistsError:
            # The same process created a file within this second.
            number += 1


def _open(logging: LoggingConfig, log: Callable[[str], None]) -> EventFile:
    """Open the event file.

    Raises:
        ConfigError: The folder cannot be written, or is not in a file system.
    """
    folder = str(logging.tensorboard_dir)
    if "://" in folder:
        raise ConfigError(
            f"--tensorboard-dir {folder} must be a folder of a file system; sync it from there "
            "(tools/hub_sync.py)"
        )
    try:
        return EventFile(Path(folder), logging.tensorboard_queue_size, log)
    except OSError as error:
        raise ConfigError(
            f"--tensorboard-dir {folder} cannot be written: {error}; give another folder"
        ) from error

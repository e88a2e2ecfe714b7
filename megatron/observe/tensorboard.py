"""TensorBoard, with the tags of Megatron-DeepSpeed (BigScience), so that old and new runs share their charts.

Invariant: one event file for each launch. A tag that ends in ' vs samples', ' vs tokens' or ' vs gigaflos (without embeddings)'
has that quantity as its step axis, others the iteration. The package is optional: without it one line says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from megatron.config.logging import LoggingConfig
from megatron.errors import ConfigError
from megatron.observe.log_line import perplexity
from megatron.observe.report import Axes, IterationReport

if TYPE_CHECKING:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter


class TensorBoard:
    """Writes reports; does nothing where `--tensorboard-dir` was not given or the package is absent. Use from one rank only."""

    def __init__(self, logging: LoggingConfig, *, say: Callable[[str], None] = print) -> None:
        self._logging = logging
        self._say = say
        self._file = _open(logging, say) if logging.tensorboard_dir is not None else None

    @property
    def enabled(self) -> bool:
        return self._file is not None

    def train(self, report: IterationReport) -> None:
        """One iteration, if it is due by --tensorboard-log-interval."""
        if self._file is None or report.iteration % self._logging.tensorboard_log_interval != 0:
            return
        at = report.axes
        self._counters(at)
        if report.lm_loss is not None:
            self._versus(at, "lm-loss-training/lm loss", report.lm_loss, gigaflops=True)
        if self._logging.log_learning_rate_to_tensorboard:
            self._versus(at, "learning-rate/learning-rate", report.learning_rate)
        if self._logging.log_batch_size_to_tensorboard:
            self._versus(at, "batch-size/batch-size", report.global_batch_size)
        if self._logging.log_loss_scale_to_tensorboard and report.loss_scale is not None:
            self._versus(at, "loss-scale/loss-scale", report.loss_scale)
        if report.grad_norm is not None:
            self._versus(at, "grad-norm/grad-norm", report.grad_norm)
        if report.num_zeros is not None:
            self._versus(at, "num-zeros/num-zeros", report.num_zeros)
        if report.params_norm is not None:
            self._versus(at, "params-norm/params-norm", report.params_norm)
        if report.curriculum_seqlen is not None:
            self._add("curriculum_seqlen", report.curriculum_seqlen, report.iteration)
        if self._logging.log_timers_to_tensorboard:
            self._versus(at, "iteration-time/iteration-time", report.seconds)
            self._phases(report.iteration, report.phase_seconds)

    def validation(self, at: Axes, lm_loss: float, name: str | None = None) -> None:
        """One evaluation; `name` is the set's where there are several."""
        tag = f"lm-loss-validation/{name}/lm loss validation" if name is not None else "lm-loss-validation/lm loss validation"
        self._versus(at, tag, lm_loss, gigaflops=True)
        if self._logging.log_validation_ppl_to_tensorboard:
            self._versus(at, f"{tag} ppl", perplexity(lm_loss), gigaflops=True)

    def flush(self) -> None:
        if self._file is not None:
            try:
                self._file.flush()
            except OSError as error:
                self._give_up(error)

    def close(self) -> None:
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                self._give_up(error)
            self._file = None

    def _counters(self, at: Axes) -> None:
        self._add("steps-vs-samples/y=steps,x=samples", at.iteration, at.consumed_samples)
        self._add("steps-vs-samples/y=samples,x=steps", at.consumed_samples, at.iteration)
        self._add("steps-vs-tokens/y=steps,x=tokens", at.iteration, at.consumed_tokens)
        self._add("steps-vs-tokens/y=tokens,x=steps", at.consumed_tokens, at.iteration)

    def _phases(self, iteration: int, phase_seconds: Mapping[str, float]) -> None:
        for phase, seconds in phase_seconds.items():
            self._add(f"{phase}-time", seconds, iteration)

    def _versus(self, at: Axes, tag: str, value: float, *, gigaflops: bool = False) -> None:
        self._add(tag, value, at.iteration)
        self._add(f"{tag} vs samples", value, at.consumed_samples)
        self._add(f"{tag} vs tokens", value, at.consumed_tokens)
        if gigaflops:
            self._add(f"{tag} vs gigaflos (without embeddings)", value, int(at.gigaflops_without_embeddings))

    def _add(self, tag: str, value: float, step: int) -> None:
        if self._file is None:
            return
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        # `simple_value`, not the newer tensor form: scripts read these with EventAccumulator.Scalars.
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=float(value))])
        try:
            self._file.add_event(Event(wall_time=time.time(), step=step, summary=summary))
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Training is worth more than its charts; the writer cannot be used again after an error of its thread."""
        self._file = None
        self._say(f"cannot write TensorBoard events to {self._logging.tensorboard_dir}: {error}; training goes on without them")


def _open(logging: LoggingConfig, say: Callable[[str], None]) -> EventFileWriter | None:
    try:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError:
        say("--tensorboard-dir is given, but the package tensorboard is not installed: no TensorBoard (pip install tensorboard)")
        return None
    try:
        return EventFileWriter(logging.tensorboard_dir, max_queue_size=logging.tensorboard_queue_size)
    except OSError as error:
        raise ConfigError(f"--tensorboard-dir {logging.tensorboard_dir} cannot be written: {error}; give another folder") from error

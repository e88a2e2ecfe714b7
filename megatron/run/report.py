"""Reports of a run while it trains: the log, and the events that all other outputs get.

Only rank 0 reports. The methods do nothing on the other ranks.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.base.plain_text import make_plain_lines, print_line
from megatron.config.logging import LogFormat
from megatron.data.batches import DIGESTS
from megatron.data.source import LeftOut
from megatron.engine.base import StepOutcome, StepResult
from megatron.model.flops import compute_causal_share, count_iteration_flops
from megatron.observe.chronicle import CHRONICLE, Chronicle
from megatron.observe.log_line import (
    LINE_FORMATS,
    format_measures_line,
    format_slow_ranks_line,
    format_task_line,
    format_validation_line,
)
from megatron.observe.metrics import MetricsFile
from megatron.observe.progress_bar import ProgressBar
from megatron.observe.report import (
    Axes,
    EvaluationReport,
    EvaluationResult,
    Flush,
    IterationReport,
    LaunchStart,
    NamedNumbers,
    ReportEvent,
    RunEvent,
    Sink,
    StepTimes,
)
from megatron.observe.tensorboard import TensorBoard
from megatron.observe.throughput import (
    Amounts,
    compute_throughput,
    explain_above_peak,
    find_peak_tflops,
)
from megatron.parallel.mesh import Mesh
from megatron.plan.run_plan import Plan
from megatron.run.parts import GoodputReport, Parts, RankTimes
from megatron.run.state import TrainState

_LOADS_INTERVAL = 100
"""Iterations between two reports of the loads of all experts, unless layers have an interval."""


@dataclass
class _Interval(Amounts):
    """Totals over one iteration or since the last log line."""

    iterations: int = 0
    applied: int = 0
    nan: int = 0
    loss_sum: float = 0.0

    def add(self, step: "StepRecord", flops: float, model_flops: float) -> None:
        """Add one iteration to the totals."""
        # The loss of a step that was not applied may be nan. One such value would make the mean
        # over the interval useless.
        self.iterations += 1
        self.applied += step.result.applied
        self.nan += step.result.outcome is StepOutcome.NOT_FINITE
        self.loss_sum += step.result.loss if step.result.applied else 0.0
        self.seconds += step.seconds
        self.samples += step.batch_size
        self.tokens += step.batch_size * step.seq_length
        self.flops += flops
        self.model_flops += model_flops


@dataclass(frozen=True)
class StepRecord:
    """One iteration as the training loop measured it."""

    result: StepResult
    batch_size: int
    seq_length: int
    learning_rate: float
    """Learning rate after the iteration."""
    decoupled_learning_rate: float | None
    """See `IterationReport`."""
    seconds: float
    """Wall time of the iteration in seconds."""
    phase_seconds: dict[str, float]
    """Seconds of each phase of the iteration."""
    params_norm: float | None
    train_iters: int
    """Iterations of the complete run. With --train-time it is an estimate."""


def wants_bar(plan: Plan) -> bool:
    """Return whether a run draws a progress bar. It needs a terminal and a known end."""
    has_end = plan.train_seconds is None
    return plan.config.logging.show_progress and has_end and sys.stderr.isatty()


class Reporter:
    """All outputs of a run. It gives each of them the same numbers."""

    def __init__(self, plan: Plan, mesh: Mesh, parts: Parts, *, device_name: str) -> None:
        """Create a reporter that only prints, until `open` is called.

        Args:
            plan: The resolved plan.
            mesh: The ranks of the run.
            parts: The builders of trackers, emissions and goodput.
            device_name: Name of the device, from which its peak is looked up for MFU.
        """
        self._plan = plan
        self._parts = parts
        self.device_name = device_name
        self._is_rank_zero = mesh.rank == 0
        self._rank_names = mesh.names
        self._slow_ranks: set[int] | None = None
        """The ranks that the last comparison found to be slow. None before the first one."""
        self._interval = _Interval()
        self._bar: ProgressBar | None = None
        """None unless --show-progress is given at a terminal."""
        self._sinks: list[Sink] = []
        self._goodput = GoodputReport()
        self.has_chronicle = False
        """Whether this rank writes the chronicle."""
        self._iteration: int | None = None
        self._pipeline_schedule: str | None = None
        # Data sets of which the filters leave out more than half.
        self._mostly_left_out: set[str] = set()
        self.evaluated: dict[str, tuple[int, EvaluationResult]] = {}
        """Name of a validation or test set -> iteration and result of its last evaluation."""
        # A file or a pipe gets the line that scripts parse.
        default: LogFormat = "short" if sys.stdout.isatty() else "megatron"
        self._format_line = LINE_FORMATS[plan.config.logging.log_format or default]
        peak = plan.config.logging.peak_tflops_per_device
        self._peak = peak or find_peak_tflops(device_name)
        self._causal_share = compute_causal_share(plan.shape, plan.config.recompute.recomputed_part)
        self._explained_peak = False

    def open(self) -> None:
        """Open the outputs that the configuration asks for, on rank 0 only.

        Call it when weights and data are there. An attempt to load a damaged checkpoint must leave
        no files of reports, and a launch has one TensorBoard file.
        """
        logging = self._plan.config.logging
        # Other ranks must not open the files. Two writers would corrupt them.
        if not self._is_rank_zero:
            return
        # The sinks get each event, and are closed, in the order of this list. A tracker starts
        # before the metrics file has a line of the launch, and the goodput after that. Events in
        # memory are written first, because little time is left after a signal.
        if logging.tensorboard_dir is not None:
            self._sinks.append(TensorBoard(logging, log=self.log))
        save = self._plan.config.checkpoint.save_folder
        # By default the metrics are stored with the checkpoints that they belong to.
        path = logging.metrics_file or (Path(save) / "metrics.jsonl" if save else None)
        if path:
            metrics = Path(path)
            self._sinks += self._parts.build_trackers(self._plan.config, metrics, self.log)
            self._sinks.append(MetricsFile(metrics, log=self.log))
            if save and not self._plan.config.batch.eval_only:
                chronicle = Path(save) / CHRONICLE
                is_first = not (chronicle.exists() or metrics.exists())
                self._goodput = self._parts.build_goodput(
                    Path(save), metrics, self.log, is_first=is_first
                )
                self._sinks += [self._goodput, Chronicle(chronicle, log=self._print)]
                self.has_chronicle = True
        self._sinks += self._parts.build_emissions(logging, self.log)
        if wants_bar(self._plan):
            self._bar = ProgressBar(total=self._plan.train_iters)
            self._sinks.append(self._bar)

    def describe_conventions(self) -> list[tuple[str, str, str]]:
        """Return the row of the start table for the definitions of TFLOPs and MFU."""
        recompute = self._plan.config.recompute.recomputed_part
        counted = "forward and backward"
        if recompute:
            counted = "forward, backward and recomputation"
        peak = "no MFU: give --peak-tflops-per-device"
        if self._peak:
            peak = f"MFU against a peak of {self._peak:g} TFLOPs"
        return [
            (
                "TFLOPs",
                "hardware FLOPs of one device",
                f"{counted}, attention as if not causal; {peak}",
            ),
            (
                "causal convention",
                f"{self._causal_share:.3f} of these FLOPs",
                "attention counts only what the mask leaves; multiply TFLOPs and MFU by it",
            ),
        ]

    def log(self, line: str) -> None:
        """Print a line of the log above the progress bar. A warning is also in the chronicle."""
        if self._is_rank_zero:
            self._print(line)
            # The words may also occur within a line that is no warning.
            prefix, _, text = line.partition("warning: ")
            if text and not prefix:
                self.record("alert", {"text": text})

    def _print(self, line: str) -> None:
        if self._bar is None:
            print_line(make_plain_lines(line))
        else:
            self._bar.log(line)

    def _write(self, event: ReportEvent) -> None:
        for sink in self._sinks:
            sink.write(event)

    def record(
        self,
        kind: str,
        details: Mapping[str, Any],
        iteration: int | None = None,
        *,
        at_close: bool = False,
    ) -> None:
        """Record an event of the run. See `RunEvent`.

        Args:
            kind: Kind of the event.
            details: What else is known.
            iteration: Iteration of the event. Default: the last one that was trained or skipped.
            at_close: Record it when the outputs are closed.
        """
        if iteration is None:
            iteration = self._iteration
        self._write(RunEvent(kind, iteration, details, at_close))

    def start(self, iteration: int) -> None:
        """Start the reports of a run that continues after `iteration`."""
        self._iteration = iteration
        self._write(LaunchStart(iteration))

    def report_pipeline_schedule(self, batch_size: int) -> None:
        """Print the pipeline schedule of a step of `batch_size` samples, and how long ranks idle.

        Each schedule is printed once, when the run first uses it or changes to it.
        """
        if self._plan.pipeline_size == 1:
            return
        schedule = self._plan.choose_pipeline_schedule(batch_size)
        if schedule.name != self._pipeline_schedule:
            self._pipeline_schedule = schedule.name
            self.log(schedule.describe(batch_size))

    def jump(self, iterations: int) -> None:
        """Record iterations that were skipped."""
        first = (self._iteration or 0) + 1
        self._iteration = first + iterations - 1
        self.record("skip", {"first": first, "last": self._iteration})

    def report_step(self, state: TrainState, step: StepRecord) -> None:
        """Report one iteration, and print the log line when it is due.

        Args:
            state: The state after the iteration.
            step: The measurements of the iteration.
        """
        if not self._is_rank_zero:
            return
        self._iteration = state.iteration
        config = self._plan.config
        recompute = config.recompute.recomputed_part
        # TFLOPs count what the devices computed, and MFU only what the model needs. Recomputation
        # is the difference between the two.
        flops = count_iteration_flops(
            self._plan.shape, step.batch_size, step.seq_length, recompute=recompute
        )
        model_flops = count_iteration_flops(self._plan.shape, step.batch_size, step.seq_length)
        # The goodput, which the report has, includes this step.
        self._write(StepTimes(step.phase_seconds, step.seconds, step.result.applied))
        # The sinks get single iterations. The log line gets the mean over the iterations since the
        # last one.
        one = _Interval()
        for interval in (one, self._interval):
            interval.add(step, flops, model_flops)
        self._write(self._report(state, step, one))
        if state.iteration % config.logging.log_interval == 0:
            due = self._report(state, step, self._interval)
            self.log(self._format_line(due))
            self._explain_peak(due.tflops)
            self._interval = _Interval()

    def _explain_peak(self, tflops: float) -> None:
        """Log a warning, once in a launch, if the TFLOPs of a log line are above the peak."""
        text = explain_above_peak(tflops, self._peak, self._causal_share)
        if text is not None and not self._explained_peak:
            self._explained_peak = True
            self.log(f"warning: {text}")

    def _report(self, state: TrainState, step: StepRecord, interval: _Interval) -> IterationReport:
        """Build the report of an interval that ends with `step`."""
        # The last vote is the digest of the batch.
        votes = step.result.votes
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else None
        rates = compute_throughput(interval, self._plan.world_size, self._peak)
        return IterationReport(
            iteration=state.iteration,
            train_iters=step.train_iters,
            consumed_samples=state.consumed_samples,
            consumed_tokens=state.consumed_tokens,
            global_batch_size=step.batch_size,
            learning_rate=step.learning_rate,
            decoupled_learning_rate=step.decoupled_learning_rate,
            seconds=interval.seconds / interval.iterations,
            **vars(rates),
            skipped_iterations=interval.iterations - interval.applied,
            nan_iterations=interval.nan,
            # Only applied steps have a loss that counts. With none, the field is left out.
            lm_loss=interval.loss_sum / interval.applied if interval.applied else None,
            dropped_loss=None if step.result.applied else step.result.loss,
            grad_norm=step.result.grad_norm,
            loss_scale=step.result.loss_scale,
            batch_digest=None if votes is None else f"{int(votes[-1]) % DIGESTS:08x}",
            peak_memory_bytes=peak,
            num_zeros=step.result.num_zeros,
            params_norm=step.params_norm,
            # Without a curriculum the log line must not have this field, as in Megatron.
            curriculum_seqlen=None if self._plan.curriculum is None else step.seq_length,
            remaining_seconds=self._estimate_rest(state, step, rates.tokens_per_second),
            goodput=self._compute_goodput(),
            gigaflops_without_embeddings=state.gigaflops_without_embeddings,
            phase_seconds=step.phase_seconds,
            layer_statistics={} if step.result.layers is None else vars(step.result.layers),
            experts=self._describe_experts(state.iteration, step.result),
        )

    def _describe_experts(self, iteration: int, result: StepResult) -> dict[str, Any]:
        """Return `IterationReport.experts`."""
        experts = result.experts
        if experts is None:
            return {}
        loads = experts.compute_loads()
        layers = len(loads)
        every = self._plan.config.logging.log_layer_stats_interval or _LOADS_INTERVAL
        numbers: dict[str, Any] = {
            "largest_expert_load": max(map(max, loads)),
            "smallest_expert_load": min(map(min, loads)),
            "expert_balancing_loss": sum(experts.balancing_loss) / layers,
            "router_z_loss": sum(experts.z_loss) / layers,
            "router_entropy": sum(experts.entropy) / layers,
        }
        # The first one shows how balanced the initial routers are.
        if iteration == 1 or iteration % every == 0:
            numbers["expert_loads"] = loads
        return numbers

    def _estimate_rest(
        self, state: TrainState, step: StepRecord, tokens_per_second: float
    ) -> float:
        """Return the seconds to the end of the run at the speed of the last steps."""
        plan = self._plan
        # Later batches have more tokens in a ramp-up, but later iterations are slower. A curriculum
        # reads fewer tokens than the plan has, and a run by time has no number of tokens.
        if plan.curriculum is None and plan.train_seconds is None:
            return max(0, plan.train_tokens - state.consumed_tokens) / tokens_per_second
        tokens = step.batch_size * step.seq_length
        return (step.train_iters - state.iteration) * tokens / tokens_per_second

    def _compute_goodput(self) -> float | None:
        share = self._goodput.compute_share()
        # The files of a long run are read in a thread, so the share may not be known yet.
        if share is None:
            return None
        return round(share, 4)

    def add_last_phases(self, phases: Mapping[str, float]) -> None:
        """Report the times of the save and the evaluation after the last iteration."""
        self._write(StepTimes(phases))

    def report_rank_times(self, iteration: int, times: RankTimes | None) -> None:
        """Report which ranks compute more slowly than the others, if they were compared.

        The log has the first comparison of a launch, each one that finds a slow rank, and the first
        one after that which finds none. Only a rank that was not slow before is a warning.
        """
        if times is None or not self._is_rank_zero:
            return
        slow = {self._rank_names[rank]: ratio for rank, ratio in times.slow.items()}
        slowest = self._rank_names[times.slowest]
        largest = times.seconds[times.slowest]
        # The times of all ranks would make the file large, so only those that matter are written.
        numbers = {
            "median_seconds": times.median,
            "largest_seconds": largest,
            "slowest": slowest,
            "slow": slow,
        }
        self._write(NamedNumbers("ranks", iteration, "block forward", numbers))
        line = format_slow_ranks_line(
            iteration, slow, (slowest, largest / times.median), times.median
        )
        if times.slow.keys() - (self._slow_ranks or set()):
            self.log(f"warning: {line}")
        elif slow or self._slow_ranks is None or self._slow_ranks:
            self.log(line)
        self._slow_ranks = set(times.slow)

    def report_validation(
        self, state: TrainState, results: dict[str, EvaluationResult], *, test: bool = False
    ) -> None:
        """Report the results of one evaluation, by name of the set.

        In TensorBoard a single validation set needs no name. A test set always has its own.
        """
        at = Axes.of(state)
        for name, result in results.items():
            self.evaluated[name] = state.iteration, result
            self.log(format_validation_line(state.iteration, result.loss, name))
            self.log(format_measures_line(state.iteration, result, name))
            several = test or len(results) > 1
            self._write(
                EvaluationReport(at=at, name=name, **vars(result), is_one_of_several=several)
            )

    def report_task(self, iteration: int, task: str, scores: Mapping[str, float]) -> None:
        """Report the scores of one task, by metric."""
        self.log(format_task_line(iteration, task, scores))
        self._write(NamedNumbers("task", iteration, task, scores))

    def report_filters(self, iteration: int, reports: Sequence[LeftOut]) -> None:
        """Report what was left out of each data set since the start of the run.

        A launch warns once about each data set of which more than half is left out.
        """
        for report in reports:
            self.log(report.describe())
            if report.document_share > 0.5 and report.name not in self._mostly_left_out:
                self._mostly_left_out.add(report.name)
                self.log(
                    "warning: the filters leave out more than half of the documents of data set "
                    f"{report.name}. Check their limits against some documents"
                )
            self._write(NamedNumbers("filters", iteration, report.name, report.to_json()))

    def flush(self) -> None:
        """Write all buffered output to disk. This is called with each save."""
        self._write(Flush())

    def close(self) -> None:
        """Close all outputs."""
        for sink in self._sinks:
            sink.close()

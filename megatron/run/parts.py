"""Interfaces of the parts of a run that are extras, and the flags that need them.

`Parts` has a builder for each part, or None if this installation does not have it.
`megatron.commands.parts` has the builders. The loop calls what they return by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megatron.rules.finding import Finding, Rule, error

# This module is used before torch is imported, which takes seconds.
if TYPE_CHECKING:
    from megatron.checkpoint.lease import Lease
    from megatron.checkpoint.load import Checkpoint
    from megatron.checkpoint.save import Saver
    from megatron.config.checkpoint import CheckpointConfig
    from megatron.config.config_with_origin import ConfigWithOrigin
    from megatron.config.tree import Config
    from megatron.data.source_kind import OpenIndexed, SourceKind
    from megatron.engine.base import Accept, Engine, StepResult
    from megatron.engine.kind import EngineKind
    from megatron.model.gpt import GPT
    from megatron.observe.block_timer import BlockTimer
    from megatron.parallel.mesh import Mesh
    from megatron.parallel.ranks import Ranks
    from megatron.parallel.roll_call import RollCall
    from megatron.plan.run_plan import Plan
    from megatron.run.state import TrainState

Printer = Callable[[str], None]
"""Prints a line of the log."""


class Exporter(Protocol):
    """Exports checkpoints while the run trains. Only rank 0 has one."""

    def record_checkpoint(self, iteration: int) -> None:
        """Record that a checkpoint is complete. It is exported if it is due."""

    def list_iterations_in_use(self) -> Collection[int]:
        """Return the checkpoints that are being read, and must not be removed."""

    def poll(self) -> None:
        """Report exports that have ended, and start the next one."""

    def finish(self, must_stop: Callable[[], bool]) -> None:
        """Wait for all exports at the end of the run, or end them if `must_stop` returns True."""

    def stop(self) -> None:
        """End the exports immediately."""


class Guard(Protocol):
    """Judges the steps of a run. It may drop one, go back to a checkpoint, or end the run."""

    @property
    def accept(self) -> Accept | None:
        """The function that decides whether a step may change weights. None accepts each step."""

    def respond(
        self, result: StepResult, learning_rate: float, state: TrainState, saver: Saver | None
    ) -> dict[str, Any] | None:
        """Respond to a step. Return the record of a rollback, or None if the run goes on.

        All ranks call it together, and get the same answer.

        Args:
            result: The step.
            learning_rate: The learning rate of the step.
            state: The state after the step.
            saver: The saver of the run.

        Raises:
            TrainingError: The run has diverged.
            CheckpointError: A save in progress failed, or the rollback cannot be recorded.
        """

    def start_phase(self) -> None:
        """Forget the level of the losses, because the data change."""

    def state(self) -> dict[str, Any]:
        """Return the state as JSON values, for `TrainState.spike_guard`."""


class GuardKind(Protocol):
    """Builds a guard, and carries out its rollbacks while the training loop does not run."""

    def build(self, plan: Plan, state: TrainState, mesh: Mesh, log: Printer) -> Guard:
        """Return the guard of a run with --spike-guard."""

    def finish_interrupted_rollback(self, config: Config, ranks: Ranks, log: Printer) -> None:
        """Complete a rollback that an earlier launch did not finish. All ranks call it.

        Raises:
            MegatronError: On every rank. The folder cannot be rolled back.
        """

    def add_windows(
        self, plan: Plan, state: TrainState, checkpoint: Checkpoint
    ) -> tuple[Plan, list[str]]:
        """Add the data that rollbacks skip to the plan and the state of a resume, on rank 0.

        Returns:
            The plan, and notes for the start.

        Raises:
            CheckpointError: The records of the rollbacks cannot be read.
        """

    def roll_back(
        self, record: dict[str, Any], plan: Plan, mesh: Mesh, lease: Lease | None
    ) -> None:
        """Carry out the rollback that a record describes. All ranks call it.

        The files of the run must be closed.

        Raises:
            MegatronError: On every rank. The folder cannot be rolled back.
        """


class Profiling(Protocol):
    """Records chosen iterations with a profiler, and the history of the memory.

    It is a context manager around training, which writes what is left at the end.
    """

    def __enter__(self) -> object:
        """Return itself."""

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Write the iterations recorded so far, unless there was an error."""

    def record(self, iteration: int) -> AbstractContextManager[None]:
        """Return a context manager around an iteration."""


@dataclass(frozen=True)
class RankTimes:
    """How long a block's forward pass takes on the ranks, without waiting for other ranks."""

    median: float
    """Seconds. With an even number of ranks it is the smaller one of the two in the middle."""
    slowest: int
    """The slowest rank."""
    slow: dict[int, float]
    """Slow rank -> its time as a multiple of the median, the slowest one first."""
    seconds: Sequence[float]
    """The time of each rank."""


class RankComparison(Protocol):
    """Measures this rank's blocks, and compares the times of all ranks."""

    def measure(self, iteration: int) -> AbstractContextManager[None]:
        """Return a context manager around a step."""

    def take_report(self, before: int, after: int) -> float | None:
        """Return this rank's seconds for a block, or None if no comparison is due.

        Either each rank returns a number, or none does.

        Args:
            before: The iteration before the last step or jump.
            after: The iteration after it.
        """

    def compare(self, seconds: Sequence[float]) -> RankTimes | None:
        """Compare what `take_report` returned on each rank. Return None if nothing was measured."""


class Tasks(Protocol):
    """Tasks that are evaluated while the run trains."""

    evaluated_at: int | None
    """The last iteration after which the tasks were evaluated."""

    def evaluate(
        self, engine: Engine, plan: Plan, mesh: Mesh, log: Printer
    ) -> dict[str, dict[str, float]]:
        """Return the scores on rank 0: task -> metric -> value. Other ranks return an empty dict.

        All ranks call it together. Weights do not change.

        Raises:
            TrainingError: A score cannot be computed. Every rank raises it.
        """


class RunTracker(Protocol):
    """Sends the numbers of the metrics file to an experiment tracker. Only `close` waits for it."""

    def start(self, iteration: int) -> None:
        """Start tracking a launch that continues after `iteration`."""

    def poll(self) -> None:
        """Print the messages of the tracker."""

    def request_end(self) -> None:
        """Ask the tracker to send the rest. The metrics file must be closed."""

    def close(self) -> None:
        """Wait a limited time until the tracker ends. Call it after `request_end`."""


class EmissionsMeter(Protocol):
    """Measures energy and CO2. A failure does not end the training."""

    def flush(self) -> None:
        """Write the measurement so far."""

    def stop(self) -> float | None:
        """End the measurement. Return kilograms of CO2 equivalent, or None without them."""


class GoodputReport(Protocol):
    """Measures which share of the run's time went into steps that were kept."""

    def add_step(self, seconds: float, phases: Mapping[str, float], *, applied: bool) -> None:
        """Add an iteration: its wall time, the seconds of its phases, and whether it was kept."""

    def add_phases(self, phases: Mapping[str, float]) -> None:
        """Add a save and an evaluation outside of an iteration."""

    def compute_share(self) -> float | None:
        """Return the share, from 0 to 1. It is None until the files of the run are read."""

    def report_if_due(self, log: Printer) -> None:
        """Print the goodput at a save, if the last line was long enough ago."""

    def report_end(self, log: Printer) -> None:
        """Print the goodput at the end of a launch."""


@dataclass(frozen=True)
class Parts:
    """Builders of the parts of a run. None stands for a part that is not installed.

    A builder imports its package when it is called, so a run pays only for what it uses.
    """

    engine: EngineKind | None = None
    """The kind of the engine. None stands for the engine of the core."""
    build_exporter: Callable[[CheckpointConfig, Printer, int], Exporter] | None = None
    """Builds the exporter of --hf-export-interval, from settings, printer and last iteration."""
    load_source: Callable[[str], SourceKind] | None = None
    """Loads the kind of data of --dataset-format."""
    open_indexed: OpenIndexed | None = None
    """Opens an indexed data set or the manifest of several. None opens no manifest."""
    load_guard: Callable[[], GuardKind] | None = None
    """Loads the guard of --spike-guard. A run without one completes its earlier rollbacks too."""
    build_profiling: Callable[[Config, int, Printer], Profiling] | None = None
    """Builds the recorder of --profile-iterations and --memory-snapshot of a rank."""
    build_stragglers: Callable[[Sequence[GPT], BlockTimer, int, float], RankComparison] | None = (
        None
    )
    """Builds the comparison of --straggler-interval, from stages, their timer and both flags."""
    load_watchdog: Callable[[str | None], Callable[..., RollCall]] | None = None
    """Loads the builder of the watchdog of --hang-timeout, for the folder of --save."""
    prepare_tasks: Callable[[Plan, Ranks, Printer], Tasks] | None = None
    """Prepares the tasks of --eval-tasks. All ranks call it together."""
    rules: tuple[Rule[ConfigWithOrigin], ...] = ()
    """Rules about the flags of the parts. They import no torch."""
    build_tracker: Callable[[str, str, Path, Path, Printer], RunTracker] | None = None
    """Builds a tracker from its name, project, the --save folder and the metrics file."""
    start_emissions: Callable[[str, str, Printer], EmissionsMeter] | None = None
    """Starts the measurement of --codecarbon-dir, with the folder and the country."""
    start_goodput: Callable[[Path, Path, Mapping[str, Any] | None], GoodputReport] | None = None
    """Starts the goodput of a run with --save, from that folder and the metrics file.

    The last argument has the details of the event "start", if the run has no earlier launch.
    """
    predict: Callable[[Plan, str], dict[str, Any]] | None = None
    """Predicts the step of a plan on a device, for the chronicle."""
    keep_verification: Callable[[Plan, Printer], dict[str, Any]] | None = None
    """Keeps the report of --verification with the run. Returns its verdict, for the chronicle."""


NO_PARTS = Parts()
"""The core alone."""


@dataclass(frozen=True)
class PartsContext:
    """A configuration, and the parts that are installed."""

    config: Config
    parts: Parts


def check_parts(context: PartsContext) -> Iterator[Finding]:
    """Check that each part that the configuration asks for is installed."""
    config = context.config
    parts = context.parts
    logging = config.logging
    exports = config.checkpoint.hf_export_interval
    interval = config.parallel.straggler_interval
    # Ranks are compared by default. Without the package, only another value is refused.
    compares = interval not in (0, type(config.parallel).straggler_interval)
    needed = [
        (exports, parts.build_exporter, "hf-export-interval", "convert"),
        (config.parallel.deepspeed, parts.engine, "deepspeed", "deepspeed"),
        *(
            (True, parts.engine, flag.removeprefix("--"), "kernels")
            for flag in config.kernels.fusion_flags
        ),
        (config.precision.fp8_format, parts.engine, "fp8-format", "float8"),
        (config.data.dataset_format, parts.load_source, "dataset-format", "sources"),
        (config.guard.is_on, parts.load_guard, "spike-guard", "guard"),
        (logging.profile_iterations, parts.build_profiling, "profile-iterations", "profiling"),
        (logging.memory_snapshot, parts.build_profiling, "memory-snapshot", "profiling"),
        (config.batch.eval_tasks, parts.prepare_tasks, "eval-tasks", "scoring"),
        (config.parallel.hang_timeout, parts.load_watchdog, "hang-timeout", "watchdog"),
        (compares, parts.build_stragglers, "straggler-interval", "stragglers"),
        (logging.tracker, parts.build_tracker, "tracker", "trackers"),
        (logging.codecarbon_dir, parts.start_emissions, "codecarbon-dir", "trackers"),
        (logging.verification, parts.keep_verification, "verification", "verify"),
    ]
    for is_needed, part, flag, package in needed:
        if is_needed and part is None:
            yield error(
                f"--{flag} needs megatron.extras.{package}, which this installation does not have. "
                "Install the complete package, or leave out the flag"
            )

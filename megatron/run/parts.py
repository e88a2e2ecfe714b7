"""The parts of a run that are extras: what the loop calls, and the flags that need them.

Each class here does nothing, so that the loop needs no condition. An extra derives from it. `Parts`
builds them, and `InstalledParts` (`megatron.commands.parts`) builds the extras in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.observe.report import Sink
from megatron.plan.rules.finding import Finding, error

# This module is used before torch is imported, which takes seconds.
if TYPE_CHECKING:
    from megatron.checkpoint.lease import Lease
    from megatron.checkpoint.load import Checkpoint
    from megatron.checkpoint.save import Saver
    from megatron.checkpoint.store import Store
    from megatron.config.checkpoint import CheckpointConfig
    from megatron.config.fields import ConfigWithOrigin
    from megatron.config.logging import LoggingConfig
    from megatron.config.tree import Config
    from megatron.data.batches import Microbatch
    from megatron.data.indexed import IndexedDataset
    from megatron.data.source import SourceKind
    from megatron.engine.base import Accept, AcceptOnDevice, Engine, StepResult
    from megatron.engine.kind import EngineKind
    from megatron.model.gpt import GPT
    from megatron.observe.timers import BlockTimer
    from megatron.parallel.mesh import Mesh
    from megatron.parallel.ranks import Ranks
    from megatron.parallel.roll_call import RollCall
    from megatron.parallel.shard import TensorShard
    from megatron.plan.run_plan import Plan
    from megatron.run.state import TrainState

Printer = Callable[[str], None]
"""Prints a line of the log."""


class Exporter:
    """Exports checkpoints while the run trains. Only rank 0 has one that does."""

    def record_checkpoint(self, iteration: int) -> None:
        """Record that a checkpoint is complete. It is exported if it is due."""

    def list_iterations_in_use(self) -> Collection[int]:
        """Return the checkpoints that are being read, and must not be removed."""
        return ()

    def poll(self) -> None:
        """Report exports that have ended, and start the next one."""

    def finish(self, must_stop: Callable[[], bool]) -> None:
        """Wait for all exports at the end of the run, or end them if `must_stop` returns True."""

    def stop(self) -> None:
        """End the exports immediately."""


class Guard:
    """Judges the steps of a run. It may drop one, go back to a checkpoint, or end the run."""

    accept: Accept | None = None
    """The function that decides whether a step may change weights. None accepts each step."""

    def find_accept(self) -> AcceptOnDevice | None:
        """Return `accept` for the next step, so that the device can decide. None accepts it."""
        return None

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
        return None

    def start_phase(self) -> None:
        """Forget the level of the losses, because the data change."""

    def record(self, state: TrainState) -> None:
        """Store the state of the guard in `TrainState.spike_guard`, as JSON values.

        Without a guard, that of an earlier launch stays.
        """


class GuardKind:
    """Builds a guard, and carries out its rollbacks while the training loop does not run."""

    def build(self, plan: Plan, state: TrainState, mesh: Mesh, log: Printer) -> Guard:
        """Return the guard of a run with --spike-guard."""
        return Guard()

    def finish_interrupted_rollback(self, config: Config, ranks: Ranks, log: Printer) -> bool:
        """Complete a rollback that an earlier launch did not finish. All ranks call it.

        Returns:
            Whether there was one.

        Raises:
            MegatronError: On every rank. The folder cannot be rolled back.
        """
        return False

    def add_windows(
        self, plan: Plan, state: TrainState, checkpoint: Checkpoint
    ) -> tuple[Plan, list[str]]:
        """Add the data that rollbacks skip to the plan and the state of a resume, on rank 0.

        Returns:
            The plan, and notes for the start.

        Raises:
            CheckpointError: The records of the rollbacks cannot be read.
        """
        return plan, []

    def roll_back(
        self, record: dict[str, Any], plan: Plan, mesh: Mesh, lease: Lease | None
    ) -> None:
        """Carry out the rollback that a record describes. All ranks call it.

        The files of the run must be closed.

        Raises:
            MegatronError: On every rank. The folder cannot be rolled back.
        """


class Profiling:
    """Records chosen iterations with a profiler, and the history of the memory.

    It is a context manager around training, which writes what is left at the end.
    """

    def __enter__(self) -> Profiling:
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Write the iterations recorded so far, unless there was an error."""

    def record(self, iteration: int) -> AbstractContextManager[None]:
        """Return a context manager around an iteration."""
        return nullcontext()


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


class RankComparison:
    """Measures this rank's blocks, and compares the times of all ranks."""

    def measure(self, iteration: int) -> AbstractContextManager[None]:
        """Return a context manager around a step."""
        return nullcontext()

    def take_report(self, before: int, after: int) -> float | None:
        """Return this rank's seconds for a block, or None if no comparison is due.

        Either each rank returns a number, or none does.

        Args:
            before: The iteration before the last step or jump.
            after: The iteration after it.
        """
        return None

    def compare(self, seconds: Sequence[float]) -> RankTimes | None:
        """Compare what `take_report` returned on each rank. Return None if nothing was measured."""
        return None


class Replay:
    """Computes a microbatch twice, and compares what each rank computed."""

    def check(self, microbatches: Sequence[Microbatch], iteration: int) -> None:
        """Compare two computations of the first microbatch of a step. All ranks call it together.

        Raises:
            FaultyHostError: They differ, and the run must end. Every rank raises it.
        """

    def finish(self) -> dict[str, int]:
        """Log how many comparisons there were, and return what the end of the launch records."""
        return {}


class Tasks:
    """Tasks that are evaluated while the run trains."""

    evaluated_at: int | None = None
    """The last iteration after which the tasks were evaluated."""

    def evaluate(
        self, engine: Engine, plan: Plan, mesh: Mesh, log: Printer
    ) -> dict[str, dict[str, float]]:
        """Return the scores on rank 0: task -> metric -> value. Other ranks return an empty dict.

        All ranks call it together. Weights do not change.

        Raises:
            TrainingError: A score cannot be computed. Every rank raises it.
        """
        return {}


class GoodputReport(Sink):
    """Measures which share of the run's time went into steps that were kept."""

    def compute_share(self) -> float | None:
        """Return the share, from 0 to 1. It is None until the files of the run are read."""
        return None


@dataclass(frozen=True)
class Parts:
    """Builds the parts of a run. These do nothing, so the run is the core alone.

    A subclass imports the package of a part when it builds it, so a run pays only for what it uses.
    """

    engine: EngineKind | None = None
    """The kind of the engine. None stands for the engine of the core."""

    def find_missing(self, config: Config) -> Iterator[Finding]:
        """Yield an error for each flag whose part is not installed.

        An installation has all packages of `megatron.extras`, or none. An extra yields nothing.
        """
        logging = config.logging
        parallel = config.parallel
        # Ranks are compared by default. Without the package, only another value is refused.
        compares = parallel.straggler_interval not in (0, type(parallel).straggler_interval)
        needed = [
            (config.checkpoint.hf_export_interval, "hf-export-interval", "interop.convert"),
            (config.checkpoint.local_dir, "local-dir", "object_store"),
            (config.checkpoint.rehearsal, "rehearsal", "operations.handover"),
            (parallel.deepspeed, "deepspeed", "step.deepspeed"),
            *(
                (True, flag.removeprefix("--"), "step.kernels")
                for flag in config.kernels.fusion_flags
            ),
            (config.precision.fp8_format, "fp8-format", "step.float8"),
            (config.data.dataset_format, "dataset-format", "samples"),
            (config.guard.is_on, "spike-guard", "watch.guard"),
            (logging.profile_iterations, "profile-iterations", "watch.profiler"),
            (logging.memory_snapshot, "memory-snapshot", "watch.profiler"),
            (config.batch.eval_tasks, "eval-tasks", "inference.scoring"),
            (parallel.hang_seconds, "hang-timeout", "watch.watchdog"),
            (compares, "straggler-interval", "watch.stragglers"),
            (parallel.replay_interval, "replay-interval", "watch.replay"),
            (logging.tracker, "tracker", "watch.trackers"),
            (logging.codecarbon_dir, "codecarbon-dir", "watch.trackers"),
            (logging.verification, "verification", "planner.verify"),
        ]
        for is_needed, flag, package in needed:
            if is_needed:
                yield error(
                    f"--{flag} needs megatron.extras.{package}, which this installation does not "
                    "have. Install the complete package, or leave out the flag"
                )

    def check_flags(self, settings: ConfigWithOrigin) -> Iterator[Finding]:
        """Check the flags of the parts. It imports no torch."""
        yield from ()

    def load_source(self, dataset_format: str) -> SourceKind | None:
        """Load the kind of data of --dataset-format."""
        return None

    def open_indexed(self, prefix: str) -> IndexedDataset:
        """Open an indexed data set. An extra also opens the manifest of several."""
        # It imports NumPy, which only a run that opens data needs.
        from megatron.data.indexed import IndexedDataset

        return IndexedDataset(prefix)

    def build_store(self, config: CheckpointConfig, ranks: Ranks) -> Store:
        """Build where the checkpoints are kept, if --save or --load is an address."""
        # It imports torch, which the checks before the start do not need.
        from megatron.checkpoint.store import Store

        return Store()

    def change_loaded(self, shards: Sequence[TensorShard], config: Config) -> None:
        """Change weights that were loaded, with --rehearsal perturbed. Each rank calls it."""

    def load_watchdog(self, folder: str | None) -> Callable[..., RollCall] | None:
        """Load the builder of the watchdog of --hang-timeout, for the folder of --save."""
        return None

    def load_guard(self) -> GuardKind:
        """Load the guard. A run without --spike-guard completes its earlier rollbacks too."""
        return GuardKind()

    def prepare_tasks(self, plan: Plan, ranks: Ranks, log: Printer) -> Tasks:
        """Prepare the tasks of --eval-tasks. All ranks call it together."""
        return Tasks()

    def build_exporter(self, plan: Plan, state: TrainState, mesh: Mesh, log: Printer) -> Exporter:
        """Build the exporter of --hf-export-interval."""
        return Exporter()

    def build_profiling(self, plan: Plan, mesh: Mesh, log: Printer) -> Profiling:
        """Build the recorder of --profile-iterations and --memory-snapshot."""
        return Profiling()

    def build_stragglers(
        self, plan: Plan, mesh: Mesh, stages: Sequence[GPT], timer: BlockTimer
    ) -> RankComparison:
        """Build the comparison of --straggler-interval, which times the blocks of the stages."""
        return RankComparison()

    def build_replay(self, plan: Plan, mesh: Mesh, engine: Engine, log: Printer) -> Replay:
        """Build the comparison of --replay-interval."""
        return Replay()

    def build_trackers(self, config: Config, metrics: Path, log: Printer) -> Sequence[Sink]:
        """Build what sends the numbers of the metrics file to the trackers of --tracker."""
        return ()

    def build_emissions(self, logging: LoggingConfig, log: Printer) -> Sequence[Sink]:
        """Start to measure energy and CO2 with --codecarbon-dir."""
        return ()

    def build_goodput(
        self, folder: Path, metrics: Path, log: Printer, *, is_first: bool
    ) -> GoodputReport:
        """Build the goodput of a run, from its --save folder and its metrics file.

        With `is_first`, the run has no earlier launch.
        """
        return GoodputReport()

    def predict(self, plan: Plan, device_name: str) -> dict[str, Any]:
        """Predict the step of a plan on a device, for the chronicle."""
        return {}

    def describe_start(self, plan: Plan, device_name: str, log: Printer) -> dict[str, Any]:
        """Return what else the chronicle records about the start of a launch, on rank 0."""
        return {}


NO_PARTS = Parts()
"""The core alone."""

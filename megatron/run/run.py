"""Everything that training uses, in one object that is passed as an argument."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.checkpoint.save import Saver
from megatron.data.epochs import DatasetUse
from megatron.data.source import Sources
from megatron.engine.base import Engine, StepResult
from megatron.observe.timers import Timers
from megatron.parallel.mesh import Mesh
from megatron.plan.run_plan import Plan
from megatron.run.clock import RunClock, StepClock
from megatron.run.exits import Exits, StopReason
from megatron.run.parts import Exporter, Guard, Profiling, RankComparison, Replay, Tasks
from megatron.run.report import Reporter
from megatron.run.start.data_files import DataFiles
from megatron.run.state import DivergenceWatch, TrainState


@dataclass(frozen=True)
class QueuedStep:
    """A step whose work is queued on the device, and whose numbers the host has not read."""

    read: Callable[[], StepResult]
    """Waits for the numbers."""
    iteration: int
    learning_rate: float
    batch_size: int
    seq_length: int


@dataclass
class Run:
    """The parts of a run after its start. There are no globals besides it."""

    plan: Plan
    mesh: Mesh
    engine: Engine
    sources: Sources
    data_files: DataFiles
    state: TrainState
    reporter: Reporter
    timers: Timers
    exits: Exits
    clock: RunClock
    step_clock: StepClock
    saver: Saver | None
    """None if nothing is saved."""
    # The parts from `profiling` to `guard` do nothing unless an extra takes their place. See
    # `megatron.run.parts`.
    profiling: Profiling = field(default_factory=Profiling)
    """With --profile-iterations or --memory-snapshot."""
    stragglers: RankComparison = field(default_factory=RankComparison)
    """With --straggler-interval and several ranks."""
    replay: Replay = field(default_factory=Replay)
    """With --replay-interval."""
    exporter: Exporter = field(default_factory=Exporter)
    """Only on rank 0, with --hf-export-interval."""
    tasks: Tasks = field(default_factory=Tasks)
    """With --eval-tasks."""
    guard: Guard = field(default_factory=Guard)
    """With --spike-guard."""
    training_data: Sequence[DatasetUse] = ()
    """Each indexed training data set, and how much of it the run reads.

    Empty for a run by time, whose number of tokens is not known.
    """
    checked_at: int | None = None
    """The last iteration after which replicas of parameters were found equal.

    None until the first check.
    """
    divergence: DivergenceWatch = field(default_factory=DivergenceWatch)
    queued: QueuedStep | None = None
    """The latest step, until it is read."""
    stop: StopReason = StopReason.NONE
    """The reason to stop that the ranks agreed on after the last step that was read."""
    rollback: dict[str, Any] | None = None
    """The guard's rollback, after `train` has returned `StopReason.ROLLBACK`."""
    sizes_ahead: tuple[int, int] | None = None
    """Samples and length of the batch that the reading threads expect. None after a jump."""
    valid_data: dict[str, Any] = field(default_factory=dict)
    """The states of the validation sets before the last evaluation."""
    token_bytes: torch.Tensor | None = None
    """Bytes of each id, int64 [v], or nothing if they are not known. None before an evaluation."""

"""Everything that training uses, in one object that is passed as an argument."""

from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.checkpoint.save import Saver
from megatron.data.source import Sources
from megatron.engine.base import Engine
from megatron.observe.memory_history import MemoryHistory
from megatron.observe.profiler import Profiler
from megatron.observe.timers import Timers
from megatron.parallel.mesh import Mesh
from megatron.plan import Plan
from megatron.training.clock import RunClock
from megatron.training.data_files import DataFiles
from megatron.training.divergence import DivergenceWatch
from megatron.training.eval_tasks import EvalTasks
from megatron.training.exits import Exits
from megatron.training.hf_export import HFExporter
from megatron.training.interventions import GuardRecords
from megatron.training.report import Reporter
from megatron.training.spike_guard import SpikeGuard
from megatron.training.state import TrainState
from megatron.training.step_clock import StepClock
from megatron.training.stragglers import StragglerWatch


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
    stragglers: StragglerWatch
    step_clock: StepClock
    saver: Saver | None
    """None if nothing is saved."""
    profiler: Profiler
    memory_history: MemoryHistory
    exporter: HFExporter | None = None
    """Only on rank 0, with --hf-export-interval."""
    tasks: EvalTasks | None = None
    """With --eval-tasks."""
    checked_at: int | None = None
    """The last iteration after which replicas of parameters were found equal.

    None until the first check.
    """
    divergence: DivergenceWatch = field(default_factory=DivergenceWatch)
    guard: SpikeGuard | None = None
    """None with --spike-guard off."""
    guard_records: GuardRecords | None = None
    """Only on rank 0, with a guard and --save."""
    rollback: dict[str, Any] | None = None
    """The guard's rollback, after `train` has returned `StopReason.ROLLBACK`."""
    token_bytes: torch.Tensor | None = None
    """Bytes of each id, int64 [v], or nothing if they are not known. None before an evaluation."""

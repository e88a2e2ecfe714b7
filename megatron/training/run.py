"""Everything that training touches, in one object that is passed, never fetched."""

from dataclasses import dataclass

from megatron.checkpoint.save import Saver
from megatron.data.source import Sources
from megatron.engine.base import Engine
from megatron.observe.timers import Timers
from megatron.parallel.mesh import Mesh
from megatron.plan import Plan
from megatron.training.data_files import DataFiles
from megatron.training.exits import Exits
from megatron.training.report import Reporter
from megatron.training.state import TrainState


@dataclass
class Run:
    plan: Plan
    mesh: Mesh
    engine: Engine
    sources: Sources
    data_files: DataFiles
    state: TrainState
    reporter: Reporter
    timers: Timers
    exits: Exits
    saver: Saver | None
    """None: nothing is saved."""
    checked_at: int | None = None
    """The iteration after which copies of parameters were last compared, and equal; None before the
    first time."""

"""From the plan to a `Run`, and out of the process again."""

import contextlib
import json
import os
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from megatron.checkpoint.load import Checkpoint
from megatron.checkpoint.save import check_writable
from megatron.config.tree import Config
from megatron.data.documents import DocumentRules, regards_documents
from megatron.data.index_helpers import implementation
from megatron.data.source import Place, Sources, build_sources, evaluation_samples
from megatron.engine.native import NativeEngine
from megatron.engine.support import refuse_unsupported
from megatron.errors import CheckpointError, ConfigError, MegatronError
from megatron.observe.log_line import kill_switch_line, loaded_checkpoint_line, no_checkpoint_line
from megatron.observe.startup import start_table
from megatron.observe.timers import COMMUNICATION, Timers
from megatron.parallel.grid import Grid
from megatron.parallel.mesh import Mesh, build_mesh, choose_device, start_process_group
from megatron.plan import Plan
from megatron.tokenizer import build_tokenizer
from megatron.training.exits import Exits
from megatron.training.loop import check_invariants
from megatron.training.report import Reporter
from megatron.training.resume import load_engine, remember
from megatron.training.run import Run
from megatron.training.state import TrainState


@dataclass(frozen=True)
class World:
    """What the launcher says of this process; a process without a launcher is a world of one."""

    size: int
    local_rank: int


def world_of_launcher(local_rank_flag: int | None = None) -> World:
    """Read the environment that torchrun sets; `--local-rank` of older launchers counts where LOCAL_RANK is missing."""
    local_rank = os.environ.get("LOCAL_RANK", local_rank_flag)
    return World(int(os.environ.get("WORLD_SIZE", "1")), int(local_rank) if local_rank is not None else 0)


def check_runnable(plan: Plan) -> None:
    """
    Raises:
        ConfigError: the plan has errors, lacks what training needs, or asks for what the engine does not do.
    """
    plan.raise_on_errors()
    refuse_unsupported(plan)
    config = plan.config
    if not (config.data.data_path or config.data.train_weighted_split_paths or config.data.train_weighted_split_paths_path):
        raise ConfigError("there is no data to train on: give --data-path or --train-weighted-split-paths")
    switch = config.batch.kill_switch_path
    if switch and Path(switch).exists():
        raise ConfigError(f"{kill_switch_line(switch)}: not starting; remove the file to run again")


def join_ranks(plan: Plan, world: World) -> Mesh:
    """Start the process group, where there is more than one rank, and cut it into the plan's grid."""
    parallel = plan.config.parallel
    device = choose_device(world.local_rank)
    if world.size > 1:
        backend = parallel.distributed_backend or ("nccl" if device.type == "cuda" else "gloo")
        start_process_group(backend, parallel.distributed_timeout_minutes)
    grid = Grid(parallel.pipeline_model_parallel_size, plan.data_parallel_size, parallel.tensor_model_parallel_size)
    return build_mesh(
        grid, device, sequence_parallel=parallel.sequence_parallel, timeout_minutes=parallel.distributed_timeout_minutes
    )


def build_run(plan: Plan, mesh: Mesh, state: TrainState, checkpoint: Checkpoint | None, notes: list[str]) -> Run:
    """Data, engine and reporter, with the checkpoint's contents in them; prints the table of what is in use.

    Raises:
        DataError: the corpus is missing, damaged, too small, or of another vocabulary.
        CheckpointError: the checkpoint does not fit.
        TrainingError: copies of a parameter are not equal.
    """
    config = plan.config
    exits = Exits(config.batch, mesh)  # first, so that a signal while building is not lost
    timers = Timers(mesh.device)
    mesh.tensor_parallel.clock = lambda: timers(COMMUNICATION)
    reporter = Reporter(plan, mesh, device_name=device_name(mesh.device))
    for note in notes:
        reporter.say(f"warning: {note}")
    if mesh.rank == 0 and config.checkpoint.save is not None and not config.batch.eval_only:
        check_writable(Path(config.checkpoint.save))
    sources = open_data(plan, mesh, state)
    engine = NativeEngine(plan, mesh, timers)
    rows = [
        ("device", *describe_devices(mesh)),
        *engine.kernels(),
        ("index helpers", *describe_index_helpers()),
        *reporter.conventions(),
    ]
    reporter.say(start_table(rows))
    if checkpoint is not None:
        load_engine(engine, checkpoint, config)
        reporter.say(loaded_checkpoint_line(str(config.checkpoint.load), checkpoint.iteration))
    elif config.checkpoint.load is not None:
        reporter.say(no_checkpoint_line(config.checkpoint.load))
    for note in sources.take_notes():
        reporter.say(note)
    remember(state, plan)
    run = Run(plan, mesh, engine, sources, state, reporter, timers, exits)
    if config.parallel.check_invariants_interval:
        check_invariants(run, last_good=None)
    timers.take()  # what building took is no iteration's
    return run


def open_data(plan: Plan, mesh: Mesh, state: TrainState) -> Sources:
    """The sources at the state's position."""
    config, batch = plan.config, plan.config.batch
    valid_samples, test_samples = evaluation_samples(plan.train_iters, batch.eval_interval, batch.eval_iters, plan.batch_size.final)
    sources = build_sources(
        config.data,
        seq_length=config.model.seq_length,
        seed=batch.seed,
        train_samples=plan.train_samples,
        valid_samples=valid_samples,
        test_samples=test_samples,
        place=Place(batch.micro_batch_size, mesh.place.data, mesh.grid.data, plan.vocab_size, document_rules(config)),
    )
    if state.data:
        sources.load(state.data)
        position = sources.train.consumed_samples if sources.train is not None else state.consumed_samples
        if position != state.consumed_samples:
            raise CheckpointError(
                f"the checkpoint counts {state.consumed_samples} consumed samples and its data stand at {position}; it is damaged: "
                "go back to an earlier one"
            )
    sources.prepare()
    return sources


def document_rules(config: Config) -> DocumentRules | None:
    """What is asked about documents; None where they are not regarded, so that no tokenizer is needed."""
    if not regards_documents(config.data):
        return None
    return DocumentRules.of(config.data, build_tokenizer(config.tokenizer).eod)


def device_name(device: torch.device) -> str:
    """As its maker calls it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()


def describe_devices(mesh: Mesh) -> tuple[str, str]:
    """For the table at start."""
    grid = mesh.grid
    layout = f"pipeline {grid.pipeline} x data {grid.data} x tensor {grid.tensor}" if grid.world_size > 1 else "one process"
    backend = f", {mesh.backend}" if mesh.backend else ""
    return f"{grid.world_size} x {device_name(mesh.device)}", f"{layout}{backend}"


def describe_index_helpers() -> tuple[str, str]:
    """For the table at start."""
    name, _, why = implementation().partition(" (")
    return name, why.removesuffix(")") or "built with this installation"


def leave_with_error(error: MegatronError) -> NoReturn:
    """Print one clear message and end the process at once: ranks that wait for this one in a collective must not wait long."""
    rank = int(os.environ.get("RANK", "0"))
    if rank > 0:
        # Most errors are every rank's. Rank 0 tells; if it is the same error, the launcher ends this process meanwhile.
        time.sleep(3)
    prefix = f"rank {rank} on {platform.node()}: " if rank > 0 else ""
    message = f"{prefix}{type(error).__name__}: {error}"
    print(message, file=sys.stderr, flush=True)
    sys.stdout.flush()
    tell_torchrun(message)
    # Not sys.exit: tearing down a process group whose other ranks are busy can hang.
    os._exit(2)


def tell_torchrun(message: str) -> None:
    """Have torchrun's own report name the error as the root cause; it reads this file of each rank that failed."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        record = {"message": message, "extraInfo": {"py_callstack": message, "timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": record}))


def leave() -> None:
    """The end of a run that went well, all ranks together."""
    if dist.is_initialized():
        dist.destroy_process_group()

"""From the plan to a `Run`, and out of the process again."""

import contextlib
import gc
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from megatron.checkpoint.course import Course, course_of
from megatron.checkpoint.finite import refuse_not_finite
from megatron.checkpoint.folder import mark_begun, traces
from megatron.checkpoint.lease import Lease
from megatron.checkpoint.ranks import Ranks
from megatron.checkpoint.save import Saver, check_writable
from megatron.checkpoint.start import agree_on_damage, agree_on_start
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.cli import LoadedConfig
from megatron.config.tree import Config
from megatron.data.documents import DocumentRules, regards_documents
from megatron.data.index_helpers import implementation
from megatron.data.source import Place, Sources, build_sources, evaluation_samples
from megatron.durable import replace_file
from megatron.engine.base import Engine
from megatron.error_report import FOLDER_VARIABLE, report_of, write_report
from megatron.errors import CheckpointError, DamagedError, MegatronError
from megatron.observe.log_line import loaded_checkpoint_line, no_checkpoint_line, saved_checkpoint_line
from megatron.observe.startup import start_table
from megatron.observe.timers import COMMUNICATION, Timers
from megatron.parallel.grid import Grid
from megatron.parallel.launcher import World
from megatron.parallel.mesh import Mesh, build_mesh, choose_device, start_process_group
from megatron.plan import Plan
from megatron.tokenizer import build_tokenizer
from megatron.training.agreement import check_agreement
from megatron.training.data_files import DataFiles, check_small_files, open_same
from megatron.training.exits import Exits
from megatron.training.loop import check_invariants
from megatron.training.report import Reporter
from megatron.training.resume import Job, load_engine, remember, settle, where_to_start
from megatron.training.run import Run
from megatron.training.state import TrainState


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


def ranks_of(mesh: Mesh) -> Ranks:
    """Those that write and read checkpoints together."""
    return Ranks(mesh.rank, mesh.grid.world_size, mesh.control)


def speaker(mesh: Mesh) -> Callable[[str], None]:
    """Prints on rank 0, before there is a reporter."""
    return (lambda line: print(line, flush=True)) if mesh.rank == 0 else (lambda line: None)


@contextlib.contextmanager
def own_folder(config: Config, mesh: Mesh) -> Iterator[Lease | None]:
    """Be the only writer of `--save` while this is entered; rank 0 holds the lease, the others None.

    Raises:
        CheckpointError: on every rank; the folder cannot be written, or another run lives in it.
    """
    if config.checkpoint.save is None or config.batch.eval_only:
        yield None
        return
    lease, problem, root = None, None, Path(config.checkpoint.save)
    cause: Exception | None = None
    if mesh.rank == 0:
        try:
            check_writable(root)
            lease = Lease.acquire(root, speaker(mesh))
            if not traces(root):
                mark_begun(root)
        except CheckpointError as error:
            problem, cause = str(error), error
        except OSError as error:
            problem, cause = f"--save {root} cannot be written: {error}", error
    problem = ranks_of(mesh).gather(problem)[0]
    if problem is not None:
        raise CheckpointError(problem) from cause
    try:
        yield lease
    finally:
        if lease is not None:
            lease.release()


def start_run(loaded: LoadedConfig, mesh: Mesh, lease: Lease | None) -> Run:
    """Afresh, or from the checkpoint that rank 0 finds; where that turns out to be damaged, from the one before it.

    Raises:
        CheckpointError: there is none to go on from, or it does not fit. ConfigError: see `settle`. LayoutError: ranks disagree.
    """
    config, ranks, say = loaded.config, ranks_of(mesh), speaker(mesh)
    exits = Exits(config.batch, mesh)  # first, so that a signal while building is not lost
    timers = Timers(mesh.device)
    mesh.tensor_parallel.clock = lambda: timers(COMMUNICATION)
    own = lease is not None and config.checkpoint.resumes_itself
    damage: dict[int, str] = {}
    while True:
        start = agree_on_start(where_to_start(config), ranks, damage, own_folder=own, say=say)
        job = settle(loaded, mesh.grid.world_size, start.checkpoint)
        check_agreement(job.plan.config, job.state.iteration, mesh)
        check_small_files(job.plan.config, ranks, mesh.describe())
        for note in job.notes:
            say(f"warning: {note}")
        engine = build_engine(job.plan, mesh, timers)
        wrong = load_together(engine, job, ranks)
        if wrong is None:
            return build_run(job, mesh, engine, exits, timers, lease)
        assert job.checkpoint is not None
        damage[job.checkpoint.iteration] = wrong
        del engine
        gc.collect()  # before the next one takes as much memory


def build_engine(plan: Plan, mesh: Mesh, timers: Timers) -> Engine:
    """The one that was asked for.

    Raises:
        ConfigError: DeepSpeed was, and is not installed.
    """
    if plan.config.parallel.deepspeed:  # each is seconds of imports
        from megatron.engine.deepspeed import DeepSpeedEngine

        return DeepSpeedEngine(plan, mesh, timers)
    from megatron.engine.native import NativeEngine

    return NativeEngine(plan, mesh, timers)


def load_together(engine: Engine, job: Job, ranks: Ranks) -> str | None:
    """Fill the engine from the job's checkpoint. Returns what is damaged of it, the same on all ranks; None where nothing is.

    Raises:
        CheckpointError: it does not fit; or it holds numbers that are not finite.
    """
    if job.checkpoint is None:
        return None
    damage, lines = None, list[str]()
    try:
        lines = load_engine(engine, job.checkpoint, job.plan.config)
    except DamagedError as error:
        damage = error
    damaged = agree_on_damage(job.checkpoint, damage, ranks)
    if damaged is None:
        refuse_not_finite(job.checkpoint, lines, ranks)
    return damaged


def build_run(job: Job, mesh: Mesh, engine: Engine, exits: Exits, timers: Timers, lease: Lease | None = None) -> Run:
    """Data, reporter and saver around an engine that has its weights; prints the table of what is in use.

    Raises:
        DataError: the corpus is missing, damaged, too small, or of another vocabulary.
        TrainingError: copies of a parameter are not equal.
    """
    plan, state, config = job.plan, job.state, job.plan.config
    sources = open_data(plan, mesh, state, speaker(mesh))
    data_files = DataFiles(sources.library, state, ranks_of(mesh), mesh.describe(), speaker(mesh))
    data_files.check()  # before anything is trained on a small file that has changed
    reporter = Reporter(plan, mesh, device_name=device_name(mesh.device))
    rows = [
        ("device", *describe_devices(mesh)),
        *engine.kernels(),
        ("index helpers", *describe_index_helpers()),
        *reporter.conventions(),
    ]
    saver = None
    if config.checkpoint.save is not None and not config.batch.eval_only:
        course = course_of(job.checkpoint.manifest) if job.checkpoint is not None and config.checkpoint.resumes_itself else ()
        saver = build_saver(config.checkpoint, mesh, reporter, lease, course)
        engine.before_update = saver.wait_for_copy
        rows.append(("checkpoints", *saver.describe(engine.chunks(optimizer=config.checkpoint.save_optim))))
    reporter.say(start_table(rows))
    if job.checkpoint is not None:
        reporter.say(loaded_checkpoint_line(str(config.checkpoint.load), job.checkpoint.iteration))
    elif config.checkpoint.load is not None:
        reporter.say(no_checkpoint_line(config.checkpoint.load))
    for note in sources.take_notes():
        reporter.say(note)
    remember(state, plan)
    run = Run(plan, mesh, engine, sources, data_files, state, reporter, timers, exits, saver)
    check_invariants(run)
    timers.take()  # what building took is no iteration's
    return run


def build_saver(config: CheckpointConfig, mesh: Mesh, reporter: Reporter, lease: Lease | None, course: Course) -> Saver:
    """That tells of its checkpoints by the reporter."""

    def saved(iteration: int) -> None:
        reporter.say(saved_checkpoint_line(iteration, str(config.save)))

    ranks, root = ranks_of(mesh), Path(str(config.save))
    return Saver(root, config, ranks, lease=lease, say=reporter.say, saved=saved, course=course)


def open_data(plan: Plan, mesh: Mesh, state: TrainState, say: Callable[[str], None] = lambda line: None) -> Sources:
    """Open the sources at the state's position, with the same data on all ranks, and build their indices.

    `say` takes what must be known while an index is built.

    Raises:
        DataError: see `build_run`. LayoutError: ranks read different data. CheckpointError: the state contradicts itself.
    """
    config, batch = plan.config, plan.config.batch
    valid_samples, test_samples = evaluation_samples(plan.train_iters, batch.eval_interval, batch.eval_iters, plan.batch_size.final)

    def build() -> Sources:
        return build_sources(
            config.data,
            seq_length=config.model.seq_length,
            seed=batch.seed,
            train_samples=plan.train_samples,
            valid_samples=valid_samples,
            test_samples=test_samples,
            place=Place(batch.micro_batch_size, mesh.place.data, mesh.grid.data, plan.vocab_size, document_rules(config)),
            say=say,
            # Ranks that need not wait are in a collective by then, which waits as long and not longer.
            wait_seconds=60 * config.parallel.distributed_timeout_minutes,
        )

    sources = open_same(build, ranks_of(mesh), mesh.describe())
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
    layout = str(grid) if grid.world_size > 1 else "one process"
    backend = f", {mesh.backend}" if mesh.backend else ""
    return f"{grid.world_size} x {device_name(mesh.device)}", f"{layout}{backend}"


def describe_index_helpers() -> tuple[str, str]:
    """For the table at start."""
    name, _, why = implementation().partition(" (")
    return name, why.removesuffix(")") or "built with this installation"


def leave_with_error(error: MegatronError) -> NoReturn:
    """Print one clear message and end the process at once: ranks that wait for this one in a collective must not wait long."""
    rank = int(os.environ.get("RANK", "0"))
    prefix = f"rank {rank} on {platform.node()}: " if rank > 0 else ""
    message = f"{prefix}{type(error).__name__}: {error}"
    report_error(error, message)  # before the wait, in which the launcher may end this process
    if rank > 0:
        # Most errors are every rank's. Rank 0 tells; if it is the same error, the launcher ends this process meanwhile.
        time.sleep(3)
    print(message, file=sys.stderr, flush=True)
    sys.stdout.flush()
    if rank == 0 and FOLDER_VARIABLE in os.environ:
        time.sleep(1)  # srun ends all ranks when this one ends: let the others write their reports first
    # Not sys.exit: tearing down a process group whose other ranks are busy can hang.
    os._exit(2)


def report_error(error: BaseException, message: str) -> None:
    """Leave the error where the launcher looks for it: torchrun in a file of each rank, the array task in a folder of all."""
    path, folder = os.environ.get("TORCHELASTIC_ERROR_FILE"), os.environ.get(FOLDER_VARIABLE)
    try:
        if path:
            record = {"message": message, "extraInfo": {"py_callstack": message, "timestamp": str(int(time.time()))}}
            replace_file(Path(path), json.dumps({"message": record}))
        if folder:
            write_report(Path(folder), report_of(error))
    except OSError as trouble:
        print(f"warning: the error could not be reported to the launcher: {trouble}", file=sys.stderr, flush=True)


def leave() -> None:
    """The end of a run that went well, all ranks together."""
    if dist.is_initialized():
        dist.destroy_process_group()

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

from megatron.checkpoint.folder import list_run_leftovers, mark_started
from megatron.checkpoint.lease import Lease
from megatron.checkpoint.lineage import Lineage, read_lineage
from megatron.checkpoint.ranks import PATIENCE_SECONDS, Ranks
from megatron.checkpoint.save import Saver, check_writable
from megatron.checkpoint.start import agree_on_start
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.cli import LoadedConfig
from megatron.config.tree import Config
from megatron.data.documents import DocumentRules, needs_documents
from megatron.data.index_helpers import describe_implementation
from megatron.data.source import BatchSlice, Sources, build_sources, count_evaluation_samples
from megatron.durable import replace_file
from megatron.engine.base import Engine
from megatron.error_report import FOLDER_VARIABLE, build_report, write_report
from megatron.errors import CheckpointError, LostRanksError, MegatronError
from megatron.observe.log_line import (
    format_loaded_checkpoint_line,
    format_no_checkpoint_line,
    format_saved_checkpoint_line,
)
from megatron.observe.startup import format_start_table
from megatron.observe.timers import COMMUNICATION, Timers
from megatron.parallel.grid import Grid
from megatron.parallel.launcher import LaunchedWorld
from megatron.parallel.mesh import Mesh, build_mesh, choose_device, start_process_group
from megatron.parallel.roll_call import LOST, RollCall, TimeLimit
from megatron.plan import Plan
from megatron.tokenizer import build_tokenizer
from megatron.training.agreement import check_agreement
from megatron.training.data_files import DataFiles, check_small_files, open_same
from megatron.training.exits import Exits
from megatron.training.loop import check_invariants
from megatron.training.report import Reporter
from megatron.training.resume import (
    Job,
    load_engine,
    record_for_resume,
    resolve_job,
    select_checkpoint_config,
)
from megatron.training.run import Run
from megatron.training.state import TrainState


def join_ranks(plan: Plan, world: LaunchedWorld) -> Mesh:
    """Start the process group, where there is more than one rank, and cut it into the plan's grid."""
    parallel = plan.config.parallel
    device = choose_device(world.local_rank)
    if world.size > 1:
        backend = parallel.distributed_backend or ("nccl" if device.type == "cuda" else "gloo")
        start_process_group(backend, parallel.distributed_timeout_minutes)
    grid = Grid(
        parallel.pipeline_model_parallel_size,
        plan.data_parallel_size,
        parallel.tensor_model_parallel_size,
    )
    return build_mesh(
        grid,
        device,
        sequence_parallel=parallel.sequence_parallel,
        timeout_minutes=parallel.distributed_timeout_minutes,
    )


def answer_roll_call(plan: Plan, mesh: Mesh) -> contextlib.AbstractContextManager[object]:
    """While this is entered, a collective that fails ends the run with the names of the ranks that are missing."""
    if mesh.control is None:
        return contextlib.nullcontext()
    store = dist.distributed_c10d._get_default_store()
    return RollCall(
        store, mesh.rank, mesh.names, TimeLimit(plan.config.parallel.distributed_timeout_minutes)
    )


def build_ranks(mesh: Mesh) -> Ranks:
    """Those that write and read checkpoints together."""
    return Ranks(mesh.rank, mesh.grid.world_size, mesh.control, mesh.names)


def make_printer(mesh: Mesh) -> Callable[[str], None]:
    """Prints on rank 0, before there is a reporter."""
    return (lambda line: print(line, flush=True)) if mesh.rank == 0 else (lambda line: None)


@contextlib.contextmanager
def hold_folder_lease(config: Config, mesh: Mesh) -> Iterator[Lease | None]:
    """Be the only writer of `--save` while this is entered; rank 0 holds the lease, the others None.

    Raises:
        CheckpointError: on every rank; the folder cannot be written, or another run lives in it.
    """
    if config.checkpoint.save is None or config.batch.eval_only:
        yield None
        return
    root = Path(config.checkpoint.save)

    def acquire() -> tuple[Lease | None, str | None, Exception | None]:
        lease = None
        try:
            if mesh.rank == 0:
                check_writable(root)
                lease = Lease.acquire(root, make_printer(mesh))
                if not list_run_leftovers(root):
                    mark_started(root)
        except CheckpointError as error:
            return lease, str(error), error
        except OSError as error:
            return lease, f"--save {root} cannot be written: {error}", error
        return lease, None, None

    ranks = build_ranks(mesh)
    lease, problem, cause = ranks.work(acquire, f"taking over {root}", make_printer(mesh))
    problem = ranks.gather(problem)[0]
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
        CheckpointError: there is none to go on from, or it does not fit. ConfigError: see `resolve_job`. LayoutError: ranks disagree.
    """
    config, ranks, say = loaded.config, build_ranks(mesh), make_printer(mesh)
    exits = Exits(config.batch, mesh)  # first, so that a signal while building is not lost
    timers = Timers(mesh.device)
    mesh.tensor_parallel.comm_timer = lambda: timers(COMMUNICATION)
    own = lease is not None and config.checkpoint.resumes_itself
    damage: dict[int, str] = {}
    while True:
        start = agree_on_start(
            select_checkpoint_config(config), ranks, damage, holds_lease=own, say=say
        )
        job = resolve_job(loaded, mesh.grid.world_size, start.checkpoint)
        check_agreement(job.plan.config, job.state.iteration, mesh)
        check_small_files(job.plan.config, ranks, mesh.describe())
        for note in job.notes:
            say(f"warning: {note}")
        engine = build_engine(job.plan, mesh, timers)
        wrong = (
            None
            if job.checkpoint is None
            else load_engine(engine, job.checkpoint, job.plan.config, ranks, say)
        )
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

    def load() -> Callable[[Plan, Mesh, Timers], Engine]:
        if plan.config.parallel.deepspeed:
            from megatron.engine.deepspeed import DeepSpeedEngine

            return DeepSpeedEngine
        from megatron.engine.native import NativeEngine

        return NativeEngine

    # Each is seconds of imports, and minutes where many ranks read them from a slow file system.
    make = build_ranks(mesh).work(load, "importing the engine", make_printer(mesh))
    return make(plan, mesh, timers)


def build_run(
    job: Job, mesh: Mesh, engine: Engine, exits: Exits, timers: Timers, lease: Lease | None = None
) -> Run:
    """Data, reporter and saver around an engine that has its weights; prints the table of what is in use.

    Raises:
        DataError: the corpus is missing, damaged, too small, or of another vocabulary.
        TrainingError: copies of a parameter are not equal.
    """
    plan, state, config = job.plan, job.state, job.plan.config
    ranks, say = build_ranks(mesh), make_printer(mesh)
    sources = open_data(plan, mesh, state, say)
    data_files = DataFiles(sources.registry, state, ranks, mesh.describe(), say)
    data_files.check()  # before anything is trained on a small file that has changed
    reporter = Reporter(plan, mesh, device_name=get_device_name(mesh.device))
    rows = [
        ("device", *describe_devices(mesh)),
        *engine.describe_kernels(),
        ("index helpers", *describe_index_helpers()),
        *reporter.describe_conventions(),
    ]
    saver = None
    if config.checkpoint.save is not None and not config.batch.eval_only:
        lineage = (
            read_lineage(job.checkpoint.manifest)
            if job.checkpoint is not None and config.checkpoint.resumes_itself
            else ()
        )
        saver = build_saver(config.checkpoint, mesh, reporter, lease, lineage)
        engine.pre_update_hook = saver.wait_for_copy
        rows.append(
            ("checkpoints", *saver.describe(engine.shards(optimizer=config.checkpoint.save_optim)))
        )
    reporter.say(format_start_table(rows))
    if job.checkpoint is not None:
        reporter.say(
            format_loaded_checkpoint_line(str(config.checkpoint.load), job.checkpoint.iteration)
        )
    elif config.checkpoint.load is not None:
        reporter.say(format_no_checkpoint_line(config.checkpoint.load))
    for note in sources.take_notes():
        reporter.say(note)
    record_for_resume(state, plan)
    run = Run(plan, mesh, engine, sources, data_files, state, reporter, timers, exits, saver)
    check_invariants(run)
    timers.take()  # what building took is no iteration's
    return run


def build_saver(
    config: CheckpointConfig, mesh: Mesh, reporter: Reporter, lease: Lease | None, lineage: Lineage
) -> Saver:
    """That tells of its checkpoints by the reporter."""

    def report_saved(iteration: int) -> None:
        reporter.say(format_saved_checkpoint_line(iteration, str(config.save)))

    ranks, root = build_ranks(mesh), Path(str(config.save))
    return Saver(
        root, config, ranks, lease=lease, say=reporter.say, saved=report_saved, lineage=lineage
    )


def open_data(
    plan: Plan, mesh: Mesh, state: TrainState, say: Callable[[str], None] = lambda line: None
) -> Sources:
    """Open the sources at the state's position, with the same data on all ranks, and build their indices.

    `say` takes what must be known while an index is built.

    Raises:
        DataError: see `build_run`. LayoutError: ranks read different data. CheckpointError: the state contradicts itself.
    """
    config, batch = plan.config, plan.config.batch
    valid_samples, test_samples = count_evaluation_samples(
        plan.train_iters, batch.eval_interval, batch.eval_iters, plan.batch_size.final
    )

    def build() -> Sources:
        return build_sources(
            config.data,
            seq_length=config.model.seq_length,
            seed=batch.seed,
            train_samples=plan.train_samples,
            valid_samples=valid_samples,
            test_samples=test_samples,
            batch_slice=BatchSlice(
                batch.micro_batch_size,
                mesh.coordinate.data,
                mesh.grid.data,
                plan.vocab_size,
                build_document_rules(config),
            ),
            say=say,
            wait_seconds=PATIENCE_SECONDS,
        )

    ranks = build_ranks(mesh)
    sources = open_same(build, ranks, mesh.describe(), say)
    if state.data:
        sources.load(state.data)
        position = (
            sources.train.consumed_samples if sources.train is not None else state.consumed_samples
        )
        if position != state.consumed_samples:
            raise CheckpointError(
                f"the checkpoint counts {state.consumed_samples} consumed samples and its data stand at {position}; it is damaged: "
                "go back to an earlier one"
            )
    ranks.work(sources.prepare, "building the data's indices", say)
    return sources


def build_document_rules(config: Config) -> DocumentRules | None:
    """What is asked about documents; None where they are not regarded, so that no tokenizer is needed."""
    if not needs_documents(config.data):
        return None
    return DocumentRules.from_config(config.data, build_tokenizer(config.tokenizer).eod)


def get_device_name(device: torch.device) -> str:
    """As its maker calls it."""
    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else platform.processor() or platform.machine()
    )


def describe_devices(mesh: Mesh) -> tuple[str, str]:
    """For the table at start."""
    grid = mesh.grid
    layout = str(grid) if grid.world_size > 1 else "one process"
    backend = f", {mesh.backend}" if mesh.backend else ""
    return f"{grid.world_size} x {get_device_name(mesh.device)}", f"{layout}{backend}"


def describe_index_helpers() -> tuple[str, str]:
    """For the table at start."""
    name, _, why = describe_implementation().partition(" (")
    return name, why.removesuffix(")") or "built with this installation"


def leave_with_error(error: MegatronError) -> NoReturn:
    """Print one clear message and end the process at once: ranks that wait for this one in a collective must not wait long."""
    if isinstance(error, LostRanksError):
        leave_without(error)
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
        time.sleep(
            1
        )  # srun ends all ranks when this one ends: let the others write their reports first
    # Not sys.exit: tearing down a process group whose other ranks are busy can hang.
    os._exit(2)


def report_error(error: BaseException, message: str) -> None:
    """Write the error where the launcher looks for it: torchrun in a file of each rank, the array task in a folder of all."""
    path, folder = os.environ.get("TORCHELASTIC_ERROR_FILE"), os.environ.get(FOLDER_VARIABLE)
    try:
        if path:
            record = {
                "message": message,
                "extraInfo": {"py_callstack": message, "timestamp": str(int(time.time()))},
            }
            replace_file(Path(path), json.dumps({"message": record}))
        if folder:
            write_report(Path(folder), build_report(error))
    except OSError as trouble:
        print(
            f"warning: the error could not be reported to the launcher: {trouble}",
            file=sys.stderr,
            flush=True,
        )


def leave_without(error: LostRanksError) -> NoReturn:
    """End after ranks were lost. Exit code 1: no flag is wrong, and the same command may succeed."""
    print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    # Not reported to the launcher: a report means an error that a person must correct.
    os._exit(LOST)


def leave() -> None:
    """The end of a run that went well, all ranks together."""
    if dist.is_initialized():
        dist.destroy_process_group()

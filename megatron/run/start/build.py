"""Builds the `Run` of a job: the groups of its ranks, its engine with the weights, and its data."""

import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron.base.errors import CheckpointError, ConfigError, DamagedError
from megatron.base.plain_text import format_bytes
from megatron.checkpoint.finite import describe_not_finite, refuse_not_finite
from megatron.checkpoint.folder import list_run_leftovers, mark_started
from megatron.checkpoint.lease import Lease
from megatron.checkpoint.lineage import Lineage, find_run_lineage, read_lineage
from megatron.checkpoint.load import Checkpoint
from megatron.checkpoint.save import Saver, check_writable
from megatron.checkpoint.start import agree_on_damage
from megatron.checkpoint.store import NO_STORE, Store
from megatron.config.compare import format_warnings
from megatron.config.tree import Config
from megatron.data.epochs import measure_training_data
from megatron.engine.base import Engine, skip_waiting
from megatron.engine.kind import NATIVE, BuildEngine, EngineKind
from megatron.observe.log_line import format_saved_checkpoint_line
from megatron.observe.timers import Timers
from megatron.parallel.launcher import LaunchedWorld, read_ranks_per_node
from megatron.parallel.mesh import Mesh, build_mesh
from megatron.parallel.ranks import Ranks
from megatron.parallel.rendezvous import choose_device
from megatron.parallel.roll_call import RollCall
from megatron.plan.run_plan import Plan
from megatron.run.clock import RunClock, StepClock
from megatron.run.exits import Exits
from megatron.run.loop import check_invariants
from megatron.run.parts import Exporter, Guard, Parts
from megatron.run.report import Reporter
from megatron.run.run import Run
from megatron.run.start.data_files import DataFiles
from megatron.run.start.job import Job, confirm_job, select_checkpoint_config
from megatron.run.start.launch import Launch, require_host_memory
from megatron.run.start.open_data import check_small_files, open_data
from megatron.run.start.resume import choose_run_kernels, keep_earlier_choices, record_for_resume
from megatron.run.start.start_table import get_device_name, print_start

_BYTES_OF_PARAMETER = 4
"""Size of an fp32 number."""


def build_engine(
    plan: Plan,
    mesh: Mesh,
    timers: Timers,
    before_update: Callable[[], None],
    kind: EngineKind,
) -> Engine:
    """Build an engine.

    Args:
        plan: The plan of the run.
        mesh: The ranks of the run.
        timers: They time the phases of a step.
        before_update: Called before weights or moments change.
        kind: The kind of the engine.

    Raises:
        ConfigError: A package that the engine needs is not installed. Or the memory of a host
            without GPUs is too small.
    """
    if mesh.device.type == "cpu":
        # Some launchers do not tell how many ranks a host has. There is at least this one.
        require_host_memory(plan, read_ranks_per_node(plan.world_size, unknown=1))

    def load() -> BuildEngine:
        return kind.load(mesh.device.type)

    # The import takes seconds, and minutes if many ranks read from a slow file system. `work` keeps
    # the ranks that are done from running into the time limit of a collective.
    make = mesh.ranks.work(load, "importing the engine", mesh.ranks.log)
    try:
        return make(plan, mesh, timers, before_update)
    except RuntimeError as error:
        # torch has no class of its own for this error on a CPU.
        if "can't allocate memory" not in str(error):
            raise
        size = format_bytes(plan.parameters * _BYTES_OF_PARAMETER)
        raise ConfigError(
            f"the model does not fit into the memory of this host: its {plan.parameters:,} "
            f"parameters alone need {size}; make it smaller, or divide it over more processes "
            f"(tools/plan.py shows what each needs): {error}"
        ) from error


def load_engine(
    engine: Engine, checkpoint: Checkpoint, config: Config, mesh: Mesh, store: Store, parts: Parts
) -> str | None:
    """Load a checkpoint of any layout into the engine, on all ranks together.

    Returns:
        A description of the damage, the same on all ranks, or None if the checkpoint is valid.

    Raises:
        CheckpointError: The checkpoint does not fit, or has no optimizer state although it is
            needed.
    """
    ranks = mesh.ranks
    with_optimizer = config.checkpoint.load_optim and not config.checkpoint.finetune
    if with_optimizer and checkpoint.optimizer is None:
        raise CheckpointError(
            f"{checkpoint.folder} was saved without the optimizer's state; give --no-load-optim to "
            "continue with moments of zero, or --finetune to start a new run with these weights"
        )
    shards = engine.shards(optimizer=with_optimizer)

    added = 0

    def read() -> DamagedError | None:
        nonlocal added
        try:
            with store.fetch(checkpoint, shards) as fetched:
                added = fetched.load_into(shards, config.model, finetune=config.checkpoint.finetune)
        except DamagedError as damage:
            return damage
        return None

    # Ranks must agree on the damage before any of them goes on. A rank that read its part without
    # an error would otherwise train on weights that the others do not have.
    damage = ranks.work(read, f"loading {checkpoint.folder}", ranks.log)
    damaged = agree_on_damage(checkpoint, damage, ranks, store)
    if damaged is None:
        # Checked after the digests, because a damaged file may hold any number. Weights that are
        # not finite in a valid file cannot be trained further.
        refuse_not_finite(checkpoint, describe_not_finite(shards), ranks)
        parts.change_loaded(shards, config)
        engine.finish_load(checkpoint.optimizer if with_optimizer else None)
        if added:
            ranks.log(
                f"the vocabulary has {added} tokens more than {checkpoint.folder}; their rows of "
                "the embedding and of the output matrix are the mean of its rows"
            )
    return damaged


def open_store(launch: Launch, ranks: Ranks) -> Store:
    """Open where the checkpoints are kept, and complete a rollback that was interrupted.

    All ranks call it together. No run starts from a folder that is half rolled back.

    Raises:
        MegatronError: On every rank. The store cannot be used, or the folder not be rolled back.
    """
    store = launch.parts.build_store(select_checkpoint_config(launch.config), ranks)
    store.open()
    if launch.parts.load_guard().finish_interrupted_rollback(launch.config, ranks, ranks.log):
        store.open()
    return store


def divide_ranks(
    plan: Plan,
    ranks: Ranks,
    world: LaunchedWorld,
    timers: Timers,
    roll_call: RollCall | None = None,
) -> Mesh:
    """Divide the ranks, which have joined, into the groups of the plan's grid.

    Args:
        plan: The plan of the run.
        ranks: All ranks.
        world: What the launcher set.
        timers: They time the collectives.
        roll_call: It then names the ranks by their coordinates.
    """
    parallel = plan.config.parallel
    mesh = build_mesh(
        plan.grid,
        choose_device(world.local_rank),
        sequence_parallel=parallel.sequence_parallel,
        exchange_heads=parallel.exchanges_heads,
        shard_size=plan.shard_size,
        expert_size=plan.expert_size,
        timeout_minutes=parallel.distributed_timeout_minutes,
        hang_timeout=parallel.hang_seconds,
        comm_timer=timers.time_collective,
        control=ranks.group,
        progress=ranks.progress,
    )
    if roll_call is not None:
        roll_call.use_names(mesh.names)
    return mesh


def build_timers(world: LaunchedWorld) -> Timers:
    """Return the timers of a run on this rank's device."""
    return Timers(choose_device(world.local_rank))


@contextlib.contextmanager
def hold_folder_lease(config: Config, mesh: Mesh, store: Store) -> Iterator[Lease | None]:
    """Make this run the only writer of `--save` within a `with` block.

    Rank 0 holds the lease. The other ranks get None.

    Raises:
        CheckpointError: The folder cannot be written, or another run uses it. The error is raised
            on every rank.
    """
    if config.checkpoint.save is None or config.batch.eval_only:
        yield None
        return
    root = Path(str(config.checkpoint.save_folder))

    held: list[Lease] = []

    def acquire() -> None:
        try:
            check_writable(root)
            held.append(store.acquire(root, log))
            # The marker records that no checkpoint has been saved here yet. Without it, the next
            # launch would take the files of this one for traces of a lost run.
            if not list_run_leftovers(root):
                mark_started(root)
        except OSError as error:
            place = config.checkpoint.save
            raise CheckpointError(f"--save {place} cannot be written: {error}") from error

    log = mesh.ranks.log
    try:
        mesh.ranks.call_on_rank_0(acquire, f"acquiring the lease of {root}", log)
        store.meet()
        yield held[0] if held else None
    finally:
        for lease in held:
            lease.release()


def build_exits(config: Config, ranks: Ranks) -> Exits:
    """Build the reasons to stop, and catch signals.

    Call it as soon as the ranks have met, so that all of them stop if one gets a signal.
    """
    exits = Exits(config.batch, ranks, ranks.log, saves=config.checkpoint.save is not None)
    exits.catch_signals()
    return exits


def start_run(
    launch: Launch,
    job: Job,
    mesh: Mesh,
    timers: Timers,
    lease: Lease | None,
    exits: Exits | None = None,
    store: Store = NO_STORE,
) -> Run:
    """Start the job, from scratch or from its checkpoint.

    If another run has saved meanwhile, this one starts from there. If the checkpoint turns out to
    be damaged, it starts from the one before it. The caller sets `Run.tasks`.

    Raises:
        CheckpointError: There is no checkpoint to continue from, or it does not fit.
        ConfigError: See `resolve_job`.
        LayoutError: Small files of a rank differ from rank 0's.
    """
    ranks = mesh.ranks
    log = ranks.log
    parts = launch.parts
    # After a rollback, the run keeps its time limit and its handlers of signals.
    if exits is None:
        exits = build_exits(launch.config, ranks)
    # Only the holder of the lease may rename or remove anything in the folder.
    own = lease is not None and job.plan.config.checkpoint.resumes_itself
    damage: dict[int, str] = {}
    # Each pass either returns, raises, or adds one checkpoint to `damage`. The loop ends because
    # `confirm_job` does not return a checkpoint that is listed there.
    while True:
        job = confirm_job(launch, job, ranks, damage, holds_lease=own)
        if ranks.size > 1:
            check_small_files(job.plan.config, ranks, mesh.describe())
        for line in format_warnings(job.notes):
            log(line)
        reporter = Reporter(job.plan, mesh, parts, device_name=get_device_name(mesh.device))
        exporter = parts.build_exporter(job.plan, job.state, mesh, reporter.log)
        saver = build_saver(job, mesh, reporter, lease, exporter, store)
        # The optimizer must not change tensors that the saver is still copying.
        before_update = skip_waiting
        if saver is not None:
            before_update = saver.wait_for_copy
        kind = parts.engine or NATIVE
        saved = None if job.checkpoint is None else job.checkpoint.read_config()
        plan = keep_earlier_choices(job.plan, job.state, saved, log)
        kernels = None if saved is None else saved.kernels
        plan = choose_run_kernels(plan, job.state, kernels, ranks, mesh.device, kind, log)
        engine = build_engine(plan, mesh, timers, before_update, kind)
        wrong = None
        if job.checkpoint is not None:
            wrong = load_engine(engine, job.checkpoint, job.plan.config, mesh, store, parts)
        if wrong is None:
            return build_run(
                job,
                parts,
                mesh,
                engine,
                timers=timers,
                exits=exits,
                reporter=reporter,
                saver=saver,
                exporter=exporter,
            )
        assert job.checkpoint is not None
        damage[job.checkpoint.iteration] = wrong
        # The next engine needs as much memory. Reference cycles would keep this one allocated.
        del engine
        gc.collect()


def build_run(
    job: Job,
    parts: Parts,
    mesh: Mesh,
    engine: Engine,
    *,
    timers: Timers,
    exits: Exits,
    reporter: Reporter,
    saver: Saver | None,
    exporter: Exporter,
) -> Run:
    """Open data and reports around an engine that has its weights, and print the start.

    Raises:
        DataError: The data are missing, damaged or too small, or have ids outside the vocabulary.
        TrainingError: Replicas of a parameter differ.
    """
    plan = job.plan
    state = job.state
    config = job.plan.config
    ranks = mesh.ranks
    log = ranks.log
    kind = None
    if config.data.dataset_format is not None:
        kind = parts.load_source(config.data.dataset_format)
    sources = open_data(plan, mesh, state, log, kind, parts.open_indexed)
    data_files = DataFiles(
        sources.registry,
        state,
        ranks,
        mesh.describe(),
        log,
        allow_changed_data=config.data.allow_changed_data,
    )
    # Digests of small files are known by now. A changed file must be found before the first step.
    data_files.check()
    reporter.open()
    # With --eval-only there are no training data. With --train-time the number of tokens is not
    # known yet. `report_forecast` reports it.
    uses = []
    if sources.train is not None and plan.train_seconds is None:
        uses = measure_training_data(
            config.data,
            plan.train_tokens,
            sources.registry.open,
            plan.data_phases,
            plan.train_samples,
            config.model.seq_length,
        )
    print_start(job, mesh, engine, sources, uses, reporter, saver)
    # This comes after the comparison with the checkpoint's records, which it overwrites.
    record_for_resume(state, plan)
    # An evaluation has no steps to judge.
    guard = Guard()
    if config.guard.is_on and not config.batch.eval_only:
        guard = parts.load_guard().build(plan, state, mesh, reporter.log)
    run = Run(
        plan=plan,
        mesh=mesh,
        engine=engine,
        sources=sources,
        data_files=data_files,
        state=state,
        reporter=reporter,
        timers=timers,
        exits=exits,
        clock=RunClock(plan, state, sets=(len(sources.valid), len(sources.test))),
        step_clock=StepClock(mesh.device),
        saver=saver,
        profiling=parts.build_profiling(plan, mesh, reporter.log),
        stragglers=parts.build_stragglers(plan, mesh, engine.stages, timers.blocks),
        replay=parts.build_replay(plan, mesh, engine, reporter.log),
        exporter=exporter,
        guard=guard,
        training_data=uses,
    )
    check_invariants(run)
    # The time of the construction must not be counted in the first iteration.
    timers.forget()
    return run


def build_saver(
    job: Job, mesh: Mesh, reporter: Reporter, lease: Lease | None, exporter: Exporter, store: Store
) -> Saver | None:
    """Build the saver, or return None if nothing is saved.

    It reports its checkpoints through the reporter, and passes them to the exporter.
    """
    config = job.plan.config.checkpoint
    if config.save is None or job.plan.config.batch.eval_only or config.rehearsal is not None:
        return None
    # The older checkpoint serves both.
    distances = job.plan.config.guard.rollback_distance, config.keep_for_handover
    lineage: Lineage = ()
    # A lineage continues only in the folder that it was read from. A run that loads from one folder
    # and saves to another starts a new lineage.
    if job.checkpoint is not None and config.resumes_itself:
        lineage = read_lineage(job.checkpoint.manifest)
        # Rank 0 alone writes and removes by the lineage, so it alone reads the file for that.
        if mesh.rank == 0:
            lineage = find_run_lineage(Path(str(config.save_folder)), job.checkpoint.manifest)

    def report_saved(iteration: int) -> None:
        reporter.log(format_saved_checkpoint_line(iteration, str(config.save)))
        reporter.record("save", {}, iteration)
        exporter.record_checkpoint(iteration)

    return Saver(
        Path(str(config.save_folder)),
        config,
        mesh.ranks,
        lease=lease,
        log=reporter.log,
        saved=report_saved,
        # A checkpoint that is removed during its export would make the export fail.
        in_use=exporter.list_iterations_in_use,
        lineage=lineage,
        rollback_distance=max(filter(None, distances), default=None),
        store=store,
    )

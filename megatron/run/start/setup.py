"""Builds a `Run` from the configuration, and ends the process group after training."""

import contextlib
import gc
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.base.byte_size import format_bytes
from megatron.base.errors import CheckpointError, ConfigError, DamagedError
from megatron.checkpoint.finite import describe_not_finite, refuse_not_finite
from megatron.checkpoint.folder import list_run_leftovers, mark_started
from megatron.checkpoint.lease import Lease
from megatron.checkpoint.lineage import Lineage, find_run_lineage, read_lineage
from megatron.checkpoint.load import Checkpoint
from megatron.checkpoint.save import Saver, check_writable
from megatron.checkpoint.start import agree_on_damage
from megatron.config.config_with_origin import LoadedConfig
from megatron.config.tree import Config
from megatron.config.without_effect import format_warnings
from megatron.data.build_sources import build_sources, count_evaluation_samples
from megatron.data.documents import DocumentRules
from megatron.data.epochs import (
    DatasetUse,
    describe_epochs,
    measure_training_data,
    warn_of_many_epochs,
)
from megatron.data.index_helpers import describe_implementation
from megatron.data.source import BatchSlice, Sources
from megatron.data.source_kind import SourceKind, SourceRequest
from megatron.data.tokenizer_record import check_tokenizers_of_data
from megatron.engine.base import Engine, skip_waiting
from megatron.engine.kind import BuildEngine, EngineKind
from megatron.engine.native_kind import NATIVE
from megatron.observe.log_line import (
    format_first_start_line,
    format_from_scratch_line,
    format_loaded_checkpoint_line,
    format_no_checkpoint_line,
    format_saved_checkpoint_line,
)
from megatron.observe.startup import format_start_table
from megatron.observe.timers import Timers
from megatron.parallel.launcher import LaunchedWorld, read_ranks_per_node
from megatron.parallel.mesh import Mesh, build_mesh
from megatron.parallel.rank_progress import LONG_FACTOR
from megatron.parallel.ranks import PATIENCE_SECONDS, Ranks, build_ranks
from megatron.parallel.rendezvous import choose_device
from megatron.plan.run_plan import Plan
from megatron.run.clock import RunClock
from megatron.run.closing import close_within_limit
from megatron.run.exits import Exits, ignore_stop_signals
from megatron.run.host_memory import require_host_memory
from megatron.run.loop import check_invariants
from megatron.run.parts import Exporter, Guard, Profiling, RankComparison
from megatron.run.report import Reporter
from megatron.run.run import Run
from megatron.run.start.attention_order import choose_attention_order
from megatron.run.start.data_files import DataFiles, check_small_files, open_same
from megatron.run.start.job import Job, confirm_job
from megatron.run.start.join import make_printer
from megatron.run.start.resume import record_for_resume
from megatron.run.state import TrainState
from megatron.run.step_clock import StepClock
from megatron.schedule.clock import format_duration
from megatron.tokenizer import build_tokenizer

_BYTES_OF_PARAMETER = 4
"""Size of an fp32 number."""


def divide_ranks(plan: Plan, ranks: Ranks, world: LaunchedWorld, timers: Timers) -> Mesh:
    """Divide the ranks, which have joined, into the groups of the plan's grid.

    Args:
        plan: The plan of the run.
        ranks: All ranks.
        world: What the launcher set.
        timers: They time the collectives.
    """
    parallel = plan.config.parallel
    return build_mesh(
        plan.grid,
        choose_device(world.local_rank),
        sequence_parallel=parallel.sequence_parallel,
        exchange_heads=parallel.exchanges_heads,
        shard_size=plan.shard_size,
        timeout_minutes=parallel.distributed_timeout_minutes,
        hang_timeout=parallel.hang_timeout,
        comm_timer=timers.time_collective,
        control=ranks.group,
        progress=ranks.progress,
    )


def build_timers(world: LaunchedWorld) -> Timers:
    """Return the timers of a run on this rank's device."""
    return Timers(choose_device(world.local_rank))


@contextlib.contextmanager
def hold_folder_lease(config: Config, mesh: Mesh) -> Iterator[Lease | None]:
    """Make this run the only writer of the folder `--save` within a `with` block.

    Rank 0 holds the lease. The other ranks get None.

    Raises:
        CheckpointError: The folder cannot be written, or another run uses it. The error is raised
            on every rank.
    """
    if config.checkpoint.save is None or config.batch.eval_only:
        yield None
        return
    root = Path(config.checkpoint.save)

    held: list[Lease] = []

    def acquire() -> None:
        try:
            check_writable(root)
            held.append(Lease.acquire(root, log))
            # The marker records that no checkpoint has been saved here yet. Without it, the next
            # launch would take the files of this one for traces of a lost run.
            if not list_run_leftovers(root):
                mark_started(root)
        except OSError as error:
            raise CheckpointError(f"--save {root} cannot be written: {error}") from error

    log = make_printer(mesh.rank)
    try:
        build_ranks(mesh).call_on_rank_0(acquire, f"acquiring the lease of {root}", log)
        yield held[0] if held else None
    finally:
        for lease in held:
            lease.release()


def build_exits(config: Config, mesh: Mesh) -> Exits:
    """Build the reasons to stop, and catch signals.

    Call it before `start_run`, so that a signal during the construction of the run is not lost.
    """
    exits = Exits(
        config.batch, mesh, make_printer(mesh.rank), saves=config.checkpoint.save is not None
    )
    # An evaluation has nothing to save, so a signal ends it immediately.
    if not config.batch.eval_only:
        exits.catch_signals()
    return exits


def start_run(
    loaded: LoadedConfig,
    job: Job,
    mesh: Mesh,
    timers: Timers,
    lease: Lease | None,
    exits: Exits | None = None,
) -> Run:
    """Start the job, from scratch or from its checkpoint.

    If another run has saved meanwhile, this one starts from there. If the checkpoint turns out to
    be damaged, it starts from the one before it. The caller sets `Run.tasks`.

    Raises:
        CheckpointError: There is no checkpoint to continue from, or it does not fit.
        ConfigError: See `resolve_job`.
        LayoutError: Small files of a rank differ from rank 0's.
    """
    config = loaded.config
    ranks = build_ranks(mesh)
    log = make_printer(mesh.rank)
    # After a rollback, the run keeps its time limit and its handlers of signals.
    if exits is None:
        exits = build_exits(config, mesh)
    # Only the holder of the lease may rename or remove anything in the folder.
    own = lease is not None and config.checkpoint.resumes_itself
    damage: dict[int, str] = {}
    # Each pass either returns, raises, or adds one checkpoint to `damage`. The loop ends because
    # `confirm_job` does not return a checkpoint that is listed there.
    while True:
        job = confirm_job(loaded, job, ranks, damage, holds_lease=own, log=log)
        check_small_files(job.plan.config, ranks, mesh.describe())
        for line in format_warnings(job.notes):
            log(line)
        reporter = Reporter(job.plan, mesh, job.parts, device_name=get_device_name(mesh.device))
        exporter = build_exporter(job, mesh, reporter)
        saver = build_saver(job, mesh, reporter, lease, exporter)
        # The optimizer must not change tensors that the saver is still copying.
        before_update = skip_waiting
        if saver is not None:
            before_update = saver.wait_for_copy
        kind = job.parts.engine or NATIVE
        plan = choose_attention_order(job.plan, job.state, ranks, mesh.device, log)
        engine = build_engine(plan, mesh, timers, before_update, kind)
        if job.checkpoint is None:
            wrong = None
        else:
            wrong = load_engine(engine, job.checkpoint, job.plan.config, ranks, log)
        if wrong is None:
            return build_run(job, mesh, engine, reporter, saver, exporter, exits, timers)
        assert job.checkpoint is not None
        damage[job.checkpoint.iteration] = wrong
        # The next engine needs as much memory. Reference cycles would keep this one allocated.
        del engine
        gc.collect()


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
    make = build_ranks(mesh).work(load, "importing the engine", make_printer(mesh.rank))
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
    engine: Engine, checkpoint: Checkpoint, config: Config, ranks: Ranks, log: Callable[[str], None]
) -> str | None:
    """Load a checkpoint of any layout into the engine, on all ranks together.

    Returns:
        A description of the damage, the same on all ranks, or None if the checkpoint is valid.

    Raises:
        CheckpointError: The checkpoint does not fit, or has no optimizer state although it is
            needed.
    """
    with_optimizer = config.checkpoint.load_optim and not config.checkpoint.finetune
    if with_optimizer and checkpoint.optimizer is None:
        raise CheckpointError(
            f"{checkpoint.folder} was saved without the optimizer's state; give --no-load-optim to "
            "continue with moments of zero, or --finetune to start a new run with these weights"
        )
    shards = engine.shards(optimizer=with_optimizer)

    def read() -> DamagedError | None:
        try:
            checkpoint.load_into(shards, config.model, finetune=config.checkpoint.finetune)
        except DamagedError as damage:
            return damage
        return None

    # Ranks must agree on the damage before any of them goes on. A rank that read its part without
    # an error would otherwise train on weights that the others do not have.
    damage = ranks.work(read, f"loading {checkpoint.folder}", log)
    damaged = agree_on_damage(checkpoint, damage, ranks)
    if damaged is None:
        # Checked after the digests, because a damaged file may hold any number. Weights that are
        # not finite in a valid file cannot be trained further.
        refuse_not_finite(checkpoint, describe_not_finite(shards), ranks)
        engine.finish_load(checkpoint.optimizer if with_optimizer else None)
    return damaged


def describe_hang_limits(hang_timeout: float | None) -> list[tuple[str, str, str]]:
    """Return the row of the start table for --hang-timeout, if it is given."""
    # Without a limit there is nothing to explain.
    if hang_timeout is None:
        return []
    return [
        (
            "hang limit",
            f"{format_duration(hang_timeout)} for a step",
            f"{format_duration(LONG_FACTOR * hang_timeout)} for a save, a load, and the first step "
            "or evaluation",
        )
    ]


def build_run(
    job: Job,
    mesh: Mesh,
    engine: Engine,
    reporter: Reporter,
    saver: Saver | None,
    exporter: Exporter | None,
    exits: Exits,
    timers: Timers,
) -> Run:
    """Open data and reports around an engine that has its weights.

    This also prints the table at the start, which lists the device, kernels and checkpoints.

    Raises:
        DataError: The data are missing, damaged or too small, or have ids outside the vocabulary.
        TrainingError: Replicas of a parameter differ.
    """
    plan = job.plan
    state = job.state
    config = job.plan.config
    ranks = build_ranks(mesh)
    log = make_printer(mesh.rank)
    kind = None
    if config.data.dataset_format is not None and job.parts.load_source is not None:
        kind = job.parts.load_source(config.data.dataset_format)
    sources = open_data(plan, mesh, state, log, kind)
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
        )
    rows = [
        ("device", *describe_devices(mesh)),
        ("model", f"{plan.parameters:,} parameters", "with the padded vocabulary"),
        *describe_data(uses),
        *describe_source(sources),
        *describe_phases(plan),
        *describe_loss(plan),
        *engine.describe_choices(),
        *describe_hang_limits(config.parallel.hang_timeout),
        ("index helpers", *describe_index_helpers()),
        *reporter.describe_conventions(),
    ]
    if saver is not None:
        rows.append(
            ("checkpoints", *saver.describe(engine.shards(optimizer=config.checkpoint.save_optim)))
        )
    reporter.log(format_start_table(rows))
    if job.checkpoint is not None:
        reporter.log(
            format_loaded_checkpoint_line(str(config.checkpoint.load), job.checkpoint.iteration)
        )
    elif config.checkpoint.load is not None:
        reporter.log(format_first_start_line())
        reporter.log(format_no_checkpoint_line(config.checkpoint.load))
        reporter.log(format_from_scratch_line())
    for note in sources.take_notes():
        reporter.log(note)
    for warning in (*warn_of_many_epochs(uses), *warn_of_slow_precision(config, mesh)):
        reporter.log(f"warning: {warning}")
    # This comes after the comparison with the checkpoint's records, which it overwrites.
    record_for_resume(state, plan)
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
        profiling=build_profiling(job, mesh, reporter),
        stragglers=build_stragglers(job, mesh, engine, timers),
        exporter=exporter,
        guard=build_guard(job, mesh, reporter),
    )
    check_invariants(run)
    # The time of the construction must not be counted in the first iteration.
    timers.forget()
    return run


def build_exporter(job: Job, mesh: Mesh, reporter: Reporter) -> Exporter | None:
    """Build the exporter of --hf-export-interval on rank 0, or return None."""
    config = job.plan.config
    build = job.parts.build_exporter
    # An evaluation saves no checkpoint that could be exported.
    is_asked = config.checkpoint.hf_export_interval is not None and not config.batch.eval_only
    if mesh.rank != 0 or build is None or not is_asked:
        return None
    return build(config.checkpoint, reporter.log, job.state.iteration)


def build_guard(job: Job, mesh: Mesh, reporter: Reporter) -> Guard | None:
    """Build the guard of --spike-guard, or return None without one."""
    if job.parts.load_guard is None:
        return None
    return job.parts.load_guard().build(job.plan, job.state, mesh, reporter.log)


def build_profiling(job: Job, mesh: Mesh, reporter: Reporter) -> Profiling | None:
    """Build what writes profiler traces and memory snapshots, or return None without them."""
    config = job.plan.config
    build = job.parts.build_profiling
    is_asked = config.logging.memory_snapshot or config.logging.profile_iterations is not None
    if build is None or not is_asked:
        return None
    return build(config, mesh.rank, reporter.log)


def build_stragglers(job: Job, mesh: Mesh, engine: Engine, timers: Timers) -> RankComparison | None:
    """Build the comparison of how fast ranks compute, or return None without one.

    A single rank has no other to compare with.
    """
    parallel = job.plan.config.parallel
    build = job.parts.build_stragglers
    if build is None or mesh.grid.world_size == 1 or not parallel.straggler_interval:
        return None
    return build(
        engine.stages, timers.blocks, parallel.straggler_interval, parallel.straggler_factor
    )


def build_saver(
    job: Job, mesh: Mesh, reporter: Reporter, lease: Lease | None, exporter: Exporter | None
) -> Saver | None:
    """Build the saver, or return None if nothing is saved.

    It reports its checkpoints through the reporter, and passes them to the exporter.
    """
    config = job.plan.config.checkpoint
    if config.save is None or job.plan.config.batch.eval_only:
        return None
    lineage: Lineage = ()
    # A lineage continues only in the folder that it was read from. A run that loads from one folder
    # and saves to another starts a new lineage.
    if job.checkpoint is not None and config.resumes_itself:
        lineage = read_lineage(job.checkpoint.manifest)
        # Rank 0 alone writes and removes by the lineage, so it alone reads the file for that.
        if mesh.rank == 0:
            lineage = find_run_lineage(Path(str(config.save)), job.checkpoint.manifest)

    def report_saved(iteration: int) -> None:
        reporter.log(format_saved_checkpoint_line(iteration, str(config.save)))
        reporter.report_save(iteration)
        if exporter is not None:
            exporter.record_checkpoint(iteration)

    return Saver(
        Path(str(config.save)),
        config,
        build_ranks(mesh),
        lease=lease,
        log=reporter.log,
        saved=report_saved,
        # A checkpoint that is removed during its export would make the export fail.
        in_use=tuple if exporter is None else exporter.list_iterations_in_use,
        lineage=lineage,
        rollback_distance=job.plan.config.guard.rollback_distance,
    )


def open_data(
    plan: Plan,
    mesh: Mesh,
    state: TrainState,
    log: Callable[[str], None] = lambda line: None,
    other: SourceKind | None = None,
) -> Sources:
    """Open the data at the state's position, and build the indices.

    This also checks that all ranks read the same data.

    Args:
        plan: The resolved plan.
        mesh: The ranks of the run.
        state: The counters and the position in the data.
        log: Prints lines that must appear while an index is still being built.
        other: The kind of data of --dataset-format.

    Raises:
        ConfigError: Data were made with another tokenizer.
        DataError: See `build_run`.
        LayoutError: Ranks read different data.
        CheckpointError: The state contradicts itself.
    """
    config = plan.config
    batch = plan.config.batch
    # --eval-only reads no training data, and the first samples of the other sets.
    train_samples: int | None = 0 if batch.eval_only else plan.train_samples
    valid_samples: int | None
    valid_samples, test_samples = count_evaluation_samples(
        0 if batch.eval_only else plan.train_iters,
        batch.eval_interval,
        batch.eval_iters,
        plan.batch_size.final,
    )
    # The order of a run by time must not depend on its speed.
    if plan.train_seconds is not None and not batch.eval_only:
        train_samples = None
        valid_samples = None if valid_samples else 0

    ranks = build_ranks(mesh)

    def ask() -> SourceRequest:
        """Return what this rank asks for. It may fail, because it may build the tokenizer."""
        return SourceRequest(
            data=config.data,
            seq_length=config.model.seq_length,
            seed=batch.seed,
            train_samples=train_samples,
            valid_samples=valid_samples,
            test_samples=test_samples,
            batch_slice=BatchSlice(
                batch.micro_batch_size,
                mesh.coordinate.data,
                mesh.grid.data,
                plan.vocab_size,
                build_document_rules(config),
            ),
            phases=plan.data_phases,
            ranks=ranks,
            build_tokenizer=lambda: build_tokenizer(config.tokenizer),
        )

    def build() -> Sources:
        """Build the sources of this rank's slice of the batch, without communication."""
        return build_sources(ask(), other, log=log, wait_seconds=PATIENCE_SECONDS)

    if other is not None and not config.data.mock_data:
        # The other ranks then find the row groups in the cache, and do not open all files as well.
        ranks.call_on_rank_0(lambda: other.list_files(ask(), log), "listing the data files", log)
    sources = open_same(build, ranks, mesh.describe(), log)
    prefixes = list(sources.registry.datasets)
    ranks.call_on_rank_0(
        lambda: check_tokenizers_of_data(config.tokenizer, prefixes),
        "comparing the tokenizer with that of the data",
        log,
    )
    # --eval-only always starts at the first sample. From a checkpoint's position, it would
    # evaluate other samples for each checkpoint, and the losses could not be compared.
    if state.data and not batch.eval_only:
        sources.load(state.data)
        # The position is stored twice, in the counters and in the source's state. Going on with two
        # different values would silently repeat or drop samples.
        if sources.train is not None:
            position = sources.train.consumed_samples
        else:
            position = state.consumed_samples
        if position != state.consumed_samples:
            raise CheckpointError(
                f"the checkpoint counts {state.consumed_samples} consumed samples, but its data "
                f"position is {position}. This checkpoint is damaged. Resume from an earlier one"
            )
    elif state.consumed_samples and sources.train is not None and not batch.eval_only:
        # An imported checkpoint has counters, and no record of its order. The run goes on at the
        # same position in the order of this data.
        sources.train.advance(state.consumed_samples)
    # Indices are built after the comparison, because building them takes long and is wasted if the
    # files are wrong.
    ranks.work(sources.prepare, "building the data's indices", log)
    return sources


def build_document_rules(config: Config) -> DocumentRules | None:
    """Return the rules for documents, or None if document boundaries are ignored.

    Without the rules no tokenizer is needed, so none is built.
    """
    if not config.data.needs_documents:
        return None
    if config.data.dataset_format is not None:
        # The bounds come from the files, so no token marks them.
        return DocumentRules.from_config(config.data, eod=-1)
    return DocumentRules.from_config(config.data, build_tokenizer(config.tokenizer).eod)


def get_device_name(device: torch.device) -> str:
    """Return the product name of a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


def describe_devices(mesh: Mesh) -> tuple[str, str]:
    """Return the second and third cell of the row "device" in the table at the start."""
    grid = mesh.grid
    if grid.world_size > 1:
        layout = str(grid)
    else:
        layout = "one process"
    if mesh.backend:
        backend = f", {mesh.backend}"
    else:
        backend = ""
    return f"{grid.world_size} x {get_device_name(mesh.device)}", f"{layout}{backend}"


def warn_of_slow_precision(config: Config, mesh: Mesh) -> list[str]:
    """Return a warning if a CPU computes in 16 bits. Most CPUs are faster in fp32."""
    precision = config.precision
    if mesh.device.type != "cpu" or not (precision.bf16 or precision.fp16):
        return []
    name = "bf16" if precision.bf16 else "fp16"
    return [
        f"no GPU was found, and --{name} computes on the CPU: most CPUs are faster with "
        f"--no-{name}, in fp32"
    ]


def describe_data(uses: Sequence[DatasetUse]) -> list[tuple[str, str, str]]:
    """Return the row "training data" of the table at the start, or no row without such data."""
    if not uses:
        return []
    epochs, _, tokens = describe_epochs(uses).partition(": ")
    return [("training data", epochs, tokens)]


def describe_source(sources: Sources) -> list[tuple[str, str, str]]:
    """Return the row "training data" for data that describe themselves, or no row."""
    described = None if sources.train is None else sources.train.describe()
    if described is None:
        return []
    return [("training data", *described)]


def describe_phases(plan: Plan) -> list[tuple[str, str, str]]:
    """Return the row "data phases" of the table at the start, or no row without phases."""
    if not plan.data_phases:
        return []
    number = sum(planned.started for planned in plan.data_phases)
    begin = ", ".join(str(planned.first_iteration) for planned in plan.data_phases)
    return [
        ("data phases", f"phase {number} of {len(plan.data_phases)}", f"first iterations {begin}")
    ]


def describe_loss(plan: Plan) -> list[tuple[str, str, str]]:
    """Return the row "loss" of the table at the start, or no row if no token can be masked."""
    described = plan.describe_loss_mean()
    if described is None:
        return []
    mean, why = described
    return [("loss", f"mean {mean}", why)]


def describe_index_helpers() -> tuple[str, str]:
    """Return the second and third cell of the row "index helpers" in the table at the start."""
    # The description has the form "name (reason)".
    name, _, why = describe_implementation().partition(" (")
    return name, why.removesuffix(")") or "built with this installation"


def leave(closing: contextlib.ExitStack) -> None:
    """End a run that succeeded, on all ranks together."""
    closed = close_within_limit(closing)
    if dist.is_initialized():
        dist.destroy_process_group()
    if not closed:
        # At its normal exit, Python would wait for the threads that hang.
        sys.stdout.flush()
        os._exit(0)
    ignore_stop_signals()

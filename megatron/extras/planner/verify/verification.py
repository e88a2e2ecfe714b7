"""The verification of a run: a reduced copy on several processes against one process.

1. Reduce the plan (`reduction`), and write its data (`synthetic`).
2. Train the same steps in one process (`reference`) in fp32, on the samples that a run of one
process reads.
3. Train the copy: two steps and a save, then a resume and two more steps. In the third step, the
first block gets infinite gradients, and no rank may change its weights.
4. Compare, and find the first activation that differs (`comparison`).
5. In the run's own precision, compare the copy with two runs of one process that differ in
their micro-batch sizes.

Training runs on new processes. They are forked, so that they import nothing again. The caller has
imported torch and the training already. It must not have started threads, because a fork copies
only the thread that calls it.
"""

import math
import multiprocessing
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch

from megatron.base.errors import MegatronError
from megatron.config.tree import Config
from megatron.config.yaml_file import dump_yaml
from megatron.extras.planner.verify.comparison import (
    BOUND,
    COMPARISON,
    ComparedRow,
    ComparedValue,
    TracedRank,
    compare_operands,
    compare_records,
    count_flips,
    find_first_difference,
    find_first_failure,
    summarise,
)
from megatron.extras.planner.verify.recording import (
    RankRecord,
    ShardCopy,
    Train,
    load_records,
    run_recorded,
)
from megatron.extras.planner.verify.reduction import (
    COMPARED,
    MOST_PROCESSES,
    SAVED,
    Reduction,
    find_common_size,
    reduce_plan,
    replace_values,
    use_full_samples,
    use_one_process,
    use_own_precision,
)
from megatron.extras.planner.verify.reference import ReferenceRun, run_reference
from megatron.extras.planner.verify.reference_layers import list_microbatches
from megatron.extras.planner.verify.reference_optimizer import get_decays
from megatron.extras.planner.verify.synthetic import write_data
from megatron.extras.step.float8.recipe import GRADIENTS
from megatron.plan.resolve import resolve
from megatron.plan.run_plan import Plan

LIMIT_SECONDS = 120.0
"""Longest time of a launch whose processes have a core each. A rank that waits for a message that
never comes would not end. A launch takes some seconds."""


class LaunchError(Exception):
    """A rank has failed. The text has the rank and its error."""


class LaunchTimeoutError(LaunchError):
    """Ranks have not ended in time. They may be slow, or wait for each other."""


def choose_limit(world_size: int) -> float:
    """Return the seconds that a launch may take on this machine, with its cores and its load."""
    busy = world_size + os.getloadavg()[0]
    return LIMIT_SECONDS * max(1.0, busy / len(os.sched_getaffinity(0)))


@dataclass(frozen=True)
class Launcher:
    """Starts training runs in a folder."""

    train: Train
    folder: Path
    limit: float | None = None
    """Seconds of a launch. None: what `choose_limit` returns."""

    def __post_init__(self) -> None:
        """Create the folder."""
        self.folder.mkdir()

    def launch(
        self, config: Config, world_size: int, name: str, last: int, run: str
    ) -> tuple[Sequence[RankRecord], LaunchError | None]:
        """Train a configuration up to an iteration.

        Args:
            config: The configuration.
            world_size: Number of processes.
            name: Name of the launch, for its files.
            last: The run saves and ends at multiples of this iteration.
            run: Name of the folder that it saves to, and loads from.

        Returns:
            The records of all ranks, and the first error. After an error, steps are missing.
        """
        path = self.folder / name
        save = str(self.folder / run)
        # A launch resumes if its folder has a checkpoint.
        values = {"checkpoint.save": save, "checkpoint.load": save, "batch.exit_interval": last}
        path.with_suffix(".yaml").write_text(dump_yaml(replace_values(config, values)))
        argv = ["--config", str(path.with_suffix(".yaml"))]
        error = None
        try:
            self.run_world(world_size, name, partial(run_recorded, self.train, argv, path))
        except LaunchError as failure:
            error = failure
        return load_records(path, world_size), error

    def run_world(self, world_size: int, name: str, work: Callable[[int], None]) -> None:
        """Start new processes, and call a function with the rank in each.

        What the ranks print is in the folder NAME.output.

        Raises:
            LaunchError: A rank has failed.
            LaunchTimeoutError: A rank has not ended in time.
        """
        limit = self.limit or choose_limit(world_size)
        output = self.folder / f"{name}.output"
        # The log of a rank helps to explain its error.
        output.mkdir()
        context = multiprocessing.get_context("fork")
        port = _find_free_port()
        running = {}
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            arguments = (rank, world_size, port, work, output, sender)
            process = context.Process(target=_run_rank, args=arguments)
            process.start()
            # The end of the rank then closes the pipe, and `recv` does not wait.
            sender.close()
            running[receiver] = rank, process
        processes = [process for _, process in running.values()]
        end = time.monotonic() + limit
        try:
            while running:
                ready = wait(list(running), timeout=max(0.0, end - time.monotonic()))
                # A rank that hangs is reported as an error.
                if not ready:
                    ranks = sorted(rank for rank, _ in running.values())
                    raise LaunchTimeoutError(
                        f"{name}: ranks {ranks} still run after {limit:g} s. The machine may be "
                        f"slow, or they wait for each other. --time-limit {4 * limit:g} allows "
                        "more time"
                    )
                for pipe in ready:
                    assert isinstance(pipe, Connection), "only pipes are waited for"
                    rank, _ = running.pop(pipe)
                    try:
                        error: str | None = pipe.recv()
                    except EOFError:
                        error = "the process ended without a result"
                    if error is not None:
                        raise LaunchError(f"{name}, rank {rank}: {error}")
        finally:
            for process in processes:
                # The other ranks wait for the one that has failed.
                if running:
                    process.kill()
                process.join()


def _run_rank(
    rank: int,
    world_size: int,
    port: int,
    work: Callable[[int], None],
    folder: Path,
    result: Connection,
) -> None:
    """Run one rank, send its error or None, and end the process."""
    values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in values.items()})
    os.environ.update(LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1")
    output = os.open(folder / f"rank-{rank}.txt", os.O_WRONLY | os.O_CREAT)
    # Otherwise, all ranks would write to the same terminal.
    os.dup2(output, 1)
    os.dup2(output, 2)
    error = None
    try:
        work(rank)
    except MegatronError as failure:
        error = str(failure)
    except Exception as failure:
        traceback.print_exc()
        error = f"{type(failure).__name__}: {failure}"
    # Before the exit, because `os._exit` writes no buffers.
    result.send(error)
    # Threads of process groups could keep a normal exit from ending. The result has been sent.
    os._exit(0)


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


_SMALL = 1e-3
"""A difference below this must appear with a second seed too. The derivatives of xIELU and of ReLU
jump at 0. If an input is as near to 0 as a rounding error, its gradient differs between layouts."""
_FACTOR = 8.0
"""The bound in the run's own precision is this many times the difference of the two runs. A copy
also divides the sums inside of matrix products. Another micro-batch size does not."""
_GRADIENTS = "gradients in the run's precision"


@dataclass
class VerifiedRun:
    """The result of a verification."""

    reduction: Reduction
    data: str
    """Where the copy's data come from."""
    rows: list[ComparedRow] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    """Errors of ranks that ended a launch."""
    first_difference: str | None = None
    note: str | None = None
    """A small difference that another seed did not show."""
    flips: tuple[int, int] | None = None
    """See `count_flips`. None without float8."""
    seconds: float = 0.0
    out_of_time: bool = False
    """Whether a launch has not ended in time."""

    def add_error(self, error: LaunchError) -> None:
        """Add the error that ended a launch."""
        self.errors.append(str(error))
        self.out_of_time |= isinstance(error, LaunchTimeoutError)

    @property
    def failed(self) -> str | None:
        """The comparison that fails first, or None if the copy equals the reference."""
        first = find_first_failure(self.rows)
        if first is not None:
            return first.comparison
        if self.out_of_time:
            return "a launch had too little time (--time-limit)"
        if self.errors:
            return "a launch ended with an error"
        return next((row.comparison for row in self.rows if not row.passed), None)


def verify(
    plan: Plan,
    train: Train,
    log: Callable[[str], None] = lambda line: None,
    limit: float | None = None,
    most_processes: int = MOST_PROCESSES,
) -> VerifiedRun:
    """Verify a plan without errors.

    Args:
        plan: The plan of the run.
        train: Runs a training command line on a rank.
        log: Prints what is done next.
        limit: Seconds of a launch. None: see `choose_limit`.
        most_processes: The largest number of processes of the copy.

    Raises:
        ConfigError: See `reduce_plan`.
    """
    began = time.monotonic()
    prepare = partial(Launcher, train, limit=limit)
    with tempfile.TemporaryDirectory(prefix="verify-") as name:
        folder = Path(name)
        reduction = reduce_plan(plan, folder, most_processes)
        copy = reduction.plan
        found = VerifiedRun(reduction, write_data(folder, plan.config.data))
        try:
            log(f"a copy on {copy.world_size} processes against one process, in fp32")
            _verify_in_fp32(copy, prepare(folder / "first"), found)
            first = find_first_failure(found.rows)
            if first is not None and first.error < _SMALL:
                log("a small difference, so the comparison is repeated")
                found = _repeat(copy, prepare, folder, found, first)
            own = use_own_precision(reduction, plan.config)
            if own is not None and found.failed is None:
                log("the copy in the run's own precision against two runs of one process")
                launcher = prepare(folder / "own")
                rows, found.flips = _compare_in_own_precision(copy, own, launcher)
                found.rows += rows
        except LaunchError as error:
            found.add_error(error)
    found.seconds = time.monotonic() - began
    return found


def _repeat(
    copy: Plan,
    prepare: Callable[[Path], Launcher],
    folder: Path,
    found: VerifiedRun,
    first: ComparedValue,
) -> VerifiedRun:
    """Verify again after a small difference, with the same seed and with another one.

    Returns:
        The first result, if the difference appears with both seeds. The result with the other seed,
        if it appears only with the first one. A failure, if it does not appear again.

    Raises:
        LaunchError: The reference has failed.
    """
    same = VerifiedRun(found.reduction, found.data)
    _verify_in_fp32(copy, prepare(folder / "again"), same)
    if same.failed is None:
        # Such an error may be a race, for example memory that is read before it is written.
        same.errors.append(f"a repetition with the same seed did not show this: {first}")
        return same
    other = VerifiedRun(found.reduction, found.data, note=f"only with the run's seed: {first}")
    seed = {"batch.seed": copy.config.batch.seed + 1}
    again = resolve(replace_values(copy.config, seed), copy.world_size)
    _verify_in_fp32(again, prepare(folder / "other seed"), other)
    return found if other.failed is not None else other


def _verify_in_fp32(copy: Plan, launcher: Launcher, found: VerifiedRun) -> None:
    """Fill the rows of a verification, and find the first difference.

    Raises:
        LaunchError: The reference has failed.
    """
    reference = _run_reference(copy, launcher)
    # The first launch ends with a save, and the second one resumes from it.
    launches, error = _launch_twice(copy.config, copy.world_size, "copy", launcher)
    if error is not None:
        found.add_error(error)
    # After an error, the steps before it are compared.
    found.rows = compare_records(copy, reference, launches)
    first = find_first_failure(found.rows)
    if first is not None:
        ranks = launches[first.iteration > SAVED]
        found.first_difference = _find_first_difference(copy, reference, ranks, first.iteration)


def _launch_twice(
    config: Config, world_size: int, name: str, launcher: Launcher
) -> tuple[list[Sequence[RankRecord]], LaunchError | None]:
    """Train up to the save, then resume, and return the records of both launches.

    After an error, which is returned too, records are missing.
    """
    launches = []
    for number, last in ((1, SAVED), (2, COMPARED)):
        title = f"launch {number} of the {name}"
        ranks, error = launcher.launch(config, world_size, title, last, name)
        launches.append(ranks)
        expected = list(range(SAVED * number - 1, last + 1))
        if error is None and any([s.iteration for s in r.steps] != expected for r in ranks):
            # Steps that are not recorded are not compared.
            error = LaunchError(
                f"{title} has not trained iterations {expected[0]} to {last} on all ranks"
            )
        if error is not None:
            return launches, error
    return launches, None


def _run_reference(copy: Plan, launcher: Launcher) -> ReferenceRun:
    """Return the reference, on the samples that one process reads.

    Raises:
        LaunchError: One of the two processes has failed.
    """
    config = use_full_samples(copy)
    name = "the process that reads the samples"
    ranks, error = launcher.launch(config, 1, name, COMPARED, "samples")
    if error is not None:
        raise error
    read = [m for step in ranks[0].steps for m in step.microbatches]
    samples = torch.cat([torch.cat((m.tokens, m.labels[:, -1:]), dim=1) for m in read])
    path = launcher.folder / "reference.pt"

    def work(rank: int) -> None:
        torch.save(run_reference(copy, samples), path)

    launcher.run_world(1, "the reference", work)
    reference: ReferenceRun = torch.load(path, weights_only=False)
    return reference


def _find_first_difference(
    copy: Plan, reference: ReferenceRun, ranks: Sequence[RankRecord], iteration: int
) -> str:
    """Return a text about the first activation that differs in an iteration."""
    step = reference.steps[iteration - 1]
    places = list(list_microbatches(copy, len(step.inputs.tokens)))
    traced = [
        TracedRank(
            f"rank {rank} ({record.coordinate})",
            recorded.trace,
            {number: samples for number, data, samples in places if data == record.coordinate.data},
            record.coordinate,
            copy.grid,
        )
        for rank, record in enumerate(ranks)
        for recorded in record.steps
        if recorded.iteration == iteration
    ]
    return find_first_difference(step.trace, traced, copy.weight_ranks, 3 * BOUND)


def _compare_in_own_precision(
    plan: Plan, config: Config, launcher: Launcher
) -> tuple[list[ComparedRow], tuple[int, int] | None]:
    """Train the copy and two runs of one process, and compare them.

    With float8, a third one has the copy's micro-batch size, because a tensor of a microbatch has
    one scale. Roundings that differ from its roundings are counted.

    Args:
        plan: The plan of the copy in fp32.
        config: The configuration of the copy in the run's own precision.
        launcher: Starts the runs.

    Raises:
        LaunchError: A rank has failed.
    """
    launches, error = _launch_twice(
        config, plan.world_size, "copy in the run's precision", launcher
    )
    if error is not None:
        raise error
    copy = [
        RankRecord(first.coordinate, first.steps + second.steps)
        for first, second in zip(*launches, strict=True)
    ]
    # All runs start from the same weights and read the same samples.
    float8 = config.precision.fp8_format is not None
    sizes = [1, find_common_size(plan)] + [config.batch.micro_batch_size] * float8
    records: dict[int, RankRecord] = {}
    for micro in dict.fromkeys(sizes):
        settings = use_one_process(config, micro)
        name = f"one process, micro-batches of {micro}"
        ranks, error = launcher.launch(settings, 1, name, COMPARED, f"run of {name}")
        if error is not None:
            raise error
        records[micro] = ranks[0]
    # The caller has checked that the run is in one of the two.
    dtype = torch.float16 if config.precision.fp16 else torch.bfloat16
    # The rounding error of one number. Two runs may agree better than that by chance.
    rounding = torch.finfo(dtype).eps / 2
    rows = []
    # Two micro-batch sizes of one process may round the same sums, and other layouts do not.
    floors = {_GRADIENTS: _FACTOR * rounding}
    flips = None
    if config.precision.fp8_format is not None:
        # Later steps also have other weights.
        step = config.precision.fp8_start_iteration - 1
        flips = count_flips(copy, records[config.batch.micro_batch_size], step)
        gradients = getattr(torch, GRADIENTS[config.precision.fp8_format])
        weights = torch.float32
        if config.precision.fp16 or config.precision.bf16:
            weights = dtype
        rows = summarise(list(compare_operands(copy, weights, gradients)), [COMPARISON])
        # An error of a sum in bf16 may change any number by one step of the format.
        floors[_GRADIENTS] = max(floors[_GRADIENTS], torch.finfo(gradients).eps)
    for comparison, difference, measured in _compare_precisions(
        config, copy, *(records[size] for size in sizes[:2])
    ):
        bound = max(_FACTOR * measured, floors.get(comparison, rounding))
        rows.append(ComparedRow(comparison, COMPARED, difference, bound=bound))
    return rows, flips


def _compare_precisions(
    config: Config, copy: Sequence[RankRecord], single: RankRecord, large: RankRecord
) -> Iterator[tuple[str, float, float]]:
    """Yield each comparison, the copy's difference, and that of the two runs."""
    if config.precision.fp16:
        pairs = [zip(rank.steps, single.steps, strict=True) for rank in copy]
        error = max(float(a.loss_scale != b.loss_scale) for steps in pairs for a, b in steps)
        yield "loss scale in the run's precision", error, 0.0
    for comparison, attribute in (
        ("loss in the run's precision", "loss"),
        ("gradient norm in the run's precision", "grad_norm"),
        ("applied steps in the run's precision", "applied"),
    ):
        errors = [_find_difference(rank, single, attribute) for rank in copy]
        yield comparison, max(errors), _find_difference(large, single, attribute)
    # The first step with float8. Later gradients also have the differences of the weights.
    first = config.precision.fp8_start_iteration - 1 if config.precision.fp8_format else 0
    moments = get_decays(config.optimizer)
    for comparison, decays, begin, end in (
        (_GRADIENTS, moments, first, first),
        # The change of all weights in all steps.
        ("change of the weights in the run's precision", {"weight": 1.0}, 0, -1),
    ):
        runs = [
            {(s.kind, s.name): s.tensor for s in _find_changes(run, decays, begin, end)}
            for run in (single, large)
        ]
        # Sums of squares over all shards: the copy's difference, that of the two runs, the change.
        sums = [0.0, 0.0, 0.0]
        for rank in copy:
            for shard in _find_changes(rank, decays, begin, end):
                wanted, other = (shard.select(run[shard.kind, shard.name]) for run in runs)
                for number, tensor in enumerate((shard.tensor - wanted, other - wanted, wanted)):
                    sums[number] += float(tensor.square().sum())
        error, measured, change = map(math.sqrt, sums)
        yield comparison, error / change, measured / change


def _find_changes(
    run: RankRecord, decays: Mapping[str, float], begin: int, end: int
) -> list[ShardCopy]:
    """Return x' - decay * x of these kinds of state, from one step to another one.

    For first moments, this is a multiple of the clipped gradient.
    """
    pairs = zip(run.steps[begin].before, run.steps[end].after, strict=True)
    return [
        replace(new, tensor=new.tensor.float() - decays[new.kind] * old.tensor.float())
        for old, new in pairs
        if new.kind in decays
    ]


def _find_difference(run: RankRecord, single: RankRecord, attribute: str) -> float:
    """Return the largest relative difference of a result. It is 0 for equal infinities."""
    largest = 0.0
    for own, other in zip(run.steps, single.steps, strict=True):
        value = float(getattr(own.result, attribute))
        wanted = float(getattr(other.result, attribute))
        # After an overflow, the norm of infinite gradients is an infinity or a nan.
        if value != wanted and (math.isfinite(value) or math.isfinite(wanted)):
            difference = abs(value - wanted) / (abs(wanted) or 1.0)
            largest = max(largest, math.inf if math.isnan(difference) else difference)
    return largest

"""Complete trainings of several ranks on fake GPUs, for a process of their own."""

import multiprocessing
import os
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from unittest import mock

from cuda.fake_ranks import train
from process_pool import find_free_port

from megatron.extras.planner.dry_run.record import StepTrace


@dataclass(frozen=True)
class RankRun:
    """What a rank did in a complete training."""

    step: StepTrace
    chosen: tuple[str, ...]
    """The GPUs that its threads have chosen. A new thread has number 0."""


def train_worlds(world_size: int, runs: list[list[str]]) -> list[list[RankRun]]:
    """Run complete trainings of several ranks, one after the other.

    Each rank is a process with a GPU of its own. Messages between hosts are real. Those between
    GPUs are not sent. Call it in a new process, because a process that has run a backward pass
    cannot be forked.

    Args:
        world_size: Number of ranks.
        runs: The command line of each run.

    Returns:
        For each run, what each rank did.
    """
    # Imported once. The ranks are forks of this process.
    import megatron.engine.pipeline_runner
    import megatron.engine.sharding
    import megatron.run.pretrain  # noqa: F401
    from megatron.extras.planner.dry_run.fake_rank import get_gpu

    # It installs the stand-ins, which DeepSpeed's import needs.
    get_gpu()
    if any("--deepspeed" in arguments for arguments in runs):
        _import_deepspeed()
    return [_train_world(world_size, arguments) for arguments in runs]


def _import_deepspeed() -> None:
    """Import DeepSpeed, and let its ranks trust each other.

    ZeRO 3 compares lists of modules with those of rank 0, which come in a message between GPUs.
    """
    from megatron.extras.step.deepspeed.deepspeed import import_deepspeed

    import_deepspeed("cuda")
    from deepspeed.runtime.zero import partitioned_param_coordinator

    partitioned_param_coordinator.assert_ints_same_as_other_ranks = lambda ints: None


def _train_world(world_size: int, arguments: list[str]) -> list[RankRun]:
    context = multiprocessing.get_context("fork")
    environment = {
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(find_free_port()),
    }
    ranks: dict[Connection, int] = {}
    processes = []
    for rank in range(world_size):
        ours, theirs = context.Pipe(duplex=False)
        # A task of Slurm may see its own GPU only, which has the number 0.
        of_rank = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = context.Process(target=_train_rank, args=(theirs, of_rank, arguments))
        process.start()
        # Otherwise this process would wait for a rank that ends without a result.
        theirs.close()
        ranks[ours] = rank
        processes.append(process)
    try:
        results = _receive(ranks)
    finally:
        # After an error of one rank, the others would wait for it. SIGTERM would let them save.
        for process in processes:
            process.kill()
            process.join()
    return [results[rank] for rank in range(world_size)]


def _receive(ranks: dict[Connection, int]) -> dict[int, RankRun]:
    """Return what the ranks send.

    Raises:
        AssertionError: A rank has sent an error, or has ended without a result.
    """
    results: dict[int, RankRun] = {}
    while len(results) < len(ranks):
        for pipe in wait([pipe for pipe, rank in ranks.items() if rank not in results]):
            assert isinstance(pipe, Connection)
            try:
                result = pipe.recv()
            except EOFError:
                result = "it has ended without a result"
            assert isinstance(result, RankRun), f"rank {ranks[pipe]}: {result}"
            results[ranks[pipe]] = result
    return results


def _train_rank(pipe: Connection, environment: dict[str, str], arguments: list[str]) -> None:
    """Train on one rank, and send its `RankRun`, or the error as text."""
    import torch

    from megatron.run.exits import Exits

    os.environ.update(environment)
    torch.set_num_threads(1)
    chosen: list[str] = []
    count_votes = Exits.count_votes

    # A message between fake GPUs has no values, so it carries no votes. The ranks then ask each
    # other by a message between hosts, as they do after an evaluation.
    def count_none(exits: Exits, votes: Sequence[float] | None, after: int) -> None:
        count_votes(exits, None, after)

    def choose(device: torch.device) -> None:
        if threading.current_thread() is not threading.main_thread():
            chosen.append(str(device))

    try:
        with (
            mock.patch.object(Exits, "count_votes", count_none),
            mock.patch.object(torch.cuda, "set_device", choose),
        ):
            step = train(arguments)
            pipe.send(RankRun(step, tuple(chosen)))
    except Exception:
        pipe.send(traceback.format_exc())

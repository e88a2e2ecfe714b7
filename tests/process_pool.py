"""Real ranks for tests: processes that import torch once and run many small worlds.

A world is a distributed job: some ranks that call the same function. A launch by torchrun takes 5
to 10 seconds, mostly for imports. A world of this pool only has to create its process group. Most
worlds run `megatron.run.pretrain.pretrain` with a command line, as torchrun would.
"""

import contextlib
import gc
import io
import multiprocessing
import os
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from megatron.run.start.launch import read_launch

if TYPE_CHECKING:
    from megatron.run.run import Run

WORKERS = 8
_TIMEOUT_SECONDS = 300
_MAX_THREADS = 40
"""A worker that has more threads than this after a world is replaced."""


@dataclass(frozen=True)
class Outcome:
    """The result of one rank."""

    value: Any
    error: str | None
    """Text of the exception, if there was one."""
    kind: str | None
    """Class of the exception."""
    output: str
    """Text that the rank printed."""


def find_free_port() -> int:
    """Return a port that no process listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _is_spent() -> bool:
    """Return whether this process must be replaced before the next world.

    torch counts a process group that could not be built. The groups of a later world would then
    have other names here than on the other ranks, which would wait for this one.

    DeepSpeed's ZeRO 3 changes the process permanently: its parameters get running numbers, and
    `linear` is patched. In a later world, this rank would order its gradients and collectives in
    another way than fresh ranks. DeepSpeed also keeps some process groups, whose threads add up.
    """
    from torch.distributed import distributed_c10d

    if distributed_c10d._world.group_count:
        return True
    zero_3 = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
    if zero_3 is not None and zero_3.Init.param_id > 0:
        return True
    return len(os.listdir("/proc/self/task")) > _MAX_THREADS


def _release_process_groups() -> None:
    """Free the process groups of the world that has ended.

    Each one has three threads, and the one of gloo wakes up 100 times a second. After a hundred
    worlds, they would take most of the time of two cores.
    """
    from torch.distributed.tensor import debug

    # DTensor's caches have the meshes of FSDP2 in their keys, which keeps the groups alive.
    debug._clear_sharding_prop_cache()
    # Meshes and engines are in reference cycles, so only a collection frees them.
    gc.collect()


def _serve(pipe: Connection) -> None:
    """Run the functions that the pool sends to this worker, until the pool closes the pipe."""
    import torch
    import torch.distributed as dist

    assert "worker_preload" in sys.modules, "the fork server could not import worker_preload"
    torch.set_num_threads(1)
    while True:
        try:
            function, arguments, environment = pipe.recv()
        except EOFError:
            return
        os.environ.update(environment)
        printed = io.StringIO()
        value = None
        error = None
        kind = None
        with contextlib.redirect_stdout(printed):
            try:
                value = function(*arguments)
            except Exception as failure:
                error = str(failure)
                kind = type(failure).__name__
                printed.write(traceback.format_exc())
        if dist.is_initialized():
            dist.destroy_process_group()
        _release_process_groups()
        pipe.send((Outcome(value, error, kind, printed.getvalue()), _is_spent()))


def start_fork_server() -> ForkServerContext:
    """Start the fork server if it does not run, and return the context that uses it.

    A process has one fork server. It imports `worker_preload` once for all processes that it forks.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["worker_preload"])
    # In Python 3.11, the fork server does not get `sys.path`, and it ignores a failed import.
    before = os.environ.get("PYTHONPATH")
    folders = [str(Path(__file__).parent), *([before] if before else [])]
    os.environ["PYTHONPATH"] = os.pathsep.join(folders)
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context


class ProcessPool:
    """Processes that run worlds of up to `WORKERS` ranks."""

    def __init__(self) -> None:
        self._context = start_fork_server()
        self._workers = [self._start() for _ in range(WORKERS)]

    def _start(self) -> tuple[Connection, BaseProcess]:
        own_end, worker_end = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(worker_end,), daemon=True)
        process.start()
        worker_end.close()
        return own_end, process

    def _replace(self, rank: int) -> None:
        pipe, process = self._workers[rank]
        pipe.close()
        process.kill()
        process.join()
        self._workers[rank] = self._start()

    def _replace_if_ended(self, rank: int) -> None:
        """Replace a worker that has ended since its last world, with a warning.

        A thread of a process group can end its process late, after the world's result.
        """
        _, process = self._workers[rank]
        if process.is_alive():
            return
        warnings.warn(
            f"worker {rank} ended with exit code {process.exitcode} after its last world",
            stacklevel=3,
        )
        self._replace(rank)

    def run(self, world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Outcome]:
        """Call a function on ranks 0 to `world_size` - 1, and return the outcome of each rank.

        Args:
            world_size: Number of ranks.
            function: The function. The workers import it by its name.
            arguments: Its arguments. From a `PerRank`, each rank gets its own value.
        """
        port = find_free_port()
        for rank in range(world_size):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            own = [
                argument.of(rank) if isinstance(argument, PerRank) else argument
                for argument in arguments
            ]
            self._replace_if_ended(rank)
            self._workers[rank][0].send((function, own, environment))
        outcomes = []
        for rank in range(world_size):
            pipe, process = self._workers[rank]
            if not pipe.poll(_TIMEOUT_SECONDS):
                for other in range(world_size):
                    self._replace(other)
                pytest.fail(f"rank {rank} of {world_size} hangs")
            try:
                outcome, spent = pipe.recv()
            except EOFError:
                process.join()
                ended = f"the process of rank {rank} ended with exit code {process.exitcode}"
                outcome, spent = Outcome(None, ended, "EndedProcess", ""), True
            outcomes.append(outcome)
            if spent:
                self._replace(rank)
        return outcomes

    def close(self) -> None:
        """End all processes."""
        for pipe, _ in self._workers:
            pipe.close()
        for _, process in self._workers:
            process.join(5)
            if process.is_alive():
                process.kill()


@dataclass(frozen=True)
class PerRank:
    """An argument that differs between ranks."""

    values: Sequence[Any]

    def of(self, rank: int) -> Any:
        """Return the value of one rank."""
        return self.values[rank]


def pretrain(argv: list[str]) -> None:
    """Run a command line on this rank."""
    import megatron.run.pretrain as pretrain_module
    from megatron.commands.parts import choose_parts, load_command_line

    loaded = load_command_line(argv, "pretrain_gpt.py")
    pretrain_module.pretrain(read_launch(loaded, choose_parts(loaded.config)))


def start_without_lease(argv: list[str]) -> "Run":
    """Start the run of a command line on this rank, up to its first iteration."""
    from megatron.commands.parts import choose_parts, load_command_line
    from megatron.parallel.launcher import read_launcher_world
    from megatron.run.start.build import build_timers, divide_ranks, start_run
    from megatron.run.start.job import agree_on_job
    from megatron.run.start.meet import join_ranks

    loaded = load_command_line(argv, "pretrain_gpt.py")
    launch = read_launch(loaded, choose_parts(loaded.config))
    world = read_launcher_world()
    ranks = join_ranks(launch)
    job = agree_on_job(launch, ranks)
    timers = build_timers(world)
    mesh = divide_ranks(job.plan, ranks, world, timers)
    return start_run(launch, job, mesh, timers, None)


def succeed(outcomes: list[Outcome]) -> str:
    """Check that all ranks succeeded. Return what rank 0 printed."""
    for rank, outcome in enumerate(outcomes):
        if outcome.error is not None:
            pytest.fail(f"rank {rank}: {outcome.kind}: {outcome.error}\n{outcome.output}")
    return outcomes[0].output

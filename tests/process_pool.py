"""Real ranks for tests: a pool of processes that import torch once and then run many small worlds, one after the other.

A torchrun launch costs 5 to 10 seconds, most of it imports; a world of this pool costs what its process group costs. Each world
runs `pretrain_gpt.pretrain` with a command line, as torchrun would.
"""

import contextlib
import io
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import pytest

WORKERS = 8
_TIMEOUT_SECONDS = 300


@dataclass(frozen=True)
class Outcome:
    """What one rank did."""

    value: Any
    error: str | None
    """Text of the exception, if there was one."""
    kind: str | None
    """Its class."""
    output: str
    """What it printed."""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _serve(pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            function, arguments, environment = pipe.recv()
        except EOFError:
            return
        os.environ.update(environment)
        printed = io.StringIO()
        value = error = kind = None
        with contextlib.redirect_stdout(printed):
            try:
                value = function(*arguments)
            except Exception as failure:
                error, kind = f"{failure}", type(failure).__name__
                printed.write(traceback.format_exc())
        if dist.is_initialized():
            dist.destroy_process_group()
        pipe.send(Outcome(value, error, kind, printed.getvalue()))


class ProcessPool:
    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["pretrain_gpt", "megatron.engine.native"])
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(WORKERS):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there,), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Outcome]:
        """`function(*arguments)` on ranks 0 .. world_size - 1; `per_rank(rank)` values of arguments are called with the rank."""
        port = _free_port()
        for rank in range(world_size):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            own = [argument.of(rank) if isinstance(argument, PerRank) else argument for argument in arguments]
            self._pipes[rank].send((function, own, environment))
        outcomes = []
        for rank in range(world_size):
            assert self._pipes[rank].poll(_TIMEOUT_SECONDS), f"rank {rank} of {world_size} hangs"
            outcomes.append(self._pipes[rank].recv())
        return outcomes

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()


@dataclass(frozen=True)
class PerRank:
    """An argument that differs between ranks."""

    values: Sequence[Any]

    def of(self, rank: int) -> Any:
        return self.values[rank]


def pretrain(argv: list[str]) -> None:
    """What each rank of a world runs."""
    import pretrain_gpt
    from megatron.config.cli import load_config

    pretrain_gpt.pretrain(load_config(argv))


def succeed(outcomes: list[Outcome]) -> str:
    """All ranks did; returns what rank 0 printed."""
    for rank, outcome in enumerate(outcomes):
        if outcome.error is not None:
            pytest.fail(f"rank {rank}: {outcome.kind}: {outcome.error}\n{outcome.output}")
    return outcomes[0].output

"""Tests of the connections between ranks: their number, their limit and their errors."""

import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
from process_pool import ProcessPool, find_free_port, succeed

from megatron.errors import LayoutError
from megatron.open_files import allow_open_files
from megatron.parallel.rendezvous import _meet


@contextmanager
def limit_open_files(soft: int, hard: int) -> Iterator[None]:
    """Pretend that the limits of open files are these, within a `with` block."""
    limits = [soft, hard]

    def change(kind: int, values: tuple[int, int]) -> None:
        limits[:] = values

    with (
        mock.patch.object(resource, "getrlimit", return_value=(soft, hard)),
        mock.patch.object(resource, "setrlimit", change),
    ):
        yield
        soft, hard = limits
        Limits.soft = soft
        Limits.hard = hard


class Limits:
    """The limits at the end of `limit_open_files`."""

    soft = 0
    hard = 0


@pytest.mark.parametrize(
    ("soft", "hard", "at_least", "at_most"),
    [
        (1024, 1 << 20, 10_000, 20_000),
        (1024, 4000, 4000, 4000),
        (1 << 19, 1 << 20, 1 << 19, 1 << 19),
        (1024, resource.RLIM_INFINITY, 10_000, 20_000),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, -1, -1),
    ],
)
def test_the_limit_of_open_files_is_raised(
    soft: int, hard: int, at_least: int, at_most: int
) -> None:
    with limit_open_files(soft, hard):
        allow_open_files(10_000)
    assert at_least <= Limits.soft <= at_most
    assert Limits.hard == hard


def count_sockets(lazy: bool) -> int:
    """Return this rank's open sockets after one all-reduce in a world of gloo."""
    import torch
    import torch.distributed as dist

    from megatron.parallel import rendezvous

    before = _list_sockets()
    many = 2 if lazy else 1000
    with (
        mock.patch.object(rendezvous, "_MANY_RANKS", many),
        mock.patch.dict(os.environ),
    ):
        rendezvous.start_process_group("gloo", 1)
        total = torch.ones(4)
        dist.all_reduce(total)
        assert total.tolist() == [float(dist.get_world_size())] * 4
        return len(_list_sockets() - before)


def _list_sockets() -> set[str]:
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(link)
        except FileNotFoundError:
            continue
        if target.startswith("socket:"):
            found.add(target)
    return found


def test_many_ranks_are_connected_when_they_first_exchange_a_message(pool: ProcessPool) -> None:
    outcomes = {lazy: pool.run(8, count_sockets, lazy) for lazy in (False, True)}
    for lazy in outcomes:
        succeed(outcomes[lazy])
    # Seven other ranks. A ring has two neighbours.
    for eager, late in zip(outcomes[False], outcomes[True], strict=True):
        assert eager.value >= 7
        assert late.value <= eager.value - 4


def test_an_error_names_the_interface() -> None:
    """It is a process of its own, because torch counts a group that could not be made."""
    code = """
from megatron.errors import LayoutError
from megatron.parallel.rendezvous import start_process_group
try:
    start_process_group("gloo", 1)
except LayoutError as error:
    print(error)
"""
    world = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(find_free_port()),
        "GLOO_SOCKET_IFNAME": "missing0",
    }
    found = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **world},
    )
    assert "GLOO_SOCKET_IFNAME=missing0" in found.stdout, found.stderr


def record_first_messages(flags: str) -> list[str]:
    """Return the collectives of the pipeline group before the first step."""
    import torch.distributed as dist
    from engine.test_pipeline_stage import Work, walk

    from megatron.engine.native import NativeEngine

    events: list[str] = []
    all_reduce = dist.all_reduce
    train_batch = NativeEngine.train_batch

    def record(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        events.append(f"all-reduce {ranks}")
        return all_reduce(tensor, op, group, async_op)

    def train(self, *arguments, **options):
        events.append("step")
        return train_batch(self, *arguments, **options)

    with (
        mock.patch.object(dist, "all_reduce", record),
        mock.patch.object(NativeEngine, "train_batch", train),
    ):
        walk(flags, [Work(4)])
    return events[: events.index("step")]


def test_pipeline_ranks_are_connected_before_the_first_step(pool: ProcessPool) -> None:
    flags = "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2"
    outcomes = pool.run(4, record_first_messages, flags)
    succeed(outcomes)
    for rank, outcome in enumerate(outcomes):
        assert f"all-reduce {[rank % 2, rank % 2 + 2]}" in outcome.value


def test_a_port_whose_program_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """It accepts connections and never answers, as a program of another user may."""
    errors: list[Exception] = []

    def meet() -> None:
        try:
            _meet(1, 2, timedelta(seconds=1), "")
        except LayoutError as error:
            errors.append(error)

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        thread = threading.Thread(target=meet, daemon=True)
        thread.start()
        thread.join(20)
        assert not thread.is_alive()
    assert f"the program that listens at 127.0.0.1:{port} has not answered" in str(errors[0])

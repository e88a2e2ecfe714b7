"""Tests of the connections between ranks: their number, their limit and their errors."""

import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from process_pool import ProcessPool, find_free_port, succeed
from training.runs import Runner

from megatron.base.errors import LayoutError
from megatron.base.host_limits import allow_open_files
from megatron.parallel.rendezvous import _meet
from megatron.run.start.launch import read_launch


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
        found = len(_list_sockets() - before)
        # A rank that leaves closes its sockets, and those of the others with it. All count first.
        # They meet in the store, because a message would connect them.
        store = dist.distributed_c10d._get_default_store()
        store.set(f"counted/{dist.get_rank()}", "")
        store.wait([f"counted/{rank}" for rank in range(dist.get_world_size())])
        return found


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
from megatron.base.errors import LayoutError
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


@dataclass(frozen=True)
class Use:
    """A message, and the communicator that it has with NCCL."""

    kind: str
    """"group": a collective, or a message of a batch. "pair": a single message."""
    group: str
    """torch's name of the group, which is the same on all ranks."""
    ranks: tuple[int, ...]
    """The ranks of the communicator."""
    route: tuple[int, int] | None = None
    """The sender and the receiver of a message between two ranks."""


COLLECTIVES = (
    *("allreduce", "allgather", "_allgather_base", "reduce_scatter", "_reduce_scatter_base"),
    *("broadcast", "alltoall", "alltoall_base", "reduce", "gather", "scatter", "barrier"),
    *("all_gather_single", "reduce_scatter_single", "all_to_all_single"),
)


@contextmanager
def record_uses(uses: list[Use]) -> Iterator[None]:
    """Record each message of this rank within a `with` block."""
    import torch.distributed as dist

    batched = False
    batch = dist.batch_isend_irecv

    def send_batch(*arguments: Any) -> Any:
        nonlocal batched
        batched = True
        try:
            return batch(*arguments)
        finally:
            batched = False

    def watch(name: str) -> Callable[..., Any]:
        original = getattr(dist.ProcessGroup, name)

        def call(group: Any, *arguments: Any, **keywords: Any) -> Any:
            ranks = tuple(dist.get_process_group_ranks(group))
            if name in ("send", "recv"):
                ends = (ranks[group.rank()], ranks[arguments[1]])
                route = ends if name == "send" else ends[::-1]
                pair = (min(ends), max(ends))
                if batched:
                    uses.append(Use("group", group.group_name, ranks, route))
                else:
                    uses.append(Use("pair", group.group_name, pair, route))
            else:
                uses.append(Use("group", group.group_name, ranks))
            return original(group, *arguments, **keywords)

        return call

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(dist, "batch_isend_irecv", send_batch))
        for name in (*COLLECTIVES, "send", "recv"):
            if hasattr(dist.ProcessGroup, name):
                stack.enter_context(mock.patch.object(dist.ProcessGroup, name, watch(name)))
        yield


def record_run(flags: str, steps: list[Any]) -> tuple[list[Use], list[Use]]:
    """Return what this rank uses before the first step, and in the steps."""
    from engine.test_pipeline_stage import walk

    from megatron.engine.native import NativeEngine

    uses: list[Use] = []
    at_start: list[int] = []
    train_batch = NativeEngine.train_batch

    def train(self: Any, *arguments: Any, **options: Any) -> Any:
        at_start.append(len(uses))
        return train_batch(self, *arguments, **options)

    with record_uses(uses), mock.patch.object(NativeEngine, "train_batch", train):
        walk(flags, steps)
    return uses[: at_start[0]], uses[at_start[0] :]


COPIES = (
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --hsdp-shard-size 1 "
    "--optimizer muon"
)
SHARDS = (
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --zero-stage 2 "
    "--sequence-parallel"
)
RING = (
    "--num-layers 6 --pipeline-model-parallel-size 3 --num-layers-per-virtual-pipeline-stage 1 "
    "--untie-embeddings-and-output-weights"
)


@pytest.mark.parametrize(
    ("ranks", "flags", "samples", "groups"),
    [
        # Tensor-parallel ranks are those of a copy of the stages too. The pipeline, its ends and a
        # pair have the same ranks.
        (8, COPIES, (8, 4), {(0, 1, 2, 3, 4, 5, 6, 7), (0, 1), (0, 2), (0, 4)}),
        (8, SHARDS, (8,), {(0, 1, 2, 3, 4, 5, 6, 7), (0, 1), (0, 2), (0, 4)}),
        # Interleaved 1F1B and looped BFS.
        (3, RING, (6, 4), {(0, 1, 2), (0, 1), (0, 2)}),
        (4, "--pipeline-model-parallel-size 4", (8, 2), {(0, 1, 2, 3), (0, 1), (0, 3)}),
    ],
)
def test_ranks_are_connected_before_the_first_step(
    ranks: int,
    flags: str,
    samples: tuple[int, ...],
    groups: set[tuple[int, ...]],
    pool: ProcessPool,
) -> None:
    from engine.test_pipeline_stage import Work, evaluation

    steps = [*map(Work, samples), evaluation(samples[0])]
    outcomes = pool.run(ranks, record_run, flags, steps)
    succeed(outcomes)
    before = [dict.fromkeys(outcome.value[0]) for outcome in outcomes]
    for rank, outcome in enumerate(outcomes):
        assert set(outcome.value[1]) <= set(before[rank])
    assert {use.ranks for use in outcomes[0].value[1]} == groups
    # Communicators that two ranks share are made in one order.
    made = [
        list(dict.fromkeys((use.kind, use.group, use.ranks) for use in uses)) for uses in before
    ]
    for first, second in combinations(made, 2):
        shared = set(first) & set(second)
        assert [each for each in first if each in shared] == [
            each for each in second if each in shared
        ]


def start_with_fault(operation: str, ranks: tuple[int, ...], raises: bool) -> None:
    """Build a mesh in which the messages of one group fail or arrive changed.

    Args:
        operation: The function of torch that fails, "all_reduce", "recv" or "batch_isend_irecv".
        ranks: The ranks of the group or of the pair.
        raises: Whether it raises an error.
    """
    import torch
    import torch.distributed as dist

    from megatron.parallel.grid import Grid
    from megatron.parallel.mesh import build_mesh
    from megatron.parallel.rendezvous import start_process_group

    start_process_group("gloo", 0.2)
    original = getattr(dist, operation)

    def fail(first: Any, **options: Any) -> Any:
        # A rank of two stages has one neighbour.
        hit = dist.get_rank() == ranks[-1]
        if operation == "all_reduce":
            hit = hit and ranks == tuple(dist.get_process_group_ranks(options["group"]))
        if hit and raises:
            raise RuntimeError("no route to host\nin line two")
        result = original(first, **options)
        if hit and operation == "batch_isend_irecv":
            for work in result:
                work.wait()
            first[1].tensor.add_(1)
            # gloo's works can be waited for only once.
            return []
        elif hit:
            first.add_(1)
        return result

    with mock.patch.object(dist, operation, fail):
        build_mesh(Grid(pipeline=2, data=2, tensor=2), torch.device("cpu"), shard_size=1)


@pytest.mark.parametrize(
    ("operation", "ranks", "raises", "name"),
    [
        ("all_reduce", tuple(range(8)), False, "the world of ranks 0, 1, 2, 3, 4, 5, 6, 7"),
        ("all_reduce", (2, 3), True, "the tensor-parallel group of ranks 2, 3"),
        ("all_reduce", (2, 3), False, "the tensor-parallel group of ranks 2, 3"),
        ("all_reduce", (1, 3), False, "the group of copies of ranks 1, 3"),
        ("all_reduce", (2, 6), False, "the pipeline group of ranks 2, 6"),
        ("recv", (3, 7), False, "the pair of pipeline neighbours of ranks 3, 7"),
        ("batch_isend_irecv", (3, 7), True, "the pair of pipeline neighbours of ranks 3, 7"),
        ("batch_isend_irecv", (3, 7), False, "the pair of pipeline neighbours of ranks 3, 7"),
    ],
)
def test_group_that_cannot_exchange_a_message_is_named(
    operation: str, ranks: tuple[int, ...], raises: bool, name: str, pool: ProcessPool
) -> None:
    outcome = pool.run(8, start_with_fault, operation, ranks, raises)[ranks[-1]]
    assert outcome.kind == "LayoutError"
    assert str(outcome.error).startswith(f"{name} must exchange a message before the first step")
    reason = "failed: no route to host; check" if raises else "instead of"
    assert f"rank {ranks[-1]} failed" in str(outcome.error)
    assert reason in str(outcome.error)


def train_without_rank_3(argv: list[str]) -> None:
    """Train, and let rank 3 end before it connects to its tensor-parallel group."""
    import torch.distributed as dist

    import megatron.run.pretrain as pretrain_module
    from megatron.commands.parts import choose_parts
    from megatron.extras.interop.translators.translator import load_config
    from megatron.parallel import mesh

    connect_group = mesh.connect_group

    def end(group: Any, kind: str, *arguments: Any) -> None:
        if dist.get_rank() == 3 and kind == "tensor-parallel group":
            raise ValueError("a mistake")
        connect_group(group, kind, *arguments)

    with mock.patch.object(mesh, "connect_group", end):
        loaded = load_config(argv)
        pretrain_module.pretrain(read_launch(loaded, choose_parts(loaded.config)))


def test_lost_rank_and_the_group_that_misses_it_are_named(
    pool: ProcessPool, corpus: str, tmp_path: Path
) -> None:
    run = Runner(pool, corpus, tmp_path / "run")
    argv = run.argv("--tensor-model-parallel-size 2 --distributed-timeout-minutes 0.2")
    outcomes = pool.run(4, train_without_rank_3, argv)
    # The watchdog of a rank may end the process before its collective fails.
    assert {outcome.kind for outcome in outcomes[:3]} <= {"LostRanksError", "EndedProcess"}
    errors = [str(outcome.error) for outcome in outcomes[:3]]
    (told,) = [error for error in errors if "has left the run: ValueError: a mistake" in error]
    assert "must exchange a message before the first step" in told


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

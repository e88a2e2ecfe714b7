"""Tests that the pool survives a process that ends."""

import os
import signal
from collections.abc import Iterator
from datetime import timedelta

import pytest
from process_pool import ProcessPool, succeed


def get_rank() -> str:
    return os.environ["RANK"]


def end_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        os._exit(7)


@pytest.fixture
def own_pool() -> Iterator[ProcessPool]:
    pool = ProcessPool()
    yield pool
    pool.close()


def test_a_process_that_ends_in_a_world_is_an_error_of_its_rank(own_pool: ProcessPool) -> None:
    outcomes = own_pool.run(3, end_on_rank_1)
    assert [outcome.error for outcome in (outcomes[0], outcomes[2])] == [None, None]
    assert outcomes[1].error == "the process of rank 1 ended with exit code 7"
    succeed(own_pool.run(3, get_rank))


def wait_for_a_missing_rank() -> None:
    import torch.distributed as dist

    limit = timedelta(seconds=1)
    dist.init_process_group("gloo", world_size=2, rank=0, store=dist.HashStore(), timeout=limit)


def add_ranks() -> float:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


def test_a_process_whose_group_was_not_built_is_replaced(own_pool: ProcessPool) -> None:
    """torch would give its next groups other names than those of the other rank."""
    (outcome,) = own_pool.run(1, wait_for_a_missing_rank)
    assert outcome.kind == "DistStoreError"
    outcomes = own_pool.run(2, add_ranks)
    succeed(outcomes)
    assert [outcome.value for outcome in outcomes] == [2.0, 2.0]


def test_a_process_that_ends_between_worlds_is_replaced(own_pool: ProcessPool) -> None:
    succeed(own_pool.run(2, get_rank))
    _, process = own_pool._workers[1]
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with pytest.warns(UserWarning, match="worker 1 ended with exit code -9"):
        outcomes = own_pool.run(2, get_rank)
    assert [outcome.value for outcome in outcomes] == ["0", "1"]

"""Tests that the pool survives a process that ends."""

import os
import signal
from collections.abc import Iterator

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


def test_a_process_that_ends_between_worlds_is_replaced(own_pool: ProcessPool) -> None:
    succeed(own_pool.run(2, get_rank))
    _, process = own_pool._workers[1]
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with pytest.warns(UserWarning, match="worker 1 ended with exit code -9"):
        outcomes = own_pool.run(2, get_rank)
    assert [outcome.value for outcome in outcomes] == ["0", "1"]

"""Tests of the GPU that a rank takes, on hosts that show it all GPUs or only its own."""

import os
import resource
from typing import Any
from unittest import mock

import pytest
import torch
from process_pool import ProcessPool, succeed

from megatron.parallel.rendezvous import choose_device


@pytest.mark.parametrize(
    ("local_rank", "visible", "number"),
    [
        (3, 8, 3),
        # With --gpus-per-task=1, Slurm shows each task its own GPU only.
        (3, 1, 0),
        # Ranks that share GPUs take them in turn.
        (5, 4, 1),
    ],
)
def test_the_number_of_a_gpu_is_one_that_the_rank_sees(
    local_rank: int, visible: int, number: int
) -> None:
    chosen: list[torch.device] = []
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "device_count", return_value=visible),
        mock.patch.object(torch.cuda, "set_device", chosen.append),
    ):
        device = choose_device(local_rank)
    assert device == torch.device("cuda", number)
    assert chosen == [device]


def start_and_look() -> tuple[int, dict[str, Any]]:
    """Start a group on GPUs of their own. Return the soft limit of open files, and the options."""
    import torch.distributed as dist

    from megatron.parallel import rendezvous

    given: dict[str, Any] = {}

    def start(backend: str, **options: Any) -> None:
        store = options.pop("store")
        given.update(backend=backend, **options)
        # Rank 0 keeps the store, which rank 1 reads until now.
        if options["rank"] == 1:
            store.set("has read", "yes")
        else:
            store.wait(["has read"])

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The process has some sockets already, so it gets the usual limit.
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
    try:
        with (
            mock.patch.object(rendezvous, "_name_gpu", return_value=f"GPU-{os.environ['RANK']}"),
            mock.patch.object(torch.cuda, "is_available", return_value=True),
            mock.patch.object(dist, "init_process_group", start),
        ):
            rendezvous.start_process_group(None, 1, torch.device("cuda", 0))
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0], given
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_group_on_gpus_has_many_sockets_and_no_device(pool: ProcessPool) -> None:
    outcomes = pool.run(2, start_and_look)
    succeed(outcomes)
    for rank, outcome in enumerate(outcomes):
        limit, options = outcome.value
        assert limit > 1024
        # With `device_id`, NCCL would use one communicator for all messages between stages.
        assert set(options) == {"backend", "rank", "world_size", "timeout"}
        assert (options["backend"], options["rank"]) == ("nccl", rank)

"""Tests that every process group has the time-out of --distributed-timeout-minutes."""

from datetime import timedelta
from pathlib import Path

import pytest
from process_pool import PerRank, ProcessPool, succeed
from training.runs import Runner

from megatron.run.start.launch import read_launch

MINUTES = 7.0
TP_PP = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
TP_DP = "--tensor-model-parallel-size 2"


def list_time_outs(argv: list[str]) -> list[tuple[str, timedelta]]:
    """Train, and return the ranks and the time-out of each process group of this process."""
    import torch
    import torch.distributed as dist

    import megatron.run.pretrain as pretrain_module
    from megatron.commands.parts import choose_parts
    from megatron.extras.interop.translators.translator import load_config

    loaded = load_config(argv)
    pretrain_module.pretrain(read_launch(loaded, choose_parts(loaded.config)))
    groups = [
        group
        for group in dist.distributed_c10d._world.pg_map
        if group != dist.GroupMember.NON_GROUP_MEMBER
    ]
    return [
        (f"{dist.get_process_group_ranks(g)}", g._get_backend(torch.device("cpu")).options._timeout)
        for g in groups
    ]


@pytest.mark.parametrize(
    ("layout", "at_least"),
    [
        (TP_PP, 4),
        pytest.param(f"{TP_DP} --zero-stage 3", 4, marks=pytest.mark.full),
        (f"{TP_PP} --deepspeed --hang-timeout 60", 8),
        ("--hsdp-shard-size 2 --micro-batch-size 1 --hang-timeout 60", 4),
        pytest.param(f"{TP_DP} --zero-stage 2 --deepspeed", 4, marks=pytest.mark.full),
    ],
)
def test_every_group_has_the_limit(
    layout: str, at_least: int, pool: ProcessPool, corpus: str, tmp_path: Path
) -> None:
    from megatron.parallel.rank_progress import TimeLimit

    run = Runner(pool, corpus, tmp_path / "run")
    # A phase may take ten times as long as a step, and the watchdog acts before a collective fails.
    hang_timeout = 60.0 if "--hang-timeout" in layout else None
    flags = f"{layout} --num-layers 2 --train-iters 2 --distributed-timeout-minutes {MINUTES}"
    outcomes = pool.run(4, list_time_outs, run.argv(flags))
    succeed(outcomes)
    expected = TimeLimit(MINUTES, hang_timeout).collective
    seconds = 410 if hang_timeout is None else 610
    assert expected == timedelta(seconds=seconds)
    for outcome in outcomes:
        assert len(outcome.value) >= at_least
        assert {time_out for _, time_out in outcome.value} == {expected}, outcome.value


def join(minutes: float, starts: bool) -> None:
    from megatron.parallel.rendezvous import start_process_group

    if starts:
        start_process_group("gloo", minutes)


def test_ranks_that_do_not_join_are_named(pool: ProcessPool) -> None:
    outcomes = pool.run(4, join, 0.05, PerRank([True, False, True, False]))
    for rank in (0, 2):
        assert outcomes[rank].kind == "LayoutError"
        assert "these of 4 ranks have not joined" in str(outcomes[rank].error)
        assert ": 1, 3;" in str(outcomes[rank].error)


def test_without_rank_0_the_store_is_named(pool: ProcessPool) -> None:
    outcomes = pool.run(2, join, 0.05, PerRank([False, True]))
    assert outcomes[1].kind == "LayoutError"
    assert "cannot reach the store at 127.0.0.1:" in str(outcomes[1].error)


def join_with_gpus(backend: str | None, gpu: str) -> str:
    from unittest import mock

    import torch
    import torch.distributed as dist

    from megatron.parallel import rendezvous

    with (
        mock.patch.object(rendezvous, "_name_gpu", return_value=gpu),
        mock.patch.object(torch.cuda, "is_available", return_value=True),
    ):
        rendezvous.start_process_group(backend, 1, torch.device("cuda", 0))
    # A rank that ends closes its connections, also to those that have not seen them open yet.
    dist.barrier()
    return str(dist.get_backend())


def test_ranks_that_share_a_gpu_use_gloo(pool: ProcessPool) -> None:
    gpus = PerRank(["GPU-a", "GPU-b", "GPU-b"])
    outcomes = pool.run(3, join_with_gpus, None, gpus)
    assert [outcome.value for outcome in outcomes] == ["gloo"] * 3
    for outcome in pool.run(3, join_with_gpus, "nccl", gpus):
        assert outcome.kind == "LayoutError"
        assert "share a GPU" in str(outcome.error)

"""Tests that all tensor-parallel ranks update replicated parameters with the same gradients."""

from pathlib import Path
from unittest import mock

import pytest
import torch
from engine.test_invariants import SIZES
from process_pool import PerRank, ProcessPool, pretrain, succeed

from megatron.observe.metrics import read_metrics


def add_up(rank_values: list[float]) -> tuple[list[float], list[float]]:
    """Return a partial and a replicated gradient after the sum, which begin with the values."""
    import os

    import torch.distributed as dist

    from megatron.engine.invariants import add_over_tensor_ranks
    from megatron.parallel.mesh import TensorParallel
    from megatron.parallel.rendezvous import start_process_group

    start_process_group("gloo", 1)
    tp = TensorParallel(2, int(os.environ["RANK"]), dist.group.WORLD)
    partial = torch.tensor(rank_values)
    replicated = torch.tensor([rank_values]).t()
    add_over_tensor_ranks([torch.empty(0, 3), partial], [replicated], tp)
    return partial.tolist(), replicated.flatten().tolist()


def test_partial_gradients_are_added_and_others_are_the_first_ranks(pool: ProcessPool) -> None:
    values = [[1.5, -0.0, 3.0, 1.0], [2.0, 5.0, float("inf"), -7.0]]
    outcomes = pool.run(2, add_up, PerRank(values))
    succeed(outcomes)
    for outcome in outcomes:
        partial, replicated = outcome.value
        assert partial == [3.5, 5.0, float("inf"), -6.0]
        assert replicated[0] == 1.5
        # The sign of a zero stays, and an infinity of any rank is seen on all.
        assert str(replicated[1]) == "-0.0"
        assert not torch.tensor(replicated[2]).isfinite()
        assert replicated[3] == 1.0


def pretrain_with_other_sums(argv: list[str]) -> None:
    """Train, and change the last bits of a replicated gradient on the second rank.

    It stands for a sum over data-parallel ranks in another order.
    """
    import os

    from megatron.engine import engine_base, parallelize

    def build_and_disturb(*arguments, **options):
        stages = parallelize.build_stages(*arguments, **options)
        for stage in stages:
            for name, parameter in stage.model.named_parameters():
                if "norm" in name and os.environ["RANK"] == "1":
                    parameter.register_hook(lambda gradient: gradient * (1 + 2**-20))
        return stages

    with mock.patch.object(engine_base, "build_stages", build_and_disturb):
        pretrain(argv)


@pytest.mark.parametrize(
    "flags",
    [
        "--bf16",
        "--deepspeed --zero-stage 1",
        pytest.param("--deepspeed --zero-stage 3", marks=pytest.mark.full),
        pytest.param("--deepspeed --zero-stage 2 --cpu-optimizer", marks=pytest.mark.full),
        pytest.param("--deepspeed --zero-stage 1 --bf16", marks=pytest.mark.full),
        pytest.param("--deepspeed --zero-stage 2 --fp16 --loss-scale 64", marks=pytest.mark.full),
    ],
)
def test_replicas_stay_equal_if_sums_differ_in_the_last_bits(
    flags: str, pool: ProcessPool, corpus: str, tmp_path: Path
) -> None:
    if "deepspeed" in flags:
        pytest.importorskip("deepspeed")
    argv = [
        *SIZES.split(),
        *("--tensor-model-parallel-size 2 " + flags).split(),
        *("--data-path", corpus, "--data-cache-path", str(tmp_path / "cache")),
        *("--save", str(tmp_path)),
    ]
    # A run whose replicas differ ends with an error.
    succeed(pool.run(2, pretrain_with_other_sums, argv))
    assert len([e for e in read_metrics(tmp_path / "metrics.jsonl") if "lm_loss" in e]) == 6

"""Tests of how many blocks are gathered at a time in each ZeRO stage."""

from pathlib import Path
from unittest import mock

import pytest
from process_pool import ProcessPool, succeed
from torch.distributed.tensor import DTensor

from megatron.run.start.launch import read_launch

SIZES = (
    "--num-layers 3 --hidden-size 32 --num-attention-heads 2 --seq-length 32 "
    "--micro-batch-size 1 --global-batch-size 6 --train-iters 1 --eval-iters 0 "
    "--hidden-dropout 0 --attention-dropout 0 --lr 2e-3 --lr-decay-style constant "
    "--vocab-size 5000"
)


def count_gathered_blocks(argv: list[str]) -> list[tuple[int, int]]:
    """Train one step and return how many blocks are gathered, for each microbatch.

    The first number is counted when the microbatch begins, the second one after its forward pass.
    """
    import megatron.run.pretrain as pretrain_module
    from megatron.commands.parts import choose_parts
    from megatron.engine.sharding import ShardedModel
    from megatron.extras.interop.translators.translator import load_config
    from megatron.model.gpt import GPT

    seen: list[tuple[int, int]] = []
    started: list[int] = []
    prepare_backward = ShardedModel.prepare_backward
    forward = GPT.forward

    def count(model: GPT) -> int:
        return sum(
            not isinstance(next(block.parameters()), DTensor) for block in model.blocks.values()
        )

    def count_before(self: ShardedModel, *, last: bool) -> None:
        started.append(count(self.model))
        prepare_backward(self, last=last)

    def count_after(self, *arguments, **keywords):
        result = forward(self, *arguments, **keywords)
        if started:
            seen.append((started.pop(), count(self)))
        return result

    with (
        mock.patch.object(ShardedModel, "prepare_backward", count_before),
        mock.patch.object(GPT, "forward", count_after),
    ):
        loaded = load_config(argv)
        pretrain_module.pretrain(read_launch(loaded, choose_parts(loaded.config)))
    return seen


@pytest.mark.parametrize(
    ("stage", "expected"),
    # Stages 1 and 2 gather once for a step, stage 3 for each use.
    [(1, [(0, 3), (3, 3), (3, 3)]), (2, [(0, 3), (3, 3), (3, 3)]), (3, [(0, 0), (0, 0), (0, 0)])],
)
def test_a_stage_gathers_as_often_as_it_promises(
    stage: int, expected: list, pool: ProcessPool, corpus: str, tmp_path: Path
) -> None:
    argv = [
        *SIZES.split(),
        "--zero-stage",
        str(stage),
        "--data-path",
        corpus,
        "--data-cache-path",
        str(tmp_path),
    ]
    outcomes = pool.run(2, count_gathered_blocks, argv)
    succeed(outcomes)
    assert [outcome.value for outcome in outcomes] == [expected, expected]

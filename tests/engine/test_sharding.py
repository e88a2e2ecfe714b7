"""What lies gathered at which moment, by ZeRO stage: the memory that a stage promises."""

from pathlib import Path

import pytest
from process_pool import ProcessPool, succeed
from torch.distributed.tensor import DTensor

SIZES = (
    "--num-layers 3 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --micro-batch-size 1 --global-batch-size 6 "
    "--hidden-dropout 0 --attention-dropout 0 --lr 2e-3 --lr-decay-style constant --eval-iters 0 --vocab-size 5000 --train-iters 1"
)


def gathered_blocks(argv: list[str]) -> list[tuple[int, int]]:
    """(when a microbatch begins, when its forward pass has ended): how many blocks lie gathered; for each microbatch of a step."""
    import pretrain_gpt
    from megatron.config.cli import load_config
    from megatron.engine.sharding import ShardedModel
    from megatron.model.gpt import GPT

    seen: list[tuple[int, int]] = []
    started: list[int] = []
    prepare_backward, forward = ShardedModel.prepare_backward, GPT.forward

    def count(model: GPT) -> int:
        return sum(
            not isinstance(next(block.parameters()), DTensor) for block in model.blocks.values()
        )

    def spy_before(self: ShardedModel, *, last: bool) -> None:
        started.append(count(self._model))
        prepare_backward(self, last=last)

    def spy_forward(self, *arguments, **keywords):
        result = forward(self, *arguments, **keywords)
        if started:
            seen.append((started.pop(), count(self)))
        return result

    ShardedModel.prepare_backward, GPT.forward = spy_before, spy_forward  # type: ignore[method-assign]
    try:
        pretrain_gpt.pretrain(load_config(argv))
    finally:
        ShardedModel.prepare_backward, GPT.forward = prepare_backward, forward  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize(
    ("stage", "expected"),
    # Stages 1 and 2 gather once for a step, stage 3 for each use.
    [(1, [(0, 3), (3, 3), (3, 3)]), (2, [(0, 3), (3, 3), (3, 3)]), (3, [(0, 0), (0, 0), (0, 0)])],
)
def test_what_lies_gathered(
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
    outcomes = pool.run(2, gathered_blocks, argv)
    succeed(outcomes)
    assert [outcome.value for outcome in outcomes] == [expected, expected]

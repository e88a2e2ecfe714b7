"""A step that `accept` refuses leaves weights, moments and scalars as they were, on every rank."""

from pathlib import Path
from typing import Any

import pytest
from process_pool import ProcessPool, start_without_lease

SIZES = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --vocab-size 5000 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 10 --lr 2e-3 "
    "--lr-decay-style constant --hidden-dropout 0 --attention-dropout 0 --eval-iters 0"
)
TP2 = "--tensor-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
EXPERTS = (
    "--num-experts 8 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-bias-update-rate 0.01 --expert-model-parallel-size 2"
)
LAYOUTS = {
    "one-process-fp16": (1, "--fp16"),
    "tp2-bf16": (2, f"{TP2} --bf16"),
    "pp2": (2, PP2),
    "dp2-bf16": (2, "--bf16"),
    "experts-dp2-bf16": (2, f"{EXPERTS} --bf16"),
    "experts-tp2-pp2": (4, f"{EXPERTS} {TP2} {PP2}"),
    "tp2-pp2-dp2": (8, f"{TP2} {PP2} --bf16"),
    "deepspeed-zero1-dp2": (2, "--deepspeed --zero-stage 1"),
    "deepspeed-zero0-bf16": (2, "--deepspeed --zero-stage 0 --bf16"),
    "deepspeed-zero2-fp16": (2, "--deepspeed --zero-stage 2 --fp16"),
    "deepspeed-zero3-bf16": (2, "--deepspeed --zero-stage 3 --bf16"),
    "deepspeed-pp2-dp2-bf16": (4, f"--deepspeed --zero-stage 1 {PP2} --bf16"),
}
SHORT = (
    "one-process-fp16",
    "tp2-bf16",
    "pp2",
    "dp2-bf16",
    "deepspeed-zero1-dp2",
    "experts-dp2-bf16",
)


def train_around_a_rejected_step(argv: list[str]) -> dict[str, Any]:
    """Train an applied step, a rejected one and an applied one. Return what changed."""
    import torch

    run = start_without_lease(argv)
    assert run.sources.train is not None
    engine = run.engine

    def read_state() -> tuple[list[torch.Tensor], dict[str, Any]]:
        shards = engine.shards(optimizer=True)
        return [shard.tensor.detach().clone() for shard in shards], engine.get_scalars()

    asked: list[tuple[float, float | None]] = []

    def train(iteration: int, *, accepted: bool) -> Any:
        def accept(loss: float, norm: float | None) -> bool:
            asked.append((loss, norm))
            return accepted

        batch = run.sources.train.read_batch(8, 32)  # type: ignore[union-attr]
        return engine.train_batch(batch, iteration=iteration, lr=2e-3, accept=accept)

    results = [train(1, accepted=True)]
    before = read_state()
    results.append(train(2, accepted=False))
    after = read_state()
    results.append(train(3, accepted=True))
    last = read_state()
    run.reporter.close()
    run.sources.close()
    return {
        "kept": all(map(torch.equal, before[0], after[0])),
        "scalars": (before[1], after[1]),
        "changed": not all(map(torch.equal, after[0], last[0])),
        "asked": asked,
        "losses": [result.loss for result in results],
        "norms": [result.grad_norm for result in results],
        "outcomes": [result.outcome.name for result in results],
    }


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=() if name in SHORT else pytest.mark.full) for name in LAYOUTS],
)
def test_rejected_step_changes_nothing(
    layout: str, pool: ProcessPool, corpus: str, tmp_path: Path
) -> None:
    ranks, flags = LAYOUTS[layout]
    paths = f"--data-path {corpus} --data-cache-path {tmp_path}/cache"
    # fp16 needs a scale without overflows in these three steps.
    argv = [*SIZES.split(), *flags.split(), *paths.split()]
    if "--fp16" in flags:
        argv += ["--initial-loss-scale", "256"]
    outcomes = pool.run(ranks, train_around_a_rejected_step, argv)
    for outcome in outcomes:
        assert outcome.error is None, outcome.output
        found = outcome.value
        assert found["kept"]
        assert found["scalars"][0] == found["scalars"][1]
        assert found["outcomes"] == ["APPLIED", "REJECTED", "APPLIED"]
        assert [loss for loss, _ in found["asked"]] == pytest.approx(found["losses"], rel=1e-6)
        # Every rank is asked with the same bits.
        assert found["asked"] == outcomes[0].value["asked"]
    assert any(outcome.value["changed"] for outcome in outcomes)
    has_norm = "deepspeed" not in layout
    norms = [norm for _, norm in outcomes[0].value["asked"]]
    if has_norm:
        assert norms == pytest.approx(outcomes[0].value["norms"], rel=1e-6)
    else:
        assert norms == [None] * 3

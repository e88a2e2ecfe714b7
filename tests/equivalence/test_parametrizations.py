"""Tests that a model whose rates depend on its size equals one process, with each optimizer."""

import pytest
from equivalence.test_context_layouts import (
    BOUND,
    LLAMA,
    NO_DROPOUT,
    SIZES,
    STEADY,
    find_worst,
    join_state,
    train_cases,
)
from process_pool import ProcessPool, succeed

BASE = "--base-width 16 --base-kv-channels 2"
CASES = [
    f"{STEADY} {NO_DROPOUT} {LLAMA} {BASE} --parametrization mup --weight-decay 0.5",
    f"{STEADY} {NO_DROPOUT} {BASE} --parametrization completep --base-depth 2 --optimizer muon "
    "--norm-placement output --muon-fp32-matmul-prec high --decoupled-lr 2e-3",
    f"{STEADY} {NO_DROPOUT} {LLAMA} {BASE} --parametrization completep --base-depth 1 "
    "--optimizer ademamix --ademamix-beta3 0.99 --parallel-residual --num-experts 4 "
    "--moe-ffn-hidden-size 20 --moe-shared-expert-intermediate-size 8",
]
LAYOUT = (
    "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
    "--micro-batch-size 1"
)


@pytest.fixture(scope="module")
def worlds(
    pool: ProcessPool, corpus: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[object], list[object]]:
    """Return the results of all cases of one process, and of eight."""
    cache = tmp_path_factory.mktemp("cache")
    found = []
    for ranks, layout in ((1, "--micro-batch-size 1"), (8, LAYOUT)):
        paths = f"--data-path {corpus} --data-cache-path {cache}"
        outcomes = pool.run(ranks, train_cases, [f"{SIZES} {paths} {c} {layout}" for c in CASES])
        succeed(outcomes)
        found.append([join_state([each.value[n] for each in outcomes]) for n in range(len(CASES))])
    return found[0], found[1]


@pytest.mark.parametrize("case", range(len(CASES)), ids=["mup", "completep, Muon", "experts"])
def test_eight_processes_equal_one(worlds: tuple[list[object], list[object]], case: int) -> None:
    """Initial weights, factors and rates are those of the complete model on every rank."""
    worst = find_worst(worlds[1][case], worlds[0][case])
    assert max(worst.values()) < BOUND, worst

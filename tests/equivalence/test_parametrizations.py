"""Tests that a model whose rates depend on its size equals one process, with each optimizer."""

import pytest
from equivalence.test_context_layouts import (
    BOUND,
    LLAMA,
    NO_DROPOUT,
    SIZES,
    STEADY,
    STEPS,
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


# With the width of the base model, muP changes nothing.
SAME = [
    f"{STEADY} {NO_DROPOUT} {LLAMA} {extra}"
    for extra in ("", "--parametrization mup --base-width 48 --base-kv-channels 4")
]


@pytest.fixture(scope="module")
def worlds(
    pool: ProcessPool, corpus: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[object], list[object]]:
    """Return the results of all cases of one process, and of eight."""
    cache = tmp_path_factory.mktemp("cache")
    found = []
    for ranks, layout in ((1, "--micro-batch-size 1"), (8, LAYOUT)):
        paths = f"--data-path {corpus} --data-cache-path {cache}"
        cases = [*CASES, *(SAME if ranks == 1 else [])]
        outcomes = pool.run(ranks, train_cases, [f"{SIZES} {paths} {c} {layout}" for c in cases])
        succeed(outcomes)
        joined = [join_state([each.value[n] for each in outcomes]) for n in range(len(cases))]
        found.append(joined)
    return found[0], found[1]


@pytest.mark.parametrize("case", range(len(CASES)), ids=["mup", "completep, Muon", "experts"])
def test_eight_processes_equal_one(worlds: tuple[list[object], list[object]], case: int) -> None:
    """Initial weights, factors and rates are those of the complete model on every rank."""
    worst = find_worst(worlds[1][case], worlds[0][case])
    assert max(worst.values()) < BOUND, worst


def test_the_base_model_is_the_standard_one(
    worlds: tuple[list[object], list[object]],
) -> None:
    """The steps have the same bits."""
    standard, base = worlds[0][len(CASES) :]
    assert standard[0] == base[0]  # type: ignore[index]
    assert len(standard[0]) == STEPS  # type: ignore[index]

"""Tests that ranks that share the sequence of each sample equal one process."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from equivalence.corpus import EVALUATED, NO_DROPOUT, command, curve, validation, worst
from process_pool import ProcessPool, pretrain, succeed

BOUND = 1e-5
SMALL = "--num-layers 2 --seq-length 96 --num-attention-heads 12 --hidden-size 48"


@dataclass(frozen=True)
class Case:
    """A layout on `ranks` ranks. `model` has the flags that one process gets too."""

    name: str
    ranks: int
    model: str
    flags: str
    shape: str = "llama"
    variation: str = "ramp"
    bound: float = BOUND
    short: bool = False


CASES = [
    Case(
        f"CP {size}, {kind}",
        size,
        SMALL,
        f"--context-parallel-size {size} --cp-comm-type {kind}",
        shape,
    )
    for size, shape in ((2, "gpt2"), (3, "llama"), (4, "bloom"))
    for kind in ("allgather", "a2a")
]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=() if case.short else pytest.mark.full)
        for case in CASES
    ],
)
def test_shared_sequences_equal_one_process(
    case: Case, pool: ProcessPool, corpus: str, tmp_path: Path
) -> None:
    found = []
    for ranks, flags in (
        (1, "--micro-batch-size 4"),
        (case.ranks, f"--micro-batch-size 1 {case.flags}"),
    ):
        folder = tmp_path / str(ranks)
        argv = command(
            folder, corpus, case.shape, case.variation, NO_DROPOUT, EVALUATED, case.model, flags
        )
        succeed(pool.run(ranks, pretrain, argv))
        found.append((curve(folder), validation(folder)))
    (alone, seen_alone), (together, seen_together) = found
    assert len(alone) >= 10
    assert worst(together, alone) < case.bound
    assert worst(seen_together, seen_alone) < case.bound

"""Tests of --use-torch-compile in each kind of layout.

The curve equals that of one process without compilation to 1e-5 in fp32. A graph break is an error,
because the halves of a layer are compiled with `fullgraph`.
"""

from pathlib import Path

import pytest
from equivalence.corpus import NO_DROPOUT, command, curve, of_suite, validation, worst
from process_pool import ProcessPool, pretrain, succeed

BOUND = 1e-5
COMPILED = "--use-torch-compile --num-layers 2"
VALIDATED = "--eval-interval 5 --eval-iters 1"


def count_graphs(argv: list[str]) -> int:
    """Train, and return how many graphs this rank compiled, without the test of the compiler."""
    import torch
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    pretrain(argv)
    return int(counters["stats"]["unique_graphs"]) - 1


@pytest.fixture(scope="module")
def single(
    pool: ProcessPool, corpus: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], Path]:
    """Return the folders of one process's runs that are not compiled."""
    folders = {}
    for shape, variation in (("llama", "ramp"), ("gpt2", "ramp"), ("llama", "curriculum")):
        folder = folders[shape, variation] = tmp_path_factory.mktemp(f"eager-{shape}-{variation}")
        argv = command(
            folder,
            corpus,
            shape,
            of_suite(variation),
            NO_DROPOUT,
            "--num-layers 2 --micro-batch-size 2",
            VALIDATED,
        )
        succeed(pool.run(1, pretrain, argv))
    return folders


@pytest.mark.parametrize(
    ("ranks", "shape", "variation", "flags"),
    [
        pytest.param(1, "llama", "ramp", "", marks=pytest.mark.full),
        (2, "llama", "ramp", "--tensor-model-parallel-size 2 --sequence-parallel"),
        pytest.param(1, "llama", "curriculum", "", marks=pytest.mark.full),
        pytest.param(1, "gpt2", "ramp", "--checkpoint-activations", marks=pytest.mark.full),
        pytest.param(1, "gpt2", "ramp", "--recompute-attention-core", marks=pytest.mark.full),
        pytest.param(2, "gpt2", "ramp", "--tensor-model-parallel-size 2", marks=pytest.mark.full),
        pytest.param(
            2,
            "llama",
            "curriculum",
            "--tensor-model-parallel-size 2 --sequence-parallel",
            marks=pytest.mark.full,
        ),
        pytest.param(2, "gpt2", "ramp", "--zero-stage 1", marks=pytest.mark.full),
        pytest.param(
            2, "llama", "ramp", "--zero-stage 3 --checkpoint-activations", marks=pytest.mark.full
        ),
        pytest.param(
            2, "llama", "ramp", "--pipeline-model-parallel-size 2", marks=pytest.mark.full
        ),
    ],
)
def test_compiled_layout_trains_as_one_process(
    ranks: int,
    shape: str,
    variation: str,
    flags: str,
    pool: ProcessPool,
    corpus: str,
    single: dict[tuple[str, str], Path],
    tmp_path: Path,
) -> None:
    argv = command(
        tmp_path,
        corpus,
        shape,
        of_suite(variation),
        NO_DROPOUT,
        COMPILED,
        "--micro-batch-size 2",
        VALIDATED,
        flags,
    )
    outcomes = pool.run(ranks, count_graphs, argv)
    succeed(outcomes)
    assert worst(curve(tmp_path), curve(single[shape, variation])) < BOUND
    assert worst(validation(tmp_path), validation(single[shape, variation])) < BOUND
    # One for training and one for evaluation, for any batch size. A curriculum may need two more.
    assert all(outcome.value <= (2 if variation == "ramp" else 4) for outcome in outcomes), [
        outcome.value for outcome in outcomes
    ]


@pytest.mark.full
@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--tensor-model-parallel-size 2",
        "--checkpoint-activations",
        "--recompute-attention-core",
    ],
)
def test_compiled_dropout_is_reproducible(
    flags: str, pool: ProcessPool, corpus: str, tmp_path: Path
) -> None:
    """A repeated run and a resumed run are bit-identical."""
    once, again, halves = (tmp_path / part for part in ("once", "again", "halves"))
    ranks = 2 if "parallel" in flags else 1
    for folder, extra in (
        (once, ""),
        (again, ""),
        (halves, "--exit-interval 4"),
        (halves, "--require-load"),
    ):
        argv = command(
            folder, corpus, "gpt2", "ramp", COMPILED, "--micro-batch-size 2", flags, extra
        )
        succeed(pool.run(ranks, pretrain, argv))
    assert curve(once) == curve(again) == curve(halves)

"""Tests that replicas that differ are found, named and, with the flag, repaired during a run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from process_pool import Outcome, PerRank, ProcessPool, pretrain, succeed

from megatron.engine.invariants import compute_checksum
from megatron.engine.native import NativeEngine
from megatron.observe.metrics import read_metrics

SIZES = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 "
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 6 --check-invariants-interval 2 "
    "--hidden-dropout 0 --attention-dropout 0 --lr 2e-3 --lr-decay-style constant "
    "--log-interval 1 --eval-interval 1000 --eval-iters 0 --vocab-size 5000"
)
TP2 = "--tensor-model-parallel-size 2"
ALL = f"{TP2} --pipeline-model-parallel-size 2"
"""A layout for eight ranks, with two data-parallel ones."""
HSDP = "--sharding-strategy hsdp --hsdp-shard-size 2"
EMBEDDING = "embedding.word.weight"
REPAIR = "--sync-tp-duplicated-parameters"

Disturbance = tuple[str, str, float | None]
"""Part of a parameter's name, what is changed, and the amount that is added.

What is changed is weight, exp_avg, exp_avg_sq or optimizer_step. Without an amount, one bit is
flipped.
"""


def disturb(engine: NativeEngine, what: Disturbance) -> None:
    """Change one tensor of this rank, or its count of steps."""
    name, kind, amount = what
    scalars = engine.get_scalars()
    if kind == "optimizer_step":
        scalars["optimizer_step"] += 1
    else:
        tensor = next(
            shard.tensor
            for shard in engine.shards(optimizer=True)
            if name in shard.name and shard.kind == kind
        )
        if amount is None:
            tensor.view(-1)[-1:].view(torch.int32).bitwise_xor_(1)
        else:
            tensor += amount
    # The engine takes over what was written, as after a load.
    engine.finish_load(scalars)


@contextmanager
def update_after_step(iteration: int, action: Callable[[NativeEngine], None]) -> Iterator[None]:
    """Call `action` with the engine after a step."""
    original = NativeEngine.train_batch

    def train_batch(self, microbatches, *, iteration: int, **options):
        result = original(self, microbatches, iteration=iteration, **options)
        if iteration == at:
            action(self)
        return result

    at = iteration
    NativeEngine.train_batch = train_batch  # type: ignore[method-assign]
    try:
        yield
    finally:
        NativeEngine.train_batch = original  # type: ignore[method-assign]


def pretrain_disturbed(argv: list[str], at: int, what: Disturbance | None) -> None:
    """Train, and disturb this rank after step `at`."""
    if what is None:
        return pretrain(argv)
    with update_after_step(at, lambda engine: disturb(engine, what)):
        pretrain(argv)


class Runs:
    def __init__(self, pool: ProcessPool, corpus: str, folder: Path) -> None:
        self.pool = pool
        self.corpus = corpus
        self.folder = folder

    def __call__(
        self,
        name: str,
        flags: str,
        ranks: int,
        *,
        at: int = 0,
        who: int = 0,
        what: Disturbance | None = None,
    ) -> list[Outcome]:
        folder = str(self.folder / name)
        paths = [
            "--data-path",
            self.corpus,
            "--data-cache-path",
            f"{self.folder}/cache",
            "--save",
            folder,
        ]
        whats = [what if rank == who else None for rank in range(ranks)]
        return self.pool.run(
            ranks, pretrain_disturbed, [*SIZES.split(), *paths, *flags.split()], at, PerRank(whats)
        )

    def losses(self, name: str) -> list[tuple[float, float]]:
        return [
            (entry["lm_loss"], entry["grad_norm"])
            for entry in read_metrics(self.folder / name / "metrics.jsonl")
        ]


@pytest.fixture
def runs(pool: ProcessPool, corpus: str, tmp_path: Path) -> Runs:
    return Runs(pool, corpus, tmp_path)


CASES = [
    (TP2, 2, 1, ("input_norm", "weight", None), "rank 1", "(pipeline 0, data 0, tensor 1)"),
    (
        f"{TP2} --sequence-parallel --bf16",
        2,
        1,
        ("input_norm", "weight", None),
        "rank 1",
        "(pipeline 0, data 0, tensor 1)",
    ),
    (
        TP2,
        2,
        1,
        ("embedding.position", "exp_avg", None),
        "rank 1",
        "(pipeline 0, data 0, tensor 1)",
    ),
    (ALL, 8, 7, ("norm", "weight", None), "rank 7", "(pipeline 1, data 1, tensor 1)"),
    (ALL, 8, 6, (EMBEDDING, "weight", None), "rank 6", "(pipeline 1, data 1, tensor 0)"),
    (ALL, 8, 4, (EMBEDDING, "exp_avg_sq", None), "rank 4", "(pipeline 1, data 0, tensor 0)"),
    (HSDP, 4, 3, ("mlp.up", "weight", None), "rank 3", "(pipeline 0, data 3, tensor 0)"),
    (
        "--sharding-strategy ddp",
        2,
        1,
        ("qkv", "exp_avg_sq", None),
        "rank 1",
        "(pipeline 0, data 1, tensor 0)",
    ),
    (f"{HSDP} {TP2}", 8, 5, ("norm", "weight", None), "rank 5", "(pipeline 0, data 2, tensor 1)"),
]


@pytest.mark.parametrize(("flags", "ranks", "who", "what", "rank", "coordinate"), CASES)
def test_one_bit_is_found_and_named(
    flags: str, ranks: int, who: int, what: Disturbance, rank: str, coordinate: str, runs: Runs
) -> None:
    outcomes = runs("run", flags, ranks, at=4, who=who, what=what)
    assert {outcome.kind for outcome in outcomes} == {"TrainingError"}
    assert len({outcome.error for outcome in outcomes}) == 1
    error = outcomes[0].error
    assert error is not None
    assert "after iteration 4" in error
    assert "after iteration 2 found no difference" in error
    _, found, fix = error.splitlines()
    assert what[0] in found
    assert f"({what[1]})" in found
    assert f"on {rank} on " in found
    assert f"{coordinate} by up to " in found
    assert found.count("rank ") == 1
    assert "of iteration 2 or earlier" in fix
    assert REPAIR in fix
    assert len(runs.losses("run")) == 4


@pytest.mark.parametrize(
    ("flags", "ranks", "who", "what"),
    [
        (TP2, 2, 1, ("input_norm", "weight", 0.5)),
        (f"{TP2} --bf16", 2, 1, ("input_norm", "weight", 0.5)),
        (f"{TP2} --bf16", 2, 1, ("input_norm", "exp_avg", 0.5)),
        (ALL, 8, 5, (EMBEDDING, "weight", 0.5)),
        (f"{ALL} --zero-stage 2", 8, 3, ("norm", "weight", float("nan"))),
        (HSDP, 4, 2, ("mlp.up", "exp_avg", 0.5)),
        # The other tensor-parallel rank of the second copy has a replica too, and stays right.
        (f"{HSDP} {TP2}", 8, 4, ("norm", "weight", 0.5)),
    ],
)
def test_a_repaired_run_equals_an_undisturbed_run(
    flags: str, ranks: int, who: int, what: Disturbance, runs: Runs
) -> None:
    # Two iterations before the repair, and two after it.
    flags = f"{flags} --train-iters 4"
    output = succeed(runs("clean", flags, ranks))
    assert "overwritten with the first rank" not in output
    output = succeed(runs("repaired", f"{flags} {REPAIR}", ranks, at=2, who=who, what=what))
    assert (
        output.count("warning: overwritten with the first rank's replica after iteration 2: ") == 1
    )
    assert output.count("overwritten with the first rank") == 1
    assert len(runs.losses("clean")) == 4
    assert runs.losses("repaired") == runs.losses("clean")


def test_a_repair_reaches_weights_that_an_evaluation_has_gathered(runs: Runs) -> None:
    """Replicas are checked before an evaluation, or before the save after it."""
    ends = "--check-invariants-interval 100 --eval-interval 3 --eval-iters 1 --save-interval 3"
    flags = f"--sharding-strategy ddp {REPAIR} {ends}"
    succeed(runs("clean", flags, 2))
    what = ("mlp.up", "weight", 0.5)
    output = succeed(runs("repaired", flags, 2, at=3, who=1, what=what))
    assert "overwritten with the first rank's replica after iteration 3: " in output
    assert runs.losses("repaired") == runs.losses("clean")


def test_without_a_check_the_losses_differ(runs: Runs) -> None:
    what = ("input_norm", "weight", 0.5)
    succeed(runs("clean", TP2, 2))
    succeed(runs("off", f"{TP2} --check-invariants-interval 0", 2, at=2, who=1, what=what))
    assert runs.losses("off") != runs.losses("clean")


@pytest.mark.parametrize("flag", ["", REPAIR])
def test_ranks_that_count_steps_differently_are_named(flag: str, runs: Runs) -> None:
    outcomes = runs("run", flag, 2, at=3, who=1, what=("", "optimizer_step", None))
    for outcome in outcomes:
        assert outcome.kind == "TrainingError"
        assert outcome.error is not None
        assert (
            "(pipeline 0, data 1, tensor 0) differs from rank 0: optimizer_step is 5, not 4"
            in outcome.error
        )
        assert REPAIR not in outcome.error


def test_a_checksum_depends_on_bits_and_positions() -> None:
    values = torch.randn(100, generator=torch.Generator().manual_seed(0))
    swapped = values.clone()
    swapped[[3, 50]] = swapped[[50, 3]]
    flipped = values.clone()
    flipped.view(torch.int32)[99] ^= 1
    sums = {
        tuple(compute_checksum(tensor).tolist())
        for tensor in (values, swapped, flipped, torch.zeros(100), -torch.zeros(100))
    }
    assert len(sums) == 5
    assert compute_checksum(torch.empty(0, 4)).tolist() == [0, 0]


def test_the_size_of_slices_does_not_change_a_checksum() -> None:
    values = torch.randn(10, 10, generator=torch.Generator().manual_seed(0))
    assert torch.equal(compute_checksum(values, slice_size=7), compute_checksum(values))

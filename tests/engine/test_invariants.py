"""Copies that drift apart are found, named and, if asked for, repaired; in real worlds, in the middle of a run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from process_pool import Outcome, PerRank, ProcessPool, pretrain, succeed

from megatron.engine.invariants import _compute_checksum
from megatron.engine.native import NativeEngine
from megatron.observe.metrics import read_metrics

SIZES = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --micro-batch-size 1 --global-batch-size 4 "
    "--hidden-dropout 0 --attention-dropout 0 --lr 2e-3 --lr-decay-style constant --log-interval 1 --eval-interval 1000 "
    "--eval-iters 0 --vocab-size 5000 --train-iters 6 --check-invariants-interval 2"
)
TP2 = "--tensor-model-parallel-size 2"
ALL = f"{TP2} --pipeline-model-parallel-size 2"
"""With eight ranks, two of them data-parallel."""
EMBEDDING = "embedding.word.weight"
REPAIR = "--sync-tp-duplicated-parameters"

Disturbance = tuple[str, str, float | None]
"""Part of a parameter's name; weight, exp_avg, exp_avg_sq or optimizer_step; what is added, None for one bit."""


def disturb(engine: NativeEngine, what: Disturbance) -> None:
    name, kind, amount = what
    if kind == "optimizer_step":
        engine._optimizer.step_count += 1
        return
    master = next(m for m in engine._masters if name in m.name and m.weight.numel())
    tensor = master.weight.data if kind == "weight" else engine._optimizer.get_moment(master, kind)
    if amount is None:
        tensor.view(-1)[-1:].view(torch.int32).bitwise_xor_(1)
    else:
        tensor += amount
    engine._refresh_model()


@contextmanager
def update_after_step(iteration: int, action: Callable[[NativeEngine], None]) -> Iterator[None]:
    """`action` happens to the engine once it has done the step."""
    original = NativeEngine.train_batch

    def train_batch(self, microbatches, *, iteration: int, lr: float):
        result = original(self, microbatches, iteration=iteration, lr=lr)
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
    """As pretrain, but after step `at` something happens to this rank."""
    if what is None:
        return pretrain(argv)
    with update_after_step(at, lambda engine: disturb(engine, what)):
        pretrain(argv)


class Runs:
    def __init__(self, pool: ProcessPool, corpus: str, folder: Path) -> None:
        self.pool, self.corpus, self.folder = pool, corpus, folder

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
]


@pytest.mark.parametrize(("flags", "ranks", "who", "what", "rank", "place"), CASES)
def test_one_bit_is_found_and_named(
    flags: str, ranks: int, who: int, what: Disturbance, rank: str, place: str, runs: Runs
) -> None:
    outcomes = runs("run", flags, ranks, at=4, who=who, what=what)
    assert {outcome.kind for outcome in outcomes} == {"TrainingError"}
    assert len({outcome.error for outcome in outcomes}) == 1
    error = outcomes[0].error
    assert error is not None
    assert "after iteration 4" in error
    assert "after iteration 2 found nothing" in error
    _, found, way_out = error.splitlines()
    assert what[0] in found
    assert f"({what[1]})" in found
    assert f"on {rank} on " in found
    assert f"{place} by up to " in found
    assert found.count("rank ") == 1
    assert "of iteration 2 or before" in way_out
    assert REPAIR in way_out
    assert len(runs.losses("run")) == 4


@pytest.mark.parametrize(
    ("flags", "ranks", "who", "what"),
    [
        (TP2, 2, 1, ("input_norm", "weight", 0.5)),
        (f"{TP2} --bf16", 2, 1, ("input_norm", "weight", 0.5)),
        (f"{TP2} --bf16", 2, 1, ("input_norm", "exp_avg", 0.5)),
        (ALL, 8, 5, (EMBEDDING, "weight", 0.5)),
        (f"{ALL} --zero-stage 2", 8, 3, ("norm", "weight", float("nan"))),
    ],
)
def test_a_repaired_run_goes_on_as_if_nothing_had_been(
    flags: str, ranks: int, who: int, what: Disturbance, runs: Runs
) -> None:
    output = succeed(runs("clean", flags, ranks))
    assert "made equal" not in output
    output = succeed(runs("repaired", f"{flags} {REPAIR}", ranks, at=2, who=who, what=what))
    assert output.count("warning: made equal to the first rank's after iteration 2: ") == 1
    assert output.count("made equal") == 1
    assert runs.losses("repaired") == runs.losses("clean")


def test_without_a_check_nobody_notices(runs: Runs) -> None:
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
            "(pipeline 0, data 1, tensor 0) differs from rank 0: optimizer_step 5, not 4"
            in outcome.error
        )
        assert REPAIR not in outcome.error


def test_a_checksum_is_of_bits_and_places() -> None:
    values = torch.randn(100, generator=torch.Generator().manual_seed(0))
    swapped = values.clone()
    swapped[[3, 50]] = swapped[[50, 3]]
    flipped = values.clone()
    flipped.view(torch.int32)[99] ^= 1
    sums = {
        tuple(_compute_checksum(tensor).tolist())
        for tensor in (values, swapped, flipped, torch.zeros(100), -torch.zeros(100))
    }
    assert len(sums) == 5
    assert _compute_checksum(torch.empty(0, 4)).tolist() == [0, 0]


def test_a_long_tensor_is_summed_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(10, 10, generator=torch.Generator().manual_seed(0))
    whole = _compute_checksum(values)
    monkeypatch.setattr("megatron.engine.invariants._SLICE", 7)
    assert torch.equal(_compute_checksum(values), whole)

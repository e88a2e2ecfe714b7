"""A save verifies the state first.

Replicas that differ and numbers that are not finite are never stored. The run ends and names them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_damage import make_format_2, poison
from process_pool import Outcome, PerRank, ProcessPool, pretrain, succeed
from training.runs import Runner

from megatron.checkpoint.folder import list_saved_iterations, read_pointed_iteration
from megatron.checkpoint.manifest import read_index, read_manifest
from megatron.extras.interop.inspection.verification import verify

TP2 = "--tensor-model-parallel-size 2"
DEEPSPEED = "--deepspeed"
SAVES = "--save-interval 2 --keep-latest-checkpoints 1"
NAN = float("nan")


@dataclass(frozen=True)
class Touch:
    """A change to the state of a rank after a step.

    One number is overwritten with `value`. If that is None, its last bit is flipped.
    """

    after: int
    parameter: str
    kind: str
    value: float | None


def engine_class(argv: list[str]) -> Any:
    if DEEPSPEED in argv:
        from megatron.extras.step.deepspeed.deepspeed import DeepSpeedEngine

        return DeepSpeedEngine
    from megatron.engine.native import NativeEngine

    return NativeEngine


@contextmanager
def replaced_method(owner: Any, name: str, method: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, method(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def pretrain_touched(argv: list[str], touch: Touch | None) -> list[int]:
    """Run the main job with a change to this rank's state.

    Return the iterations after which replicas were compared.
    """
    engine = engine_class(argv)
    checks: list[int] = []

    def touching(original: Any) -> Any:
        def train_batch(self: Any, microbatches: Any, *, iteration: int, **options: Any) -> Any:
            result = original(self, microbatches, iteration=iteration, **options)
            if touch is not None and iteration == touch.after:
                shards = self.shards(optimizer=True)
                tensor = next(
                    c.tensor for c in shards if touch.parameter in c.name and c.kind == touch.kind
                )
                last = tensor.view(-1)[-1:]
                if touch.value is None:
                    last.view(torch.int32).bitwise_xor_(1)
                else:
                    last.fill_(touch.value)
            return result

        return train_batch

    def counting(original: Any) -> Any:
        def check_invariants(self: Any, **keywords: Any) -> list[str]:
            checks.append(keywords["iteration"])
            return original(self, **keywords)

        return check_invariants

    with (
        replaced_method(engine, "train_batch", touching),
        replaced_method(engine, "check_invariants", counting),
    ):
        pretrain(argv)
    return checks


def touched(run: Runner, flags: str, ranks: int, who: int, touch: Touch) -> list[Outcome]:
    touches = [touch if rank == who else None for rank in range(ranks)]
    return run.pool.run(ranks, pretrain_touched, run.argv(flags), PerRank(touches))


def get_common_error(outcomes: list[Outcome]) -> str:
    """Return the error, which must be the same on all ranks."""
    assert {outcome.kind for outcome in outcomes} == {"TrainingError"}, [
        outcome.output for outcome in outcomes
    ]
    assert len({outcome.error for outcome in outcomes}) == 1
    return str(outcomes[0].error)


def check_only(folder: Path, iteration: int) -> None:
    """Check that the folder has one valid and finite checkpoint, and no part of another one."""
    assert [entry.name for entry in folder.glob("global_step*")] == [f"global_step{iteration}"]
    assert read_pointed_iteration(folder) == iteration
    found = verify(folder / f"global_step{iteration}")
    assert found.damage == found.not_finite == ()


WEIGHT = "mlp.up.weight"
NOT_FINITE = [
    ("", 1, Touch(4, WEIGHT, "weight", NAN)),
    (f"{TP2} --async-save", 2, Touch(4, WEIGHT, "exp_avg", NAN)),
    (f"{TP2} {DEEPSPEED}", 2, Touch(4, WEIGHT, "exp_avg_sq", float("inf"))),
    ("--exit-interval 3", 1, Touch(3, "norm", "weight", float("-inf"))),  # the save at the end
    pytest.param("--zero-stage 3", 2, Touch(4, WEIGHT, "weight", NAN), marks=pytest.mark.full),
    pytest.param(f"--bf16 {TP2}", 2, Touch(4, WEIGHT, "weight", NAN), marks=pytest.mark.full),
    pytest.param(
        f"{DEEPSPEED} --exit-interval 3 --async-save",
        2,
        Touch(3, WEIGHT, "weight", NAN),
        marks=pytest.mark.full,
    ),
    pytest.param(
        f"{DEEPSPEED} --zero-stage 3 --bf16",
        2,
        Touch(4, WEIGHT, "exp_avg", float("inf")),
        marks=pytest.mark.full,
    ),
    pytest.param(
        "--num-layers 2 --pipeline-model-parallel-size 2 --async-save",
        2,
        Touch(4, WEIGHT, "weight", NAN),
        marks=pytest.mark.full,
    ),
]


@pytest.mark.parametrize(("flags", "ranks", "touch"), NOT_FINITE)
def test_state_that_is_not_finite_is_not_stored(
    flags: str, ranks: int, touch: Touch, run: Runner
) -> None:
    """A number of the last rank that is not finite prevents the save and is named."""
    if DEEPSPEED in flags:
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    flags = f"{SAVES} {flags} --check-invariants-interval 0"
    error = get_common_error(touched(run, flags, ranks, ranks - 1, touch))
    assert f"after iteration {touch.after}" in error
    assert "numbers that are not finite" in error
    assert f"rank {ranks - 1} on " in error
    assert error.count("rank ") == 1
    assert touch.parameter in error.splitlines()[1]
    assert f"({touch.kind}): 1 {'NaN' if touch.value != touch.value else 'infinite'} of" in error
    assert "the newest: global_step2" in error
    check_only(run.folder, 2)
    # The same command resumes from the valid checkpoint.
    assert "successfully loaded checkpoint" in run(flags, ranks)
    assert max(run.losses()) == (3 if "--exit-interval" in flags else 10)


def pretrain_dropping(argv: list[str], first: int) -> None:
    """Run the main job with steps that are dropped from iteration `first` on.

    A weight is infinite during each of these steps.
    """

    def dropping(original: Any) -> Any:
        def train_batch(self: Any, microbatches: Any, *, iteration: int, **options: Any) -> Any:
            weight = self.stages[0].embedding.word.weight.data
            kept = weight.clone()
            if iteration >= first:
                weight.fill_(float("inf"))
            result = original(self, microbatches, iteration=iteration, **options)
            if iteration >= first:
                weight.copy_(kept)
            return result

        return train_batch

    with replaced_method(engine_class(argv), "train_batch", dropping):
        pretrain(argv)


def test_dropped_steps_do_not_replace_good_checkpoints(run: Runner, pool: ProcessPool) -> None:
    flags = "--save-interval 1 --keep-latest-checkpoints 2"
    succeed(pool.run(1, pretrain_dropping, run.argv(flags), 5))
    assert list_saved_iterations(run.folder) == [3, 4, 10]
    states = {i: read_manifest(run.folder / f"global_step{i}").state for i in (3, 4, 10)}
    assert [state["applied_steps"] for state in states.values()] == [3, 4, 4]
    run(f"{flags} --train-iters 12")  # a resume continues the count
    assert list_saved_iterations(run.folder) == [11, 12]


def test_run_resumes_from_a_checkpoint_of_format_2(run: Runner, other: Runner) -> None:
    run("--exit-interval 4")
    make_format_2(run.folder / "global_step4")
    output = run("--save-interval 2 --keep-latest-checkpoints 2")
    assert "successfully loaded checkpoint" in output
    assert list_saved_iterations(run.folder) == [8, 10]
    manifest = read_manifest(run.folder / "global_step10")
    assert manifest.state["applied_steps"] == 6
    assert [entry[3] for entry in manifest.course] == [2, 4]
    other("")
    assert run.losses() == other.losses()


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_checkpoint_with_nan_is_refused_at_the_start(ranks: int, run: Runner) -> None:
    flags = TP2 if ranks > 1 else ""
    run(f"{flags} --exit-interval 2", ranks)
    folder = run.folder / "global_step2"
    tensors = read_index(folder, read_manifest(folder)).tensors
    name = next(key for key in tensors if key.startswith("exp_avg/") and WEIGHT in key)
    poison(folder, name, NAN, 3)
    outcomes = run.outcomes(flags, ranks)
    assert {outcome.kind for outcome in outcomes} == {"CheckpointError"}
    error = str(outcomes[0].error)
    assert "global_step2 holds numbers that are not finite" in error
    assert f"{name.partition('/')[2]} (exp_avg): 3 NaN of" in error
    assert "rollback.py" in error
    # The checkpoint is not renamed, because the operator must decide what to skip.
    assert read_pointed_iteration(run.folder) == 2
    run(f"{flags} --no-load-optim", ranks)  # only the moments are bad
    assert max(run.losses()) == 10


REPLICAS = [
    # The changed replica is the first tensor rank's, which is the one that would be stored.
    (TP2, Touch(3, "input_norm", "weight", None)),
    (f"{TP2} --async-save", Touch(4, "embedding.position", "exp_avg", None)),
    (f"{TP2} {DEEPSPEED}", Touch(4, "input_norm", "weight", None)),
    (f"{TP2} --exit-interval 3", Touch(3, "input_norm", "exp_avg_sq", None)),
    pytest.param(
        f"{TP2} --sequence-parallel --bf16",
        Touch(4, "input_norm", "weight", None),
        marks=pytest.mark.full,
    ),
    pytest.param(
        f"{TP2} {DEEPSPEED} --bf16 --exit-interval 3",
        Touch(3, "norm", "exp_avg", None),
        marks=pytest.mark.full,
    ),
]


@pytest.mark.parametrize(("flags", "touch"), REPLICAS)
def test_replica_that_differs_is_not_stored(flags: str, touch: Touch, run: Runner) -> None:
    """A save finds a replica that differs, although no regular check is due."""
    if DEEPSPEED in flags:
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    error = get_common_error(touched(run, f"{SAVES} {flags}", 2, 0, touch))
    at = 3 if "--exit-interval 3" in flags else 4
    assert f"after iteration {at}, replicated state differs" in error
    assert "after iteration 2 found no difference" in error
    found = error.splitlines()[1]
    assert touch.parameter in found
    assert f"({touch.kind}) differs from the first rank's replica on rank 1 on " in found
    check_only(run.folder, 2)


def test_replica_is_repaired_before_it_is_stored(run: Runner, other: Runner) -> None:
    flags = f"{TP2} --save-interval 2"
    other(flags, 2)
    touch = Touch(4, "input_norm", "weight", 0.5)
    output = succeed(touched(run, f"{flags} --sync-tp-duplicated-parameters", 2, 1, touch))
    assert output.count("overwritten with the first rank's replica after iteration 4") == 1
    assert run.losses() == other.losses()


@pytest.mark.parametrize(
    ("flags", "checks"),
    [
        ("--save-interval 4", [0, 4, 8, 10]),
        (
            "--save-interval 4 --check-invariants-interval 2",
            [0, 2, 4, 6, 8, 10],
        ),  # once an iteration
        ("--save-interval 4 --check-invariants-interval 0", []),  # off, at saves too
    ],
)
def test_replicas_are_compared_at_the_interval_and_at_saves(
    flags: str, checks: list[int], run: Runner
) -> None:
    outcomes = run.pool.run(2, pretrain_touched, run.argv(f"{TP2} {flags}"), None)
    succeed(outcomes)
    assert [outcome.value for outcome in outcomes] == [checks, checks]

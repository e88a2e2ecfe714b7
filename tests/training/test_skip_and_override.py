"""Skipping bad data and changing the learning rate, as operators do it after a rollback."""

import dataclasses

import pytest
from process_pool import ProcessPool, succeed
from runs import Runner

from megatron.training.state import TrainState

BATCH = 4


def train_only(argv: list[str], iterations: list[int]) -> list[float]:
    """Losses of a run built to see just the batches of these iterations: same engine, no skipping in it."""
    import torch

    from megatron.config.cli import load_config
    from megatron.engine.native import NativeEngine
    from megatron.parallel.grid import Grid
    from megatron.parallel.mesh import build_mesh
    from megatron.plan import resolve
    from megatron.training.setup import open_data

    loaded = load_config(argv)
    plan = resolve(loaded.config, 1)
    mesh = build_mesh(Grid(1, 1, 1), torch.device("cpu"))
    sources, engine = open_data(plan, mesh, TrainState()), NativeEngine(plan, mesh)
    assert sources.train is not None
    losses = []
    for iteration in iterations:
        sources.train.load(sources.train.state() | {"consumed_samples": (iteration - 1) * BATCH})
        losses.append(
            engine.train_batch(sources.train.read_batch(BATCH), iteration=iteration, lr=2e-3).loss
        )
    return losses


def test_curve_after_a_skip_is_that_of_a_run_that_never_saw_the_batches(
    run: Runner, pool: ProcessPool
) -> None:
    output = run("--skip-train-iteration-range 4-5 6-7")
    assert output.count("Skipped iterations 4 to 7 due to --skip-train-iteration-range flag.") == 1
    kept = [1, 2, 3, 8, 9, 10]
    losses = run.losses()
    assert sorted(losses) == kept
    outcomes = pool.run(1, train_only, run.argv(""), kept)
    succeed(outcomes)
    assert [losses[i] for i in kept] == outcomes[0].value
    last = run.metrics()[-1]
    assert last["consumed_samples"] == 10 * BATCH  # as in a run that trained them
    assert last["consumed_tokens"] == 10 * BATCH * 32


@pytest.mark.parametrize("again", ["", "--skip-train-iteration-range 4-7"])
@pytest.mark.parametrize("cut", [2, 4, 7, 8])
def test_a_restart_neither_skips_nor_trains_twice(
    run: Runner, other: Runner, cut: int, again: str
) -> None:
    """With and without the flag on the second launch, wherever the first one ended: inside the range that is at its end."""
    other("--skip-train-iteration-range 4-7")
    run(f"--skip-train-iteration-range 4-7 --exit-interval {cut}")
    output = run(again)
    assert ("the checkpoint's --skip-train-iteration-range 4-7 holds on" in output) == (
        cut < 4 and not again
    )
    assert run.losses() == other.losses()


def test_a_range_that_began_in_the_past(run: Runner) -> None:
    run("--exit-interval 5")
    output = run("--skip-train-iteration-range 4-7")
    assert "iterations 4 to 5 of the range 4-7 had been trained" in output
    assert "Skipped iterations 6 to 7 due to --skip-train-iteration-range flag." in output
    assert sorted(run.losses()) == [1, 2, 3, 4, 5, 8, 9, 10]


def test_another_range_replaces_the_checkpoints(run: Runner) -> None:
    run("--skip-train-iteration-range 4-7 --exit-interval 2")
    assert "replaces the checkpoint's 4-7" in run("--skip-train-iteration-range 9-9")
    assert sorted(run.losses()) == [1, 2, 3, 4, 5, 6, 7, 8, 10]


def test_the_learning_rate_does_not_move_in_a_skip(run: Runner) -> None:
    run("--lr-decay-style linear --lr-decay-iters 10 --skip-train-iteration-range 4-7")
    rates = {entry["iteration"]: entry["learning_rate"] for entry in run.metrics()}
    assert rates[3] == pytest.approx(2e-3 * 0.7)
    assert rates[8] == pytest.approx(2e-3 * 0.6)


def test_saves_and_exits_that_fall_due_inside_happen_at_the_end(run: Runner) -> None:
    output = run("--skip-train-iteration-range 4-7 --save-interval 5 --exit-interval 6")
    assert "successfully saved checkpoint at iteration       7" in output
    assert "exiting program at iteration 7" in output


def test_a_changed_rate_is_refused_and_names_the_flag(run: Runner) -> None:
    run("--exit-interval 4")
    error = run.error("--lr 1e-3 --min-lr 1e-5")
    assert "--override-lr-scheduler" in error
    assert "--use-checkpoint-lr-scheduler" in error
    assert "--lr: 0.001 here, 0.002 in the checkpoint" in error
    assert "--min-lr: 1e-05 here, 0.0 in the checkpoint" in error
    assert sorted(run.losses()) == [1, 2, 3, 4]  # nothing was trained


def test_override_follows_the_new_curve_from_its_first_step(run: Runner) -> None:
    run("--lr-decay-style linear --lr-decay-iters 10 --exit-interval 4")
    run("--lr 4e-3 --lr-decay-style linear --lr-decay-iters 20 --override-lr-scheduler")
    rates = {entry["iteration"]: entry["learning_rate"] for entry in run.metrics()}
    assert rates[4] == pytest.approx(2e-3 * 0.6)
    assert rates[5] == pytest.approx(4e-3 * 0.75)
    # From then on the new schedule is the checkpoint's.
    run("--lr 4e-3 --lr-decay-style linear --lr-decay-iters 20 --train-iters 11")
    assert {e["iteration"]: e["learning_rate"] for e in run.metrics()}[11] == pytest.approx(
        4e-3 * 0.45
    )


def test_the_checkpoints_schedule_can_be_kept(run: Runner) -> None:
    run("--lr-decay-style linear --lr-decay-iters 10 --exit-interval 4")
    run("--lr 4e-3 --use-checkpoint-lr-scheduler")
    rates = {entry["iteration"]: entry["learning_rate"] for entry in run.metrics()}
    assert rates[5] == pytest.approx(2e-3 * 0.5)


def test_the_state_is_whole_in_json() -> None:
    state = TrainState(iteration=3, consumed_samples=5, data={"a": [1]})
    assert TrainState.from_json(dataclasses.asdict(state)) == state

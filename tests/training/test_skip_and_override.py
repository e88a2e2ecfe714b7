"""Skipping bad data and changing the learning rate, as operators do after a rollback."""

import dataclasses
import math
from unittest import mock

import pytest
from process_pool import ProcessPool, pretrain, succeed
from training.runs import Runner

from megatron.extras.watch.watchdog.stopwatch import Stopwatch
from megatron.parallel.rank_progress import FIRST_SECONDS, RankProgress
from megatron.run.state import TrainState

BATCH = 4


def train_only(argv: list[str], iterations: list[int]) -> list[float]:
    """Return the losses of a run that sees only the batches of these iterations.

    The engine is the same, but nothing is skipped in it.
    """
    import torch

    from megatron.engine.native import NativeEngine
    from megatron.extras.interop.translators.translator import load_config
    from megatron.parallel.grid import Grid
    from megatron.parallel.mesh import build_mesh
    from megatron.plan.resolve import resolve
    from megatron.run.start.open_data import open_data

    loaded = load_config(argv)
    plan = resolve(loaded.config, 1)
    mesh = build_mesh(Grid(1, 1, 1), torch.device("cpu"))
    sources = open_data(plan, mesh, TrainState())
    engine = NativeEngine(plan, mesh)
    assert sources.train is not None
    losses = []
    for iteration in iterations:
        sources.train.load(sources.train.state() | {"consumed_samples": (iteration - 1) * BATCH})
        losses.append(
            engine.train_batch(sources.train.read_batch(BATCH), iteration=iteration, lr=2e-3).loss
        )
    return losses


def test_curve_after_a_skip_equals_that_of_a_run_without_the_batches(
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


def list_limits(argv: list[str]) -> list[tuple[int, float]]:
    """Return the number of each step, and its limit with --hang-timeout auto."""
    limits = []
    begin = RankProgress.begin_step

    def record(progress: RankProgress, kind: str, number: int, size: int = 0) -> None:
        begin(progress, kind, number, size)
        limits.append((number, Stopwatch(progress, None, 1.0).limit))

    with mock.patch.object(RankProgress, "begin_step", record):
        pretrain(argv)
    return limits


def test_the_first_step_after_a_skip_may_take_long(run: Runner, pool: ProcessPool) -> None:
    flags = "--skip-train-iteration-range 1-2 5-6 --exit-interval 8"
    outcomes = pool.run(1, list_limits, run.argv(flags))
    succeed(outcomes)
    # Iterations 1 and 2, and 5 and 6, are one step each.
    numbers, limits = zip(*outcomes[0].value, strict=True)
    assert numbers == (1, 3, 4, 5, 7, 8)
    assert [limit == FIRST_SECONDS for limit in limits] == [True, True, False, False, False, False]


@pytest.mark.parametrize("again", ["", "--skip-train-iteration-range 4-7"])
@pytest.mark.parametrize("stop", [2, 4, 7, 8])
def test_restart_neither_skips_nor_trains_twice(
    run: Runner, other: Runner, stop: int, again: str
) -> None:
    """A restart neither skips nor trains an iteration twice, with or without repeating the flag.

    A first launch that would stop inside the range stops at its end.
    """
    other("--skip-train-iteration-range 4-7")
    run(f"--skip-train-iteration-range 4-7 --exit-interval {stop}")
    output = run(again)
    assert ("the checkpoint's --skip-train-iteration-range 4-7 still applies" in output) == (
        stop < 4 and not again
    )
    assert run.losses() == other.losses()


def test_run_that_ends_inside_a_range_skips_the_rest_later(run: Runner, other: Runner) -> None:
    flags = "--skip-train-iteration-range 4-8"
    output = run(f"{flags} --train-iters 6")
    assert "Skipped iterations 4 to 6 due to" in output
    assert "training is complete at iteration 6" in output
    assert (run.folder / "latest").read_text() == "global_step6"
    later = run(flags)
    assert "Skipped iterations 7 to 8 due to" in later
    # The part that the first launch passed was skipped, so nothing is to be undone.
    assert "were trained" not in later
    other(flags)
    assert run.losses() == other.losses()
    assert run.metrics()[-1]["consumed_samples"] == other.metrics()[-1]["consumed_samples"]


def test_range_that_starts_in_the_past_is_skipped_from_here_on(run: Runner) -> None:
    run("--exit-interval 5")
    output = run("--skip-train-iteration-range 4-7")
    assert "iterations 4 to 5 of the range 4-7 were trained" in output
    assert "Skipped iterations 6 to 7 due to --skip-train-iteration-range flag." in output
    assert sorted(run.losses()) == [1, 2, 3, 4, 5, 8, 9, 10]


def test_new_range_replaces_the_checkpoints(run: Runner) -> None:
    run("--skip-train-iteration-range 4-7 --exit-interval 2")
    assert "replaces the checkpoint's 4-7" in run("--skip-train-iteration-range 9-9")
    assert sorted(run.losses()) == [1, 2, 3, 4, 5, 6, 7, 8, 10]


def test_learning_rate_does_not_advance_in_a_skipped_range(run: Runner) -> None:
    run("--lr-decay-style linear --lr-decay-iters 10 --skip-train-iteration-range 4-7")
    rates = {entry["iteration"]: entry["learning_rate"] for entry in run.metrics()}
    assert rates[3] == pytest.approx(2e-3 * 0.7)
    assert rates[8] == pytest.approx(2e-3 * 0.6)


def test_saves_and_exits_due_in_a_skipped_range_happen_at_its_end(run: Runner) -> None:
    output = run("--skip-train-iteration-range 4-7 --save-interval 5 --exit-interval 6")
    assert "successfully saved checkpoint at iteration       7" in output
    assert "exiting program at iteration 7" in output


def test_changed_learning_rate_is_refused_and_the_flags_are_named(run: Runner) -> None:
    run("--exit-interval 4")
    error = run.error("--lr 1e-3 --min-lr 1e-5")
    assert "--override-lr-scheduler" in error
    assert "--use-checkpoint-lr-scheduler" in error
    assert "--lr: 0.001 here, 0.002 in the checkpoint" in error
    assert "--min-lr: 1e-05 here, 0.0 in the checkpoint" in error
    assert sorted(run.losses()) == [1, 2, 3, 4]  # nothing was trained


def test_override_follows_the_new_curve_from_its_first_step(run: Runner) -> None:
    run("--lr-decay-style linear --lr-decay-iters 10 --exit-interval 4")
    output = run("--lr 4e-3 --lr-decay-style linear --lr-decay-iters 20 --override-lr-scheduler")
    assert "--override-lr-scheduler changes the learning rate" in output
    assert "--lr: 0.004 here, 0.002 in the checkpoint" in output
    rates = {entry["iteration"]: entry["learning_rate"] for entry in run.metrics()}
    assert rates[4] == pytest.approx(2e-3 * 0.6)
    assert rates[5] == pytest.approx(4e-3 * 0.75)
    # The checkpoint has the new schedule now, so no flag is needed.
    run("--lr 4e-3 --lr-decay-style linear --lr-decay-iters 20 --train-iters 11")
    assert {e["iteration"]: e["learning_rate"] for e in run.metrics()}[11] == pytest.approx(
        4e-3 * 0.45
    )


def test_a_cosine_can_be_extended_in_its_middle(run: Runner) -> None:
    """The same flags as those of `examples/published/olmo3-7b.yaml`."""
    floor = 2e-4
    run(
        f"--lr-decay-style cosine --min-lr {floor} --lr-warmup-iters 2 --lr-decay-iters 10 "
        "--exit-interval 6"
    )
    middle = floor + (2e-3 - floor) / 2
    run(
        f"--lr {middle} --min-lr {floor} --lr-decay-style half-cosine --lr-warmup-iters 6 "
        "--lr-decay-iters 14 --override-lr-scheduler --exit-interval None"
    )
    rates = {entry["iteration"]: entry["learning_rate"] for entry in run.metrics()}
    quarter = floor + (2e-3 - floor) * (1 + math.cos(math.pi / 4)) / 2
    assert [rates[i] for i in (2, 4, 6)] == pytest.approx([2e-3, quarter, middle])
    # The second half lasts 8 iterations and not 4.
    extended = [
        floor + (2e-3 - floor) * (1 + math.cos(math.pi / 2 * (1 + (i - 6) / 8))) / 2
        for i in (7, 8, 9, 10)
    ]
    assert [rates[i] for i in (7, 8, 9, 10)] == pytest.approx(extended)


def test_a_warm_up_from_above_0_is_part_of_the_schedule(run: Runner) -> None:
    decay = "--lr-decay-style inverse-square-root --lr-warmup-iters 4"
    run(f"{decay} --lr-warmup-init 4e-4 --exit-interval 2")
    assert "--lr-warmup-init: 0.0008 here, 0.0004 in the checkpoint" in run.error(
        f"{decay} --lr-warmup-init 8e-4"
    )
    run("--use-checkpoint-lr-scheduler")
    rates = {entry["iteration"]: entry["learning_rate"] for entry in run.metrics()}
    # An entry has the rate after its iteration.
    assert [rates[i] for i in (1, 2, 3, 4)] == pytest.approx([8e-4, 12e-4, 16e-4, 2e-3])
    assert rates[9] == pytest.approx(2e-3 * (4 / 9) ** 0.5)


def test_a_decoupled_rate_is_part_of_the_schedule(run: Runner) -> None:
    decay = "--lr-decay-style linear --lr-decay-iters 10"
    run(f"{decay} --decoupled-lr 8e-3 --decoupled-min-lr 1e-3 --exit-interval 3")
    assert "--decoupled-lr: None here, 0.008 in the checkpoint" in run.error(decay)
    # Its groups of parameters come from the checkpoint's schedule, and not from the command line.
    output = run(f"{decay} --use-checkpoint-lr-scheduler --exit-interval 6")
    assert "keeps the checkpoint's: --decoupled-lr" in output
    output = run(f"{decay} --decoupled-lr 6e-3 --override-lr-scheduler")
    assert "--decoupled-lr: 0.006 here, 0.008 in the checkpoint" in output
    assert "changed since the checkpoint" not in output
    # An entry has the rates after its iteration.
    rates = {e["iteration"]: e["decoupled_learning_rate"] for e in run.metrics()}
    expected = {2: 1e-3 + 0.8 * 7e-3, 5: 1e-3 + 0.5 * 7e-3, 8: 0.2 * 6e-3}
    assert {at: rates[at] for at in expected} == pytest.approx(expected)
    assert [e["learning_rate"] for e in run.metrics()][1] == pytest.approx(2e-3 * 0.8)


def test_checkpoints_schedule_can_be_kept(run: Runner) -> None:
    run("--lr-decay-style linear --lr-decay-iters 10 --exit-interval 4")
    run("--lr 4e-3 --use-checkpoint-lr-scheduler")
    rates = {entry["iteration"]: entry["learning_rate"] for entry in run.metrics()}
    assert rates[5] == pytest.approx(2e-3 * 0.5)


def test_state_survives_json() -> None:
    state = TrainState(iteration=3, consumed_samples=5, data={"a": [1]})
    assert TrainState.from_json(dataclasses.asdict(state)) == state

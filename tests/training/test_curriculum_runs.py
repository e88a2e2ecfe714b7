"""Curriculum learning in real runs.

These tests cover lengths, tokens, the end of training, learning rate, resume, skipped ranges,
evaluation and layouts. The curriculum grows from 8 to 32 tokens over 5 iterations in steps of 8.
The lengths are 8, 16, 16, 24, 32, and 32 from then on.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from process_pool import PerRank, ProcessPool, pretrain, succeed
from training.runs import Runner

from megatron.extras.interop.translators.translator import load_config
from megatron.observe.log_line import parse_log_line
from megatron.plan.resolve import resolve
from megatron.run.report import Reporter
from megatron.run.state import TrainState

BATCH = 4
LENGTHS = [8, 16, 16, 24, 32, 32, 32, 32]
GROWING = (
    "--curriculum-schedule-type fixed_linear --curriculum-min-difficulty 8 "
    "--curriculum-total-step 5 --train-iters 20"
)
TOKENS = BATCH * sum(LENGTHS)
CURRICULUM = f"{GROWING} --train-tokens {TOKENS} --lr-decay-tokens {TOKENS}"
DECAY = "--lr-decay-style linear --lr-warmup-iters 2"


def curve(run: Runner) -> list[tuple[float, float]]:
    """Return (loss, gradient norm) of each iteration."""
    return [(entry["lm_loss"], entry["grad_norm"]) for entry in run.metrics() if "lm_loss" in entry]


def lengths(run: Runner) -> dict[int, int]:
    return {entry["iteration"]: entry["curriculum_seqlen"] for entry in run.metrics()}


def test_lengths_and_tokens_until_the_tokens_are_trained(run: Runner) -> None:
    output = run(f"{CURRICULUM} --tensorboard-dir {run.folder}/tensorboard")
    lines = [entry for entry in map(parse_log_line, output.splitlines()) if entry is not None]
    assert [entry["curriculum_seqlen"] for entry in lines] == LENGTHS
    assert [entry["consumed_tokens"] for entry in lines] == [
        BATCH * sum(LENGTHS[: i + 1]) for i in range(len(LENGTHS))
    ]
    assert [entry["consumed_samples"] for entry in lines] == [
        BATCH * (i + 1) for i in range(len(LENGTHS))
    ]
    assert list(lengths(run).values()) == LENGTHS
    # The log line has --train-iters, as in Megatron, although the tokens ended the run.
    assert {entry["train_iters"] for entry in lines} == {20}
    # Operations grow faster than the length, because of attention.
    flops = [entry["gigaflops_without_embeddings"] for entry in run.metrics()]
    assert flops[4] - flops[3] > 4 * flops[0]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.folder / "tensorboard"))
    events.Reload()
    assert [(point.step, point.value) for point in events.Scalars("curriculum_seqlen")] == list(
        enumerate(LENGTHS, 1)
    )


def compute_losses_of_truncated_samples(argv: list[str], lengths: list[int]) -> list[float]:
    """Return the losses of an engine on full samples that are truncated here."""
    import dataclasses

    import torch

    from megatron.engine.native import NativeEngine
    from megatron.parallel.grid import Grid
    from megatron.parallel.mesh import build_mesh
    from megatron.run.start.open_data import open_data
    from megatron.run.state import TrainState

    plan = resolve(load_config(argv).config, 1)
    mesh = build_mesh(Grid(1, 1, 1), torch.device("cpu"))
    sources = open_data(plan, mesh, TrainState())
    engine = NativeEngine(plan, mesh)
    assert sources.train is not None
    losses = []
    for iteration, n in enumerate(lengths, 1):
        truncated = [
            dataclasses.replace(
                m, tokens=m.tokens[:, :n].contiguous(), labels=m.labels[:, :n].contiguous()
            )
            for m in sources.train.read_batch(BATCH)
        ]
        losses.append(engine.train_batch(truncated, iteration=iteration, lr=2e-3).loss)
    return losses


def test_samples_are_truncated_to_their_first_tokens(run: Runner, pool: ProcessPool) -> None:
    run(CURRICULUM)
    outcomes = pool.run(1, compute_losses_of_truncated_samples, run.argv(""), LENGTHS)
    succeed(outcomes)
    assert [loss for loss, _ in curve(run)] == outcomes[0].value


def test_log_lines_without_a_curriculum_have_the_mean_of_their_interval(run: Runner) -> None:
    output = run("--train-iters 5 --log-interval 2")
    lines = [entry for entry in map(parse_log_line, output.splitlines()) if entry is not None]
    assert [entry["iteration"] for entry in lines] == [2, 4]
    losses = run.losses()
    for entry in lines:
        last = int(entry["iteration"])
        assert entry["lm_loss"] == pytest.approx((losses[last - 1] + losses[last]) / 2, rel=1e-6)
    assert "curriculum seqlen" not in output
    assert lengths(run) == dict.fromkeys(range(1, 6))


def test_the_plan_forecasts_the_run(run: Runner) -> None:
    run(f"{CURRICULUM} {DECAY}")
    plan = resolve(load_config(run.argv(f"{CURRICULUM} {DECAY}")).config, 1)
    forecast = plan.forecast()
    assert forecast.find_iteration_reaching_tokens(TOKENS, plan.train_iters) == len(LENGTHS)
    for entry, progress in zip(
        run.metrics(), forecast.predict(range(1, len(LENGTHS) + 1)), strict=True
    ):
        assert entry["consumed_tokens"] == progress.consumed_tokens
        assert entry["curriculum_seqlen"] == progress.seq_length
        assert entry["learning_rate"] == progress.lr


def test_the_remaining_time_counts_iterations_of_the_present_length() -> None:
    plan = SimpleNamespace(curriculum=object(), train_seconds=None)
    reporter: Any = SimpleNamespace(_plan=plan)
    step: Any = SimpleNamespace(batch_size=4, seq_length=16, train_iters=20)
    # Five iterations of 64 tokens.
    assert Reporter._estimate_rest(reporter, TrainState(iteration=15), step, 32.0) == 10.0


def test_learning_rate_decays_by_tokens_from_the_end_of_warm_up(run: Runner) -> None:
    run(f"{CURRICULUM} {DECAY}")
    rates = [entry["learning_rate"] for entry in run.metrics()]
    warmup_tokens = BATCH * (8 + 16)
    decay = [
        2e-3 * (1 - (BATCH * sum(LENGTHS[:i]) - warmup_tokens) / (TOKENS - warmup_tokens))
        for i in range(2, 9)
    ]
    assert rates[0] == pytest.approx(1e-3)  # half of the warm-up, which counts samples
    assert rates[1:] == pytest.approx(decay)
    assert rates[-1] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("stop", [2, 3, 6])
def test_resumed_run_equals_the_uninterrupted_one(run: Runner, other: Runner, stop: int) -> None:
    dropout = "--hidden-dropout 0.1 --attention-dropout 0.1"
    other(f"{CURRICULUM} {DECAY} {dropout}")
    run(f"{CURRICULUM} {DECAY} {dropout} --exit-interval {stop}")
    output = run(f"{CURRICULUM} {DECAY} {dropout}")
    assert "successfully loaded checkpoint" in output
    assert curve(run) == curve(other)
    assert lengths(run) == lengths(other) == dict(enumerate(LENGTHS, 1))
    assert [e["learning_rate"] for e in run.metrics()] == [
        e["learning_rate"] for e in other.metrics()
    ]


def test_finished_run_trains_no_further_iterations(run: Runner) -> None:
    run(CURRICULUM)
    run(CURRICULUM)
    assert run.losses_of_training() == list(range(1, 9))


def test_skipped_range_counts_its_own_lengths(run: Runner) -> None:
    """A skipped range advances the tokens by its own lengths, which are 16, 24 and 32 here."""
    output = run(f"{CURRICULUM} {DECAY} --skip-train-iteration-range 3-5")
    assert "Skipped iterations 3 to 5 due to --skip-train-iteration-range flag." in output
    entries = {entry["iteration"]: entry for entry in run.metrics()}
    assert sorted(entries) == [1, 2, 6, 7, 8]
    assert entries[6]["consumed_tokens"] == BATCH * sum(LENGTHS[:6])
    assert entries[6]["curriculum_seqlen"] == 32
    # The rate's tokens are those that were trained.
    trained = BATCH * (8 + 16 + 32)
    warmup_tokens = BATCH * (8 + 16)
    assert entries[6]["learning_rate"] == pytest.approx(
        2e-3 * (1 - (trained - warmup_tokens) / (TOKENS - warmup_tokens))
    )


def test_tokens_may_end_inside_a_skipped_range(run: Runner) -> None:
    output = run(f"{CURRICULUM} --skip-train-iteration-range 7-12")
    assert "Skipped iterations 7 to 8 due to" in output
    assert run.losses_of_training() == [1, 2, 3, 4, 5, 6]


EVALUATED = "--eval-interval 2 --eval-iters 4 --split 80,20,0"


def evaluate(run: Runner, flags: str) -> float:
    """Return the validation loss of the weights in the run's folder.

    The counters start at zero, so this uses the first validation samples.
    """
    run(f"{flags} {EVALUATED} --eval-only --finetune")
    return {
        entry["iteration"]: entry["validation"]["validation"]
        for entry in run.metrics()
        if "validation" in entry
    }[0]


def test_evaluation_uses_the_full_sequence_length(run: Runner) -> None:
    """Evaluation uses the full sequence length, whatever the curriculum's current length is.

    The same weights are evaluated in iteration 2 of a run at 16 tokens, before the first iteration
    at 8 tokens, and without a curriculum.
    """
    run(f"{CURRICULUM} {EVALUATED} --exit-interval 2")
    inside = run.metrics()[-1]
    assert inside["curriculum_seqlen"] == 16
    losses = [
        inside["validation"]["validation"],
        evaluate(run, CURRICULUM),
        evaluate(run, "--train-iters 20"),
    ]
    assert losses[0] == losses[1]
    assert losses[0] == losses[2]
    assert (
        evaluate(run, "--train-iters 20 --seq-length 16 --max-position-embeddings 32") != losses[0]
    )


def test_root_and_discrete_schedules(run: Runner, other: Runner) -> None:
    tokens = "--train-tokens 400 --lr-decay-tokens 400 --train-iters 20"
    run(
        "--curriculum-schedule-type fixed_discrete --curriculum-difficulties 8 32 16 "
        f"--curriculum-max-steps 2 3 {tokens}"
    )
    # An iteration has 64 tokens at length 16 and 128 at length 32.
    assert list(lengths(run).values()) == [8, 8, 32, 16, 16, 16, 16]
    other(
        "--curriculum-schedule-type fixed_root --curriculum-min-difficulty 8 "
        "--curriculum-total-step 4 --curriculum-root-degree 2 "
        f"--curriculum-max-difficulty 24 {tokens}"
    )
    # The length is 8 + 16 x (1/2, 0.71, 0.87, 1), in steps of 8.
    assert list(lengths(other).values()) == [16, 16, 16, 24, 24, 24]


LAYOUTS = {
    "tp2-sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "dp2": (2, "--zero-stage 1"),
    "tp2-dp2-zero3": (4, "--tensor-model-parallel-size 2 --zero-stage 3"),
}


@pytest.fixture(scope="module")
def single(pool: ProcessPool, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    alone = Runner(pool, corpus, tmp_path_factory.mktemp("single"))
    alone(CURRICULUM)
    return alone


@pytest.mark.parametrize(
    "layout",
    [
        # The largest layout has all that the others have.
        pytest.param(layout, marks=() if layout == "tp2-dp2-zero3" else pytest.mark.full)
        for layout in LAYOUTS
    ],
)
def test_layouts_train_like_one_process(run: Runner, single: Runner, layout: str) -> None:
    ranks, flags = LAYOUTS[layout]
    run(f"{CURRICULUM} {flags}", ranks=ranks)
    assert lengths(run) == lengths(single)
    for ours, theirs in zip(curve(run), curve(single), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_changed_curriculum_is_refused_on_resume(run: Runner) -> None:
    run(f"{CURRICULUM} --exit-interval 3")
    longer = CURRICULUM.replace("--curriculum-total-step 5", "--curriculum-total-step 8")
    error = run.error(longer)
    assert error.startswith("ConfigError: ")
    assert "curriculum differs from the checkpoint's" in error
    assert "over 8 iterations in steps of 8 here" in error
    assert "over 5 iterations in steps of 8 in the checkpoint" in error
    assert "iteration 4 has sequences of 16 tokens here and of 24 in the checkpoint" in error
    assert "--override-lr-scheduler" in error
    assert "--use-checkpoint-lr-scheduler" in error
    gone = run.error(f"--train-iters 20 --train-tokens {TOKENS} --lr-decay-tokens {TOKENS}")
    assert "none here, fixed_linear" in gone
    assert "iteration 4 has sequences of 32 tokens here and of 24 in the checkpoint" in gone
    assert run.losses_of_training() == [1, 2, 3]


def test_override_applies_a_changed_curriculum(run: Runner) -> None:
    run(f"{CURRICULUM} --exit-interval 3")
    longer = CURRICULUM.replace("--curriculum-total-step 5", "--curriculum-total-step 8")
    assert "--override-lr-scheduler changes the curriculum: fixed_linear" in run(
        f"{longer} --override-lr-scheduler --exit-interval 5"
    )
    assert list(lengths(run).values()) == [8, 16, 16, 16, 16]
    run(longer)  # the override is in the checkpoint by now
    assert lengths(run)[8] == 32


def test_checkpoints_curriculum_can_be_kept(run: Runner, other: Runner) -> None:
    other(CURRICULUM)
    run(f"{CURRICULUM} --exit-interval 3")
    output = run(
        f"--train-iters 20 --train-tokens {TOKENS} --lr-decay-tokens {TOKENS} "
        "--use-checkpoint-lr-scheduler --exit-interval 4"
    )
    assert "--use-checkpoint-lr-scheduler keeps the checkpoint's" in output
    run(CURRICULUM)  # it was saved with the run
    assert curve(run) == curve(other)


def test_completed_curriculum_may_be_left_out(run: Runner, other: Runner) -> None:
    other(CURRICULUM)
    run(f"{CURRICULUM} --exit-interval 6")
    run(f"--train-iters 20 --train-tokens {TOKENS} --lr-decay-tokens {TOKENS}")
    assert curve(run) == curve(other)


def test_curriculum_can_be_added_on_resume(run: Runner) -> None:
    run("--exit-interval 2")
    assert "none in the checkpoint" in run.error(f"{CURRICULUM} --lr-decay-style linear")
    run(f"{CURRICULUM} --override-lr-scheduler")
    assert list(lengths(run).values())[:4] == [None, None, 16, 24]


def test_ranks_must_have_the_same_curriculum(run: Runner, pool: ProcessPool) -> None:
    other = CURRICULUM.replace("--curriculum-total-step 5", "--curriculum-total-step 8")
    outcomes = pool.run(2, pretrain, PerRank([run.argv(CURRICULUM), run.argv(other)]))
    assert {outcome.kind for outcome in outcomes} == {"LayoutError"}
    assert "curriculum.curriculum_total_step: 5 and 8" in str(outcomes[0].error)


def test_yaml_file_gives_the_same_run(
    run: Runner, other: Runner, tmp_path: Path, pool: ProcessPool
) -> None:
    run(CURRICULUM)
    file = tmp_path / "run.yaml"
    file.write_text(
        "curriculum:\n  curriculum_schedule_type: fixed_linear\n"
        "  curriculum_min_difficulty: 8\n  curriculum_total_step: 5\n"
    )
    other(f"--config {file} --train-iters 20 --train-tokens {TOKENS} --lr-decay-tokens {TOKENS}")
    assert curve(run) == curve(other)


def test_curriculum_with_batch_size_ramp_is_refused(run: Runner) -> None:
    assert "leave out --rampup-batch-size" in run.error(f"{CURRICULUM} --rampup-batch-size 2 2 8")
    assert "give --train-tokens and --lr-decay-tokens" in run.error(GROWING)

"""fp16 in real runs.

Losses are close to fp32, and an overflow drops the step on all ranks. These tests also cover the
search for a loss scale, and a residual stream in fp32.
"""

import pytest
from process_pool import ProcessPool, pretrain, succeed
from training.runs import Runner

from megatron.observe.log_line import parse_log_line

LAYOUTS = {
    "one": (1, ""),
    "tp2": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": (2, "--pipeline-model-parallel-size 2 --micro-batch-size 1"),
    "dp2": (2, "--zero-stage 1"),
}
SIZES = "--num-layers 4 --train-iters 8"
FP16 = f"{SIZES} --fp16 --initial-loss-scale 65536"


@pytest.fixture(scope="module")
def in_fp32(
    pool: ProcessPool, corpus: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, float]:
    """Return the losses of one process in fp32."""
    alone = Runner(pool, corpus, tmp_path_factory.mktemp("fp32"))
    alone(SIZES)
    return alone.losses()


def compute_distance(losses: dict[int, float], expected: dict[int, float]) -> float:
    """Return the largest relative difference."""
    assert losses.keys() == expected.keys()
    return max(abs(losses[i] - expected[i]) / expected[i] for i in expected)


def get_metric(run: Runner, key: str) -> list[float]:
    return [entry[key] for entry in run.metrics()]


@pytest.mark.parametrize(
    "layout", [pytest.param("one", marks=pytest.mark.full), "tp2", "pp2", "dp2"]
)
def test_losses_are_within_a_percent_of_fp32(
    run: Runner, in_fp32: dict[int, float], layout: str
) -> None:
    ranks, flags = LAYOUTS[layout]
    run(f"{FP16} {flags}", ranks)
    assert 0 < compute_distance(run.losses(), in_fp32) < 0.01
    assert get_metric(run, "loss_scale") == [65536.0] * 8


OVERFLOW_AT = 3
DECAY = "--lr-decay-style linear --lr-decay-iters 9"


def pretrain_with_overflow(argv: list[str], victim: int) -> list[bool]:
    """Put an infinity into one gradient of rank `victim` in the third step of a run.

    It is the gradient of a norm. All tensor-parallel ranks have this gradient, and only that of the
    first one counts in the gradient norm.

    Returns:
        For each step, whether it changed the weights or the moments.
    """
    import os
    from unittest import mock

    import torch
    from torch.distributed.tensor import DTensor

    from megatron.engine.native import NativeEngine

    changed: list[bool] = []
    original = NativeEngine.train_batch

    def get_local(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def copy_state(engine: NativeEngine) -> list[torch.Tensor]:
        masters = [shard.tensor for shard in engine.shards(optimizer=True)]
        weights = [get_local(p.detach()) for stage in engine.stages for p in stage.parameters()]
        return [tensor.clone() for tensor in (*masters, *weights)]

    def train_batch(engine: NativeEngine, *arguments, **keywords):
        run_passes = engine.runner.run

        def run_and_disturb(*inputs, **options):
            loss = run_passes(*inputs, **options)
            if len(changed) + 1 == OVERFLOW_AT and int(os.environ["RANK"]) == victim:
                norm = next(
                    p for name, p in engine.stages[0].named_parameters() if "norm.weight" in name
                )
                assert norm.grad is not None
                get_local(norm.grad).view(-1)[0] = torch.inf
            return loss

        before = copy_state(engine)
        with mock.patch.object(engine.runner, "run", run_and_disturb):
            result = original(engine, *arguments, **keywords)
        changed.append(not all(map(torch.equal, before, copy_state(engine))))
        return result

    with mock.patch.object(NativeEngine, "train_batch", train_batch):
        pretrain(argv)
    return changed


@pytest.mark.parametrize(
    ("layout", "victim"),
    [
        # Only the first tensor-parallel rank's gradient of a norm counts.
        ("tp2", 1),
        # The last stage computes the norm.
        ("pp2", 0),
        ("dp2", 1),
        *(
            pytest.param(*each, marks=pytest.mark.full)
            for each in (("tp2", 0), ("pp2", 1), ("dp2", 0))
        ),
    ],
)
def test_overflow_on_one_rank_drops_the_step_on_all(
    run: Runner, other: Runner, layout: str, victim: int
) -> None:
    ranks, flags = LAYOUTS[layout]
    flags = f"{FP16} {DECAY} {flags} --hysteresis 1"
    outcomes = run.pool.run(ranks, pretrain_with_overflow, run.argv(flags), victim)
    output = succeed(outcomes)
    for outcome in outcomes:
        assert outcome.value == [step != OVERFLOW_AT for step in range(1, 9)]
    lines = [entry for entry in map(parse_log_line, output.splitlines()) if entry is not None]
    assert [line["skipped_iterations"] for line in lines] == [0, 0, 1, 0, 0, 0, 0, 0]
    assert [line["nan_iterations"] for line in lines] == [0] * 8
    assert [line["loss_scale"] for line in lines] == [65536.0] * 3 + [32768.0] * 5
    assert [line["consumed_samples"] for line in lines] == [4 * i for i in range(1, 9)]
    other(flags, ranks)
    # The logged rate is that of the next step. The dropped step did not advance it.
    undisturbed = get_metric(other, "learning_rate")
    assert get_metric(run, "learning_rate") == [*undisturbed[:2], *undisturbed[1:-1]]
    assert list(run.losses().values())[:2] == list(other.losses().values())[:2]
    assert run.losses()[4] != other.losses()[4]


COPIES = "--sharding-strategy hsdp --hsdp-shard-size 2 --micro-batch-size 1"


def pretrain_with_overflowing_copy(argv: list[str], victims: tuple[int, ...]) -> list[bool]:
    """Train, with infinite gradients from the backward pass of some ranks in the third step.

    Returns:
        For each step, whether it changed the masters or the moments of this rank.
    """
    import os
    from unittest import mock

    import torch

    from megatron.engine.native import NativeEngine

    changed: list[bool] = []
    original = NativeEngine.train_batch

    def train_batch(engine: NativeEngine, *arguments, **keywords):
        run_passes = engine.runner.run

        def run_and_overflow(inputs, scale, **options):
            if len(changed) + 1 == OVERFLOW_AT and int(os.environ["RANK"]) in victims:
                scale = torch.inf
            return run_passes(inputs, scale, **options)

        states = [shard.tensor for shard in engine.shards(optimizer=True)]
        before = [state.clone() for state in states]
        with mock.patch.object(engine.runner, "run", run_and_overflow):
            result = original(engine, *arguments, **keywords)
        after = [shard.tensor for shard in engine.shards(optimizer=True)]
        changed.append(not all(map(torch.equal, before, after)))
        return result

    with mock.patch.object(NativeEngine, "train_batch", train_batch):
        pretrain(argv)
    return changed


@pytest.mark.parametrize(
    "victims", [(2,), *(pytest.param(each, marks=pytest.mark.full) for each in ((0, 1), (2, 3)))]
)
def test_overflow_on_one_copy_of_the_model_drops_the_step_on_all(
    run: Runner, victims: tuple[int, ...]
) -> None:
    flags = f"{FP16} --hysteresis 1 --check-invariants-interval 1 {COPIES}"
    outcomes = run.pool.run(4, pretrain_with_overflowing_copy, run.argv(flags), victims)
    succeed(outcomes)
    for outcome in outcomes:
        assert outcome.value == [step != OVERFLOW_AT for step in range(1, 9)]
    assert get_metric(run, "loss_scale") == [65536.0] * 3 + [32768.0] * 5


def test_search_for_a_scale_starts_at_2_to_the_32(run: Runner) -> None:
    output = run("--fp16 --train-iters 40 --loss-scale-window 1000")
    scales = get_metric(run, "loss_scale")
    dropped = sum(entry["skipped_iterations"] for entry in run.metrics())
    assert dropped > 10, "the search must exceed --max-nan-iterations without ending the run"
    assert scales[:3] == [
        2.0**32,
        2.0**32,
        2.0**31,
    ]  # the hysteresis of 2 tolerates the first overflow
    assert scales[-1] == 2.0 ** (32 - dropped + 1)
    assert scales == sorted(scales, reverse=True)
    losses = list(run.losses().values())[dropped:]
    assert losses[-1] < losses[0] - 0.1
    assert "loss scale dynamic, now 4294967296" in output


def test_static_scale_does_not_change(run: Runner, in_fp32: dict[int, float]) -> None:
    assert "loss scale static 128" in run(f"{SIZES} --fp16 --loss-scale 128")
    assert get_metric(run, "loss_scale") == [128.0] * 8
    assert compute_distance(run.losses(), in_fp32) < 0.01


def test_static_scale_that_always_overflows_ends_the_run(run: Runner) -> None:
    error = run.error("--fp16 --loss-scale 1e12 --max-nan-iterations 3")
    assert error.startswith("TrainingError: 3 iterations in a row up to 3")
    assert "leave out --loss-scale 1000000000000.0" in error
    assert get_metric(run, "nan_iterations") == [1, 1, 1]


@pytest.mark.parametrize("layout", [pytest.param("one", marks=pytest.mark.full), "pp2"])
def test_resumed_search_continues(run: Runner, other: Runner, layout: str) -> None:
    """Scale, window and hysteresis are restored from the checkpoint.

    The scale doubles after 3 and 6 good steps. The checkpoint is saved between the two.
    """
    ranks, flags = LAYOUTS[layout]
    flags = f"{SIZES} --fp16 --initial-loss-scale 1024 --loss-scale-window 3 {flags}"
    other(flags, ranks)
    run(f"{flags} --exit-interval 4", ranks)
    run(f"{flags} --require-load", ranks)
    assert (
        get_metric(run, "loss_scale")
        == get_metric(other, "loss_scale")
        == [1024.0] * 3 + [2048.0] * 3 + [4096.0] * 2
    )
    assert run.losses() == other.losses()


@pytest.mark.parametrize("layout", [pytest.param("one", marks=pytest.mark.full), "pp2"])
@pytest.mark.parametrize("precision", ["--bf16", "--fp16 --loss-scale 1024"])
def test_a_residual_stream_in_fp32_reaches_every_stage(
    run: Runner, other: Runner, in_fp32: dict[int, float], precision: str, layout: str
) -> None:
    """A residual stream in fp32 changes the losses on every layout.

    tests/model/test_gpt.py shows that it is closer to fp32. In fp16, a mean over few tokens is too
    coarse for that comparison.
    """
    ranks, flags = LAYOUTS[layout]
    run(f"{SIZES} {precision} {flags} --fp32-residual-connection", ranks)
    other(f"{SIZES} {precision} {flags}", ranks)
    assert run.losses() != other.losses()
    if "bf16" in precision:
        ours = sum_differences(run.losses(), in_fp32)
        assert ours < sum_differences(other.losses(), in_fp32)


def sum_differences(losses: dict[int, float], expected: dict[int, float]) -> float:
    """Return the sum of the absolute differences."""
    return sum(abs(losses[i] - expected[i]) for i in expected)

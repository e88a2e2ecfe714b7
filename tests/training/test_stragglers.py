"""A rank that computes more slowly than the others is named, and no other rank is."""

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from process_pool import ProcessPool, pretrain, succeed
from training.runs import Runner

from megatron.extras.operations.chronicle.records import read_events
from megatron.extras.watch.stragglers import compare_times
from megatron.model.block import Block
from megatron.observe.chronicle import CHRONICLE
from megatron.observe.log_line import parse_slow_ranks_line
from megatron.observe.timers import COMMUNICATION, BlockTimer, Timers

FULL = pytest.mark.full
SECONDS = 0.01
"""What each block takes at least. The noise of a busy machine is small compared with it."""
SLOW_SECONDS = 0.05
FLAGS = "--straggler-interval 3 --straggler-factor 2.5 --train-iters 6 --num-layers 4"


def pretrain_with_slow_rank(slow: int, argv: list[str]) -> None:
    """Run a command line. The blocks of one rank, in the forward pass, take longer."""
    import torch.distributed as dist

    original = Block._compute

    @functools.wraps(original)
    def compute(*arguments: Any, **options: Any) -> torch.Tensor:
        time.sleep(SLOW_SECONDS if dist.get_rank() == slow else SECONDS)
        return original(*arguments, **options)

    Block._compute = compute  # type: ignore[method-assign]
    try:
        pretrain(argv)
    finally:
        Block._compute = original  # type: ignore[method-assign]


def read_comparisons(run: Runner) -> dict[int, dict[str, Any]]:
    return {
        entry["iteration"]: entry["ranks"]["block forward"]
        for entry in run.metrics()
        if "ranks" in entry
    }


@pytest.mark.parametrize(
    ("layout", "slow"),
    [
        ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", 2),
        pytest.param("--pipeline-model-parallel-size 4 --global-batch-size 8", 1, marks=FULL),
        pytest.param("--zero-stage 3 --global-batch-size 8", 3),
        pytest.param("--zero-stage 1 --global-batch-size 8", 0, marks=FULL),
        pytest.param(
            "--sharding-strategy hsdp --hsdp-shard-size 2 --global-batch-size 8", 2, marks=FULL
        ),
        pytest.param(
            "--tensor-model-parallel-size 4 --sequence-parallel --num-attention-heads 4",
            1,
            marks=FULL,
        ),
        pytest.param(
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
            "--global-batch-size 8",
            3,
            marks=FULL,
        ),
        pytest.param(
            "--pipeline-model-parallel-size 2 --checkpoint-activations --global-batch-size 8",
            1,
            marks=FULL,
        ),
        pytest.param(
            "--deepspeed --pipeline-model-parallel-size 2 --global-batch-size 8", 3, marks=FULL
        ),
        pytest.param("--deepspeed --zero-stage 3 --global-batch-size 8", 1, marks=FULL),
        pytest.param(
            "--deepspeed --zero-stage 2 --tensor-model-parallel-size 2 --global-batch-size 8",
            2,
            marks=FULL,
        ),
    ],
)
def test_slow_rank_is_named_with_its_host(
    layout: str, slow: int, run: Runner, pool: ProcessPool
) -> None:
    argv = run.argv(f"{FLAGS} {layout}")
    log = succeed(pool.run(4, pretrain_with_slow_rank, slow, argv))
    found = read_comparisons(run)
    assert sorted(found) == [3, 6]
    for times in found.values():
        # The name has rank, host and coordinate.
        assert [name.split(" (")[0] for name in times["slow"]] == [times["slowest"].split(" (")[0]]
        assert times["slowest"].startswith(f"rank {slow} on ")
        assert SECONDS <= times["median_seconds"] < 2.5 * SECONDS
        assert times["largest_seconds"] >= SLOW_SECONDS
    lines = [line for line in log.splitlines() if parse_slow_ranks_line(line)]
    assert len(lines) == 2
    assert all(found[3]["slowest"] in line for line in lines)
    # The same rank is not recorded twice.
    alerts = [e for e in read_events(run.folder / CHRONICLE) if e.kind == "alert"]
    (text,) = [e.details["text"] for e in alerts if "slow ranks" in e.details["text"]]
    assert found[3]["slowest"] in text


@pytest.mark.parametrize(
    "layout",
    [
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
        pytest.param("--pipeline-model-parallel-size 4 --global-batch-size 8", marks=FULL),
        pytest.param("--zero-stage 3 --global-batch-size 8", marks=FULL),
        pytest.param("--deepspeed --zero-stage 3 --global-batch-size 8", marks=FULL),
    ],
)
def test_clean_run_names_no_rank(layout: str, run: Runner, pool: ProcessPool) -> None:
    argv = run.argv(f"{FLAGS} {layout}")
    log = succeed(pool.run(4, pretrain_with_slow_rank, -1, argv))
    assert [times["slow"] for times in read_comparisons(run).values()] == [{}, {}]
    # One line for the launch shows that the ranks were compared.
    assert [parse_slow_ranks_line(line) for line in log.splitlines()].count("") == 1
    assert not [e for e in read_events(run.folder / CHRONICLE) if "slow" in str(e.details)]


def count_collectives(argv: list[str]) -> list[int]:
    """Return the number of collectives after each step of a run, in `decide`.

    Elsewhere, the number depends on how long the ranks wait for files.
    """
    import torch.distributed as dist

    from megatron.run import loop

    counts: list[int] = []
    decide = loop.decide

    def count_in_decision(*arguments: Any) -> Any:
        calls.clear()
        stop = decide(*arguments)
        counts.append(len(calls))
        return stop

    calls: list[str] = []
    originals = {name: getattr(dist, name) for name in ("all_reduce", "all_gather", "broadcast")}

    def counting(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            calls.append(original.__name__)
            return original(*arguments, **options)

        return call

    for name, original in originals.items():
        setattr(dist, name, counting(original))
    loop.decide = count_in_decision  # type: ignore[assignment]
    try:
        pretrain(argv)
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
        loop.decide = decide
    return counts


def test_only_iterations_with_a_comparison_have_one_more_message(
    run: Runner, other: Runner, pool: ProcessPool
) -> None:
    """The losses do not change."""
    for each, interval, expected in ((run, 2, [0, 1, 0, 1]), (other, 0, [0, 0, 0, 0])):
        flags = f"--train-iters 4 --straggler-interval {interval} --tensor-model-parallel-size 2"
        outcomes = pool.run(2, count_collectives, each.argv(flags))
        succeed(outcomes)
        assert [outcome.value for outcome in outcomes] == [expected, expected]
    assert sorted(read_comparisons(run)) == [2, 4]
    assert not read_comparisons(other)
    losses = [[entry["lm_loss"] for entry in each.metrics()] for each in (run, other)]
    assert losses[0] == losses[1]


def test_skipped_iterations_are_not_compared(run: Runner, pool: ProcessPool) -> None:
    flags = "--straggler-interval 2 --skip-train-iteration-range 3-4 --train-iters 6"
    succeed(
        pool.run(2, pretrain, run.argv(f"{flags} --pipeline-model-parallel-size 2 --num-layers 2"))
    )
    assert sorted(read_comparisons(run)) == [2, 6]


def test_single_process_has_nobody_to_compare_with(run: Runner) -> None:
    assert "slow ranks" not in run("--straggler-interval 2 --train-iters 4")
    assert not read_comparisons(run)


def test_median_is_that_of_the_majority() -> None:
    assert compare_times([1.0, 3.0], 2.0).slow == {1: 3.0}
    assert compare_times([2.0, 1.0, 5.0, 1.0, 1.0], 1.5).slow == {2: 5.0, 0: 2.0}
    assert compare_times([1.0, 1.4, 1.2, 1.0], 1.5).slow == {}
    assert compare_times([1.0, 1.4, 1.2, 1.0], 1.5).slowest == 1


class FakeTimer:
    """A timer whose time is moved by hand."""

    now = 0.0

    def __init__(self) -> None:
        self.seconds = 0.0
        self.start: float | None = None

    def __enter__(self) -> None:
        assert self.start is None
        self.start = FakeTimer.now

    def __exit__(self, *error: object) -> None:
        assert self.start is not None
        self.seconds += FakeTimer.now - self.start
        self.start = None

    def take(self) -> float:
        seconds = self.seconds
        self.seconds = 0.0
        return seconds


def test_collectives_in_a_block_do_not_count() -> None:
    timer = BlockTimer(FakeTimer)
    for step, waiting in enumerate((100.0, 7.0), 1):
        timer.begin_step()
        for _ in range(2):
            timer.enter_block()
            FakeTimer.now += step
            with timer.leave_out(FakeTimer()):
                FakeTimer.now += waiting
            FakeTimer.now += step
            timer.leave_block()
            # A collective between two blocks is not in a block.
            with timer.leave_out(FakeTimer()):
                FakeTimer.now += waiting
    assert timer.take_steps() == [2.0, 4.0]
    assert timer.take_steps() == []


def test_collectives_still_count_as_communication() -> None:
    timers = Timers()
    timers.blocks.begin_step()
    timers.blocks.enter_block()
    with timers.time_collective():
        time.sleep(0.02)
    timers.blocks.leave_block()
    assert timers.take()[COMMUNICATION] >= 0.02
    (seconds,) = timers.blocks.take_steps()
    assert seconds < 0.02


def test_hooks_exist_only_while_a_step_is_measured(tmp_path: Path) -> None:
    from megatron.extras.watch.stragglers import MEASURED_STEPS, StragglerWatch

    class Stage:
        block = torch.nn.Linear(1, 1)

        def get_blocks(self) -> dict[int, torch.nn.Module]:
            return {0: self.block}

    watch = StragglerWatch([Stage()], Timers().blocks, 100, 1.5)  # type: ignore[list-item]
    measured = []
    for iteration in range(1, 201):
        with watch.measure(iteration):
            if Stage.block._forward_hooks:
                measured.append(iteration)
            Stage.block(torch.zeros(1))
        assert not Stage.block._forward_hooks
        reported = watch.take_report(iteration - 1, iteration)
        assert (reported is not None) == (iteration % 100 == 0)
    assert measured == [*range(101 - MEASURED_STEPS, 101), *range(201 - MEASURED_STEPS, 201)]

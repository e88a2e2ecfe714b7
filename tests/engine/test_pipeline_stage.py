"""Tests of the pipeline's schedules and of its memory over steps of changing shape."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
from process_pool import ProcessPool, succeed

from megatron.run.start.launch import read_launch

ARGV = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 2 --seq-length 32 "
    "--hidden-dropout 0.1 --attention-dropout 0.1 --micro-batch-size 1 --global-batch-size 8 "
    "--lr 2e-3 --train-iters 10 --vocab-size 500 --make-vocab-size-divisible-by 4 "
    "--data-path none"
)
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"


@dataclass(frozen=True)
class Work:
    """One call of the engine."""

    samples: int
    """Samples over all data-parallel ranks. Each is a microbatch."""
    length: int = 32
    train: bool = True


@dataclass(frozen=True)
class Seen:
    """The state of one rank after a call."""

    loss: float
    grad_norm: float
    schedule: str
    made: int
    """Number of schedules built so far."""
    kept: int
    """Number of schedules held now."""
    buffers_after: int
    """Number of receive buffers whose memory is not free after the call."""
    buffers_inside: int
    """The largest number of them while a stage computes."""


class Watch:
    """Counts the schedules and the receive buffers of an engine's pipeline."""

    def __init__(self, engine, count_built, receives: list[Any]) -> None:
        self.schedules = engine.runner.schedules
        self.count_built = count_built
        self.receives = receives
        self.most_buffers = 0
        for stage in engine.stages:
            stage.register_forward_pre_hook(lambda *_: self.update_most_buffers())

    def update_most_buffers(self) -> None:
        self.most_buffers = max(self.most_buffers, self.count_buffers())

    def count_buffers(self) -> int:
        """Return how many of the buffers that messages arrived in still have memory."""
        return sum(not storage.expired() for storage in self.receives)

    def describe(self, loss: float, grad_norm: float, *, train: bool) -> Seen:
        _, schedule = self.schedules[train]
        return Seen(
            loss=loss,
            grad_norm=grad_norm,
            schedule=type(schedule).__name__,
            made=self.count_built(),
            kept=len(self.schedules),
            buffers_after=self.count_buffers(),
            buffers_inside=self.most_buffers,
        )


@contextmanager
def count_schedules() -> Iterator[mock.Mock]:
    """Count the schedules that the pipeline builds. It chooses each one once."""
    from megatron.engine import pipeline_runner

    with mock.patch.object(
        pipeline_runner, "choose_schedule", wraps=pipeline_runner.choose_schedule
    ) as chosen:
        yield chosen


@contextmanager
def list_receives() -> Iterator[list[Any]]:
    """List a weak reference to the memory of each receive buffer."""
    from torch.multiprocessing.reductions import StorageWeakRef

    from megatron.engine.pipeline_runner import _Stage

    receives: list[Any] = []

    def record(name: str) -> mock._patch:
        original = getattr(_Stage, name)

        def recorded(stage, chunk):
            ops = original(stage, chunk)
            receives.extend(StorageWeakRef(op.tensor.untyped_storage()) for op in ops)
            return ops

        return mock.patch.object(_Stage, name, recorded)

    with record("get_fwd_recv_ops"), record("get_bwd_recv_ops"):
        yield receives


def walk(flags: str, steps: list[Work]) -> list[Seen]:
    """Train and evaluate on random tokens, which are the same in every layout."""
    import torch

    from megatron.data.batches import Microbatch
    from megatron.engine.native import NativeEngine
    from megatron.extras.interop.translators.translator import load_config
    from megatron.parallel.launcher import read_launcher_world
    from megatron.plan.resolve import resolve
    from megatron.run.start.build import build_timers, divide_ranks
    from megatron.run.start.meet import join_ranks

    world = read_launcher_world(None)
    loaded = load_config([*ARGV.split(), *flags.split()])
    launch = read_launch(loaded)
    plan = resolve(loaded.config, world.size)
    plan.raise_on_errors()
    mesh = divide_ranks(plan, join_ranks(launch), world, build_timers(world))
    engine = NativeEngine(plan, mesh)
    seen = []
    trained = 0
    with count_schedules() as chosen, list_receives() as receives:
        watch = None
        if mesh.grid.pipeline > 1:
            watch = Watch(engine, count_built=lambda: chosen.call_count, receives=receives)
        for work in steps:
            generator = torch.Generator()
            generator.manual_seed(1000 * work.samples + work.length + 7 * trained)
            tokens = torch.randint(0, 500, (work.samples, 1, work.length + 1), generator=generator)
            mine = tokens[mesh.coordinate.data :: mesh.grid.data]
            batch = [Microbatch(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in mine]
            if watch is not None:
                watch.most_buffers = 0
            if work.train:
                trained += 1
                result = engine.train_batch(batch, iteration=trained, lr=2e-3)
                assert result.applied
                loss = result.loss
                grad_norm = result.grad_norm
            else:
                loss = engine.eval_batch(batch)
                grad_norm = 0.0
            if watch is None:
                seen.append(Seen(loss, grad_norm, "one stage", 0, 0, 0, 0))
            else:
                seen.append(watch.describe(loss, grad_norm, train=work.train))
    return seen


def run(pool: ProcessPool, ranks: int, flags: str, steps: list[Work]) -> list[list[Seen]]:
    """Return what each rank saw."""
    outcomes = pool.run(ranks, walk, flags, steps)
    succeed(outcomes)
    return [outcome.value for outcome in outcomes]


def list_numbers(seen: list[Seen]) -> list[float]:
    return [number for step in seen for number in (step.loss, step.grad_norm)]


def evaluation(samples: int, length: int = 32) -> Work:
    return Work(samples, length, train=False)


@pytest.mark.parametrize(
    ("ranks", "flags", "most"),
    [
        (2, "--pipeline-model-parallel-size 2", 2),
        (4, "--pipeline-model-parallel-size 4", 4),
        (2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1", 5),
    ],
)
def test_buffers_are_held_for_microbatches_in_flight_only(
    pool: ProcessPool, ranks: int, flags: str, most: int
) -> None:
    """A rank holds receive buffers for what its stages have in flight, and none between steps.

    These are the inputs of stages whose backward pass is still to come and one gradient. With
    virtual stages, they are three inputs, one that is received ahead, and one gradient.
    """
    steps = [Work(16), evaluation(16), Work(16), Work(16, 16)]
    for seen in run(pool, ranks, flags, steps):
        assert [step.buffers_after for step in seen] == [0] * 4
        assert max(step.buffers_inside for step in seen) <= most
    assert any(step.buffers_inside for step in seen), "the last rank receives activations"


def test_one_schedule_is_kept_for_training_and_one_for_evaluation(pool: ProcessPool) -> None:
    steps = [
        Work(4),
        Work(4),
        Work(8),
        evaluation(8),
        Work(8),
        evaluation(8),
        Work(8, 16),
        evaluation(8),
        Work(4),
        Work(4),
    ]
    for seen in run(pool, 2, "--pipeline-model-parallel-size 2", steps):
        assert [step.made for step in seen] == [1, 1, 2, 3, 3, 3, 4, 4, 5, 5]
        assert [step.kept for step in seen] == [1, 1, 1, 2, 2, 2, 2, 2, 2, 2]


CHANGING = [
    Work(2),
    Work(4),
    Work(6),
    evaluation(6),
    Work(10),
    Work(10, 16),
    evaluation(6),
    Work(2, 24),
    Work(8),
]
DEEP = "--pipeline-model-parallel-size 4"
VIRTUAL = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"


@pytest.mark.parametrize(
    ("ranks", "flags", "schedules"),
    [
        (4, DEEP, "GPipe 1F1B 1F1B 1F1B 1F1B 1F1B 1F1B GPipe 1F1B"),
        (8, f"{DEEP} --zero-stage 3", "GPipe GPipe GPipe GPipe 1F1B 1F1B GPipe GPipe 1F1B"),
        (2, VIRTUAL, " ".join(["Interleaved1F1B"] * 9)),
        (4, f"{VIRTUAL} --zero-stage 1", "I I I I B B I I I"),
        (4, f"{VIRTUAL} --zero-stage 2", "I I I I B B I I I"),
        (4, f"{VIRTUAL} --zero-stage 3", "I I I I B B I I I"),
    ],
)
def test_steps_of_any_shape_equal_one_process(
    pool: ProcessPool, ranks: int, flags: str, schedules: str
) -> None:
    """Losses and norms equal one process's while the number and the length of microbatches change.

    Fewer microbatches than stages use GPipe, and five on two interleaved ranks use looped BFS. The
    gradients that FSDP holds survive a new schedule, whose stages are new too.
    """
    short = {"I": "Interleaved1F1B", "B": "LoopedBFS"}
    expected = ["Schedule" + short.get(name, name) for name in schedules.split()]
    alone = list_numbers(run(pool, 1, NO_DROPOUT, CHANGING)[0])
    for seen in run(pool, ranks, f"{flags} {NO_DROPOUT}", CHANGING):
        assert [step.schedule for step in seen] == expected
        assert list_numbers(seen) == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        pytest.param(2, "--pipeline-model-parallel-size 2", marks=pytest.mark.full),
        (2, VIRTUAL),
        (4, "--pipeline-model-parallel-size 2 --zero-stage 3"),
        pytest.param(4, "--pipeline-model-parallel-size 2 --zero-stage 2", marks=pytest.mark.full),
        (4, "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel"),
    ],
)
def test_evaluation_does_not_change_training(pool: ProcessPool, ranks: int, flags: str) -> None:
    """Losses and norms equal those of training alone, with dropout."""
    training = [Work(4), Work(8), Work(8), Work(8, 16), Work(8)]
    between = [
        evaluation(6),
        *(step for work in training for step in (work, evaluation(8), evaluation(4, 16))),
    ]
    alone = run(pool, ranks, flags, training)[0]
    interrupted = run(pool, ranks, flags, between)[0]
    assert list_numbers(
        [seen for seen, work in zip(interrupted, between, strict=True) if work.train]
    ) == list_numbers(alone)


def walk_through_host_memory(flags: str, steps: list[Work]) -> tuple[list[Seen], int, int]:
    """Return what `walk` returns, with messages on another device than the stages.

    The two numbers are the messages that were copied to host memory, and those copied from it.
    """
    import torch

    from megatron.engine import pipeline_runner

    counts = {"_prepare_messages": 0, "_complete_messages": 0}

    def count(name: str) -> mock._patch:
        original = getattr(pipeline_runner._Stage, name)

        def counted(stage, messages):
            # The first stage receives nothing, and its buffer is None.
            counts[name] += sum(getattr(each, "buffer", each) is not None for each in messages)
            return original(stage, messages)

        return mock.patch.object(pipeline_runner._Stage, name, counted)

    # "cpu:0" is the same memory as "cpu", and another device for torch's comparison.
    elsewhere = torch.device("cpu", 0)
    with (
        mock.patch.object(pipeline_runner, "choose_message_device", return_value=elsewhere),
        count("_prepare_messages"),
        count("_complete_messages"),
    ):
        seen = walk(flags, steps)
    return seen, counts["_prepare_messages"], counts["_complete_messages"]


@pytest.mark.parametrize("virtual", [1, 2])
def test_messages_through_host_memory_change_no_bit(pool: ProcessPool, virtual: int) -> None:
    flags = "--pipeline-model-parallel-size 2"
    if virtual == 2:
        flags += " --num-layers-per-virtual-pipeline-stage 1"
    steps = [Work(8), evaluation(4), Work(4)]
    plain = run(pool, 2, flags, steps)
    outcomes = pool.run(2, walk_through_host_memory, flags, steps)
    succeed(outcomes)
    for before, after in zip(plain, outcomes, strict=True):
        assert list_numbers(after.value[0]) == list_numbers(before)
    # Each microbatch crosses each border between stages, forward, and in training also backward.
    borders = {1: 1, 2: 3}[virtual]
    messages = borders * (2 * 8 + 4 + 2 * 4)
    assert sum(outcome.value[1] for outcome in outcomes) == messages
    assert sum(outcome.value[2] for outcome in outcomes) == messages


def walk_and_measure_messages(
    flags: str, steps: list[Work], split: bool
) -> tuple[list[Seen], set[int]]:
    """Return what `walk` returns, and the numbers of elements of the messages that were sent."""
    from megatron.engine import pipeline_runner

    sizes: set[int] = set()
    prepare = pipeline_runner._Stage._prepare_messages

    def measure(stage, ops):
        prepared = prepare(stage, ops)
        sizes.update(op.tensor.numel() for op in prepared)
        return prepared

    whole: AbstractContextManager[Any] = nullcontext()
    if not split:
        whole = mock.patch.object(pipeline_runner._Stage, "_splits", return_value=False)
    with whole, mock.patch.object(pipeline_runner._Stage, "_prepare_messages", measure):
        seen = walk(flags, steps)
    return seen, sizes


def test_tensor_parallel_ranks_send_parts_of_a_message(pool: ProcessPool) -> None:
    """The numbers are those of complete messages, bit for bit."""
    flags = "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2"
    steps = [Work(8), evaluation(4), Work(4, 16)]
    complete = {32 * 32, 16 * 32}
    whole = pool.run(4, walk_and_measure_messages, flags, steps, False)
    parts = pool.run(4, walk_and_measure_messages, flags, steps, True)
    succeed(whole)
    succeed(parts)
    for before, after in zip(whole, parts, strict=True):
        assert before.value[1] == complete
        assert after.value[1] == {size // 2 for size in complete}
        assert list_numbers(after.value[0]) == list_numbers(before.value[0])

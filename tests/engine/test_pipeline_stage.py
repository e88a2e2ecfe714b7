"""The pipeline's bookkeeping over steps of changing shape: which schedules are made and kept, and what memory stages hold."""

from dataclasses import dataclass

import pytest
from process_pool import ProcessPool, succeed

ARGV = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --hidden-dropout 0.1 --attention-dropout 0.1 "
    "--micro-batch-size 1 --global-batch-size 8 --lr 2e-3 --train-iters 10 --vocab-size 500 --data-path none "
    "--make-vocab-size-divisible-by 4"
)
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"


@dataclass(frozen=True)
class Work:
    """One call of the engine."""

    samples: int
    """In microbatches of one sample, over all data-parallel ranks."""
    length: int = 32
    train: bool = True


@dataclass(frozen=True)
class Seen:
    """What one rank saw of it."""

    loss: float
    grad_norm: float
    schedule: str
    made: int
    """Schedules made so far."""
    kept: int
    """Schedules held now."""
    buffers_after: int
    """Receive buffers with memory when the call is over."""
    buffers_inside: int
    """The most of them while a stage computes."""


class Watch:
    """Looks at an engine's pipeline from outside."""

    def __init__(self, runner) -> None:
        self.runner, self.made, self.inside = runner, 0, 0
        make = runner._make_schedule

        def counted(*arguments):
            self.made += 1
            return make(*arguments)

        runner._make_schedule = counted
        for part in runner._parts:
            part.register_forward_pre_hook(lambda *_: self.look())

    def look(self) -> None:
        self.inside = max(self.inside, self.buffers())

    def buffers(self) -> int:
        count = 0
        for _, schedule in self.runner._schedules.values():
            stages = schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]
            for stage in stages:
                infos = [*stage.args_recv_info.values(), *stage.grad_recv_info.values()]
                count += sum(
                    info.buffer is not None and info.buffer.device.type != "meta"
                    for own in infos
                    for info in own
                )
        return count


def walk(flags: str, steps: list[Work]) -> list[Seen]:
    """Train and evaluate on random tokens, the same whatever the layout."""
    import torch

    from megatron.config.cli import load_config
    from megatron.data.batches import Microbatch
    from megatron.engine.native import NativeEngine
    from megatron.parallel.launcher import read_launcher_world
    from megatron.plan import resolve
    from megatron.training.setup import join_ranks

    world = read_launcher_world(None)
    plan = resolve(load_config([*ARGV.split(), *flags.split()]).config, world.size)
    plan.raise_on_errors()
    mesh = join_ranks(plan, world)
    engine = NativeEngine(plan, mesh)
    watch = Watch(engine._runner) if mesh.grid.pipeline > 1 else None
    seen, trained = [], 0
    for work in steps:
        generator = torch.Generator().manual_seed(1000 * work.samples + work.length + 7 * trained)
        tokens = torch.randint(0, 500, (work.samples, 1, work.length + 1), generator=generator)
        mine = tokens[mesh.coordinate.data :: mesh.grid.data]
        batch = [Microbatch(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in mine]
        if watch is not None:
            watch.inside = 0
        if work.train:
            trained += 1
            result = engine.train_batch(batch, iteration=trained, lr=2e-3)
            assert result.applied
            numbers = result.loss, result.grad_norm
        else:
            numbers = engine.eval_batch(batch), 0.0
        if watch is None:
            seen.append(Seen(*numbers, "one stage", 0, 0, 0, 0))
        else:
            name = type(watch.runner._schedules[work.train][1]).__name__
            seen.append(
                Seen(
                    *numbers,
                    name,
                    watch.made,
                    len(watch.runner._schedules),
                    watch.buffers(),
                    watch.inside,
                )
            )
    return seen


def run(pool: ProcessPool, ranks: int, flags: str, steps: list[Work]) -> list[list[Seen]]:
    """Of each rank."""
    outcomes = pool.run(ranks, walk, flags, steps)
    succeed(outcomes)
    return [outcome.value for outcome in outcomes]


def numbers(seen: list[Seen]) -> list[float]:
    return [number for step in seen for number in (step.loss, step.grad_norm)]


def evaluation(samples: int, length: int = 32) -> Work:
    return Work(samples, length, train=False)


@pytest.mark.parametrize(
    ("ranks", "flags", "most"),
    [
        (2, "--pipeline-model-parallel-size 2", 2),
        (4, "--pipeline-model-parallel-size 4", 4),
        (2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1", 4),
    ],
)
def test_buffers_are_those_in_flight(pool: ProcessPool, ranks: int, flags: str, most: int) -> None:
    """Of 16 microbatches there are never more receive buffers than pass through a rank's stages at once, and none between steps."""
    steps = [Work(16), evaluation(16), Work(16), Work(16, 16)]
    for seen in run(pool, ranks, flags, steps):
        assert [step.buffers_after for step in seen] == [0] * 4
        assert max(step.buffers_inside for step in seen) <= most
    assert any(step.buffers_inside for step in seen), "the last rank receives"


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
DEEP, VIRTUAL = (
    "--pipeline-model-parallel-size 4",
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
)


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
def test_steps_of_any_shape_are_one_processs(
    pool: ProcessPool, ranks: int, flags: str, schedules: str
) -> None:
    """Fewer microbatches than stages take GPipe, and five on two interleaved ranks looped BFS; the gradients that FSDP shards hold
    outlive a new schedule, whose stages are new too."""
    short = {"I": "Interleaved1F1B", "B": "LoopedBFS"}
    expected = ["Schedule" + short.get(name, name) for name in schedules.split()]
    alone = numbers(run(pool, 1, NO_DROPOUT, CHANGING)[0])
    for seen in run(pool, ranks, f"{flags} {NO_DROPOUT}", CHANGING):
        assert [step.schedule for step in seen] == expected
        assert numbers(seen) == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (2, "--pipeline-model-parallel-size 2"),
        (2, VIRTUAL),
        (4, "--pipeline-model-parallel-size 2 --zero-stage 3"),
        (4, "--pipeline-model-parallel-size 2 --zero-stage 2"),
        (4, "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel"),
    ],
)
def test_evaluation_leaves_no_trace(pool: ProcessPool, ranks: int, flags: str) -> None:
    """Dropout is on: also the masks are those of training alone."""
    training = [Work(4), Work(8), Work(8), Work(8, 16), Work(8)]
    between = [
        evaluation(6),
        *(step for work in training for step in (work, evaluation(8), evaluation(4, 16))),
    ]
    alone = run(pool, ranks, flags, training)[0]
    beside = run(pool, ranks, flags, between)[0]
    assert numbers(
        [seen for seen, work in zip(beside, between, strict=True) if work.train]
    ) == numbers(alone)

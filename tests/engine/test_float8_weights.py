"""Weights are rounded once a step, and each change of the weights is in the next rounding."""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING
from unittest import mock

import pytest
from process_pool import ProcessPool, succeed

from megatron.run.start.launch import read_launch

if TYPE_CHECKING:
    from megatron.parallel.mesh import Mesh
    from megatron.plan.run_plan import Plan

FLAGS = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 8 --vocab-size 64 "
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 9 --lr 1e-2 --data-path none "
    "--bf16 --hidden-dropout 0 --attention-dropout 0 --fp8-emulate "
)
TENSORWISE = "--fp8-format hybrid --fp8-recipe tensorwise"
ROWWISE = "--fp8-format e4m3 --fp8-recipe rowwise"
FIRST_IN_BF16 = "--fp8-start-iteration 2"
LAYOUTS = {
    "one process": (1, TENSORWISE, [1, 2, 4, 6]),
    "one process, first iteration in bf16": (1, f"{ROWWISE} {FIRST_IN_BF16}", [1, 2, 6]),
    "two copies": (2, f"{ROWWISE} --zero-stage 0", [1, 2, 4, 6, 8]),
    "ZeRO 1": (2, f"{ROWWISE} --zero-stage 1", [1, 2, 4, 6]),
    "ZeRO 3": (2, f"{TENSORWISE} --zero-stage 3", []),
    "shared groups": (
        2,
        f"{TENSORWISE} --num-query-groups 1 --tensor-model-parallel-size 2",
        [1],
    ),
}
"""Name -> ranks, flags, and the calls that get old weights: the first ones after an update, after a
rollback, after iterations in bf16, and after a repair of copies that differ."""
HISTORY = (
    "train 1",
    "train 2",
    "evaluate",
    "train 3",
    "rollback",
    "evaluate",
    "train 1",
    "train 2",
    "damage",
    "evaluate",
    "repair",
    "evaluate",
)
CALLS = [each for each in HISTORY if each.split()[0] in ("train", "evaluate")]


@contextmanager
def patch_rounding(*, stale: bool) -> Iterator[None]:
    """Keep the weights of the call before, if asked to."""
    from megatron.extras.step.float8.engine import FixedWeights
    from megatron.extras.step.float8.products import Float8Products

    with ExitStack() as stack:
        if stale:
            stack.enter_context(mock.patch.object(Float8Products, "forget_weights"))
            stack.enter_context(mock.patch.object(FixedWeights, "round"))
        yield


class History:
    """Runs the events of `HISTORY` with an engine, from the same weights each time."""

    def __init__(self, plan: "Plan", mesh: "Mesh", *, always: bool) -> None:
        """Create the engine.

        Args:
            plan: The plan of the run.
            mesh: This rank's mesh.
            always: Round weights again for each product, from their copies in bf16.
        """
        import torch

        from megatron.data.batches import Microbatch
        from megatron.extras.step.float8.engine import Float8Engine

        self._engine = engine = Float8Engine(plan, mesh)
        if always:
            engine._replaced = []
            for _, products in engine._products:
                products.keeps_weights = False
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(64, (4, 1, 9), generator=generator)
        batch = [Microbatch(each[:, :-1], each[:, 1:]) for each in tokens]
        self._batch = batch[: 4 // mesh.grid.data]
        self._first = [shard.tensor.clone() for shard in engine.shards(optimizer=True)]
        self._has_damage = mesh.sharding.copies > 1
        self._is_damaged = self._has_damage and mesh.coordinate.data == 1

    def run(self, stale: int | None = None) -> list[float]:
        """Return the loss of each call of `CALLS`.

        Args:
            stale: The number of the call that uses the weights of the call before, or None.
        """
        losses: list[float] = []
        for event in ("rollback", *HISTORY):
            with patch_rounding(stale=len(losses) == stale):
                loss = self._call(event)
            if loss is not None:
                losses.append(loss)
        return losses

    def _call(self, event: str) -> float | None:
        engine = self._engine
        shards = list(engine.shards(optimizer=True))
        match event.split():
            case ["train", iteration]:
                return engine.train_batch(self._batch, iteration=int(iteration), lr=1e-2).loss
            case ["evaluate"]:
                return engine.eval_batch(self._batch)
            case ["rollback"]:
                for shard, saved in zip(shards, self._first, strict=True):
                    shard.tensor.copy_(saved)
                engine.finish_load({"optimizer_step": 0})
                # The rollback of the loop goes back to the iteration of the checkpoint.
                engine._iteration = 1
            case ["damage"] if self._is_damaged:
                # Moments are never negative.
                for shard in shards:
                    shard.tensor.abs_()
            case ["repair"]:
                repaired = engine.check_invariants(repair=True, iteration=2, last_good=None)
                assert bool(repaired) == self._has_damage
        return None


def run_histories(flags: str, stale: Sequence[int]) -> list[list[float]]:
    """Return the losses without kept weights, with them, and with each planted error."""
    from megatron.extras.interop.translators.translator import load_config
    from megatron.parallel.launcher import read_launcher_world
    from megatron.plan.resolve import resolve
    from megatron.run.start.build import build_timers, divide_ranks
    from megatron.run.start.meet import join_ranks

    world = read_launcher_world(None)
    loaded = load_config([*FLAGS.split(), *flags.split()])
    launch = read_launch(loaded)
    plan = resolve(loaded.config, world.size)
    plan.raise_on_errors()
    mesh = divide_ranks(plan, join_ranks(launch), world, build_timers(world))
    always = History(plan, mesh, always=True).run()
    history = History(plan, mesh, always=False)
    return [always, *(history.run(each) for each in (None, *stale))]


@pytest.mark.parametrize(
    "layout",
    [pytest.param(each, marks=[pytest.mark.full] * (each == "ZeRO 1")) for each in LAYOUTS],
)
def test_kept_weights_are_never_older_than_the_step(layout: str, pool: ProcessPool) -> None:
    ranks, flags, stale = LAYOUTS[layout]
    outcomes = pool.run(ranks, run_histories, flags, stale)
    succeed(outcomes)
    always, kept, *planted = outcomes[0].value
    assert all(map(math.isfinite, always))
    assert kept == always
    for number, losses in zip(stale, planted, strict=True):
        assert losses[:number] == kept[:number]
        assert losses[number] != kept[number], CALLS[number]

"""Tests that an engine waits for a save before it changes what the save may still copy."""

import pytest
from process_pool import ProcessPool, succeed

from megatron.run.start.launch import read_launch

ARGV = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 "
    "--micro-batch-size 1 --global-batch-size 2 --lr 2e-3 --train-iters 10 --vocab-size 100 "
    "--data-path none"
)


def record_calls(flags: str) -> tuple[list[str], list[bool]]:
    """Return what called `before_update`, and for each call whether the state was unchanged."""
    import torch

    from megatron.data.batches import Microbatch
    from megatron.engine.base import Engine
    from megatron.extras.interop.translators.translator import load_config
    from megatron.extras.step.engines import choose_engine
    from megatron.parallel.launcher import read_launcher_world
    from megatron.plan.resolve import resolve
    from megatron.run.start.build import build_engine, build_timers, divide_ranks
    from megatron.run.start.meet import join_ranks

    world = read_launcher_world(None)
    loaded = load_config([*ARGV.split(), *flags.split()])
    launch = read_launch(loaded)
    plan = resolve(loaded.config, world.size)
    plan.raise_on_errors()
    timers = build_timers(world)
    phase = "construction"
    engine: Engine
    before: list[torch.Tensor] = []
    calls: list[str] = []
    unchanged: list[bool] = []

    def copy_state() -> list[torch.Tensor]:
        return [shard.tensor.clone() for shard in engine.shards(optimizer=True)]

    def before_update() -> None:
        calls.append(phase)
        unchanged.append(all(map(torch.equal, before, copy_state())))

    mesh = divide_ranks(plan, join_ranks(launch), world, timers)
    engine = build_engine(plan, mesh, timers, before_update, choose_engine(loaded.config))
    tokens = torch.randint(0, 100, (2, 1, 17), generator=torch.Generator().manual_seed(0))
    batch = [Microbatch(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in tokens]
    before = copy_state()
    phase = "evaluation"
    engine.eval_batch(batch)
    phase = "step"
    assert engine.train_batch(batch, iteration=1, lr=1e-3).applied
    assert not all(map(torch.equal, before, copy_state()))
    before = copy_state()
    phase = "check"
    engine.check_invariants(repair=False, iteration=1, last_good=None)
    phase = "repair"
    engine.check_invariants(repair=True, iteration=1, last_good=None)
    return calls, unchanged


@pytest.mark.parametrize("flags", ["", "--deepspeed"])
def test_an_engine_calls_it_before_each_update_and_repair(flags: str, pool: ProcessPool) -> None:
    outcomes = pool.run(1, record_calls, flags)
    succeed(outcomes)
    calls, unchanged = outcomes[0].value
    assert calls == ["step", "repair"]
    assert unchanged == [True, True]

"""Tests that the plan's estimate of the optimizer's states is the size of the real ones."""

from itertools import product

import pytest
import torch
from process_pool import ProcessPool, succeed

from megatron.extras.interop.translators.translator import load_config
from megatron.extras.planner.commands.plan_estimates import estimate_memory
from megatron.plan.resolve import resolve
from megatron.run.start.launch import read_launch

# No number is padded or divided unevenly. Two stages have the same number of layers.
ARGV = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --seq-length 16 "
    "--glu-activation swiglu --ffn-hidden-size 80 --qk-norm head --micro-batch-size 1 "
    "--global-batch-size 4 --lr 1e-3 --train-iters 2 --vocab-size 512 "
    "--make-vocab-size-divisible-by 1 --untie-embeddings-and-output-weights --data-path none"
)
LAYOUTS = {
    "one process": (1, ""),
    "tp2-pp2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    "dp4-zero3": (4, "--zero-stage 3"),
    "dp4-hsdp": (4, "--sharding-strategy hsdp --hsdp-shard-size 2"),
}


def measure_states(argv: list[str]) -> tuple[int, int]:
    """Return this rank's pipeline rank and the bytes of its optimizer's states."""
    from megatron.engine.native import NativeEngine
    from megatron.parallel.launcher import read_launcher_world
    from megatron.run.start.build import build_timers, divide_ranks
    from megatron.run.start.meet import join_ranks

    world = read_launcher_world(None)
    loaded = load_config(argv)
    launch = read_launch(loaded)
    plan = resolve(loaded.config, world.size)
    plan.raise_on_errors()
    mesh = divide_ranks(plan, join_ranks(launch), world, build_timers(world))
    shards = NativeEngine(plan, mesh).shards(optimizer=True)
    # Rank 0 keeps the store through which the others still build their groups.
    if mesh.control is not None:
        torch.distributed.barrier(mesh.control)
    states = [shard.tensor for shard in shards if shard.kind != "weight"]
    return mesh.coordinate.pipeline, sum(state.nbytes for state in states)


OPTIMIZERS = (
    "adam --exp-avg-dtype bf16",
    "ademamix",
    "muon --exp-avg-sq-dtype bf16 --adam-beta2 0.95",
)
SHORT = {
    (OPTIMIZERS[0], "tp2-pp2"),
    (OPTIMIZERS[0], "dp4-hsdp"),
    (OPTIMIZERS[1], "dp4-zero3"),
    (OPTIMIZERS[2], "one process"),
    (OPTIMIZERS[2], "tp2-pp2"),
    (OPTIMIZERS[2], "dp4-hsdp"),
}
"""The short suite has each optimizer and each layout, and all layouts of which states differ."""


@pytest.mark.parametrize(
    ("optimizer", "layout"),
    [
        pytest.param(*each, marks=() if each in SHORT else pytest.mark.full)
        for each in product(OPTIMIZERS, LAYOUTS)
    ],
)
def test_the_estimate_is_the_size_of_the_states(
    optimizer: str, layout: str, pool: ProcessPool
) -> None:
    ranks, flags = LAYOUTS[layout]
    argv = [*ARGV.split(), *flags.split(), "--optimizer", *optimizer.split()]
    outcomes = pool.run(ranks, measure_states, argv)
    succeed(outcomes)
    memory = estimate_memory(resolve(load_config(argv).config, ranks))
    measured = [
        size for rank, size in (o.value for o in outcomes) if rank == memory["pipeline_rank"]
    ]
    assert measured == [memory["rank"]["optimizer_states"]] * len(measured)
    # One process holds the complete model.
    if ranks == 1:
        assert measured == [memory["model"]["optimizer_states"]]

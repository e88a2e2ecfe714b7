"""Tests that a sharded start needs the memory of its shards, and has a plain start's weights."""

import ctypes
import gc
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from process_pool import ProcessPool, succeed

from megatron.base.errors import ConfigError
from megatron.engine.native import NativeEngine
from megatron.extras.interop.translators.translator import load_config
from megatron.observe.timers import Timers
from megatron.parallel.grid import Grid
from megatron.parallel.mesh import build_mesh
from megatron.plan.resolve import resolve
from megatron.plan.run_plan import Plan
from megatron.run.start import build as start_build
from megatron.run.start.launch import read_launch

COMMON = "--micro-batch-size 1 --lr 1e-3 --train-iters 2 --data-path none"
# 53 million parameters, of which no block has more than 3.2 million.
LARGE = (
    f"{COMMON} --num-layers 16 --hidden-size 512 --num-attention-heads 8 --seq-length 16 "
    "--vocab-size 4096 --global-batch-size 4"
)
# No row count is divisible by 4, and the vocabulary is padded.
UNEVEN = (
    f"{COMMON} --num-layers 2 --hidden-size 30 --num-attention-heads 5 --num-query-groups 1 "
    "--seq-length 16 --vocab-size 501 --global-batch-size 4 --glu-activation swiglu "
    "--ffn-hidden-size 50 --untie-embeddings-and-output-weights"
)
STRATEGIES = {
    "fsdp": "--sharding-strategy fsdp",
    "hsdp": "--sharding-strategy hsdp --hsdp-shard-size 2",
    "ddp": "--sharding-strategy ddp",
    "zero 1": "--zero-stage 1",
}
Weights = list[tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]]
"""Name, global shape and offset of each shard, and its values."""


def build_engine(argv: list[str]) -> tuple[Plan, NativeEngine]:
    from megatron.parallel.launcher import read_launcher_world
    from megatron.run.start.build import build_timers, divide_ranks
    from megatron.run.start.meet import join_ranks

    world = read_launcher_world(None)
    loaded = load_config(argv)
    launch = read_launch(loaded)
    plan = resolve(loaded.config, world.size)
    plan.raise_on_errors()
    mesh = divide_ranks(plan, join_ranks(launch), world, build_timers(world))
    engine = NativeEngine(plan, mesh)
    # Rank 0 keeps the store through which the others still build their groups.
    if mesh.control is not None:
        torch.distributed.barrier(mesh.control)
    return plan, engine


def read_memory(entry: str) -> int:
    """Return an entry of /proc/self/status that is a size, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{entry}:"):
            return 1024 * int(line.split()[1])
    raise AssertionError(entry)


def measure_start(argv: list[str]) -> tuple[int, int]:
    """Return the number of parameters and the growth of this process's own memory in a start.

    Pages of files do not count. The libraries of a CUDA build have a few GB, of which the kernel
    maps and drops parts at any time.
    """
    # Tensors get pages of their own, which are given back as soon as they are freed.
    libc = ctypes.CDLL("libc.so.6")
    set_option = libc.mallopt
    m_mmap_threshold = -3
    assert set_option(m_mmap_threshold, 1 << 16) == 1
    # Give back what earlier tests freed. The start would use it without a growth.
    gc.collect()
    libc.malloc_trim(0)
    # Reset VmHWM.
    Path("/proc/self/clear_refs").write_text("5")
    before = read_memory("RssAnon")
    plan, engine = build_engine(argv)
    files = read_memory("RssFile") + read_memory("RssShmem")
    peak = read_memory("VmHWM") - files - before
    # The worker is used again. This is the largest value that glibc would choose itself.
    assert set_option(m_mmap_threshold, 1 << 25) == 1
    assert engine.shards(optimizer=True)
    return plan.parameters, peak


@pytest.mark.parametrize(
    ("strategy", "share"), [("fsdp", 4), pytest.param("hsdp", 2, marks=pytest.mark.full)]
)
def test_a_start_needs_the_memory_of_its_shards(
    strategy: str, share: int, pool: ProcessPool
) -> None:
    flags = STRATEGIES[strategy].split()
    # Imports and the first threads need memory too.
    succeed(pool.run(4, measure_start, [*shlex.split(UNEVEN), *flags]))
    outcomes = pool.run(4, measure_start, [*shlex.split(LARGE), *flags])
    succeed(outcomes)
    for outcome in outcomes:
        parameters, peak = outcome.value
        # Weights and Adam's two moments. A complete copy of the weights would need 4 bytes more for
        # each parameter.
        shards = 12 * parameters / share
        assert 0.95 * shards < peak < shards + 0.5 * parameters, peak / parameters


def read_weights(argv: list[str]) -> Weights:
    _, engine = build_engine(argv)
    return [
        (shard.name, shard.global_shape, shard.offset, shard.tensor.clone())
        for shard in engine.shards(optimizer=False)
    ]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_are_those_of_a_plain_start(strategy: str, pool: ProcessPool) -> None:
    plain = pool.run(1, read_weights, shlex.split(UNEVEN))
    succeed(plain)
    complete = {name: values for name, _, _, values in plain[0].value}
    outcomes = pool.run(4, read_weights, [*shlex.split(UNEVEN), *STRATEGIES[strategy].split()])
    succeed(outcomes)
    for outcome in outcomes:
        for name, shape, offset, values in outcome.value:
            assert shape == complete[name].shape
            slices = tuple(
                slice(first, first + size) for first, size in zip(offset, values.shape, strict=True)
            )
            assert torch.equal(values, complete[name][slices]), name


def count_70b(ranks: int, shard_size: int) -> tuple[int, int, int]:
    """Shard Llama 2 70B for one rank of a pretended world, on the meta device.

    Returns:
        The parameters of the model and of this rank's shards, and the largest number of parameters
        that one module gathers.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron.engine.sharding import ShardedModel
    from megatron.model.execution import Execution
    from megatron.model.gpt import GPT
    from megatron.parallel.mesh import DataSharding, TensorParallel

    flags = f"{COMMON} --preset llama2-70b --bf16 --global-batch-size {ranks}"
    plan = resolve(load_config(flags.split()).config, ranks)
    plan.raise_on_errors()
    dist.init_process_group("fake", rank=ranks - 1, world_size=ranks, store=FakeStore())
    mesh = init_device_mesh("cpu", (ranks // shard_size, shard_size), mesh_dim_names=("c", "s"))
    execution = Execution.from_config(plan.config, dynamic_shapes=False)
    with torch.device("meta"):
        model = GPT(plan.shape, TensorParallel(), plan.stages[0], execution, plan.config.loss)
    sizes = [sum(p.numel() for p in block.parameters()) for block in model.blocks.values()]
    ShardedModel(
        model,
        DataSharding(
            shard_size, ranks // shard_size, mesh=mesh["s"], replicas=mesh["c"].get_group()
        ),
        stage=3,
        compute_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        comm_timer=TensorParallel().comm_timer,
    )
    own = 0
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.is_meta
        own += parameter.to_local().numel()
    dist.destroy_process_group()
    return plan.parameters, own, max(sizes)


@pytest.mark.parametrize(("ranks", "shard_size"), [(64, 64), (128, 8)])
def test_70b_has_only_its_shards(ranks: int, shard_size: int, pool: ProcessPool) -> None:
    outcomes = pool.run(1, count_70b, ranks, shard_size)
    succeed(outcomes)
    parameters, own, block = outcomes[0].value
    assert parameters == 68_976_648_192
    # The rows of every matrix are divisible, so no rank has padding.
    assert own == parameters // shard_size
    # A start gathers one block at a time, besides embedding and output matrix.
    assert block < parameters / 80


def test_model_that_a_host_cannot_allocate_is_refused_with_its_size() -> None:
    plan = resolve(load_config(LARGE.split()).config, 1)

    class FailingKind:
        def __init__(self, message: str) -> None:
            self._message = message

        def load(self, device: str) -> Callable[..., NativeEngine]:
            def make(*arguments: object) -> NativeEngine:
                raise RuntimeError(self._message)

            return make

    def do_nothing() -> None:
        pass

    def build(message: str) -> None:
        mesh = build_mesh(Grid(1, 1, 1), torch.device("cpu"))
        kind: Any = FailingKind(message)
        start_build.build_engine(plan, mesh, Timers(mesh.device), do_nothing, kind)

    allocation = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"
    with pytest.raises(ConfigError) as refused:
        build(allocation)
    text = str(refused.value)
    assert f"its {plan.parameters:,} parameters alone need" in text
    assert "make it smaller, or divide it over more processes" in text
    assert text.endswith(allocation)
    # Any other error of torch keeps its class and its message.
    with pytest.raises(RuntimeError, match=r"^another error$"):
        build("another error")

"""Tests of what a recomputed block keeps of its input, and that gradients do not change."""

import gc
import weakref
from collections import Counter
from fractions import Fraction

import pytest
import torch
from model.builders import VOCAB, tiny_config
from process_pool import ProcessPool, succeed
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.config.parallel import ParallelConfig
from megatron.engine.parallelize import recompute_blocks
from megatron.model.execution import Execution
from megatron.model.gpt import GPT
from megatron.model.partition import partition
from megatron.model.recompute import Recomputation
from megatron.model.shape import ModelShape
from megatron.parallel.mesh import TensorParallel


def run_block(partition: bool) -> tuple[Tensor, Tensor, bool]:
    """Run a block on two tensor-parallel ranks.

    Returns:
        The gradients of weight and input, and whether the complete input is kept for backward.
    """
    from megatron.model.recompute import Recomputation
    from megatron.parallel.grid import Grid
    from megatron.parallel.mesh import build_mesh
    from megatron.parallel.rendezvous import start_process_group

    start_process_group("gloo", 1)
    tp = build_mesh(Grid(pipeline=1, data=1, tensor=2), torch.device("cpu")).tensor_parallel
    weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    stream = torch.randn(6, 2, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
    recomputation = Recomputation(tp, partition=partition, in_cpu=False)
    x = stream * 1.0  # an intermediate tensor, as a block's input is
    alive = weakref.ref(x)
    y = recomputation(lambda x, power: torch.tanh(x @ weight) ** power, x, 2)
    del x
    gc.collect()
    kept = alive() is not None
    y.sum().backward()
    assert weight.grad is not None
    assert stream.grad is not None
    return weight.grad, stream.grad, kept


def test_a_partitioned_input_is_gathered_again(pool: ProcessPool) -> None:
    complete = pool.run(2, run_block, False)
    parts = pool.run(2, run_block, True)
    succeed(complete)
    succeed(parts)
    for one, other in zip(complete, parts, strict=True):
        assert one.value[2]
        assert not other.value[2]
        assert torch.equal(one.value[0], other.value[0])
        assert torch.equal(one.value[1], other.value[1])


@pytest.mark.parametrize(
    ("ranks", "method", "per_virtual"),
    [
        (1, "uniform", None),
        (5, "uniform", None),
        (4, "type:transformer|embedding", None),
        (4, None, 1),
        (2, None, 3),
    ],
)
@pytest.mark.parametrize(
    ("share", "recomputed"),
    [
        ("1/5", [3, 8]),
        ("1/2", [1, 3, 5, 7, 9, 11]),
        ("1/4", [2, 6, 10]),
    ],
)
def test_the_recomputed_layers_do_not_depend_on_the_stages(
    ranks: int, method: str | None, per_virtual: int | None, share: str, recomputed: list[int]
) -> None:
    """fms-fsdp's rule counts the layers of the model, whichever stage holds them."""
    shape = ModelShape(tiny_config(num_layers=12), VOCAB, 128)
    execution = Execution(recomputed_part=Fraction(share))
    parallel = ParallelConfig(
        pipeline_model_parallel_size=ranks,
        pp_partition_method=method,
        num_layers_per_virtual_pipeline_stage=per_virtual,
    )
    found = []
    with torch.device("meta"):
        for stage in partition(shape, parallel):
            model = GPT(shape, TensorParallel(), stage, execution)
            recompute_blocks(model, execution)
            found += [i + 1 for i, block in model.get_blocks().items() if block.recomputation]
    assert found == recomputed


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
def test_inputs_in_host_memory_use_no_device_memory() -> None:
    from megatron.model.recompute import Recomputation
    from megatron.parallel.mesh import TensorParallel

    recomputation = Recomputation(TensorParallel(), partition=False, in_cpu=True)
    gradients = []
    for call in (recomputation, lambda compute, x: compute(x)):
        stream = torch.linspace(-1, 1, 1 << 20, device="cuda", requires_grad=True)
        before = torch.cuda.memory_allocated()
        y = call(torch.sin, stream * 1.0)
        if call is recomputation:
            # The output is the only allocation.
            assert torch.cuda.memory_allocated() - before < 1.5 * stream.numel() * 4
        y.sum().backward()
        assert stream.grad is not None
        gradients.append(stream.grad)
    assert torch.equal(*gradients)


class CountOperators(TorchDispatchMode):
    """Counts how often each operator is called."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def run_with_kept(kept: tuple[str, ...]) -> tuple[Counter[str], Tensor]:
    """Run a block forward and backward. Return the operators of the backward, and a gradient."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(8, 8, generator=generator, requires_grad=True)
    stream = torch.randn(2, 3, 4, 8, generator=generator, requires_grad=True)

    def compute(x: Tensor) -> Tensor:
        x = torch.tanh(x @ weight)
        return torch.nn.functional.scaled_dot_product_attention(x, x, x).exp()

    recomputation = Recomputation(
        TensorParallel(), partition=False, in_cpu=True, kept_operators=kept
    )
    y = recomputation(compute, stream)
    with CountOperators() as counter:
        y.sum().backward()
    assert weight.grad is not None
    return counter.counts, weight.grad


@pytest.mark.parametrize("kept", [("matmul",), ("attention",), ("matmul", "attention")])
# torch 2.15 warns if a checkpoint leaves open whether results pass through the hooks of the input.
@pytest.mark.filterwarnings("error::FutureWarning")
def test_kept_operators_are_not_computed_again(kept: tuple[str, ...]) -> None:
    all_counts, expected = run_with_kept(())
    counts, gradient = run_with_kept(kept)
    assert torch.equal(gradient, expected)
    attention = "_scaled_dot_product_flash_attention_for_cpu.default"
    again = {"matmul": all_counts["mm.default"] - 1, "attention": all_counts[attention] - 1}
    found = {"matmul": counts["mm.default"], "attention": counts[attention]}
    complete = {"matmul": all_counts["mm.default"], "attention": all_counts[attention]}
    for name in found:
        assert found[name] == (again[name] if name in kept else complete[name])
    # Everything else is computed again.
    assert counts["tanh.default"] == all_counts["tanh.default"] == 1

"""Tests of weight gradients that products add up in fp32 (--gradient-accumulation-fusion)."""

from collections.abc import Callable, Sequence
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from parallel.test_tensor_parallel import join
from process_pool import ProcessPool, succeed
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from megatron.parallel import weight_gradient
from megatron.parallel.layers import ColumnParallelLinear, RowParallelLinear, list_numbers
from megatron.parallel.mesh import TensorParallel
from megatron.parallel.parameter_spec import Init, make_linear_specs
from megatron.parallel.weight_gradient import add_to_gradient, number_layer

HALVES = [torch.bfloat16, torch.float16]
MICROBATCHES = 4
Layer = ColumnParallelLinear | RowParallelLinear


def make_layer(
    kind: type[Layer],
    dtype: torch.dtype,
    tp: TensorParallel,
    *,
    fused: bool,
    sizes: tuple[int, int] = (24, 16),
) -> Layer:
    columns, rows = sizes
    shard_dim = {ColumnParallelLinear: 0, RowParallelLinear: 1}[kind]
    specs = make_linear_specs("linear", rows, columns, Init.NORMAL, bias=True, shard_dim=shard_dim)
    layer = kind(specs, "linear", tp).to(dtype)
    generator = torch.Generator().manual_seed(3 + tp.rank)
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
        # As the engine does it.
        parameter.grad_dtype = torch.float32
    layer.number = number_layer(layer) if fused else None
    return layer


def make_inputs(dtype: torch.dtype, width: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(6, 3, width, generator=generator).to(dtype).requires_grad_()
        for _ in range(MICROBATCHES)
    ]


def accumulate(
    layer: Layer, inputs: Sequence[Tensor], call: Callable[..., Tensor] | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Run all microbatches. Return the weight's gradient, and all other gradients and outputs."""
    others: list[Tensor] = []
    for x in inputs:
        out = layer(x) if call is None else call(layer, x)
        out.backward(torch.cos(out.detach()))
        assert x.grad is not None
        others += [out.detach(), x.grad]
    assert layer.weight.grad is not None
    assert layer.bias is not None
    assert layer.bias.grad is not None
    return layer.weight.grad, [*others, layer.bias.grad]


def compute_exactly(layer: Layer, inputs: Sequence[Tensor]) -> Tensor:
    """Return the weight's gradient in float64, from the same inputs and output gradients."""
    total = torch.zeros(layer.weight.shape, dtype=torch.float64)
    for x in inputs:
        gradient = torch.cos(layer(x.detach()).detach())
        total += gradient.flatten(0, 1).double().t() @ x.detach().flatten(0, 1).double()
    return total


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
@pytest.mark.parametrize("dtype", HALVES)
def test_the_gradient_is_closer_to_the_exact_one(dtype: torch.dtype, kind: type[Layer]) -> None:
    errors = []
    results = []
    for fused in (False, True):
        layer = make_layer(kind, dtype, TensorParallel(), fused=fused)
        inputs = make_inputs(dtype, 24)
        gradient, others = accumulate(layer, inputs)
        assert gradient.dtype == torch.float32
        exact = compute_exactly(layer, inputs)
        errors.append(((gradient - exact).norm() / exact.norm()).item())
        results.append(others)
    rounded, fused_error = errors
    assert fused_error < 1e-6
    assert rounded > 1e-5
    # Nothing else differs, not by one bit.
    for plain, other in zip(*results, strict=True):
        assert torch.equal(plain, other)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_recomputed_layer_adds_to_the_same_gradient(dtype: torch.dtype) -> None:
    """A recomputation unpacks saved tensors as copies. Their gradients would be lost."""
    gradients = []
    for call in (None, lambda layer, x: checkpoint(layer, x, use_reentrant=False)):
        layer = make_layer(ColumnParallelLinear, dtype, TensorParallel(), fused=True)
        gradients.append(accumulate(layer, make_inputs(dtype, 24), call)[0])
    assert torch.equal(*gradients)


def feed_forward(layers: Sequence[Layer], x: Tensor) -> Tensor:
    up, down = layers
    return x + down(F.relu(up(x)))


def accumulate_pairs(
    pairs: Sequence[Sequence[Layer]], call: Callable[..., Tensor], *, recomputed: bool
) -> list[Tensor]:
    """Return all gradients of several pairs of layers, one after the other."""
    inputs = make_inputs(torch.bfloat16, 24)
    for x in inputs:
        out = x
        for pair in pairs:
            if recomputed:
                out = checkpoint(call, pair, out, use_reentrant=False)
            else:
                out = call(pair, out)
        out.backward(torch.cos(out.detach()))
    leaves = [*inputs, *(each for pair in pairs for layer in pair for each in layer.parameters())]
    assert all(leaf.grad is not None for leaf in leaves)
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def test_compiled_layers_share_a_graph_and_add_to_their_own_gradients() -> None:
    """The numbers are those of layers that are not compiled, bit for bit."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    results = []
    compiled = torch.compile(feed_forward, fullgraph=True, backend="aot_eager")
    for call, recomputed in ((feed_forward, False), (compiled, False), (compiled, True)):
        pairs = [
            [
                make_layer(kind, torch.bfloat16, TensorParallel(), fused=True, sizes=sizes)
                for kind, sizes in (
                    (ColumnParallelLinear, (24, 16)),
                    (RowParallelLinear, (16, 24)),
                )
            ]
            for _ in range(2)
        ]
        results.append(accumulate_pairs(pairs, call, recomputed=recomputed))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))
    assert counters["stats"]["unique_graphs"] == 1


def test_hooks_of_the_gradient_are_called() -> None:
    """Autograd calls them although it gets no gradient. The dry run relies on it."""
    layer = make_layer(ColumnParallelLinear, torch.bfloat16, TensorParallel(), fused=True)
    seen: list[Tensor] = []
    layer.weight.register_post_accumulate_grad_hook(seen.append)
    accumulate(layer, make_inputs(torch.bfloat16, 24))
    assert len(seen) == MICROBATCHES
    assert all(each is layer.weight for each in seen)


def test_large_sums_in_fp16_do_not_overflow() -> None:
    weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.float16))
    weight.grad_dtype = torch.float32
    large = torch.full((2, 8), 200.0, dtype=torch.float16)
    add_to_gradient(weight, large, large.t())
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full((2, 2), 320000.0))


class ProductRecorder(TorchDispatchMode):
    """Records matrix products by the names of torch's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.__name__.startswith(("mm", "addmm")):
            self.names.append(function.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="torch computes addmm with out_dtype on CUDA tensors only"
)
def test_the_gpu_gets_the_operators_with_a_result_in_fp32() -> None:
    """On meta tensors torch checks the arguments of both operators."""
    weight = nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16, device="meta"))
    weight.grad_dtype = torch.float32
    rows = torch.zeros(8, 2, dtype=torch.bfloat16, device="meta")
    states = torch.zeros(8, 3, dtype=torch.bfloat16, device="meta")
    with (
        ProductRecorder() as recorder,
        mock.patch.object(weight_gradient, "_has_fp32_results", return_value=True),
    ):
        for _ in range(3):
            add_to_gradient(weight, rows.t(), states)
    assert recorder.names == ["mm.dtype", "addmm.dtype_out", "addmm.dtype_out"]
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    assert weight.grad.shape == (2, 3)


def check_on_ranks(ranks: int, sequence_parallel: bool) -> None:
    """Compare a column-parallel and a gated layer with autograd's, on tensor-parallel ranks."""
    from megatron.parallel.collectives import enter_tensor_parallel
    from megatron.parallel.entered_linear import apply_entered_linears

    tp = join(ranks, sequence_parallel).tensor_parallel
    for dtype in HALVES:
        layers = [make_layer(ColumnParallelLinear, dtype, tp, fused=True) for _ in range(2)]
        layers[1].weight.data.neg_()
        x = make_inputs(dtype, 24, seed=tp.rank * sequence_parallel)[0]
        pairs = [(layer.weight, layer.bias) for layer in layers]
        outs = apply_entered_linears(x, pairs, tp, numbers=list_numbers(*layers))
        torch.autograd.backward(outs, [torch.cos(out.detach()) for out in outs])
        entered = enter_tensor_parallel(x.detach(), tp)
        for layer, out in zip(layers, outs, strict=True):
            assert torch.equal(out, F.linear(entered, layer.weight, layer.bias))
            gradient = torch.cos(out.detach()).flatten(0, 1).float()
            expected = gradient.t() @ entered.flatten(0, 1).float()
            assert layer.weight.grad is not None
            assert torch.equal(layer.weight.grad, expected)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_ranks(sequence_parallel: bool, pool: ProcessPool) -> None:
    succeed(pool.run(2, check_on_ranks, 2, sequence_parallel))

"""Tests of linear layers whose backward pass communicates while it computes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from parallel.test_tensor_parallel import join
from process_pool import ProcessPool, succeed
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

WIDTH = 24
ROWS = 10
"""Output features of a rank."""


def make_layers(rank: int, count: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor | None]]:
    """Return the weights of a rank's layers. The first layer has a bias."""
    generator = torch.Generator().manual_seed(rank)
    layers: list[tuple[Tensor, Tensor | None]] = []
    for number in range(count):
        weight = torch.randn(ROWS, WIDTH, generator=generator).to(dtype).requires_grad_()
        bias = None
        if number == 0:
            bias = torch.randn(ROWS, generator=generator).to(dtype).requires_grad_()
        layers.append((weight, bias))
    return layers


def apply_plainly(x: Tensor, layers: Any, tp: Any) -> tuple[Tensor, ...]:
    """Return what `apply_entered_linears` returns, with autograd's own backward pass."""
    from megatron.parallel.collectives import enter_tensor_parallel

    entered = enter_tensor_parallel(x, tp)
    return tuple(F.linear(entered, weight, bias) for weight, bias in layers)


def check_bits(ranks: int, sequence_parallel: bool) -> None:
    """Compare outputs and gradients with those of separate functions, bit for bit."""
    from megatron.parallel.entered_linear import apply_entered_linears

    tp = join(ranks, sequence_parallel).tensor_parallel
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for count in (1, 2):
            results = []
            for function in (apply_plainly, apply_entered_linears):
                generator = torch.Generator().manual_seed(7 + tp.rank * sequence_parallel)
                length = 8 // ranks if sequence_parallel else 8
                x = torch.randn(length, 3, WIDTH, generator=generator).to(dtype).requires_grad_()
                layers = make_layers(tp.rank, count, dtype)
                outs = function(x, layers, tp)
                torch.stack([out.float().square().sum() for out in outs]).sum().backward()
                leaves = [x, *(leaf for layer in layers for leaf in layer if leaf is not None)]
                results.append([*outs, *(leaf.grad for leaf in leaves)])
            for expected, found in zip(*results, strict=True):
                assert expected is not None
                assert found is not None
                assert expected.dtype == found.dtype == dtype
                assert torch.equal(expected.detach(), found.detach())


@pytest.mark.parametrize(
    ("ranks", "sequence_parallel"), [(2, True), (4, False), (4, True)], ids=str
)
def test_numbers_equal_those_of_separate_functions(
    ranks: int, sequence_parallel: bool, pool: ProcessPool
) -> None:
    succeed(pool.run(ranks, check_bits, ranks, sequence_parallel))


@contextmanager
def record_saved() -> Iterator[list[Tensor]]:
    """Yield the tensors that autograd saves within a `with` block."""
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield saved


def measure_saved(sequence_parallel: bool, gated: bool) -> list[int]:
    """Return the sizes of the different tensors that the first half of an MLP saves."""
    from megatron.parallel.entered_linear import apply_entered_linears

    tp = join(4, sequence_parallel).tensor_parallel
    layers = make_layers(tp.rank, 1 + gated, torch.float32)
    x = torch.randn(2 if sequence_parallel else 8, 3, WIDTH, requires_grad=True)
    with record_saved() as saved:
        apply_entered_linears(x, layers, tp)
    weights = {weight.data_ptr() for weight, _ in layers}
    by_memory = {tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in saved}
    return [size for pointer, size in by_memory.items() if pointer not in weights]


@pytest.mark.parametrize("gated", [False, True])
def test_only_the_own_slice_of_the_sequence_is_saved(gated: bool, pool: ProcessPool) -> None:
    """The complete input has 8 x 3 x 24 numbers of 4 bytes. A rank keeps a quarter of them."""
    complete = 8 * 3 * WIDTH * 4
    for outcome in pool.run(4, measure_saved, False, gated):
        assert outcome.value == [complete]
    for outcome in pool.run(4, measure_saved, True, gated):
        assert outcome.value == [complete // 4]


class ProductRecorder(TorchDispatchMode):
    """Records matrix products by the shape of their result."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.mm.default:
            self.events.append("input" if result.shape[0] == 24 else "weight")
        return result


def record_backward(sequence_parallel: bool) -> list[str]:
    """Return the order of products and collectives in the backward pass of two layers."""
    from megatron.parallel import collectives, entered_linear
    from megatron.parallel.entered_linear import apply_entered_linears

    tp = join(2, sequence_parallel).tensor_parallel
    events: list[str] = []
    wait = collectives.PendingTensor.wait

    def record_wait(self: Any) -> Tensor:
        if self.work is not None:
            events.append("wait")
        return wait(self)

    def record_begin(name: str) -> Any:
        original = getattr(entered_linear, name)

        def begin(x: Tensor, tp: Any) -> Any:
            events.append(name)
            return original(x, tp)

        return mock.patch.object(entered_linear, name, begin)

    layers = make_layers(tp.rank, 2, torch.float32)
    x = torch.randn(4 if sequence_parallel else 8, 3, WIDTH, requires_grad=True)
    outs = apply_entered_linears(x, layers, tp)
    with (
        record_begin("begin_all_gather"),
        record_begin("begin_all_reduce"),
        record_begin("begin_reduce_scatter"),
        mock.patch.object(collectives.PendingTensor, "wait", record_wait),
        ProductRecorder(events),
    ):
        torch.autograd.backward(outs, [torch.ones_like(out) for out in outs])
    return events


def test_communication_runs_during_the_products(pool: ProcessPool) -> None:
    for outcome in pool.run(2, record_backward, False):
        assert outcome.value == [
            *("input", "input", "begin_all_reduce", "weight", "weight", "wait")
        ]
    for outcome in pool.run(2, record_backward, True):
        assert outcome.value == [
            *("begin_all_gather", "input", "input", "begin_reduce_scatter", "wait"),
            *("weight", "weight", "wait"),
        ]


def check_frozen_weight() -> None:
    """Without a gradient of the weight, the input is not gathered again."""
    from megatron.parallel import entered_linear
    from megatron.parallel.entered_linear import apply_entered_linears

    tp = join(2, True).tensor_parallel
    ((weight, bias),) = make_layers(tp.rank, 1, torch.float32)
    x = torch.randn(4, 3, WIDTH, requires_grad=True)
    (out,) = apply_entered_linears(x, [(weight.detach(), bias)], tp)
    with mock.patch.object(entered_linear, "begin_all_gather") as gather:
        out.sum().backward()
    gather.assert_not_called()
    assert x.grad is not None
    assert weight.grad is None
    assert bias is not None
    assert bias.grad is not None
    assert torch.equal(bias.grad, torch.full((ROWS,), 24.0))


def test_a_weight_without_gradient(pool: ProcessPool) -> None:
    succeed(pool.run(2, check_frozen_weight))

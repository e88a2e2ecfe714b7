"""Products of odd widths are padded with zeros. A CPU needs no padding, so it is forced here."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.model.loss import VocabSlice, cross_entropy
from megatron.parallel import padding
from megatron.parallel.entered_linear import ALONE, apply_entered_linears
from megatron.parallel.layers import ColumnParallelLinear, RowParallelLinear, list_numbers
from megatron.parallel.parameter_spec import Init, Specs, make_linear_specs
from megatron.parallel.weight_gradient import number_layer

HIDDEN, INNER = 14, 21
"""Widths that are multiples of 16 and 24 with padding."""
MICROBATCHES = 3
Draw = Callable[..., Tensor]


def is_tensor(x: object) -> bool:
    """Return True for each tensor. torch's compiler cannot look into a mock."""
    return isinstance(x, Tensor)


@contextmanager
def pad_on_cpu() -> Iterator[None]:
    """Pad products within a `with` block as on a GPU, however few rows they have."""
    with (
        mock.patch.object(padding, "_is_slow", is_tensor),
        mock.patch.object(padding, "_FEWEST_ROWS", 1),
    ):
        yield


def make_specs(rows: int, columns: int, shard_dim: int) -> Specs:
    return make_linear_specs("linear", rows, columns, Init.NORMAL, bias=True, shard_dim=shard_dim)


class Gated(nn.Module):
    """A gated MLP, which notes the width of its inner activations."""

    def __init__(self, dtype: torch.dtype, draw: Draw, *, fused: bool) -> None:
        super().__init__()
        self.up, self.gate = (
            ColumnParallelLinear(make_specs(INNER, HIDDEN, 0), "linear", ALONE) for _ in range(2)
        )
        self.down = RowParallelLinear(make_specs(HIDDEN, INNER, 1), "linear", ALONE)
        self.to(dtype)
        for layer in (self.up, self.gate, self.down):
            layer.number = number_layer(layer) if fused else None
            for parameter in layer.parameters():
                parameter.data.copy_(draw(parameter.shape))
                parameter.grad_dtype = torch.float32

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        layers = [(self.up.weight, self.up.bias), (self.gate.weight, self.gate.bias)]
        numbers = list_numbers(self.up, self.gate)
        up, gate = apply_entered_linears(x, layers, ALONE, numbers=numbers)
        return x + self.down(F.relu(gate) * up), up.shape[-1]


def compute(
    dtype: torch.dtype, draw: Draw, *, fused: bool, padded: bool, compiled: bool = False
) -> list[Tensor]:
    """Return outputs and all gradients of some microbatches."""
    torch.manual_seed(5)
    model = Gated(dtype, draw, fused=fused)
    results = []
    torch._dynamo.reset()
    call = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    with pad_on_cpu() if padded else nullcontext():
        for _ in range(MICROBATCHES):
            x = draw((5, 2, HIDDEN)).to(dtype).requires_grad_()
            out, width = call(x)
            assert width == (24 if padded else INNER)
            out.backward(draw(out.shape).to(dtype))
            assert x.grad is not None
            results += [out.detach(), x.grad]
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.is_contiguous()
        assert parameter.grad.shape == parameter.shape
        results.append(parameter.grad)
    return results


def draw_integers(shape: tuple[int, ...]) -> Tensor:
    """Return integers. All products and sums of them are below 2,048, so fp16 has them exactly."""
    return torch.randint(-1, 2, shape).float()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_small_integers_have_the_same_bits(fused: bool, compiled: bool) -> None:
    expected = compute(torch.float16, draw_integers, fused=fused, padded=False)
    found = compute(torch.float16, draw_integers, fused=fused, padded=True, compiled=compiled)
    for one, other in zip(expected, found, strict=True):
        assert one.dtype == other.dtype
        assert one.abs().max() < 2048
        assert torch.equal(one, other)


def test_random_numbers_differ_by_rounding_only() -> None:
    expected, found = (
        compute(torch.float32, torch.randn, fused=False, padded=padded) for padded in (False, True)
    )
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)


def compute_loss(dtype: torch.dtype, *, padded: bool) -> list[Tensor]:
    """Return loss and gradients with 37 ids, of which 35 are real."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(6, 2, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(37, HIDDEN, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, 35, (6, 2), generator=generator)
    with pad_on_cpu() if padded else nullcontext():
        loss = cross_entropy(hidden, weight, labels, VocabSlice(0, 35), ALONE)
        loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert not weight.grad[35:].any()
    return [loss.detach(), hidden.grad, weight.grad]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_of_an_odd_vocabulary(dtype: torch.dtype) -> None:
    expected, found = (compute_loss(dtype, padded=padded) for padded in (False, True))
    for one, other in zip(expected, found, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(
            other, one, rtol=1e-5 if dtype == torch.float32 else 8e-3, atol=1e-6
        )

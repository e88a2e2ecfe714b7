"""The Triton kernels of `gate.py`. Each program computes a block of elements in fp32.

They round to 16 bits at the same places as PyTorch's operators. So both give the same bits, except
where fp32 results differ in the last bit.
"""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _activate(x, activation: tl.constexpr):
    """Return the activation of x in fp32, and its derivative."""
    if activation == "swiglu":
        sigmoid = 1.0 / (1.0 + tl.exp(-x))
        value = x * sigmoid
        slope = sigmoid * (1.0 + x * (1.0 - sigmoid))
    elif activation == "geglu":
        # The erf form. 0.7071.. is 1/sqrt(2), and 0.3989.. is 1/sqrt(2 pi).
        below = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        value = x * below
        slope = below + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif activation == "reglu":
        # NaN stays NaN, as in PyTorch.
        value = tl.where(x < 0, 0.0, x)
        slope = tl.where(x > 0, 1.0, 0.0)
    else:
        tl.static_assert(activation == "liglu")
        value = x
        slope = x * 0.0 + 1.0
    return value, slope


@triton.jit
def _forward(gate, up, out, size, activation: tl.constexpr, block: tl.constexpr):
    """Write activation(gate) * up."""
    index = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    present = index < size
    g = tl.load(gate + index, mask=present, other=0.0)
    u = tl.load(up + index, mask=present, other=0.0)
    value, _ = _activate(g.to(tl.float32), activation)
    value = value.to(g.dtype).to(tl.float32)
    tl.store(out + index, (value * u.to(tl.float32)).to(g.dtype), mask=present)


@triton.jit
def _backward(
    grad, gate, up, grad_gate, grad_up, size, activation: tl.constexpr, block: tl.constexpr
):
    """Write the gradients of gate and up."""
    index = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    present = index < size
    dtype = gate.dtype.element_ty
    d = tl.load(grad + index, mask=present, other=0.0).to(tl.float32)
    g = tl.load(gate + index, mask=present, other=0.0).to(tl.float32)
    u = tl.load(up + index, mask=present, other=0.0).to(tl.float32)
    value, slope = _activate(g, activation)
    value = value.to(dtype).to(tl.float32)
    of_value = (d * u).to(dtype).to(tl.float32)
    tl.store(grad_gate + index, (of_value * slope).to(dtype), mask=present)
    tl.store(grad_up + index, (d * value).to(dtype), mask=present)


@triton.jit
def _square(x, out, size, block: tl.constexpr):
    """Write the square of the positive part."""
    index = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    present = index < size
    value = tl.load(x + index, mask=present, other=0.0).to(tl.float32)
    # NaN stays NaN, as in PyTorch.
    value = tl.where(value < 0, 0.0, value)
    tl.store(out + index, (value * value).to(out.dtype.element_ty), mask=present)


@triton.jit
def _square_backward(grad, x, out, size, block: tl.constexpr):
    """Write the gradient of the square of the positive part."""
    index = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    present = index < size
    dtype = out.dtype.element_ty
    slope = tl.load(grad + index, mask=present, other=0.0).to(tl.float32)
    value = tl.load(x + index, mask=present, other=0.0).to(tl.float32)
    # PyTorch rounds 2 x before the product, so in fp16 this may be infinite.
    slope *= (value + value).to(dtype).to(tl.float32)
    tl.store(out + index, tl.where(value <= 0, 0.0, slope).to(dtype), mask=present)


def launch_square(x: Tensor, out: Tensor) -> None:
    """Write the square of the positive part of `x`. Both tensors are contiguous."""
    size = out.numel()
    _square[(triton.cdiv(size, _BLOCK),)](x, out, size, _BLOCK)


def launch_square_backward(grad: Tensor, x: Tensor, out: Tensor) -> None:
    """Write the gradient of `x`. All tensors are contiguous."""
    size = out.numel()
    _square_backward[(triton.cdiv(size, _BLOCK),)](grad, x, out, size, _BLOCK)


def launch_forward(gate: Tensor, up: Tensor, out: Tensor, activation: str) -> None:
    """Write activation(gate) * up. All tensors are contiguous."""
    size = out.numel()
    _forward[(triton.cdiv(size, _BLOCK),)](gate, up, out, size, activation, _BLOCK)


def launch_backward(
    grad: Tensor, gate: Tensor, up: Tensor, grad_gate: Tensor, grad_up: Tensor, activation: str
) -> None:
    """Write the gradients of `gate` and `up`. All tensors are contiguous."""
    size = grad.numel()
    _backward[(triton.cdiv(size, _BLOCK),)](
        grad, gate, up, grad_gate, grad_up, size, activation, _BLOCK
    )

"""Comparisons of the kernels of residual additions and norms with PyTorch's operators.

They run on any device that runs the kernels. PyTorch's operators compute in fp64, because those of
a CPU add up gradients in 16 bits. The results are rounded where operators in 16 bits round.
"""

from contextlib import nullcontext
from unittest import mock

import torch
import torch.nn.functional as F
from model.kernel_comparisons import find_power, measure_pairs
from torch import Tensor

from megatron.extras.step.kernels.residual_norm import add_and_normalise
from megatron.extras.step.kernels.rotary import normalise_projection
from megatron.model.norm import LayerNorm, Norm, RMSNorm
from megatron.model.positions import make_rotary_table, rotate
from megatron.parallel.mesh import TensorParallel

CENTRED = ("RMSNorm of weights minus 1", "LayerNorm of weights minus 1")
NORMS = ("RMSNorm", "LayerNorm", "LayerNorm without bias", *CENTRED)


def make_norm(name: str, width: int) -> Norm:
    """Return a norm of `NORMS` with random weights."""
    module: type[Norm] = RMSNorm if name.startswith("RMSNorm") else LayerNorm
    bias, centred = not name.endswith("without bias"), name in CENTRED
    norm = module(width, 1e-5, TensorParallel(), bias=bias, zero_centred=centred)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_((not centred) + 0.3 * torch.randn(width, generator=generator))
    return norm


def count_units(found: Tensor, expected: Tensor, *operands: Tensor) -> float:
    """Return the largest difference in units of the type of `found`.

    A unit is 1e-6 of a value in fp32, and its last digit in 16 bits.

    Args:
        found: The result of a kernel.
        expected: The result of PyTorch's operators, in fp64 or in the type of `found`.
        operands: The summands of a sum. A small sum has the unit of its largest summand.
    """
    assert found.shape == expected.shape
    # The powers of two of a GPU are not exact.
    found, *others = (each.detach().cpu() for each in (found, expected, *operands))
    expected = others[0]
    size = torch.stack([each.double().abs().expand_as(found) for each in others])
    size = size.amax(0)
    if found.dtype == torch.float32:
        unit = 1e-6 * size.clamp(min=float(size.mean()))
    else:
        limits = torch.finfo(found.dtype)
        unit = limits.eps * find_power(size.clamp(min=limits.smallest_normal))
    return float(((found.double() - expected.double()).abs() / unit).max())


def compare_norm(
    name: str,
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    device: str,
    *,
    with_branch: bool,
    programs: int | None = None,
) -> dict[str, float]:
    """Compare a norm of the residual stream and the addition beside it.

    Args:
        name: A norm of `NORMS`.
        sizes: [s, b, h].
        dtype: That of all tensors.
        device: Where it is computed.
        with_branch: Whether something is added before the norm.
        programs: Those of the backward kernel. None: as in a run.
    """
    generator = torch.Generator().manual_seed(5)
    s, b, h = sizes
    # The memory of these tensors has another order.
    x, branch, of_total, of_norm = (
        torch.randn((b, s, h), generator=generator).to(device, dtype).transpose(0, 1)
        for _ in range(4)
    )
    norm = make_norm(name, h).to(device, dtype)
    inputs = [x.requires_grad_(), *norm.parameters()]
    if with_branch:
        inputs.append(branch.requires_grad_())
    total, out = add_and_normalise(x, branch if with_branch else None, norm)
    count = "megatron.extras.step.kernels.residual_norm_kernel.count_programs"
    with nullcontext() if programs is None else mock.patch(count, return_value=programs):
        grads = torch.autograd.grad([total, out], inputs, [of_total, of_norm])
    assert torch.equal(total, x + branch if with_branch else x)
    if with_branch:
        assert torch.equal(grads[-1], grads[0])

    weight, bias = norm.weight.detach().double(), torch.zeros((), device=device)
    # A sum in 16 bits would round the weight.
    weight = weight + float(norm.zero_centred)
    if isinstance(norm, LayerNorm) and norm.bias is not None:
        bias = norm.bias.detach().double()
    leaves = [total.detach().double().requires_grad_(), weight.requires_grad_()]
    if isinstance(norm, RMSNorm):
        exact = F.rms_norm(leaves[0], weight.shape, weight, norm.eps)
    else:
        exact = F.layer_norm(leaves[0], weight.shape, weight, None, norm.eps)
    narrow = torch.float64 if dtype == torch.float32 else dtype
    through, of_weight = torch.autograd.grad(exact, leaves, of_norm.double())
    through, exact = through.to(narrow), exact.detach()
    units = {
        "norm": count_units(out.detach(), (exact + bias).to(narrow), exact, bias),
        "gradient": count_units(grads[0], through + of_total.to(narrow), through, of_total),
        "weight": count_units(grads[1], of_weight.to(narrow)),
    }
    if bias.dim():
        of_bias = of_norm.double().sum((0, 1)).to(narrow)
        units["bias"] = count_units(grads[2], of_bias)
    return units


def compare_head_norm(
    sizes: tuple[int, ...],
    channels: int,
    dtype: torch.dtype,
    device: str,
    *,
    by_sample: bool,
    programs: int | None = None,
) -> dict[str, float]:
    """Compare the norms of queries and keys with their rotation.

    Args:
        sizes: [s, b, g, n, d].
        channels: How many of d are rotated.
        dtype: That of the projection and of the weights.
        device: Where it is computed.
        by_sample: Whether samples have different positions.
        programs: Those of the backward kernel. None: as in a run.
    """
    s, b, g, n, d = sizes
    generator = torch.Generator().manual_seed(6)
    qkv = torch.randn((s, b, g, n + 2, d), generator=generator).to(device, dtype).requires_grad_()
    norms = [make_norm("RMSNorm", d).to(device, dtype) for _ in range(2)]
    with torch.no_grad():
        norms[1].weight.neg_()
    cos, sin = (
        table[3:] for table in make_rotary_table(s + 3, channels, 1e4, torch.device(device))
    )
    if by_sample:
        cos, sin = (torch.cat((table, table.flip(0)), dim=1) for table in (cos, sin))
    assert isinstance(norms[0], RMSNorm)
    assert isinstance(norms[1], RMSNorm)
    found = normalise_projection(qkv, norms[0], norms[1], cos, sin)
    # The gradients of attention have other strides: [b, n, s, d] is contiguous.
    grads = [
        torch.randn((b, *part.shape[2:4], s, d), generator=generator)
        .to(device, dtype)
        .permute(3, 0, 1, 2, 4)
        for part in found
    ]
    count = "megatron.extras.step.kernels.rotary_kernel.count_programs"
    with nullcontext() if programs is None else mock.patch(count, return_value=programs):
        of_qkv, *of_weights = torch.autograd.grad(
            found, [qkv, *(norm.weight for norm in norms)], grads
        )
    narrow = torch.float64 if dtype == torch.float32 else dtype
    heads = qkv.detach().split((n, 1, 1), dim=3)
    assert torch.equal(found[2], heads[2])
    assert torch.equal(of_qkv[:, :, :, -1:], grads[2])
    units = {}
    parts = of_qkv.split((n, 1, 1), dim=3)
    for number, name in enumerate(("query", "key")):
        leaf = heads[number].double().requires_grad_()
        weight = norms[number].weight.detach().double().requires_grad_()
        normal = F.rms_norm(leaf, weight.shape, weight, norms[number].eps)
        turned = rotate(normal.detach().to(narrow), cos, sin)
        # Another rounding of the norm is one unit of the longer channel of a pair.
        units[name] = count_units(found[number], turned, measure_pairs(turned, channels))
        back = rotate(grads[number].to(narrow), cos, -sin)
        expected = torch.autograd.grad(normal, (leaf, weight), back.double())
        units[f"gradient of {name}"] = count_units(parts[number], expected[0].to(narrow))
        units[f"weight of {name}"] = count_units(of_weights[number], expected[1].to(narrow))
    return units

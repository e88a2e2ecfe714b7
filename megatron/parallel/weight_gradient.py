"""Weight gradients that matrix products add up in fp32, without rounding to 16 bits in between.

A weight in 16 bits gets its gradient from a product of two 16-bit matrices. Autograd rounds each
microbatch's product to 16 bits before it adds it to the fp32 gradient. The terms of the
product are summed in fp32 in any case, so here they are added to the gradient directly. Megatron-LM
calls this gradient accumulation fusion.

The invariant: except for the rounding, `weight.grad` is what autograd would compute.
"""

from itertools import count
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from megatron.parallel.padding import trim_matrix

_layers: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()
"""The layers that compiled graphs know by a number."""
_numbers = count()


def number_layer(layer: nn.Module) -> Tensor:
    """Return a number by which `find_weight` finds the weight of a layer, a scalar on the host.

    A compiled graph gets copies of the weights, and several layers share the graph. A tensor may
    differ from layer to layer, while a Python number would be a part of the graph.
    """
    number = next(_numbers)
    _layers[number] = layer
    return torch.tensor(number, device="cpu")


def find_weight(number: Tensor) -> Tensor:
    """Return the leaf that is the weight of a layer now, from what `number_layer` returned."""
    weight = _layers[int(number)].weight
    assert isinstance(weight, Tensor), "a linear layer has a weight"
    return weight


def _has_fp32_results(a: Tensor) -> bool:
    """Return whether the device multiplies matrices in 16 bits with a result in fp32."""
    return a.is_cuda


def multiply_in_fp32(a: Tensor, b: Tensor) -> Tensor:
    """Return the product of two 16-bit matrices [m, k] and [k, n] in fp32, [m, n]."""
    if _has_fp32_results(a):
        return torch.mm(a, b, out_dtype=torch.float32)
    # A CPU has no such product. It multiplies fp32 copies, so each term is exact here too.
    return a.float() @ b.float()


def add_to_gradient(weight: Tensor, a: Tensor, b: Tensor) -> None:
    """Add the product of two 16-bit matrices to the fp32 gradient of a weight.

    Args:
        weight: [m, n], a leaf in 16 bits whose `grad_dtype` is fp32.
        a: [m, k], or with more rows.
        b: [k, n], or with more columns.
    """
    if weight.grad is None:
        # The first product is the gradient, so no memory is filled with zeros.
        weight.grad = trim_matrix(multiply_in_fp32(a, b), *weight.shape)
    elif (a.shape[0], b.shape[1]) != weight.shape:
        # The gradient is contiguous, because FSDP2 and optimizers need it. A product would write
        # its rows slowly.
        weight.grad += multiply_in_fp32(a, b)[: len(weight), : weight.shape[1]]
    elif _has_fp32_results(a):
        # The product reads and writes the gradient, so there is no second fp32 matrix.
        torch.addmm(weight.grad, a, b, out_dtype=torch.float32, out=weight.grad)
    else:
        weight.grad.addmm_(a.float(), b.float())

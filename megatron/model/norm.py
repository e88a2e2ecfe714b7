"""LayerNorm and RMSNorm, with statistics in fp32 for any input dtype.

The output has the weights' dtype. This is the dtype of the computation, even if the residual stream
is kept in fp32. The norms are over the last dimension, except `ShardedRMSNorm`.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.base import apex
from megatron.config.model import ModelConfig, Normalization
from megatron.config.table import Table
from megatron.model.layer_parts import NORMS, centre_at_zero
from megatron.parallel.collectives import copy_to_tensor_parallel, reduce_from_tensor_parallel
from megatron.parallel.layers import (
    make_replicated_inside_region,
    make_replicated_outside_region,
    make_sharded,
)
from megatron.parallel.mesh import TensorParallel
from megatron.parallel.parameter_spec import ParameterSpec
from megatron.parallel.spmd import declare

MakeParameter = Callable[[ParameterSpec, TensorParallel], nn.Parameter]
"""A function that makes a parameter from its spec and the tensor-parallel ranks."""

# The kernels are looked up once, at import. A lookup in `forward` would cost time in every step.
_apex_layer_norm, _apex_reason = apex.find(
    "apex.normalization.fused_layer_norm", "fused_layer_norm_affine"
)
_apex_rms_norm, _ = apex.find("apex.normalization.fused_layer_norm", "fused_rms_norm_affine")


class Norm(nn.Module):
    """A norm over the last dimension. Its row in `NORMS` has its parameters."""

    name: ClassVar[Normalization]
    on_cpu: ClassVar[str] = "torch"
    """What computes it on a CPU, for the table printed at start."""
    on_gpu: ClassVar[str] = "torch"
    """What computes it on a GPU without apex."""
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        size: int,
        eps: float,
        tp: TensorParallel,
        make: MakeParameter = make_replicated_outside_region,
        *,
        bias: bool = True,
        zero_centred: bool = False,
    ) -> None:
        """Create the parameters, uninitialised.

        Args:
            size: Size of the last dimension.
            eps: Added to the variance, or to the mean of the squares.
            tp: The tensor-parallel ranks.
            make: Makes the parameters.
            bias: Whether a norm with a bias has it.
            zero_centred: Whether the weight is stored minus 1. See --apply-layernorm-1p.
        """
        super().__init__()
        self.eps = eps
        self.zero_centred = zero_centred
        specs = NORMS.require(self.name).list_parameters(size)
        if zero_centred:
            specs = centre_at_zero(specs)
        for name, spec in specs.items():
            if bias or name != "bias":
                self.register_parameter(name, make(spec, tp))
        if "bias" not in self._parameters:
            self.register_parameter("bias", None)


class LayerNorm(Norm):
    """y = (x - mean) / sqrt(var + eps) * weight + bias (https://arxiv.org/abs/1607.06450)."""

    name = "LayerNorm"
    on_gpu = "torch, fused"

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., h] to [..., h]."""
        # Each read of a module's parameter is a call of Python.
        weight, bias = self.weight, self.bias
        if self.zero_centred:
            # The kernel takes one dtype for all of its inputs.
            centred = add_one(weight)
            wide = x.to(centred.dtype)
            wide_bias = None
            if bias is not None:
                wide_bias = bias.to(wide.dtype)
            return F.layer_norm(wide, weight.shape, centred, wide_bias, self.eps).to(weight.dtype)
        if x.dtype != weight.dtype:
            # The residual stream is in fp32 and the weights in half precision. The norm is computed
            # in fp32.
            wide = weight.to(x.dtype)
            wide_bias = None if bias is None else bias.to(x.dtype)
            return F.layer_norm(x, weight.shape, wide, wide_bias, self.eps).to(weight.dtype)
        # apex's kernel needs a bias. torch.compile cannot trace it, but fuses PyTorch's operation
        # with its neighbours.
        if (
            x.is_cuda
            and bias is not None
            and _apex_layer_norm is not None
            and not torch.compiler.is_compiling()
        ):
            return _apex_layer_norm(x, weight, bias, weight.shape, self.eps)
        # PyTorch's kernel keeps mean and variance in fp32 for half-precision inputs. `F.layer_norm`
        # calls the same kernel, after tests in Python that are not needed here.
        return torch.layer_norm(x, weight.shape, weight, bias, self.eps)


def add_one(weight: Tensor) -> Tensor:
    """Return 1 + weight in fp32, or in fp64 as it. A sum in 16 bits would round the weight."""
    return weight.to(torch.promote_types(weight.dtype, torch.float32)) + 1


def _compute_rstd(x: Tensor, eps: float) -> Tensor:
    """Return 1 / sqrt(mean(x^2) + eps) over the last dimension, in fp32, or in fp64 as x."""
    # The squares of half-precision inputs may overflow, so the sum is accumulated in fp32.
    wide = torch.promote_types(x.dtype, torch.float32)
    mean_square = (
        torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide).square_().div_(x.shape[-1])
    )
    return mean_square.add_(eps).rsqrt_()


@declare()
class _RMSNormFunction(torch.autograd.Function):
    """RMSNorm in few passes over memory.

    On a CPU, PyTorch's own RMSNorm is a chain of separate operations.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rstd = _compute_rstd(x, eps)
        ctx.save_for_backward(x, weight, rstd)
        return (x * rstd).mul_(weight).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, rstd = ctx.saved_tensors
        grad = grads[0]
        normal = x * rstd  # fp32
        grad_weight = (grad * normal).flatten(0, -2).sum(0, dtype=normal.dtype).to(weight.dtype)
        scaled = grad.to(normal.dtype) * weight
        # The derivative of rstd removes the gradient's component along the normalised input.
        along = torch.linalg.vecdot(scaled, normal, dim=-1).div_(x.shape[-1]).unsqueeze_(-1)
        grad_x = scaled.addcmul_(normal, along, value=-1.0).mul_(rstd)
        return grad_x.to(x.dtype), grad_weight, None


class RMSNorm(Norm):
    """y = x / sqrt(mean(x^2) + eps) * weight (https://arxiv.org/abs/1910.07467)."""

    name = "RMSNorm"
    on_cpu = "our own"
    on_gpu = "torch, fused"

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., h] to [..., h]."""
        if self.zero_centred:
            # The input stays in its dtype, so the backward pass keeps no copy of it in fp32.
            return self._multiply(x, add_one(self.weight)).to(self.weight.dtype)
        return self._multiply(x, self.weight)

    def _multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the norm with this weight, in its dtype."""
        if torch.compiler.is_compiling():
            # A compiler fuses the plain formula with the operations around it.
            rstd = x.float().square().mean(-1, keepdim=True).add(self.eps).rsqrt()
            return (x * rstd * weight).to(weight.dtype)
        if x.is_cuda and x.dtype == weight.dtype and _apex_rms_norm is not None:
            return _apex_rms_norm(x, weight, weight.shape, self.eps)
        if x.is_cuda and x.dtype == weight.dtype:
            return F.rms_norm(x, weight.shape, weight, self.eps)
        if not torch.is_grad_enabled():
            return (x * _compute_rstd(x, self.eps)).mul_(weight).to(weight.dtype)
        return _RMSNormFunction.apply(x, weight, self.eps)


class ShardedRMSNorm(nn.Module):
    """RMSNorm over the channels of all heads. Each tensor-parallel rank holds some of the heads."""

    def __init__(
        self, spec: ParameterSpec, eps: float, tp: TensorParallel, *, zero_centred: bool = False
    ) -> None:
        """Create this rank's part of the weight, uninitialised.

        Args:
            spec: The weight, with the channels of all heads of the model.
            eps: Added to the mean of the squares.
            tp: The tensor-parallel ranks.
            zero_centred: See `Norm`.
        """
        super().__init__()
        self.eps = eps
        self.zero_centred = zero_centred
        self.tp = tp
        self.size = spec.shape[0]
        self.weight = make_sharded(spec, tp)

    def forward(self, x: Tensor) -> Tensor:
        """Map [s, b, g/t, n, d], this rank's heads by group, to the same shape."""
        wide = x.float()
        squares = wide.square().sum((-3, -2, -1), keepdim=True)
        # The heads of every rank depend on the sum over all ranks. So the gradient of a rank's own
        # squares is a sum over the ranks as well.
        squares = copy_to_tensor_parallel(reduce_from_tensor_parallel(squares, self.tp), self.tp)
        rstd = (squares / self.size + self.eps).rsqrt()
        weight: Tensor = self.weight
        if self.zero_centred:
            weight = add_one(weight)
        return (wide * rstd * weight.view(x.shape[-3:])).to(self.weight.dtype)


NORM_MODULES: Table[type[Norm]] = Table(
    "--normalization", {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
)
"""Value of --normalization -> its module."""


def build_norm(
    config: ModelConfig,
    tp: TensorParallel,
    size: int | None = None,
    eps: float | None = None,
    make: MakeParameter = make_replicated_outside_region,
) -> Norm:
    """Build the norm that `--normalization` names.

    Args:
        config: The architecture.
        tp: The tensor-parallel ranks.
        size: Its channels. Default: the hidden size.
        eps: Added to the variance. Default: `--layernorm-epsilon`.
        make: Makes the parameters.
    """
    module = NORM_MODULES.require(config.normalization)
    size = size or config.hidden_size
    return module(
        *(size, eps or config.layernorm_epsilon, tp, make),
        bias=config.norm_bias,
        zero_centred=config.apply_layernorm_1p,
    )


def build_query_key_norm(
    config: ModelConfig, weight: ParameterSpec | None, tp: TensorParallel
) -> Norm | ShardedRMSNorm | None:
    """Build the norm that `--qk-norm` names, for queries or keys [s, b, g/t, n, d].

    Args:
        config: The architecture.
        weight: Its weight in the complete model. None: there is no such norm.
        tp: The tensor-parallel ranks.
    """
    if weight is None:
        return None
    if weight.is_sharded:
        return ShardedRMSNorm(
            weight, config.layernorm_epsilon, tp, zero_centred=config.apply_layernorm_1p
        )
    return build_norm(config, tp, weight.shape[0], make=make_replicated_inside_region)


def describe_norm(config: ModelConfig, device_type: str) -> tuple[str, str]:
    """Return the implementation of the norm and its reason, for the table printed at start."""
    name = config.normalization
    module = NORM_MODULES.require(name)
    if device_type == "cpu":
        return f"{name}, {module.on_cpu}", "statistics in fp32"
    if name == "LayerNorm" and not config.norm_bias:
        return f"{name}, {module.on_gpu}", "apex's kernel needs a bias; statistics in fp32"
    fused = {"LayerNorm": _apex_layer_norm, "RMSNorm": _apex_rms_norm}.get(name)
    made_by = module.on_gpu if fused is None else "apex, fused"
    return f"{name}, {made_by}", f"{_apex_reason}; statistics in fp32"

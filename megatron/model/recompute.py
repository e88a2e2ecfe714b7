"""Full recomputation of a block: what is kept of its input, and where.

Source: https://arxiv.org/abs/1604.06174. The input of a block is the residual stream. Every
tensor-parallel rank holds all of it unless the sequence is sharded. Each rank may keep a part of
its own and gather all parts in the backward pass (https://arxiv.org/abs/1910.02054, section 6.1).
The part is kept on the device or in host memory. It is copied and never rounded, so the numbers do
not change. The results of expensive operators may be kept too, which is torch's selective
activation checkpointing.
"""

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from megatron.parallel.collectives import all_gather
from megatron.parallel.mesh import TensorParallel
from megatron.parallel.torch_private import find_varlen_operator

_ATEN = torch.ops.aten
_OPERATORS = {
    # Linear layers call the first two, and with float8 the last. Attention without a kernel calls
    # the third.
    "matmul": (
        _ATEN.mm.default,
        _ATEN.addmm.default,
        _ATEN.bmm.default,
        _ATEN._scaled_mm.default,
    ),
    "attention": (
        _ATEN._scaled_dot_product_flash_attention.default,
        _ATEN._scaled_dot_product_efficient_attention.default,
        _ATEN._scaled_dot_product_cudnn_attention.default,
        _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    ),
}
"""Value of --checkpoint-keep-operators -> torch's operators."""
_CHECKPOINT_OPTIONS: dict[str, Any] = {"use_reentrant": False}
if "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters:
    # Since version 2.15 torch can pass the results of kept operators through the hooks, and it will
    # by default. Ours are for the input only, which all tensor-parallel ranks have.
    _CHECKPOINT_OPTIONS["respect_saved_tensors_hooks"] = False


def _list_operators(name: str) -> tuple[Any, ...]:
    """Return torch's operators of a value of --checkpoint-keep-operators."""
    if name != "attention":
        return _OPERATORS[name]
    return (*_OPERATORS[name], find_varlen_operator())


@dataclass(frozen=True)
class _KeptInput:
    """The residual stream as it is kept between the forward and the backward pass."""

    part: Tensor
    """One-dimensional. It has all elements, or those of this tensor-parallel rank."""
    shape: torch.Size
    device: torch.device


class Recomputation:
    """Computes a block, and computes it again in the backward pass."""

    def __init__(
        self,
        tp: TensorParallel,
        *,
        partition: bool,
        in_cpu: bool,
        kept_operators: Sequence[str] = (),
        keep_generator: bool = False,
    ) -> None:
        """Choose what is kept and where.

        Args:
            tp: The tensor-parallel ranks.
            partition: Keep only this rank's part of the input.
            in_cpu: Keep it in host memory.
            kept_operators: Keys of `_OPERATORS`. Their results are kept, and everything else is
                computed again.
            keep_generator: The random state is that of the forward pass again. Dropout needs it
                only if attention kernels draw masks of their own.
        """
        self._keep_generator = keep_generator
        self._kept = [operator for name in kept_operators for operator in _list_operators(name)]
        self._tp = tp
        # With sequence parallelism each rank has only its own slice already.
        self._partition = partition and tp.size > 1 and not tp.sequence_parallel
        self._in_cpu = in_cpu

    def __call__(self, compute: Callable[..., Tensor], x: Tensor, *others: object) -> Tensor:
        """Return compute(x, *others). Of the arguments only `x` needs a gradient and memory."""
        with self._make_hooks():
            options = {**_CHECKPOINT_OPTIONS, "preserve_rng_state": self._keep_generator}
            if self._kept:
                options["context_fn"] = partial(create_selective_checkpoint_contexts, self._kept)
            return checkpoint(compute, x, *others, **options)

    def _make_hooks(self) -> AbstractContextManager[None]:
        """Return the hooks through which `checkpoint` saves its arguments.

        Inside the recomputed function, the hooks of `checkpoint` itself apply.
        """
        if self._partition or self._in_cpu:
            return saved_tensors_hooks(self._keep, self._give_back)
        return nullcontext()

    def _keep(self, x: Tensor) -> _KeptInput | Tensor:
        """Return what is kept of the input. The key of dropout is kept as it is."""
        if not x.is_floating_point():
            return x
        part = x.detach().reshape(-1)
        if self._partition:
            # The clone is needed. A view would keep the complete tensor allocated.
            part = part.chunk(self._tp.size)[self._tp.rank].clone()
        if self._in_cpu and x.is_cuda:
            # Pinned memory allows the copy to overlap with the next block's computation.
            host = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
            part = host.copy_(part, non_blocking=True)
        return _KeptInput(part, x.shape, x.device)

    def _give_back(self, kept: _KeptInput | Tensor) -> Tensor:
        """Return the complete input on its device. All tensor-parallel ranks call it together."""
        if isinstance(kept, Tensor):
            return kept
        part = kept.part.to(kept.device, non_blocking=True)
        if self._partition:
            part = all_gather(part, self._tp)
        return part.view(kept.shape)

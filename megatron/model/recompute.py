"""Full recomputation of a block: what is kept of its input, and where (https://arxiv.org/abs/1604.06174).

The input of a block is the residual stream, which every tensor-parallel rank holds whole unless the sequence is cut: each may keep
a part of its own and gather the whole when the backward pass comes (https://arxiv.org/abs/1910.02054, section 6.1), on its device
or in host memory. It is copied and never rounded, so the numbers stay as they are.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from megatron.parallel.mesh import TensorParallel


@dataclass(frozen=True)
class _KeptInput:
    part: Tensor
    """One-dimensional; all elements, or this tensor-parallel rank's."""
    shape: torch.Size
    device: torch.device


class Recomputation:
    """Calls a block's computation, and once more in the backward pass."""

    def __init__(self, tp: TensorParallel, *, partition: bool, in_cpu: bool) -> None:
        """`partition`: keep this rank's part only; `in_cpu`: keep it in host memory."""
        self._tp = tp
        self._partition = partition and tp.size > 1 and not tp.sequence_parallel
        self._in_cpu = in_cpu

    def __call__(self, compute: Callable[..., Tensor], x: Tensor, *others: object) -> Tensor:
        """compute(x, *others) -> [as it is]; of the arguments `x` alone needs a gradient and memory."""
        with self._make_hooks():
            # Each dropout seeds the generator itself, so there is no state of it to preserve.
            return checkpoint(compute, x, *others, use_reentrant=False, preserve_rng_state=False)

    def _make_hooks(self) -> AbstractContextManager[None]:
        """What `checkpoint` saves of its arguments goes through these hooks; within it, its own are at work."""
        return (
            saved_tensors_hooks(self._keep, self._give_back)
            if self._partition or self._in_cpu
            else nullcontext()
        )

    def _keep(self, x: Tensor) -> _KeptInput:
        part = x.detach().reshape(-1)
        if self._partition:
            part = part.chunk(self._tp.size)[self._tp.rank].clone()
        if self._in_cpu and x.is_cuda:
            host = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
            part = host.copy_(part, non_blocking=True)
        return _KeptInput(part, x.shape, x.device)

    def _give_back(self, kept: _KeptInput) -> Tensor:
        part = kept.part.to(kept.device, non_blocking=True)
        if self._partition:
            whole = part.new_empty(math.prod(kept.shape))
            with self._tp.comm_timer():
                dist.all_gather_into_tensor(whole, part, group=self._tp.group)
            part = whole
        return part.view(kept.shape)

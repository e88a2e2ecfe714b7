"""Equal gradients of the parameters that all tensor-parallel ranks hold.

Each tensor-parallel rank reduces its gradients over data-parallel ranks of its own. NCCL may add
them up in another order there, so the sums of a replicated parameter may differ in the last bit.
The replicas would then drift apart.

The invariant: after `add_over_tensor_ranks`, all tensor-parallel ranks have the same gradient of
every replicated parameter, bit for bit.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.parallel.mesh import TensorParallel


def add_over_tensor_ranks(
    partial: Sequence[Tensor], replicated: Sequence[Tensor], tp: TensorParallel
) -> None:
    """Change the gradients of replicated parameters in place, on all tensor-parallel ranks.

    One all-reduce sends all of them, because most are small. A number of any rank that is not
    finite gives a number on all ranks that is not finite.

    Args:
        partial: Gradients that cover only this rank's slice of the sequence, or its heads or
            channels. They become the sum over the ranks.
        replicated: Gradients that should be equal already. They become those of the first rank.
        tp: The tensor-parallel ranks.
    """
    # A rank may hold no element of a small parameter.
    gradients = [gradient for gradient in (*partial, *replicated) if gradient.numel()]
    if tp.size == 1 or not gradients:
        return
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    if tp.rank != 0:
        own = flat[sum(gradient.numel() for gradient in partial) :]
        # The first rank's value plus -0.0 is its value, bit for bit. 0 x inf is nan, so an
        # infinity on this rank is not lost.
        own.mul_(0.0).abs_().neg_()
    with tp.comm_timer():
        dist.all_reduce(flat, group=tp.group)
    sizes = [gradient.numel() for gradient in gradients]
    for gradient, summed in zip(gradients, flat.split(sizes), strict=True):
        gradient.copy_(summed.view_as(gradient))

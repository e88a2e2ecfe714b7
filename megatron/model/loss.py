"""*The* loss: next-token cross entropy over a vocabulary that is cut over the tensor-parallel ranks. Every engine uses it.

The output projection is part of it. Logits are made for a few rows at a time and turned into their own gradient while they are in
the cache: what a step keeps is one [n, v/t] in the compute dtype until the projection's gradient is made, instead of several in
fp32. Megatron-LM (https://arxiv.org/abs/1909.08053, section 3) reduces maximum, sum and target over
the ranks one after the other. Here each rank gives its own maximum, sum and target logit in one
all-gather for each chunk of rows.

The maximum is subtracted from the target's logit before log(sum) is added. Logits of some thousands
would otherwise round a loss near 0 to multiples of 2.4e-4, the spacing of fp32 numbers there.

n = s b rows, v: padded vocabulary, t: tensor-parallel size. The invariant: loss and gradients equal `F.cross_entropy(F.linear(..))`
over the real vocabulary, whatever the cut and the padding.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.parallel.collectives import all_gather
from megatron.parallel.mesh import TensorParallel

_CHUNK_BYTES_CPU = 4 << 20
"""fp32 logits of a chunk: small enough for the cache."""
_CHUNK_BYTES_GPU = 256 << 20
"""Large enough to fill the device, small beside its memory."""


@dataclass(frozen=True)
class VocabSlice:
    """The rows of the output matrix on this rank."""

    first: int
    """Id of the first row."""
    real: int
    """Rows that are real ids; those behind are padding."""


def cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    rows: VocabSlice,
    tp: TensorParallel,
    loss_mask: Tensor | None = None,
) -> Tensor:
    """Mean loss of a microbatch, over the positions that `loss_mask` keeps.

    Args:
        hidden: [s, b, h], after the final norm and `enter_tensor_parallel`.
        weight: [v/t, h].
        labels: [s, b], ids of the next tokens.
        loss_mask: [s, b], 1 where a position counts; None: all do.
    Returns:
        A scalar in fp32, the same on all tensor-parallel ranks.
    """
    keep_gradients = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    mask = None if loss_mask is None else loss_mask.reshape(-1).float()
    total = _LinearCrossEntropy.apply(
        hidden.flatten(0, 1), weight, labels.reshape(-1), mask, rows, tp, keep_gradients
    )
    count = float(labels.numel()) if mask is None else mask.sum().clamp(min=1.0)
    return total / count


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum of the masked losses. The gradients, up to the factor that arrives in backward, are made in forward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        mask: Tensor | None,
        rows: VocabSlice,
        tp: TensorParallel,
        keep_gradients: bool,
    ) -> Tensor:
        n, real = hidden.shape[0], rows.real
        used = weight[:real]
        local = labels - rows.first  # where the target lies on this rank, if it does
        here = (local >= 0) & (local < real)
        local = local.where(here, 0)
        grad_logits = hidden.new_empty((n, real)) if keep_gradients else None
        grad_hidden = torch.empty_like(hidden) if keep_gradients else None
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        limit = _CHUNK_BYTES_GPU if hidden.is_cuda else _CHUNK_BYTES_CPU
        step = n if real == 0 else max(1, limit // (4 * real))
        for start in range(0, n, step):
            part = slice(start, min(start + step, n))
            logits = F.linear(hidden[part], used).float()  # [n', v/t]
            if real:
                target = logits.gather(1, local[part, None])[:, 0].where(here[part], 0.0)
                top = logits.amax(dim=1)
                shares = logits.sub_(top[:, None]).exp_()
                total = shares.sum(dim=1)
            else:  # nothing but padding on this rank
                target = total = logits.new_zeros(logits.shape[0])
                top = logits.new_full((logits.shape[0],), float("-inf"))
                shares = logits
            highest, total, target = _combine(top, total, target, tp)
            losses = total.log() - (target - highest)
            loss += losses.sum() if mask is None else torch.dot(losses, mask[part])
            if grad_logits is None or grad_hidden is None:
                continue
            to_softmax = torch.exp(top - highest) / total  # over the whole vocabulary
            gradient = shares.mul_(to_softmax[:, None])
            if real:
                gradient.scatter_add_(1, local[part, None], -here[part, None].to(gradient.dtype))
            if mask is not None:
                gradient.mul_(mask[part, None])
            grad_logits[part] = gradient
            torch.mm(grad_logits[part], used, out=grad_hidden[part])
        if grad_logits is not None:
            grad_weight = (
                torch.zeros_like(weight) if real < weight.shape[0] else torch.empty_like(weight)
            )
            torch.mm(grad_logits.t(), hidden, out=grad_weight[:real])
            ctx.save_for_backward(grad_hidden, grad_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        # Scaled only here: in fp16 the factor carries the loss scale, without which these would underflow.
        factor = grads[0]
        return grad_hidden * factor, grad_weight * factor, None, None, None, None, None


def _combine(
    top: Tensor,
    total: Tensor,
    target: Tensor,
    tp: TensorParallel,
) -> tuple[Tensor, Tensor, Tensor]:
    """Combine the ranks' parts of the vocabulary.

    Args:
        top: [n'], the highest logit of this rank's part; -inf where it is all padding.
        total: [n'], this rank's sum of exp(logit - top).
        target: [n'], the target's logit on the rank that has it, 0 on the others.
    Returns:
        [n'] each, over the whole vocabulary: the highest logit, the sum of exp(logit - highest),
        the target's logit.
    """
    if tp.size == 1:
        return top, total, target
    everyone = all_gather(torch.stack((top, total, target)), tp).view(tp.size, 3, -1)
    tops, totals, targets = everyone.unbind(dim=1)
    highest = tops.amax(dim=0)
    return highest, (totals * torch.exp(tops - highest)).sum(dim=0), targets.sum(dim=0)

"""Next-token cross entropy over a vocabulary that is sharded over the tensor-parallel ranks.

Every engine uses this loss. The output projection is part of it. Logits are computed for a chunk of
rows at a time and turned into their own gradient. Only their gradient is kept, one [n, v/t] matrix
in the compute dtype, until the projection's gradient is computed. A loss on complete logits keeps
several such matrices in fp32.

Megatron-LM (https://arxiv.org/abs/1909.08053, section 3) reduces maximum, sum and target over the
ranks one after the other. Here each rank sends its own maximum, sum and target logit in one
all-gather for each chunk of rows.

The maximum is subtracted from the target's logit before log(sum) is added. With logits of some
thousands, a loss near 0 would otherwise be rounded to multiples of 2.4e-4, the spacing of fp32
numbers there.

n = s x b rows, v: padded vocabulary, t: tensor-parallel size. The invariant: without z-loss,
loss and gradients equal those of `F.cross_entropy(F.linear(..))` over the real vocabulary, for
every sharding and padding.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.model.fused_operators import LossKernels
from megatron.model.tally import Tally
from megatron.parallel.collectives import all_gather
from megatron.parallel.mesh import TensorParallel
from megatron.parallel.padding import pad_columns, pad_matrix, pad_width, trim_matrix
from megatron.parallel.spmd import declare

_CHUNK_BYTES_CPU = 64 << 20
"""Largest size of a chunk's fp32 logits, in bytes.

A product reads the complete output matrix for each chunk. With GPT-2's vocabulary of 50,257 ids,
chunks of 4 MiB, which fit into the cache, have 20 rows. The loss then takes 1.9 times as long.
"""
_CHUNK_BYTES_GPU = 256 << 20
"""The same on a GPU. It keeps the device busy, and is small compared with its memory."""
_TILE_ROWS = 256
"""The largest number of rows that a GPU's product computes in one tile."""


@dataclass(frozen=True)
class VocabSlice:
    """The rows of the output matrix that this rank holds."""

    first: int
    """Id of the first row."""
    real: int
    """Number of rows that are real ids. The rows after them are padding."""


def cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    rows: VocabSlice,
    tp: TensorParallel,
    loss_mask: Tensor | None = None,
    *,
    divisor: Tensor | None = None,
    z_loss: float = 0.0,
    tally: Tally | None = None,
    kernels: LossKernels | None = None,
) -> Tensor:
    """Return the mean loss of a microbatch over the positions that `loss_mask` keeps.

    With Z = sum of exp(logits), the z-loss adds `z_loss` x log(Z)^2 to the loss of each position
    (https://arxiv.org/abs/2204.02311, section 5).

    Args:
        hidden: [s, b, h], after the final norm and `enter_tensor_parallel`.
        weight: [v/t, h].
        labels: [s, b], ids of the next tokens.
        rows: The ids of the rows of `weight`.
        tp: The tensor-parallel ranks.
        loss_mask: [s, b], 1 where a position counts. None means that all positions count.
        divisor: What the sum of the losses is divided by, a scalar. None: the positions that count.
        z_loss: Coefficient of the z-loss. 0 turns it off.
        tally: Receives the sums of an evaluation. It needs the most likely token, so the logits
            are read once more. It must be None if gradients are computed.
        kernels: Kernels for the logits. None: PyTorch's operators, which are their reference.

    Returns:
        A scalar in fp32, the same on all tensor-parallel ranks.
    """
    keep_gradients = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    mask: Tensor | None = None
    if loss_mask is not None:
        mask = loss_mask.reshape(-1).float()
    total = _LinearCrossEntropy.apply(
        hidden.flatten(0, 1),
        weight,
        labels.reshape(-1),
        mask,
        rows,
        tp,
        z_loss,
        keep_gradients,
        tally,
        kernels,
    )
    if divisor is not None:
        return total / divisor
    if mask is None:
        return total / float(labels.numel())
    # The lower limit of the count avoids 0 / 0 for a microbatch whose positions are all masked. Its
    # loss is then 0, and so is its gradient.
    return total / mask.sum().clamp(min=1.0)


def find_largest_output_logit(hidden: Tensor, weight: Tensor, rows: VocabSlice) -> Tensor:
    """Return the largest absolute value of this rank's logits, a scalar in fp32.

    It is 0 if this rank holds nothing but padding.

    Args:
        hidden: [s, b, h], after the final norm and `enter_tensor_parallel`.
        weight: [v/t, h].
        rows: The ids of the rows of `weight`.
    """
    largest = torch.zeros((), dtype=torch.float32, device=hidden.device)
    if rows.real == 0:
        return largest
    flat = hidden.flatten(0, 1)
    for part in split_rows(flat.shape[0], rows.real, on_gpu=flat.is_cuda):
        logits = F.linear(flat[part], weight[: rows.real])
        largest = torch.maximum(largest, logits.abs().amax().float())
    return largest


def score_labels(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    loss_mask: Tensor,
    rows: VocabSlice,
    tp: TensorParallel,
) -> tuple[Tensor, Tensor]:
    """Return how likely the labels of each sample are, without gradients.

    Args:
        hidden: [s, b, h], after the final norm and `enter_tensor_parallel`.
        weight: [v/t, h].
        labels: [s, b], ids of the next tokens.
        loss_mask: [s, b], not 0 where a position counts.
        rows: The ids of the rows of `weight`.
        tp: The tensor-parallel ranks.

    Returns:
        The log-likelihood of each label in nats, float64[s, b], and 0 for those that do not count.
        And whether each label of a sample that counts is the most likely token, bool[b]. Of equally
        likely tokens, the one with the smallest id is the most likely. Both are the same on all
        tensor-parallel ranks.
    """
    length, samples = labels.shape
    # A continuation has few tokens, so most positions need no logits.
    counted = loss_mask.reshape(-1).nonzero().squeeze(1)
    wanted = labels.reshape(-1)[counted]
    local = wanted - rows.first
    holds_target = (local >= 0) & (local < rows.real)
    local = local.where(holds_target, 0)
    states = hidden.detach().flatten(0, 1)[counted]
    used = weight.detach()[: rows.real]
    log_likelihoods = states.new_zeros(length * samples, dtype=torch.float64)
    misses = torch.zeros_like(log_likelihoods, dtype=torch.bool)
    columns = _count_columns(weight, rows, tp)
    for part in split_rows(len(counted), columns, on_gpu=hidden.is_cuda):
        logits = F.linear(states[part], used).float()
        # This must come before `_reduce_in_place`, which overwrites the logits.
        hit = _find_hits(logits, local[part], holds_target[part])
        top, total, target = _reduce_in_place(logits, local[part], holds_target[part])
        highest, total, target, most_likely = _combine(top, total, target, tp, hit)
        assert most_likely is not None, "it was given"
        misses[counted[part]] = most_likely == 0
        log_likelihoods[counted[part]] = (target - highest - total.log()).double()
    return (
        log_likelihoods.view(length, samples),
        ~misses.view(length, samples).any(dim=0),
    )


@declare("tp", hidden="R", weight="V", out="I", forward="all_gather+")
class _LinearCrossEntropy(torch.autograd.Function):
    """Sum of the losses times the mask.

    The forward pass computes the gradients. The backward pass multiplies them by its factor.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        mask: Tensor | None,
        rows: VocabSlice,
        tp: TensorParallel,
        z_loss: float,
        keep_gradients: bool,
        tally: Tally | None,
        kernels: LossKernels | None,
    ) -> Tensor:
        n = hidden.shape[0]
        real = rows.real
        used = weight[: _count_product_columns(weight, rows, on_gpu=hidden.is_cuda)]
        width = hidden.shape[1]
        hidden = pad_columns(hidden)
        used = pad_matrix(used, pad_width(len(used), hidden), hidden.shape[1])
        # Index of the target on this rank. It is out of range if another rank holds the target.
        local = labels - rows.first
        holds_target = (local >= 0) & (local < real)
        # `gather` and `scatter_add_` need valid indices everywhere. Where another rank holds the
        # target, `holds_target` masks the result.
        local = local.where(holds_target, 0)
        # Without gradients, the next two matrices have no rows, and nothing is written into them.
        kept = n if keep_gradients else 0
        grad_logits = hidden.new_empty((kept, used.shape[0]))
        # In fp32 and for kernels, the logits are written where their gradient is kept. So they need
        # no memory of their own, and the gradient is not copied.
        in_place = keep_gradients and (kernels is not None or hidden.dtype == torch.float32)
        grad_hidden = torch.empty_like(hidden[:kept])
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        # Kernels convert no logits, so all rows are one chunk, with one message.
        columns = 0 if kernels is not None and keep_gradients else _count_columns(weight, rows, tp)
        for part in split_rows(n, columns, on_gpu=hidden.is_cuda):
            of_part = None if mask is None else mask[part]
            place = grad_logits[part] if in_place else None
            logits = _compute_logits(hidden[part], used, place)
            if kernels is None:
                logits = logits[:, :real].float()
                hit = None if tally is None else _find_hits(logits, local[part], holds_target[part])
                top, total, target = _reduce_in_place(logits, local[part], holds_target[part])
            else:
                top, total, target, hit = kernels.reduce(
                    logits, real, local[part], holds_target[part], find_hits=tally is not None
                )
            highest, total, target, hit = _combine(top, total, target, tp, hit)
            losses = total.log() - (target - highest)
            if tally is not None and hit is not None:
                tally.add(losses, hit, of_part)
            if z_loss:
                log_z = highest + total.log()
                losses += z_loss * log_z.square()
            loss += losses.sum() if of_part is None else torch.dot(losses, of_part)
            if not keep_gradients:
                continue
            # This turns exp(logit - top) into the softmax over the complete vocabulary.
            to_softmax = torch.exp(top - highest) / total
            if z_loss:
                # The gradient of log(Z) is the softmax.
                to_softmax *= 1 + 2 * z_loss * log_z
            if kernels is None:
                _write_gradient(logits, local[part], holds_target[part], to_softmax, of_part)
                if not in_place:
                    # The assignment rounds to the compute dtype, which both matrix products have.
                    grad_logits[part, :real] = logits
                # The logits of padding are not part of the loss, so their gradient is 0.
                grad_logits[part, real:] = 0
            else:
                kernels.write_gradient(
                    logits, real, local[part], holds_target[part], top, to_softmax, of_part
                )
            torch.mm(grad_logits[part], used, out=grad_hidden[part])
        # A padded copy must not add to the peak, which the next product may reach.
        del used
        if keep_gradients:
            # In fp16, the sum over all positions may exceed 65504 for a frequent token, and no loss
            # scale would help. It is in fp32 until `backward` has applied its factor.
            dtype = torch.float32 if weight.dtype == torch.float16 else weight.dtype
            grad_weight = _compute_grad_weight(grad_logits, hidden, weight, dtype)
            ctx.save_for_backward(trim_matrix(grad_hidden, n, width), grad_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        # The factor holds 1 / count, and in fp16 also the loss scale. It is applied only here. A
        # division by the count alone, in `forward`, would let small fp16 gradients underflow.
        factor = grads[0]
        scaled = (grad_weight * factor).to(grad_hidden.dtype)
        return grad_hidden * factor, scaled, *[None] * 8


def _compute_logits(hidden: Tensor, weight: Tensor, place: Tensor | None) -> Tensor:
    """Return logits, [n', columns] in the compute dtype.

    Args:
        hidden: [n', h].
        weight: [columns, h].
        place: [n', columns], where the logits are written. None: a tensor of their own.
    """
    if place is not None:
        return torch.mm(hidden, weight.t(), out=place)
    return F.linear(hidden, weight)


def find_chunk_bytes(*, on_gpu: bool) -> int:
    """Return the largest size of a chunk in fp32."""
    return _CHUNK_BYTES_GPU if on_gpu else _CHUNK_BYTES_CPU


def split_rows(n: int, columns: int, *, on_gpu: bool) -> Iterator[slice]:
    """Divide n rows into chunks whose fp32 logits stay below a fixed size.

    The logits of all rows in fp32 would be the largest tensor of the step. On a GPU, a chunk has
    complete tiles of rows if it has one at least.

    Args:
        n: Number of rows.
        columns: Number of logits in a row. If it is 0, all rows are one chunk.
        on_gpu: Whether the logits are on a GPU.
    """
    limit = find_chunk_bytes(on_gpu=on_gpu)
    if columns == 0:
        step = n
    else:
        step = max(1, limit // (4 * columns))
        if on_gpu and step > _TILE_ROWS:
            step -= step % _TILE_ROWS
    for start in range(0, n, step):
        yield slice(start, min(start + step, n))


def _count_product_columns(weight: Tensor, rows: VocabSlice, *, on_gpu: bool) -> int:
    """Return the columns of the products with the output matrix.

    On a GPU they include the padding. Tensor cores need sizes that are multiples of 8 or more, and
    a real vocabulary such as 50,257 is odd. A CPU gains nothing from padding.
    """
    if on_gpu and rows.real:
        return weight.shape[0]
    return rows.real


def _count_columns(weight: Tensor, rows: VocabSlice, tp: TensorParallel) -> int:
    """Return the columns that decide how many rows a chunk has.

    Ranks exchange messages for each chunk, so all of them must divide the rows equally. The number
    of real ids differs between ranks if one has padding.
    """
    if tp.size == 1:
        return rows.real
    return weight.shape[0]


def _find_hits(logits: Tensor, local: Tensor, holds_target: Tensor) -> Tensor:
    """Return 1 where the target has the highest logit of this rank, else 0, [n'] in fp32.

    Of equal logits the one with the lowest id counts. The arguments are those of
    `_reduce_in_place`, before it.
    """
    if logits.shape[1] == 0:
        return logits.new_zeros(logits.shape[0])
    return ((logits.argmax(dim=1) == local) & holds_target).float()


def _reduce_in_place(
    logits: Tensor, local: Tensor, holds_target: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Replace this rank's logits by exp(logit - highest logit), and return what `_combine` takes.

    Args:
        logits: [n', v/t] in fp32, overwritten.
        local: [n'], the index of each target on this rank. It is 0 if another rank holds it.
        holds_target: [n'], whether this rank holds the target.

    Returns:
        This rank's highest logit, sum of exp(logit - highest) and the target's logit, each [n'].
    """
    if logits.shape[1] == 0:
        # This rank holds nothing but padding. It still takes part in the all-gather, with values
        # that do not change the result: a maximum of -inf and a sum of 0.
        zeros = logits.new_zeros(logits.shape[0])
        return logits.new_full((logits.shape[0],), float("-inf")), zeros, zeros
    # Each rank subtracts its own maximum, so that exp cannot overflow. `_combine` corrects for the
    # difference to the maximum over all ranks.
    target = logits.gather(1, local[:, None])[:, 0].where(holds_target, 0.0)
    top = logits.amax(dim=1)
    total = logits.sub_(top[:, None]).exp_().sum(dim=1)
    return top, total, target


def _write_gradient(
    exponentials: Tensor, local: Tensor, holds_target: Tensor, factor: Tensor, mask: Tensor | None
) -> None:
    """Turn exp(logit - highest logit) into the gradient of the logits, [n', real] in fp32.

    Args:
        exponentials: What `_reduce_in_place` leaves. It is overwritten.
        local: See `_reduce_in_place`.
        holds_target: See `_reduce_in_place`.
        factor: [n'], which turns exp(logit - highest) into the softmax over all ranks.
        mask: [n'], or None.
    """
    gradient = exponentials.mul_(factor[:, None])
    # The gradient of the loss with respect to the logits is softmax - one_hot(target).
    if gradient.shape[1]:
        gradient.scatter_add_(1, local[:, None], -holds_target[:, None].to(gradient.dtype))
    if mask is not None:
        gradient.mul_(mask[:, None])


def _compute_grad_weight(
    grad_logits: Tensor, hidden: Tensor, weight: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return the gradient of `weight` before the factor 1 / count. It is 0 for rows of padding.

    Args:
        grad_logits: [n, v/t], or with fewer columns, without those of padding. It may have more,
            which are zero.
        hidden: [n, h], padded as the products are.
        weight: [v/t, h].
        dtype: That of the result. It is the dtype of `weight`, or fp32.
    """
    real = grad_logits.shape[1]
    if hidden.is_cuda and dtype != weight.dtype and real >= len(weight):
        # The tensor cores add up in fp32 anyway. Only the result is not rounded.
        product = torch.mm(grad_logits.t(), hidden, out_dtype=torch.float32)
        return trim_matrix(product, *weight.shape)
    grad_weight = weight.new_empty((max(real, len(weight)), hidden.shape[1]), dtype=dtype)
    grad_weight[real:] = 0
    rows = grad_weight[:real]
    if dtype == weight.dtype:
        torch.mm(grad_logits.t(), hidden, out=rows)
    else:
        torch.mm(grad_logits.t().float(), hidden.float(), out=rows)
    return trim_matrix(grad_weight, *weight.shape)


def _combine(
    top: Tensor,
    total: Tensor,
    target: Tensor,
    tp: TensorParallel,
    hit: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Combine the results of the ranks, each for its part of the vocabulary.

    Args:
        top: [n'], the highest logit of this rank's part. It is -inf if all of it is padding.
        total: [n'], this rank's sum of exp(logit - top).
        target: [n'], the target's logit on the rank that has it, 0 on the others.
        tp: The tensor-parallel ranks.
        hit: [n'], what `_find_hits` returned, if it is wanted.

    Returns:
        The highest logit, the sum of exp(logit - highest), the target's logit, and whether the
        target has the highest logit, over the complete vocabulary. Each is [n'].
    """
    if tp.size == 1:
        return top, total, target, hit
    parts = [top, total, target]
    if hit is not None:
        parts.append(hit)
    # One message instead of three or four. Its size is small, so latency dominates.
    everyone = all_gather(torch.stack(parts), tp).view(tp.size, len(parts), -1)
    tops, totals, targets, *hits = everyone.unbind(dim=1)
    if hits:
        # The first rank of those with the highest logit has the lowest id.
        hit = hits[0].gather(0, tops.argmax(dim=0, keepdim=True))[0]
    highest = tops.amax(dim=0)
    # Only one rank has a target logit other than 0, so the sum selects it.
    total = (totals * torch.exp(tops - highest)).sum(dim=0)
    return highest, total, targets.sum(dim=0), hit

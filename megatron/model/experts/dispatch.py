"""The way of tokens to the ranks of their experts, and back.

A rank has n tokens. Each of them goes to k experts. The n k assignments are sorted by expert, sent
to the ranks of the experts, sorted there again, and travel back the same way. Experts e E/r to
(e + 1) E/r are on rank e of r expert-parallel ranks. The r ranks exchange uneven parts.

Tensor-parallel ranks that have the same tokens share them: each routes a part, and gets the results
of all parts.

The invariant: every sum has a fixed order, in the backward pass too. No operator adds with atomics.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.parallel.collectives import all_gather
from megatron.parallel.mesh import ExpertParallel, ParallelGroup
from megatron.parallel.spmd import declare


@declare()
class _Spread(torch.autograd.Function):
    """Copy each token to its k places. The backward pass adds the k gradients of a token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, places: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(places)
        ctx.k = k
        return x[order // k]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return grads[0][places].unflatten(0, (-1, ctx.k)).sum(dim=1), None, None, None


@declare()
class _Reorder(torch.autograd.Function):
    """Bring rows into another order, x[order]. `inverse` is the inverse permutation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x[order]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grads[0][inverse], None, None


@declare("ranks", x="V", out="V", forward="all_to_all", backward="all_to_all")
class _ExchangeRows(torch.autograd.Function):
    """Send `sent[i]` rows to rank i, and receive `received[i]` rows from it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sent: Sequence[int], received: Sequence[int], ranks: ParallelGroup
    ) -> Tensor:
        ctx.sizes = sent, received
        ctx.ranks = ranks
        return _exchange(x, sent, received, ranks)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received = ctx.sizes
        return _exchange(grads[0], received, sent, ctx.ranks), None, None, None


def _exchange(
    x: Tensor, sent: Sequence[int], received: Sequence[int], ranks: ParallelGroup
) -> Tensor:
    out = x.new_empty((sum(received), *x.shape[1:]))
    with ranks.comm_timer():
        dist.all_to_all_single(out, x.contiguous(), list(received), list(sent), group=ranks.group)
    return out


@declare("ranks", x="I", out="V", backward="all_gather")
class _TakePart(torch.autograd.Function):
    """Take this rank's rows of [n, h], which all ranks have. The backward pass gathers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: ParallelGroup) -> Tensor:
        ctx.n = len(x)
        ctx.ranks = ranks
        return x[find_own_rows(len(x), ranks)].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _join(grads[0], ctx.n, ctx.ranks), None


@declare("ranks", x="V", out="I", forward="all_gather")
class _JoinParts(torch.autograd.Function):
    """Gather the rows of all ranks, [n, h]. The backward pass takes this rank's rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, n: int, ranks: ParallelGroup) -> Tensor:
        ctx.ranks = ranks
        return _join(x, n, ranks)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0][find_own_rows(len(grads[0]), ctx.ranks)], None, None


def _count_rows(n: int, ranks: ParallelGroup) -> int:
    """Return the rows of all ranks but the last ones, which may have fewer."""
    return -(-n // ranks.size)


def find_own_rows(n: int, ranks: ParallelGroup) -> slice:
    """Return which of n rows this rank routes. It may be none."""
    rows = _count_rows(n, ranks)
    return slice(min(ranks.rank * rows, n), min((ranks.rank + 1) * rows, n))


def _join(x: Tensor, n: int, ranks: ParallelGroup) -> Tensor:
    # An all-gather needs equal parts.
    padded = F.pad(x, (0, 0, 0, _count_rows(n, ranks) - len(x)))
    return all_gather(padded, ranks)[:n]


def take_part(x: Tensor, ranks: ParallelGroup) -> Tensor:
    """Return the rows of [n, h] that this rank routes. All ranks have equal rows."""
    return _TakePart.apply(x, ranks)


def join_parts(x: Tensor, n: int, ranks: ParallelGroup) -> Tensor:
    """Return the n rows of all ranks from this rank's part of them."""
    return _JoinParts.apply(x, n, ranks)


def count_choices(choice: Tensor, experts: int) -> Tensor:
    """Return how often each expert occurs, int64[experts]."""
    counts = torch.zeros(experts, dtype=torch.int64, device=choice.device)
    flat = choice.flatten()
    return counts.scatter_add_(0, flat, torch.ones_like(flat))


@dataclass(frozen=True)
class Dispatch:
    """Where the tokens of this rank go, and where those that it receives come from."""

    k: int
    order: Tensor
    """The assignments (token x k + number), sorted by expert, int64[n k]."""
    places: Tensor
    """The place of each assignment in this order."""
    ends: Tensor
    """The end of the rows of each expert of this rank, int32[experts / ranks]."""
    ranks: ExpertParallel
    sent: Sequence[int] = ()
    """Rows for each rank, if there are several."""
    received: Sequence[int] = ()
    by_expert: Tensor | None = None
    """The order in which received rows are sorted by expert."""
    by_source: Tensor | None = None
    """The inverse of it."""

    def send(self, x: Tensor) -> Tensor:
        """Map tokens [n, h] to the rows of this rank's experts, sorted by expert, [m, h]."""
        rows = _Spread.apply(x, self.order, self.places, self.k)
        if self.by_expert is None:
            return rows
        rows = _ExchangeRows.apply(rows, self.sent, self.received, self.ranks)
        return _Reorder.apply(rows, self.by_expert, self.by_source)

    def send_back(self, rows: Tensor) -> Tensor:
        """Map the outputs of this rank's experts, [m, h], to those of its tokens, [n, k, h]."""
        if self.by_expert is not None:
            rows = _Reorder.apply(rows, self.by_source, self.by_expert)
            rows = _ExchangeRows.apply(rows, self.received, self.sent, self.ranks)
        return _Reorder.apply(rows, self.places, self.order).unflatten(0, (-1, self.k))


def read_sizes(sent: Tensor, received: Tensor) -> Sequence[Sequence[int]]:
    """Return both sizes of messages, which must be known on the host. It waits for the GPU.

    Args:
        sent: Rows for each rank, int64[ranks].
        received: Rows from each rank, int64[ranks].
    """
    return torch.stack((sent, received)).tolist()


def plan_dispatch(choice: Tensor, experts: int, ranks: ExpertParallel) -> Dispatch:
    """Return where the tokens go. All expert-parallel ranks call it together.

    Args:
        choice: The experts of each token, int64[n, k].
        experts: Number of experts of the model.
        ranks: The ranks that divide the experts.
    """
    chosen, order = choice.flatten().sort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    every = torch.arange(experts, device=order.device)
    k = choice.shape[1]
    if ranks.size == 1:
        ends = torch.searchsorted(chosen, every, right=True, out_int32=True)
        return Dispatch(k, order, places, ends, ranks)
    counts = torch.searchsorted(chosen, every, right=True).diff(prepend=every[:1])
    local = experts // ranks.size
    everyone = all_gather(counts, ranks).view(ranks.size, ranks.size, local)  # [source, rank, ..]
    own = everyone[:, ranks.rank]  # [source, local experts]
    sent, received = read_sizes(counts.view(-1, local).sum(1), own.sum(1))
    numbers = torch.arange(local, device=own.device).repeat(ranks.size)
    of_rows = numbers.repeat_interleave(own.flatten(), output_size=sum(received))
    by_expert = of_rows.argsort(stable=True)
    by_source = torch.empty_like(by_expert)
    by_source[by_expert] = torch.arange(len(by_expert), device=own.device)
    ends = own.sum(0).cumsum(0).int()
    return Dispatch(k, order, places, ends, ranks, sent, received, by_expert, by_source)

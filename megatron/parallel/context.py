"""Context parallelism: the ranks of a group share the sequence of each sample.

The sequence of s tokens is divided into 2c parts of p = s / 2c tokens. Rank i has the parts i and
2c - 1 - i. A query of a causal model reads all earlier keys, so late parts have more work. Each
rank has an early and a late part, so all ranks have the same work. Llama 3 was trained with the
same division (https://arxiv.org/abs/2407.21783, section 3.3.2). Only attention reads tokens of
other ranks. It has two ways to get them:

    allgather   each rank gathers the keys and values of all ranks, as for Llama 3. The backward
                pass adds up their gradients. Keys that the early part does not read travel while
                its attention is computed, in both passes. With a short sliding window, a rank
                receives only the keys that its queries read.
    a2a         each rank exchanges the positions of its heads for all positions of some heads, and
                back (DeepSpeed Ulysses, https://arxiv.org/abs/2309.14509)

b: micro-batch, s: sequence, c: context-parallel size, p: part, n: heads, g: query groups, d: head
width. n and g are those of a tensor-parallel rank.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.parallel.collectives import (
    PendingTensor,
    begin_all_gather,
    begin_reduce_scatter,
)
from megatron.parallel.mesh import ContextParallel, TensorParallel
from megatron.parallel.spmd import declare


def list_parts(rank: int, size: int, length: int) -> tuple[range, range]:
    """Return the positions of a rank's two parts, the early one first.

    Args:
        rank: The context-parallel rank.
        size: c.
        length: s, a multiple of 2c.
    """
    # The plan has refused other lengths.
    part, rest = divmod(length, 2 * size)
    assert rest == 0, f"{length} tokens cannot be divided into {2 * size} equal parts"
    late = 2 * size - 1 - rank
    return range(rank * part, (rank + 1) * part), range(late * part, (late + 1) * part)


def take_own(x: Tensor, context: ContextParallel, dim: int) -> Tensor:
    """Return this rank's two parts of a tensor with all positions along `dim`."""
    if context.size == 1:
        return x
    # Both parts are views, so this is one copy.
    parts = list_parts(context.rank, context.size, x.shape[dim])
    return torch.cat([x.narrow(dim, part.start, len(part)) for part in parts], dim)


def locate_rows(rows: int, tp: TensorParallel, context: ContextParallel) -> tuple[int, int, int]:
    """Return where rows of the residual stream are in the sequence.

    Args:
        rows: The rows that this rank holds: s/c, or s/tc with sequence parallelism.
        tp: The tensor-parallel ranks.
        context: The context-parallel ranks.

    Returns:
        first, step and length. Row i is at the position first + i // length * step + i % length.
    """
    before, whole = 0, rows
    if tp.sequence_parallel:
        before, whole = tp.rank * rows, tp.size * rows
    if context.size == 1:
        return before, 0, rows
    # A rank holds its early part first, and then its late one.
    early, late = list_parts(context.rank, context.size, whole * context.size)
    if before + rows <= len(early):
        return early.start + before, 0, rows
    if before >= len(early):
        return late.start + before - len(early), 0, rows
    # The rows are the middle of both parts, so there are equally many of each.
    first = early.start + before
    return first, late.start - first, len(early) - before


@dataclass(frozen=True)
class Keys:
    """The keys and values that the queries of one part may read."""

    queries: range
    """Positions of the queries."""
    first: int
    """Position of the first key. The last key is at the position of the last query."""
    key: Tensor
    """[b, g, keys, d]."""
    value: Tensor
    """[b, g, keys, width of a value]."""


def read_keys(
    key: Tensor, value: Tensor, context: ContextParallel, window: int | None
) -> Iterator[Keys]:
    """Yield the keys and values that the queries of this rank's two parts may read.

    The keys of the early part are first.

    If the caller computes attention of the early part before it asks for the late one, the late
    part's keys travel meanwhile. So do their gradients in the backward pass.

    Args:
        key: This rank's positions, [b, g, s/c, d].
        value: [b, g, s/c, width of a value].
        context: The context-parallel ranks.
        window: Number of keys that a query reads, up to its position. None: all of them.
    """
    # The sequence comes first, because ranks send parts of it.
    by_position = [each.permute(2, 0, 1, 3) for each in (key, value)]
    sizes = [each.shape[1:] for each in by_position]
    sent = torch.cat([each.flatten(1) for each in by_position], dim=1)
    length = sent.shape[0] * context.size
    early, late = list_parts(context.rank, context.size, length)
    first, second = _find_reaches(context.rank, context.size, length, window)
    if reads_neighbours(context.size, length, window):
        assert window is not None, "without a window, the last part reads all keys"
        read = _ReadNeighbours.apply(sent, window, context)
        # A key that both parts read is received once.
        yield Keys(early, first.start, *_take_apart(read[: len(first)], sizes))
        yield Keys(late, second.start, *_take_apart(read[-len(second) :], sizes))
        return
    # Two messages, because the early part of this rank needs only the first of them.
    messages = [_Message(context) for _ in range(2)]
    halves = [
        _BeginGather.apply(half, message)
        for half, message in zip(sent.chunk(2), messages, strict=True)
    ]
    # The early parts of the ranks are in the order of the sequence, and fill its first half.
    heads = _EndGather.apply(halves[0], messages[0])
    yield Keys(early, first.start, *_take_apart(heads[first.start : first.stop], sizes))
    # Their late parts are in the opposite order.
    tails = _EndGather.apply(halves[1], messages[1]).split(len(late))[context.rank :]
    both = torch.cat((heads, *reversed(tails)))[second.start :]
    yield Keys(late, second.start, *_take_apart(both, sizes))


def _take_apart(read: Tensor, sizes: Sequence[torch.Size]) -> Iterator[Tensor]:
    """Yield keys and values as views, [b, g, keys, d].

    Args:
        read: [keys, elements of a key and a value of all groups].
        sizes: [b, g, d] of keys, and of values.
    """
    for part, size in zip(read.split([math.prod(s) for s in sizes], dim=1), sizes, strict=True):
        yield part.unflatten(1, size).permute(1, 2, 0, 3)


@dataclass
class _Message:
    """A message with one half of the positions of all ranks, or with the gradients of this half."""

    context: ContextParallel
    pending: PendingTensor | None = None

    def wait(self) -> Tensor:
        """Return what has arrived, and forget it."""
        assert self.pending is not None, "the message was started"
        arrived = self.pending.wait()
        self.pending = None
        return arrived


@declare("message.context", x="V", out="V", forward="all_gather")
class _BeginGather(torch.autograd.Function):
    """Start to gather [n, ...], and return the input. `_EndGather` returns what arrives.

    The backward pass waits for the gradient, which `_EndGather` has started to add up.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, message: _Message) -> Tensor:
        ctx.message = message
        message.pending = begin_all_gather(x, message.context)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.message.wait(), None


@declare("message.context", x="V", out="R", backward="reduce_scatter")
class _EndGather(torch.autograd.Function):
    """Wait for what `_BeginGather` gathers: [n, ...] -> [n c, ...].

    The backward pass starts a reduce-scatter. Autograd computes nodes that were created later
    first. So attention that was computed between both nodes is differentiated during this message.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, message: _Message) -> Tensor:
        ctx.message = message
        return message.wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.message.pending = begin_reduce_scatter(grads[0], ctx.message.context)
        # The gradient is not complete yet. Nothing reads it before `_BeginGather` has waited.
        return ctx.message.pending.tensor, None


def reads_neighbours(size: int, length: int, window: int | None) -> bool:
    """Return whether no rank reads all keys. If so, each receives only those that it reads.

    Args:
        size: c.
        length: s.
        window: Number of keys that a query reads, up to its position. None: all of them.
    """
    if window is None:
        return False
    # Rank 0 reads the most: its first part, its last part, and the keys before the last part.
    return length // size + window - 1 < length


def _find_reaches(rank: int, size: int, length: int, window: int | None) -> tuple[range, range]:
    """Return the positions of the keys that the queries of a rank's two parts may read."""
    before = length if window is None else window - 1
    early, late = list_parts(rank, size, length)
    return (
        range(max(0, early.start - before), early.stop),
        range(max(0, late.start - before), late.stop),
    )


def _list_pieces(owner: int, reader: int, size: int, length: int, window: int) -> list[range]:
    """Return the positions that the rank `owner` sends to the rank `reader`, in order."""
    early, late = _find_reaches(reader, size, length, window)
    # Keys that both parts read are sent once.
    needs = [early, late]
    if late.start <= early.stop:
        needs = [range(early.start, late.stop)]
    pieces = [
        range(max(part.start, need.start), min(part.stop, need.stop))
        for part in list_parts(owner, size, length)
        for need in needs
    ]
    return [piece for piece in pieces if len(piece)]


def _cut_own(x: Tensor, window: int, context: ContextParallel) -> Iterator[tuple[int, Tensor]]:
    """Yield (rank, view) for what is sent to each rank, in the order of the message.

    Args:
        x: This rank's positions, [s/c, ...].
        window: Number of keys that a query reads, up to its position.
        context: The context-parallel ranks.
    """
    length = x.shape[0] * context.size
    early, late = list_parts(context.rank, context.size, length)
    for reader in range(context.size):
        for piece in _list_pieces(context.rank, reader, context.size, length, window):
            # A rank holds its two parts one after the other.
            start = piece.start - early.start
            if piece.start >= late.start:
                start = len(early) + piece.start - late.start
            yield reader, x[start : start + len(piece)]


@declare("context", x="V", out="V", forward="all_to_all", backward="all_to_all")
class _ReadNeighbours(torch.autograd.Function):
    """Receive the keys that this rank reads: [s/c, ...] -> [keys, ...], in the order of positions.

    The backward pass sends their gradients back, and adds up what arrives.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, window: int, context: ContextParallel) -> Tensor:
        cut = list(_cut_own(x, window, context))
        sizes = [0] * context.size
        for reader, view in cut:
            sizes[reader] += len(view)
        length = x.shape[0] * context.size
        arriving = [
            _list_pieces(owner, context.rank, context.size, length, window)
            for owner in range(context.size)
        ]
        received = [sum(len(piece) for piece in pieces) for pieces in arriving]
        out = _send(torch.cat([view for _, view in cut]), received, sizes, context)
        pieces = [piece for of_owner in arriving for piece in of_owner]
        # Messages arrive by rank, and attention reads keys by position.
        order = sorted(range(len(pieces)), key=lambda number: pieces[number].start)
        ctx.window, ctx.context, ctx.sizes, ctx.received = window, context, sizes, received
        ctx.pieces, ctx.order, ctx.shape = pieces, order, x.shape
        parts = out.split([len(piece) for piece in pieces])
        return torch.cat([parts[number] for number in order])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        parts = grads[0].split([len(ctx.pieces[number]) for number in ctx.order])
        by_owner = [
            part for _, part in sorted(zip(ctx.order, parts, strict=True), key=itemgetter(0))
        ]
        back = _send(torch.cat(by_owner), ctx.sizes, ctx.received, ctx.context)
        # A key may have been sent to several ranks. The order of the sum is always the same.
        total = back.new_zeros(ctx.shape)
        start = 0
        for _, view in _cut_own(total, ctx.window, ctx.context):
            view += back[start : start + len(view)]
            start += len(view)
        return total, None, None


def _send(x: Tensor, received: list[int], sent: list[int], context: ContextParallel) -> Tensor:
    """Send `sent[r]` rows of [n, ...] to each rank r, and return the rows from all ranks."""
    out = x.new_empty((sum(received), *x.shape[1:]))
    with context.comm_timer():
        dist.all_to_all_single(out, x, received, sent, group=context.group)
    return out


@declare("context", x="V", out="V", forward="all_to_all", backward="all_to_all")
class _Exchange(torch.autograd.Function):
    """Send part r of the first dimension to rank r: [c, ...] -> [c, ...].

    The backward pass is the same exchange.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, context: ContextParallel) -> Tensor:
        ctx.context = context
        return _send(x.contiguous(), [1] * context.size, [1] * context.size, context)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(grads[0], ctx.context), None


def exchange_heads(
    query: Tensor, key: Tensor, value: Tensor, context: ContextParallel
) -> tuple[Tensor, Tensor, Tensor]:
    """Return all positions of this rank's share of the heads.

    Keys and values are sent once for each of the groups that a rank's heads belong to. If its heads
    are neither whole groups nor a part of one, they are sent for each head.

    Args:
        query: All heads, this rank's positions, [b, n, s/c, d]. c must divide n.
        key: [b, g, s/c, d].
        value: [b, g, s/c, width of a value]. It may have another width if g is n.
        context: The context-parallel ranks.

    Returns:
        Queries [b, n/c, s, d], keys and values [b, groups, s, width].
    """
    if value.shape[3] != key.shape[3]:
        # What a head sends are neighbours.
        joined = torch.cat((query, key, value), dim=3).unflatten(1, (context.size, -1))
        widths = [each.shape[3] for each in (query, key, value)]
        first, second, third = gather_positions(joined, context).split(widths, dim=3)
        return first, second, third
    heads = query.shape[1] // context.size
    groups = _choose_groups(query.shape[1], key.shape[1], context.size)
    each = len(groups) // context.size
    # Without shared groups, keys and values are not copied.
    if groups != list(range(key.shape[1])):
        index = torch.tensor(groups, device=key.device)
        key = key.index_select(1, index)
        value = value.index_select(1, index)
    sent = torch.cat([x.unflatten(1, (context.size, -1)) for x in (query, key, value)], dim=2)
    joined = gather_positions(sent, context)
    first, second, third = joined.split((heads, each, each), dim=1)
    return first, second, third


def gather_positions(sent: Tensor, context: ContextParallel) -> Tensor:
    """Send the heads of each rank to it, and return all positions of this rank's, in order.

    Args:
        sent: This rank's positions for the heads of each rank, [b, c, heads, s/c, d].
        context: The context-parallel ranks.

    Returns:
        [b, heads, s, d].
    """
    # [c, b, heads, s/c, d].
    arrived = _Exchange.apply(sent.movedim(1, 0), context)
    # Each rank has sent its early and its late part. Late parts are in the opposite order.
    early, late = arrived.chunk(2, dim=3)
    return torch.cat((*early, *reversed(late.unbind())), dim=2)


def _choose_groups(heads: int, groups: int, size: int) -> list[int]:
    """Return the query groups that are sent to the ranks, equally many to each, in their order."""
    of_heads = [head * groups // heads for head in range(heads)]
    share = heads // size
    chosen = []
    for start in range(0, heads, share):
        own = of_heads[start : start + share]
        once = sorted(set(own))
        # The kernel needs equally many query heads in each of its groups. Those of a group are
        # neighbours.
        if own != [group for group in once for _ in range(share // len(once))]:
            return of_heads
        chosen.append(once)
    if len({len(once) for once in chosen}) > 1:
        return of_heads
    return [group for once in chosen for group in once]


def return_heads(x: Tensor, context: ContextParallel) -> Tensor:
    """Return this rank's positions of all heads: [b, n/c, s, d] -> [b, n, s/c, d]."""
    parts = x.chunk(2 * context.size, dim=2)
    # Rank r gets its two parts of these heads.
    sent = [
        torch.cat(pair, dim=2)
        for pair in zip(parts[: context.size], reversed(parts[context.size :]), strict=True)
    ]
    return _Exchange.apply(torch.stack(sent), context).movedim(0, 1).flatten(1, 2)

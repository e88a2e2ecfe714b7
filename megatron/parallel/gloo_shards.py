"""All-gather and reduce-scatter of ZeRO's shards between processes on CPUs, by direct messages.

gloo's reduce-scatter is an all-reduce of which each rank keeps a part, and its all-gather copies
every part once more. Both take about twice the time of the messages here, in which each rank sends
every other rank only what that rank needs. `docs/benchmarks.md` has the numbers. NCCL needs none of
this.

The ranks' terms are added in the order of the ranks, so all elements are summed in one fixed order.
"""

import torch
import torch.distributed as dist
from torch import Tensor

_GATHER = 1
_SCATTER = 2
"""Tags of the messages. A rank that skips a collective must not receive a message of the next."""


def can_send_directly(tensor: Tensor, group: dist.ProcessGroup) -> bool:
    """Return whether the functions of this module apply to a tensor and a group."""
    return tensor.device.type == "cpu" and dist.get_backend(group) == dist.Backend.GLOO


def gather_shards(gathered: Tensor, shard: Tensor, group: dist.ProcessGroup) -> None:
    """Gather the shards of all ranks of a group, as `dist.all_gather_into_tensor` does.

    Args:
        gathered: [ranks x k], which is filled. `shard` may be this rank's part of it.
        shard: [k], this rank's shard.
        group: A group of gloo.
    """
    size, rank = group.size(), group.rank()
    parts = gathered.view(size, -1)
    works = []
    for distance in range(1, size):
        before, after = (rank - distance) % size, (rank + distance) % size
        works.append(dist.irecv(parts[before], group=group, group_src=before, tag=_GATHER))
        works.append(dist.isend(shard, group=group, group_dst=after, tag=_GATHER))
    if parts[rank].data_ptr() != shard.data_ptr():
        parts[rank].copy_(shard)
    _wait(works)


def reduce_shards(
    reduced: Tensor,
    terms: Tensor,
    group: dist.ProcessGroup,
    op: dist.ReduceOp.RedOpType | dist.ReduceOp,
) -> None:
    """Sum or average the ranks' terms, as `dist.reduce_scatter_tensor` does.

    Args:
        reduced: [k], which is filled with this rank's part of the result.
        terms: [ranks x k], this rank's terms of all parts.
        group: A group of gloo.
        op: `SUM` or `AVG`.
    """
    assert op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG), f"no direct messages for {op}"
    size, rank = group.size(), group.rank()
    parts = terms.view(size, -1)
    ordered = list(parts)
    works = []
    for distance in range(1, size):
        before, after = (rank - distance) % size, (rank + distance) % size
        ordered[before] = torch.empty_like(reduced)
        works.append(dist.irecv(ordered[before], group=group, group_src=before, tag=_SCATTER))
        works.append(dist.isend(parts[after], group=group, group_dst=after, tag=_SCATTER))
    _wait(works)
    torch.add(ordered[0], ordered[1], out=reduced)
    for term in ordered[2:]:
        reduced.add_(term)
    if op == dist.ReduceOp.AVG:
        reduced.div_(size)


def _wait(works: list[dist.Work | None]) -> None:
    for work in works:
        assert work is not None, "this rank is in the group"
        work.wait()

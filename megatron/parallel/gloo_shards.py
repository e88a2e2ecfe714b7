"""All-gather and reduce-scatter of ZeRO's shards between processes on CPUs, by faster collectives.

gloo's reduce-scatter is an all-reduce of which each rank keeps a part, and its all-gather copies
every part once more. Both take about twice the time of the collectives here, in which each rank
gets only what it needs. `docs/decisions/040-collectives-of-shards-on-cpus.md` has the numbers. NCCL
needs none of this.

The ranks' terms are added in the order of the ranks, so all elements are summed in one fixed order.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.parallel.rank_progress import wait_for


def has_faster_collectives(tensor: Tensor, group: dist.ProcessGroup) -> bool:
    """Return whether the functions of this module apply to a tensor and a group."""
    return tensor.device.type == "cpu" and dist.get_backend(group) == dist.Backend.GLOO


def gather_shards(gathered: Tensor, shard: Tensor, group: dist.ProcessGroup) -> None:
    """Gather the shards of all ranks of a group, as `dist.all_gather_into_tensor` does.

    Args:
        gathered: [ranks x k], which is filled. `shard` may be this rank's part of it.
        shard: [k], this rank's shard.
        group: A group of gloo.
    """
    parts = gathered.view(group.size(), -1)
    own = parts[group.rank()]
    if own.data_ptr() != shard.data_ptr():
        own.copy_(shard)
    # All of them work at the same time.
    works = [
        dist.broadcast(part, group=group, group_src=source, async_op=True)
        for source, part in enumerate(parts)
    ]
    for work in works:
        assert work is not None, "this rank is in the group"
        wait_for(work)


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
        group: A group of gloo with several ranks.
        op: `SUM` or `AVG`.
    """
    assert op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG), f"no exchange of terms for {op}"
    received = torch.empty_like(terms)
    dist.all_to_all_single(received, terms, group=group)
    first, second, *others = received.view(group.size(), -1)
    torch.add(first, second, out=reduced)
    for term in others:
        reduced.add_(term)
    if op == dist.ReduceOp.AVG:
        reduced.div_(group.size())

"""Tests of the collectives of ZeRO's shards on CPUs, against gloo's own and plain sums."""

import pytest
from process_pool import ProcessPool, succeed

from megatron.parallel.rendezvous import start_process_group


def check_shards(members: int, rows: int) -> None:
    """Gather and reduce in the group of the last `members` ranks of the world."""
    import torch
    import torch.distributed as dist

    from megatron.engine.sharding import gather_shards, has_faster_collectives, reduce_shards

    start_process_group("gloo", 1)
    world, rank = dist.get_world_size(), dist.get_rank()
    # The ranks of the group differ from those of the world.
    group = dist.new_group(list(range(world - members, world)))
    # Rank 0 keeps the store through which the others build the group.
    dist.barrier()
    if rank < world - members:
        return
    assert isinstance(group, dist.ProcessGroup)
    own = group.rank()
    for dtype in (torch.float32, torch.bfloat16):
        every = [
            torch.randn(members * rows, generator=torch.Generator().manual_seed(number)).to(dtype)
            for number in range(members)
        ]
        terms = every[own]
        before = terms.clone()
        assert has_faster_collectives(terms, group)
        assert not has_faster_collectives(terms.to("meta"), group)
        # The terms of the ranks are added one after the other.
        total = every[0]
        for term in every[1:]:
            total = total + term
        mine = slice(own * rows, (own + 1) * rows)
        for op, expected in ((dist.ReduceOp.SUM, total), (dist.ReduceOp.AVG, total / members)):
            reduced = torch.empty(rows, dtype=dtype)
            reduce_shards(reduced, terms, group, op)
            assert torch.equal(reduced, expected[mine])
            if members == 2:
                collective = torch.empty_like(reduced)
                dist.reduce_scatter_tensor(collective, terms, op=op, group=group)
                assert torch.equal(reduced, collective), "two terms have one possible sum"
        assert torch.equal(terms, before), "the terms may be read again"

        gathered = torch.empty(members * rows, dtype=dtype)
        gather_shards(gathered, terms[:rows], group)
        collective = torch.empty_like(gathered)
        dist.all_gather_into_tensor(collective, terms[:rows].contiguous(), group=group)
        assert torch.equal(gathered, collective)
        # FSDP2 writes its shard where it belongs in the result.
        in_place = torch.zeros(members * rows, dtype=dtype)
        in_place[mine] = terms[:rows]
        gather_shards(in_place, in_place[mine], group)
        assert torch.equal(in_place, collective)


@pytest.mark.parametrize(("world", "members"), [(2, 2), (4, 3), (8, 8)])
@pytest.mark.parametrize("rows", [1, 4099])
def test_gather_and_reduce(world: int, members: int, rows: int, pool: ProcessPool) -> None:
    succeed(pool.run(world, check_shards, members, rows))


def check_max_is_refused() -> None:
    import torch
    import torch.distributed as dist

    from megatron.engine.sharding import reduce_shards

    start_process_group("gloo", 1)
    assert dist.group.WORLD is not None
    # A rank that ends closes its connections, also to those that have not seen them open yet.
    dist.barrier()
    with pytest.raises(AssertionError, match="no exchange of terms for"):
        reduce_shards(torch.empty(1), torch.ones(2), dist.group.WORLD, dist.ReduceOp.MAX)


def test_other_operations_are_refused(pool: ProcessPool) -> None:
    succeed(pool.run(2, check_max_is_refused))

"""The first messages of the process groups, which connect their ranks before the first step.

NCCL makes a communicator when it is first needed, and both sides wait for each other then. In the
middle of a step, a rank may wait for a message of one group while its peer makes the communicator
of another one. So every group exchanges a message at the start, in one order on all ranks, and its
result is checked. See docs/decisions/041.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.base.errors import LayoutError
from megatron.base.plain_text import format_some
from megatron.parallel.rank_progress import Phase, RankProgress, wait_for

_SHOWN = 8
"""Largest number of ranks that the name of a group lists."""


def connect_ranks(
    groups: Mapping[dist.ProcessGroup, str],
    pipeline: dist.ProcessGroup,
    device: torch.device,
    progress: RankProgress,
) -> None:
    """Let the ranks of all groups exchange their first messages. All ranks call it together.

    Args:
        groups: This rank's groups, in the same order on all ranks, and what each one is.
        pipeline: The group whose ranks send to their neighbours. It may have one rank.
        device: The device of the messages.
        progress: The phase of this rank. While it waits, the phase names the group.

    Raises:
        LayoutError: The ranks of a group cannot exchange a message. It names the group.
    """
    for group, kind in groups.items():
        connect_group(group, kind, device, progress)
    for pair in _list_neighbours(pipeline.size()):
        if pipeline.rank() in pair:
            _connect_neighbours(pipeline, pair, device, progress)


def connect_group(
    group: dist.ProcessGroup, kind: str, device: torch.device, progress: RankProgress
) -> None:
    """Let the ranks of a group add up their numbers. See `connect_ranks`."""
    ranks = dist.get_process_group_ranks(group)
    with _name_group(kind, ranks, progress):
        total = torch.full((1,), dist.get_rank() + 1, device=device)
        dist.all_reduce(total, group=group)
        _check(total, sum(ranks) + len(ranks))


def _list_neighbours(size: int) -> list[tuple[int, int]]:
    """Return the pairs of pipeline ranks that send to each other, in the order of their messages.

    The last and the first one are neighbours too, because interleaved stages send in a ring. Pairs
    without a common rank connect at the same time.
    """
    order = [*range(0, size, 2), *range(1, size, 2)]
    pairs = [sorted((rank, (rank + 1) % size)) for rank in order]
    # Two ranks are neighbours in both directions, and one rank has none.
    return list(dict.fromkeys((low, high) for low, high in pairs if low < high))


def _connect_neighbours(
    group: dist.ProcessGroup, pair: tuple[int, int], device: torch.device, progress: RankProgress
) -> None:
    """Let two pipeline ranks send to each other in both ways in which torch's schedules send.

    With NCCL, single messages have a communicator of the pair, and batches that of the group.

    Args:
        group: The pipeline group.
        pair: Two ranks of the group, the lower one first.
        device: The device of the messages.
        progress: The phase of this rank.
    """
    own = group.rank()
    peer = sum(pair) - own
    ranks = dist.get_process_group_ranks(group)
    with _name_group("pair of pipeline neighbours", [ranks[each] for each in pair], progress):
        sent = torch.full((1,), ranks[own], device=device)
        received = torch.full_like(sent, -1)
        if own < peer:
            dist.send(sent, group=group, group_dst=peer)
            dist.recv(received, group=group, group_src=peer)
        else:
            dist.recv(received, group=group, group_src=peer)
            dist.send(sent, group=group, group_dst=peer)
        _check(received, ranks[peer])
        received = torch.full_like(sent, -1)
        both = [
            dist.P2POp(dist.isend, sent, group=group, group_peer=peer),
            dist.P2POp(dist.irecv, received, group=group, group_peer=peer),
        ]
        for work in dist.batch_isend_irecv(both):
            wait_for(work)
        _check(received, ranks[peer])


def _check(received: Tensor, expected: int) -> None:
    """Check the number that a first message brought.

    Raises:
        ValueError: It is another one.
    """
    if not torch.equal(received, torch.full_like(received, expected)):
        raise ValueError(f"received {received.item()} instead of {expected}")


@contextmanager
def _name_group(kind: str, ranks: Sequence[int], progress: RankProgress) -> Iterator[None]:
    """Name a group in the phase and in the errors of its first message.

    Raises:
        LayoutError: The message has failed.
    """
    name = f"the {kind} of ranks {format_some(ranks, _SHOWN)}"
    with progress.enter(Phase(f"the first message of {name}")):
        try:
            yield
        # torch's errors of communication are RuntimeErrors.
        except (RuntimeError, ValueError) as error:
            # `RollCall` prints only the first line.
            reason = str(error).partition("\n")[0]
            raise LayoutError(
                f"{name} must exchange a message before the first step, but rank "
                f"{dist.get_rank()} failed: {reason}; check the network and the GPUs of their "
                "hosts (NCCL_DEBUG=INFO prints how NCCL connects them), and start again"
            ) from error

"""What data-parallel ranks send in a step, and how long messages of all kinds take.

The formulas are those of docs/sharding.md. Traffic is counted exactly, and a test compares it with
a recorded step. Times are estimates of ring collectives: each of the n - 1 hops has a latency, and
each rank sends (n - 1) / n of the bytes (https://arxiv.org/abs/1910.02054, section 7).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.extras.planner.cost.hardware import Hardware, Network


@dataclass(frozen=True)
class Collectives:
    """All collectives of one kind in a step."""

    count: int = 0
    bytes: float = 0
    """Sum of the sizes of the complete tensors: what an all-gather returns, what a reduce-scatter
    gets, what an all-reduce changes."""


@dataclass(frozen=True)
class StepTraffic:
    """What one rank sends to other data-parallel ranks in a step."""

    all_gather: Collectives
    """All-gathers of parameters, in the group that shares a copy of the model."""
    reduce_scatter: Collectives
    """Reduce-scatters of gradients, in the same group."""
    all_reduce: Collectives
    """All-reduces of the shards of the gradients, over the copies."""


def count_traffic(
    blocks: Sequence[int],
    outside: Sequence[int],
    *,
    shard_size: int,
    copies: int,
    zero_stage: int,
    microbatches: int,
    weight_bytes: int,
    gradient_bytes: int,
) -> StepTraffic:
    """Count what a rank sends in a step.

    Args:
        blocks: Padded elements of each block of this rank. FSDP2 pads rows.
        outside: Padded elements of each group outside of the blocks: what FSDP2's root has, which
            is the embedding, and a head that is not tied to it.
        shard_size: Data-parallel ranks that share one copy of the model.
        copies: Number of copies.
        zero_stage: The ZeRO stage.
        microbatches: Microbatches of this rank.
        weight_bytes: Bytes of a parameter as it is gathered.
        gradient_bytes: Bytes of a gradient as it is sent.
    """
    modules = len(blocks) + len(outside)
    elements = sum(blocks) + sum(outside)
    all_gather = reduce_scatter = all_reduce = Collectives()
    if shard_size > 1 and zero_stage == 3:
        # Blocks are gathered for the forward and for the backward pass, the others once for both.
        gathers = microbatches * (2 * len(blocks) + len(outside))
        gathered = microbatches * (2 * sum(blocks) + sum(outside))
        all_gather = Collectives(gathers, weight_bytes * gathered)
    elif shard_size > 1:
        all_gather = Collectives(modules, weight_bytes * elements)
    if shard_size > 1:
        reductions = microbatches if zero_stage >= 2 else 1
        reduce_scatter = Collectives(reductions * modules, gradient_bytes * reductions * elements)
    if copies > 1:
        all_reduce = Collectives(modules, gradient_bytes * elements // shard_size)
    return StepTraffic(all_gather, reduce_scatter, all_reduce)


@dataclass(frozen=True)
class CommunicationTime:
    """Seconds of communication in a step, on each kind of link."""

    inside_nodes: float
    between_nodes: float

    @property
    def total(self) -> float:
        """Seconds until all is sent. Both kinds of links work at the same time."""
        return max(self.inside_nodes, self.between_nodes)

    def __add__(self, other: "CommunicationTime") -> "CommunicationTime":
        """Return the sum by links."""
        return CommunicationTime(
            self.inside_nodes + other.inside_nodes, self.between_nodes + other.between_nodes
        )


def estimate_time(
    traffic: StepTraffic, network: Network, *, shard_size: int, copies: int, inner_ranks: int = 1
) -> CommunicationTime:
    """Estimate how long a step's communication takes. Nothing overlaps with computation here.

    Args:
        traffic: What a rank sends.
        network: The links.
        shard_size: Data-parallel ranks that share one copy of the model.
        copies: Number of copies.
        inner_ranks: Ranks between two neighbouring data-parallel ranks, which is the
            tensor-parallel size.
    """
    seconds = {True: 0.0, False: 0.0}
    rings = (
        (traffic.all_gather, shard_size, inner_ranks, 1),
        (traffic.reduce_scatter, shard_size, inner_ranks, 1),
        # An all-reduce is a reduce-scatter and an all-gather.
        (traffic.all_reduce, copies, inner_ranks * shard_size, 2),
    )
    for collectives, ranks, stride, passes in rings:
        inside = is_inside_node(ranks, stride, network)
        seconds[inside] += passes * estimate_ring_seconds(collectives, ranks, stride, network)
    return CommunicationTime(seconds[True], seconds[False])


def is_inside_node(ranks: int, stride: int, network: Network) -> bool:
    """Return whether a ring of `ranks` ranks stays inside a node.

    Args:
        ranks: Ranks of the ring.
        stride: Ranks between two neighbours of the ring. Those in between have rings of their own.
        network: The links.
    """
    return ranks <= max(1, network.ranks_per_node // stride)


def estimate_ring_seconds(
    collectives: Collectives, ranks: int, stride: int, network: Network
) -> float:
    """Return the seconds of reduce-scatters or all-gathers. The arguments are those above."""
    bandwidth = network.node_bandwidth
    if not is_inside_node(ranks, stride, network):
        # Neighbours of the ring that are on one node. Each of them uses its own link to other
        # nodes.
        on_node = max(1, network.ranks_per_node // stride)
        bandwidth = network.network_bandwidth * on_node
        # Data must also pass through the node.
        if on_node > 1:
            bandwidth = min(bandwidth, network.node_bandwidth)
    hops = collectives.count * (ranks - 1) * network.hop_seconds
    return hops + collectives.bytes * (ranks - 1) / ranks / bandwidth


def estimate_collective_seconds(
    size: float, ranks: int, hardware: Hardware, *, stride: int = 1, passes: int = 1
) -> float:
    """Return the seconds of a ring collective of `size` bytes.

    A reduce-scatter or an all-gather is one pass around the ring, and an all-reduce is two.
    """
    if ranks == 1:
        return 0.0
    return passes * estimate_ring_seconds(Collectives(1, size), ranks, stride, hardware.network)


def estimate_all_to_all_seconds(size: float, ranks: int, hardware: Hardware) -> float:
    """Return the seconds in which neighbouring ranks exchange parts of `size` bytes.

    A rank sends to all others at the same time, over the links inside its node and over those to
    other nodes.
    """
    if ranks == 1:
        return 0.0
    network = hardware.network
    # Neighbours fill a node before the next one begins.
    near = min(ranks, max(1, network.ranks_per_node))
    inside = size * (near - 1) / ranks / network.node_bandwidth
    between = size * (ranks - near) / ranks / network.network_bandwidth
    return max(inside, between) + network.hop_seconds


def estimate_small_all_reduce_seconds(
    size: float, ranks: int, hardware: Hardware, *, stride: int = 1
) -> float:
    """Return the seconds of an all-reduce whose time is mostly its latency.

    NCCL sends small messages over trees, whose latency grows with the logarithm of the ranks
    (https://developer.nvidia.com/blog/massively-scale-deep-learning-training-nccl-2-4).
    """
    if ranks == 1:
        return 0.0
    ring = estimate_collective_seconds(size, ranks, hardware, stride=stride, passes=2)
    bandwidth = hardware.network.node_bandwidth
    if ranks * stride > hardware.ranks_per_node:
        bandwidth = hardware.network.network_bandwidth
    hops = 2 * math.ceil(math.log2(ranks))
    return min(ring, hops * hardware.network.hop_seconds + 2 * size / bandwidth)


def estimate_added_seconds(communication: float, hidden: float, contention: float) -> float:
    """Return the seconds that communication adds to computation.

    Args:
        communication: Seconds of the communication.
        hidden: Seconds of computation that run at the same time.
        contention: Seconds that computation loses for each second of both.
    """
    # What is hidden is not free: it slows the computation.
    covered = min(communication, hidden)
    return communication - covered + contention * covered


def estimate_message_seconds(size: float, stride: int, hardware: Hardware) -> float:
    """Return the seconds in which rank r sends `size` bytes to rank r + `stride`."""
    network = hardware.network
    # Both ranks are on one node only if the node holds more ranks than lie between them.
    bandwidth = network.node_bandwidth
    if stride >= hardware.ranks_per_node:
        bandwidth = network.network_bandwidth
    return size / bandwidth + network.hop_seconds

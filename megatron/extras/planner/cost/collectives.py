"""The time of collectives and of messages between pipeline stages, by size and topology."""

import math

from megatron.extras.planner.cost import communication
from megatron.extras.planner.cost.communication import Collectives
from megatron.extras.planner.cost.hardware import Hardware


def estimate_collective_seconds(
    size: float, ranks: int, hardware: Hardware, *, stride: int = 1, passes: int = 1
) -> float:
    """Return the seconds of a ring collective of `size` bytes.

    A reduce-scatter or an all-gather is one pass around the ring, and an all-reduce is two.
    """
    if ranks == 1:
        return 0.0
    return passes * communication.estimate_ring_seconds(
        Collectives(1, size), ranks, stride, hardware.network
    )


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

"""The time of collectives and of messages between pipeline stages, by size and topology."""

from megatron.cost.hardware import Hardware


def find_ring_bandwidth(ranks: int, stride: int, hardware: Hardware) -> tuple[float, float]:
    """Return the bytes a second of a ring, and the latency of one of its hops.

    Args:
        ranks: Ranks of the ring.
        stride: Ranks between two neighbours. Those in between have rings of their own.
        hardware: The links.
    """
    network = hardware.network
    on_node = max(1, hardware.ranks_per_node // stride)
    if ranks <= on_node:
        return network.node_bandwidth, hardware.node_hop_seconds
    # The ranks of a node enter and leave it over all network cards that are theirs.
    bandwidth = network.network_bandwidth * on_node
    if on_node > 1:
        bandwidth = min(bandwidth, network.node_bandwidth)
    return bandwidth, hardware.hop_seconds


def estimate_ring_seconds(
    size: float, ranks: int, hardware: Hardware, *, stride: int = 1, passes: int = 1
) -> float:
    """Return the seconds of a ring collective of `size` bytes.

    A reduce-scatter or an all-gather is one pass around the ring, and an all-reduce is two.
    """
    if ranks == 1:
        return 0.0
    bandwidth, hop = find_ring_bandwidth(ranks, stride, hardware)
    # Large rings are cut into trees, so latency does not grow with the ranks without limit.
    hops = min(ranks - 1, 4 * ranks.bit_length())
    return passes * (size * (ranks - 1) / ranks / bandwidth + hops * hop)


def estimate_message_seconds(size: float, stride: int, hardware: Hardware) -> float:
    """Return the seconds in which a rank sends `size` bytes to the rank `stride` further."""
    network = hardware.network
    if stride < hardware.ranks_per_node:
        return size / network.node_bandwidth + hardware.node_hop_seconds
    return size / network.network_bandwidth + hardware.hop_seconds

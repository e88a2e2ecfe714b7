"""The messages of context-parallel ranks on the fake GPU, against formulas written by hand.

The model is the one of `fake_ranks.GPT`: h = 64, 4 heads, s = 32, b = 2, two layers. A step has two
microbatches.
"""

import pytest
from cuda.conftest import Call
from cuda.fake_ranks import Case, run_case

from megatron.parallel.context import list_parts, reads_neighbours

H, S, B, LAYERS, MICROBATCHES, WIDTH = 64, 32, 2, 2, 2, 2
CALLS = LAYERS * MICROBATCHES
KEYS = 2 * S * B * H * WIDTH
"""Bytes of the keys and values of all positions."""
CASES = {
    # Early and late parts have a message each, in both passes.
    "allgather": (
        "",
        {"all_gather": {KEYS // 2: 2 * CALLS}, "reduce_scatter": {KEYS // 2: 2 * CALLS}},
    ),
    # The core gathers once more in the backward pass.
    "core recomputed": (
        "--recompute-attention-core",
        {"all_gather": {KEYS // 2: 4 * CALLS}, "reduce_scatter": {KEYS // 2: 2 * CALLS}},
    ),
    # Queries, keys and values of a quarter of the positions, and their result, in both passes.
    "a2a": (
        "--cp-comm-type a2a",
        {"all_to_all": {3 * KEYS // 8: 2 * CALLS, KEYS // 8: 2 * CALLS}},
    ),
    # Rank 1 has the positions 4 to 7 and 24 to 27, and reads 0 to 7 and 20 to 27.
    "window of 5": ("--sliding-window 5", {"all_to_all": {16 * KEYS // S: 2 * CALLS}}),
}


@pytest.mark.parametrize("name", CASES)
def test_messages_of_a_shared_sequence(name: str, on_fake_gpu: Call) -> None:
    flags, expected = CASES[name]
    case = Case(f"--bf16 --context-parallel-size 4 --global-batch-size 4 {flags}", 4, 1)
    step = on_fake_gpu(run_case, case).step
    found: dict[str, dict[int, int]] = {}
    for message, count in step.collectives.items():
        # FSDP2 sends on streams of its own, and the step's sum is an all-reduce.
        if message.stream == "default" and message.kind != "all_reduce":
            assert (message.group, message.ranks, message.dtype) == ("context", 4, "bfloat16")
            found.setdefault(message.kind, {})[message.size] = count
    assert found == expected


def list_read_keys(rank: int, size: int, length: int, window: int) -> set[int]:
    """Return the keys that the queries of a rank read."""
    queries = [query for part in list_parts(rank, size, length) for query in part]
    return {key for query in queries for key in range(max(0, query - window + 1), query + 1)}


@pytest.mark.parametrize("size", [2, 3, 4])
def test_neighbours_are_read_if_no_rank_reads_all_keys(size: int) -> None:
    length = 8 * size
    for window in range(1, length + 1):
        most = max(len(list_read_keys(rank, size, length, window)) for rank in range(size))
        assert reads_neighbours(size, length, window) == (most < length)
    assert not reads_neighbours(size, length, None)

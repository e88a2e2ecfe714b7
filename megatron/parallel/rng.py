"""Dropout masks that are functions of where an element is in the model and in the run.

The generator is Philox 4x64-10 (https://doi.org/10.1145/2063384.2063405). Its key is (seed, 0), and
the counter of a block is (number + 1, site, sample, iteration). A block has 16 numbers of 16 bits,
the lowest bits first. An element is zeroed if its number is below the threshold.

An element has a row and a column. Each row has its own blocks, and a column is a number in them:

| site              | row                           | column    | columns of a row |
|-------------------|-------------------------------|-----------|------------------|
| residual stream   | index in the sample           | channel   | h                |
| attention weights | head x --seq-length + query   | key       | --seq-length     |

The index counts tokens from the start of the sample. Documents, `position_ids` and a shorter
sequence of a curriculum do not change it. The sample is its number in the global batch. So no
layout of the ranks, micro-batch size, recomputation or compilation changes a mask.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron.config.model import DROPOUT_STEPS

LANES = 16
"""Numbers of a block."""
STEPS = DROPOUT_STEPS


class MaskPlace(NamedTuple):
    """Where the elements of a mask are.

    Row i of the mask is row `first + i // length * step + i % length`. So the rows are ranges of
    equal length: the parts of a sequence that a context-parallel rank has, or queries of heads.
    """

    blocks: int
    """Blocks of a complete row."""
    first: int
    step: int
    length: int
    column: int = 0
    """The first column of the mask."""
    sample: int = 0
    """The first sample of the mask within the microbatch."""


def draw_mask(
    dropout_key: Tensor, site: Tensor, threshold: int, shape: list[int], place: list[int]
) -> Tensor:
    """Return which elements are kept, a bool tensor.

    Args:
        dropout_key: int64[3], see `Inputs`. Only a CPU's kernel reads it on the host.
        site: Number of the dropout in the model, a scalar on the host. It is the same on every
            layout. A Python number would be a part of a compiled graph, which layers share.
        threshold: Elements with a smaller number are zeroed.
        shape: [rows, samples, columns], or [samples, heads, queries, columns], where each query of
            a head is a row.
        place: A `MaskPlace`.
    """
    blocks, first, step, length, column, sample = place
    kept = np.empty(shape, dtype=np.bool_)
    # Both are views, so what is written to a sample's rows is in the mask.
    by_sample = kept.swapaxes(0, 1)
    if len(shape) == 4:
        by_sample = kept.reshape(shape[0], -1, shape[3])
    seed, iteration, start = dropout_key.tolist()
    key = np.array((seed, 0), dtype=np.int64).view(np.uint64)
    for number, rows in enumerate(by_sample, start + sample):
        # Between two ranges of rows are those of other ranks, so each range has its own counter.
        for at in range(0, len(rows), length):
            block = (first + at // length * step) * blocks
            # NumPy counts up before it computes a block.
            counter = np.array((block, int(site), number, iteration), dtype=np.uint64)
            philox = np.random.Philox(key=key, counter=counter)
            # Little-endian on each machine, so that the lowest bits of a word come first.
            drawn = philox.random_raw(length * blocks * 4).view("<u2").reshape(length, -1)
            drawn = drawn[:, column : column + rows.shape[1]]
            np.greater_equal(drawn, np.uint16(threshold), out=rows[at : at + length])
    return torch.from_numpy(kept)


# The first call of an operator imports torch's compiler, which takes a second.
draw_mask_in_graph = torch.library.custom_op(
    "megatron::draw_mask", draw_mask, mutates_args=(), device_types="cpu"
)
"""`draw_mask` as an operator, for compiled graphs and for a kernel on GPUs."""


@draw_mask_in_graph.register_fake
def _(key: Tensor, site: Tensor, threshold: int, shape: list[int], place: list[int]) -> Tensor:
    return key.new_empty(shape, dtype=torch.bool)

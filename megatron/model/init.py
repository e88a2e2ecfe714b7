"""All weight initialisation.

| parameter                                              | distribution                |
|--------------------------------------------------------|-----------------------------|
| embedding.word, embedding.position, head.weight        | N(0, sigma)                 |
| blocks.*.attention.qkv, blocks.*.mlp.up, .gate         | N(0, sigma)                 |
| blocks.*.attention.out, blocks.*.mlp.down              | N(0, sigma / sqrt(2 layers)) |
| every bias                                             | 0                           |
| every norm's weight                                    | 1                           |
| rows that only pad the vocabulary                      | 0                           |

sigma is `--init-method-std`. The invariant: an element's value depends on (seed, name of the parameter, its row's block, its place
in the block) and on nothing of the layout, so every layout, engine and device starts from the same model. Numbers are drawn on the
CPU, block by block of rows, and each rank draws the rows that it holds.
"""

import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from megatron.model.shape import ModelShape

_BLOCK_ELEMENTS = 1 << 18


def initialise(
    name: str,
    local: Tensor,
    global_shape: tuple[int, ...],
    offset: tuple[int, ...],
    shape: ModelShape,
    seed: int,
) -> None:
    """Fill the box of parameter `name` that begins at `offset` of its global shape, in place."""
    leaf = name.rsplit(".", 1)[-1]
    if leaf == "bias":
        local.zero_()
    elif name.endswith("norm.weight"):
        local.fill_(1.0)
    else:
        into_residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
        std = shape.output_init_std if into_residual else shape.init_std
        local.copy_(
            torch.from_numpy(
                draw_normal_slice(seed, name, global_shape, offset, tuple(local.shape))
            ).mul_(std)
        )


def draw_normal_slice(
    seed: int,
    name: str,
    global_shape: tuple[int, ...],
    offset: tuple[int, ...],
    local_shape: tuple[int, ...],
) -> np.ndarray:
    """A box of the parameter's standard-normal matrix, fp32. Blocks are drawn by several threads: NumPy frees the interpreter."""
    rows, columns = global_shape[0], global_shape[1] if len(global_shape) > 1 else 1
    first_row, local_rows = offset[0], local_shape[0]
    first_column, local_columns = (offset[1], local_shape[1]) if len(global_shape) > 1 else (0, 1)
    block_rows = max(1, _BLOCK_ELEMENTS // columns)
    out = np.empty((local_rows, local_columns), dtype=np.float32)

    def draw(block: int) -> None:
        start = block * block_rows
        stop = min(start + block_rows, rows)
        generator = np.random.Generator(
            np.random.SFC64(np.random.SeedSequence((seed, zlib.crc32(name.encode()), block)))
        )
        values = generator.standard_normal((stop - start, columns), dtype=np.float32)
        low, high = max(start, first_row), min(stop, first_row + local_rows)
        out[low - first_row : high - first_row] = values[
            low - start : high - start, first_column : first_column + local_columns
        ]

    blocks = (
        range(first_row // block_rows, -(-(first_row + local_rows) // block_rows))
        if local_rows
        else range(0)
    )
    if len(blocks) > 4:
        with ThreadPoolExecutor() as pool:
            list(pool.map(draw, blocks))
    else:
        for block in blocks:
            draw(block)
    return out.reshape(local_shape)

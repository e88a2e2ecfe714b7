"""All weight initialisation.

| parameter                     | kind          | distribution                 |
|-------------------------------|---------------|------------------------------|
| embedding.word.weight         | TABLE         | N(0, sigma)                  |
| embedding.position            | TABLE         | N(0, sigma)                  |
| head.weight                   | TABLE         | N(0, sigma)                  |
| blocks.*.attention.qkv.weight | NORMAL        | N(0, sigma)                  |
| *.attention.query.weight      | NORMAL        | N(0, sigma)                  |
| *.attention.key.weight        | NORMAL        | N(0, sigma)                  |
| *.attention.value.weight      | NORMAL        | N(0, sigma)                  |
| *.attention.beta.weight       | NORMAL        | N(0, sigma)                  |
| *.attention.alpha.weight      | NORMAL        | N(0, sigma)                  |
| *.attention.gate.weight       | NORMAL        | N(0, sigma)                  |
| *.attention.query_down.weight | NORMAL        | N(0, sigma)                  |
| *.attention.latent_down.weight | NORMAL       | N(0, sigma)                  |
| *.attention.latent_up.weight  | NORMAL        | N(0, sigma)                  |
| blocks.*.mlp.up.weight        | NORMAL        | N(0, sigma)                  |
| blocks.*.mlp.gate.weight      | NORMAL        | N(0, sigma)                  |
| blocks.*.attention.out.weight | SCALED_NORMAL | N(0, sigma / sqrt(2 layers)) |
| blocks.*.mlp.down.weight      | SCALED_NORMAL | N(0, sigma / sqrt(2 layers)) |
| *norm.weight                  | ONE           | 1                            |
| *.bias                        | ZERO          | 0                            |
| *.activation.alpha_p          | XIELU_P       | log(exp(0.8) - 1)            |
| *.activation.alpha_n          | XIELU_N       | log(exp(0.3) - 1)            |
| *.attention.*_convolution     | CONVOLUTION   | U(-1, 1) / sqrt(kernel)      |
| *.attention.A_log             | DECAY_RATE    | log U(0.01, 16)              |
| *.attention.dt_bias           | TIME_STEP     | 1 or log(exp(10^U(-3,-1))-1) |
| blocks.*.attention.*          | VECTOR        | N(0, sigma)                  |

sigma is `--init-method-std`. `--output-init-method-std` replaces sigma / sqrt(2 layers). With
`--parametrization`, the deviations of NORMAL and SCALED_NORMAL are others, see `ModelShape`. With
`--apply-layernorm-1p`, norms are ZERO, except that of a gated delta net. A
parameter's `ParameterSpec` states its kind. Its name decides
nothing. A test compares this table with the specs, and takes the last row only for names without
another one. Rows that only pad the vocabulary are zero. The engines set them, not this module.

The invariant: the value of an element depends on the seed, the name of the parameter, the block of
its row, and its position in that block. It does not depend on the layout. Every layout, engine and
device therefore starts from the same model. Numbers are drawn on the CPU, one block of rows after
the other. Each rank draws the rows that it holds.
"""

import math
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from megatron.config.model import ModelConfig, TimeStep
from megatron.model.shape import ModelShape
from megatron.parallel.parameter_spec import Init

# Elements of a block. It is large enough to amortise the seeding of a generator. A change of it
# changes the initial weights for a given seed.
_BLOCK_ELEMENTS = 1 << 18
_CONSTANTS = {
    Init.ZERO: 0.0,
    Init.ONE: 1.0,
    Init.XIELU_P: math.log(math.expm1(0.8)),
    Init.XIELU_N: math.log(math.expm1(0.3)),
}
"""Value of each kind that is the same for all elements."""


_TIME_STEPS: dict[TimeStep, Callable[[Tensor], Tensor]] = {
    "one": torch.ones_like,
    # The inverse of softplus.
    "log-uniform": lambda u: (10 ** (2 * u - 3)).expm1().log(),
}
_TRANSFORMS: dict[Init, Callable[[Tensor, ModelConfig], Tensor]] = {
    Init.CONVOLUTION: lambda u, config: (2 * u - 1) / math.sqrt(config.linear_conv_kernel_dim),
    Init.DECAY_RATE: lambda u, config: (0.01 + (16 - 0.01) * u).log(),
    Init.TIME_STEP: lambda u, config: _TIME_STEPS[config.linear_time_step](u),
}
"""Kind -> its values from uniform ones in (0, 1)."""
Initialise = Callable[[str, Init, Tensor, tuple[int, ...], tuple[int, ...], ModelShape, int], None]
"""A function with the arguments of `initialise`."""


def initialise(
    name: str,
    kind: Init,
    local: Tensor,
    global_shape: tuple[int, ...],
    offset: tuple[int, ...],
    shape: ModelShape,
    seed: int,
) -> None:
    """Fill a shard of a parameter with its initial values, in place.

    Args:
        name: Global name of the parameter. It seeds the values.
        kind: The kind of initial values, from the parameter's spec.
        local: The shard to fill.
        global_shape: Shape of the complete parameter.
        offset: Position of the shard's first element in the complete parameter.
        shape: Sizes of the model.
        seed: Seed of the run.
    """
    if kind in _CONSTANTS:
        local.fill_(_CONSTANTS[kind])
        return
    # The residual stream sums the outputs of two projections in each layer. A smaller sigma keeps
    # its variance independent of the number of layers.
    deviations = {
        Init.TABLE: shape.init_std,
        Init.VECTOR: shape.init_std,
        Init.NORMAL: shape.matrix_init_std,
        Init.SCALED_NORMAL: shape.output_init_std,
    }
    values = draw_normal_slice(seed, name, global_shape, offset, tuple(local.shape))
    if kind in _TRANSFORMS:
        # The distribution function of normal values makes them uniform.
        uniform = torch.special.ndtr(torch.from_numpy(values).double())
        local.copy_(_TRANSFORMS[kind](uniform, shape.config))
        return
    # Scaled in fp32 before the copy, which rounds to the dtype of the shard.
    local.copy_(torch.from_numpy(values).mul_(deviations[kind]))


def draw_normal_slice(
    seed: int,
    name: str,
    global_shape: tuple[int, ...],
    offset: tuple[int, ...],
    local_shape: tuple[int, ...],
) -> np.ndarray:
    """Draw a shard of a parameter's standard-normal matrix, in fp32.

    Several threads draw blocks at once. NumPy releases the interpreter's lock meanwhile.
    """
    # A vector is a matrix of one column.
    rows, columns = (*global_shape, 1)[:2]
    first_row, first_column = (*offset, 0)[:2]
    local_rows, local_columns = (*local_shape, 1)[:2]
    block_rows = max(1, _BLOCK_ELEMENTS // columns)
    out = np.empty((local_rows, local_columns), dtype=np.float32)

    def draw(block: int) -> None:
        """Draw one block of rows, and copy the shard's part of it to `out`."""
        # The complete block is drawn, also if this rank needs only some of its rows or columns. A
        # partial draw would make the values depend on the layout.
        start = block * block_rows
        stop = min(start + block_rows, rows)
        generator = np.random.Generator(
            np.random.SFC64(np.random.SeedSequence((seed, zlib.crc32(name.encode()), block)))
        )
        values = generator.standard_normal((stop - start, columns), dtype=np.float32)
        low = max(start, first_row)
        high = min(stop, first_row + local_rows)
        out[low - first_row : high - first_row] = values[
            low - start : high - start, first_column : first_column + local_columns
        ]

    if local_rows:
        blocks = range(first_row // block_rows, -(-(first_row + local_rows) // block_rows))
    else:
        blocks = range(0)
    # For a few blocks the start of the threads costs more than it saves.
    if len(blocks) > 4:
        with ThreadPoolExecutor() as pool:
            list(pool.map(draw, blocks))
    else:
        for block in blocks:
            draw(block)
    return out.reshape(local_shape)

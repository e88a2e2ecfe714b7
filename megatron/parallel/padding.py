"""Matrices that are padded with zeros, because a GPU multiplies other sizes slowly.

In 16 bits, products are fast if all sizes are multiples of 8, so that each row has a multiple of 16
bytes. One H200 computes 253 TFLOPS with a width of 2,730, and 718 with 2,736. Parameters, gradients
and checkpoints keep their sizes. Products get padded copies (docs/decisions/055).

The invariant: what is added is zero. So a sum changes only if a kernel adds it up in another order.
"""

import torch.nn.functional as F
from torch import Tensor

_MULTIPLE = 8
_FEWEST_ROWS = 256
"""With fewer rows, as in generation, copying the weight takes longer than the padding saves.

On an H200 at 4.2 TB/s, a copy of 16 bits takes as long as 185 rows save.
"""


def _is_slow(x: Tensor) -> bool:
    """Return whether odd sizes are slow in the dtype and on the device of a tensor."""
    return x.is_cuda and x.element_size() == 2


def pad_width(width: int, x: Tensor, ranks: int = 1) -> int:
    """Return the width that stands for `width` in products.

    Args:
        width: A size of a weight, or that of `x`.
        x: [.., in], one factor.
        ranks: Number of ranks that hold such a part of the factor.
    """
    if width % _MULTIPLE == 0 or not _is_slow(x):
        return width
    if x.numel() // x.shape[-1] * ranks < _FEWEST_ROWS:
        return width
    return width + _MULTIPLE - width % _MULTIPLE


def needs_padding(x: Tensor, weight: Tensor) -> bool:
    """Return whether the product of [.., in] and [out, in] has padding, or `x` has some already."""
    out, width = weight.shape
    # Each linear layer of each microbatch asks, so the usual sizes need no further call.
    if x.shape[-1] == width and out % _MULTIPLE == width % _MULTIPLE == 0:
        return False
    return x.shape[-1] != width or pad_width(out, x) != out or pad_width(width, x) != width


def pad_columns(x: Tensor) -> Tensor:
    """Return [.., in] with columns of zeros, or itself if products with it are fast."""
    width = x.shape[-1]
    if width % _MULTIPLE == 0 or pad_width(width, x) == width:
        return x
    return F.pad(x, (0, pad_width(width, x) - width))


def widen(x: Tensor, like: Tensor) -> Tensor:
    """Return [..] with columns of zeros up to the width of `like`, or itself if it is as wide."""
    missing = like.shape[-1] - x.shape[-1]
    return F.pad(x, (0, missing)) if missing > 0 else x


def pad_matrix(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """Return a matrix with rows and columns of zeros, or itself if it has this shape."""
    height, width = matrix.shape
    if (height, width) == (rows, columns):
        return matrix
    # `F.pad` would write the complete result twice.
    padded = matrix.new_empty((rows, columns))
    padded[:height, :width] = matrix
    padded[height:] = 0
    padded[:, width:] = 0
    return padded


def trim_matrix(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """Return the first rows and columns of a matrix, contiguous, or itself if it has no others."""
    if matrix.shape == (rows, columns):
        return matrix
    return matrix[:rows, :columns].contiguous()


def trim_columns(x: Tensor, width: int) -> Tensor:
    """Return the first columns of [.., out], or itself if it has no others."""
    if x.shape[-1] == width:
        return x
    return x[..., :width]


def multiply_padded(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `F.linear(x, weight, bias)`. Its padding is zero.

    Args:
        x: [.., in]. If it has more columns than the weight, the others are multiplied by zero.
        weight: [out, in].
        bias: [out], or None.

    Returns:
        [.., `pad_width(out, x)`].
    """
    if not needs_padding(x, weight):
        return F.linear(x, weight, bias)
    out = pad_width(len(weight), x)
    if bias is not None and len(bias) < out:
        bias = F.pad(bias, (0, out - len(bias)))
    x = pad_columns(x)
    return F.linear(x, pad_matrix(weight, out, x.shape[-1]), bias)

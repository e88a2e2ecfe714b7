"""The Triton kernel of `rotary.py`. Each program moves a block of heads of one token.

The rotation is in fp32, and is rounded once.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

_BLOCK_PAIRS = 1024
"""Channel pairs of a program. With heads of 128 channels, these are 16 heads."""


@triton.jit
def _read(whole, query, key, value, owner, channel, inside, join: tl.constexpr):
    """Read channels of a block of heads. The arguments are those of `_write`."""
    if join:
        x = tl.load(query + channel, mask=inside & (owner == 0), other=0.0)
        x = tl.where(owner == 1, tl.load(key + channel, mask=inside & (owner == 1), other=0.0), x)
        x = tl.where(owner == 2, tl.load(value + channel, mask=inside & (owner == 2), other=0.0), x)
    else:
        x = tl.load(whole + channel, mask=inside, other=0.0)
    return x.to(tl.float32)


@triton.jit
def _write(x, whole, query, key, value, owner, channel, inside, join: tl.constexpr):
    """Write channels of a block of heads.

    `owner` is 0 for a query, 1 for a key and 2 for a value. A masked access moves no memory.
    """
    x = x.to(whole.dtype.element_ty)
    if join:
        tl.store(whole + channel, x, mask=inside)
    else:
        tl.store(query + channel, x, mask=inside & (owner == 0))
        tl.store(key + channel, x, mask=inside & (owner == 1))
        tl.store(value + channel, x, mask=inside & (owner == 2))


@triton.jit
def _move(
    whole,
    query,
    key,
    value,
    cos,
    sin,
    batch,
    groups,
    slots,
    queries,
    width,
    half,
    whole_s,
    whole_b,
    whole_g,
    whole_n,
    query_s,
    query_b,
    query_g,
    query_n,
    key_s,
    key_b,
    key_g,
    value_s,
    value_b,
    value_g,
    table_s,
    table_b,
    join: tl.constexpr,
    block_heads: tl.constexpr,
    block_half: tl.constexpr,
    block_rest: tl.constexpr,
):
    """Rotate the heads of `whole` and write them into the parts, or with `join` the reverse.

    A group of `whole` has `slots` heads. They are queries, or queries, a key and a value. Names
    such as whole_s are strides.
    """
    row = tl.program_id(0).to(tl.int64)
    s = row // batch
    b = row % batch
    head = tl.program_id(1) * block_heads + tl.arange(0, block_heads)[:, None]
    present = head < groups * slots
    group = (head // slots).to(tl.int64)
    slot = (head % slots).to(tl.int64)
    owner = tl.where(slot < queries, 0, slot - queries + 1)
    whole += s * whole_s + b * whole_b + group * whole_g + slot * whole_n
    query += s * query_s + b * query_b + group * query_g + slot * query_n
    key += s * key_s + b * key_b + group * key_g
    value += s * value_s + b * value_b + group * value_g
    pair = tl.arange(0, block_half)[None, :]
    inside = present & (pair < half)
    table = s * table_s + b * table_b + pair
    turned = owner < 2
    c = tl.where(turned, tl.load(cos + table, mask=pair < half, other=1.0), 1.0)
    d = tl.where(turned, tl.load(sin + table, mask=pair < half, other=0.0), 0.0)
    if join:
        # The gradient turns by the opposite angle.
        d = -d
    first = _read(whole, query, key, value, owner, pair, inside, join)
    second = _read(whole, query, key, value, owner, pair + half, inside, join)
    _write(first * c - second * d, whole, query, key, value, owner, pair, inside, join)
    _write(second * c + first * d, whole, query, key, value, owner, pair + half, inside, join)
    if block_rest > 0:
        # Channels after the rotary ones pass unchanged (--rotary-percent below 1).
        channel = 2 * half + tl.arange(0, block_rest)[None, :]
        inside = present & (channel < width)
        rest = _read(whole, query, key, value, owner, channel, inside, join)
        _write(rest, whole, query, key, value, owner, channel, inside, join)


def launch(whole: Tensor, parts: Sequence[Tensor], cos: Tensor, sin: Tensor, *, join: bool) -> None:
    """Rotate heads and write them into parts, or with `join` the reverse.

    The last dimension of all tensors has stride 1.

    Args:
        whole: [s, b, g, m, d].
        parts: One [s, b, g, m, d], or queries [s, b, g, m - 2, d], and keys and values
            [s, b, g, 1, d]. Values are not rotated.
        cos: [s, 1 or b, 1, 1, rotary channels / 2] in fp32. The last dimension has stride 1.
        sin: Same as `cos`.
        join: Write `whole`, and rotate by the opposite angle. Otherwise the parts are written.
    """
    query = parts[0]
    # With one part, no head belongs to a key or a value.
    key, value = parts[1:] or (query, query)
    s, b, g, slots, _ = whole.shape
    sizes, blocks = measure(whole, cos)
    strides = list_strides(
        whole=whole,
        query=query,
        key=key[:, :, :, 0],
        value=value[:, :, :, 0],
        table=spread(cos, b),
    )
    _move[(s * b, triton.cdiv(g * slots, blocks["block_heads"]))](
        whole,
        query,
        key,
        value,
        cos,
        sin,
        **(sizes | {"queries": query.shape[3]}),
        **strides,
        join=join,
        **blocks,
    )


def measure(whole: Tensor, cos: Tensor) -> tuple[dict[str, int], dict[str, int]]:
    """Return the sizes of a projection, and those of a program's blocks."""
    _, b, g, slots, width = whole.shape
    half = cos.shape[-1]
    block_half = triton.next_power_of_2(half)
    sizes = {
        "batch": b,
        "groups": g,
        "slots": slots,
        "queries": slots - 2,
        "width": width,
        "half": half,
    }
    blocks = {
        "block_heads": min(triton.next_power_of_2(g * slots), max(1, _BLOCK_PAIRS // block_half)),
        "block_half": block_half,
        "block_rest": triton.next_power_of_2(width - 2 * half) if width > 2 * half else 0,
    }
    return sizes, blocks


def spread(table: Tensor, batch: int) -> Tensor:
    """Return a table of positions [s, b]. With one sample in it, all samples read the same rows."""
    return table.expand(-1, batch, -1, -1, -1)[:, :, 0, 0]


def list_strides(**tensors: Tensor) -> dict[str, int]:
    """Return the strides of tensors without their last dimension, such as whole_s."""
    return {
        f"{name}_{axis}": stride
        for name, tensor in tensors.items()
        for axis, stride in zip("sbgn", tensor.stride()[:-1], strict=False)
    }

"""The Triton kernels of `rotary.py`. Each program moves a block of heads of one token.

All arithmetic is in fp32. The rotation is rounded once. With norms, the kernels round to 16 bits at
the same places as PyTorch's operators: the norm before the rotation, and the gradient of the
rotation before that of the norm.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from megatron.extras.step.kernels.residual_norm_kernel import add_parts

_BLOCK_PAIRS = 1024
"""Channel pairs of a program. With heads of 128 channels, these are 16 heads."""
_PROGRAMS = 1024
"""Programs of the backward kernel of the norms, each of which has a part of their gradients."""


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


@triton.jit
def _locate(row, head, batch, slots, queries, query_s, query_b, query_g, key_s, key_b, key_g):
    """Return which heads are queries and keys, and where they are in their tensors."""
    group = (head // slots).to(tl.int64)
    slot = (head % slots).to(tl.int64)
    s = row // batch
    b = row % batch
    # Offsets of large tensors exceed 32 bits, so all of them have 64.
    query = s * query_s + b * query_b + group * query_g
    key = s * key_s + b * key_b + group * key_g
    return group, slot, slot < queries, slot == queries, query, key


@triton.jit
def _weigh(query_weight, key_weight, channel, is_query, inside):
    """Return the weights of channels, those of the query norm or of the key norm."""
    of_query = tl.load(query_weight + channel, mask=inside & is_query, other=0.0)
    of_key = tl.load(key_weight + channel, mask=inside & (is_query == 0), other=0.0)
    return tl.where(is_query, of_query, of_key).to(tl.float32)


@triton.jit
def _normalise(
    whole,
    query,
    key,
    query_weight,
    key_weight,
    cos,
    sin,
    statistics,
    batch,
    groups,
    slots,
    queries,
    width,
    half,
    eps,
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
    table_s,
    table_b,
    block_heads: tl.constexpr,
    block_half: tl.constexpr,
    block_rest: tl.constexpr,
):
    """Write the normalised and rotated queries and keys of a token, and 1 / standard deviation.

    A group of `whole` has `slots` heads and a value after them. Names such as whole_s are strides.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * block_heads + tl.arange(0, block_heads)[:, None]
    present = head < groups * slots
    group, slot, is_query, is_key, to_query, to_key = _locate(
        row, head, batch, slots, queries, query_s, query_b, query_g, key_s, key_b, key_g
    )
    s = row // batch
    b = row % batch
    whole += s * whole_s + b * whole_b + group * whole_g + slot * whole_n
    query += to_query + slot * query_n
    key += to_key
    pair = tl.arange(0, block_half)[None, :]
    inside = present & (pair < half)
    first = tl.load(whole + pair, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(whole + pair + half, mask=inside, other=0.0).to(tl.float32)
    squares = tl.sum(first * first + second * second, 1)
    if block_rest > 0:
        channel = 2 * half + tl.arange(0, block_rest)[None, :]
        more = present & (channel < width)
        rest = tl.load(whole + channel, mask=more, other=0.0).to(tl.float32)
        squares += tl.sum(rest * rest, 1)
    # The mean is over all channels of a head. Masked ones were read as 0.
    rstd = tl.rsqrt(squares / width + eps)[:, None]
    tl.store(statistics + row * groups * slots + head, rstd, mask=present)
    dtype = whole.dtype.element_ty
    first *= rstd * _weigh(query_weight, key_weight, pair, is_query, inside)
    second *= rstd * _weigh(query_weight, key_weight, pair + half, is_query, inside)
    # PyTorch's norm stores its result, so it is rounded before the rotation here too.
    first = first.to(dtype).to(tl.float32)
    second = second.to(dtype).to(tl.float32)
    # All heads of a token turn by the same angles.
    table = s * table_s + b * table_b + pair
    # A channel that is not there would turn by the angle 0.
    c = tl.load(cos + table, mask=pair < half, other=1.0)
    d = tl.load(sin + table, mask=pair < half, other=0.0)
    turned = (first * c - second * d).to(dtype)
    tl.store(query + pair, turned, mask=inside & is_query)
    tl.store(key + pair, turned, mask=inside & is_key)
    turned = (second * c + first * d).to(dtype)
    tl.store(query + pair + half, turned, mask=inside & is_query)
    tl.store(key + pair + half, turned, mask=inside & is_key)
    if block_rest > 0:
        # Channels after the rotary ones are only normalised (--rotary-percent below 1).
        rest *= rstd * _weigh(query_weight, key_weight, channel, is_query, more)
        tl.store(query + channel, rest.to(dtype), mask=more & is_query)
        tl.store(key + channel, rest.to(dtype), mask=more & is_key)


@triton.jit
def _read_gradient(query, key, value, channel, inside, is_query, is_key):
    """Return the gradients of channels of queries, keys and values in fp32."""
    x = tl.load(query + channel, mask=inside & is_query, other=0.0)
    x = tl.where(is_key, tl.load(key + channel, mask=inside & is_key, other=0.0), x)
    is_value = (is_query == 0) & (is_key == 0)
    x = tl.where(is_value, tl.load(value + channel, mask=inside & is_value, other=0.0), x)
    return x.to(tl.float32)


@triton.jit
def _differentiate(
    whole,
    query,
    key,
    value,
    query_weight,
    key_weight,
    cos,
    sin,
    statistics,
    grad,
    parts,
    rows,
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
    block_heads: tl.constexpr,
    block_half: tl.constexpr,
    block_rest: tl.constexpr,
):
    """Write the gradient of the projection for some tokens, and their part of the weights'.

    A group has `slots` heads here, the value included. `query`, `key` and `value` are gradients.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    dtype = whole.dtype.element_ty
    pair = tl.arange(0, block_half)[None, :]
    of_first = tl.zeros((2, block_half), dtype=tl.float32)
    of_second = tl.zeros((2, block_half), dtype=tl.float32)
    # Row 0 is the weight of the query norm, and row 1 that of the key norm.
    norm = tl.arange(0, 2)[:, None]
    if block_rest > 0:
        channel = 2 * half + tl.arange(0, block_rest)[None, :]
        of_rest = tl.zeros((2, block_rest), dtype=tl.float32)
    # Neighbouring programs read neighbouring tokens at the same time.
    for turn in range(tl.cdiv(rows - program, programs)):
        row = program.to(tl.int64) + turn * programs
        s = row // batch
        b = row % batch
        table = s * table_s + b * table_b + pair
        cosine = tl.load(cos + table, mask=pair < half, other=1.0)
        sine = tl.load(sin + table, mask=pair < half, other=0.0)
        for start in range(0, groups * slots, block_heads):
            head = start + tl.arange(0, block_heads)[:, None]
            present = head < groups * slots
            group, slot, is_query, is_key, to_query, to_key = _locate(
                row, head, batch, slots, queries, query_s, query_b, query_g, key_s, key_b, key_g
            )
            normal = present & (is_query | is_key)
            of_query = query + to_query + slot * query_n
            of_key = key + to_key
            of_value = value + s * value_s + b * value_b + group * value_g
            source = whole + s * whole_s + b * whole_b + group * whole_g + slot * whole_n
            # The gradient is contiguous, so a head has one place for all channels.
            target = grad + (row * groups * slots + head) * width
            # A key follows the queries of its group, and no statistics are kept of values.
            place = row * groups * (slots - 1) + group * (slots - 1) + slot
            rstd = tl.load(statistics + place, mask=normal, other=0.0)
            inside = present & (pair < half)
            x = _read_gradient(of_query, of_key, of_value, pair, inside, is_query, is_key)
            y = _read_gradient(of_query, of_key, of_value, pair + half, inside, is_query, is_key)
            # The gradient turns by the opposite angle. That of a value passes unchanged.
            c = tl.where(normal, cosine, 1.0)
            d = tl.where(normal, sine, 0.0)
            first = (x * c + y * d).to(dtype).to(tl.float32)
            second = (y * c - x * d).to(dtype).to(tl.float32)
            # Nothing of a value is normalised, so it is not read again.
            kept = inside & normal
            x = tl.load(source + pair, mask=kept, other=0.0).to(tl.float32) * rstd
            y = tl.load(source + pair + half, mask=kept, other=0.0).to(tl.float32) * rstd
            # Heads of both kinds are in one block, and each adds to the weight of its norm.
            for number in tl.static_range(2):
                own = is_query if number == 0 else is_key
                chosen = norm == number
                change = tl.sum(tl.where(own, first * x, 0.0), 0)[None, :]
                of_first += tl.where(chosen, change, 0.0)
                change = tl.sum(tl.where(own, second * y, 0.0), 0)[None, :]
                of_second += tl.where(chosen, change, 0.0)
            first_slope = first * _weigh(query_weight, key_weight, pair, is_query, kept)
            second_slope = second * _weigh(query_weight, key_weight, pair + half, is_query, kept)
            along = tl.sum(first_slope * x + second_slope * y, 1)
            if block_rest > 0:
                more = present & (channel < width)
                rest = _read_gradient(of_query, of_key, of_value, channel, more, is_query, is_key)
                z = tl.load(source + channel, mask=more & normal, other=0.0).to(tl.float32) * rstd
                for number in tl.static_range(2):
                    own = is_query if number == 0 else is_key
                    change = tl.sum(tl.where(own, rest * z, 0.0), 0)[None, :]
                    of_rest += tl.where(norm == number, change, 0.0)
                slope = rest * _weigh(query_weight, key_weight, channel, is_query, more & normal)
                along += tl.sum(slope * z, 1)
            # The derivative of the statistics removes the component along the normalised input.
            mean = (along / width)[:, None]
            first = tl.where(normal, (first_slope - x * mean) * rstd, first)
            second = tl.where(normal, (second_slope - y * mean) * rstd, second)
            tl.store(target + pair, first.to(dtype), mask=inside)
            tl.store(target + pair + half, second.to(dtype), mask=inside)
            if block_rest > 0:
                rest = tl.where(normal, (slope - z * mean) * rstd, rest)
                tl.store(target + channel, rest.to(dtype), mask=more)
    # The parts of all programs are added up afterwards, always in the same order.
    parts += program.to(tl.int64) * 2 * width + norm * width
    tl.store(parts + pair, of_first, mask=pair < half)
    tl.store(parts + pair + half, of_second, mask=pair < half)
    if block_rest > 0:
        tl.store(parts + channel, of_rest, mask=channel < width)


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
    sizes, blocks = _measure(whole, cos)
    strides = _list_strides(whole, query, cos, key=key, value=value)
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


def count_programs(rows: int) -> int:
    """Return the programs of the backward kernel. See `residual_norm_kernel.count_programs`."""
    return min(rows, _PROGRAMS)


def launch_forward(
    whole: Tensor,
    query: Tensor,
    key: Tensor,
    weights: tuple[Tensor, Tensor],
    cos: Tensor,
    sin: Tensor,
    statistics: Tensor,
    eps: float,
) -> None:
    """Write normalised and rotated queries and keys. The last dimensions have stride 1.

    Args:
        whole: [s, b, g, n + 2, d]. Each group has n queries, a key and a value.
        query: [s, b, g, n, d].
        key: [s, b, g, 1, d].
        weights: [d] of the query norm, and of the key norm.
        cos: [s, 1 or b, 1, 1, rotary channels / 2] in fp32.
        sin: Same as `cos`.
        statistics: [s, b, g, n + 1] in fp32, 1 / standard deviation of each head.
        eps: Added to the mean of the squares.
    """
    s, b, g, slots, _ = whole.shape
    sizes, blocks = _measure(whole, cos)
    # The forward kernel has no program for values, which stay where they are.
    heads = g * (slots - 1)
    _normalise[(s * b, triton.cdiv(heads, blocks["block_heads"]))](
        whole,
        query,
        key,
        *weights,
        cos,
        sin,
        statistics,
        **(sizes | {"slots": slots - 1}),
        eps=eps,
        **_list_strides(whole, query, cos, key=key),
        **blocks,
    )


def launch_backward(
    whole: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
    weights: tuple[Tensor, Tensor],
    cos: Tensor,
    sin: Tensor,
    statistics: Tensor,
    grad: Tensor,
    parts: Tensor,
    grad_weights: Tensor,
) -> None:
    """Write the gradients of the projection and of both weights.

    Args:
        whole: See `launch_forward`.
        grads: The gradients of queries, keys and values.
        weights: See `launch_forward`.
        cos: See `launch_forward`.
        sin: See `launch_forward`.
        statistics: What the forward kernel wrote.
        grad: [s, b, g, n + 2, d], contiguous, the gradient of the projection.
        parts: [programs, 2, d] in fp32, overwritten.
        grad_weights: [2, d], the gradients of the weights.
    """
    s, b, *_ = whole.shape
    query, key, value = grads
    sizes, blocks = _measure(whole, cos)
    strides = _list_strides(whole, query, cos, key=key, value=value)
    _differentiate[(len(parts),)](
        whole,
        query,
        key,
        value,
        *weights,
        cos,
        sin,
        statistics,
        grad,
        parts,
        rows=s * b,
        **sizes,
        **strides,
        **blocks,
    )
    # The parts of both weights lie beside each other, so one kernel adds them up.
    add_parts(parts, grad_weights)


def _measure(whole: Tensor, cos: Tensor) -> tuple[dict[str, int], dict[str, int]]:
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


def _list_strides(whole: Tensor, query: Tensor, cos: Tensor, **single: Tensor) -> dict[str, int]:
    """Return the strides of tensors without their last dimension, such as whole_s.

    A group has one head of each of the `single` ones. `cos` stands for both tables of positions.
    With one sample in it, all samples read the same rows.
    """
    tensors = {name: tensor[:, :, :, 0] for name, tensor in single.items()}
    tensors |= {"whole": whole, "query": query}
    tensors["table"] = cos.expand(-1, whole.shape[1], -1, -1, -1)[:, :, 0, 0]
    return {
        f"{name}_{axis}": stride
        for name, tensor in tensors.items()
        for axis, stride in zip("sbgn", tensor.stride()[:-1], strict=False)
    }

"""Tests of `split_run`, whose slices cover a run of elements once and in order."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.extras.step.deepspeed.partitions import Fragment, split_run
from megatron.parallel.parameter_spec import Init, ParameterSpec


@given(st.data())
def test_slices_cover_the_run(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    tensor = torch.arange(size).view(shape)
    at = start
    slices = list(split_run(start, stop, shape))
    for offset, shape_of_slice, first in slices:
        assert first == at
        part = tensor[tuple(slice(o, o + n) for o, n in zip(offset, shape_of_slice, strict=True))]
        assert part.flatten().tolist() == list(range(first, first + part.numel()))
        at += part.numel()
    assert at == stop
    assert len(slices) <= 2 * len(shape) - 1


def test_shards_are_live_views_without_padding() -> None:
    flat = torch.arange(20.0)
    # 5 rows are real. This rank has rows 3 to 6, and the last two of them are padding.
    spec = ParameterSpec((5, 4), Init.NORMAL, decays=True, shard_dim=0)
    fragment = Fragment("w", spec, offset=(3, 0), shape=(4, 4), start=2, size=14, flat=0, at=3)
    shards = list(fragment.shards({"weight": flat, "exp_avg": flat + 100}, owner=True))
    weights = [shard for shard in shards if shard.kind == "weight"]
    assert [(shard.offset, tuple(shard.tensor.shape)) for shard in weights] == [
        ((3, 2), (1, 2)),
        ((4, 0), (1, 4)),
    ]
    weights[1].tensor.fill_(-1)
    assert flat.tolist() == [*range(5), -1, -1, -1, -1, *range(9, 20)]
    assert len(shards) == 4

"""Tests of 8-bit moments: reading and writing back changes no bit, codes are the nearest."""

from importlib.util import find_spec

import pytest
import torch

from megatron.config.optimizer import OptimizerConfig
from megatron.extras.step.deepspeed.partitions import (
    EightBitMoments,
    TorchMoments,
    build_adamw,
    encode,
)

# `importorskip` would import the package, which takes long, while tests are collected.
pytestmark = pytest.mark.skipif(
    find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)

SIZE = 10_000  # not a multiple of the block size


def build_optimizer(
    seed: int, config: OptimizerConfig
) -> tuple[torch.optim.Optimizer, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    flat = torch.nn.Parameter(torch.randn(SIZE, generator=generator))
    optimizer = build_adamw([{"params": [flat], "weight_decay": 0.1}], config)
    return optimizer, flat


def step(optimizer: torch.optim.Optimizer, flat: torch.Tensor, number: int) -> None:
    flat.grad = torch.randn(SIZE, generator=torch.Generator().manual_seed(number)) * 10.0 ** -(
        number % 5
    )
    flat.grad[:300] = 0.0
    for group in optimizer.param_groups:
        group["lr"] = 1e-2
    optimizer.step()


@pytest.mark.parametrize("bnb", [True, False])
def test_a_resumed_optimizer_is_bit_identical(bnb: bool) -> None:
    config = OptimizerConfig(use_bnb_optimizer=bnb)

    def make_moments(
        optimizer: torch.optim.Optimizer, flat: torch.Tensor
    ) -> EightBitMoments | TorchMoments:
        if bnb:
            return EightBitMoments(optimizer, [flat], group_of=[0], exact=set())
        return TorchMoments(optimizer, [flat])

    optimizer, flat = build_optimizer(0, config)
    before = make_moments(optimizer, flat)
    for number in range(1, 6):
        step(optimizer, flat, number)
    resumed, copy = build_optimizer(1, config)
    after = make_moments(resumed, copy)
    copy.data.copy_(flat.data)
    for kind in ("exp_avg", "exp_avg_sq"):
        after.open(0, kind).copy_(before.open(0, kind))
    after.take_over(5)
    for number in range(6, 12):
        step(optimizer, flat, number)
        step(resumed, copy, number)
    assert torch.equal(flat, copy)


def test_dropped_moments_are_read_again() -> None:
    optimizer, flat = build_optimizer(0, OptimizerConfig(use_bnb_optimizer=True))
    moments = EightBitMoments(optimizer, [flat], group_of=[0], exact=set())
    assert not moments.open(0, "exp_avg").any()
    step(optimizer, flat, 1)
    assert not moments.open(0, "exp_avg").any()
    moments.drop()
    assert moments.open(0, "exp_avg").any()


def test_exact_groups_stay_in_32_bits() -> None:
    optimizer, flat = build_optimizer(0, OptimizerConfig(use_bnb_optimizer=True))
    EightBitMoments(optimizer, [flat], group_of=[0], exact={0})
    assert optimizer.state[flat]["state1"].dtype == torch.float32


def test_codes_are_the_nearest_ones() -> None:
    from bitsandbytes.functional import dequantize_blockwise

    optimizer, flat = build_optimizer(0, OptimizerConfig(use_bnb_optimizer=True))
    EightBitMoments(optimizer, [flat], group_of=[0], exact=set())
    table = optimizer.state[flat]["qmap1"]
    values = torch.randn(SIZE, generator=torch.Generator().manual_seed(3))
    codes, scales = encode(values, table)
    assert len(scales) == -(-SIZE // 256)
    read = dequantize_blockwise(codes, absmax=scales, code=table, blocksize=256)
    distance = (read - values).abs()
    blockwise = values.abs().split(256)
    for part, block in zip(distance.split(256), blockwise, strict=True):
        assert part.max() <= block.max() * 0.0106  # half of the widest gap between codes
    again, same = encode(read, table)
    assert torch.equal(again, codes)
    assert torch.equal(same, scales)

"""The kernels of `megatron.extras.kernels` equal PyTorch's operators, in Triton's interpreter."""

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from model.kernel_comparisons import ACTIVATIONS, compare_gate, compare_rotary
from training.runs import SIZES
from triton_interpreter import train

from megatron.observe.metrics import read_metrics

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# One program computes 32 heads of 64 channels, and there are 36 here.
HEADS = {
    "partial, shared groups": ((5, 2, 3, 2, 10), 6, False),
    "odd pairs, positions of samples": ((7, 2, 2, 4, 20), 10, True),
    "several programs a token": ((2, 1, 12, 1, 64), 64, False),
    "one head": ((3, 1, 1, 1, 2), 2, False),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", HEADS)
def test_rotary_positions(
    shape: str, dtype: torch.dtype, interpreters: ProcessPoolExecutor
) -> None:
    sizes, channels, by_sample = HEADS[shape]
    units = interpreters.submit(
        compare_rotary, sizes, channels, dtype, "cpu", by_sample=by_sample
    ).result()
    assert max(units.values()) <= 1, units


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_activations(
    activation: str, dtype: torch.dtype, interpreters: ProcessPoolExecutor
) -> None:
    units = interpreters.submit(compare_gate, activation, (3, 2, 777), dtype, "cpu").result()
    assert max(units.values()) <= 1, units

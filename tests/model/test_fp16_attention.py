"""Attention in fp16 needs no query-key layer scaling: scores are never held in fp16, on any path of PyTorch's SDPA.

Queries and keys share a large channel, so that their products leave fp16's range (65504) by far, before and after the division by
sqrt(d), and even after a further division by a usual layer number; the other channels make the softmax one that can be told from
a uniform or a one-hot one. All are integers and d is a power of four, so that fp32 holds the scores exactly.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from builders import build, tiny_config
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.model.attention import SelfAttention
from megatron.model.positions import Positions, make_alibi_bias
from megatron.parallel.rng import DropoutKey

FP16_MAX = 65504.0
HEADS, WIDTH, LENGTH, BATCH = 4, 16, 24, 3
PATHS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "flash": lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION),
    "math": lambda: sdpa_kernel(SDPBackend.MATH),
    "chosen": nullcontext,
}


def attention(magnitude: float, dropout: float = 0.0) -> SelfAttention:
    """Query and key are the input, their first channel times `magnitude`; the value is the input; the output the context."""
    config = tiny_config(
        hidden_size=HEADS * WIDTH,
        num_attention_heads=HEADS,
        attention_dropout=dropout,
        add_bias_linear=False,
    )
    module = build(config).blocks["0"].attention
    first = torch.diag(torch.tensor([magnitude] + [1.0] * (WIDTH - 1)))
    head = torch.cat((first, first, torch.eye(WIDTH)))
    module.qkv.weight.data.copy_(torch.block_diag(*[head] * HEADS))
    module.out.weight.data.copy_(torch.eye(HEADS * WIDTH))
    return module


def inputs() -> Tensor:
    """[s, b, h]: 1 in the first channel of each head, -1, 0 or 1 elsewhere."""
    x = torch.randint(
        -1, 2, (LENGTH, BATCH, HEADS, WIDTH), generator=torch.Generator().manual_seed(0)
    ).float()
    x[..., 0] = 1
    return x.flatten(2)


def scores(x: Tensor, magnitude: float) -> Tensor:
    """query x key [b, n, s, s], exact."""
    query = x.double().unflatten(2, (HEADS, WIDTH)).permute(1, 2, 0, 3).clone()
    query[..., 0] *= magnitude
    return query @ query.transpose(2, 3)


def reference(x: Tensor, magnitude: float, bias: Tensor | None = None) -> Tensor:
    """The context [s, b, h] in fp64."""
    if bias is None:
        bias = torch.full((LENGTH, LENGTH), -math.inf).triu(1)
    weights = (scores(x, magnitude) / math.sqrt(WIDTH) + bias.double()).softmax(dim=-1)
    value = x.double().unflatten(2, (HEADS, WIDTH)).permute(1, 2, 0, 3)
    return (weights @ value).permute(2, 0, 1, 3).flatten(2)


def run(
    module: SelfAttention, x: Tensor, positions: Positions, path: AbstractContextManager
) -> tuple[Tensor, Tensor]:
    """The output, and the gradient of its squares, in the dtype of `x`."""
    module, x = module.to(x.dtype), x.clone().requires_grad_()
    with path:
        out = module(x, positions, DropoutKey(1, 0))
        out.float().square().mean().backward()
    assert x.grad is not None
    return out.detach(), x.grad


MAGNITUDES = [512.0, 2048.0]
"""Scores of 2^18 and 2^22; divided by sqrt(d) of 2^16 and 2^20."""


@pytest.mark.parametrize("magnitude", MAGNITUDES)
def test_the_scores_leave_fp16(magnitude: float) -> None:
    x = inputs()
    assert scores(x, magnitude).min() / math.sqrt(WIDTH) > FP16_MAX
    assert scores(x, 2048.0).min() / math.sqrt(WIDTH) / 10 > FP16_MAX, (
        "what layer 10's scaling would have left"
    )
    query = x.half().unflatten(2, (HEADS, WIDTH)).permute(1, 2, 0, 3).clone()
    query[..., 0] *= magnitude
    assert torch.isinf(query @ query.transpose(2, 3)).all(), "held in fp16 they are lost"
    weights = reference(x, magnitude)
    assert 0.1 < weights.std() < 0.9


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("magnitude", MAGNITUDES)
def test_causal(magnitude: float, path: str) -> None:
    out, gradient = run(attention(magnitude), inputs().half(), Positions(), PATHS[path]())
    torch.testing.assert_close(out.double(), reference(inputs(), magnitude), rtol=2e-3, atol=1e-3)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("magnitude", MAGNITUDES)
def test_alibi(magnitude: float, path: str) -> None:
    """The bias is added in fp32, whose grain at the scores' size is what may be lost of it."""
    bias = make_alibi_bias(range(HEADS), HEADS, LENGTH, torch.device("cpu"), torch.float16)
    out, gradient = run(attention(magnitude), inputs().half(), Positions(bias=bias), PATHS[path]())
    grain = torch.finfo(torch.float32).eps * magnitude**2 / math.sqrt(WIDTH)
    torch.testing.assert_close(
        out.double(), reference(inputs(), magnitude, bias), rtol=2e-3, atol=1e-3 + grain
    )
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("magnitude", MAGNITUDES)
def test_with_dropout(magnitude: float) -> None:
    """On CPU it is the path without a fused kernel; the mask is the same in fp32, which the scores fit exactly."""
    expected, _ = run(attention(magnitude, dropout=0.2), inputs(), Positions(), nullcontext())
    out, gradient = run(
        attention(magnitude, dropout=0.2), inputs().half(), Positions(), nullcontext()
    )
    assert not torch.allclose(expected.double(), reference(inputs(), magnitude), atol=0.1), (
        "nothing was dropped"
    )
    torch.testing.assert_close(out.float(), expected, rtol=2e-3, atol=2e-3)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("path", PATHS)
def test_at_the_end_of_the_range(path: str) -> None:
    """Queries and keys at fp16's largest number: scores of 4e9, where fp32's grain is 256; what is left is finite."""
    out, _ = run(attention(FP16_MAX), inputs().half(), Positions(), PATHS[path]())
    assert torch.isfinite(out).all()
    assert out.abs().max() <= 1.01


def test_the_switch_that_would_lose_them_is_off() -> None:
    """It makes SDPA's path without a fused kernel hold scores in fp16; nothing here may turn it on."""
    assert not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        out, _ = run(attention(2048.0), inputs().half(), Positions(), PATHS["math"]())
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(False)
    assert not torch.isfinite(out).all(), "scores held in fp16 would go unnoticed"

"""Tests that attention in fp16 needs no query-key layer scaling.

No path of PyTorch's SDPA holds scores in fp16. Queries and keys share a large channel. Their
products therefore exceed fp16's range (65504), before and after the division by sqrt(d), and even
after a further division by a usual layer number. The other channels make the softmax neither
uniform nor one-hot. All numbers are integers and d is a power of four, so fp32 holds the scores
exactly.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from model.builders import build, tiny_config
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.model.attention import SelfAttention
from megatron.model.inputs import START
from megatron.model.positions import Positions, make_alibi_bias

FP16_MAX = 65504.0
HEADS = 4
WIDTH = 16
LENGTH = 24
BATCH = 3
PATHS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "flash": lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION),
    "math": lambda: sdpa_kernel(SDPBackend.MATH),
    "chosen": nullcontext,
}


def attention(magnitude: float, dropout: float = 0.0) -> SelfAttention:
    """Build an attention whose query, key and value are the input, and whose output is the context.

    The first channel of query and key is multiplied by `magnitude`.
    """
    config = tiny_config(
        hidden_size=HEADS * WIDTH,
        num_attention_heads=HEADS,
        attention_dropout=dropout,
        add_bias_linear=False,
    )
    module = build(config).get_blocks()[0].attention
    assert isinstance(module, SelfAttention)
    first = torch.diag(torch.tensor([magnitude] + [1.0] * (WIDTH - 1)))
    head = torch.cat((first, first, torch.eye(WIDTH)))
    module.qkv.weight.data.copy_(torch.block_diag(*[head] * HEADS))
    module.out.weight.data.copy_(torch.eye(HEADS * WIDTH))
    return module


def inputs() -> Tensor:
    """Return [s, b, h] with 1 in the first channel of each head, and -1, 0 or 1 elsewhere."""
    x = torch.randint(
        -1, 2, (LENGTH, BATCH, HEADS, WIDTH), generator=torch.Generator().manual_seed(0)
    ).float()
    x[..., 0] = 1
    return x.flatten(2)


def scores(x: Tensor, magnitude: float) -> Tensor:
    """Return query x key [b, n, s, s] in fp64."""
    query = x.double().unflatten(2, (HEADS, WIDTH)).permute(1, 2, 0, 3).clone()
    query[..., 0] *= magnitude
    return query @ query.transpose(2, 3)


def reference(x: Tensor, magnitude: float, bias: Tensor | None = None) -> Tensor:
    """Return the context [s, b, h] in fp64."""
    if bias is None:
        bias = torch.full((LENGTH, LENGTH), -math.inf).triu(1)
    weights = (scores(x, magnitude) / math.sqrt(WIDTH) + bias.double()).softmax(dim=-1)
    value = x.double().unflatten(2, (HEADS, WIDTH)).permute(1, 2, 0, 3)
    return (weights @ value).permute(2, 0, 1, 3).flatten(2)


def run(
    module: SelfAttention, x: Tensor, positions: Positions, path: AbstractContextManager
) -> tuple[Tensor, Tensor]:
    """Return the output, and the gradient of its squares, in the dtype of `x`."""
    module = module.to(x.dtype)
    x = x.clone().requires_grad_()
    with path:
        out = module(x, positions, START)
        out.float().square().mean().backward()
    assert x.grad is not None
    return out.detach(), x.grad


MAGNITUDES = [512.0, 2048.0]
"""They give scores of 2^18 and 2^22, and of 2^16 and 2^20 after the division by sqrt(d)."""


@pytest.mark.parametrize("magnitude", MAGNITUDES)
def test_the_scores_exceed_fp16(magnitude: float) -> None:
    x = inputs()
    assert scores(x, magnitude).min() / math.sqrt(WIDTH) > FP16_MAX
    assert scores(x, 2048.0).min() / math.sqrt(WIDTH) / 10 > FP16_MAX, (
        "the scaling of layer 10 would not be enough"
    )
    query = x.half().unflatten(2, (HEADS, WIDTH)).permute(1, 2, 0, 3).clone()
    query[..., 0] *= magnitude
    assert torch.isinf(query @ query.transpose(2, 3)).all(), "fp16 cannot hold the scores"
    weights = reference(x, magnitude)
    assert 0.1 < weights.std() < 0.9


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("magnitude", MAGNITUDES)
def test_causal_attention_equals_fp64(magnitude: float, path: str) -> None:
    out, gradient = run(attention(magnitude), inputs().half(), Positions(), PATHS[path]())
    torch.testing.assert_close(out.double(), reference(inputs(), magnitude), rtol=2e-3, atol=1e-3)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("magnitude", MAGNITUDES)
def test_attention_with_alibi_equals_fp64(magnitude: float, path: str) -> None:
    """The bias is added in fp32. Its error is at most the spacing of fp32 at the scores' size."""
    bias = make_alibi_bias(range(HEADS), HEADS, LENGTH, torch.device("cpu"), torch.float16)
    out, gradient = run(attention(magnitude), inputs().half(), Positions(bias=bias), PATHS[path]())
    spacing = torch.finfo(torch.float32).eps * magnitude**2 / math.sqrt(WIDTH)
    torch.testing.assert_close(
        out.double(), reference(inputs(), magnitude, bias), rtol=2e-3, atol=1e-3 + spacing
    )
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("magnitude", MAGNITUDES)
def test_attention_with_dropout_equals_fp32(magnitude: float) -> None:
    """Attention dropout has no fused kernel on CPU. The mask in fp16 is the same as in fp32."""
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
def test_the_largest_queries_and_keys_give_finite_outputs(path: str) -> None:
    """With fp16's largest number the scores are 4e9, where the spacing of fp32 is 256."""
    out, _ = run(attention(FP16_MAX), inputs().half(), Positions(), PATHS[path]())
    assert torch.isfinite(out).all()
    assert out.abs().max() <= 1.01


def test_scores_in_fp16_are_disabled() -> None:
    """torch has a switch that makes SDPA hold scores in fp16. The package must not set it."""
    assert not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        out, _ = run(attention(2048.0), inputs().half(), Positions(), PATHS["math"]())
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(False)
    assert not torch.isfinite(out).all(), "this test cannot detect scores in fp16"

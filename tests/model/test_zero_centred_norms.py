"""Norms whose weight is stored minus 1 (--apply-layernorm-1p), and norms of fp64 inputs."""

from collections.abc import Callable

import pytest
import torch
from model.builders import build, tiny_config
from torch import Tensor

from megatron.model.norm import NORM_MODULES, Norm, ShardedRMSNorm
from megatron.parallel.mesh import TensorParallel
from megatron.parallel.parameter_spec import Init, make_vector_spec

HEADS, WIDTH = 4, 8
Build = Callable[[bool], Norm | ShardedRMSNorm]


def build_over_heads(zero_centred: bool) -> ShardedRMSNorm:
    spec = make_vector_spec(HEADS * WIDTH, Init.ONE, shard_dim=0)
    return ShardedRMSNorm(spec, 1e-5, TensorParallel(), zero_centred=zero_centred)


def build_by_name(name: str) -> Build:
    module = NORM_MODULES.require(name)
    return lambda zero_centred: module(WIDTH, 1e-5, TensorParallel(), zero_centred=zero_centred)


BUILDERS: dict[str, Build] = {
    "LayerNorm": build_by_name("LayerNorm"),
    "RMSNorm": build_by_name("RMSNorm"),
    "over all heads": build_over_heads,
}


def compute(norm: Norm | ShardedRMSNorm, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Return the output, and the gradients of input and weight."""
    norm.to(weight.dtype)
    with torch.no_grad():
        norm.weight.copy_(weight)
        if isinstance(norm, Norm) and norm.bias is not None:
            norm.bias.copy_(torch.linspace(0, 1, WIDTH))
    x = x.detach().clone().requires_grad_()
    out = norm(x)
    factors = torch.linspace(-1, 1, x.numel()).view_as(x)
    return out, *torch.autograd.grad((out * factors).sum(), (x, norm.weight))


def draw(*size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(len(size)))


@pytest.mark.parametrize("name", BUILDERS)
def test_the_weight_is_one_more_than_it_is_stored(name: str) -> None:
    plain, centred = (BUILDERS[name](value) for value in (False, True))
    x, weight = draw(6, 2, 1, HEADS, WIDTH), draw(plain.weight.numel())
    expected = compute(plain, x, weight + 1)
    for ours, theirs in zip(compute(centred, x, weight), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", BUILDERS)
def test_16_bits_do_not_round_the_sum(name: str) -> None:
    """1 + 2^-9 is 1 in bf16, and the result of a number near 1.99 shows the difference."""
    norm = BUILDERS[name](True)
    x = draw(64, 2, 1, HEADS, WIDTH).bfloat16()
    small = torch.full((norm.weight.numel(),), 2.0**-9, dtype=torch.bfloat16)
    found, without = (compute(norm, x, each)[0] for each in (small, torch.zeros_like(small)))
    assert found.dtype == torch.bfloat16
    assert 0.1 < float((found != without).double().mean()) < 0.9


def test_fp64_inputs_are_computed_in_fp64() -> None:
    for name, zero_centred in (("RMSNorm", False), ("RMSNorm", True), ("LayerNorm", True)):
        x, weight = draw(6, WIDTH).double(), draw(WIDTH).double()
        found = compute(BUILDERS[name](zero_centred), x, weight)[0]
        centred, bias = x, torch.zeros(())
        if name == "LayerNorm":
            centred, bias = x - x.mean(-1, keepdim=True), torch.linspace(0, 1, WIDTH)
        scale = (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        expected = centred / scale * (weight + zero_centred) + bias
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_all_norms_of_a_model_start_as_the_factor_1() -> None:
    """A norm that is stored otherwise than it is read would be 0 or 2 times as large."""
    config = {"normalization": "RMSNorm", "qk_norm": "full", "position_embedding_type": "rotary"}
    models = [build(tiny_config(**config, apply_layernorm_1p=each)) for each in (False, True)]
    plain, centred = (dict(model.named_parameters()) for model in models)
    norms = [name for name in plain if "norm" in name]
    assert len(norms) == 2 * 4 + 1
    for name in norms:
        assert bool((plain[name] == 1).all())
        assert bool((centred[name] == 0).all())

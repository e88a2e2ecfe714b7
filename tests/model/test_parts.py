"""Tests of each option of the model against its formula."""

import math
from collections.abc import Callable

import pytest
import torch
from model.builders import build, some_tokens, tiny_config

from megatron.model.execution import Execution
from megatron.model.gpt import GPT
from megatron.model.init import draw_normal_slice
from megatron.model.inputs import START, Inputs
from megatron.model.layer_parts import ACTIVATIONS, NORMS
from megatron.model.mlp import MLP
from megatron.model.norm import NORM_MODULES, LayerNorm, RMSNorm, describe_norm
from megatron.model.positions import (
    Positions,
    compute_alibi_slopes,
    make_alibi_bias,
    make_rotary_table,
    rotate,
)
from megatron.model.shape import ModelShape
from megatron.parallel.mesh import TensorParallel

ACTIVATION_FORMULAS: dict[str, Callable[..., torch.Tensor]] = {
    "gelu": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "squared_relu": lambda x: x.clamp(min=0) ** 2,
    "xielu": lambda x: (
        torch.where(x > 0, 0.8 * x**2, 0.8 * (torch.exp(x.clamp(max=-1e-6)) - 1 - x)) + 0.5 * x
    ),
    "swiglu": lambda x, up: x / (1 + torch.exp(-x)) * up,
    "geglu": lambda x, up: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))) * up,
    "reglu": lambda x, up: x.clamp(min=0) * up,
    "liglu": lambda x, up: x * up,
    "clamped_swiglu": lambda x, up: (
        x.clamp(max=7) / (1 + torch.exp(-1.702 * x.clamp(max=7))) * (up.clamp(-7, 7) + 1)
    ),
}
"""Activation -> its formula. The arguments are those of `Activate`."""


@pytest.mark.parametrize("name", [name for name, _ in ACTIVATIONS.list_rows()])
def test_an_mlp_equals_its_formula_in_fp64(name: str) -> None:
    """The MLP computes down(act(up x)), or down(act(gate x) * up x)."""
    gated = ACTIVATIONS.require(name).gated
    field = {True: "glu_activation", False: "activation"}[gated]
    mlp = build(tiny_config(**{field: name}, add_bias_linear=False)).get_blocks()[0].mlp
    # Large inputs, so that limits have an effect.
    x = torch.randn(5, 2, 32, generator=torch.Generator().manual_seed(0)) * 100
    assert isinstance(mlp, MLP)
    found = mlp(x)
    layers = [mlp.up] if mlp.gate is None else [mlp.gate, mlp.up]
    inner = [x.double() @ layer.weight.double().t() for layer in layers]
    expected = ACTIVATION_FORMULAS[name](*inner) @ mlp.down.weight.double().t()
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_gelu_has_a_tanh_and_an_erf_form() -> None:
    x = torch.linspace(-4, 4, 101)
    tanh_form = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    erf_form = 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
    for fused, form in ((True, tanh_form), (False, erf_form)):
        mlp = build(tiny_config(bias_gelu_fusion=fused)).get_blocks()[0].mlp
        assert isinstance(mlp, MLP)
        torch.testing.assert_close(mlp.activation(x), form)
    assert not torch.allclose(tanh_form, erf_form, atol=1e-5)


@pytest.mark.parametrize("dim", [8, 4])
def test_rotary_is_a_complex_rotation(dim: int) -> None:
    """Channels (i, i + dim/2) are one complex number, multiplied by exp(i position frequency).

    Channels from `dim` on do not change.
    """
    x = torch.randn(
        6, 2, 3, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).float()
    cos, sin = make_rotary_table(6, dim, 10000.0, torch.device("cpu"))
    pairs = torch.complex(x[..., : dim // 2], x[..., dim // 2 : dim])
    angles = torch.outer(torch.arange(6.0), 10000.0 ** (-torch.arange(0, dim, 2) / dim)).view(
        6, 1, 1, 1, -1
    )
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    expected = torch.cat((turned.real, turned.imag, x[..., dim:]), dim=-1)
    torch.testing.assert_close(rotate(x, cos, sin), expected, rtol=1e-5, atol=1e-6)


def test_the_gradient_of_rotary_is_right() -> None:
    x = torch.randn(4, 1, 2, 3, 8, dtype=torch.float64, requires_grad=True)
    cos, sin = (t.double() for t in make_rotary_table(4, 8, 10000.0, torch.device("cpu")))
    assert torch.autograd.gradcheck(lambda y: rotate(y, cos, sin), (x,))


def test_alibi_slopes_are_those_of_the_paper() -> None:
    assert compute_alibi_slopes(8) == [2.0**-i for i in range(1, 9)]
    assert compute_alibi_slopes(16) == pytest.approx([2 ** (-i / 2) for i in range(1, 17)])
    # Between powers of two: those of 8 heads, then every other one of 16 heads.
    assert compute_alibi_slopes(12) == pytest.approx(
        [2.0**-i for i in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    )


def test_the_alibi_bias_is_slope_times_distance() -> None:
    bias = make_alibi_bias(range(1, 3), 4, 5, torch.device("cpu"), torch.float32)
    assert bias.shape == (1, 2, 5, 5)
    for head, slope in enumerate(compute_alibi_slopes(4)[1:3]):
        for query in range(5):
            for key in range(5):
                expected = slope * (key - query) if key <= query else -math.inf
                assert bias[0, head, query, key].item() == pytest.approx(expected)


def compute_layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-5) * weight + bias


def compute_rms_norm(x: torch.Tensor, weight: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


NORM_FORMULAS = {"LayerNorm": compute_layer_norm, "RMSNorm": compute_rms_norm}
"""Norm -> its formula, of the input, the weight and the bias."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name, _ in NORMS.list_rows()])
def test_norms_equal_fp64(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(7, 3, 64, generator=generator) * 3 + 100).to(dtype)
    weight = torch.randn(64, generator=generator)
    bias = torch.randn(64, generator=generator)
    norm = NORM_MODULES.require(name)(64, 1e-5, TensorParallel())
    norm.weight.data.copy_(weight)
    if norm.bias is not None:
        norm.bias.data.copy_(bias)
    norm.to(dtype)
    expected = NORM_FORMULAS[name](x.double(), weight, bias)
    # The spacing of bf16 at 100 is 0.5, so only statistics in fp32 give the right deviation.
    bound = 2e-5 if dtype == torch.float32 else 0.03
    assert (norm(x).double() - expected).abs().max() < bound * expected.abs().max()
    assert norm(x).dtype == dtype


def test_a_layer_norm_without_bias_equals_fp64() -> None:
    norm = LayerNorm(16, 1e-5, TensorParallel(), bias=False)
    norm.weight.data.normal_(generator=torch.Generator().manual_seed(0))
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(1)) * 3 + 2
    exact = x.double()
    centred = exact - exact.mean(-1, keepdim=True)
    expected = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-5) * norm.weight
    torch.testing.assert_close(norm(x).double(), expected, rtol=1e-5, atol=1e-5)
    assert [name for name, _ in norm.named_parameters()] == ["weight"]
    # Also where the residual stream has another dtype than the weights.
    half = norm.to(torch.bfloat16)(x)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.double(), expected, rtol=0.02, atol=0.02)


def test_no_norm_bias_removes_the_bias_of_every_norm() -> None:
    model = build(tiny_config(norm_bias=False, embed_layernorm=True, qk_norm="head"))
    names = [name for name, _ in model.named_parameters() if "norm." in name]
    assert names
    assert not [name for name in names if name.endswith("bias")]


@pytest.mark.parametrize("position_embedding_type", ["rotary", "alibi"])
def test_a_window_ends_a_tokens_influence(position_embedding_type: str) -> None:
    """With a window of 5, token 4 affects position 8 and not 9 in one layer."""
    config = tiny_config(
        num_layers=1, sliding_window=5, position_embedding_type=position_embedding_type
    )
    model = build(config).eval()
    tokens = some_tokens()
    changed = tokens.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 101
    differs = (model.compute_logits(tokens) != model.compute_logits(changed)).any(-1).any(0)
    assert differs.tolist() == [4 <= position < 9 for position in range(24)]


def test_a_window_of_the_whole_sequence_changes_nothing() -> None:
    tokens = some_tokens()
    expected = build(tiny_config(position_embedding_type="alibi")).compute_logits(tokens)
    for window in (24, 1000):
        model = build(tiny_config(position_embedding_type="alibi", sliding_window=window))
        assert torch.equal(model.compute_logits(tokens), expected)


@pytest.mark.parametrize("placement", ["input", "output"])
@pytest.mark.parametrize("parallel", [False, True])
def test_an_fp32_residual_stream_fits_every_arrangement(placement: str, parallel: bool) -> None:
    config = tiny_config(norm_placement=placement, parallel_residual=parallel)
    exact = build(config)
    execution = Execution(dtype=torch.bfloat16, fp32_residual=True)
    model = GPT(exact.shape, exact.tp, execution=execution)
    model.load_state_dict(exact.state_dict())
    stream = model.to(torch.bfloat16).run_blocks(None, Inputs(some_tokens()))
    assert stream.dtype == torch.float32
    torch.testing.assert_close(
        stream, exact.run_blocks(None, Inputs(some_tokens())), rtol=0.1, atol=0.1
    )


def test_parallel_residual_with_norms_of_the_outputs() -> None:
    """The only arrangement that no class of `transformers` has."""
    model = build(tiny_config(num_layers=1, norm_placement="output", parallel_residual=True))
    block = model.get_blocks()[0]
    x = torch.randn(24, 2, 32, generator=torch.Generator().manual_seed(0))
    assert block.attention_output_norm is not None
    assert block.mlp_output_norm is not None
    expected = (
        x
        + block.attention_output_norm(block.attention(x, Positions(), START))
        + block.mlp_output_norm(block.mlp(x))
    )
    torch.testing.assert_close(block(x, Positions(), START), expected)


def test_the_gradient_of_rms_norm_is_right() -> None:
    x = torch.randn(5, 2, 16, requires_grad=True)
    norm = RMSNorm(16, 1e-5, TensorParallel())
    norm.weight.data.normal_()
    reference = (
        (x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-5) * norm.weight).square().sum()
    )
    expected = torch.autograd.grad(reference, (x, norm.weight))
    ours = torch.autograd.grad(norm(x).square().sum(), (x, norm.weight))
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_init_std_follows_its_formula() -> None:
    def std(value: object, hidden: int) -> float:
        return ModelShape(
            tiny_config(hidden_size=hidden, init_method_std=value, kv_channels=8), 10, 10
        ).init_std

    assert std("small", 11600) == pytest.approx(0.00587220219514703)  # the 104B
    assert std("megatron", 20480) == pytest.approx(math.sqrt(1 / (3 * 20480)))  # the 530B
    assert std(0.02, 11600) == 0.02
    assert ModelShape(
        tiny_config(num_layers=32, init_method_std=0.02), 10, 10
    ).output_init_std == 0.02 / math.sqrt(64)


def test_initial_weights_have_their_distribution() -> None:
    model = build(tiny_config(hidden_size=128, num_layers=4, embed_layernorm=True))
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        elif name.endswith("bias"):
            assert not parameter.any(), name
        else:
            std = 0.02 / math.sqrt(8) if name.endswith(("out.weight", "down.weight")) else 0.02
            real = parameter[:101] if name == "embedding.word.weight" else parameter
            assert real.std().item() == pytest.approx(std, rel=0.03), name
            assert abs(real.mean().item()) < 5 * std / math.sqrt(real.numel()), name


def test_a_shard_is_initialised_as_a_slice_of_the_weight() -> None:
    weight = draw_normal_slice(1, "w", (4000, 300), (0, 0), (4000, 300))
    for offset, shape in (
        ((0, 0), (1000, 300)),
        ((3333, 0), (667, 300)),
        ((0, 75), (4000, 75)),
        ((870, 100), (10, 3)),
        ((4000, 0), (0, 300)),
    ):
        part = draw_normal_slice(1, "w", (4000, 300), offset, shape)
        rows, columns = (slice(o, o + n) for o, n in zip(offset, shape, strict=True))
        assert (part == weight[rows, columns]).all()
    assert (draw_normal_slice(1, "v", (4000, 300), (0, 0), (4000, 300)) != weight).mean() > 0.99
    assert (draw_normal_slice(2, "w", (4000, 300), (0, 0), (4000, 300)) != weight).mean() > 0.99


def test_dropout_follows_its_key_and_is_off_in_evaluation() -> None:
    model = build(tiny_config(hidden_dropout=0.2, attention_dropout=0.2))
    tokens = some_tokens(seed=1)
    labels = some_tokens(seed=2)

    def loss(iteration: int, microbatch: int) -> float:
        torch.rand(iteration + microbatch)  # other code may draw numbers too
        return model(
            None, Inputs(tokens, labels, dropout_key=torch.tensor((7, iteration, microbatch)))
        ).item()

    model.train()
    assert loss(1, 0) == loss(1, 0)
    assert len({loss(1, 0), loss(2, 0), loss(1, 1)}) == 3
    model.eval()
    assert loss(1, 0) == loss(2, 1)


def test_a_norm_without_bias_is_described_as_torchs_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """apex's kernel needs a bias, so it is not used even if apex is installed."""
    monkeypatch.setattr("megatron.model.norm._apex_layer_norm", object())
    assert describe_norm(tiny_config(), "cuda")[0] == "LayerNorm, apex, fused"
    kernel, reason = describe_norm(tiny_config(norm_bias=False), "cuda")
    assert kernel == "LayerNorm, torch, fused"
    assert "needs a bias" in reason

"""The gated delta rule against its recurrent formula, and the layer against transformers'."""

import itertools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model.builders import build, some_tokens, tiny_config
from torch import Tensor

from megatron.config.optimizer import OPTIMIZERS
from megatron.extras.step.kernels.delta_rule import DeltaRuleKernel
from megatron.model import gated_delta_net
from megatron.model.delta_rule import apply_delta_rule, convolve
from megatron.model.gated_delta_net import GatedDeltaNet
from megatron.model.gpt import GPT
from megatron.model.inputs import START, Documents, Inputs
from megatron.model.key_value_cache import KeyValueCache
from megatron.model.layer_parts import ATTENTIONS
from megatron.model.positions import Positions
from megatron.model.shape import ModelShape

LENGTHS = (1, 3, 63, 64, 65, 200)
# Documents of one token, at the borders of chunks and inside of them.
BORDERS = ((1, 2, 64, 65, 70), (63, 100, 128, 199))
HYBRID: dict[str, object] = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": "3",
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "num_layers": 3,
    "seq_length": 200,
    "position_embedding_type": "rotary",
    "normalization": "LayerNorm",
    "init_method_std": 0.3,
}


def make_documents(length: int) -> Documents:
    return tuple(
        (0, *(border for border in borders if border < length), length) for borders in BORDERS
    )


Drawn = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def draw(length: int) -> Drawn:
    """Return inputs of the rule in fp64. Heads forget within a token, or hardly at all."""
    generator = torch.Generator().manual_seed(length)

    def normal(*size: int) -> Tensor:
        return torch.randn(2, *size, generator=generator, dtype=torch.float64)

    speeds = torch.tensor([0.01, 0.1, 1.0, 20.0], dtype=torch.float64)[:, None]
    drawn: Drawn = (
        normal(2, length, 8),
        F.normalize(normal(2, length, 8), dim=-1),
        normal(4, length, 6),
        -normal(4, length).abs() * speeds,
        2 * normal(4, length).sigmoid(),
    )
    for each in drawn:
        each.requires_grad_()
    return drawn


def compute_recurrence(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, documents: Documents
) -> Tensor:
    """Compute the rule token by token, from the formula alone."""
    query, key = (x.repeat_interleave(2, dim=1) for x in (query, key))
    samples = []
    for sample, bounds in enumerate(documents):
        outputs = []
        for token in range(query.shape[2]):
            if token in bounds:
                state = value.new_zeros(4, 8, 6)
            k, v = key[sample, :, token], value[sample, :, token]
            state = decay[sample, :, token, None, None].exp() * state
            error = v - torch.einsum("mkv,mk->mv", state, k)
            state = state + torch.einsum("mk,mv,m->mkv", k, error, beta[sample, :, token])
            outputs.append(torch.einsum("mkv,mk->mv", state, query[sample, :, token]))
        samples.append(torch.stack(outputs, 1))
    return torch.stack(samples)


@pytest.mark.parametrize(("length", "divided"), list(itertools.product(LENGTHS, (False, True))))
def test_the_rule_in_chunks_is_the_recurrence(length: int, divided: bool) -> None:
    inputs = draw(length)
    documents = make_documents(length) if divided else ((0, length),) * 2
    expected = compute_recurrence(*inputs, documents)
    given = documents if divided else None
    found, _ = apply_delta_rule(*inputs, given)
    weight = torch.linspace(-1, 1, found.numel(), dtype=torch.float64).view_as(found)
    gradients, wanted = (
        torch.autograd.grad((out * weight).sum(), inputs) for out in (found, expected)
    )
    for ours, theirs in zip((found, *gradients), (expected, *wanted), strict=True):
        assert float((ours - theirs).detach().abs().max()) < 1e-10
    query, key, value, decay, beta = (each.detach().float() for each in inputs)
    narrow, _ = apply_delta_rule(query, key, value, decay, beta, given)
    assert float((narrow - expected).detach().abs().max() / expected.detach().abs().max()) < 1e-5


def stand_in(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute what the function of fla-core says of itself. Tensors are [b, s, heads, ...]."""
    assert scale == 1.0
    assert output_final_state
    assert {x.dtype for x in (query, key, value)} == {torch.bfloat16}
    assert cu_seqlens is None or (len(query) == 1 and cu_seqlens.dtype == torch.int64)
    query, key, value, g, beta = (x.transpose(1, 2).double() for x in (query, key, value, g, beta))
    if cu_seqlens is None:
        out, last = apply_delta_rule(query, key, value, g, beta, state=initial_state)
        return out.transpose(1, 2), last
    parts = []
    for start, stop in itertools.pairwise(cu_seqlens.tolist()):
        own = slice(start, stop)
        q, k, v, decay, rate = (x[:, :, own] for x in (query, key, value, g, beta))
        parts.append(apply_delta_rule(q, k, v, decay, rate))
    return torch.cat([out for out, _ in parts], 2).transpose(1, 2), torch.cat([s for _, s in parts])


@pytest.mark.parametrize("divided", [False, True])
def test_the_kernel_of_a_gpu_gets_what_it_reads(
    divided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not installed here. A function with its arguments shows how it is called."""
    monkeypatch.setitem(
        sys.modules, "fla.ops.gated_delta_rule", SimpleNamespace(chunk_gated_delta_rule=stand_in)
    )
    # What 16 bits hold, so that both read the same values.
    query, key, value, decay, beta = (x.detach().bfloat16().double() for x in draw(200))
    documents = make_documents(200) if divided else None
    compute = DeltaRuleKernel(in_bf16=True)
    found = compute(query, key, value, decay, beta, documents)
    expected = apply_delta_rule(query, key, value, decay, beta, documents)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_the_state_goes_on_where_it_was() -> None:
    inputs = draw(200)
    whole, state = apply_delta_rule(*inputs)
    parts, before = [], None
    for part in (slice(0, 70), slice(70, 71), slice(71, 200)):
        query, key, value, decay, beta = (each[:, :, part] for each in inputs)
        out, before = apply_delta_rule(query, key, value, decay, beta, state=before)
        parts.append(out)
    assert before is not None
    assert torch.allclose(torch.cat(parts, 2), whole, atol=1e-12)
    assert torch.allclose(before, state, atol=1e-12)


def test_the_convolution_is_that_of_torch_in_each_document() -> None:
    x = torch.randn(20, 2, 5, dtype=torch.float64)
    weight = torch.randn(5, 4, dtype=torch.float64)
    documents = ((0, 1, 3, 20), (0, 9, 20))
    found, _ = convolve(x, weight, documents)
    for sample, bounds in enumerate(documents):
        for start, stop in itertools.pairwise(bounds):
            own = F.pad(x[start:stop, sample].t()[None], (3, 0))
            expected = F.conv1d(own, weight[:, None], groups=5)[0].t()
            assert torch.allclose(found[start:stop, sample], expected, atol=1e-12)


def compute_gradients(model: GPT, inputs: Inputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the residual stream, and the gradients of a weighted sum of it."""
    model.zero_grad()
    out = model.run_blocks(None, inputs)
    weight = torch.linspace(-1, 1, out.shape[-1], dtype=out.dtype)
    (out * weight).sum().backward()
    return out.detach(), {
        name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None
    }


def test_a_packed_sample_is_its_documents_one_by_one() -> None:
    model = build(tiny_config(**HYBRID)).double()
    tokens = some_tokens(1, 200)
    bounds = (0, 1, 2, 64, 65, 70, 130, 200)
    positions = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(bounds)])[None]
    packed, gradients = compute_gradients(
        model, Inputs(tokens, position_ids=positions, documents=(bounds,))
    )
    sums = {name: torch.zeros_like(each) for name, each in gradients.items()}
    for start, stop in itertools.pairwise(bounds):
        alone, own = compute_gradients(model, Inputs(tokens[:, start:stop]))
        torch.testing.assert_close(packed[start:stop], alone, rtol=1e-5, atol=1e-5)
        for name, each in own.items():
            sums[name] += each
    for name, each in gradients.items():
        assert float((each - sums[name]).abs().max() / each.abs().max()) < 1e-5, name


def test_cached_tokens_have_the_outputs_of_the_whole_sequence() -> None:
    model = build(tiny_config(**HYBRID))
    layer = next(
        each.attention
        for each in model.get_blocks().values()
        if isinstance(each.attention, GatedDeltaNet)
    )
    x = torch.randn(80, 3, 32)
    with torch.no_grad():
        expected = layer(x, Positions(), START)
        cache = KeyValueCache(3, 80)
        found = []
        # A prompt of two tokens is shorter than the convolution.
        for rows, length in ((torch.tensor([2]), 70), (torch.tensor([0, 1]), 2)):
            cache.expect_prompts(rows, 0)
            prompt = layer(x[:length, rows], Positions(cache=cache), START)
            torch.testing.assert_close(prompt, expected[:length, rows], rtol=1e-5, atol=1e-5)
        # Each sequence goes on at its own place.
        for step in range(8):
            cache.expect_token(70 + step)
            places = torch.tensor([2, 2, 70]) + step
            new = x[places, torch.arange(3)][None]
            found.append(layer(new, Positions(cache=cache), START)[0])
            wanted = expected[places, torch.arange(3)]
            torch.testing.assert_close(found[-1], wanted, rtol=1e-5, atol=1e-5)


def gate_by_sigmoid(patch: pytest.MonkeyPatch) -> None:
    def forward(norm: Any, x: Tensor, gate: Tensor) -> Tensor:
        rstd = (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
        return x * rstd * norm.weight * gate.sigmoid()

    patch.setattr(gated_delta_net.GatedRMSNorm, "forward", forward)


def keep_lengths(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(gated_delta_net, "normalise_length", lambda x: x)


def read_later_tokens(patch: pytest.MonkeyPatch) -> None:
    def convolve_reversed(x: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        return convolve(x, weight.flip(1), *others)

    patch.setattr(gated_delta_net, "convolve", convolve_reversed)


def leave_out_scale(patch: pytest.MonkeyPatch) -> None:
    def compute(query: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        # The norm would remove the same factor of all tokens, apart from its epsilon.
        return apply_delta_rule(query * query.shape[3] ** 0.5, *others)

    patch.setattr(gated_delta_net, "apply_delta_rule", compute)


def write_before_the_decay(patch: pytest.MonkeyPatch) -> None:
    def compute(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, *others: Any) -> Any:
        return apply_delta_rule(q, k, v, F.pad(decay[..., 1:], (0, 1)), *others)

    patch.setattr(gated_delta_net, "apply_delta_rule", compute)


FORMULA_ERRORS = (
    gate_by_sigmoid,
    keep_lengths,
    read_later_tokens,
    leave_out_scale,
    write_before_the_decay,
)


@pytest.mark.parametrize("negative", [False, True])
def test_the_layer_is_that_of_transformers(negative: bool) -> None:
    assert max(compare_with_transformers(negative=negative)) < 1e-5


@pytest.mark.parametrize("plant", FORMULA_ERRORS)
def test_an_error_of_the_formula_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert max(compare_with_transformers(negative=False)) > 1e-3


def test_weight_decay_and_muon_have_the_projections_only() -> None:
    shape = ModelShape(tiny_config(**HYBRID), 101, 101)
    specs = ATTENTIONS.require("gated_delta_net").list_parameters(shape, 1, 0)
    decaying = {name for name, spec in specs.items() if spec.decays}
    parts = ("query", "key", "value", "gate", "beta", "alpha", "out")
    assert decaying == {f"{part}.weight" for part in parts}
    muon = OPTIMIZERS.require("muon")
    updated = {name for name in specs if muon.updates(f"blocks.0.{name}", len(specs[name].shape))}
    assert updated == decaying


def compare_with_transformers(*, negative: bool) -> list[float]:
    """Return the relative difference of the outputs, and of the gradient of each parameter."""
    olmo: Any = pytest.importorskip("transformers.models.olmo_hybrid.modeling_olmo_hybrid")
    config = olmo.OlmoHybridConfig(
        hidden_size=32,
        num_attention_heads=4,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=6,
        linear_value_head_dim=10,
        linear_conv_kernel_dim=4,
        linear_allow_neg_eigval=negative,
        vocab_size=8,
        pad_token_id=None,
    )
    theirs = olmo.OlmoHybridGatedDeltaNet(config, 0)
    changes: dict[str, object] = {"linear_num_value_heads": 2, "linear_allow_neg_eigval": negative}
    changes |= {"linear_norm_epsilon": 1e-5}
    ours = build(tiny_config(**(HYBRID | changes))).get_blocks()[0].attention
    assert isinstance(ours, GatedDeltaNet)
    names = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "g_proj": "gate"}
    names |= {"b_proj": "beta", "a_proj": "alpha", "o_proj": "out"}
    pairs = [(getattr(theirs, a).weight, getattr(ours, b).weight) for a, b in names.items()]
    pairs += [(theirs.A_log, ours.A_log), (theirs.dt_bias, ours.dt_bias)]
    pairs += [(theirs.o_norm.weight, ours.norm.weight)]
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for their, our in pairs:
            our.copy_(0.5 * torch.randn(our.shape, generator=generator))
            their.copy_(our)
        convolutions = (ours.query_convolution, ours.key_convolution, ours.value_convolution)
        theirs.conv1d.weight.copy_(torch.cat(convolutions).unsqueeze(1))
    x = torch.randn(2, 130, 32, generator=generator)
    expected = theirs(x)
    expected = expected[0] if isinstance(expected, tuple) else expected
    found = ours(x.transpose(0, 1), Positions(), START).transpose(0, 1)
    pairs_of_results = [(found.detach(), expected.detach())]
    weight = torch.randn(expected.shape, generator=generator)
    for out in (found, expected):
        (out * weight).sum().backward()
    joined = torch.cat([each.grad for each in convolutions if each.grad is not None])
    pairs_of_results += [(our.grad, their.grad) for their, our in pairs]
    pairs_of_results.append((joined, theirs.conv1d.weight.grad.squeeze(1)))
    return [float((a - b).abs().max() / b.abs().max()) for a, b in pairs_of_results]

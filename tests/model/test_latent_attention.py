"""Latent attention against a formula in fp64, and against transformers' layers."""

import itertools
import math
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from model.builders import build, some_tokens, tiny_config
from model.test_attention_kernels import KernelRecorder
from torch import Tensor, nn

from megatron.model import latent_attention
from megatron.model.inputs import START, Documents, Inputs
from megatron.model.latent_attention import LatentAttention
from megatron.model.positions import Positions, make_scaled_rotary_table
from megatron.model.shape import ModelShape
from megatron.parallel.layers import ReplicatedLinear

LENGTH, HEADS, LATENT, PLAIN, ROTARY, VALUE = 24, 4, 12, 10, 6, 14
EPSILON = 1e-6
DEEPSEEK: dict[str, object] = {
    "multi_latent_attention": True,
    "q_lora_rank": 20,
    "kv_lora_rank": LATENT,
    "qk_head_dim": PLAIN,
    "qk_pos_emb_head_dim": ROTARY,
    "v_head_dim": VALUE,
    "position_embedding_type": "rotary",
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "init_method_std": 0.3,
    "latent_norm_epsilon": EPSILON,
}
YARN: dict[str, object] = {
    "rope_scaling": "yarn",
    "rope_scaling_factor": 40.0,
    "rope_original_length": 8,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}
BOUNDS = ((0, 1, 9, 10, LENGTH), (0, 13, LENGTH))


def build_layer(**changes: object) -> LatentAttention:
    """Return the attention of the first layer, with norms that are not 1."""
    layer = build(tiny_config(**(DEEPSEEK | changes))).get_blocks()[0].attention
    assert isinstance(layer, LatentAttention)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.dim() == 1:
                parameter.copy_(1 + 0.5 * torch.randn(parameter.shape, generator=generator))
    return layer


def make_tables(ids: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of positions [s, b] in fp64, [s, b, 1, 1, pairs], x `factor`."""
    frequencies = 10000.0 ** (-torch.arange(0, ROTARY, 2, dtype=torch.float64) / ROTARY)
    angles = (ids.double()[..., None] * frequencies)[:, :, None, None]
    return factor * angles.cos(), factor * angles.sin()


def find_seen(documents: Documents | None, window: int | None) -> Tensor:
    """Return whether a query sees a key, [b, 1, s, s]."""
    seen = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    if window is not None:
        seen &= torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1 - window)
    for sample, bounds in enumerate(documents or ()):
        for start, stop in itertools.pairwise(bounds):
            seen[sample, :, start:stop, :start] = False
    return seen


def compute_formula(
    x: Tensor, layer: LatentAttention, cos: Tensor, sin: Tensor, seen: Tensor, factor: float
) -> Tensor:
    """Compute the layer from the equations of the paper alone, with complex rotations."""

    def normalise(latent: Tensor, norm: Any) -> Tensor:
        centred = latent - latent.mean(-1, keepdim=True)
        scale = (centred.square().mean(-1, keepdim=True) + EPSILON).sqrt()
        return centred / scale * norm.weight + norm.bias

    turn = torch.complex(cos, sin)[:, :, :, 0]  # [s, b, 1, pairs]

    def rotate(each: Tensor) -> Tensor:
        pairs = torch.complex(*each.split(ROTARY // 2, dim=3)) * turn
        return torch.cat((pairs.real, pairs.imag), dim=3)

    source = x
    if isinstance(layer.query_down, ReplicatedLinear):
        source = normalise(x @ layer.query_down.weight.t(), layer.query_norm)
    query = (source @ layer.query.weight.t()).unflatten(2, (HEADS, ROTARY + PLAIN))
    both = x @ layer.latent_down.weight.t()
    latent = normalise(both[..., :LATENT], layer.latent_norm)
    shared = rotate(both[..., None, LATENT:])
    up = layer.latent_up.weight.view(HEADS, PLAIN + VALUE, LATENT)
    key = torch.einsum("sbl,ncl->sbnc", latent, up[:, :PLAIN])
    value = torch.einsum("sbl,ncl->sbnc", latent, up[:, PLAIN:])
    scores = torch.einsum("qbnc,kbnc->bnqk", query[..., ROTARY:], key)
    scores = scores + torch.einsum("qbnc,kbc->bnqk", rotate(query[..., :ROTARY]), shared[:, :, 0])
    scores = scores * factor / math.sqrt(PLAIN + ROTARY)
    weights = scores.masked_fill(~seen, -math.inf).softmax(dim=3)
    return torch.einsum("bnqk,kbnc->qbnc", weights, value).flatten(2) @ layer.out.weight.t()


@pytest.mark.parametrize("rank", [None, 20])
@pytest.mark.parametrize("documents", [None, BOUNDS])
@pytest.mark.parametrize("window", [None, 5])
def test_the_layer_is_the_formula(
    rank: int | None, documents: Documents | None, window: int | None
) -> None:
    # The formula has the mean and the bias of LayerNorm.
    changes = {"q_lora_rank": rank, "normalization": "LayerNorm", "sliding_window": window}
    layer = build_layer(**YARN, **changes).double()
    ids = torch.arange(LENGTH)[:, None].expand(-1, 2).clone()
    for sample, bounds in enumerate(documents or ()):
        for start, stop in itertools.pairwise(bounds):
            ids[start:stop, sample] -= start
    turned = 0.1 * 0.7 * math.log(40) + 1
    plain = 0.1 * math.log(40) + 1
    cos, sin = make_tables(ids, turned / plain)
    seen = find_seen(documents, window)
    bias = None
    if window is not None:
        masked = ~find_seen(None, window)[:1]
        bias = torch.zeros(masked.shape, dtype=torch.float64).masked_fill(masked, -math.inf)
    positions = Positions(cos, sin, window_bias=bias, documents=documents)
    x = torch.randn(LENGTH, 2, 32, dtype=torch.float64, requires_grad=True)
    weight = torch.linspace(-1, 1, x.numel(), dtype=torch.float64).view_as(x)
    results = [
        layer(x, positions, START),
        compute_formula(x, layer, cos, sin, seen, plain**2),
    ]
    inputs = (x, *layer.parameters())
    found, expected = ((out, *torch.autograd.grad((out * weight).sum(), inputs)) for out in results)
    for ours, theirs in zip(found, expected, strict=True):
        assert float((ours - theirs).detach().abs().max() / theirs.detach().abs().max()) < 1e-10


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("documents", [None, BOUNDS])
@pytest.mark.parametrize("recomputed", [False, True])
def test_padded_values_change_nothing(
    recomputed: bool, documents: Documents | None, dtype: torch.dtype, bound: float
) -> None:
    """The flash kernel of CPUs computes narrow values only with zeros beside them."""
    layer = build_layer(**YARN).to(dtype)
    layer.recompute_core = recomputed
    ids = torch.arange(LENGTH)[:, None].expand(-1, 2)
    cos, sin = (table.to(dtype) for table in make_tables(ids, 1.0))
    x = torch.randn(LENGTH, 2, 32, dtype=dtype, requires_grad=True)
    weight = torch.linspace(-1, 1, x.numel(), dtype=dtype).view_as(x)
    results = []
    for kernels in ((), ("flash",), ("unfused",)):
        layer.kernels = kernels
        with KernelRecorder() as recorder:
            out = layer(x, Positions(cos, sin, documents=documents), START)
        assert set(recorder.kernels) == {"unfused" if kernels == ("unfused",) else "flash"}
        gradients = torch.autograd.grad((out * weight).sum(), (x, *layer.parameters()))
        results.append((out, *gradients))
    for found in results[:2]:
        for one, other in zip(found, results[2], strict=True):
            assert float((one - other).detach().abs().max() / other.detach().abs().max()) < bound


def test_the_factors_are_those_of_deepseek_v3() -> None:
    v3: dict[str, object] = {"rope_scaling": "yarn", "rope_scaling_factor": 40.0, "mscale": 1.0}
    shape = ModelShape(tiny_config(**(DEEPSEEK | v3 | {"mscale_all_dim": 1.0})), 8, 8)
    assert round(shape.latent_logit_factor, 3) == 1.874
    assert shape.rope_attention_factor == 1
    lite = ModelShape(tiny_config(**(DEEPSEEK | v3)), 8, 8)
    assert lite.latent_logit_factor == 1
    assert lite.rope_attention_factor == 0.1 * math.log(40) + 1


def pair_rotary(weight: Tensor, heads: int, plain: int) -> Tensor:
    """Return rows with the rotary channels last and as neighbours, as in files of transformers."""
    rows = weight.unflatten(0, (heads, -1))
    rotary = rows[:, :ROTARY].unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return torch.cat((rows[:, ROTARY : ROTARY + plain], rotary), dim=1).flatten(0, 1)


def find_differences(name: str, documents: Documents | None) -> set[str]:
    """Return what differs from the layer of transformers: the output, and gradients."""
    module: Any = pytest.importorskip(f"transformers.models.deepseek_{name}")
    title = f"Deepseek{name.upper()}"
    changes = YARN if name == "v3" else {"q_lora_rank": None}
    layer = build_layer(**changes)
    config = getattr(module, f"{title}Config")(
        hidden_size=32,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        q_lora_rank=20 if name == "v3" else None,
        kv_lora_rank=LATENT,
        qk_nope_head_dim=PLAIN,
        qk_rope_head_dim=ROTARY,
        v_head_dim=VALUE,
        max_position_embeddings=LENGTH,
    )
    if name == "v3":
        config.rope_parameters = {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 40.0,
            "original_max_position_embeddings": 8,
            "mscale": 0.7,
            "mscale_all_dim": 1.0,
        }
    config._attn_implementation = "eager"
    modeling: Any = getattr(module, f"modeling_deepseek_{name}")
    theirs = getattr(modeling, f"{title}Attention")(config, 0)
    down = layer.latent_down.weight
    rows = {
        "kv_a_proj_with_mqa": lambda: torch.cat((down[:LATENT], pair_rotary(down[LATENT:], 1, 0))),
        "kv_b_proj": lambda: layer.latent_up.weight,
        "kv_a_layernorm": lambda: layer.latent_norm.weight,
        "o_proj": lambda: layer.out.weight,
        "q_b_proj" if name == "v3" else "q_proj": lambda: pair_rotary(
            layer.query.weight, HEADS, PLAIN
        ),
    }
    query_down: Any = layer.query_down
    query_norm: Any = layer.query_norm
    if isinstance(query_down, ReplicatedLinear):
        rows |= {"q_a_proj": lambda: query_down.weight, "q_a_layernorm": lambda: query_norm.weight}
    modules: dict[str, nn.Module] = dict(theirs.named_children())
    assert {each for each, child in modules.items() if child is not None} == rows.keys()
    ids = torch.arange(LENGTH).expand(2, -1).clone()
    for sample, bounds in enumerate(documents or ()):
        for start, stop in itertools.pairwise(bounds):
            ids[sample, start:stop] -= start
    with torch.no_grad():
        for each, read in rows.items():
            theirs.get_parameter(f"{each}.weight").copy_(read())
    x = torch.randn(2, LENGTH, 32, generator=torch.Generator().manual_seed(5))
    mask = torch.zeros(2, 1, LENGTH, LENGTH).masked_fill(~find_seen(documents, None), -math.inf)
    embedding = getattr(modeling, f"{title}RotaryEmbedding")(config)
    expected = theirs(x, attention_mask=mask, position_embeddings=embedding(x, ids))[0]
    shape = ModelShape(tiny_config(**(DEEPSEEK | changes)), 8, 8)
    tables = (
        table.flatten(1)[ids.t()][:, :, None, None]
        for table in make_scaled_rotary_table(LENGTH, shape, x.device)
    )
    cos, sin = tables
    found = layer(x.transpose(0, 1), Positions(cos, sin, documents=documents), START)
    found = found.transpose(0, 1)
    weight = torch.linspace(-1, 1, x.numel()).view_as(x)
    gradients = torch.autograd.grad((found * weight).sum(), list(layer.parameters()))
    for parameter, gradient in zip(layer.parameters(), gradients, strict=True):
        parameter.grad = gradient
    (expected * weight).sum().backward()
    with torch.no_grad():
        for parameter in layer.parameters():
            assert parameter.grad is not None
            parameter.copy_(parameter.grad)
    pairs = [("output", found, expected)]
    pairs += [
        ("gradients", read(), theirs.get_parameter(f"{each}.weight").grad)
        for each, read in rows.items()
    ]
    return {
        kind
        for kind, ours, their in pairs
        if not (ours - their).detach().abs().max() < 1e-5 * their.detach().abs().max()
    }


@pytest.mark.parametrize("name", ["v2", "v3"])
@pytest.mark.parametrize("documents", [None, BOUNDS])
def test_the_layer_is_that_of_transformers(name: str, documents: Documents | None) -> None:
    assert find_differences(name, documents) == set()


def change_core(change: Callable[..., Any]) -> Any:
    """Change queries, keys and values of the layer."""
    project = LatentAttention._project
    return patch.object(
        LatentAttention,
        "_project",
        lambda layer, *arguments: change(layer, *project(layer, *arguments)),
    )


def divide_by_plain_width() -> Any:
    return change_core(
        lambda layer, query, key, value: (
            query * (layer.head_dim / layer.plain_dim) ** 0.5,
            key,
            value,
        )
    )


def leave_out_factor_on_logits() -> Any:
    return patch.object(ModelShape, "latent_logit_factor", 1.0)


def leave_shared_key_as_it_is() -> Any:
    rotate = latent_attention.rotate
    return patch.object(
        latent_attention,
        "rotate",
        lambda x, cos, sin: rotate(x, cos, sin) if x.shape[3] > 1 else x,
    )


def take_key_gradient_of_first_head() -> Any:
    def change(layer: LatentAttention, query: Tensor, key: Tensor, value: Tensor) -> Any:
        rotary, plain = key.split((ROTARY, PLAIN), dim=3)
        rotary = torch.cat((rotary[:, :1], rotary[:, 1:].detach()), dim=1)
        return query, torch.cat((rotary, plain), dim=3), value

    return change_core(change)


@pytest.mark.parametrize(
    ("error", "finds"),
    [
        (divide_by_plain_width, {"output", "gradients"}),
        (leave_out_factor_on_logits, {"output", "gradients"}),
        (leave_shared_key_as_it_is, {"output", "gradients"}),
        (take_key_gradient_of_first_head, {"gradients"}),
    ],
)
def test_an_error_of_the_formula_is_found(error: Callable[[], Any], finds: set[str]) -> None:
    with error():
        assert find_differences("v3", BOUNDS) == finds


def test_a_packed_sample_is_its_documents_one_by_one() -> None:
    model = build(tiny_config(**(DEEPSEEK | YARN)))
    tokens = some_tokens(1)
    bounds = BOUNDS[0]
    positions = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(bounds)])[None]
    with torch.no_grad():
        packed = model.run_blocks(None, Inputs(tokens, position_ids=positions, documents=(bounds,)))
        for start, stop in itertools.pairwise(bounds):
            alone = model.run_blocks(None, Inputs(tokens[:, start:stop]))
            torch.testing.assert_close(packed[start:stop], alone, rtol=1e-5, atol=1e-5)

"""Tests of Muon against torch's, and of how matrices are divided among ranks."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.config.optimizer import OptimizerConfig
from megatron.engine.muon import (
    Muon,
    Part,
    assign_owners,
    compute_scale,
    list_blocks,
    list_parts,
    orthogonalise,
)
from megatron.engine.optimizer import MasterParameter
from megatron.model.shape import ModelShape
from megatron.parallel.grid import Grid
from megatron.parallel.mesh import Mesh, build_mesh
from megatron.parallel.parameter_spec import Init, ParameterSpec

SHAPE = ModelShape(
    ModelConfig(
        num_layers=1, hidden_size=24, num_attention_heads=6, num_query_groups=3, seq_length=8
    ),
    50,
    64,
)
QKV = "blocks.0.attention.qkv.weight"
QUERIES, HEAD = 8, 4
"""Rows of a group: the queries of its two heads, and those of a key or a value."""
AS_TORCH = OptimizerConfig(
    optimizer="muon",
    weight_decay=0.1,
    muon_momentum=0.95,
    muon_nesterov=True,
    muon_coefficient_type="simple",
    muon_scale_mode="shape_scaling",
)


def make_mesh() -> Mesh:
    return build_mesh(Grid(1, 1, 1), torch.device("cpu"))


def make_masters(shapes: dict[str, tuple[int, ...]]) -> list[MasterParameter]:
    generator = torch.Generator().manual_seed(0)
    masters = []
    for name, shape in shapes.items():
        weight = nn.Parameter(torch.randn(shape, generator=generator))
        spec = ParameterSpec(shape, Init.NORMAL, decays=len(shape) > 1)
        masters.append(MasterParameter(name, spec, (0,) * len(shape), weight, weight))
    return masters


def split_qkv(fused: Tensor) -> list[Tensor]:
    """Return queries, keys and values of a fused projection with three groups."""
    groups = fused.view(3, QUERIES + 2 * HEAD, -1)
    return [part.reshape(-1, fused.shape[1]) for part in groups.split([QUERIES, HEAD, HEAD], dim=1)]


def test_muon_equals_torchs_and_adamw_for_the_rest() -> None:
    masters = make_masters(
        {
            "embedding.word.weight": (50, 24),
            "blocks.0.mlp.up.weight": (40, 24),
            "blocks.0.mlp.down.weight": (24, 40),
            QKV: (48, 24),
            "blocks.0.input_norm.weight": (24,),
        }
    )
    embedding, up, down, qkv, norm = masters
    ours = Muon(masters, AS_TORCH, SHAPE, make_mesh())
    weights = [
        nn.Parameter(weight.clone())
        for weight in (up.weight.data, down.weight.data, *split_qkv(qkv.weight.data))
    ]
    rest = [nn.Parameter(m.weight.detach().clone()) for m in (embedding, norm)]
    muon = torch.optim.Muon(weights, lr=0.1, weight_decay=0.1, momentum=0.95)
    adamw = torch.optim.AdamW(
        [{"params": rest[:1], "weight_decay": 0.1}, {"params": rest[1:], "weight_decay": 0.0}],
        eps=AS_TORCH.adam_eps,
    )
    for step in range(4):
        rate = 0.05 / (step + 1)
        generator = torch.Generator().manual_seed(step)
        for master in masters:
            master.weight.grad = torch.randn(master.spec.shape, generator=generator)
        gradients = [up.weight.grad, down.weight.grad]
        assert qkv.weight.grad is not None
        for weight, gradient in zip(
            weights, [*gradients, *split_qkv(qkv.weight.grad)], strict=True
        ):
            weight.grad = gradient
        rest[0].grad = embedding.weight.grad
        rest[1].grad = norm.weight.grad
        for group in [*muon.param_groups, *adamw.param_groups]:
            group["lr"] = rate
        muon.step()
        adamw.step()
        ours.step(rate)
    found = [up.weight, down.weight, *split_qkv(qkv.weight.data), embedding.weight, norm.weight]
    for mine, other in zip(found, [*weights, *rest], strict=True):
        torch.testing.assert_close(mine.data, other.data, rtol=1e-6, atol=1e-6)
    assert ours.get_kinds(qkv) == ("momentum",)
    assert ours.get_kinds(embedding) == ours.get_kinds(norm) == ("exp_avg", "exp_avg_sq")
    ours.reset()
    assert ours.step_count == 0
    assert not ours.get_moment(qkv, "momentum").any()


@pytest.mark.parametrize(
    ("coefficients", "low", "high"), [("simple", 0.6, 1.3), ("quintic", 0.85, 1.15)]
)
@pytest.mark.parametrize("shape", [(30, 12), (12, 30), (12, 12)])
def test_singular_values_come_near_1(
    coefficients: str, low: float, high: float, shape: tuple[int, int]
) -> None:
    left, _ = torch.linalg.qr(torch.randn(shape[0], 12))
    right, _ = torch.linalg.qr(torch.randn(shape[1], 12))
    matrix = left @ torch.diag(torch.linspace(0.5, 40, 12)) @ right.T
    result = orthogonalise(matrix, 5, coefficients)
    values = torch.linalg.svdvals(result)[:12]
    assert low < float(values.min()) <= float(values.max()) < high
    # The singular vectors stay.
    core = left.T @ result @ right
    torch.testing.assert_close(core, torch.diag(core.diagonal()), rtol=0, atol=1e-4)
    in_bf16 = orthogonalise(matrix.bfloat16(), 5, coefficients).float()
    assert float((in_bf16 - result).norm() / result.norm()) < 0.05


def test_scales_are_those_of_megatron_and_torch() -> None:
    config = replace(AS_TORCH, muon_extra_scale_factor=0.2)
    scales = {
        mode: (compute_scale(90, 10, changed), compute_scale(10, 90, changed))
        for mode in ("spectral", "shape_scaling", "unit_rms_norm")
        for changed in [replace(config, muon_scale_mode=mode)]
    }
    assert scales["spectral"] == pytest.approx((0.2 * 90**0.5, 0.2 * 90**0.5))
    assert scales["shape_scaling"] == pytest.approx((0.6, 0.2))
    assert scales["unit_rms_norm"] == pytest.approx((0.6, 0.2 / 3))


@pytest.mark.parametrize("shard_dim", [0, 1])
@pytest.mark.parametrize(("data", "tensor"), [(1, 1), (1, 4), (3, 1), (3, 2), (8, 2)])
def test_parts_cover_a_matrix_once(shard_dim: int, data: int, tensor: int) -> None:
    # Rows that three and eight ranks do not divide, so that some have fewer or none.
    seen = torch.zeros(20, 12)
    parts = list_parts((20, 12), shard_dim, data, tensor)
    for part in parts:
        seen[part.index] += 1
    assert len(parts) == data * tensor
    assert torch.equal(seen, torch.ones(20, 12))
    assert list_parts((20, 12), None, 1, 2) == (Part((0, 0), (20, 12)),) * 2


def test_blocks_of_a_fused_projection_are_queries_keys_and_values() -> None:
    fused = torch.arange(48).unsqueeze(1).expand(48, 24)
    for places, expected in zip(list_blocks(QKV, 48, SHAPE), split_qkv(fused), strict=True):
        assert torch.equal(torch.cat([fused[rows] for rows in places]), expected)
    (whole,) = list_blocks("blocks.0.mlp.up.weight", 40, SHAPE)
    assert list(whole) == [slice(0, 40)]


def test_owners_have_about_the_same_work() -> None:
    # 8 layers: fused projection, output, and two matrices of the feed-forward network.
    work = [36, 16, 52, 52] * 8
    for ranks in (1, 2, 3, 8, 16):
        owners = assign_owners(work, ranks)
        load = [sum(w for w, o in zip(work, owners, strict=True) if o == r) for r in range(ranks)]
        least = max(max(work), sum(work) / ranks)
        assert max(load) <= 4 / 3 * least
        assert sum(load) == sum(work)
    # More ranks than matrices leave some without work.
    assert sorted(assign_owners([1, 1], 4)) == [0, 1]
    assert assign_owners([], 4) == []

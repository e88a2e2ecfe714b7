"""Tests of AdamW against torch's, and of the gradient norm against fp64."""

import pytest
import torch
from torch import nn

from megatron.config.optimizer import OptimizerConfig
from megatron.engine.optimizer import AdamW, MasterParameter, compute_squared_norm, count_zeros
from megatron.engine.parallelize import shard_offset
from megatron.parallel.layers import Init, ParameterSpec


def make_masters() -> list[MasterParameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"matrix": (5, 3), "bias": (5,)}
    parameters = {
        name: nn.Parameter(torch.randn(shape, generator=generator))
        for name, shape in shapes.items()
    }
    return [
        MasterParameter(name, ParameterSpec(tuple(p.shape), Init.NORMAL), (0,) * p.dim(), p, p)
        for name, p in parameters.items()
    ]


def test_adamw_equals_torchs_with_decay_on_matrices_only() -> None:
    ours = make_masters()
    config = OptimizerConfig(weight_decay=0.1, adam_beta2=0.95, adam_eps=1e-6)
    optimizer = AdamW(ours, config)
    theirs = [nn.Parameter(m.weight.detach().clone()) for m in ours]
    reference = torch.optim.AdamW(
        [
            {"params": [theirs[0]], "weight_decay": 0.1},
            {"params": [theirs[1]], "weight_decay": 0.0},
        ],
        lr=0.1,
        betas=(0.9, 0.95),
        eps=1e-6,
    )
    for step in range(5):
        rate = 0.1 / (step + 1)
        for mine, other in zip(ours, theirs, strict=True):
            mine.weight.grad = torch.randn(
                other.shape, generator=torch.Generator().manual_seed(step)
            )
            other.grad = mine.weight.grad.clone()
        for group in reference.param_groups:
            group["lr"] = rate
        reference.step()
        optimizer.step(rate)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.weight, other, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(
            optimizer.get_moment(mine, "exp_avg_sq"), reference.state[other]["exp_avg_sq"]
        )
    assert optimizer.step_count == 5


@pytest.mark.parametrize("decay_embeddings", [True, False])
def test_the_configuration_decides_whether_embeddings_decay(decay_embeddings: bool) -> None:
    def make(name: str, shape: tuple[int, ...]) -> MasterParameter:
        parameter = nn.Parameter(torch.ones(shape))
        spec = ParameterSpec(shape, Init.NORMAL)
        offset = (0,) * len(shape)
        return MasterParameter(name, spec, offset, parameter, parameter, decay_embeddings)

    embeddings = [make("embedding.word.weight", (4, 3)), make("embedding.position", (4, 3))]
    others = [make("head.weight", (4, 3)), make("blocks.0.mlp.up.weight", (4, 3))]
    vectors = [make("embedding.norm.weight", (3,)), make("head.norm.weight", (3,))]
    assert [m.decays for m in embeddings] == [decay_embeddings] * 2
    assert [m.decays for m in others] == [True, True]
    assert [m.decays for m in vectors] == [False, False]


def test_a_reset_optimizer_equals_a_new_one() -> None:
    one = make_masters()
    two = make_masters()
    used = AdamW(one, OptimizerConfig())
    new = AdamW(two, OptimizerConfig())
    for master in one:
        master.weight.grad = torch.ones_like(master.weight)
    used.step(0.1)
    used.reset()
    for a, b in zip(one, two, strict=True):
        a.weight.data.copy_(b.weight.data)
        a.weight.grad = b.weight.grad = torch.full_like(a.weight, 0.3)
    used.step(0.1)
    new.step(0.1)
    assert all(torch.equal(a.weight, b.weight) for a, b in zip(one, two, strict=True))


def test_the_norm_is_right_to_seven_digits() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.rand(5088, 64, generator=generator) ** 4 * 0.01,
        torch.randn(100, generator=generator),
    ]
    exact = sum(t.double().square().sum() for t in tensors)
    assert compute_squared_norm(tensors).item() == pytest.approx(float(exact), rel=1e-7)
    assert compute_squared_norm([]).item() == 0


def test_zeros_are_counted() -> None:
    assert count_zeros([torch.tensor([0.0, 1.0, -0.0]), torch.zeros(2, 2)]).item() == 6
    assert count_zeros([]).item() == 0


def test_shard_offsets_are_those_of_torch_chunk() -> None:
    for rows in (1, 3, 8, 10):
        for ranks in (1, 2, 4):
            parts = torch.chunk(torch.arange(rows), ranks)
            offsets = [int(part[0]) for part in parts]
            assert [shard_offset(rows, rank, ranks) for rank in range(len(parts))] == offsets
            assert all(shard_offset(rows, rank, ranks) == rows for rank in range(len(parts), ranks))

"""Tests of the optimizers against torch's and papers, and of the gradient norm against fp64."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.config.optimizer import OptimizerConfig
from megatron.engine import ademamix
from megatron.engine import optimizer as optimizer_module
from megatron.engine.ademamix import AdEMAMix, compute_alpha, compute_beta3
from megatron.engine.muon import Muon
from megatron.engine.optimizer import (
    AdamW,
    MasterParameter,
    Optimizer,
    compute_squared_norm,
    count_zeros,
)
from megatron.engine.parallelize import shard_offset
from megatron.model.shape import ModelShape
from megatron.parallel.grid import Grid
from megatron.parallel.mesh import build_mesh
from megatron.parallel.parameter_spec import Init, ParameterSpec
from megatron.parallel.torch_private import fused_adamw_


def make_masters() -> list[MasterParameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"matrix": (5, 3), "bias": (5,)}
    parameters = {
        name: nn.Parameter(torch.randn(shape, generator=generator))
        for name, shape in shapes.items()
    }
    return [
        MasterParameter(
            name,
            ParameterSpec(tuple(p.shape), Init.NORMAL, decays=p.dim() > 1),
            (0,) * p.dim(),
            p,
            p,
        )
        for name, p in parameters.items()
    ]


def test_adamw_is_given_no_empty_shard() -> None:
    masters = make_masters()
    empty = nn.Parameter(torch.zeros(0, 3))
    spec = ParameterSpec((2, 3), Init.NORMAL, decays=True)
    masters.insert(0, MasterParameter("empty", spec, (2, 0), empty, empty))
    optimizer = AdamW(masters, OptimizerConfig(weight_decay=0.1))
    given = [weight for group in optimizer._groups for weight in group["params"]]
    assert [weight.shape for weight in given] == [(5, 3), (5,)]
    for master in masters:
        master.weight.grad = torch.ones_like(master.weight)
    optimizer.step(0.1)
    # A checkpoint has states of all parameters.
    assert [optimizer.get_moment(m, "exp_avg").shape for m in masters] == [(0, 3), (5, 3), (5,)]


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
        spec = ParameterSpec(shape, Init.NORMAL, decays=len(shape) > 1)
        offset = (0,) * len(shape)
        return MasterParameter(name, spec, offset, parameter, parameter, decay_embeddings)

    embeddings = [make("embedding.word.weight", (4, 3)), make("embedding.position", (4, 3))]
    others = [make("head.weight", (4, 3)), make("blocks.0.mlp.up.weight", (4, 3))]
    vectors = [make("embedding.norm.weight", (3,)), make("head.norm.weight", (3,))]
    assert [m.decays for m in embeddings] == [decay_embeddings] * 2
    assert [m.decays for m in others] == [True, True]
    assert [m.decays for m in vectors] == [False, False]


RATE, DECOUPLED_RATE = 0.1, 0.03
DECOUPLED = ("embedding.word.weight", "head.weight")


def make_model_masters() -> list[MasterParameter]:
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.word.weight": (6, 4),
        "embedding.position.weight": (5, 4),
        "blocks.0.mlp.up.weight": (8, 4),
        "blocks.0.mlp.up.bias": (8,),
        "head.norm.weight": (4,),
        "head.weight": (6, 4),
    }
    generator = torch.Generator().manual_seed(0)
    masters = []
    for name, shape in shapes.items():
        weight = nn.Parameter(torch.randn(shape, generator=generator))
        spec = ParameterSpec(shape, Init.NORMAL, decays=len(shape) > 1)
        masters.append(MasterParameter(name, spec, (0,) * len(shape), weight, weight))
    return masters


def test_a_decoupled_rate_is_a_parameter_group_of_torchs_adamw() -> None:
    ours = make_model_masters()
    theirs = {m.name: nn.Parameter(m.weight.detach().clone()) for m in ours}
    optimizer = AdamW(ours, OptimizerConfig(weight_decay=0.1))
    matrices = ["embedding.position.weight", "blocks.0.mlp.up.weight"]
    vectors = [name for name, weight in theirs.items() if weight.dim() == 1]
    reference = torch.optim.AdamW(
        [
            {"params": [theirs[name] for name in DECOUPLED], "weight_decay": 0.1},
            {"params": [theirs[name] for name in matrices], "weight_decay": 0.1},
            {"params": [theirs[name] for name in vectors], "weight_decay": 0.0},
        ]
    )
    for step in range(1, 6):
        generator = torch.Generator().manual_seed(step)
        for mine in ours:
            mine.weight.grad = torch.randn(mine.spec.shape, generator=generator)
            theirs[mine.name].grad = mine.weight.grad.clone()
        rates = [DECOUPLED_RATE / step, RATE / step, RATE / step]
        for group, rate in zip(reference.param_groups, rates, strict=True):
            group["lr"] = rate
        reference.step()
        optimizer.step(RATE / step, DECOUPLED_RATE / step)
    for mine in ours:
        torch.testing.assert_close(mine.weight, theirs[mine.name], rtol=1e-6, atol=1e-7)


FP32 = OptimizerConfig(weight_decay=0.1, muon_fp32_matmul_prec="high")


def build(masters: list[MasterParameter], name: str, config: OptimizerConfig = FP32) -> Optimizer:
    if name == "adam":
        return AdamW(masters, config)
    if name == "ademamix":
        return AdEMAMix(masters, config)
    shape = ModelShape(
        ModelConfig(num_layers=1, hidden_size=4, num_attention_heads=1, seq_length=5), 6, 6
    )
    return Muon(masters, config, shape, build_mesh(Grid(1, 1, 1), torch.device("cpu")))


@pytest.mark.parametrize("name", ["ademamix", "muon"])
def test_a_decoupled_rate_equals_an_optimizer_of_its_own(name: str) -> None:
    together = make_model_masters()
    apart = make_model_masters()
    optimizer = build(together, name)
    decoupled = build([m for m in apart if m.name in DECOUPLED], name)
    others = build([m for m in apart if m.name not in DECOUPLED], name)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for one, two in zip(together, apart, strict=True):
            one.weight.grad = torch.randn(one.spec.shape, generator=generator)
            two.weight.grad = one.weight.grad.clone()
        optimizer.step(RATE, DECOUPLED_RATE)
        decoupled.step(DECOUPLED_RATE)
        others.step(RATE)
    for one, two in zip(together, apart, strict=True):
        assert torch.equal(one.weight, two.weight), one.name


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


def descend(optimizer: Optimizer, others: Iterable[nn.Parameter], steps: int) -> Iterator[float]:
    """Give both the same gradients, and take our step. Yield the learning rate of each step."""
    for step in range(steps):
        rate = 0.1 / (step + 1)
        generator = torch.Generator().manual_seed(step)
        for mine, other in zip(optimizer.masters, others, strict=True):
            other.grad = torch.randn(other.shape, generator=generator)
            mine.weight.grad = other.grad.clone()
        optimizer.step(rate)
        yield rate


def ademamix_of_the_paper(
    weight: Tensor, gradients: list[Tensor], rates: list[float], decay: float, warmup: int
) -> Tensor:
    """Compute algorithm 1 of arXiv:2409.03137 in fp64, with its schedules of section 3."""
    b1, b2, b3, alpha, eps = 0.8, 0.95, 0.999, 8.0, 1e-6
    weight = weight.double()
    fast = slow = squares = torch.zeros_like(weight)
    for t, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        g = gradient.double()
        now = min(t * alpha / warmup, alpha)
        logs = math.log(b1), math.log(b3)
        if t < warmup:
            mixed = (1 - t / warmup) * logs[1] + t / warmup * logs[0]
            beta3 = min(math.exp(logs[0] * logs[1] / mixed), b3)
        else:
            beta3 = b3
        fast = b1 * fast + (1 - b1) * g
        slow = beta3 * slow + (1 - beta3) * g
        squares = b2 * squares + (1 - b2) * g * g
        corrected = fast / (1 - b1**t) + now * slow
        denominator = (squares / (1 - b2**t)).sqrt() + eps
        weight = weight - rate * (corrected / denominator + decay * weight)
    return weight


ADEMAMIX = OptimizerConfig(
    optimizer="ademamix",
    weight_decay=0.1,
    adam_beta1=0.8,
    adam_beta2=0.95,
    adam_eps=1e-6,
    ademamix_alpha=8.0,
    ademamix_beta3=0.999,
)


@pytest.mark.parametrize("warmup", [1, 6, 1000])
def test_ademamix_equals_the_formula_of_its_paper(warmup: int) -> None:
    masters = make_masters()
    before = [m.weight.detach().clone() for m in masters]
    config = replace(ADEMAMIX, ademamix_alpha_warmup=warmup, ademamix_beta3_warmup=warmup)
    optimizer = AdEMAMix(masters, config)
    others = [nn.Parameter(weight.clone()) for weight in before]
    gradients: list[list[Tensor]] = []
    rates = []
    for rate in descend(optimizer, others, 12):
        rates.append(rate)
        gradients.append([other.grad for other in others if other.grad is not None])
    for i, master in enumerate(masters):
        decay = 0.1 if master.name == "matrix" else 0.0
        expected = ademamix_of_the_paper(
            before[i], [step[i] for step in gradients], rates, decay, warmup
        )
        torch.testing.assert_close(master.weight.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("warmup", [None, 7])
def test_ademamix_equals_the_pytorch_optimizer_package(warmup: int | None) -> None:
    package = pytest.importorskip("pytorch_optimizer")
    masters = make_masters()
    config = replace(ADEMAMIX, ademamix_alpha_warmup=warmup, ademamix_beta3_warmup=warmup)
    optimizer = AdEMAMix(masters, config)
    others = [nn.Parameter(m.weight.detach().clone()) for m in masters]
    reference = package.AdEMAMix(
        [
            {"params": [others[0]], "weight_decay": 0.1},
            {"params": [others[1]], "weight_decay": 0.0},
        ],
        lr=0.1,
        betas=(0.8, 0.95, 0.999),
        alpha=8.0,
        t_alpha_beta3=warmup,
        eps=1e-6,
        weight_decouple=True,
    )
    for rate in descend(optimizer, others, 12):
        for group in reference.param_groups:
            group["lr"] = rate
        reference.step()
    for mine, other in zip(masters, others, strict=True):
        torch.testing.assert_close(mine.weight, other, rtol=1e-5, atol=1e-6)


def test_ademamix_without_memory_and_without_warm_up() -> None:
    at = [1, 50, 99, 100, 500]
    falling = replace(ADEMAMIX, ademamix_beta3_warmup=100)
    rising = [compute_beta3(falling, step) for step in at]
    assert rising == sorted(rising)
    assert 0.8 < rising[0] < rising[2] < rising[3] == rising[4] == 0.999
    # Half-lives are equally far apart.
    half_lives = [math.log(0.5) / math.log(compute_beta3(falling, step)) for step in (25, 50, 75)]
    assert half_lives[1] - half_lives[0] == pytest.approx(half_lives[2] - half_lives[1])
    assert [compute_alpha(ADEMAMIX, step) for step in at] == [8.0] * 5
    assert [compute_beta3(ADEMAMIX, step) for step in at] == [0.999] * 5
    # 0 has no logarithm. A first rate of 0 means no memory.
    none = replace(falling, adam_beta1=0.0)
    assert compute_beta3(none, 50) == pytest.approx(0.999**2)
    assert compute_beta3(replace(none, ademamix_beta3=0.0), 50) == 0.0


def test_ademamix_updates_in_batches_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for limit in (1, 1 << 24):
        monkeypatch.setattr(ademamix, "PIECE", limit)
        masters = make_masters()
        optimizer = AdEMAMix(masters, ADEMAMIX)
        list(descend(optimizer, [nn.Parameter(m.weight.detach().clone()) for m in masters], 3))
        results.append([m.weight.detach() for m in masters])
    for small, large in zip(*results, strict=True):
        torch.testing.assert_close(small, large, rtol=1e-6, atol=1e-7)


BF16 = OptimizerConfig(
    weight_decay=0.1,
    adam_beta2=0.95,
    exp_avg_dtype="bf16",
    exp_avg_sq_dtype="bf16",
    muon_fp32_matmul_prec="high",
)


@pytest.mark.parametrize("name", ["adam", "ademamix", "muon"])
@pytest.mark.parametrize("dtypes", [("bf16", "bf16"), ("fp32", "bf16"), ("bf16", "fp32")])
def test_moments_in_bf16_are_those_of_fp32_rounded_after_each_step(
    name: str, dtypes: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference is the fp32 optimizer, whose moments the test rounds after each step."""
    # Some parameters are divided, and others are updated together.
    for module in (ademamix, optimizer_module):
        monkeypatch.setattr(module, "PIECE", 7)
    changes: dict[str, Any] = {"exp_avg_dtype": dtypes[0], "exp_avg_sq_dtype": dtypes[1]}
    masters, expected = make_model_masters(), make_model_masters()
    rounded = build(masters, name, replace(BF16, **changes))
    reference = build(expected, name, replace(BF16, exp_avg_dtype="fp32", exp_avg_sq_dtype="fp32"))
    kept_in_bf16 = {"exp_avg": dtypes[0], "momentum": dtypes[0], "exp_avg_sq": dtypes[1]}
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        for one, two in zip(masters, expected, strict=True):
            one.weight.grad = torch.randn(one.spec.shape, generator=generator)
            two.weight.grad = one.weight.grad.clone()
        rounded.step(RATE, DECOUPLED_RATE, 0.3)
        reference.step(RATE, DECOUPLED_RATE, 0.3)
        for one, two in zip(masters, expected, strict=True):
            torch.testing.assert_close(one.weight, two.weight, rtol=1e-6, atol=1e-7)
            two.weight.data.copy_(one.weight.data)
            for kind in reference.get_kinds(two):
                moment = reference.get_moment(two, kind)
                stored = rounded.get_moment(one, kind)
                if kept_in_bf16.get(kind) == "bf16":
                    assert stored.dtype == torch.bfloat16
                    moment.copy_(moment.bfloat16())
                    # The last bit may differ where torch's code for single elements rounds
                    # otherwise.
                    torch.testing.assert_close(stored.float(), moment, rtol=2**-7, atol=0)
                else:
                    assert stored.dtype == torch.float32
                    torch.testing.assert_close(stored, moment, rtol=1e-6, atol=1e-9)
                moment.copy_(stored)


def test_a_gradient_factor_is_the_grad_scale_of_torchs_operator() -> None:
    """On a GPU the operator divides by it. On a CPU both ways can be compared."""
    masters, divided = make_model_masters(), make_model_masters()
    factor = 0.3 / 1024
    ours = AdamW(masters, OptimizerConfig())
    for one, two in zip(masters, divided, strict=True):
        one.weight.grad = torch.randn(one.spec.shape, generator=torch.Generator().manual_seed(5))
        two.weight.grad = one.weight.grad.clone()
    ours.step(RATE, None, factor)
    moments = [[torch.zeros_like(m.weight) for m in divided] for _ in range(2)]
    fused_adamw_(
        [m.weight.data for m in divided],
        [m.weight.grad for m in divided],
        *moments,
        [],
        [torch.ones(()) for _ in divided],
        lr=RATE,
        beta1=0.9,
        beta2=0.999,
        weight_decay=0.0,
        eps=1e-8,
        amsgrad=False,
        maximize=False,
        grad_scale=torch.tensor(1.0 / factor),
    )
    for one, moment in zip(masters, moments[0], strict=True):
        torch.testing.assert_close(ours.get_moment(one, "exp_avg"), moment, rtol=3e-7, atol=0)

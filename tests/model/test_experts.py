"""Tests of mixtures of experts against transformers, formulas, and memory that is not a number."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from model.builders import build, some_tokens, tiny_config
from torch import Tensor, nn

from megatron.config.loss import LossConfig
from megatron.config.model import ModelConfig
from megatron.model.experts.grouped import multiply_by_expert
from megatron.model.experts.layer import MixtureMLP
from megatron.model.experts.routing import Router, Routing, choose_experts, find_best
from megatron.model.gpt import GPT
from megatron.model.inputs import Inputs
from megatron.model.recompute import Recomputation
from megatron.model.shape import ModelShape
from megatron.parallel.mesh import ContextParallel, ExpertParallel, TensorParallel

CPU = torch.device("cpu")
SIZES = {
    "num_experts": 12,
    "moe_router_topk": 4,
    "moe_ffn_hidden_size": 20,
    "glu_activation": "swiglu",
    "add_bias_linear": False,
}


def make_mixture(loss: LossConfig | None = None, **changes: object) -> MixtureMLP:
    """Return a layer with large random weights."""
    shape = ModelShape(tiny_config(**(SIZES | changes)), 100, 128)
    tp, context, ranks = TensorParallel(), ContextParallel(), ExpertParallel()
    layer = MixtureMLP(shape, 0, loss or LossConfig(), tp, context, ranks)
    generator = torch.Generator().manual_seed(3)
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    layer.router.allocate(CPU)
    return layer


def some_rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ---- The blocks of transformers ----

Tensors = dict[str, Tensor]


def _llama_like(layer: MixtureMLP, read: Callable[[nn.Parameter], Tensor]) -> Tensors:
    """Return our weights or gradients under the names of OLMoE, Qwen 3 and DeepSeek-V3."""
    experts = layer.experts
    assert experts.gate is not None
    gate, up = (read(each).view(12, 20, 32) for each in (experts.gate, experts.up))
    named = {
        "gate.weight": read(layer.router.weight),
        "experts.gate_up_proj": torch.cat((gate, up), dim=1),
        "experts.down_proj": read(experts.down).view(12, 32, 20),
    }
    if layer.shared is not None and layer.shared.gate is not None:
        named["shared_experts.gate_proj.weight"] = read(layer.shared.gate.weight)
        named["shared_experts.up_proj.weight"] = read(layer.shared.up.weight)
        named["shared_experts.down_proj.weight"] = read(layer.shared.down.weight)
    return named


def _gpt_oss(layer: MixtureMLP, read: Callable[[nn.Parameter], Tensor]) -> Tensors:
    """Return our weights or gradients under the names of gpt-oss."""
    experts = layer.experts
    assert experts.gate is not None
    assert experts.gate_bias is not None
    assert experts.up_bias is not None
    assert experts.down_bias is not None
    assert layer.router.bias is not None
    gate, up = (read(each).view(12, 20, 32) for each in (experts.gate, experts.up))
    biases = [read(each).view(12, 20) for each in (experts.gate_bias, experts.up_bias)]
    return {
        "router.weight": read(layer.router.weight),
        "router.bias": read(layer.router.bias),
        "experts.gate_up_proj": torch.stack((gate, up), dim=2).flatten(1, 2).transpose(1, 2),
        "experts.gate_up_proj_bias": torch.stack(biases, dim=2).flatten(1),
        "experts.down_proj": read(experts.down).view(12, 32, 20).transpose(1, 2),
        "experts.down_proj_bias": read(experts.down_bias).view(12, 32),
    }


COMMON = {"hidden_size": 32, "num_experts_per_tok": 4}
BLOCKS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], Any]] = {
    "OLMoE": (
        "Olmoe",
        "OlmoeSparseMoeBlock",
        {"num_experts": 12, "intermediate_size": 20, "norm_topk_prob": False},
        {"moe_router_pre_softmax": True},
        _llama_like,
    ),
    "Qwen 3": (
        "Qwen3Moe",
        "Qwen3MoeSparseMoeBlock",
        {"num_experts": 12, "moe_intermediate_size": 20, "norm_topk_prob": True},
        {},
        _llama_like,
    ),
    "DeepSeek-V3": (
        "DeepseekV3",
        "DeepseekV3MoE",
        {
            "n_routed_experts": 12,
            "moe_intermediate_size": 20,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
        },
        {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_num_groups": 4,
            "moe_router_group_topk": 2,
            "moe_router_topk_scaling_factor": 2.5,
            "moe_shared_expert_intermediate_size": 40,
        },
        _llama_like,
    ),
    "DeepSeek-V2": (
        "DeepseekV2",
        "DeepseekV2Moe",
        {
            "n_routed_experts": 12,
            "moe_intermediate_size": 20,
            "n_group": 4,
            "topk_group": 3,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 16.0,
        },
        {
            "moe_router_pre_softmax": True,
            "moe_router_num_groups": 4,
            "moe_router_group_topk": 3,
            "moe_router_group_score": "max",
            "moe_router_topk_scaling_factor": 16.0,
            "moe_shared_expert_intermediate_size": 40,
        },
        _llama_like,
    ),
    "gpt-oss": (
        "GptOss",
        "GptOssMLP",
        {"num_local_experts": 12, "intermediate_size": 20},
        {"add_bias_linear": True, "glu_activation": "clamped_swiglu"},
        _gpt_oss,
    ),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_the_layer_equals_that_of_transformers(name: str) -> None:
    import importlib

    family, block, theirs, ours, convert = BLOCKS[name]
    folder = {"Qwen3Moe": "qwen3_moe", "DeepseekV3": "deepseek_v3", "GptOss": "gpt_oss"}
    folder["DeepseekV2"] = "deepseek_v2"
    module = importlib.import_module(
        f"transformers.models.{(path := folder.get(family, family.lower()))}.modeling_{path}"
    )
    transformers = importlib.import_module("transformers")
    config = getattr(transformers, f"{family}Config")(**COMMON, **theirs)
    config._experts_implementation = "eager"
    other = getattr(module, block)(config).float()
    layer = make_mixture(**ours)
    tensors = convert(layer, lambda parameter: parameter.data)
    balance = some_rows(12, seed=9) * 0.1
    if layer.router.balance.numel():
        layer.router.balance.copy_(balance)
        tensors["gate.e_score_correction_bias"] = balance
    other.load_state_dict(tensors)
    # Some values are above the limits of gpt-oss.
    x = (some_rows(7, 3, 32) * 4).requires_grad_()
    y = x.detach().clone().requires_grad_()
    expected = other(y)
    expected = expected[0] if isinstance(expected, tuple) else expected
    found = layer(x, Routing(sequences=3))
    close(found, expected)
    gradient = some_rows(7, 3, 32, seed=1)
    found.backward(gradient)
    expected.backward(gradient)
    assert x.grad is not None
    assert y.grad is not None
    close(x.grad, y.grad)

    def read_gradient(parameter: nn.Parameter) -> Tensor:
        assert parameter.grad is not None
        return parameter.grad

    for key, ours_gradient in convert(layer, read_gradient).items():
        theirs_gradient = other.get_parameter(key).grad
        assert theirs_gradient is not None
        assert theirs_gradient.abs().max() > 0, key
        close(ours_gradient, theirs_gradient)


def close(found: Tensor, expected: Tensor) -> None:
    """Compare with 1e-5 of the largest value."""
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("width", [16, 18, 20])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
def test_products_without_gradients_have_the_same_bits(dtype: torch.dtype, width: int) -> None:
    """Some widths and types have one call for all experts, and some do not."""
    for counts in ((3, 0, 1, 5), (0, 0, 0, 0), (0, 0, 9, 0), (1, 1, 1, 1)):
        x = some_rows(sum(counts), width).to(dtype)
        weight = some_rows(4 * 24, width, seed=1).to(dtype).requires_grad_()
        ends = torch.tensor(counts).cumsum(0).int()
        expected = multiply_by_expert(x, weight, ends)
        with torch.no_grad():
            found = multiply_by_expert(x, weight, ends)
        assert torch.equal(found, expected.detach())


# ---- Choices ----


def test_ties_go_to_the_lower_number_and_choices_are_ascending() -> None:
    scores = torch.tensor([[0.5, 0.7, 0.5, 0.7, 0.5], [1.0, 1.0, 1.0, 1.0, 1.0]])
    assert find_best(scores, 3).tolist() == [[1, 3, 0], [0, 1, 2]]
    config = tiny_config(num_experts=5, moe_router_topk=3)
    assert choose_experts(scores, config).tolist() == [[0, 1, 3], [0, 1, 2]]


def test_only_the_best_groups_are_chosen() -> None:
    # The groups have the sums 1.0, 0.9 and 1.1 of their best two. The best expert is in none.
    scores = torch.tensor([[0.5, 0.5, 0.1, 0.9, 0.0, 0.0, 0.6, 0.5, 0.4]])
    groups = {"moe_router_num_groups": 3, "moe_router_group_topk": 2}
    config = tiny_config(num_experts=9, moe_router_topk=4, **groups)
    assert choose_experts(scores, config).tolist() == [[0, 1, 6, 7]]
    # By their best experts, the second and the third are the best groups.
    config = dataclasses.replace(config, moe_router_group_score="max")
    assert choose_experts(scores, config).tolist() == [[3, 6, 7, 8]]


# ---- Auxiliary losses ----


def balance_by_formula(
    scores: Tensor, experts: Tensor, members: list[list[int]], number: int
) -> Tensor:
    """Return the mean over sequences of E sum(f p), token by token in fp64."""
    total = scores.new_zeros(())
    for tokens in members:
        counts = torch.zeros(number, dtype=torch.float64)
        for token in tokens:
            for expert in experts[token]:
                counts[expert] += 1
        shares = counts / counts.sum()
        total = total + number * (shares * scores[tokens].mean(dim=0)).sum()
    return total / len(members)


@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss", "global_aux_loss", "none"])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_gradients_of_auxiliary_losses_equal_their_formulas(kind: str, score: str) -> None:
    loss = LossConfig(
        moe_router_load_balancing_type=kind,  # type: ignore[arg-type]
        moe_aux_loss_coeff=0.3,
        moe_z_loss_coeff=0.02,
    )
    layer = make_mixture(loss, moe_router_score_function=score)
    sequences, factor = 3, 0.25
    batches = [some_rows(7, sequences, 32, seed=seed) for seed in (1, 2)]
    for x in batches:
        # Nothing but the auxiliary losses has a gradient.
        (layer(x, Routing(factor, sequences)) * 0).sum().backward()
    weight = layer.router.weight.detach().double().requires_grad_()
    expected = weight.new_zeros(())
    seen: list[Tensor] = []
    for x in batches:
        logits = x.flatten(0, 1).double() @ weight.t()
        scores = logits.softmax(dim=1)
        if score == "sigmoid":
            scores = logits.sigmoid() / logits.sigmoid().sum(dim=1, keepdim=True)
        experts = logits.topk(4).indices
        seen.append(experts)
        rows = range(21)
        members = [list(rows)]
        if kind == "seq_aux_loss":
            members = [[row for row in rows if row % sequences == i] for i in range(sequences)]
        if kind == "global_aux_loss":
            # The choices so far, and the mean score of this microbatch.
            counts = torch.bincount(torch.cat(seen).flatten(), minlength=12).double()
            balancing = 12 * (counts / counts.sum() * scores.mean(dim=0)).sum()
        else:
            balancing = balance_by_formula(scores, experts, members, 12)
        if kind != "none":
            expected = expected + 0.3 * balancing
        expected = expected + 0.02 * logits.logsumexp(dim=1).square().mean()
    (factor * expected).backward()
    assert layer.router.weight.grad is not None
    assert weight.grad is not None
    close(layer.router.weight.grad.double(), weight.grad)


def test_balanced_choices_have_the_loss_of_one() -> None:
    layer = make_mixture(LossConfig(moe_aux_loss_coeff=1.0), moe_router_topk=12)
    layer(some_rows(5, 2, 32), Routing(sequences=2))
    assert layer.router.counts.tolist() == [10.0] * 12
    assert float(layer.router.sums[0]) == pytest.approx(1.0, rel=1e-6)


# ---- A microbatch is routed and counted once ----


def make_model(**changes: object) -> GPT:
    model = build(tiny_config(**(SIZES | changes)))
    for router in find_routers(model):
        router.allocate(CPU)
        router._loss = LossConfig(moe_aux_loss_coeff=0.1)
    return model


def find_routers(model: GPT) -> list[Router]:
    return [module for module in model.modules() if isinstance(module, Router)]


@pytest.mark.parametrize("kind", ["aux_loss", "global_aux_loss"])
def test_a_recomputation_counts_nothing_and_changes_nothing(kind: str) -> None:
    gradients = []
    for recomputes in (False, True):
        model = make_model().train()
        for router in find_routers(model):
            router._loss = dataclasses.replace(
                router._loss,
                moe_router_load_balancing_type=kind,  # type: ignore[arg-type]
            )
        if recomputes:
            for block in model.get_blocks().values():
                block.enable_recomputation(
                    Recomputation(TensorParallel(), partition=False, in_cpu=False)
                )
        # As in a pipeline, the second microbatch passes before the first one goes back.
        losses = [
            model(None, Inputs(tokens, tokens))
            for tokens in (some_tokens(3, 24, 1), some_tokens(3, 24, 2))
        ]
        counts = [router.counts.clone() for router in find_routers(model)]
        for loss in losses:
            loss.backward()
        for router, before in zip(find_routers(model), counts, strict=True):
            assert float(before.sum()) == 2 * 72 * 4
            assert torch.equal(router.counts, before)
        gradients.append(
            {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        )
    assert len(gradients[0]) == len(gradients[1]) == len(list(model.parameters()))
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


def test_a_recomputation_takes_the_choices_of_the_first_pass() -> None:
    layer = make_mixture().train()
    routing = Routing(sequences=2)
    x = some_rows(6, 2, 32)
    first = layer(x, routing)
    # A kernel that rounds otherwise may turn a choice around. This is the extreme case.
    layer.router.weight.data.neg_()
    again = layer(x, routing)
    assert torch.equal(routing.choices[0], layer.router(x.flatten(0, 1), 0, 12, routing).experts)
    assert not torch.equal(first, again)
    assert float(layer.router.counts.sum()) == 12 * 4


def test_an_evaluation_counts_nothing_and_has_no_auxiliary_loss() -> None:
    model = make_model()
    model.eval()
    tokens = some_tokens(2, 24, 1)
    evaluated = model(None, Inputs(tokens, tokens))
    assert all(float(router.counts.sum()) == 0 for router in find_routers(model))
    model.train()
    assert torch.equal(model(None, Inputs(tokens, tokens)), evaluated)


# ---- Products ----


def fill_free_memory_with_nan() -> None:
    """Let the next tensors be made of memory that has no number."""
    kept = [torch.full((size,), float("nan")) for size in (*range(64, 4096, 64), 1 << 16) * 2]
    del kept


@pytest.mark.parametrize("counts", [(3, 0, 5, 0), (0, 0, 0, 8), (8, 0, 0, 0), (0, 0, 0, 0)])
def test_grouped_products_equal_single_ones_and_read_no_other_memory(
    counts: tuple[int, ...],
) -> None:
    x = some_rows(sum(counts), 6).requires_grad_()
    weight = some_rows(4 * 5, 6, seed=2).requires_grad_()
    ends = torch.tensor(counts).cumsum(0).int()
    fill_free_memory_with_nan()
    out = multiply_by_expert(x, weight, ends)
    fill_free_memory_with_nan()
    # The gradient of a sum is expanded. Its strides are 0.
    out.sum().backward()
    pieces = zip(x.detach().split(counts), weight.detach().view(4, 5, 6), strict=True)
    assert x.grad is not None
    assert weight.grad is not None
    torch.testing.assert_close(out.detach(), torch.cat([a @ b.t() for a, b in pieces]))
    gradients = [a.sum(0).expand(5, 6) for a in x.detach().split(counts)]
    torch.testing.assert_close(weight.grad.view(4, 5, 6), torch.stack(gradients))
    sums = weight.detach().view(4, 5, 6).sum(dim=1)
    torch.testing.assert_close(x.grad, sums.repeat_interleave(torch.tensor(counts), dim=0))


def test_all_tokens_may_choose_one_expert() -> None:
    layer = make_mixture(moe_router_topk=1)
    layer.router.weight.data.zero_()
    fill_free_memory_with_nan()
    x = some_rows(5, 1, 32).requires_grad_()
    layer(x, Routing()).sum().backward()
    assert layer.router.counts.tolist() == [5.0] + [0.0] * 11
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    of_experts = layer.experts.up.grad
    assert of_experts is not None
    assert of_experts.view(12, -1)[1:].abs().max() == 0


@pytest.mark.parametrize(
    ("frequency", "layers"),
    [("1", {0, 1, 2, 3}), ("2", {0, 2}), ("([0]*1+[1]*3)", {1, 2, 3}), ("[0,1]*2", {1, 3})],
)
def test_layers_with_experts(frequency: str, layers: set[int]) -> None:
    config = tiny_config(num_layers=4, num_experts=4, moe_layer_freq=frequency)
    assert ModelShape(config, 100, 128).expert_layers == layers
    model = build(config)
    found = {n for n, block in model.get_blocks().items() if isinstance(block.mlp, MixtureMLP)}
    assert found == layers


def count(config: ModelConfig) -> int:
    return sum(parameter.numel() for parameter in build(config).parameters())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"add_bias_linear": True, "moe_layer_freq": "[0,1]"},
        {"moe_shared_expert_intermediate_size": 8, "moe_shared_expert_gate": True},
        {"add_bias_linear": True, "moe_shared_expert_intermediate_size": 8, "glu_activation": None},
    ],
    ids=str,
)
def test_counts_of_parameters_equal_those_of_the_model(changes: dict[str, object]) -> None:
    from megatron.model.flops import count_parameters

    config = tiny_config(**(SIZES | changes))
    assert count_parameters(ModelShape(config, 100, 128)) == count(config)

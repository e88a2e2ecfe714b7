"""Tests of products in float8 in compiled layers, with a compiler that generates no code.

The operators of compiled graphs have the same bits as the functions of other layers.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from model.test_compile import count_graphs, pair, step
from torch import nn

from megatron.extras.step.float8.engine import list_linear_paths
from megatron.extras.step.float8.products import Float8Products
from megatron.extras.step.float8.recipe import Recipe
from megatron.extras.step.float8.rounding import find_largest
from megatron.extras.step.float8.weight_scales import WeightScale
from megatron.model.gpt import GPT
from megatron.parallel.entered_linear import ALONE, apply_entered_linears
from megatron.parallel.parameter_spec import Piece
from megatron.parallel.weight_gradient import number_layer

TENSORWISE = Recipe("hybrid", rowwise=False, emulated=True)
ROWWISE = Recipe("e4m3", rowwise=True, emulated=True)


@pytest.fixture(autouse=True)
def no_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replace the compiler by one that only traces."""
    compile_with = torch.compile

    def trace(function: Any, **options: Any) -> Any:
        return compile_with(function, backend="aot_eager", **options)

    monkeypatch.setattr(torch, "compile", trace)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def make_products(recipe: Recipe, *weights: torch.Tensor) -> Float8Products:
    """Return the products of layers of one process."""
    scales = [
        WeightScale(
            find_largest(weight.detach(), by_row=recipe.rowwise).flatten(),
            (Piece(0, 0, len(weight)),),
        )
        for weight in weights
    ]
    return Float8Products(recipe, tuple(scales), (), (), keeps_input=not recipe.rowwise)


@pytest.mark.parametrize(
    ("recipe", "fused"), list(product((TENSORWISE, ROWWISE), (False, True))), ids=str
)
def test_operators_have_the_same_bits(recipe: Recipe, fused: bool) -> None:
    """Two layers with the same input and a bias. Fused gradients are added to the leaves."""
    torch.manual_seed(0)
    layers = [nn.Linear(16, width, dtype=torch.bfloat16) for width in (24, 32)]
    for layer in layers:
        layer.weight.grad_dtype = torch.float32
    weights = [layer.weight for layer in layers]
    products = make_products(recipe, *weights)
    numbers = [number_layer(layer) for layer in layers if fused]
    pairs = [(layer.weight, layer.bias) for layer in layers]

    def compute(x: torch.Tensor, products: Float8Products) -> tuple[torch.Tensor, ...]:
        return apply_entered_linears(x, pairs, ALONE, numbers=numbers, products=products)

    start = torch.randn(6, 2, 16, dtype=torch.bfloat16)
    results = []
    for function in (compute, torch.compile(compute)):
        x = start.clone().requires_grad_()
        outs = function(x, products)
        torch.stack([out.float().square().sum() for out in outs]).sum().backward()
        leaves = [x, *(leaf for layer in layers for leaf in layer.parameters())]
        results.append([*outs, *(leaf.grad for leaf in leaves)])
        for layer in layers:
            layer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert count_graphs() == 1


def use_float8(model: GPT, recipe: Recipe) -> list[Float8Products]:
    """Let all layers of a model multiply in float8."""
    used = []
    for block in model.get_blocks().values():
        for paths in list_linear_paths(block):
            linears: list[Any] = [block.get_submodule(path) for path in paths]
            products = make_products(recipe, *(linear.weight for linear in linears))
            linears[0].products = products
            used.append(products)
    return used


def test_layers_share_graphs_in_float8() -> None:
    """A run that switches to float8 gets one more graph, however many layers it has."""
    eager, compiled = pair("gpt2", num_layers=5)
    step(compiled)
    assert count_graphs() == 1
    products = [use_float8(model, TENSORWISE) for model in (eager, compiled)]
    assert len(products[0]) == 20
    for number in (1, 2):
        found = step(compiled, number)
        assert all(torch.equal(a, b) for a, b in zip(found, step(eager, number), strict=True))
    assert count_graphs() == 2

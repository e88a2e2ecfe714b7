"""Tests of products in float8: rounding, odd sizes, extreme values, and gradients of layers."""

import math

import pytest
import torch
import torch.nn.functional as F
from process_pool import ProcessPool, succeed
from torch import Tensor

from megatron.extras.step.float8.engine import choose_loss_scale
from megatron.extras.step.float8.products import Float8Products
from megatron.extras.step.float8.recipe import Recipe
from megatron.extras.step.float8.rounding import find_largest, multiply_rounded, round_to_float8
from megatron.extras.step.float8.weight_scales import WeightScale
from megatron.parallel.entered_linear import ALONE, apply_entered_linears
from megatron.parallel.grid import Grid
from megatron.parallel.parameter_spec import Piece
from megatron.parallel.weight_gradient import number_layer

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
RECIPES = [
    Recipe(kind, rowwise=rowwise, emulated=True)
    for kind in ("e4m3", "hybrid")
    for rowwise in (False, True)
]


@pytest.mark.parametrize("total", [1, 3, 6, 7, 24])
def test_gradients_of_activations_have_one_factor(total: int) -> None:
    """The factor of a token's loss, for each division of a batch over ranks."""
    factors = set()
    for data in (1, 2, 3, 7):
        for context in (1, 2, 4):
            microbatches, rest = divmod(total, data)
            if rest == 0:
                scale = choose_loss_scale(microbatches, Grid(1, data, 1, context))
                # A rank divides the scaled loss by its microbatches. A token's part of the mean of
                # a context-parallel rank is larger by the number of these ranks.
                factors.add(scale / microbatches * context)
    (factor,) = factors
    assert math.frexp(factor)[0] == 0.5
    assert factor <= 1 / total < 2 * factor


def round_matrix(x: Tensor, dtype: torch.dtype, *, by_row: bool = False) -> Tensor:
    """Return a matrix after rounding, in fp32."""
    rounded = round_to_float8(x, find_largest(x, by_row=by_row), dtype)
    return rounded.values.float() * rounded.inverse


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_a_matrix_in_bf16_is_rounded_as_in_fp32(dtype: torch.dtype) -> None:
    """This holds for every number of bf16, with the scales of all largest values."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    numbers = numbers[numbers.isfinite()]
    for exponent in range(-133, 128, 9):
        x = numbers[numbers.abs() < 2.0**exponent].reshape(1, -1)
        largest = find_largest(x, by_row=False)
        half, single = (round_to_float8(each, largest, dtype) for each in (x, x.float()))
        assert torch.equal(half.values.view(torch.uint8), single.values.view(torch.uint8))
        # With values that a clamp has kept in the range, nothing changes.
        top = torch.finfo(dtype).max
        clamped = (x.float() / single.inverse).clamp(-top, top).to(dtype)
        assert torch.equal(half.values.view(torch.uint8), clamped.view(torch.uint8))


@pytest.mark.parametrize(("dtype", "digits"), [(E4M3, 3), (E5M2, 2)])
@pytest.mark.parametrize("by_row", [False, True])
def test_scales_are_powers_of_two(dtype: torch.dtype, digits: int, by_row: bool) -> None:
    for exponent in range(-36, 128, 7):
        x = torch.rand(7, 24) * 2.0**exponent
        largest = find_largest(x, by_row=by_row)
        rounded = round_to_float8(x, largest, dtype)
        assert torch.equal(torch.frexp(rounded.inverse)[0], torch.full_like(largest, 0.5))
        # The largest value is in the upper half of the range, and is not cut off.
        top = (largest / rounded.inverse).max()
        assert torch.finfo(dtype).max / 2 < top <= torch.finfo(dtype).max * (1 + 1e-6)
        near = x > largest / 8
        error = ((round_matrix(x, dtype, by_row=by_row) - x).abs() / x)[near]
        assert error.max() <= 2.0 ** -(digits + 1)


def test_extreme_values() -> None:
    zeros = torch.zeros(3, 16)
    assert torch.equal(round_matrix(zeros, E4M3), zeros)
    huge = torch.tensor([[3e38, 1.0, 3e37]])
    rounded = round_matrix(huge, E4M3)
    assert rounded[0, 1] == 0.0
    assert rounded[0, 0] == pytest.approx(3e38, rel=2.0**-4)
    for wrong in (math.inf, -math.inf, math.nan):
        x = torch.ones(2, 16)
        x[0, 3] = wrong
        a = round_to_float8(x, find_largest(x, by_row=False), E5M2)
        b = round_to_float8(zeros, find_largest(zeros, by_row=False), E4M3)
        product = multiply_rounded(a, b.t(), torch.float32, emulated=True, fast=False)
        assert not product.isfinite().any()


@pytest.mark.parametrize("sizes", [(16, 32, 48), (7, 40, 24), (1, 8, 5)])
@pytest.mark.parametrize("rows", [(False, False), (True, True), (True, False)])
def test_the_operator_of_gpus_gives_the_same_numbers(
    sizes: tuple[int, int, int], rows: tuple[bool, bool]
) -> None:
    """PyTorch has it on CPUs too. Sizes that are no multiples of 16 are padded."""
    m, k, n = sizes
    a, b = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16() * 1e-3
    left = round_to_float8(a, find_largest(a, by_row=rows[0]), E4M3)
    right = round_to_float8(b, find_largest(b, by_row=rows[1]), E4M3).t()
    exact = multiply_rounded(left, right, torch.float32, emulated=True, fast=True)
    emulated = multiply_rounded(left, right, torch.bfloat16, emulated=True, fast=True)
    found = multiply_rounded(left, right, torch.bfloat16, emulated=False, fast=True)
    assert found.shape == (m, n)
    torch.testing.assert_close(emulated.float(), exact, rtol=2.0**-8, atol=1e-9)
    torch.testing.assert_close(found.float(), exact, rtol=2.0**-8, atol=1e-9)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_gradients_are_those_of_rounded_operands(recipe: Recipe) -> None:
    """Two layers with the same input and a bias. autograd differentiates the reference."""
    torch.manual_seed(0)
    x = torch.randn(6, 2, 16)
    weights = [torch.randn(24, 16), torch.randn(32, 16)]
    biases = [torch.randn(24), torch.randn(32)]
    grads = [torch.randn(6, 2, 24), torch.randn(6, 2, 32) * 0.01]
    scales = []
    for weight in weights:
        values = find_largest(weight, by_row=recipe.rowwise).flatten()
        pieces = (Piece(0, 0, 5), Piece(5, 5, len(weight) - 5))
        scales.append(WeightScale(values, pieces))
    products = Float8Products(recipe, tuple(scales), (), ())
    inputs = [each.clone().requires_grad_() for each in (x, *weights, *biases)]
    layers = list(zip(inputs[1:3], inputs[3:], strict=True))
    outs = apply_entered_linears(inputs[0], layers, ALONE, products=products)
    found = torch.autograd.grad(outs, inputs, grads)
    # Each operand is rounded on its own, so the three products are written down here.
    rowwise = recipe.rowwise
    by_gradient = {"e4m3": E4M3, "hybrid": E5M2}[recipe.format]
    rows = x.flatten(0, 1)
    rounded = round_matrix(rows, E4M3, by_row=rowwise)
    of_input = torch.zeros_like(rows)
    for number, (weight, bias, grad) in enumerate(zip(weights, biases, grads, strict=True)):
        out = F.linear(rounded, round_matrix(weight, E4M3, by_row=rowwise), bias)
        torch.testing.assert_close(outs[number].flatten(0, 1), out)
        flat = grad.flatten(0, 1)
        rough = round_matrix(flat, by_gradient, by_row=rowwise)
        of_input += rough @ round_matrix(weight, E4M3)
        expected = flat.t() @ rows if rowwise else rough.t() @ rounded
        torch.testing.assert_close(found[1 + number], expected)
        torch.testing.assert_close(found[3 + number], flat.sum(0))
    torch.testing.assert_close(found[0].flatten(0, 1), of_input)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_gradients_are_added_in_fp32(recipe: Recipe) -> None:
    """With one scale, a product is rounded to bf16 in any case, so the sums have the same bits."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(16, 24, bias=False, dtype=torch.bfloat16)
    weight = layer.weight
    weight.grad_dtype = torch.float32
    values = find_largest(weight.detach(), by_row=recipe.rowwise).flatten()
    scale = WeightScale(values, (Piece(0, 0, 24),))
    batches = torch.randn(3, 6, 2, 16, dtype=torch.bfloat16)
    sums: list[Tensor] = []
    for numbers in ([], [number_layer(layer)]):
        for keeps in (False, not recipe.rowwise):
            products = Float8Products(recipe, (scale,), (), (), keeps_input=keeps)
            weight.grad = None
            for x in batches:
                (out,) = apply_entered_linears(
                    x, [(weight, None)], ALONE, numbers=numbers, products=products
                )
                out.float().square().sum().backward()
            assert weight.grad is not None
            assert weight.grad.dtype == torch.float32
            sums.append(weight.grad)
    apart, kept, *fused = sums
    assert torch.equal(apart, kept)
    assert all(torch.equal(apart, each) != recipe.rowwise for each in fused)


def overflow_on_one_rank() -> list[bool]:
    """Return whether each of two ranks gets nan from an infinity in the part of rank 1."""
    import torch.distributed as dist

    from megatron.parallel.mesh import ParallelGroup

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    group = ParallelGroup(2, rank, dist.group.WORLD)
    results = []
    for recipe in RECIPES:
        weight = torch.ones(16, 16)
        values = find_largest(weight, by_row=recipe.rowwise).flatten()
        scale = WeightScale(values, (Piece(0, 0, 16),))
        products = Float8Products(recipe, (scale,), (group,), (group,))
        x = torch.ones(4, 16)
        if rank == 1:
            x[2, 5] = math.inf
        outs, kept = products.multiply(x, [weight], [None])
        gradients = products.begin_backward([x], [weight], kept)
        results.append(bool(outs[0][2].isnan().all()))
        results.append(bool(gradients.multiply_weights()[2].isnan().all()))
    dist.destroy_process_group()
    return results


def test_an_overflow_on_one_rank_reaches_all(pool: ProcessPool) -> None:
    """The ranks then drop the step together."""
    outcomes = pool.run(2, overflow_on_one_rank)
    succeed(outcomes)
    assert all(all(each.value) for each in outcomes)

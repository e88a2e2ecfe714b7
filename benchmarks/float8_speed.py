"""Measure the linear layers of a Llama block in float8 and in bf16. `kernels.py` calls it.

The products are measured alone, with fast sums and with sums in fp32, and so is the rounding of
their inputs. The layers are measured with all three products, with rounding and without messages.
On a device without float8 products, their values are multiplied in bf16, so that the script can be
checked there.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.extras.step.float8.recipe import Recipe
from megatron.parallel.entered_linear import ALONE, apply_entered_linears
from megatron.parallel.parameter_spec import Piece
from megatron.parallel.products import Products


@dataclass(frozen=True)
class Layers:
    """Linear layers with the same input of `rows` tokens."""

    name: str
    rows: int
    inner: int
    columns: tuple[int, ...]


BLOCK = (
    Layers("8B queries, keys, values", 8192, 4096, (6144,)),
    Layers("8B attention output", 8192, 4096, (4096,)),
    Layers("8B gate and up", 8192, 4096, (14336, 14336)),
    Layers("8B down", 8192, 14336, (4096,)),
)
"""Llama 3 8B with 8,192 tokens."""
TINY = (
    Layers("gate and up", 64, 32, (48, 48)),
    Layers("down", 64, 48, (32,)),
)


class Benchmark:
    """Measures blocks on a device."""

    def __init__(
        self,
        device: torch.device,
        time_kernel: Callable[[Sequence[Callable[[], object]], float], float],
        seconds: float,
        add_row: Callable[..., None],
    ) -> None:
        """Take what measures and records.

        Args:
            device: The device.
            time_kernel: Takes calls and the seconds to measure for. Returns the seconds of a call.
            seconds: Time for each kernel.
            add_row: Adds a row to a table of the results.
        """
        self._device = device
        self._time = time_kernel
        self._seconds = seconds
        self._add_row = add_row
        capable = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
        self._emulated = not capable

    def measure(self, block: Sequence[Layers]) -> None:
        """Measure a block, and print and record the results. Without torchao, only say so."""
        if importlib.util.find_spec("torchao") is None:
            print("float8: torchao is not installed", flush=True)
            self._add_row("float8", name="all", error="torchao is not installed")
            return
        for layers in block:
            self._measure_products(layers)
        recipes: dict[str, Recipe | None] = {
            "bf16": None,
            "tensorwise": Recipe("hybrid", rowwise=False, emulated=self._emulated),
            "rowwise": Recipe("e4m3", rowwise=True, emulated=self._emulated),
        }
        totals = dict.fromkeys(recipes, 0.0)
        for layers in block:
            # A CPU takes seconds to draw them.
            tensors = draw_tensors(layers, self._device)
            times = {
                name: self._time([build_pass(tensors, recipe)], self._seconds)
                for name, recipe in recipes.items()
            }
            # The next ones need the memory.
            del tensors
            totals = {name: totals[name] + times[name] for name in recipes}
            self._report(layers.name, times)
        self._report("all linear layers of a block", totals)

    def _report(self, name: str, times: dict[str, float]) -> None:
        """Print and record the milliseconds of both passes, and the speed relative to bf16."""
        milliseconds = {f"{key}_ms": 1e3 * value for key, value in times.items()}
        speeds = {
            f"{key}_speed": times["bf16"] / value for key, value in times.items() if key != "bf16"
        }
        text = ", ".join(f"{key} {value:.3g}" for key, value in (milliseconds | speeds).items())
        print(f"float8, {name}: {text}", flush=True)
        self._add_row("float8", name=name, **milliseconds, **speeds)

    def _measure_products(self, layers: Layers) -> None:
        """Measure forward products, and the rounding of their input."""
        from megatron.extras.step.float8.rounding import (
            find_largest,
            multiply_rounded,
            round_to_float8,
        )

        columns = sum(layers.columns)
        x, weight = (
            torch.randn(rows, layers.inner, device=self._device, dtype=torch.bfloat16)
            for rows in (layers.rows, columns)
        )

        def round_(matrix: torch.Tensor) -> Any:
            largest = find_largest(matrix, by_row=False)
            return round_to_float8(matrix, largest, torch.float8_e4m3fn)

        a, b = round_(x), round_(weight).t()

        def multiply(*, fast: bool) -> Callable[[], object]:
            return lambda: multiply_rounded(
                a, b, torch.bfloat16, emulated=self._emulated, fast=fast
            )

        calls: dict[str, Callable[[], object]] = {
            "bf16": lambda: x @ weight.t(),
            "fast": multiply(fast=True),
            "exact": multiply(fast=False),
        }
        flops = 2 * layers.rows * layers.inner * columns
        rates = {
            name: flops / self._time([call], self._seconds) / 1e12 for name, call in calls.items()
        }
        rounding = 1e3 * self._time([lambda: round_(x)], self._seconds)
        text = ", ".join(f"{name} {rate:.4g}" for name, rate in rates.items())
        print(
            f"float8 products, {layers.name}, TFLOPs: {text}; rounding {rounding:.3g} ms",
            flush=True,
        )
        self._add_row("float8 products", name=layers.name, **rates, rounding_ms=rounding)


@dataclass(frozen=True)
class Tensors:
    """What both passes of layers compute with, in bf16."""

    x: torch.Tensor
    """The input, [rows, 1, inner]."""
    weights: list[torch.Tensor]
    """[columns, inner] for each layer."""
    gradients: list[torch.Tensor]
    """Those of the outputs, [rows, 1, columns] for each layer."""

    def to(self, device: torch.device) -> "Tensors":
        """Return copies on a device."""
        return Tensors(
            self.x.detach().to(device).requires_grad_(),
            [weight.detach().to(device).requires_grad_() for weight in self.weights],
            [gradient.to(device) for gradient in self.gradients],
        )


def draw_tensors(layers: Layers, device: torch.device) -> Tensors:
    """Return normal random numbers."""
    generator = torch.Generator(device).manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    return Tensors(
        draw(layers.rows, 1, layers.inner).requires_grad_(),
        [draw(columns, layers.inner).requires_grad_() for columns in layers.columns],
        [draw(layers.rows, 1, columns) for columns in layers.columns],
    )


def build_pass(tensors: Tensors, recipe: Recipe | None) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Return a function that runs both passes of layers. Without a recipe they are in bf16.

    The function returns the gradients of the input and of the weights.
    """
    x, weights, gradients = tensors.x, tensors.weights, tensors.gradients
    products = None if recipe is None else build_products(recipe, weights)

    def call() -> tuple[torch.Tensor, ...]:
        pairs = [(weight, None) for weight in weights]
        outs = apply_entered_linears(x, pairs, ALONE, products=products)
        return torch.autograd.grad(outs, (x, *weights), gradients)

    return call


def build_products(recipe: Recipe, weights: Sequence[torch.Tensor]) -> Products:
    """Return the products of layers on one rank."""
    from megatron.extras.step.float8.products import Float8Products
    from megatron.extras.step.float8.rounding import find_largest
    from megatron.extras.step.float8.weight_scales import WeightScale

    scales = tuple(
        WeightScale(
            find_largest(weight.detach(), by_row=recipe.rowwise).flatten(),
            (Piece(0, 0, len(weight)),),
        )
        for weight in weights
    )
    # A run rounds weights once a step, and keeps rounded inputs. This is a later microbatch.
    keeps_input = not recipe.rowwise
    return Float8Products(recipe, scales, (), (), keeps_weights=True, keeps_input=keeps_input)

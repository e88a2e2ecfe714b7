"""The engine of the core, with linear layers of the transformer layers in float8.

It warns about layers in which float8 loses many values.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from megatron.base.errors import ConfigError
from megatron.engine.base import StepResult
from megatron.engine.layer_statistics import LayerRecorder
from megatron.engine.native import NativeEngine
from megatron.engine.optimizer import MasterParameter
from megatron.extras.step.float8.operand_shares import (
    Float8Recorder,
    Operand,
    OperandCounter,
    Share,
)
from megatron.extras.step.float8.products import Float8Products, SharedPair
from megatron.extras.step.float8.recipe import MULTIPLE, Recipe, fits_float8, list_float8_layers
from megatron.extras.step.float8.rounding import Rounded, round_weight, round_weights_in_place
from megatron.extras.step.float8.weight_scales import WeightMaxima
from megatron.model.block import Block
from megatron.parallel.grid import Grid
from megatron.parallel.layers import ColumnParallelLinear, RowParallelLinear, SharedGroupsLinear
from megatron.parallel.mesh import ParallelGroup
from megatron.parallel.parameter_spec import ParameterSpec, Piece

LIMIT = 0.1
"""A larger share of values that become zero is a warning.

In 50 steps of small models at a usual learning rate, the largest share was 0.07.
"""
_GROWTH = 2.0
"""The next warning about the same operand of a layer needs a share that is larger by this."""
_NAMED = 3
"""The number of layers that a warning names at most."""


Replaced = tuple[Float8Products, list[MasterParameter]]
"""Products whose float8 weights take the place of 16-bit copies, and their masters."""


class FixedWeights:
    """The rounded weights of all layers that replace their 16-bit copies.

    They keep their memory during the run. A CUDA graph reads the memory that it was recorded with,
    so each step rounds into the same memory.
    """

    def __init__(self, replaced: Sequence[Replaced], dtype: torch.dtype) -> None:
        """Create the weights, without memory yet.

        Args:
            replaced: The products and their masters.
            dtype: The dtype that a weight is rounded to before float8.
        """
        self._replaced = replaced
        self._dtype = dtype
        self._rounded: list[tuple[Rounded, Rounded]] = []

    @torch.no_grad()
    def round(self) -> None:
        """Round the masters, and give the products the result."""
        weights = [
            (master.weight.data, scale.get_largest(), scale.get_largest_of_all())
            for products, masters in self._replaced
            for scale, master in zip(products.scales, masters, strict=True)
        ]
        # The first time, each weight gets its memory.
        if self._rounded:
            round_weights_in_place(weights, self._rounded, self._dtype)
        else:
            self._rounded = [round_weight(*each, self._dtype) for each in weights]
        numbers = iter(self._rounded)
        for products, masters in self._replaced:
            products.use_weights([next(numbers) for _ in masters])

    def free(self) -> None:
        """Free the memory, if there is some."""
        self._rounded = []


class Float8Watch:
    """Compares the shares of each layer with a limit, and with its last warning in the launch."""

    def __init__(self, recipe: Recipe) -> None:
        """Create a watch that has seen no shares."""
        self._recipe = recipe
        self._largest: dict[tuple[str, Operand, str], float] = {}

    def observe(self, shares: Sequence[Share], iteration: int) -> list[str]:
        """Return warnings about the shares of an iteration, at most one of each kind.

        With scales of complete tensors, no value is cut off. So each such value is an error.
        """
        saturated = self._find_grown(shares, "saturated", 0.0)
        flushed = self._find_grown(shares, "flushed", LIMIT)
        warnings = []
        if saturated:
            warnings.append(
                f"float8 cuts off values at iteration {iteration}: {_name(saturated, 'saturated')}."
                " The scale is not that of the complete tensor, so ranks disagree or memory is "
                "damaged. Resume from an earlier checkpoint without --fp8-format, and report it"
            )
        if flushed:
            warnings.append(
                f"float8 loses small values at iteration {iteration}: {_name(flushed, 'flushed')} "
                f"become zero, more than {LIMIT:.0%} of those that are not zero. A much larger "
                f"value makes the scale small. {self._find_remedy(flushed)}"
            )
        return warnings

    def _find_grown(self, shares: Sequence[Share], what: str, limit: float) -> list[Share]:
        """Return the shares that are above the limit and have grown, the largest first."""
        grown = []
        for share in shares:
            key = share.layer, share.operand, what
            value = getattr(share, what)
            if value > max(limit, _GROWTH * self._largest.get(key, 0.0)):
                grown.append(share)
                self._largest[key] = value
        return sorted(grown, key=lambda share: getattr(share, what), reverse=True)

    def _find_remedy(self, flushed: Sequence[Share]) -> str:
        operands = {share.operand for share in flushed}
        if operands == {"gradient"} and self._recipe.format == "e4m3":
            return "Use --fp8-format hybrid, whose gradients have a larger range"
        if self._recipe.rowwise:
            return "Lower --lr, or go back to a checkpoint before it (tools/rollback.py)"
        return (
            "Use --fp8-recipe rowwise, in which a large value affects one row only, or go back to "
            "a checkpoint before it (tools/rollback.py)"
        )


def _name(shares: Sequence[Share], what: str) -> str:
    """Return the names and values of some shares, the largest first."""
    named = [
        f"{getattr(share, what):.2%} of the {share.operand}s of {share.layer}"
        for share in shares[:_NAMED]
    ]
    if len(shares) > _NAMED:
        named.append(f"smaller shares of {len(shares) - _NAMED} others")
    return ", ".join(named)


Linear = ColumnParallelLinear | RowParallelLinear | SharedGroupsLinear
_CAPABILITY = {False: (8, 9), True: (9, 0)}
"""Whether each row has a scale -> the lowest compute capability of GPUs with such products."""


@dataclass(frozen=True)
class _Weight:
    """The weight of a linear layer of this rank."""

    layer: Linear
    path: str
    """The name of the layer in its block."""
    name: str
    """The name of the weight in the complete model."""
    shape: tuple[int, ...]
    """The shape in the complete model."""
    pieces: tuple[Piece, ...]
    """The rows of the complete weight that this rank multiplies with."""


class Float8Engine(NativeEngine):
    """An `Engine` whose transformer layers multiply in float8."""

    def _build(self) -> None:
        super()._build()
        precision = self._plan.config.precision
        self._recipe = Recipe.from_config(precision)
        _check_device(self._mesh.device, self._recipe)
        self._start = precision.fp8_start_iteration
        self._iteration = max(1, self._plan.start_iteration)
        """The latest iteration of the run. Before the first step of a new run, it is 1."""
        self._scale = 1.0
        self._num_layers = self._plan.config.model.num_layers
        self._counter = OperandCounter(self._num_layers, self._mesh.device)
        self._watch = Float8Watch(self._recipe)
        groups = list(self._list_groups())
        # Weights with the same input share its rounded values.
        used = [group for group in groups if all(fits_float8(it.shape) for it in group)]
        skipped = (group for group in groups if group not in used)
        self._skipped = {it.path: it.shape for group in skipped for it in group}
        self._maxima = WeightMaxima(
            {weight.name: self._count_scales(weight) for group in used for weight in group},
            self._masters,
            dtype=self._dtype,
            device=self._mesh.device,
            group=self._mesh.build_stage_group(),
            comm_timer=self._mesh.tensor_parallel.comm_timer,
        )
        self._products = [(group[0].layer, self._make_products(group)) for group in used]
        masters = {id(master.model_parameter): master for master in super()._list_copied()}
        self._replaced: list[Replaced] = [
            (products, [masters[id(weight.layer.weight)] for weight in group])
            for group, (_, products) in zip(used, self._products, strict=True)
            # Ranks that share query groups join a weight from two parameters for each product.
            if masters and not isinstance(group[0].layer, SharedGroupsLinear)
        ]
        self._fixed = FixedWeights(self._replaced, self._dtype)

    def _list_groups(self) -> Iterator[list[_Weight]]:
        """Yield lists of weights in this rank's float8 layers. Those of a list have one input."""
        numbers = list_float8_layers(self._plan.config)
        for stage in self._rank_stages:
            for number, block in stage.model.get_blocks().items():
                if number in numbers:
                    for paths in list_linear_paths(block):
                        yield [_read_weight(block, number, it, stage.specs) for it in paths]

    def _count_scales(self, weight: _Weight) -> int:
        """Return the number of scales of a complete weight."""
        if self._recipe.rowwise:
            return weight.shape[0]
        return 1

    def _make_products(self, group: list[_Weight]) -> Float8Products:
        """Return the products of layers with the same input."""
        tensor, context = self._mesh.tensor_parallel, self._mesh.context_parallel
        # A rank has some of the input's channels of a row-parallel layer, and some of the output's
        # channels of a column-parallel one.
        row_parallel = isinstance(group[0].layer, RowParallelLinear)
        # A token is on one context-parallel rank.
        whole: tuple[ParallelGroup, ...] = (context,)
        if self._recipe.rowwise:
            whole = ()
        sharded = (tensor, *whole)
        inputs, gradients = whole, sharded
        if row_parallel:
            inputs, gradients = sharded, whole
        return Float8Products(
            self._recipe,
            tuple(self._maxima.make_scale(it.name, it.pieces) for it in group),
            input_groups=inputs,
            gradient_groups=gradients,
            shared_pair=_find_shared_pair(group[0].layer),
            # With ZeRO 3, complete weights would not be sharded any more.
            keeps_weights=self._mesh.grid.weight_ranks == 1
            or self._plan.config.parallel.zero_stage < 3,
            keeps_input=not self._recipe.rowwise and (row_parallel or not tensor.sequence_parallel),
            names=tuple(it.name.removesuffix(".weight") for it in group),
            counter=self._counter,
        )

    def _get_scale(self) -> float:
        return self._scale

    def _prepare_step(self, iteration: int | None, microbatches: int) -> None:
        if iteration is not None:
            self._iteration = iteration
        on = self._iteration >= self._start
        for layer, products in self._products:
            # Since the last step, an update or a load may have changed the weights.
            products.forget_weights()
            layer.products = products if on else None
        self._scale = 1.0
        if on:
            self._scale = choose_loss_scale(microbatches, self._mesh.grid)
            self._maxima.refresh()
        self._replace_weights(on=on)

    def _replace_weights(self, *, on: bool) -> None:
        """Let float8 values take the place of 16-bit weights, or the reverse."""
        if on and self._replaced:
            self._fixed.round()
        else:
            self._fixed.free()
        for _, masters in self._replaced:
            for master in masters:
                parameter = master.model_parameter
                is_copy = parameter.is_contiguous()
                if on and is_copy:
                    # Memory of one element. Whatever reads it computes nan.
                    nan = torch.full((), math.nan, dtype=self._dtype, device=parameter.device)
                    parameter.data = nan.expand(parameter.shape)
                if not on and not is_copy:
                    parameter.data = master.weight.data.to(self._dtype)

    def _list_copied(self) -> list[MasterParameter]:
        # Float8 values may take the place of a copy.
        return [m for m in super()._list_copied() if m.model_parameter.is_contiguous()]

    def _make_recorder(self) -> LayerRecorder:
        if self._iteration < self._start:
            return super()._make_recorder()
        counted = self._list_counted()
        return Float8Recorder(
            self.stages, self._mesh, self._num_layers, self._counter, self._maxima, counted
        )

    def _apply_gradients(
        self, loss: Tensor, scale: float, rates: Any, recorder: Any, accept: Any, vote: Any
    ) -> StepResult:
        result = super()._apply_gradients(loss, scale, rates, recorder, accept, vote)
        if not isinstance(recorder, Float8Recorder):
            return result
        return replace(result, warnings=self._watch.observe(recorder.shares, self._iteration))

    def describe_choices(self) -> list[tuple[str, str, str]]:
        """Return the rows of the table printed at start. See `Engine.describe_choices`."""
        return [*super().describe_choices(), ("float8", *self._describe_float8())]

    def _describe_float8(self) -> tuple[str, str]:
        recipe = self._recipe
        scales = self._plan.config.precision.fp8_recipe
        how = {True: "emulated", False: "torch._scaled_mm"}[recipe.emulated]
        numbers = list_float8_layers(self._plan.config)
        why = f"transformer layers {numbers.start + 1} to {numbers.stop}"
        if self._start > 1:
            why += f", from iteration {self._start} on"
            if self._plan.config.batch.eval_only and self._iteration < self._start:
                why += f", so this evaluation, at iteration {self._iteration}, is without float8"
        if self._skipped:
            names = ", ".join(f"{path} {list(shape)}" for path, shape in self._skipped.items())
            why += f"; not in float8, because a size is no multiple of {MULTIPLE}: {names}"
        return f"{recipe.format}, {scales}, {how}", why


def choose_loss_scale(microbatches: int, grid: Grid) -> float:
    """Return the loss scale with which the gradients of activations do not depend on the layout.

    Without a scale, the gradients that a rank rounds have the factor 1 / its microbatches, and they
    are averaged over the data-parallel ranks later. With three ranks they would be three times as
    large as in one process, and would be rounded in another way. With this scale, the factor is a
    power of two that depends on the microbatches of all ranks.

    A context-parallel rank's loss is the mean over its own tokens. It is divided by the number of
    such ranks, so that each token has the weight that it has in one process.
    """
    factor = 2.0 ** -math.ceil(math.log2(microbatches * grid.data)) / grid.context
    return factor * microbatches


def list_linear_paths(block: Block) -> list[tuple[str, ...]]:
    """Return the paths of a block's linear layers. Those of a tuple have the same input."""

    def find(part: str, *names: str) -> tuple[str, ...]:
        module = block.get_submodule(part)
        return tuple(f"{part}.{name}" for name in names if getattr(module, name, None) is not None)

    return [
        find("attention", "qkv", "query", "key", "value", "gate"),
        ("attention.out",),
        find("mlp", "up", "gate"),
        ("mlp.down",),
    ]


def _read_weight(
    block: Block, number: int, path: str, specs: Mapping[str, ParameterSpec]
) -> _Weight:
    """Return the weight of a layer. `specs` has those of the stage by their names."""
    layer = cast(Linear, block.get_submodule(path))
    prefix = f"blocks.{number}.{path}."
    name = f"{prefix}weight"
    spec = specs[name]
    if isinstance(layer, SharedGroupsLinear):
        shared = specs[f"{prefix}shared_weight"]
        pair = layer.own_pair
        queries = spec.shape[0]
        pieces = (
            *spec.locate_rows(0, queries),
            *shared.locate_rows(pair.start, pair.stop - pair.start),
        )
    elif isinstance(layer, ColumnParallelLinear):
        rows = spec.shape[0] // layer.tp.size
        pieces = (Piece(0, layer.tp.rank * rows, rows),)
    else:
        pieces = (Piece(0, 0, spec.shape[0]),)
    return _Weight(layer, path, name, spec.shape, pieces)


def _find_shared_pair(layer: Linear) -> SharedPair | None:
    """Return the key and value that several tensor-parallel ranks compute in a layer, if any."""
    if not isinstance(layer, SharedGroupsLinear):
        return None
    width = layer.own_pair.stop - layer.own_pair.start
    groups = len(layer.shared_weight) // width
    return SharedPair(layer.tp, layer.own_pair.start // width, groups, width)


def _check_device(device: torch.device, recipe: Recipe) -> None:
    """Refuse a device that has no float8 products.

    Raises:
        ConfigError: It has none.
    """
    if recipe.emulated:
        return
    if device.type != "cuda":
        raise ConfigError(
            f"--fp8-format {recipe.format}: a {device.type} has no float8 products; add "
            "--fp8-emulate to compute the same numbers slowly, or leave out --fp8-format"
        )
    needed = _CAPABILITY[recipe.rowwise]
    found = torch.cuda.get_device_capability(device)
    if found < needed:
        raise ConfigError(
            f"--fp8-format {recipe.format}: {torch.cuda.get_device_name(device)} has compute "
            f"capability {found[0]}.{found[1]}, and these float8 products need "
            f"{needed[0]}.{needed[1]}; leave out --fp8-format"
        )

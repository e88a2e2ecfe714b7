"""What the ranks of a world round to float8 in each step, put together to complete tensors."""

import pickle
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron.run.run import Run

Key = tuple[str, str]
"""The name of a layer, and the operand: "input", "weight 0" or "gradient 0".

Layers with the same input have one name. Their numbers are 0 and 1.
"""


@dataclass
class Part:
    """What a rank has of an operand in all steps."""

    data: int
    """The rank's data coordinate."""
    steps: int
    is_sum: bool
    """Whether complete values are sums over the ranks that have a column. Most are equal there."""
    rows: Tensor
    """The rank's rows of the complete operand: positions of tokens, or rows of a weight."""
    columns: Tensor
    values: list[Tensor] = field(default_factory=list)
    """[b, rows, columns] after rounding. b is 1 for weights. They are exact in bf16."""
    inverses: list[Tensor] = field(default_factory=list)
    """1 / scale for each row, [b, rows, 1]."""


@dataclass
class Operand:
    """A complete operand in all steps."""

    values: Tensor
    """[steps, microbatches, b, rows, columns] after rounding. b and microbatches are 1 for weights.
    """
    inverses: Tensor
    """1 / scale, the same shape with one column."""


class Recorder:
    """Records what each layer rounds in each step and microbatch.

    Recomputations are left out. Weights are the same in all microbatches of a step, so they are
    recorded in the first one.
    """

    def __init__(self, run: "Run", length: int) -> None:
        from megatron.extras.float8.engine import Float8Engine
        from megatron.parallel.context import take_own
        from megatron.parallel.layers import RowParallelLinear

        assert isinstance(run.engine, Float8Engine)
        self.parts: dict[Key, Part] = {}
        names = {
            module: name for stage in run.engine.stages for name, module in stage.named_modules()
        }
        self._layers = {
            id(products): (names[layer], isinstance(layer, RowParallelLinear))
            for layer, products in run.engine._products
        }
        self._data = run.mesh.coordinate.data
        self._tensor = run.mesh.coordinate.tensor
        self._positions = take_own(torch.arange(length), run.mesh.context_parallel, 0)
        self._steps = 0
        self._expected: list[Part | None] = []
        """The operands of the next roundings. None: it is not recorded."""
        self._latest: Any = None
        """The products of the latest forward pass."""

    def begin_step(self) -> None:
        """Start a step, with new weights."""
        self._steps += 1

    def close(self) -> bytes:
        """Return what was recorded, as `join_operands` takes it.

        As tensors, the many parts would need more open files than a process may have.
        """
        for part in self.parts.values():
            part.steps = self._steps
        return pickle.dumps(self.parts)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Record the roundings of some steps."""
        from megatron.extras.float8 import products

        cls = products.Float8Products
        multiply, begin = cls.multiply, cls.begin_backward

        def keep(x: Tensor, rounded: Any) -> None:
            part = self._expected.pop(0) if self._expected else None
            if part is not None:
                rows = len(part.rows)
                inverse = rounded.inverse.reshape(-1, 1).expand(len(x), 1)
                values = (rounded.values.float() * inverse).bfloat16()
                # Tokens are [s, b].
                part.values.append(values.view(rows, -1, x.shape[1]).transpose(0, 1).contiguous())
                part.inverses.append(inverse.reshape(rows, -1, 1).transpose(0, 1).contiguous())

        def watch(function: Any) -> Any:
            def call(x: Tensor, *arguments: Any) -> Any:
                rounded = function(x, *arguments)
                # A weight is rounded for both passes at once.
                keep(x, rounded[0] if isinstance(rounded, tuple) else rounded)
                return rounded

            return call

        def forward(its: Any, x: Tensor, weights: Any, biases: Any) -> Any:
            self._expected = []
            # A forward pass inside of a backward pass is a recomputation.
            if torch._C._current_graph_task_id() == -1:
                part = self._find_input(its, x)
                # The statistics of layers compute queries and keys just before the layer does.
                if self._latest is its:
                    part.values.pop()
                    part.inverses.pop()
                self._latest = its
                self._expected = [part]
                self._expected += [self._find_weight(its, n, w) for n, w in enumerate(weights)]
            return multiply(its, x, weights, biases)

        def backward(its: Any, rows: Any, weights: Any, kept: Any) -> Any:
            self._expected = [self._find_gradient(its, n, row) for n, row in enumerate(rows)]
            return begin(its, rows, weights, kept)

        with (
            mock.patch.object(cls, "multiply", forward),
            mock.patch.object(cls, "begin_backward", backward),
            ExitStack() as stack,
        ):
            for name in ("round_to_float8", "round_complete_rows", "round_weight"):
                function = watch(getattr(products, name))
                stack.enter_context(mock.patch.object(products, name, function))
            yield

    def _find(
        self, name: str, operand: str, rows: Tensor, columns: Tensor, *, is_sum: bool = False
    ) -> Part:
        part = Part(self._data, 0, is_sum, rows, columns)
        return self.parts.setdefault((name, operand), part)

    def _find_columns(self, x: Tensor, *, sharded: bool) -> Tensor:
        """Return the columns of a matrix whose columns are sharded evenly, or not at all."""
        first = self._tensor * x.shape[-1] if sharded else 0
        return torch.arange(first, first + x.shape[-1])

    def _find_input(self, its: Any, x: Tensor) -> Part:
        name, row_parallel = self._layers[id(its)]
        columns = self._find_columns(x, sharded=row_parallel)
        return self._find(name, "input", self._positions, columns)

    def _find_weight(self, its: Any, number: int, weight: Tensor) -> Part | None:
        name, row_parallel = self._layers[id(its)]
        columns = self._find_columns(weight, sharded=row_parallel)
        part = self._find(name, f"weight {number}", _list_rows(its, number), columns)
        return part if len(part.values) < self._steps else None

    def _find_gradient(self, its: Any, number: int, row: Tensor) -> Part:
        name, row_parallel = self._layers[id(its)]
        columns = self._find_columns(row, sharded=False)
        if not row_parallel:
            columns = _list_rows(its, number)
        # Of ranks that share a key and a value, one has their gradient and the others have zeros.
        is_sum = its.shared_pair is not None
        return self._find(name, f"gradient {number}", self._positions, columns, is_sum=is_sum)


def _list_rows(its: Any, number: int) -> Tensor:
    """Return the rows of the complete weight that a rank multiplies with."""
    pieces = its.scales[number].pieces
    return torch.cat([torch.arange(piece.start, piece.start + piece.rows) for piece in pieces])


def join_operands(ranks: Sequence[bytes]) -> dict[Key, Operand]:
    """Return the complete operands of a world. Those of a stage are in the order of time.

    Raises:
        AssertionError: Ranks with the same values do not agree.
    """
    found: dict[Key, list[Part]] = defaultdict(list)
    for pickled in ranks:
        for key, part in pickle.loads(pickled).items():
            found[key].append(part)
    return {key: _join(key, own) for key, own in found.items()}


def _join(key: Key, own: Sequence[Part]) -> Operand:
    first = own[0]
    of_weight = key[1].startswith("weight")
    copies = 1 if of_weight else 1 + max(part.data for part in own)
    rows, columns = (
        1 + max(int(getattr(part, name).max()) for part in own) for name in ("rows", "columns")
    )
    size = (first.steps, copies * len(first.values) // first.steps, len(first.values[0]), rows)
    values = torch.full((*size, columns), torch.nan)
    inverses = torch.full((*size, 1), torch.nan)
    for part in own:
        # Ranks take turns with each microbatch.
        place = slice(0 if of_weight else part.data, None, copies)
        at = part.rows[:, None], part.columns
        _write(values[:, place], at, part.values, key, is_sum=part.is_sum)
        _write(inverses[:, place], (at[0], torch.tensor([0])), part.inverses, key)
    assert not values.isnan().any(), f"{key} is incomplete"
    return Operand(values, inverses)


def _write(
    complete: Tensor,
    at: tuple[Tensor, Tensor],
    parts: Sequence[Tensor],
    key: Key,
    *,
    is_sum: bool = False,
) -> None:
    """Write a rank's part into the complete operand."""
    steps, microbatches = complete.shape[:2]
    new = torch.stack(list(parts)).float()
    new = new.view(steps, microbatches, *new.shape[1:])
    old = complete[:, :, :, *at]
    if is_sum:
        new = new + old.nan_to_num()
    else:
        assert bool((old.isnan() | (old == new)).all()), f"{key}: ranks disagree"
    complete[:, :, :, *at] = new


@dataclass(frozen=True)
class Flips:
    """Values of a world that are rounded to other numbers than those of one process."""

    values: int
    """All values that were rounded."""
    flipped: int
    step: int
    """The step of the first flip. Without a flip, the number of steps + 1."""
    key: Key | None
    """The operand with the first flip."""
    before: int
    """The values that were rounded up to this operand, which no earlier flip can have changed."""
    first: int
    """The flipped values among them."""


def count_flips(found: dict[Key, Operand], expected: dict[Key, Operand]) -> Flips:
    """Compare the operands of a world with those of one process.

    Raises:
        AssertionError: In the first step, a scale differs before any rounding does.
    """
    assert found.keys() == expected.keys()
    values = flipped = before = 0
    first: tuple[int, Key, int] | None = None
    steps = max(len(operand.values) for operand in expected.values())
    microbatches = max(operand.values.shape[1] for operand in expected.values())
    for step in range(steps):
        for microbatch in range(microbatches):
            for key, operand in expected.items():
                if microbatch >= operand.values.shape[1]:
                    continue
                own = operand.values[step, microbatch]
                count = int((found[key].values[step, microbatch] != own).sum())
                values += own.numel()
                flipped += count
                if first is None:
                    before += own.numel()
                    if step == 0:
                        pair = found[key].inverses, operand.inverses
                        scales = [each[0, microbatch] for each in pair]
                        assert torch.equal(*scales), f"{key}: another scale before any flip"
                    if count:
                        first = step + 1, key, count
    step, operand_of_first, count = first or (steps + 1, None, 0)
    return Flips(values, flipped, step, operand_of_first, before, count)

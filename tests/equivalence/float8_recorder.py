"""What the ranks of a world round to float8 in each step, put together to complete tensors.

A world can replay what one process rounded: each rank then rounds its part of the given values.
"""

import pickle
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron.run.run import Run

NOISE = 2.0**-24
"""A value is an error of sums in fp32 if it is smaller than this, relative to the largest value of
its scale. e5m2 has numbers down to 2^-32 of its largest one, so it keeps such values."""
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
    dtype: torch.dtype | None = None
    """The float8 format."""
    values: list[Tensor] = field(default_factory=list)
    """[b, rows, columns] before rounding. b is 1 for weights."""
    inverses: list[Tensor] = field(default_factory=list)
    """1 / scale for each row, [b, rows, 1]."""


@dataclass
class Operand:
    """A complete operand in all steps."""

    dtype: torch.dtype
    values: Tensor
    """[steps, microbatches, b, rows, columns] before rounding. b and microbatches are 1 for
    weights."""
    inverses: Tensor
    """1 / scale, the same shape with one column."""

    def round(self, step: int, microbatch: int) -> Tensor:
        """Return the values of a microbatch in float8."""
        inverse = self.inverses[step, microbatch]
        return (self.values[step, microbatch] / inverse).to(self.dtype).float() * inverse


@dataclass
class _Slot:
    """What the next rounding of a rank belongs to."""

    key: Key
    microbatch: int
    """The number in the complete step."""
    is_recorded: bool
    zeros: int = 0
    """The last columns that are zeros on this rank."""


class Recorder:
    """Records what each layer rounds in each step and microbatch.

    Recomputations are left out. Weights are the same in all microbatches of a step, so they are
    recorded in the first one.
    """

    def __init__(self, run: "Run", length: int, given: "dict[Key, Operand] | None" = None) -> None:
        """Prepare to record.

        Args:
            run: The run.
            length: Tokens of a sample.
            given: What one process rounded, which the layers then round in place of their own.
        """
        from megatron.extras.step.float8.engine import Float8Engine
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
        self._copies = run.mesh.grid.data
        self._tensor = run.mesh.coordinate.tensor
        self._positions = take_own(torch.arange(length), run.mesh.context_parallel, 0)
        self._given = given
        self._steps = 0
        self._calls: Counter[tuple[int, str]] = Counter()
        """Passes of each layer in this step."""
        self._slots: list[_Slot] = []
        """Those of the next roundings."""

    def begin_step(self) -> None:
        """Start a step, with new weights."""
        self._steps += 1
        self._calls.clear()

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
        from megatron.extras.step.float8 import products

        cls = products.Float8Products
        multiply, begin = cls.multiply, cls.begin_backward

        def forward(its: Any, x: Tensor, weights: Any, biases: Any) -> Any:
            # A forward pass inside of a backward pass is a recomputation.
            again = torch._C._current_graph_task_id() != -1
            number = self._count(its, "recomputed" if again else "forward")
            self._slots = [_Slot(self._find_input(its, x), number, not again)]
            self._slots += self._find_weights(its, weights, not again)
            return multiply(its, x, weights, biases)

        def backward(its: Any, rows: Any, weights: Any, kept: Any) -> Any:
            number = self._count(its, "backward")
            zeros = _count_zeros(its)
            self._slots = [
                _Slot(self._find_gradient(its, n, row), number, True, zeros)
                for n, row in enumerate(rows)
            ]
            if not its.keeps_weights:
                self._slots += self._find_weights(its, weights, False)
            if kept and not its.keeps_input:
                # The gathered input is rounded again.
                name, _ = self._layers[id(its)]
                self._slots.append(_Slot((name, "input"), number, False))
            return begin(its, rows, weights, kept)

        with (
            mock.patch.object(cls, "multiply", forward),
            mock.patch.object(cls, "begin_backward", backward),
            ExitStack() as stack,
        ):
            for name in ("round_to_float8", "round_complete_rows", "round_weight"):
                function = self._wrap(getattr(products, name))
                stack.enter_context(mock.patch.object(products, name, function))
            yield

    def _wrap(self, function: Any) -> Any:
        """Return a function that rounds what the next slot says, and records it."""

        def call(x: Tensor, *arguments: Any) -> Any:
            rounded = function(x, *arguments)
            if not self._slots:
                return rounded
            slot = self._slots.pop(0)
            # A weight is rounded for both passes at once.
            first = rounded[0] if isinstance(rounded, tuple) else rounded
            if slot.is_recorded:
                _keep(self.parts[slot.key], x, first)
            if self._given is None:
                return rounded
            return function(*self._replace(slot, x, *arguments))

        return call

    def _count(self, its: Any, kind: str) -> int:
        """Return the microbatch of a pass. Each layer takes them in their order."""
        number = self._calls[id(its), kind]
        self._calls[id(its), kind] += 1
        return self._data + number * self._copies

    def _replace(self, slot: _Slot, x: Tensor, *arguments: Any) -> tuple[Any, ...]:
        """Return the arguments of a rounding with the values of one process in place of its own."""
        assert self._given is not None
        part = self.parts[slot.key]
        complete = self._given[slot.key].values[self._steps - 1, slot.microbatch]
        tokens = complete[:, part.rows[:, None], part.columns].transpose(0, 1)
        own = tokens.reshape(x.shape).clone()
        own[:, own.shape[1] - slot.zeros :] = 0.0
        magnitude = complete.abs()
        by_row = magnitude.amax(-1)[:, part.rows].t().reshape(-1, 1)
        given: list[Any] = [own]
        for each in arguments:
            if not isinstance(each, Tensor):
                given.append(each)
            elif each.dim():
                given.append(by_row)
            else:
                given.append(magnitude.max())
        return tuple(given)

    def _find(
        self, name: str, operand: str, rows: Tensor, columns: Tensor, *, is_sum: bool = False
    ) -> Key:
        self.parts.setdefault((name, operand), Part(self._data, 0, is_sum, rows, columns))
        return name, operand

    def _find_columns(self, x: Tensor, *, sharded: bool) -> Tensor:
        """Return the columns of a matrix whose columns are sharded evenly, or not at all."""
        first = self._tensor * x.shape[-1] if sharded else 0
        return torch.arange(first, first + x.shape[-1])

    def _find_input(self, its: Any, x: Tensor) -> Key:
        name, row_parallel = self._layers[id(its)]
        columns = self._find_columns(x, sharded=row_parallel)
        return self._find(name, "input", self._positions, columns)

    def _find_weights(self, its: Any, weights: Any, is_recorded: bool) -> list[_Slot]:
        if its._weights:
            return []
        name, row_parallel = self._layers[id(its)]
        slots = []
        for number, weight in enumerate(weights):
            columns = self._find_columns(weight, sharded=row_parallel)
            key = self._find(name, f"weight {number}", _list_rows(its, number), columns)
            is_new = len(self.parts[key].values) < self._steps
            slots.append(_Slot(key, 0, is_recorded and is_new))
        return slots

    def _find_gradient(self, its: Any, number: int, row: Tensor) -> Key:
        name, row_parallel = self._layers[id(its)]
        columns = self._find_columns(row, sharded=False)
        if not row_parallel:
            columns = _list_rows(its, number)
        # Of ranks that share a key and a value, one has their gradient and the others have zeros.
        is_sum = its.shared_pair is not None
        return self._find(name, f"gradient {number}", self._positions, columns, is_sum=is_sum)


def _keep(part: Part, x: Tensor, rounded: Any) -> None:
    """Record a matrix whose rows are [s, b]."""
    rows = len(part.rows)
    inverse = rounded.inverse.reshape(-1, 1).expand(len(x), 1)
    for values, each in ((part.values, x), (part.inverses, inverse)):
        values.append(each.detach().view(rows, -1, each.shape[1]).transpose(0, 1).clone())
    part.dtype = rounded.values.dtype


def _count_zeros(its: Any) -> int:
    """Return the columns of the key and value of which another rank has the gradient."""
    pair = its.shared_pair
    if pair is None or pair.tp.rank % (pair.tp.size // pair.groups) == 0:
        return 0
    return int(pair.width)


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
    assert first.dtype is not None
    return Operand(first.dtype, values, inverses)


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
    in_noise: int
    """Further ones, which are errors of sums in both worlds (`NOISE`)."""
    scales: int
    """Scales that differ."""
    largest: float
    """The largest difference before rounding, relative to the largest value that a scale covers."""
    step: int
    """The step of the first flip. Without a flip, the number of steps + 1."""
    key: Key | None
    """The operand with the first flip."""
    before: int
    """The values that were rounded up to this operand, which no earlier flip can have changed."""
    first: int
    """The flipped values among them."""


def _compare_rounded(
    found: Operand, expected: Operand, step: int, microbatch: int
) -> tuple[int, int, float]:
    """Return `Flips.flipped`, `Flips.in_noise` and `Flips.largest` of a microbatch."""
    covered = expected.inverses[step, microbatch] * torch.finfo(expected.dtype).max
    a, b = (each.values[step, microbatch] for each in (found, expected))
    is_noise = torch.maximum(a.abs(), b.abs()) < NOISE * covered
    is_other = found.round(step, microbatch) != expected.round(step, microbatch)
    in_noise = int((is_other & is_noise).sum())
    return int(is_other.sum()) - in_noise, in_noise, float(((a - b).abs() / covered).max())


def count_flips(found: dict[Key, Operand], expected: dict[Key, Operand]) -> Flips:
    """Compare the operands of a world with those of one process.

    Raises:
        AssertionError: In the first step, a scale differs before any rounding does.
    """
    assert found.keys() == expected.keys()
    values = flipped = in_noise = scales = before = 0
    largest = 0.0
    first: tuple[int, Key, int] | None = None
    steps = max(len(operand.values) for operand in expected.values())
    microbatches = max(operand.values.shape[1] for operand in expected.values())
    for step, microbatch in product(range(steps), range(microbatches)):
        for key, operand in expected.items():
            if microbatch >= operand.values.shape[1]:
                continue
            count, noisy, difference = _compare_rounded(found[key], operand, step, microbatch)
            size = operand.values[step, microbatch].numel()
            a, b = (each.inverses[step, microbatch] for each in (found[key], operand))
            values += size
            flipped += count
            in_noise += noisy
            scales += int((a != b).sum())
            largest = max(largest, difference)
            if first is None:
                before += size
                assert step or torch.equal(a, b), f"{key}: another scale before any flip"
                if count:
                    first = step + 1, key, count
    step, operand_of_first, count = first or (steps + 1, None, 0)
    return Flips(values, flipped, in_noise, scales, largest, step, operand_of_first, before, count)

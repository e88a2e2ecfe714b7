"""What a rank rounds to float8 in a step, before and after rounding."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class RoundedOperand:
    """One operand that a rank has rounded."""

    name: str
    matrix: Tensor | None
    """The rank's values before rounding, [m, k]. None for a weight, whose shards are recorded."""
    values: Tensor
    """The matrix in float8."""
    inverse: Tensor
    """1 / scale, a scalar or [m, 1]."""
    rows: tuple[slice, ...] = ()
    """The rows of the complete weight that the rank multiplies with."""
    largest: Tensor | None = None
    """The largest value of the complete weight, or of each of its rows."""
    by_row: bool = False


@contextmanager
def record_operands(operands: list[RoundedOperand]) -> Iterator[None]:
    """Record what this process rounds to float8 in this context."""
    # The import takes seconds.
    from megatron.extras.training.float8 import products as module

    cls, gradients = module.Float8Products, module._Gradients
    count, get_weight, round_input = cls._count, cls.get_weight, gradients._round_input

    def keep(its: Any, what: str, matrix: Tensor | None, rounded: Any, **further: Any) -> None:
        by_row = its.recipe.rowwise and "backward" not in what
        values, inverse = rounded.values.detach().clone(), rounded.inverse.clone()
        before = None if matrix is None else matrix.detach().clone()
        operands.append(RoundedOperand(what, before, values, inverse, by_row=by_row, **further))

    def record(its: Any, operand: Any, matrices: Any, rounded: Any) -> None:
        for number, (matrix, after) in enumerate(zip(matrices, rounded, strict=True)):
            keep(its, f"{operand} of {its.names[number]}", matrix, after)
        count(its, operand, matrices, rounded)

    def record_weight(its: Any, number: int, weight: Tensor, *, backward: bool) -> Any:
        rounded = get_weight(its, number, weight, backward=backward)
        pieces = its.scales[number].pieces
        rows = tuple(slice(piece.start, piece.start + piece.rows) for piece in pieces)
        name = f"{its.names[number]}.weight{' (backward)' if backward else ''}"
        # Most updates change a largest value, and few of them change its power of two.
        keep(its, name, None, rounded, rows=rows, largest=its.scales[number].values.clone())
        return rounded

    def record_input(its: Any, x: Tensor) -> Any:
        rounded = round_input(its, x)
        # Otherwise the rounded input of the forward pass is kept.
        if not its._products.keeps_input:
            keep(its._products, f"kept input of {its._products.names[0]}", x, rounded)
        return rounded

    cls._count, cls.get_weight = record, record_weight  # type: ignore[method-assign, assignment]
    gradients._round_input = record_input  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        cls._count, cls.get_weight = count, get_weight  # type: ignore[method-assign]
        gradients._round_input = round_input  # type: ignore[method-assign]

"""Warnings about layers in which float8 loses many values."""

from collections.abc import Sequence

from megatron.extras.training.float8.operand_shares import Operand, Share
from megatron.extras.training.float8.recipe import Recipe

LIMIT = 0.1
"""A larger share of values that become zero is a warning.

In 50 steps of small models at a usual learning rate, the largest share was 0.07.
"""
_GROWTH = 2.0
"""The next warning about the same operand of a layer needs a share that is larger by this."""
_NAMED = 3
"""The number of layers that a warning names at most."""


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

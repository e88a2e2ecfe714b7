"""Sums over the predictions of an evaluation, beside the mean loss that a stage returns."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


def _make_zero() -> Tensor:
    return torch.zeros((), dtype=torch.float64)


@dataclass
class Tally:
    """Sums over the predicted tokens that a rank with the last stage has evaluated.

    Each is a scalar in fp64, on the device of the model once something was added. Tensor-parallel
    ranks have equal sums. Ranks without the last stage keep zeros.
    """

    nats: Tensor = field(default_factory=_make_zero)
    """Sum of -log(probability of the next token)."""
    correct: Tensor = field(default_factory=_make_zero)
    """Number of positions whose most likely token is the next one. Of equal ones, the lowest id."""
    positions: Tensor = field(default_factory=_make_zero)
    """Number of positions that count."""

    def add(self, losses: Tensor, correct: Tensor, mask: Tensor | None) -> None:
        """Add some positions.

        Args:
            losses: Losses, [n'].
            correct: 1 where the most likely token is the next one, else 0, [n'].
            mask: 1 where a position counts, [n']. None means that all positions count.
        """
        if mask is None:
            mask = torch.ones_like(losses)
        self.nats = self.nats.to(losses.device) + (losses * mask).double().sum()
        self.correct = self.correct.to(losses.device) + (correct * mask).double().sum()
        self.positions = self.positions.to(losses.device) + mask.double().sum()

"""Derived randomness, in which every dropout mask depends only on where and when it is drawn.

Before each draw the device's generator is seeded. The seed depends on the run's seed, the
iteration, the microbatch, the site and the coordinate in the grid. No generator state is stored. A
resumed run draws the same masks as an uninterrupted one. A recomputed block draws the same masks in
the backward pass as in the forward pass, whichever microbatches ran in between.

Activations that all tensor-parallel ranks hold get the same mask on all of them. Sharded
activations get a different mask on each rank.
"""

from typing import NamedTuple

import torch

_MASK = (1 << 64) - 1


def mix(*words: int) -> int:
    """Return 64 well-mixed bits of a sequence of integers.

    It applies the finaliser of splitmix64 (https://doi.org/10.1145/2660193.2660195) to each.
    """
    # Python's integers have no fixed size. The mask makes each operation one modulo 2^64.
    state = 0x9E3779B97F4A7C15
    for word in words:
        state = (state ^ (word & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


class DropoutKey(NamedTuple):
    """The forward pass that a draw belongs to."""

    iteration: int
    """The 1-based iteration."""
    microbatch: int
    """The microbatch's number in this rank's part of the global batch."""


class RandomStreams:
    """Seeds the generator of a device before each dropout of a step.

    A site is the number of a dropout in the model. It is the same on every rank and layout.
    """

    def __init__(
        self, seed: int, device: torch.device, *, data_rank: int = 0, tensor_rank: int = 0
    ) -> None:
        """Create the streams of a rank.

        Args:
            seed: The seed of the run.
            device: The device whose generator is seeded.
            data_rank: The rank's data-parallel coordinate.
            tensor_rank: The rank's tensor-parallel coordinate.
        """
        self._seed = seed
        self._data_rank = data_rank
        self._tensor_rank = tensor_rank
        if device.type == "cuda":
            self._generator = torch.cuda.default_generators[device.index or 0]
        else:
            self._generator = torch.default_generator

    def seed(self, dropout_key: DropoutKey, site: int, *, sharded: bool) -> None:
        """Seed the generator for the draw at `site`.

        Args:
            dropout_key: The forward pass.
            site: The number of the dropout in the model.
            sharded: Whether the activation differs between tensor-parallel ranks.
        """
        # 0 means replicated. Rank 0 with a sharded activation must get another seed.
        if sharded:
            tensor_rank = self._tensor_rank + 1
        else:
            tensor_rank = 0
        # The CPU generator uses only the low 32 bits.
        self._generator.manual_seed(
            mix(self._seed, *dropout_key, site, self._data_rank, tensor_rank) & 0xFFFFFFFF
        )

"""Randomness that is derived, not carried: every dropout mask follows from where and when it is drawn.

Before each draw the device's generator is seeded from (seed, iteration, microbatch, site, place in the grid). So a resumed run
draws what the uninterrupted one would have, and no generator state is stored; a block that is computed again in the backward pass
draws what it drew the first time, whichever microbatches ran in between. Activations that all tensor-parallel ranks hold get the
same mask on all of them; activations that are sharded get one for each rank.
"""

from typing import NamedTuple

import torch

_MASK = (1 << 64) - 1


def mix(*words: int) -> int:
    """64 well-mixed bits of a sequence of integers (the finaliser of splitmix64, https://doi.org/10.1145/2660193.2660195)."""
    state = 0x9E3779B97F4A7C15
    for word in words:
        state = (state ^ (word & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


class DropoutKey(NamedTuple):
    """When a draw happens: which forward pass it belongs to."""

    iteration: int
    """1-based."""
    microbatch: int
    """Its number in this rank's part of the global batch."""


class RandomStreams:
    """Seeds the generator of `device` for each dropout of a step.

    A site is the number of a dropout in the model, the same on every rank and layout.
    """

    def __init__(
        self, seed: int, device: torch.device, *, data_rank: int = 0, tensor_rank: int = 0
    ) -> None:
        self._seed = seed
        self._data_rank = data_rank
        self._tensor_rank = tensor_rank
        self._generator = (
            torch.cuda.default_generators[device.index or 0]
            if device.type == "cuda"
            else torch.default_generator
        )

    def seed(self, dropout_key: DropoutKey, site: int, *, sharded: bool) -> None:
        """Seed for the draw at `site`; `sharded`: the activation differs between tensor-parallel ranks."""
        tensor_rank = self._tensor_rank + 1 if sharded else 0
        # The CPU generator looks at the low 32 bits only.
        self._generator.manual_seed(
            mix(self._seed, *dropout_key, site, self._data_rank, tensor_rank) & 0xFFFFFFFF
        )

"""Derived randomness, in which every dropout mask depends only on where and when it is drawn.

Before each draw the device's generator is seeded. The seed depends on the run's seed, the
iteration, the microbatch, the site and the coordinate in the grid. No generator state is stored. A
resumed run draws the same masks as an uninterrupted one. A recomputed block draws the same masks in
the backward pass as in the forward pass, whichever microbatches ran in between.

Activations that all tensor-parallel ranks hold get the same mask on all of them. Sharded
activations get a different mask on each rank. The masks of a sequence that context-parallel ranks
share are those of one rank with all of it.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.parallel.context import take_own
from megatron.parallel.mesh import ContextParallel, TensorParallel

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
        self,
        seed: int,
        device: torch.device,
        *,
        data_rank: int = 0,
        tensor_parallel: TensorParallel | None = None,
        context_parallel: ContextParallel | None = None,
    ) -> None:
        """Create the streams of a rank.

        Args:
            seed: The seed of the run.
            device: The device whose generator is seeded.
            data_rank: The rank's data-parallel coordinate.
            tensor_parallel: The tensor-parallel ranks. Default: this rank alone.
            context_parallel: The context-parallel ranks. Default: this rank alone.
        """
        self._seed = seed
        self._data_rank = data_rank
        self._tensor = tensor_parallel or TensorParallel()
        self._context = context_parallel or ContextParallel()
        if device.type == "cuda":
            self._generator = torch.cuda.default_generators[device.index or 0]
        else:
            self._generator = torch.default_generator

    @property
    def shares_sequence(self) -> bool:
        """Whether other ranks have other positions of this rank's samples."""
        return self._context.size > 1

    def draw_own_rows(
        self, x: Tensor, p: float, dropout_key: DropoutKey, site: int, *, sharded: bool
    ) -> Tensor:
        """Return the factor of dropout on each element of this rank's positions of a sequence.

        It is 0 or 1 / (1 - p). The factors of all positions are drawn, because the generator cannot
        skip those of other ranks.

        Args:
            x: The activation, [s/c, ...], or [s/tc, ...] if it is sharded over the t
                tensor-parallel ranks. Only its shape, dtype and device matter.
            p: Probability that an element is zeroed.
            dropout_key: The forward pass.
            site: The number of the dropout in the model.
            sharded: Whether the activation differs between tensor-parallel ranks.
        """
        # Only the first dimension is shared.
        shape = x.shape[0] * self._context.size, *x.shape[1:]
        if not sharded:
            self.seed(dropout_key, site, sharded=False)
            return take_own(F.dropout(x.new_ones(shape), p), self._context, 0)
        # Without context parallelism, each tensor-parallel rank draws for its slice of the
        # sequence. This rank's positions may be in the slices of several.
        slices = []
        for tensor_rank in range(self._tensor.size):
            self.seed(dropout_key, site, sharded=True, tensor_rank=tensor_rank)
            slices.append(F.dropout(x.new_ones(shape), p))
        own = take_own(torch.cat(slices), self._context, 0)
        return own.chunk(self._tensor.size)[self._tensor.rank]

    def seed(
        self, dropout_key: DropoutKey, site: int, *, sharded: bool, tensor_rank: int | None = None
    ) -> None:
        """Seed the generator for the draw at `site`.

        Args:
            dropout_key: The forward pass.
            site: The number of the dropout in the model.
            sharded: Whether the activation differs between tensor-parallel ranks.
            tensor_rank: The rank whose draw it is. Default: this one.
        """
        # 0 means replicated. Rank 0 with a sharded activation must get another seed.
        shard = 0
        if sharded:
            shard = 1 + (self._tensor.rank if tensor_rank is None else tensor_rank)
        # The CPU generator uses only the low 32 bits.
        self._generator.manual_seed(
            mix(self._seed, *dropout_key, site, self._data_rank, shard) & 0xFFFFFFFF
        )

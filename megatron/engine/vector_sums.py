"""Sums of the gradients of biases and norms, which are many and small.

Autograd would cast each vector's gradient to fp32 and add it to the sum in two kernels, which are
a third of all kernels of a microbatch of GPT-2. Here they stay in 16 bits until the end of the
microbatch, and two kernels add all of them.

The invariant: the sums are those of autograd, bit for bit. Each vector is used once in a
microbatch, so its gradient is a sum of autograd over nothing else.
"""

from collections.abc import Sequence

import torch
from torch import nn


class VectorSums:
    """The fp32 sums of the gradients of 16-bit vectors, in memory that never moves."""

    def __init__(self, vectors: Sequence[nn.Parameter]) -> None:
        """Take over the gradients of parameters [n], of any sizes."""
        self._vectors = vectors
        for vector in vectors:
            # The gradient of a microbatch is in 16 bits, and that of a step in fp32.
            vector.grad_dtype = None
        # Only the memory is needed. CUDA graphs that were recorded write to the same addresses.
        self._sums = torch.cat([vector.detach() for vector in vectors]).float()
        self._parts = self._sums.split([vector.numel() for vector in vectors])

    def add(self, *, first: bool) -> None:
        """Add the gradients of a microbatch, which are dropped. The first one replaces the sums."""
        gradients = torch.cat([vector.grad for vector in self._vectors if vector.grad is not None])
        if first:
            self._sums.copy_(gradients)
        else:
            self._sums.add_(gradients)
        # Otherwise autograd would add the next microbatch's gradient in 16 bits.
        for vector in self._vectors:
            vector.grad = None

    def assign(self) -> None:
        """Let the sums be the gradients of the parameters."""
        for vector, part in zip(self._vectors, self._parts, strict=True):
            vector.grad = part

"""Recorded activations and their gradients, and the first of them that differs.

A trace has the results of the operators that write or read the residual stream: embedding, norms,
attention, MLP, and the complete layer. The order is that of the computation, so the first tensor
that differs is closest to the cause.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from megatron.model.gpt import GPT

_OPERATORS = re.compile(r"embedding|head\.norm|blocks\.\d+(\.(attention|mlp|\w*norm))?", re.ASCII)
"""Modules whose results are parts of the residual stream."""
_Key = tuple[int, str]
"""Number of the microbatch, and name of the operator."""


@dataclass
class ActivationTrace:
    """The results of operators in one iteration, in their order."""

    outputs: dict[_Key, Tensor] = field(default_factory=dict)
    gradients: dict[_Key, Tensor] = field(default_factory=dict)
    _passes: dict[int, int] = field(default_factory=dict)
    """The number of a stage -> its forward passes."""
    _microbatch: int = 0

    @contextmanager
    def attach(self, stages: Sequence[GPT]) -> Iterator[None]:
        """Record what these stages compute in this context."""
        # The hooks are removed, because closures cannot be stored in a file.
        handles = []
        for number, stage in enumerate(stages):
            begin = partial(self._begin_microbatch, number)
            handles.append(stage.register_forward_pre_hook(begin))
            for name, module in stage.named_modules():
                if _OPERATORS.fullmatch(name):
                    handles.append(module.register_forward_hook(partial(self._record, name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _begin_microbatch(self, stage: int, module: object, args: object) -> None:
        # A stage takes microbatches in order. The number in the key of dropout may be wrong.
        self._microbatch = self._passes.get(stage, 0)
        self._passes[stage] = self._microbatch + 1

    def _record(self, name: str, module: object, args: object, output: Tensor) -> None:
        key = self._microbatch, name
        # The backward pass computes recomputed layers again.
        if key in self.outputs:
            return
        self.outputs[key] = output.detach().clone()
        if output.requires_grad:
            output.register_hook(partial(self._record_gradient, key))

    def _record_gradient(self, key: _Key, gradient: Tensor) -> None:
        self.gradients[key] = gradient.detach().clone()


@dataclass(frozen=True)
class TracedRank:
    """The trace of one rank of the copy in one iteration."""

    rank: str
    """The rank's name for messages."""
    trace: ActivationTrace
    samples: Mapping[int, slice]
    """Number of a microbatch -> its samples in the global batch."""
    tensor_rank: int
    tensor_size: int
    context_rank: int = 0
    context_size: int = 1

    def select(self, whole: Tensor, part: Tensor, microbatch: int) -> Tensor | None:
        """Return this rank's part of [s, B, h], or None if the shapes do not fit.

        Args:
            whole: The reference's tensor of the complete batch.
            part: This rank's tensor, [s, b, h] or [s/t, b, h]. With context parallelism, read s/c
                for s.
            microbatch: The number of the microbatch.
        """
        selected = whole[:, self.samples[microbatch]]
        if self.context_size > 1:
            # A rank has an early and a late part of the sequence.
            parts = selected.chunk(2 * self.context_size)
            selected = torch.cat((parts[self.context_rank], parts[-1 - self.context_rank]))
        # With sequence parallelism, the rank has its slice of the sequence.
        if selected.shape[0] == part.shape[0] * self.tensor_size:
            selected = selected.chunk(self.tensor_size)[self.tensor_rank]
        return selected if selected.shape == part.shape else None


def find_first_difference(
    reference: ActivationTrace, ranks: Sequence[TracedRank], weight_ranks: int, bound: float
) -> str:
    """Return a text about the first tensor that differs by more than the bound, forward first.

    Args:
        reference: The record of one process, whose only microbatch is the global batch.
        ranks: The records of all ranks.
        weight_ranks: Number of data x context ranks. Gradients of a rank are those of its own mean
            loss.
        bound: The largest relative error.
    """
    for attribute, what, factor in (
        ("outputs", "forward pass, output of", 1.0),
        ("gradients", "backward pass, gradient of the output of", 1.0 / weight_ranks),
    ):
        for (_, operator), whole in getattr(reference, attribute).items():
            for rank in ranks:
                for (microbatch, name), found in getattr(rank.trace, attribute).items():
                    if name != operator:
                        continue
                    part = found * factor
                    expected = rank.select(whole, part, microbatch)
                    if expected is None:
                        continue
                    # The smallest term is for a gradient of zeros.
                    norm = float(expected.norm())
                    error = float((part - expected).norm()) / (norm + 1e-30)
                    if not error <= bound:
                        return (
                            f"{what} {operator} on {rank.rank}: norm {float(part.norm()):.6g}, "
                            f"expected {norm:.6g}, relative error {error:.1e}"
                        )
    return (
        "none. The cause is in the reduction of gradients, in the update, or in the data of the "
        "step"
    )

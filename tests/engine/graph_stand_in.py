"""A recorder that takes the place of CUDA graphs on a CPU.

It records the operators of a function with the tensors that they read and write, and repeats them
with the same memory. As on a GPU, no Python of the function runs again, and numbers that are not in
tensors keep their values.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from megatron.extras.step.cuda_graph import RecordingError
from megatron.extras.watch.operator_mode import OperatorMode
from megatron.parallel.rng import draw_mask_in_graph

_READ_BY_HOST = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2")
_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


def detach(tree: Any) -> Any:
    """Return nested tensors without their history, with the same memory."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach(), tree)


class Tape(OperatorMode):
    """Records operators."""

    def __init__(self) -> None:
        """Create a tape without operators."""
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def run_operator(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Call an operator, and record it."""
        name = func.name().split("::")[1].split(".")[0]
        before = torch.get_rng_state()
        if name in _READ_BY_HOST:
            raise RecordingError(f"{func}: the host reads a number")
        out = func(*args, **kwargs)
        if not torch.equal(before, torch.get_rng_state()):
            raise RecordingError(f"{func}: it draws random numbers")
        if func.is_view or name in (*_EMPTY, "detach", "alias", "lift_fresh"):
            return out
        results: list[Tensor] = []
        if not func._schema.is_mutable:
            results = [each for each in pytree.tree_leaves(out) if isinstance(each, Tensor)]
        self.calls.append((func, detach(args), detach(kwargs), detach(results)))
        return out

    @torch.no_grad()
    def repeat(self) -> None:
        """Call the operators again, and write their results into the same memory."""
        for func, args, kwargs, results in self.calls:
            again = func(*args, **kwargs)
            if results:
                made = [each for each in pytree.tree_leaves(again) if isinstance(each, Tensor)]
                for old, new in zip(results, made, strict=True):
                    old.copy_(new)


class StandIn:
    """A `GraphRecorder` for CPUs."""

    def __init__(self) -> None:
        """Create a recorder without tapes."""
        self.tapes: list[Tape] = []
        self.repeated = 0
        self.shortage = ""
        self.shared = 0

    def find_shortage(self, added: int) -> str:
        """Return what a test has set. See `GraphRecorder.find_shortage`."""
        return self.shortage and f"{self.shortage} and {added} bytes"

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record a function. See `GraphRecorder.record`."""
        tape = Tape()
        # On a GPU, an operator computes the masks of dropout.
        with mock.patch("megatron.model.dropout.draw_mask", draw_mask_in_graph), tape:
            run()
        self.tapes.append(tape)

        def repeat() -> None:
            self.repeated += 1
            tape.repeat()

        return repeat

    @contextmanager
    def share_memory(self) -> Iterator[None]:
        """Count the passes beside the graphs. See `GraphRecorder.share_memory`."""
        self.shared += 1
        yield

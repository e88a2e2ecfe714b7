"""Bytes of the fake GPU that are in use, by what they are used for.

All allocations and releases are recorded in their order. A tensor may turn out to be a gradient
only after the peak, so the peak is divided by kind afterwards.
"""

import sys
import weakref
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from megatron.extras.planner.dry_run.record import ACTIVATIONS, COMMUNICATION, GRADIENTS, KINDS

_FSDP = "/torch/distributed/fsdp/_fully_shard/"
_PIPELINE = "megatron/engine/pipeline_runner.py"
_DEPTH = 40
"""Number of Python frames that are searched for the cause of an allocation."""


class MemoryLog:
    """The allocations of a rank, from its start on."""

    def __init__(self) -> None:
        """Start with no memory in use."""
        self._serials: dict[int, int] = {}
        # Storage of C++ -> serial number. The serial is never used twice, as addresses are.
        self._references: dict[int, Any] = {}
        self._sizes: list[int] = []
        self._kinds: list[str] = []
        self._events: list[tuple[int, int]] = []
        self._start = 0

    def note(self, tensor: Tensor) -> None:
        """Record the memory of a tensor, if it is new or was resized."""
        storage = tensor.untyped_storage()
        self.note_storage(storage)

    def note_storage(self, storage: torch.UntypedStorage) -> None:
        """Record a storage of the GPU, if it is new or was resized."""
        key = storage._cdata
        size = storage.nbytes()
        serial = self._serials.get(key)
        if serial is None:
            serial = len(self._sizes)
            self._serials[key] = serial
            # The size is added below, by the same lines as for a storage that was resized.
            self._sizes.append(0)
            self._kinds.append(_find_kind())
            self._references[key] = weakref.ref(storage, lambda _: self._release(key))
        if size != self._sizes[serial]:
            self._events.append((serial, size - self._sizes[serial]))
            self._sizes[serial] = size

    def knows(self, storage: torch.UntypedStorage) -> bool:
        """Return whether a storage is one of the GPU's."""
        return storage._cdata in self._serials

    def label(self, tensor: Tensor | None, kind: str) -> None:
        """Set what the memory of a tensor is used for, from its allocation on."""
        if tensor is None:
            return
        serial = self._serials.get(tensor.untyped_storage()._cdata)
        if serial is not None:
            self._kinds[serial] = kind

    def _release(self, key: int) -> None:
        serial = self._serials.pop(key)
        del self._references[key]
        self._events.append((serial, -self._sizes[serial]))
        self._sizes[serial] = 0

    def start_step(self) -> None:
        """Let the peak be searched from now on."""
        self._start = len(self._events)

    def measure_kept(self) -> dict[str, int]:
        """Return the bytes that are in use now, by kind."""
        return self._divide(len(self._events))

    def measure_peak(self) -> dict[str, int]:
        """Return the bytes by kind at the event since `start_step` with most bytes in use."""
        used = sum(delta for _, delta in self._events[: self._start])
        highest = used
        at = self._start
        # Only an event that adds memory can make a new highest sum.
        for number, (_, delta) in enumerate(self._events[self._start :], self._start + 1):
            used += delta
            if used > highest:
                highest = used
                at = number
        return self._divide(at)

    def _divide(self, events: int) -> dict[str, int]:
        """Return the bytes by kind after a number of events."""
        used: Counter[str] = Counter()
        for serial, delta in self._events[:events]:
            used[self._kinds[serial]] += delta
        return {kind: used[kind] for kind in KINDS}


def _find_kind() -> str:
    """Return what memory is used for that is allocated now, from the functions that are running."""
    # The first six frames are this module and the dispatch mode.
    frame: Any = sys._getframe(6)
    for _ in range(_DEPTH):
        if frame is None:
            return ACTIVATIONS
        path = frame.f_code.co_filename
        if _FSDP in path:
            # FSDP2 keeps the gradients of earlier microbatches in fp32. Its other tensors are what
            # it sends and receives.
            if frame.f_code.co_name == "to_accumulated_grad_if_needed":
                return GRADIENTS
            # Its hooks call the modules, whose tensors are none of FSDP2's.
            if path.endswith(("_fsdp_collectives.py", "_fsdp_param.py")):
                return COMMUNICATION
        if path.endswith(_PIPELINE) and frame.f_code.co_name == "_make_buffers":
            return COMMUNICATION
        frame = frame.f_back
    return ACTIVATIONS

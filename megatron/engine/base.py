"""What an engine is: it executes a step. It holds no counter of the run; the loop gives it batch and learning rate."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megatron.data.batches import Microbatch
from megatron.model.inputs import Inputs
from megatron.parallel.rng import DropoutKey
from megatron.parallel.shard import TensorShard

PhaseTimers = Callable[[str], AbstractContextManager[None]]
"""Entered around `forward-backward` and `optimizer`."""


def skip_timing(phase: str) -> AbstractContextManager[None]:
    """For who does not ask where the time goes."""
    return nullcontext()


@dataclass(frozen=True)
class StepResult:
    """One global batch, the same on every rank."""

    loss: float
    """Mean over the batch; may be nan or inf."""
    grad_norm: float
    """Of the whole model, before clipping, unscaled; may be nan or inf."""
    applied: bool
    """False: loss or gradient norm was not finite, and the step was dropped on all ranks."""
    num_zeros: int | None
    """Zeros in the gradient, where they are counted."""
    loss_scale: float | None
    """The scale this step ran with (fp16)."""
    overflow: bool
    """Dropped as part of the search for a loss scale: no sign of trouble."""

    @property
    def is_nan(self) -> bool:
        """Dropped, and no other loss scale would have saved it."""
        return not self.applied and not self.overflow


def build_inputs(
    microbatches: Sequence[Microbatch], iteration: int, device: torch.device
) -> list[Inputs]:
    """What the model is given; on a GPU the copies of later microbatches overlap with the computation of earlier ones."""
    return [
        Inputs(
            m.tokens,
            m.labels,
            m.loss_mask,
            m.position_ids,
            m.documents,
            DropoutKey(iteration, number),
        ).to(device)
        for number, m in enumerate(microbatches)
    ]


class Engine(Protocol):
    pre_update_hook: Callable[[], None]
    """Called before weights or moments change: a save may still be copying them."""

    def train_batch(
        self, microbatches: Sequence[Microbatch], *, iteration: int, lr: float
    ) -> StepResult:
        """Train one global batch: this rank's microbatches, in order. `iteration` (1-based) seeds dropout."""
        ...

    def eval_batch(self, microbatches: Sequence[Microbatch]) -> float:
        """Mean loss of one global batch without training."""
        ...

    def shards(self, *, optimizer: bool) -> list[TensorShard]:
        """The live state of this rank: weights, and with `optimizer` the moments."""
        ...

    def get_scalars(self) -> dict[str, Any]:
        """The rest of the optimizer's state as JSON: its step count, and the search for a loss scale."""
        ...

    def finish_load(self, scalars: dict[str, Any] | None) -> None:
        """Chunks were written into: take over what follows from them. None: the optimizer starts afresh."""
        ...

    def check_invariants(self, *, repair: bool, iteration: int, last_good: int | None) -> list[str]:
        """Compare what several ranks hold alike. `repair`: make it equal, and return a line for each tensor that was not.

        `iteration` is done, and after `last_good` all was equal (None: it was never checked): an error says both.

        Raises:
            TrainingError: on every rank; something differs, and was not to be repaired or cannot be.
        """
        ...

    def compute_parameter_norm(self) -> float:
        """Norm of all weights of the model."""
        ...

    def describe_kernels(self) -> list[tuple[str, str, str]]:
        """(what, which implementation, why) for the table at start."""
        ...

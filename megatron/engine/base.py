"""The interface of an engine, which executes one training step.

An engine holds no counter of the run. The training loop passes it the microbatches, the iteration
and the learning rate of each step.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.data.batches import Microbatch
from megatron.model.gpt import GPT
from megatron.model.inputs import Inputs
from megatron.model.tally import Tally
from megatron.parallel.shard import TensorShard

PhaseTimers = Callable[[str], AbstractContextManager[None]]
"""A function from the name of a phase to the context manager that an engine enters around it.

The phases are `forward-backward` and `optimizer`.
"""


Accept = Callable[[float, float | None], bool]
"""Takes the loss and the gradient norm of a step. Returns whether it may change the weights.

The norm is None if the engine does not know it before the update. The loss is finite.
"""


AcceptOnDevice = Callable[[Any, Any], Any]
"""`Accept` for two finite numbers, and for two scalar tensors in fp64 on the device.

For tensors it returns a tensor. It may only compare, so that host and device decide alike.
"""


@dataclass(frozen=True)
class UpdateSettings:
    """What the loop decides about an update when it has read the step before."""

    lr: float
    """See `Engine.train_batch`."""
    decoupled_lr: float | None
    """See `Engine.train_batch`."""
    accept: AcceptOnDevice | None
    """None: every finite step changes the weights."""


Vote = Callable[[], Sequence[float]]
"""Returns numbers of this rank, which the step's all-reduce adds up over all ranks.

It is called as late as possible, when the gradients are complete.
"""


def skip_timing(phase: str) -> AbstractContextManager[None]:
    """Return a no-op timer, used when timing is disabled."""
    return nullcontext()


def skip_waiting() -> None:
    """Do nothing before an update, because no save copies the state."""


@dataclass(frozen=True)
class LayerStatistics:
    """Numbers of one iteration that show which layer diverges, the same on every rank.

    A list has a number for each layer of the model. The names are keys in the metrics file.
    """

    layer_output_rms: list[float]
    """Root mean square of the residual stream after the layer, over the global batch."""
    layer_grad_norm: list[float]
    """Norm of the gradient of the layer's parameters, unscaled and before clipping."""
    layer_params_norm: list[float]
    """Norm of the layer's parameters after the iteration."""
    layer_attention_logit: list[float]
    """Largest |q k| / sqrt(d) before the softmax. It is infinite if a logit is nan."""
    output_logit: float
    """Largest absolute value of the logits of the vocabulary. It is infinite if one is nan."""


@dataclass(frozen=True)
class ExpertStatistics:
    """What the routers of a step chose, the same on every rank."""

    layers: Sequence[int]
    """Numbers of the layers with experts. The lists below have an entry for each."""
    counts: Sequence[Sequence[int]]
    """How often each expert was chosen."""
    balancing_loss: Sequence[float]
    """E sum(f p), at least 1 if choices and scores agree. It is 1 if all experts have the same
    load. See --moe-aux-loss-coeff."""
    z_loss: Sequence[float]
    """Mean of log(sum of exp(logits))^2 of the routers."""
    entropy: Sequence[float]
    """Mean entropy of a token's scores, in nats."""

    def compute_loads(self) -> list[list[float]]:
        """Return the loads of each layer's experts, in multiples of the mean."""
        return [
            [len(counts) * count / max(1, sum(counts)) for count in counts]
            for counts in self.counts
        ]


class StepOutcome(Enum):
    """Whether a step has updated the weights, or why it was dropped on all ranks."""

    APPLIED = "applied"
    """The weights were updated."""
    OVERFLOW = "overflow"
    """Loss or gradient norm was not finite in the search for a loss scale, as usual in fp16."""
    NOT_FINITE = "not finite"
    """Loss or gradient norm was not finite, and no other loss scale would have prevented it."""
    REJECTED = "rejected"
    """Both were finite, and `accept` returned False."""
    EMPTY = "empty"
    """No token of the batch counts. Loss and norm are 0."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The result of one global batch, the same on every rank."""

    loss: float
    """Mean over the batch. It may be nan or inf."""
    grad_norm: float
    """Norm of the complete model's gradient, unscaled and before clipping. It may be nan or inf."""
    outcome: StepOutcome
    num_zeros: int | None = None
    """Number of zeros in the gradient, or None if they are not counted."""
    loss_scale: float | None = None
    """The loss scale of this step, or None without fp16."""
    layers: LayerStatistics | None = None
    """None if they were not asked for."""
    experts: ExpertStatistics | None = None
    """None for a model without experts."""
    votes: Sequence[float] | None = None
    """The sums of the ranks' votes. None if there was no vote, or no message to carry it."""
    warnings: Sequence[str] = ()
    """What the log and the chronicle must say about the step, one line each."""

    @property
    def applied(self) -> bool:
        """Whether the weights were updated."""
        return self.outcome is StepOutcome.APPLIED


def build_inputs(
    microbatches: Sequence[Microbatch],
    iteration: int,
    device: torch.device,
    origin: tuple[int, int, int] = (0, 0, 1),
) -> list[Inputs]:
    """Return the inputs of the model for each microbatch, on `device`.

    The copies to a GPU are queued on the stream that computes, before the first microbatch. The
    host does not wait for them.

    A stream of their own would hide less than a thousandth of a step. A token has at most 28 bytes
    (its id, its label, its position and its weight), which take 1.1 ns at 25 GB/s. A model with
    10^8 parameters needs 6 x 10^8 operations for it, which take 1,500 ns at 400 TFLOPS.

    Args:
        microbatches: This rank's microbatches, in order.
        iteration: The 1-based iteration.
        device: Where the model computes.
        origin: The seed of dropout, this rank's data-parallel coordinate, and the data-parallel
            size.
    """
    seed, rank, ranks = origin
    # The data-parallel ranks take turns, see `compute_sample_positions`.
    firsts = [(number * ranks + rank) * len(m.tokens) for number, m in enumerate(microbatches)]
    # One copy to the device is enough for all microbatches.
    keys = torch.tensor([(seed, iteration, first) for first in firsts])
    if device.type == "cuda":
        keys = keys.pin_memory().to(device, non_blocking=True)
    return [
        Inputs(
            m.tokens,
            m.labels,
            m.loss_mask,
            m.position_ids,
            m.documents,
            keys[number],
        ).to(device)
        for number, m in enumerate(microbatches)
    ]


class Engine(Protocol):
    """What the training loop requires of an engine.

    Its constructor takes a function `before_update`. The engine calls it before weights or moments
    change, because a save may still copy them.
    """

    stages: Sequence[GPT]
    """The stages of this rank, in the order of the layers."""
    reads_late: bool
    """Whether `queue_batch` can be called."""

    def train_batch(
        self,
        microbatches: Sequence[Microbatch],
        *,
        iteration: int,
        lr: float,
        decoupled_lr: float | None = None,
        with_layer_statistics: bool = False,
        accept: Accept | None = None,
        vote: Vote | None = None,
    ) -> StepResult:
        """Train on one global batch.

        A step in which no token counts changes neither weights nor moments nor the loss scale.

        Args:
            microbatches: This rank's microbatches, in order.
            iteration: The 1-based iteration. Masks of dropout depend on it.
            lr: The learning rate of this step.
            decoupled_lr: The rate of the word embedding and the output matrix. None: `lr`.
            with_layer_statistics: Fill `StepResult.layers`.
            accept: Decides whether a finite step changes weights, moments and loss scale. It gets
                the same numbers on all ranks. None: every finite step does.
            vote: Returns this rank's terms of `StepResult.votes`.
        """

    def queue_batch(
        self,
        microbatches: Sequence[Microbatch],
        *,
        iteration: int,
        plan_update: Callable[[], UpdateSettings | None],
        vote: Vote,
    ) -> Callable[[], StepResult] | None:
        """Queue the work of a step on the device, which decides whether the weights change.

        It gives the bits of `train_batch`.

        Args:
            microbatches: See `train_batch`.
            iteration: See `train_batch`.
            plan_update: Called when the microbatches are queued. It must read the step before. With
                None, the gradients are dropped.
            vote: See `train_batch`.

        Returns:
            A function that waits for the numbers of the step. It must be called before the next
            update is planned, and before anything else is called. None if there was no update.
        """

    def eval_batch(self, microbatches: Sequence[Microbatch], tally: Tally | None = None) -> float:
        """Return the mean loss of one global batch without training.

        Args:
            microbatches: This rank's microbatches, in order.
            tally: Receives the sums over this rank's predictions.
        """

    def score_batch(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """Return how likely the labels of each sample are that the loss masks keep.

        All ranks call it with as many microbatches of the same shape, each with a mask.

        Returns:
            float64[d x m x b, 2] on the CPU, the same on every rank, for m microbatches on each of
            d data-parallel ranks. The samples of the first data-parallel rank come first. The
            columns are the log-likelihood in nats, and 1 if each label is the most likely token.
        """

    def shards(self, *, optimizer: bool) -> list[TensorShard]:
        """Return the live state of this rank: weights, and with `optimizer` the moments."""

    def get_scalars(self) -> dict[str, Any]:
        """Return the rest of the optimizer's state as JSON values.

        These are its step count and, in fp16, the state of the search for a loss scale.
        """

    def finish_load(self, scalars: dict[str, Any] | None) -> None:
        """Update everything that depends on the shards, after they were written into.

        Args:
            scalars: What `get_scalars` returned when the state was saved. With None, the optimizer
                starts from scratch.
        """

    def check_invariants(self, *, repair: bool, iteration: int, last_good: int | None) -> list[str]:
        """Compare the state that several ranks replicate.

        Args:
            repair: Overwrite replicas that differ with those of the first rank.
            iteration: The last completed iteration, for the error message.
            last_good: The iteration after which the last check found no difference, for the error
                message. None if there was no check yet.

        Returns:
            A line for each tensor that was repaired.

        Raises:
            TrainingError: Something differs, and `repair` is not set or the difference cannot be
                repaired. Every rank raises it.
        """

    def compute_parameter_norm(self) -> float:
        """Return the norm of all weights of the model."""

    def describe_choices(self) -> list[tuple[str, str, str]]:
        """Return the rows (what, which implementation, why) of the table printed at start."""

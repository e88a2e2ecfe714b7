"""The events that a run reports, as plain values, and the interface of the outputs.

Each event goes to all outputs, which are the subclasses of `Sink`. So they cannot disagree.

Invariant: nothing here depends on an engine, a tensor or a file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Axes:
    """Position of a number in the run. Charts have these values as their x axis."""

    iteration: int
    consumed_samples: int
    consumed_tokens: int
    gigaflops_without_embeddings: float
    """10^9 floating-point operations since the run's first iteration, without embeddings."""

    @classmethod
    def of(cls, counters: Any) -> "Axes":
        """Return the position that a report or the state of a run has."""
        return cls(**{axis.name: getattr(counters, axis.name) for axis in fields(cls)})


@dataclass(frozen=True, kw_only=True)
class IterationReport:
    """One iteration, or the mean over a log interval. The counters are those after it.

    The names of the fields are keys in the metrics file, so they must not change.
    """

    iteration: int
    """Number of the iteration, from 1."""
    train_iters: int
    """Number of iterations that the run will have."""
    consumed_samples: int
    consumed_tokens: int
    global_batch_size: int
    learning_rate: float
    """Learning rate after this iteration, as Megatron prints it."""
    seconds: float
    """Wall time of one iteration in seconds."""
    samples_per_second: float
    tokens_per_second: float
    tflops: float
    """TFLOPs of one device, in the convention that the start table names."""
    decoupled_learning_rate: float | None = None
    """Rate of the word embedding and the output matrix. None if they have that of all others."""
    skipped_iterations: int = 0
    """Number of iterations since the last report whose step was not applied."""
    nan_iterations: int = 0
    """Number of those whose loss or gradient was not finite, without fp16's search for a scale."""
    lm_loss: float | None = None
    """None if no step was applied."""
    dropped_loss: float | None = None
    """Loss of this iteration if its step was not applied."""
    grad_norm: float | None = None
    loss_scale: float | None = None
    """None without fp16."""
    batch_digest: str | None = None
    """Digest of the tokens of the last batch, which does not depend on the layout. None if the
    engine adds up no votes."""
    peak_memory_bytes: int | None = None
    """Largest memory that rank 0 has used on its GPU. None without one."""
    num_zeros: float | None = None
    """Zeros in the gradient. None unless --log-num-zeros-in-grad asks for it."""
    params_norm: float | None = None
    """Norm of the parameters. None unless --log-params-norm asks for it."""
    curriculum_seqlen: int | None = None
    """Current sequence length. None without curriculum learning."""
    mfu: float | None = None
    """Fraction of the device's peak, 0 to 1. None if the peak is not known."""
    remaining_seconds: float | None = None
    """Seconds to the end of the run at this speed. None if the end is not known."""
    goodput: float | None = None
    """Share of the run's wall time in steps that were kept, 0 to 1. None if it is not known."""
    gigaflops_without_embeddings: float = 0.0
    """See `Axes`."""
    phase_seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase, as returned by `Timers.take`. On a GPU, those of forward pass, backward
    pass, optimizer and communication are of the iteration before."""
    layer_statistics: Mapping[str, float | Sequence[float]] = field(default_factory=dict)
    """Numbers of an iteration that is due by --log-layer-stats-interval, by their key in the
    metrics file. A sequence has a number for each layer."""
    experts: Mapping[str, Any] = field(default_factory=dict)
    """Numbers of the last iteration about experts, by their key in the metrics file:
    `largest_expert_load`, `smallest_expert_load` (of all layers, in multiples of the mean),
    `expert_balancing_loss`, `router_z_loss`, `router_entropy` (means over layers), and in some
    iterations `expert_loads` (a list for each layer). Empty for a model without experts."""

    @property
    def axes(self) -> Axes:
        """The position of this report in the run."""
        return Axes.of(self)


@dataclass(frozen=True)
class EvaluationResult:
    """What one evaluation of one validation or test set gives."""

    loss: float
    """Mean over the positions that count, in nats. See --loss-mean."""
    accuracy: float
    """Share of the positions at which the most likely token is the next one, 0 to 1."""
    bits_per_byte: float | None
    """Loss in bits for each byte of text, which does not depend on the tokenizer.

    It is None if the bytes of the tokens are not known.
    """


@dataclass(frozen=True)
class LaunchStart:
    """The start of a launch that trains."""

    iteration: int
    """The launch continues after it. It is 0, or that of the loaded checkpoint."""


@dataclass(frozen=True)
class StepTimes:
    """The times of an iteration, before its report. Or those of the last save and evaluation."""

    phase_seconds: Mapping[str, float]
    """See `IterationReport`."""
    seconds: float = 0.0
    """Wall time of the iteration. It is 0 if no iteration belongs to the phases."""
    applied: bool = True
    """Whether the iteration has updated the weights."""


@dataclass(frozen=True, kw_only=True)
class EvaluationReport:
    """The result of a validation or test set."""

    at: Axes
    name: str = "validation"
    """Name of the set."""
    loss: float
    accuracy: float | None = None
    bits_per_byte: float | None = None
    is_one_of_several: bool = False
    """Whether charts need the name. A single validation set needs none, and a test set has one."""


@dataclass(frozen=True)
class NamedNumbers:
    """Numbers of a task, of the filters of a data set, or of a comparison of the ranks."""

    kind: Literal["task", "filters", "ranks"]
    iteration: int
    name: str
    """The task, the data set, or what was measured."""
    numbers: Mapping[str, Any]


@dataclass(frozen=True)
class RunEvent:
    """What happened to a run. The chronicle records it."""

    kind: str
    """start, stop, save, skip, alert or note."""
    iteration: int | None
    """The last iteration of the run. None if it is not known."""
    details: Mapping[str, Any]
    """What else is known, by name. The names depend on the kind."""
    at_close: bool = False
    """Whether it is recorded when the outputs are closed."""


@dataclass(frozen=True)
class Flush:
    """A save begins. What is in memory is written, so that a killed run loses little."""


ReportEvent = (
    LaunchStart | StepTimes | IterationReport | EvaluationReport | NamedNumbers | RunEvent | Flush
)


class Sink:
    """An output of the reports of a run. Only rank 0 has one."""

    def write(self, event: ReportEvent) -> None:
        """Write an event, or ignore it. A full disk must not end the run."""

    def close(self) -> None:
        """Write what is left, and close the output."""

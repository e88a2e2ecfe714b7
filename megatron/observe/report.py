"""The numbers of one iteration, as plain values: what the log line, TensorBoard and the metrics file all show.

Invariant: nothing here knows an engine, a tensor or a file. The loop fills one report and hands it to each of the three, so
that they cannot disagree.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Axes:
    """Where in the run a number belongs: what charts have as their x axis."""

    iteration: int
    consumed_samples: int
    consumed_tokens: int
    gigaflops_without_embeddings: float
    """10^9 floating-point operations since the first iteration of the run, embeddings left out."""


@dataclass(frozen=True, kw_only=True)
class IterationReport:
    """One iteration, or the mean over a log interval; counters are those after it."""

    iteration: int
    """Number of the iteration, from 1."""
    train_iters: int
    """Iterations that the run will have."""
    consumed_samples: int
    consumed_tokens: int
    global_batch_size: int
    learning_rate: float
    """The one after this iteration, as Megatron prints it."""
    seconds: float
    """Wall time of one iteration."""
    samples_per_second: float
    tokens_per_second: float
    tflops: float
    """A device's TFLOPs, in the convention that the start table names."""
    skipped_iterations: int = 0
    """Iterations since the last report whose step was not applied."""
    nan_iterations: int = 0
    """Those of them whose loss or gradient was not a number."""
    lm_loss: float | None = None
    """None where no step was applied."""
    grad_norm: float | None = None
    loss_scale: float | None = None
    """None without fp16."""
    num_zeros: float | None = None
    """Zeros in the gradient; None unless asked for."""
    params_norm: float | None = None
    """None unless asked for."""
    curriculum_seqlen: int | None = None
    """Current sequence length; None without curriculum learning."""
    mfu: float | None = None
    """Part of the device's peak, 0 to 1; None where the peak is not known."""
    gigaflops_without_embeddings: float = 0.0
    """As in `Axes`."""
    phase_seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds of this iteration by phase, as `Timers.take` gives them."""

    @property
    def axes(self) -> Axes:
        return Axes(
            iteration=self.iteration,
            consumed_samples=self.consumed_samples,
            consumed_tokens=self.consumed_tokens,
            gigaflops_without_embeddings=self.gigaflops_without_embeddings,
        )

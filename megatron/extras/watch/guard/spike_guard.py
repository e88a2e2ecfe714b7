"""The decisions of the spike guard: whether a step is a spike, and how the run responds.

Invariant: a decision is a function of the losses and gradient norms, and of the state. The first
are the same on all ranks, and the state is in the checkpoints. So all ranks make the same decision
without a message, and a resumed run makes the decisions of a run that was not interrupted.

Bad data and bad weights both cause spikes, and only for bad data it helps to drop the step. Spikes
in a row on different data mean that the weights are the cause, or that the data have changed for
long. The steps are then applied. A high gradient norm at a normal or slightly raised loss is
applied if another one came within the window before it, because clipping limits its step. The
other spikes of the loss are applied after they outnumber normal steps by `LASTING`. A loss is
slightly raised if it is above its limit, but not above `compute_high_loss` of its level. A single
such loss is no reason to drop a step.
"""

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from megatron.config.spike_guard import SpikeGuardConfig
from megatron.engine.base import StepOutcome, StepResult
from megatron.extras.watch.guard.spike_estimator import SpikeEstimator
from megatron.run.state import compute_high_loss


class Response(Enum):
    """The response to a spike. The values are those of the records on disk."""

    LOG = "log"
    """Record it. The step was applied."""
    SKIP_STEP = "skip-step"
    """Record it. The step was dropped."""
    ROLLBACK = "rollback"
    """Go back to a checkpoint, and skip the data around the spike."""
    SWITCH_TO_LOG = "switch-to-log"
    """Drop and roll back no more, because the guard has intervened too often."""
    STOP = "stop"
    """End the run, because it has diverged."""


@dataclass(frozen=True)
class Spike:
    """A step that is a spike, and the response to it."""

    iteration: int
    loss: float
    grad_norm: float
    loss_limit: float | None
    """Largest loss that is not a spike. None if it is not known yet."""
    loss_lower_limit: float | None
    """Smallest loss that is not a spike. None if it is not known yet."""
    grad_norm_limit: float | None
    reason: str
    """What is wrong with the step, as text."""
    response: Response
    dropped: bool
    """Whether the step changed neither weights nor moments."""
    first: int
    """First iteration of the uninterrupted row of spikes that this one belongs to."""
    last_normal: int
    """Last iteration before `first` whose loss was normal."""


@dataclass(frozen=True)
class StepLimits:
    """What the numbers of a step must be, so that it may change the weights.

    The bounds belong to the ranges.
    """

    loss: tuple[float, float]
    """Range of the loss if the gradient norm is within its range."""
    grad_norm: tuple[float, float]
    loss_otherwise: tuple[float, float]
    """Range of the loss if the gradient norm is not. (inf, -inf) accepts no loss."""

    def accept(self, loss: Any, grad_norm: Any) -> Any:
        """Return whether a step may change the weights, for two numbers or two scalar tensors."""
        low, high = self.grad_norm
        # `and` would read the tensors of the device. A norm that is nan is in neither range.
        usual = (grad_norm >= low) & (grad_norm <= high)
        unusual = (grad_norm < low) | (grad_norm > high)
        within, otherwise = (
            (loss >= low) & (loss <= high) for low, high in (self.loss, self.loss_otherwise)
        )
        return (usual & within) | (unusual & otherwise)


@dataclass(frozen=True)
class _Verdict:
    """What is unusual about the numbers of a step."""

    reasons: tuple[str, ...]
    """What is wrong, as text. It is empty if the step is not a spike."""
    bad_data: bool
    """Whether the loss alone shows that the data are bad."""
    raised_loss: bool
    """Whether the loss is too high, but not far."""
    low_loss: bool
    """Whether the loss is too low."""
    high_norm: bool
    """Whether the gradient norm is too high, or is not finite."""


class SpikeGuard:
    """Judges the steps of a run. Call `accepts` before the update and `observe` after the step."""

    def __init__(
        self, config: SpikeGuardConfig, state: dict[str, Any], untrained_loss: float = math.inf
    ) -> None:
        """Continue from a state.

        Args:
            config: The flags of the guard.
            state: What `state` returned at the save. It is empty at the start of a run.
            untrained_loss: Loss of a model that gives all tokens the same probability, in nats.
        """
        self._config = config
        self._diverged_loss = compute_high_loss(untrained_loss)
        self._loss = self._build_estimator(config.spike_guard_min_rise, config.spike_guard_reach)
        # The norm rises and falls with the learning rate, so a rise above its lowest level is
        # normal.
        self._norm = self._build_estimator(config.spike_guard_min_norm_rise, None)
        self._first: int | None = None
        """First iteration of the present spike, or None."""
        self._last_normal = 0
        self._in_a_row = 0
        """Spikes in a row that count for a rollback, which are high losses and nan."""
        self._since_norm_spike = config.spike_guard_window
        """Steps since the last high gradient norm, up to the window."""
        self._diverged_in_a_row = 0
        """Steps in a row whose loss was above that of an untrained model."""
        self._only_logs = False
        self._dropped: list[int] = []
        """Iterations that were dropped, within the guard's reach."""
        self.windows: list[tuple[int, int]] = []
        """(first, last) iteration that each rollback skips. There is one entry for each rollback,
        because overlapping ranges are not merged."""
        if "loss" in state:
            self._loss.load(state["loss"])
            self._norm.load(state["grad_norm"])
            self._first = state["first"]
            self._last_normal = state["last_normal"]
            self._in_a_row = state["in_a_row"]
            self._dropped = list(state["dropped"])
            # Older versions do not have the others.
            self._since_norm_spike = state.get("since_norm_spike", self._since_norm_spike)
            self._diverged_in_a_row = state.get("diverged_in_a_row", 0)
            self._only_logs = state.get("only_logs", False)
        self.windows = [(first, last) for first, last in state.get("windows", [])]

    def _build_estimator(self, min_rise: float, reach: int | None) -> SpikeEstimator:
        config = self._config
        return SpikeEstimator(
            window=config.spike_guard_window,
            smoothing=config.spike_guard_smoothing,
            min_steps=config.spike_guard_min_steps,
            threshold=config.spike_guard_threshold,
            min_rise=min_rise,
            reach=reach,
        )

    def state(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {
            "loss": self._loss.state(),
            "grad_norm": self._norm.state(),
            "first": self._first,
            "last_normal": self._last_normal,
            "in_a_row": self._in_a_row,
            "since_norm_spike": self._since_norm_spike,
            "diverged_in_a_row": self._diverged_in_a_row,
            "only_logs": self._only_logs,
            "dropped": list(self._dropped),
            "windows": [list(window) for window in self.windows],
        }

    def start_phase(self) -> None:
        """Forget the estimates, because the losses of the new phase have another level.

        A guard that only logged drops steps again.
        """
        self._loss.clear()
        self._norm.clear()
        self._dropped = []
        self._only_logs = False

    def accepts(self, loss: float, grad_norm: float | None) -> bool:
        """Return whether a step may change the weights. It may not if its data seem to be bad.

        Args:
            loss: Mean loss of the global batch.
            grad_norm: Norm of the gradient before clipping. None if the engine does not know it
                before the update.
        """
        limits = self.find_limits()
        # A norm that is not known counts as usual.
        if grad_norm is None:
            grad_norm = limits.grad_norm[1]
        return bool(limits.accept(loss, grad_norm))

    def find_limits(self) -> StepLimits:
        """Return what the numbers of the next step must be, so that it changes the weights."""
        everything = -math.inf, math.inf
        if self._only_logs or len(self._dropped) >= self._config.spike_guard_max_skips:
            return StepLimits(everything, everything, everything)
        grad_norm = everything
        if self._config.watches_gradient_norm:
            grad_norm = _close(*self._norm.find_limits())
        low, high = _close(*self._loss.find_limits())
        level = self._loss.find_level()
        raised = high
        if level is not None:
            raised = max(high, compute_high_loss(level))
        # If the last high norm came from other data, the weights are the cause.
        is_first_norm = self._since_norm_spike >= self._config.spike_guard_window
        return StepLimits(
            # A single batch with a raised loss is usual, and does no harm. Several in a row are
            # not.
            loss=(low, high if self._in_a_row else raised),
            grad_norm=grad_norm,
            loss_otherwise=(math.inf, -math.inf) if is_first_norm else (low, raised),
        )

    def observe(self, result: StepResult, iteration: int) -> Spike | None:
        """Update the estimates with a step, and return the spike if it is one.

        Args:
            result: The step.
            iteration: Its iteration.
        """
        # An overflow in fp16 only lowers the loss scale. A step in which no token counts has no
        # loss. Neither is a spike.
        if result.outcome in (StepOutcome.OVERFLOW, StepOutcome.EMPTY):
            return None
        norm: float | None = result.grad_norm
        # DeepSpeed computes no norm for a step that was dropped for its loss.
        is_rejected = result.outcome is StepOutcome.REJECTED
        if is_rejected and not math.isfinite(result.grad_norm):
            norm = None
        self._dropped = [at for at in self._dropped if self._is_within_reach(at, iteration)]
        verdict = self._judge(result.loss, norm)
        if self._has_diverged(result.loss):
            text = f"the loss was above {self._diverged_loss:.4g} for the last "
            text += f"{self._diverged_in_a_row} iterations"
            verdict = replace(verdict, reasons=(text, *verdict.reasons))
        spike = None
        if verdict.reasons:
            # The limits are those from before this step.
            spike = self._make_spike(result, iteration, verdict)
        else:
            self._first = None
            self._in_a_row = 0
        if math.isfinite(result.loss):
            self._loss.record(result.loss, iteration)
        if norm is not None and math.isfinite(norm):
            self._norm.record(norm, iteration)
        if verdict.high_norm:
            self._since_norm_spike = 0
        elif self._since_norm_spike < self._config.spike_guard_window:
            self._since_norm_spike += 1
        return spike

    def _has_diverged(self, loss: float) -> bool:
        """Count the losses in a row that are far above that of an untrained model.

        Losses that are not finite are counted by --max-nan-iterations.
        """
        if loss > self._diverged_loss and math.isfinite(loss):
            self._diverged_in_a_row += 1
        elif math.isfinite(loss):
            self._diverged_in_a_row = 0
        return self._diverged_in_a_row >= self._config.spike_guard_reach

    def _judge(self, loss: float, grad_norm: float | None) -> _Verdict:
        """Compare the numbers of a step with their limits."""
        norm_text = None
        if grad_norm is not None and not math.isfinite(grad_norm):
            norm_text = f"the gradient norm is {grad_norm}"
        elif grad_norm is not None and self._config.watches_gradient_norm:
            norm_text = _describe("gradient norm", grad_norm, *self._norm.find_limits())
        lower, upper = self._loss.find_limits()
        if math.isfinite(loss):
            loss_text = _describe("loss", loss, lower, upper)
        else:
            loss_text = f"the loss is {loss}"
        low_loss = lower is not None and loss < lower
        level = self._loss.find_level()
        is_spike = loss_text is not None
        raised_loss = False
        if is_spike and not low_loss and level is not None:
            raised_loss = loss <= compute_high_loss(level)
        return _Verdict(
            tuple(text for text in (loss_text, norm_text) if text is not None),
            bad_data=is_spike and not raised_loss,
            raised_loss=raised_loss,
            low_loss=low_loss,
            high_norm=norm_text is not None,
        )

    def _make_spike(self, result: StepResult, iteration: int, verdict: _Verdict) -> Spike:
        """Count a spike, and return it with the response to it."""
        if self._first is None:
            self._first = iteration
            self._last_normal = self._loss.find_last_normal(iteration)
        # A rollback would not help against bad weights. Data with a low loss have done no harm,
        # because their steps were dropped.
        high_loss = verdict.bad_data and not verdict.low_loss
        raised_loss = verdict.raised_loss and not verdict.high_norm
        counts = high_loss or raised_loss or result.outcome is StepOutcome.NOT_FINITE
        self._in_a_row += counts
        if not result.applied:
            self._dropped.append(iteration)
        lower, upper = self._loss.find_limits()
        return Spike(
            iteration=iteration,
            loss=result.loss,
            grad_norm=result.grad_norm,
            loss_limit=upper,
            loss_lower_limit=lower,
            grad_norm_limit=self._norm.find_limits()[1],
            reason="; ".join(verdict.reasons),
            response=self._choose_response(iteration, dropped=not result.applied, counts=counts),
            dropped=not result.applied,
            first=self._first,
            last_normal=self._last_normal,
        )

    def _choose_response(self, iteration: int, *, dropped: bool, counts: bool) -> Response:
        config = self._config
        if config.spike_guard == "log":
            return Response.LOG
        if self._diverged_in_a_row >= config.spike_guard_reach:
            return Response.STOP
        if self._only_logs:
            return Response.LOG
        # `accepts` drops no more of them, but a step that is not finite is always dropped.
        if len(self._dropped) + (not dropped) > config.spike_guard_max_skips:
            self._only_logs = True
            return Response.SWITCH_TO_LOG
        needs_rollback = counts and self._in_a_row % config.spike_guard_patience == 0
        if config.spike_guard == "rollback" and needs_rollback:
            if self.count_rollbacks(iteration) >= config.spike_guard_max_rollbacks:
                self._only_logs = True
                return Response.SWITCH_TO_LOG
            return Response.ROLLBACK
        return Response.SKIP_STEP if dropped else Response.LOG

    def count_rollbacks(self, iteration: int) -> int:
        """Return the number of rollbacks that still count at an iteration."""
        return sum(self._is_within_reach(last, iteration) for _, last in self.windows)

    def _is_within_reach(self, earlier: int, iteration: int) -> bool:
        return earlier > iteration - self._config.spike_guard_reach


def _close(lower: float | None, upper: float | None) -> tuple[float, float]:
    """Return limits as a range. A missing limit is infinite."""
    if lower is None:
        lower = -math.inf
    if upper is None:
        upper = math.inf
    return lower, upper


def _describe(name: str, value: float, lower: float | None, upper: float | None) -> str | None:
    """Return what is wrong with a number, as text, or None if it is within its limits."""
    if upper is not None and value > upper:
        return f"the {name} is {value:.4g}, above the limit of {upper:.4g}"
    if lower is not None and value < lower:
        return f"the {name} is {value:.4g}, below the limit of {lower:.4g}"
    return None

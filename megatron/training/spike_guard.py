"""The decisions of the spike guard: whether a step is a spike, and how the run responds.

Invariant: a decision is a function of the losses and gradient norms, and of the state. The first
are the same on all ranks, and the state is in the checkpoints. So all ranks make the same decision
without a message, and a resumed run makes the decisions of a run that was not interrupted.
"""

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

from megatron.config.spike_guard import SpikeGuardConfig
from megatron.engine.base import StepResult
from megatron.training.spike_estimator import SpikeEstimator


class Response(Enum):
    """The response to a spike. The values are those of the records on disk."""

    LOG = "log"
    """Record it. The step was applied."""
    SKIP_STEP = "skip-step"
    """Record it. The step was dropped."""
    ROLLBACK = "rollback"
    """Go back to a checkpoint, and skip the data around the spike."""
    STOP = "stop"
    """End the run, because the guard has intervened too often."""


@dataclass(frozen=True)
class Spike:
    """A step that is a spike, and the response to it."""

    iteration: int
    loss: float
    grad_norm: float
    loss_limit: float | None
    """Largest loss that is not a spike. None if it is not known yet."""
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


class SpikeGuard:
    """Judges the steps of a run. Call `accepts` before the update and `observe` after the step."""

    def __init__(self, config: SpikeGuardConfig, state: dict[str, Any]) -> None:
        """Continue from a state.

        Args:
            config: The flags of the guard.
            state: What `state` returned at the save. It is empty at the start of a run.
        """
        self._config = config
        self._loss = self._build_estimator(config.spike_guard_min_rise, config.spike_guard_reach)
        # The norm rises and falls with the learning rate, so a rise above its lowest level is
        # normal.
        self._norm = self._build_estimator(config.spike_guard_min_norm_rise, None)
        self._first: int | None = None
        """First iteration of the present spike, or None."""
        self._last_normal = 0
        self._in_a_row = 0
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
            "dropped": list(self._dropped),
            "windows": [list(window) for window in self.windows],
        }

    def start_phase(self) -> None:
        """Forget the estimates, because the losses of the new phase have another level."""
        self._loss.clear()
        self._norm.clear()

    def accepts(self, loss: float, grad_norm: float | None) -> bool:
        """Return whether a step is not a spike, so that it may change the weights.

        Args:
            loss: Mean loss of the global batch.
            grad_norm: Norm of the gradient before clipping. None if the engine does not know it
                before the update.
        """
        return not self._list_reasons(loss, grad_norm)

    def observe(self, result: StepResult, iteration: int) -> Spike | None:
        """Update the estimates with a step, and return the spike if it is one.

        Args:
            result: The step.
            iteration: Its iteration.
        """
        # An overflow in fp16 only lowers the loss scale, so it is not a spike.
        if result.overflow:
            return None
        norm: float | None = result.grad_norm
        # DeepSpeed computes no norm for a step that was dropped for its loss.
        if result.rejected and not math.isfinite(result.grad_norm):
            norm = None
        reasons = self._list_reasons(result.loss, norm)
        spike = None
        if reasons:
            # The limits are those from before this step.
            spike = self._make_spike(result, iteration, reasons)
        else:
            self._first = None
            self._in_a_row = 0
        if result.applied:
            self._loss.record(result.loss, iteration)
            self._norm.record(result.grad_norm, iteration)
        return spike

    def _list_reasons(self, loss: float, grad_norm: float | None) -> list[str]:
        """Return the reasons why a step is a spike, as text. The list is empty if it is not one."""
        signals = [("loss", loss, self._loss.find_limit())]
        if grad_norm is not None:
            norm_limit = self._norm.find_limit()
            if self._config.spike_guard_signals == "loss":
                norm_limit = None
            signals.append(("gradient norm", grad_norm, norm_limit))
        reasons = []
        for name, value, limit in signals:
            if not math.isfinite(value):
                reasons.append(f"the {name} is {value}")
            elif limit is not None and value > limit:
                reasons.append(f"the {name} is {value:.4g}, and the limit is {limit:.4g}")
        return reasons

    def _make_spike(self, result: StepResult, iteration: int, reasons: list[str]) -> Spike:
        """Count a spike, and return it with the response to it."""
        self._in_a_row += 1
        if self._first is None:
            self._first = iteration
            self._last_normal = self._loss.find_last_normal(iteration)
        if not result.applied:
            self._dropped.append(iteration)
        self._dropped = [at for at in self._dropped if self._is_within_reach(at, iteration)]
        return Spike(
            iteration=iteration,
            loss=result.loss,
            grad_norm=result.grad_norm,
            loss_limit=self._loss.find_limit(),
            grad_norm_limit=self._norm.find_limit(),
            reason="; ".join(reasons),
            response=self._choose_response(iteration, dropped=not result.applied),
            dropped=not result.applied,
            first=self._first,
            last_normal=self._last_normal,
        )

    def _choose_response(self, iteration: int, *, dropped: bool) -> Response:
        config = self._config
        if config.spike_guard == "log":
            return Response.LOG
        if len(self._dropped) > config.spike_guard_max_skips:
            return Response.STOP
        if config.spike_guard == "rollback" and self._in_a_row % config.spike_guard_patience == 0:
            if self.count_rollbacks(iteration) >= config.spike_guard_max_rollbacks:
                return Response.STOP
            return Response.ROLLBACK
        return Response.SKIP_STEP if dropped else Response.LOG

    def count_rollbacks(self, iteration: int) -> int:
        """Return the number of rollbacks that still count at an iteration."""
        return sum(self._is_within_reach(last, iteration) for _, last in self.windows)

    def _is_within_reach(self, earlier: int, iteration: int) -> bool:
        return earlier > iteration - self._config.spike_guard_reach

"""The factor on the loss that keeps fp16 gradients from becoming zero, and the search for it.

Invariant: the scale follows from the outcomes of the steps alone (dropped or applied), so ranks that agree on these agree on it.
A dynamic scale is as high as the gradients allow. An overflow uses up one of `hysteresis`; the one that uses up the last, and each
further one, halves the scale, never below the minimum. `loss_scale_window` good steps in a row double it and restore hysteresis.

Source: Mixed Precision Training (https://arxiv.org/abs/1710.03740, section 3.2); Megatron-LM's DynamicGradScaler
(core/optimizer/grad_scaler.py). This class decides on both engines. DeepSpeed's own DynamicLossScaler (0.19.8,
runtime/fp16/loss_scaler.py) is not used. It differs in these points:

- From the start of a run, and after each overflow, it doubles for the first time after `loss_scale_window` + 1 good steps, and
  then after each further `loss_scale_window`. Here the first doubling comes after `loss_scale_window` good steps, too.
- On an overflow at the minimum, once hysteresis is used up, it ends the run. Here the trainer counts such steps as nan.
- Its `consecutive_hysteresis` (off by default, not offered here) restores hysteresis on each good step.

Names and help text in the wild speak of overflows in a row; in effect hysteresis counts those since the scale last doubled.
"""

from typing import Any

from megatron.config.precision import PrecisionConfig


class LossScale:
    """Static with --loss-scale, else dynamic. Tell it of each step: `record_applied()` or `record_overflow()`."""

    def __init__(self, config: PrecisionConfig) -> None:
        self._config = config
        self._dynamic = config.loss_scale is None
        self._scale = config.initial_loss_scale if config.loss_scale is None else config.loss_scale
        self._good_steps = 0
        self._hysteresis_left = config.hysteresis

    @property
    def scale(self) -> float:
        """What the next step's loss is multiplied with."""
        return self._scale

    def update_after_step(self, *, applied: bool, loss_is_finite: bool) -> bool:
        """Every rank comes to the same scale, as it saw the same norm. True: the step was dropped as part of the search for it."""
        if applied:
            self.record_applied()
            return False
        return self.record_overflow() and loss_is_finite

    def record_applied(self) -> None:
        """A step was good."""
        if not self._dynamic:
            return
        self._good_steps += 1
        if self._good_steps == self._config.loss_scale_window:
            self._good_steps = 0
            self._hysteresis_left = self._config.hysteresis
            self._scale *= 2

    def record_overflow(self) -> bool:
        """A step was dropped. True: as part of the search, another scale may do. False: static, or at the minimum already."""
        if not self._dynamic:
            return False
        searching = self._scale > self._config.min_loss_scale
        self._good_steps = 0
        self._hysteresis_left = max(0, self._hysteresis_left - 1)
        if self._hysteresis_left == 0:
            self._scale = max(self._scale / 2, self._config.min_loss_scale)
        return searching

    def state(self) -> dict[str, Any]:
        """JSON."""
        scale = {"dynamic": self._dynamic, "scale": self._scale}
        return (
            scale | {"good_steps": self._good_steps, "hysteresis_left": self._hysteresis_left}
            if self._dynamic
            else scale
        )

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a state, within this run's minimum, window and hysteresis.

        The search goes on only where there was one: a static scale is what this run says, and a search behind a static scale
        begins where this run says.
        """
        if not (self._dynamic and state["dynamic"]):
            return
        self._scale = max(float(state["scale"]), self._config.min_loss_scale)
        self._good_steps = min(int(state["good_steps"]), self._config.loss_scale_window - 1)
        self._hysteresis_left = min(int(state["hysteresis_left"]), self._config.hysteresis)

    def describe(self) -> str:
        """For the table at start."""
        if not self._dynamic:
            return f"static {self._scale:.10g}"
        config = self._config
        return (
            f"dynamic, now {self._scale:.10g}, at least {config.min_loss_scale:.10g}, window {config.loss_scale_window}, "
            f"hysteresis {config.hysteresis}"
        )

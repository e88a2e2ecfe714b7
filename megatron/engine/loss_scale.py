"""The factor on the loss that keeps fp16 gradients from becoming zero, and the search for it.

Invariant: the scale depends only on the outcomes of the steps (dropped or applied). Ranks that
agree on the outcomes therefore agree on the scale.

A dynamic scale is as high as the gradients allow. An overflow uses up one of `hysteresis`. The
overflow that uses up the last one, and each further overflow, halves the scale, but not below the
minimum. `loss_scale_window` good steps in a row double the scale and restore hysteresis.

Source: Mixed Precision Training (https://arxiv.org/abs/1710.03740, section 3.2); Megatron-LM's
DynamicGradScaler (core/optimizer/grad_scaler.py). Both engines use this class. DeepSpeed's own
DynamicLossScaler (0.19.8, runtime/fp16/loss_scaler.py) is not used. It differs in these points:

- After the start of a run and after each overflow, it first doubles after `loss_scale_window` + 1
  good steps. It doubles again after each further `loss_scale_window`. Here the first doubling comes
  after `loss_scale_window` good steps too.
- On an overflow at the minimum, after hysteresis is used up, it ends the run. Here the trainer
  counts such steps as nan.
- Its `consecutive_hysteresis` (off by default, not offered here) restores hysteresis on each good
  step.

Other programs describe hysteresis as a number of overflows in a row. In fact it counts the
overflows since the scale last doubled.
"""

from copy import copy
from typing import Any

from megatron.config.precision import PrecisionConfig


class LossScale:
    """The loss scale of a run, static with --loss-scale and otherwise dynamic.

    Call `update_after_step` after each step.
    """

    def __init__(self, config: PrecisionConfig) -> None:
        """Start with the static or the initial scale of `config`."""
        self._config = config
        self._dynamic = config.loss_scale is None
        self.scale = config.initial_loss_scale
        if config.loss_scale is not None:
            self.scale = config.loss_scale
        """The factor that the next step's loss is multiplied by."""
        self._good_steps = 0
        self._hysteresis_left = config.hysteresis

    def update_after_step(self, *, applied: bool, loss_is_finite: bool) -> bool:
        """Record a step, and return whether it was dropped as part of the search for a scale.

        Every rank gets the same scale, because `applied` is the same on all of them. A loss that is
        not finite has another cause than the scale.

        Args:
            applied: Whether the step was applied.
            loss_is_finite: Whether the loss of the step was finite.
        """
        if applied:
            self.record_applied()
            return False
        return self.record_overflow() and loss_is_finite

    def record_applied(self) -> None:
        """Record a step that was applied."""
        if not self._dynamic:
            return
        self._good_steps += 1
        # There is no upper bound. A scale that is too large causes an overflow and is halved.
        if self._good_steps == self._config.loss_scale_window:
            self._good_steps = 0
            self._hysteresis_left = self._config.hysteresis
            self.scale *= 2

    def record_overflow(self) -> bool:
        """Record a step that was dropped.

        Returns:
            Whether it belongs to the search, so that another scale may prevent an overflow. It does
            not if the scale is static or was at the minimum already.
        """
        if not self._dynamic:
            return False
        # Read before the scale is halved. The overflow occurred with the present scale.
        searching = self.scale > self._config.min_loss_scale
        self._good_steps = 0
        self._hysteresis_left = max(0, self._hysteresis_left - 1)
        if self._hysteresis_left == 0:
            self.scale = max(self.scale / 2, self._config.min_loss_scale)
        return searching

    def predict(self) -> tuple[float, float]:
        """Return the scale after an applied step, and after a dropped one."""
        applied, dropped = copy(self), copy(self)
        applied.record_applied()
        dropped.record_overflow()
        return applied.scale, dropped.scale

    def state(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        scale = {"dynamic": self._dynamic, "scale": self.scale}
        if self._dynamic:
            return scale | {
                "good_steps": self._good_steps,
                "hysteresis_left": self._hysteresis_left,
            }
        return scale

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a state, within this run's minimum, window and hysteresis.

        Nothing is taken over unless both runs have a dynamic scale. A static scale comes from this
        run's configuration. A search after a static scale starts at this run's initial scale.
        """
        if not (self._dynamic and state["dynamic"]):
            return
        # The configuration may have changed. If the count of good steps exceeded the new window, it
        # would never be equal to it. The scale would then never double.
        self.scale = max(float(state["scale"]), self._config.min_loss_scale)
        self._good_steps = min(int(state["good_steps"]), self._config.loss_scale_window - 1)
        self._hysteresis_left = min(int(state["hysteresis_left"]), self._config.hysteresis)

    def describe(self) -> str:
        """Return the text for the table printed at start."""
        if not self._dynamic:
            return f"static {self.scale:.10g}"
        config = self._config
        return (
            f"dynamic, now {self.scale:.10g}, at least {config.min_loss_scale:.10g}, "
            f"window {config.loss_scale_window}, hysteresis {config.hysteresis}"
        )

"""What the spike guard does after a jump of the loss or the gradient norm."""

from dataclasses import dataclass
from typing import Annotated, Literal, assert_never

from megatron.config.interval import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE, Range

_SKIP_BEFORE = 100
_SKIP_AFTER = 200
"""Source: PaLM (Chowdhery et al.), section 5.1: a restart about 100 steps before the spike, and
200 to 500 batches are skipped."""


@dataclass(frozen=True)
class SpikeGuardConfig:
    """Settings of the spike guard. All of them have no effect while it is off."""

    spike_guard: Literal["off", "log", "skip-step", "rollback"] = "off"
    """What happens at a step whose loss or gradient norm is a spike. log: it is recorded.
    skip-step: if its data may be the cause, it is also dropped before it changes weights and
    moments. rollback: after several high losses in a row, the run also goes back to an
    earlier checkpoint and skips the data around the spike."""
    spike_guard_signals: Literal["loss", "both"] = "both"
    """What can be a spike. both: loss and gradient norm. If only the gradient norm is high, at most
    one step in --spike-guard-window is dropped."""
    spike_guard_threshold: Annotated[float, POSITIVE] = 10.0
    """A value is a spike if it is this many robust standard deviations above its level. A loss that
    is far below its level is a spike too."""
    spike_guard_min_rise: Annotated[float, NOT_NEGATIVE] = 0.05
    """A loss must also be above its level by this fraction."""
    spike_guard_min_norm_rise: Annotated[float, NOT_NEGATIVE] = 14.0
    """A gradient norm must also be above its level by this fraction. 14 means 15 times the level.
    Single batches of clean data often have several times the usual norm."""
    spike_guard_window: Annotated[int, Range("[8, 100000]")] = 128
    """Steps from which the standard deviation is estimated."""
    spike_guard_smoothing: Annotated[int, Range("[3, 10000]")] = 16
    """Steps without a spike in the running median that estimates the level."""
    spike_guard_min_steps: Annotated[int, Range("[4, 10000]")] = 16
    """Steps before the standard deviation is known, from the start of a run or data phase.
    Until then, a loss is a spike only if it exceeds the median so far by 20 % and by 1."""
    spike_guard_reach: Annotated[int, AT_LEAST_ONE] = 1000
    """Iterations that the guard remembers. A slow rise above the lowest level within them is a
    spike too. --spike-guard-max-skips and --spike-guard-max-rollbacks count within them. The guard
    ends a run only if all losses within them were far above that of an untrained model."""
    spike_guard_patience: Annotated[int, AT_LEAST_ONE] = 3
    """High losses in a row that cause a rollback. These steps are dropped, except for a first one
    that is only slightly raised. A step whose loss or gradient is not finite counts too."""
    spike_guard_skip_before: Annotated[int | None, NOT_NEGATIVE] = None
    """Iterations before a spike that are skipped after a rollback. The run goes back to the newest
    checkpoint before them. The default is 100, but at most 0.5 % of --train-iters."""
    spike_guard_skip_after: Annotated[int | None, NOT_NEGATIVE] = None
    """Iterations after the first step of a spike that are skipped after a rollback. The default is
    200, but at most 1 % of --train-iters."""
    spike_guard_max_skips: Annotated[int, AT_LEAST_ONE] = 100
    """Steps that may be dropped within --spike-guard-reach. After that the guard only logs."""
    spike_guard_max_rollbacks: Annotated[int, NOT_NEGATIVE] = 3
    """Rollbacks within --spike-guard-reach. If a spike needs one more, the guard only logs after
    that."""

    @property
    def is_on(self) -> bool:
        """Whether the guard looks for spikes."""
        return self.spike_guard != "off"

    @property
    def drops_steps(self) -> bool:
        """Whether the step of a spike is dropped."""
        match self.spike_guard:
            case "skip-step" | "rollback":
                return True
            case "off" | "log":
                return False
            case _:
                assert_never(self.spike_guard)

    @property
    def watches_gradient_norm(self) -> bool:
        """Whether a high gradient norm is a spike."""
        return {"loss": False, "both": True}[self.spike_guard_signals]

    @property
    def rollback_distance(self) -> int | None:
        """Iterations by which a rollback may go back, or None if the guard does not roll back."""
        if self.spike_guard != "rollback":
            return None
        before = self.spike_guard_skip_before
        return self.spike_guard_reach + (_SKIP_BEFORE if before is None else before)

    def find_skipped(self, train_iters: int) -> tuple[int, int]:
        """Return how many iterations before and after a spike are skipped after a rollback.

        By default a short run skips fewer. In 3,000 iterations, 300 skipped ones would cost more
        than bad data usually do.

        Args:
            train_iters: Iterations of the whole run.
        """
        before = self.spike_guard_skip_before
        after = self.spike_guard_skip_after
        # 0 is a value of its own, so it is not taken for "not given".
        if before is None:
            before = min(_SKIP_BEFORE, train_iters // 200)
        if after is None:
            after = min(_SKIP_AFTER, train_iters // 100)
        return before, after

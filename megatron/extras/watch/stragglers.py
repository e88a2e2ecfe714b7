"""Find the ranks that compute more slowly than the others.

All ranks wait for the slowest one in each collective, so the time of a step does not show which one
it is. `BlockTimer` measures the time that a rank computes. The ranks exchange their times when they
agree on the next step (`Exits.decide`), in one small message over gloo.

Only the last steps before a comparison are measured. The median over these steps counts, so that a
single pause of a process is not reported.
"""

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch.utils.hooks import RemovableHandle

from megatron.model.gpt import GPT
from megatron.observe.timers import BlockTimer
from megatron.run.parts import RankComparison, RankTimes
from megatron.schedule.clock import is_due

MEASURED_STEPS = 10
"""Number of steps before a comparison that are measured."""


@dataclass(eq=False)
class StragglerWatch(RankComparison):
    """Measures this rank's blocks, and compares the times of all ranks."""

    _stages: Sequence[GPT]
    """This rank's stages."""
    _timer: BlockTimer
    """Measures their blocks."""
    _interval: int
    """The value of `--straggler-interval`, above 0."""
    _factor: float
    """The value of `--straggler-factor`."""

    @contextmanager
    def measure(self, iteration: int) -> Iterator[None]:
        """Measure the step of an iteration within this context, if a comparison follows soon.

        Args:
            iteration: The iteration, which is the same on all ranks.
        """
        if -iteration % self._interval >= MEASURED_STEPS:
            yield
            return
        self._timer.begin_step()
        # As in `LayerRecorder`, the hooks exist only while they are needed.
        hooks: list[RemovableHandle] = []
        for stage in self._stages:
            for block in stage.get_blocks().values():
                # FSDP2 gathers parameters in hooks of the block, which wait for other ranks. Ours
                # come after its first one, and before its last one.
                hooks += [
                    block.register_forward_pre_hook(lambda *_: self._timer.enter_block()),
                    block.register_forward_hook(lambda *_: self._timer.leave_block(), prepend=True),
                ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def take_report(self, before: int, after: int) -> float | None:
        """Return this rank's seconds for a block, or None if no comparison is due.

        All ranks return a number in the same iterations. It is 0 if no step was measured.

        Args:
            before: The iteration before the last step or jump.
            after: The iteration after it.
        """
        if not is_due(self._interval, before, after):
            return None
        return statistics.median(self._timer.take_steps() or [0.0])

    def compare(self, seconds: Sequence[float]) -> RankTimes | None:
        """Compare the times of all ranks, or return None if there are none.

        Args:
            seconds: What `take_report` returned on each rank.
        """
        # A range of skipped iterations may contain all steps that are measured.
        if not seconds or min(seconds) <= 0.0:
            return None
        return compare_times(seconds, self._factor)


def compare_times(seconds: Sequence[float], factor: float) -> RankTimes:
    """Return the ranks whose time is larger than `factor` x the median.

    Args:
        seconds: The time of each rank, above 0.
        factor: Above 1.
    """
    # With two ranks, the mean of both would hide the slow one. The lower median is right as long as
    # at most half of the ranks are slow.
    median = statistics.median_low(seconds)
    slowest_first = sorted(range(len(seconds)), key=lambda rank: -seconds[rank])
    slow = {
        rank: seconds[rank] / median for rank in slowest_first if seconds[rank] > factor * median
    }
    return RankTimes(median, slowest_first[0], slow, seconds)

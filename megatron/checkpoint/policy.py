"""When a run saves, when it tries a failed save again, and what it keeps permanently."""

from megatron.config.checkpoint import CheckpointConfig
from megatron.schedule.clock import is_due


class SavePolicy:
    """Decides when to save and what to keep, from the flags and from what was recorded.

    Only the methods `record_...` change it. All ranks record the same events in the same order, so
    they get the same answers.
    """

    def __init__(self, config: CheckpointConfig) -> None:
        """Create the policy of a run that has not saved yet."""
        self._config = config
        self._failures = 0
        self._retry_at: int | None = None
        """First iteration after which a failed save is tried again. None if none has failed."""
        self._passed = 0
        """The last iteration that was recorded."""
        self._keep_next = False
        self._ending = False

    @property
    def failures(self) -> int:
        """Number of failed saves since the last one that succeeded."""
        return self._failures

    @property
    def has_failed_too_often(self) -> bool:
        """Whether no further failure in a row is allowed."""
        return self._failures >= self._config.max_save_failures

    @property
    def keep_next(self) -> bool:
        """Whether --keep-latest-checkpoints must never remove the next checkpoint."""
        return self._keep_next

    def is_due(self, before: int, after: int) -> bool:
        """Return whether a save is due after a step or jump from iteration `before` to `after`.

        A jump over several iterations (skipped data) counts each iteration that it passes.
        """
        if self._retry_at is not None and after >= self._retry_at:
            return True
        return self._passes_named(before, after) or is_due(
            self._config.save_interval, before, after
        )

    def describe_retry(self) -> str:
        """Return when the failed save is tried again, for messages."""
        if self._ending:
            return "immediately"
        # A save that is due anyway may come before --save-retry-interval is over.
        following = self._passed + 1
        due = [max(self._retry_at or 0, following), *self._config.save_at]
        if self._config.save_interval:
            due.append(following + -following % self._config.save_interval)
        first = min(iteration for iteration in due if iteration >= following)
        return f"after iteration {first}, unless a time or the end of the run comes first"

    def record_iterations(self, before: int, after: int) -> None:
        """Record a step or jump, which may pass an iteration whose checkpoint is kept."""
        self._passed = after
        if self._passes_named(before, after) or is_due(self._config.keep_every, before, after):
            self._keep_next = True

    def record_end_of_run(self) -> None:
        """Record that no further iteration follows, so that a failed save cannot wait for one."""
        self._ending = True

    def record_attempt(self) -> None:
        """Record that a save begins, which clears a scheduled retry and `keep_next`.

        Read `keep_next` before.
        """
        self._retry_at = None
        self._keep_next = False

    def record_failure(self, iteration: int, *, keep: bool) -> None:
        """Record that a save failed, and schedule the next attempt.

        Args:
            iteration: The iteration that was not saved.
            keep: Whether its checkpoint had to be kept permanently. The next one that is saved is
                then kept instead.
        """
        self._failures += 1
        self._passed = max(self._passed, iteration)
        self._retry_at = iteration + self._config.save_retry_interval
        # Another such iteration may have been passed since the save began.
        self._keep_next = self._keep_next or keep

    def record_success(self) -> None:
        """Record that a checkpoint is safe."""
        self._failures = 0

    def _passes_named(self, before: int, after: int) -> bool:
        """Return whether the run passes an iteration of --save-at."""
        return any(before < named <= after for named in self._config.save_at)

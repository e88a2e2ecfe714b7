"""The position of a run after later iterations, found without a loop over all of them."""

from dataclasses import dataclass

from megatron.schedule.batch_size import BatchSizeSchedule, count_iterations_of_size
from megatron.schedule.curriculum import FOREVER, Curriculum


@dataclass(frozen=True)
class Progress:
    """What a run has consumed after `iteration`, in samples and tokens."""

    iteration: int = 0
    samples: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class Steps:
    """Batch size and sequence length of each iteration of a run. `seq_length` is in tokens.

    With a curriculum, `seq_length` is the final length.
    """

    batch_size: BatchSizeSchedule
    seq_length: int
    curriculum: Curriculum | None = None

    def find_iteration(self, start: Progress, iteration: int) -> Progress:
        """Return the position after `iteration`, or `start` if that is later."""
        at = start
        while at.iteration < iteration:
            at = self._advance(at, iteration - at.iteration)
        return at

    def find_tokens(self, start: Progress, tokens: int, limit: int = FOREVER) -> Progress:
        """Return the first position from `start` on where at least `tokens` are consumed.

        If they are not consumed by iteration `limit`, it is the position after that iteration.
        """
        at = start
        while at.tokens < tokens and at.iteration < limit:
            size, length = self._get_sizes(at)
            needed = -(-(tokens - at.tokens) // (size * length))
            at = self._advance(at, min(needed, limit - at.iteration))
        return at

    def _advance(self, at: Progress, most: int) -> Progress:
        """Return the position after at least one iteration and at most `most`, all of one size.

        A run may have millions of iterations, so those of one batch size and sequence length are
        taken at once.
        """
        size, length = self._get_sizes(at)
        last = at.iteration + most
        if self.curriculum is not None:
            last = self.curriculum.find_end_of_stage(at.iteration + 1, length, last)
        steps = last - at.iteration
        alike = count_iterations_of_size(self.batch_size, at.samples, at.tokens, length)
        if alike is not None:
            steps = min(steps, alike)
        samples = steps * size
        return Progress(at.iteration + steps, at.samples + samples, at.tokens + samples * length)

    def _get_sizes(self, at: Progress) -> tuple[int, int]:
        """Return the batch size and the sequence length of the iteration that follows."""
        size = self.batch_size.get_size(at.samples, at.tokens)
        if self.curriculum is None:
            return size, self.seq_length
        return size, self.curriculum.get_seq_length(at.iteration + 1)

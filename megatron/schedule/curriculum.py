"""Curriculum learning, which makes the sequence length a function of the iteration.

Invariant: the length depends only on the 1-based number of the iteration that is about to run. It
never exceeds `max_difficulty`.

Sources: https://arxiv.org/abs/2108.06084, and the schedules of DeepSpeed's "curriculum_learning"
block, whose names are kept.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, assert_never

from megatron.base.errors import ConfigError

CurriculumStyle = Literal["fixed_linear", "fixed_root", "fixed_discrete"]

TENSOR_CORE_MULTIPLE = 8
# An iteration that no run reaches. It is a number and not infinity, because it bounds ranges.
FOREVER = 10**15


@dataclass(frozen=True)
class Curriculum:
    """A schedule of sequence lengths in tokens, with steps in iterations.

    fixed_linear and fixed_root grow from `min_difficulty` to `max_difficulty` over
    `total_curriculum_step`, in multiples of `difficulty_step`. fixed_root grows with (step / total)
    ** (1 / root_degree). fixed_discrete has `difficulties[i]` until iteration `max_steps[i]`, and
    the last one from then on.

    Raises:
        ConfigError: the numbers make no schedule.
    """

    style: CurriculumStyle
    min_difficulty: int
    max_difficulty: int
    total_curriculum_step: int | None = None
    difficulty_step: int | None = None
    root_degree: int | None = None
    difficulties: tuple[int, ...] = ()
    max_steps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check that the numbers make a schedule.

        Raises:
            ConfigError: they do not.
        """
        if not 1 <= self.min_difficulty <= self.max_difficulty:
            raise ConfigError(
                f"curriculum learning: min_difficulty {self.min_difficulty} must be at least 1 "
                f"and at most max_difficulty {self.max_difficulty}."
            )
        match self.style:
            case "fixed_discrete":
                self._check_discrete()
            case "fixed_linear" | "fixed_root":
                self._check_growing()
            case _:
                raise ConfigError(
                    f"curriculum learning: schedule_type '{self.style}' is unknown; use "
                    "fixed_linear, fixed_root or fixed_discrete."
                )

    def _check_growing(self) -> None:
        """Check the fields of fixed_linear and fixed_root."""
        needed = {
            "total_curriculum_step": self.total_curriculum_step,
            "difficulty_step": self.difficulty_step,
        }
        if self.style == "fixed_root":
            needed["root_degree"] = self.root_degree
        bad = [f"{name} {value}" for name, value in needed.items() if value is None or value < 1]
        if bad:
            raise ConfigError(
                f"curriculum learning: {self.style} needs {' and '.join(needed)}, each at least "
                f"1; given {', '.join(bad)}."
            )

    def _check_discrete(self) -> None:
        """Check the fields of fixed_discrete."""
        rising = all(a < b for a, b in pairwise(self.max_steps))
        if len(self.max_steps) != len(self.difficulties) - 1 or not rising:
            raise ConfigError(
                "curriculum learning: fixed_discrete needs a list `difficulty` and a rising list "
                "`max_step` that is one shorter (the last difficulty has no end); given "
                f"{len(self.difficulties)} difficulties, max_step {list(self.max_steps)}."
            )
        outside = [
            d for d in self.difficulties if not self.min_difficulty <= d <= self.max_difficulty
        ]
        if outside:
            raise ConfigError(
                f"curriculum learning: difficulty {outside} must be between min_difficulty "
                f"{self.min_difficulty} and max_difficulty {self.max_difficulty}."
            )

    def __str__(self) -> str:
        """Return the schedule in words, for the log."""
        if self.style == "fixed_discrete":
            lengths = [
                f"{length} up to iteration {step}"
                for length, step in zip(self.difficulties, self.max_steps, strict=False)
            ]
            return f"{self.style}: " + ", ".join(
                [*lengths, f"{self.difficulties[-1]} from then on"]
            )
        root = {"fixed_linear": "", "fixed_root": f" (root {self.root_degree})"}[self.style]
        return (
            f"{self.style}{root} from {self.min_difficulty} to {self.max_difficulty} tokens over "
            f"{self.total_curriculum_step} iterations in steps of {self.difficulty_step}"
        )

    def get_seq_length(self, step: int) -> int:
        """Return the sequence length in tokens of iteration `step`.

        `step` is 1-based and is the iteration about to run.
        """
        # bisect_left counts the ends before `step`, so the iteration max_steps[i] still has length
        # i.
        if self.style == "fixed_discrete":
            return self.difficulties[bisect_left(self.max_steps, step)]
        assert self.total_curriculum_step is not None, "checked at construction"
        assert self.difficulty_step is not None, "checked at construction"
        span = self.max_difficulty - self.min_difficulty
        match self.style:
            case "fixed_linear":
                # Integer arithmetic is exact here. The root below needs floating point.
                length = self.min_difficulty + span * step // self.total_curriculum_step
            case "fixed_root":
                assert self.root_degree is not None, "checked at construction"
                length = math.floor(
                    self.min_difficulty
                    + span * (step / self.total_curriculum_step) ** (1 / self.root_degree)
                )
            case _:
                assert_never(self.style)
        # Rounding down can give a length below min_difficulty, or 0. The smallest multiple that is
        # at least min_difficulty is the lower bound.
        length -= length % self.difficulty_step
        least = -(-self.min_difficulty // self.difficulty_step) * self.difficulty_step
        return min(max(length, least), self.max_difficulty)

    def iterate_stages(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield (iteration, length in tokens) for each stage of iterations `first` to `last`.

        A stage has its length from that iteration on. Neighbours differ. A discrete schedule may
        have a length again later, and the others only grow.
        """
        step = first
        before = None
        while step <= last:
            length = self.get_seq_length(step)
            if length != before:
                yield step, length
            step = self.find_end_of_stage(step, length, last) + 1
            before = length

    def find_end_of_stage(self, step: int, length: int, last: int) -> int:
        """Return the last iteration up to `last` that certainly has the length of iteration `step`.

        `length` is that length.
        """
        if self.style == "fixed_discrete":
            entry = bisect_left(self.max_steps, step)
            if entry == len(self.max_steps):
                return last
            return min(last, self.max_steps[entry])
        # The growing schedules are monotonic, so a binary search finds the end. `last` may be
        # FOREVER, which a loop would never reach.
        return step - 1 + bisect_right(range(step, last + 1), length, key=self.get_seq_length)

    def find_iteration_reaching(
        self, tokens: int, batch_size: int, first: int, last: int
    ) -> int | None:
        """Return the iteration by which `tokens` are consumed, or None if `last` is not enough.

        They are counted from the start of iteration `first`. `batch_size` is in samples.
        """
        starts = list(self.iterate_stages(first, last))
        # (last + 1, 0) closes the last stage, as the start of the next stage closes the others.
        for (start, length), (end, _) in zip(starts, [*starts[1:], (last + 1, 0)], strict=True):
            needed = -(-tokens // (batch_size * length))
            if needed <= end - start:
                return start - 1 + needed
            # This stage is too short, so all of its tokens are consumed.
            tokens -= (end - start) * batch_size * length
        return None

    def list_warnings(self) -> list[str]:
        """Return a warning for each length on which Tensor Cores are slow."""
        lengths = [
            ("min_difficulty", self.min_difficulty),
            ("difficulty_step", self.difficulty_step),
        ]
        lengths += [("difficulty", length) for length in self.difficulties]
        return [
            f"curriculum learning: {name} {length} is not a multiple of {TENSOR_CORE_MULTIPLE}: "
            "slow on Tensor Cores."
            for name, length in lengths
            if length is not None and length % TENSOR_CORE_MULTIPLE
        ]

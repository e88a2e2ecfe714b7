"""Curriculum learning, which trains on short sequences first.

The names are those of DeepSpeed's "curriculum_learning" block. The schedule itself is in
`schedule.curriculum`. `USED` lists which of these fields each type of schedule takes.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class CurriculumConfig:
    """Settings of the sequence length's schedule."""

    curriculum_schedule_type: Literal["fixed_linear", "fixed_root", "fixed_discrete"] | None = None
    """Grow the sequence length over the iterations (https://arxiv.org/abs/2108.06084): linearly, by
    a root, or in given steps. Needs --train-tokens and --lr-decay-tokens. Default: no
    curriculum."""
    curriculum_min_difficulty: int | None = None
    """First sequence length, in tokens. Use a multiple of 8 for Tensor Cores. Large models take
    64."""
    curriculum_max_difficulty: int | None = None
    """Last sequence length, in tokens. Default: --seq-length."""
    curriculum_total_step: int | None = None
    """Iterations until the last length is reached. Use about half of the iterations that
    --train-tokens takes at the full length."""
    curriculum_difficulty_step: int = 8
    """Lengths are multiples of this, in tokens. Use a multiple of 8 for Tensor Cores, and of the
    tensor-parallel size with --sequence-parallel."""
    curriculum_root_degree: int | None = None
    """fixed_root: the length grows with (iteration / total) ** (1 / this), fast at first."""
    curriculum_difficulties: tuple[int, ...] = ()
    """fixed_discrete: sequence lengths in order, in tokens."""
    curriculum_max_steps: tuple[int, ...] = ()
    """fixed_discrete: the last iteration of each length except the final one, which has no end."""


USED: dict[str, tuple[set[str], set[str]]] = {
    "fixed_linear": (
        {"curriculum_min_difficulty", "curriculum_total_step"},
        {"curriculum_max_difficulty", "curriculum_difficulty_step"},
    ),
    "fixed_root": (
        {"curriculum_min_difficulty", "curriculum_total_step", "curriculum_root_degree"},
        {"curriculum_max_difficulty", "curriculum_difficulty_step"},
    ),
    "fixed_discrete": ({"curriculum_difficulties"}, {"curriculum_max_steps"}),
}
"""Schedule type -> (fields that it needs, other fields that it takes)."""

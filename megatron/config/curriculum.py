"""Curriculum learning, which trains on short sequences first.

The names are those of DeepSpeed's "curriculum_learning" block. The schedule itself is in
`schedule.curriculum`. `USED` lists which of these fields each type of schedule takes.
"""

from dataclasses import dataclass
from typing import Literal

from megatron.schedule.curriculum import Curriculum


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

    def build(self, seq_length: int) -> Curriculum | None:
        """Build the curriculum that the flags describe.

        Args:
            seq_length: --seq-length, in tokens.

        Returns:
            The curriculum, or None if the flags describe none or only a part of one. The rules
            report the latter.

        Raises:
            ConfigError: The numbers do not give a valid schedule.
        """
        style = self.curriculum_schedule_type
        # This style lists its lengths. The others compute them from minimum, maximum and steps.
        if style == "fixed_discrete" and self.curriculum_difficulties:
            lengths = self.curriculum_difficulties
            return Curriculum(
                style,
                min(lengths),
                max(lengths),
                difficulties=lengths,
                max_steps=self.curriculum_max_steps,
            )
        if (
            style in (None, "fixed_discrete")
            or self.curriculum_min_difficulty is None
            or self.curriculum_total_step is None
        ):
            return None
        if style == "fixed_root" and self.curriculum_root_degree is None:
            return None
        longest = self.curriculum_max_difficulty
        return Curriculum(
            style,
            self.curriculum_min_difficulty,
            seq_length if longest is None else longest,
            total_curriculum_step=self.curriculum_total_step,
            difficulty_step=self.curriculum_difficulty_step,
            root_degree=self.curriculum_root_degree,
        )


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

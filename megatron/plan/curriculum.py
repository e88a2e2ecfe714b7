"""The curriculum of sequence lengths that a configuration describes."""

from megatron.config.tree import Config
from megatron.schedule.curriculum import Curriculum


def build_curriculum(config: Config) -> Curriculum | None:
    """Build the curriculum that the flags describe.

    Returns:
        The curriculum, or None if the flags describe none or only a part of one. The rules report
        the latter.

    Raises:
        ConfigError: The numbers do not give a valid schedule.
    """
    settings = config.curriculum
    style = settings.curriculum_schedule_type
    if settings.curriculum_max_difficulty is None:
        longest = config.model.seq_length
    else:
        longest = settings.curriculum_max_difficulty
    # This style lists its lengths. The others compute them from minimum, maximum and steps.
    if style == "fixed_discrete" and settings.curriculum_difficulties:
        lengths = settings.curriculum_difficulties
        return Curriculum(
            style,
            min(lengths),
            max(lengths),
            difficulties=lengths,
            max_steps=settings.curriculum_max_steps,
        )
    if (
        style in (None, "fixed_discrete")
        or settings.curriculum_min_difficulty is None
        or settings.curriculum_total_step is None
    ):
        return None
    if style == "fixed_root" and settings.curriculum_root_degree is None:
        return None
    return Curriculum(
        style,
        settings.curriculum_min_difficulty,
        longest,
        total_curriculum_step=settings.curriculum_total_step,
        difficulty_step=settings.curriculum_difficulty_step,
        root_degree=settings.curriculum_root_degree,
    )

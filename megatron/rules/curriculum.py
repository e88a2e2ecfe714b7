"""Rules about the curriculum of sequence lengths."""

from collections.abc import Iterator

from megatron.config.config_with_origin import ConfigWithOrigin
from megatron.config.curriculum import USED
from megatron.config.fields import all_fields
from megatron.rules.finding import Finding, error


def check_curriculum_flags(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that the curriculum's fields fit its type of schedule.

    A field that has no effect is an error here. If --curriculum-schedule-type was forgotten, the
    run would train with other sequence lengths than intended.
    """
    style = settings.config.curriculum.curriculum_schedule_type
    needed, taken = USED[style] if style is not None else (set(), set())
    for name in vars(settings.config.curriculum):
        dotted = f"curriculum.{name}"
        if name in needed and not settings.is_changed(dotted):
            yield error(
                f"{settings.describe('curriculum.curriculum_schedule_type')} needs "
                f"{all_fields()[dotted].flag}."
            )
        elif name in {"curriculum_schedule_type", *needed, *taken} or not settings.is_changed(
            dotted
        ):
            continue
        elif style is None:
            yield error(
                f"{settings.describe(dotted)} needs --curriculum-schedule-type; without it there "
                "is no curriculum."
            )
        else:
            yield error(
                f"{settings.describe(dotted)} has no effect with "
                f"{settings.describe('curriculum.curriculum_schedule_type')}; leave it out."
            )

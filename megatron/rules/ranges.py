"""The check that each number of the configuration is in its range.

Invariant: every number of the configuration has a range. If its field declares none, a whole number
must be at least 1 and any other number must be finite.
"""

from collections.abc import Iterator

from megatron.config.config_with_origin import ConfigWithOrigin
from megatron.config.fields import all_fields
from megatron.rules.finding import Finding, error


def check_ranges(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Yield a message for each number that is out of its range."""
    for dotted, value in settings.list_values().items():
        field = all_fields()[dotted]
        # A tuple whose field declares a range is checked number by number. The numbers in other
        # tuples are checked elsewhere.
        if isinstance(value, tuple) and field.declared_range is not None:
            several = value
        else:
            several = (value,)
        numbers = [
            number
            for number in several
            # bool is a subclass of int, so it must be left out explicitly.
            if isinstance(number, int | float) and not isinstance(number, bool)
        ]
        if not all(field.range.contains(number) for number in numbers):
            yield error(f"{settings.describe(dotted)} must be {field.range.describe()}.")

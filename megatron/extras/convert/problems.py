"""The message about tensors that do not fit a description of a model."""

from collections.abc import Sequence

from megatron.base.errors import CheckpointError

_SHOWN = 12
"""Number of problems that a message lists."""


def refuse_problems(problems: Sequence[str], description: str) -> None:
    """Refuse a checkpoint if there are problems with its tensors.

    Args:
        problems: A line for each problem.
        description: What the tensors do not fit, such as config.json.

    Raises:
        CheckpointError: there is at least one problem. The message lists the first 12.
    """
    if not problems:
        return
    shown = list(problems[:_SHOWN])
    if len(problems) > _SHOWN:
        shown.append(f"... {len(problems) - _SHOWN} more")
    raise CheckpointError(f"the tensors do not fit {description}:\n  " + "\n  ".join(shown))

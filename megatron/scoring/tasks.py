"""The tasks of lm-evaluation-harness by name, and the numbers of its results.

Only `harness.py` and `fixed_tasks.py` import the package at their start. This module imports it
when it is needed, and reports if it is missing.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.errors import ConfigError


def find_tasks(
    names: Sequence[str], folder: Path | None, *, names_flag: str, folder_flag: str
) -> Any:
    """Return the harness's manager of tasks, which knows all of these tasks.

    Args:
        names: Names of tasks, groups or tags.
        folder: Folder with further tasks as YAML files.
        names_flag: The flag of the names, for messages.
        folder_flag: The flag of the folder, for messages.

    Raises:
        ConfigError: The harness is not installed, the folder is none, or a task does not exist.
    """
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"{folder_flag} {folder} is not a folder.")
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ConfigError(
            f"{names_flag} needs lm-evaluation-harness: pip install -e '.[eval]'"
        ) from error
    if folder is not None:
        # The index of the harness's own tasks takes ten seconds. It is needed only if a name is not
        # in the folder.
        own = TaskManager(include_path=str(folder), include_defaults=False)
        if set(names) <= set(own.all_subtasks):
            return own
    manager = TaskManager(include_path=None if folder is None else str(folder))
    unknown = [name for name in names if not manager.match_tasks([name])]
    if unknown:
        raise ConfigError(
            f"{names_flag} {' '.join(unknown)}: lm-evaluation-harness has no such task; "
            f"lm_eval ls tasks lists them, and {folder_flag} adds others"
        )
    return manager


def select_metrics(results: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the numbers of the harness's results: task -> metric -> value."""
    return {
        task: {
            name.removesuffix(",none"): value
            for name, value in metrics.items()
            # The harness names a metric and its filter. Other entries describe the task.
            if "," in name and isinstance(value, int | float)
        }
        for task, metrics in results.items()
    }

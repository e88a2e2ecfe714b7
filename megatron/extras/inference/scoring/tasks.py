"""The tasks of lm-evaluation-harness by name, and the numbers of its results.

Only `harness.py` imports the package at its start. This module imports it when it is needed, and
reports if it is missing.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.base.errors import ConfigError, describe_os_error
from megatron.base.outside_file import SETTINGS_BYTES, check_regular


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
        _check_files(folder, folder_flag)
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


def _check_files(folder: Path, folder_flag: str) -> None:
    """Check that the harness can read the files of tasks in a folder.

    Raises:
        ConfigError: One is not a regular file, or is too large.
    """
    try:
        for path in folder.rglob("*.yaml"):
            check_regular(path, SETTINGS_BYTES)
    except OSError as error:
        raise ConfigError(f"{folder_flag}: {describe_os_error(error)}.") from error


def harden_manager(manager: Any) -> None:
    """Prepare a manager for tasks that would end a program with a traceback.

    A task that cannot be loaded is a `ConfigError`. Its data may be missing, for example. A
    perplexity is infinite if a float cannot hold it, where the harness would fail. A text without
    spaces is one word, so that its perplexity per word may be that large.
    """
    load = manager.load

    def load_safely(names: Any) -> Any:
        try:
            loaded = load(names)
        # A task may run any code of its own, and download data.
        except Exception as error:
            wanted = " ".join(map(str, names))
            raise ConfigError(
                f"lm-evaluation-harness cannot prepare {wanted} ({type(error).__name__}: {error}); "
                "check the tasks and their data"
            ) from error
        for task in loaded["tasks"].values():
            _limit_perplexities(task)
        return loaded

    manager.load = load_safely


def _limit_perplexities(task: Any) -> None:
    from lm_eval.api.metrics import weighted_perplexity

    # The harness recognises other functions, such as the mean, to find their standard error.
    limited = {
        name: _compute_weighted_perplexity if function is weighted_perplexity else function
        for name, function in task.aggregation().items()
    }
    task.aggregation = lambda: limited


def _compute_weighted_perplexity(items: Any) -> float:
    """Return the perplexity of pairs of a log-likelihood and a number of words or bytes."""
    from lm_eval.api.metrics import weighted_perplexity

    try:
        return float(weighted_perplexity(items))
    except OverflowError:
        return math.inf


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

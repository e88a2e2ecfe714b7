"""Experiment trackers by name: the interface that the feed uses, and one class for each tracker.

Invariant: a tracker gets no key or token from us. Each library reads its own environment variables
and files, so no secret is in a command line or in the configuration.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megatron.plan.rules.finding import Finding, error

if TYPE_CHECKING:
    from megatron.config.fields import ConfigWithOrigin


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker knows it.

    A run of this project gets another one when it goes back to an earlier iteration.
    """

    id: str
    """Name and id, which no other run has."""
    root: str
    """Id of the first run of the lineage. Trackers show its runs as one group."""
    parent: str | None
    """Id of the run that this one continues, or None for the first one."""
    parent_iteration: int
    """Last iteration of the parent that belongs to this lineage. It is 0 without a parent."""


class Tracker(Protocol):
    """One tracker. Every method may raise, block for long, or print."""

    def open(
        self, run: TrackedRun, *, project: str, folder: Path, config: Mapping[str, Any]
    ) -> None:
        """Start a run, or continue it if the tracker knows its id.

        Args:
            run: The run.
            project: The project that the tracker shows the run in.
            folder: Folder for files of the tracker, the --save folder of the run.
            config: What the tracker shows about the run, as JSON values.
        """

    def log(self, iteration: int, values: Mapping[str, float]) -> None:
        """Store the values of an iteration, by name."""

    def close(self) -> None:
        """Store everything, and end the run."""


class _LibraryTracker:
    """What the trackers share whose libraries return a run with `log` and `finish`."""

    def __init__(self) -> None:
        """Create a tracker without a run."""
        self._run: Any = None

    def log(self, iteration: int, values: Mapping[str, float]) -> None:
        """See `Tracker`."""
        self._run.log(dict(values), step=iteration)

    def close(self) -> None:
        """See `Tracker`."""
        run = self._run
        self._run = None
        if run is not None:
            run.finish()


class TrackioTracker(_LibraryTracker):
    """Trackio. Its store is local, unless its environment variables name a Space or a server."""

    def open(
        self, run: TrackedRun, *, project: str, folder: Path, config: Mapping[str, Any]
    ) -> None:
        """See `Tracker`."""
        import trackio

        # Trackio keeps its store in one folder for all runs, so `folder` is not used. Its report of
        # CPU and memory would be that of the feed's process.
        self._run = trackio.init(
            project=project,
            name=run.id,
            group=run.root,
            config=dict(config),
            resume="allow",
            auto_log_cpu=False,
        )


class WandbTracker(_LibraryTracker):
    """Weights & Biases. Without a key it works offline, with files in the folder of the run."""

    def open(
        self, run: TrackedRun, *, project: str, folder: Path, config: Mapping[str, Any]
    ) -> None:
        """See `Tracker`."""
        import wandb

        settings = wandb.Settings(
            # The feed prints nothing that belongs to the run.
            console="off",
            silent=True,
            save_code=False,
            # The address of a git remote may contain a token.
            disable_git=True,
            # The load of the training process is of interest, and not that of the feed.
            x_stats_pid=os.getppid(),
        )
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", project),
            id=run.id,
            name=run.id,
            group=run.root,
            config=dict(config),
            dir=os.environ.get("WANDB_DIR", str(folder)),
            mode=_choose_wandb_mode(),
            resume="allow",
            settings=settings,
        )


def _choose_wandb_mode() -> Any:
    """Return "offline" if the user has chosen no mode and has no key, and otherwise None.

    Without a key, wandb would ask for one at the terminal, or fail.
    """
    import requests
    import wandb

    if "WANDB_MODE" in os.environ:
        return None
    settings = wandb.setup().settings
    if settings.api_key or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return None
    # `wandb login` stores the key in ~/.netrc.
    if requests.utils.get_netrc_auth(settings.base_url) is not None:
        return None
    return "offline"


TRACKERS: dict[str, Callable[[], Tracker]] = {"trackio": TrackioTracker, "wandb": WandbTracker}
"""Name of a tracker -> its constructor. The name is also that of the package and of the extra."""


def check_trackers_are_installed(settings: "ConfigWithOrigin") -> Iterator[Finding]:
    """Check that the packages of trackers are installed, without importing them."""
    for name in settings.config.logging.tracker:
        if find_spec(name) is None:
            yield error(f"--tracker {name} needs the package {name}: pip install -e '.[{name}]'")

"""Take a run back to one of its checkpoints: pointers, checkpoints, TensorBoard, metrics, emissions and log together.

    python tools/rollback.py RUN_FOLDER --to 8400 --skip 8401-8800 --reason "loss spike" --main-log main_log.txt

Later checkpoints and what is cut off are kept under RUN_FOLDER/rolled-back/. Nothing may be training there. Cut off, the same
command goes on. Exit code: 0, or 2 if it may not be done.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from megatron.errors import MegatronError
from megatron.operations.rollback import roll_back
from megatron.operations.rollback_plan import NOTHING, Request


@dataclass(frozen=True)
class Options:
    run_folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_FOLDER")]
    """The run's --save."""
    to: int
    """Iteration of the checkpoint to go back to."""
    skip: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FIRST-LAST ...")] = ()
    """Iterations to skip from there; checked, and printed as the flag to go on with."""
    lr: float | None = None
    """Learning rate to go on with; brings --override-lr-scheduler."""
    override_lr_scheduler: bool = False
    """Go on with another schedule of the learning rate."""
    reason: str = ""
    """For the notes."""
    main_log: str | None = None
    """Log that the launches append to; cut, too. Default: none is."""
    chronicles: str | None = None
    """File that the rollback is noted in. Default: chronicles.md in RUN_FOLDER, where there is one."""
    tensorboard_dir: str | None = None
    """Default of this and the next two: as the checkpoint's configuration says; 'nowhere': there is nothing to cut."""
    metrics_file: str | None = None
    codecarbon_dir: str | None = None
    dry_run: bool = False
    """Print all that would be done, and change nothing."""


def main(argv: list[str] | None = None) -> int:
    given = tyro.cli(Options, args=argv, description=__doc__)
    request = Request(
        to=given.to,
        skip=given.skip,
        lr=given.lr,
        override_lr_scheduler=given.override_lr_scheduler,
        reason=given.reason,
        main_log=_absolute(given.main_log),
        chronicles=_absolute(given.chronicles),
        tensorboard_dir=_absolute(given.tensorboard_dir),
        metrics_file=_absolute(given.metrics_file),
        codecarbon_dir=_absolute(given.codecarbon_dir),
    )
    try:
        roll_back(Path(os.path.realpath(given.run_folder)), request, lambda line: print(line, flush=True), dry_run=given.dry_run)
    except MegatronError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error}; mend that, and give the same command again", file=sys.stderr)
        return 2
    return 0


def _absolute(path: str | None) -> str | None:
    """So that the same command may be given again elsewhere."""
    return path if path is None or path == NOTHING else os.path.abspath(path)


if __name__ == "__main__":
    sys.exit(main())

r"""Roll a run back to one of its checkpoints.

    python tools/rollback.py RUN_FOLDER --to 8400 --skip 8401-8800 --reason "loss spike" \
        --main-log main_log.txt

Pointers, checkpoints, TensorBoard, metrics and log are rolled back together. Later
checkpoints and the parts that are cut off are kept in RUN_FOLDER/rolled-back/. The run must not be
training. After an interruption the same command continues the rollback.

Exit code 0 means success. Exit code 2 means that the rollback is not allowed or failed.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from megatron.base import exit_codes
from megatron.base.errors import MegatronError
from megatron.base.plain_text import print_line, print_to_stderr
from megatron.console.parse import parse_arguments
from megatron.extras.object_store.objects import find_address
from megatron.extras.operations.rollback.execution import roll_back, roll_back_address
from megatron.extras.operations.rollback.rollback_plan import RollbackRequest


@dataclass(frozen=True)
class RollbackArguments:
    """The command line."""

    run_folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_FOLDER")]
    """The run's --save folder, or its s3:// address."""
    request: tyro.conf.OmitArgPrefixes[RollbackRequest]
    dry_run: bool = False
    """Print all that would be done and change nothing."""


def main(argv: list[str] | None = None) -> int:
    """Roll back the run that `argv` names and return the exit code."""
    given = parse_arguments(RollbackArguments, args=argv, description=__doc__)
    try:
        request = given.request.make_absolute()
        address = find_address(given.run_folder)
        if address is not None:
            roll_back_address(address, lambda _: request, print_line, dry_run=given.dry_run)
            return 0
        # An interrupted rollback is finished by the same command, perhaps from another folder.
        run = Path(os.path.realpath(given.run_folder))
        roll_back(run, request, print_line, dry_run=given.dry_run)
    except MegatronError as error:
        print_to_stderr(f"error: {error}")
        return exit_codes.USER_ERROR
    except OSError as error:
        print_to_stderr(f"error: {error}; fix that, and give the same command again")
        return exit_codes.USER_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main())

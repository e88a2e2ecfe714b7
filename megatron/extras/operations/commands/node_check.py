"""Check the nodes of a job. Each rank multiplies matrices, fills memory and writes to disk.

    srun python tools/node_check.py --disk /scratch

All ranks then run one all-reduce together. One line for each rank names the host and its numbers.
`tools/slurm_array_task.py --check-nodes` runs this check before each training.

Exit code 0 means that this rank and the all-reduce are good. Exit code 1 means that one of them is
not.
"""

import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from megatron.base import exit_codes
from megatron.base.plain_text import print_line
from megatron.console.parse import parse_arguments
from megatron.console.run_tool import run_tool
from megatron.extras.operations.slurm.node_report import NodeLimits, NodeReport, check_limits, write
from megatron.plan.rules.finding import refuse_errors


@dataclass(frozen=True)
class NodeCheckArguments(NodeLimits):
    """The command line."""

    report: Path | None = None
    """Folder for each rank's findings as JSON, on a file system that all nodes share."""


def main(argv: list[str] | None = None) -> int:
    """Check this rank's node and return the exit code."""
    options = parse_arguments(
        NodeCheckArguments, args=argv, prog="node_check.py", description=__doc__
    )
    return run_tool(lambda: _check(options))


def _check(options: NodeCheckArguments) -> int:
    """Check this rank's node and return the exit code.

    Raises:
        MegatronError: An option is wrong, or the check cannot run.
        OSError: The report cannot be written.
    """
    refuse_errors(check_limits(options))
    last: list[NodeReport] = []

    # Findings are kept as they arrive. A check that hangs later still reports what it measured
    # before.
    def keep(report: NodeReport) -> None:
        last[:] = [report]
        if options.report is not None:
            write(options.report, report)

    def give_up() -> None:
        findings = last[-1].format_line() if last else "no part of the check has ended"
        print_line(f"{findings}; not done after {options.seconds:g} s")
        # A thread that hangs in a driver ignores signals and exceptions. Only `_exit` ends the
        # process.
        os._exit(exit_codes.FOUND)

    watch = threading.Timer(options.seconds, give_up)
    # The timer must not keep the process alive after a check that passed.
    watch.daemon = True
    watch.start()
    # This imports torch, which may hang on a bad node. So the timer is started first.
    from megatron.extras.operations.slurm.node_probe import probe

    report = probe(options, keep)
    print_line(report.format_line())
    if report.failures or report.all_reduce_failure:
        return exit_codes.FOUND
    return 0


if __name__ == "__main__":
    sys.exit(main())

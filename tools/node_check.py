"""Are this job's nodes good? Each rank multiplies matrices, fills memory, writes to disk; then all reduce together.

    srun python tools/node_check.py --disk /scratch

One line for each rank names the host and its numbers. Exit code: 0; 1 where this rank, or the all-reduce, is bad. What
`tools/slurm_element.py --check-nodes` runs before each training.
"""

import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import tyro

from megatron.errors import MegatronError
from megatron.operations.node_report import NodeLimits, NodeReport, write


@dataclass(frozen=True)
class NodeCheckArguments(NodeLimits):
    report: Path | None = None
    """Write each rank's findings here, as JSON; on a file system that all nodes share."""


def main(argv: list[str] | None = None) -> int:
    options = tyro.cli(NodeCheckArguments, args=argv, prog="node_check.py", description=__doc__)
    last: list[NodeReport] = []

    def tell(report: NodeReport) -> None:
        last[:] = [report]
        if options.report is not None:
            write(options.report, report)

    def give_up() -> None:
        said = last[-1].format_line() if last else "nothing was found out"
        print(f"{said}; not done after {options.seconds:g} s", flush=True)
        os._exit(1)  # what hangs in a driver cannot be ended otherwise

    watch = threading.Timer(options.seconds, give_up)
    watch.daemon = True
    watch.start()
    from megatron.operations.node_probe import probe  # imports torch, which may be what hangs

    try:
        report = probe(options, tell)
    except (MegatronError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(report.format_line(), flush=True)
    return 1 if report.failures or report.all_reduce_failure else 0


if __name__ == "__main__":
    sys.exit(main())

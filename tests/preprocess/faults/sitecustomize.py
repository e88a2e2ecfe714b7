"""Kills or stops a task at a chosen shard. Python imports this module at the start of a process.

A file in the folder $CORPUS_FAULTS chooses the fault: `part-000 kill 1` kills the process that has
renamed the .bin of part-000 and not yet its .idx. `part-000 stop 1` makes it wait, and the file
`part-000 stopped` then has the name of its node. Each fault happens once.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

FOLDER = os.environ.get("CORPUS_FAULTS")
_replace = os.replace


def _replace_with_faults(source: Any, target: Any) -> None:
    name = Path(target).name
    if FOLDER is not None and name.endswith(".idx"):
        for fault in sorted(Path(FOLDER).iterdir()):
            shard, action, *_ = [*fault.name.split(" "), ""]
            if not name.startswith(f"{shard}-") or action not in ("kill", "stop"):
                continue
            fault.unlink()
            if action == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            node = os.environ.get("SLURMD_NODENAME", "")
            Path(FOLDER, f"{shard} stopped").write_text(f"{node}\n")
            time.sleep(600)
    _replace(source, target)


if FOLDER is not None:
    os.replace = _replace_with_faults  # type: ignore[assignment]

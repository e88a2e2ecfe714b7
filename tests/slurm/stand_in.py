"""Scripts in place of Slurm's commands, which run a batch script and its steps on this machine.

What an array task decides after a step needs no cluster. `cluster.py` has the real one.
"""

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

NODES = 2
_HOSTS = [f"127.0.0.{number}" for number in range(1, NODES + 1)]
"""Names that the ranks can use as addresses."""

_SRUN = f"""#!/usr/bin/env bash
# The largest exit code of the tasks is that of the step.
while [[ $1 == -* ]]; do
    if [[ $1 == --export=ALL,* ]]; then
        IFS=, read -ra variables <<<"${{1#--export=ALL,}}"
        export "${{variables[@]}}"
    fi
    shift
done
export SLURM_STEP_ID=0 SLURM_STEP_NODELIST="$SLURM_JOB_NODELIST"
export SLURM_STEP_NUM_TASKS=$(({NODES} * SLURM_NTASKS_PER_NODE))
export SLURM_STEP_TASKS_PER_NODE="$SLURM_TASKS_PER_NODE"
pids=()
for ((rank = 0; rank < SLURM_STEP_NUM_TASKS; rank++)); do
    SLURM_PROCID=$rank SLURM_LOCALID=$((rank % SLURM_NTASKS_PER_NODE)) \\
        SLURMD_NODENAME=127.0.0.$((1 + rank / SLURM_NTASKS_PER_NODE)) "$@" &
    pids+=($!)
done
code=0
for pid in "${{pids[@]}}"; do
    wait "$pid"
    ended=$?
    code=$((ended > code ? ended : code))
done
exit "$code"
"""
_SCONTROL = f"""#!/usr/bin/env bash
case "$*" in
    "show hostnames "*) printf '%s\\n' {" ".join(_HOSTS)} ;;
    "show job "*)
        echo "JobState=RUNNING NodeList=$SLURM_JOB_NODELIST"
        echo "ReqNodeList=(null) ExcNodeList=(null)" ;;
    "requeue "*) touch "$STAND_IN/requeued" ;;
esac
"""
_SCANCEL = """#!/usr/bin/env bash
touch "$STAND_IN/cancelled"
"""


@dataclass(frozen=True)
class StandIn:
    """Runs the tasks of a job array one after another, on two nodes that are this machine."""

    folder: Path

    def __post_init__(self) -> None:
        """Write the scripts."""
        for name, text in (("srun", _SRUN), ("scontrol", _SCONTROL), ("scancel", _SCANCEL)):
            (self.folder / name).write_text(text)
            (self.folder / name).chmod(0o755)

    def run(self, *command: str, **variables: str) -> str:
        """Run a job to its end for sbatch. Other commands find no job."""
        if command[0] != "sbatch":
            return ""
        *options, script = command[1:]
        given = dict(option.split("=", 1) for option in options)
        text = Path(script).read_text()
        # Options of the command line have priority over those of the script.
        found = re.findall(r"^#SBATCH (--[a-z-]+)=(\S+)", text, re.M)
        given = {**dict(found), **given}
        last = int(given["--array"].removeprefix("1-").removesuffix("%1"))
        tasks = given["--ntasks-per-node"]
        job = {
            "STAND_IN": str(self.folder),
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            "SLURM_ARRAY_JOB_ID": "1",
            "SLURM_JOB_NODELIST": ",".join(_HOSTS),
            "SLURM_TASKS_PER_NODE": f"{tasks}(x{NODES})",
            "SLURM_NTASKS_PER_NODE": tasks,
            "SLURM_SUBMIT_DIR": given["--chdir"],
        }
        number = 1
        restarts = 0
        while number <= last and not (self.folder / "cancelled").exists():
            (self.folder / "requeued").unlink(missing_ok=True)
            own = {
                "SLURM_JOB_ID": str(number),
                "SLURM_ARRAY_TASK_ID": str(number),
                "SLURM_RESTART_COUNT": str(restarts),
            }
            with open(self.folder / "output", "ab") as output:
                subprocess.run(
                    ["bash", script],
                    cwd=given["--chdir"],
                    env={**os.environ, **variables, **job, **own},
                    stdout=output,
                    stderr=output,
                    timeout=240,
                    check=False,
                )
            if (self.folder / "requeued").exists():
                restarts += 1
            else:
                number, restarts = number + 1, 0
        return "Submitted batch job 1\n"

    def read_controller_log(self) -> str:
        """Return what the batch scripts have printed."""
        return (self.folder / "output").read_text()

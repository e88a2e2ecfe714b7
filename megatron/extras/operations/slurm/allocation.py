"""The hosts of a Slurm job, and which of them the next step of srun uses.

A job may have more hosts than the training needs. The additional ones are spares. They replace
hosts that failed, so that the training can start again in the same job.
"""

import os
from collections.abc import Mapping

from megatron.base.errors import OperationsError
from megatron.extras.operations.slurm.client import expand_hosts, read_job_hosts
from megatron.extras.operations.slurm.node_report import parse_tasks_per_node


class Allocation:
    """The hosts of this job that are not known to be bad. `read` must be called first."""

    def __init__(self, train_nodes: int | None) -> None:
        """Store the number of hosts that the training needs. None: all hosts of the job."""
        self._train_nodes = train_nodes
        self._tasks: dict[str, int] = {}
        """Host -> number of its tasks, for all hosts that the job started with."""
        self._present: list[str] = []
        """Hosts that the job has now."""
        self.bad: dict[str, str] = {}
        """Host that is not used any more -> the reason."""

    def read(self) -> None:
        """Read with which hosts the job started.

        Raises:
            OperationsError: Slurm's commands do not run, or the job has too few hosts for the
                training.
        """
        hosts = expand_hosts(os.environ["SLURM_JOB_NODELIST"])
        counts = parse_tasks_per_node(os.environ.get("SLURM_TASKS_PER_NODE", ""), len(hosts))
        self._tasks = dict(zip(hosts, counts, strict=True))
        self._present = hosts
        if self._train_nodes is not None and self._train_nodes > len(hosts):
            raise OperationsError(
                f"--train-nodes {self._train_nodes} must be at most the number of nodes of the "
                f"job, which is {len(hosts)}; change it, or sbatch --nodes"
            )

    def refresh(self) -> None:
        """Leave out the hosts that the job has lost since it started."""
        # If the controller does not answer, the next step shows which hosts are missing.
        present = read_job_hosts() or self._present
        self._present = [host for host in self._present if host in present]

    @property
    def needed(self) -> int:
        """Number of hosts that the training needs."""
        return self._train_nodes or len(self._tasks)

    @property
    def is_large_enough(self) -> bool:
        """Whether enough good hosts are left for the training."""
        return len(self.good_hosts) >= self.needed

    @property
    def good_hosts(self) -> Mapping[str, int]:
        """Each host that may be used, spares included, with the number of its tasks."""
        return {host: self._tasks[host] for host in self._present if host not in self.bad}

    @property
    def train_hosts(self) -> Mapping[str, int]:
        """Each host that the training uses, with the number of its tasks. The spares are last."""
        return dict(list(self.good_hosts.items())[: self.needed])

    def format_srun_options(self, hosts: Mapping[str, int]) -> list[str]:
        """Return the options with which srun starts a step on some hosts of the job."""
        # By default srun uses all hosts that the job started with.
        if len(hosts) == len(self._tasks):
            return []
        return [
            f"--nodes={len(hosts)}",
            f"--ntasks={sum(hosts.values())}",
            f"--nodelist={','.join(hosts)}",
        ]

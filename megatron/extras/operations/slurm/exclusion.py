"""Hosts that a run does not use any more: which hangs exclude a host, and the exclusion in Slurm.

Invariant: a hang that names more than half of several hosts excludes none of them. All hosts then
have the same cause, for example a file system that does not answer.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron.base.error_report import ErrorReport
from megatron.base.plain_text import print_line
from megatron.extras.operations.chronicle.records import read_events
from megatron.extras.operations.slurm import client
from megatron.extras.operations.slurm.attempts import read_reached_iteration
from megatron.extras.operations.slurm.node_report import find_slurm_name
from megatron.observe.chronicle import CHRONICLE, append_event

HANGS_BEFORE_EXCLUSION = 2
"""Hangs of a run that name a host, after which the host is excluded.

One hang may have another cause than the host, and a good host would be lost.
"""
_REQUEUE_SECONDS = 20.0
"""Time in which a requeued job must become pending."""
_LONGEST_VERDICT = 2000
"""Characters of a verdict that are recorded."""


class HostExclusion:
    """Records which hosts hung, and excludes hosts from the array's later tasks."""

    def __init__(self, save: Path, alert: Callable[[str], None]) -> None:
        """Store the run's folder, and the function that sends a text to an operator."""
        self._save = save
        self._alert = alert

    def record(self, kind: str, details: dict[str, Any]) -> None:
        """Append an event to the run's chronicle. A failure is only printed."""
        try:
            iteration = read_reached_iteration(self._save)
            append_event(self._save / CHRONICLE, kind, iteration, details)
        except OSError as error:
            print_line(f"warning: the chronicle could not be written: {error}")

    def record_hang(self, verdict: ErrorReport, hosts: Iterable[str]) -> dict[str, str]:
        """Record a hang, and return the hosts that it excludes, each with the reason.

        Args:
            verdict: The report of a rank that compared the states of all ranks.
            hosts: The hosts of the training, by Slurm's names.
        """
        names = list(hosts)
        named = sorted({find_slurm_name(host, names) for host in verdict.hung_hosts})
        earlier = self._count_hangs()
        if len(names) > 1 and 2 * len(named) > len(names):
            named = []
        self.record("hang", {"hosts": named, "verdict": verdict.message[:_LONGEST_VERDICT]})
        counts = {host: earlier[host] + 1 for host in named}
        return {
            host: f"{count} hangs of this run waited for a rank on it"
            for host, count in counts.items()
            if count >= HANGS_BEFORE_EXCLUSION
        }

    def _count_hangs(self) -> Counter[str]:
        """Return the number of earlier hangs that named each host, over all jobs of the run."""
        try:
            events = read_events(self._save / CHRONICLE)
        except OSError:
            return Counter()
        hosts = [event.details.get("hosts") for event in events if event.kind == "hang"]
        # Another program may have written an event. An error here would keep the job from a
        # restart and from a requeue.
        return Counter(str(host) for each in hosts if isinstance(each, list) for host in each)

    def exclude(self, bad: Mapping[str, str]) -> None:
        """Exclude hosts from the pending tasks of this array, and report them to the operator.

        A job that runs cannot be changed. `exclude_after_requeue` changes it later.

        Args:
            bad: Host -> the reason.
        """
        array = os.environ.get("SLURM_ARRAY_JOB_ID")
        job = array or os.environ["SLURM_JOB_ID"]
        excluded = self.add_to_excluded(job, bad, only_pending=array is not None)
        allowed = [host for host in excluded if host not in bad]
        undo = f"scontrol update jobid={job} ExcNodeList={','.join(allowed)}"
        if array is None:
            how = f"after a requeue, {undo} allows it again"
        else:
            # This also fails if no task of the array is pending, which is not an error.
            client.exclude(array, excluded)
            how = f"{undo} allows it again for pending tasks"
        for host, reason in bad.items():
            self.record("exclusion", {"host": host, "reason": reason, "undo": undo})
            self._alert(f"node {host} is not used any more: {reason} ({how})")

    def exclude_after_requeue(self, job: str, hosts: Collection[str], excluded: list[str]) -> None:
        """Exclude hosts from this job, which was requeued a moment ago.

        Args:
            job: This job's name.
            hosts: The hosts that are new in the list.
            excluded: All hosts to exclude. See `add_to_excluded`.
        """
        end = time.monotonic() + _REQUEUE_SECONDS
        # Slurm accepts the change only once the requeued job is pending.
        while not client.exclude(job, excluded):
            if time.monotonic() > end:
                self._alert(
                    f"{', '.join(hosts)} could not be excluded from job {job}; run scontrol update "
                    f"jobid={job} ExcNodeList={','.join(excluded)}"
                )
                return
            time.sleep(0.2)

    def add_to_excluded(
        self, job: str, hosts: Collection[str], *, only_pending: bool = False
    ) -> list[str]:
        """Return the hosts that Slurm excludes from a job already, and these ones.

        If Slurm does not answer, the operator is alerted, and the list has only these ones.
        """
        earlier = client.list_excluded(job, only_pending=only_pending)
        if earlier is None:
            self._alert(
                f"the hosts that job {job} already excludes could not be read; from now on it "
                f"excludes only {', '.join(hosts)}"
            )
        return sorted({*(earlier or ()), *hosts})

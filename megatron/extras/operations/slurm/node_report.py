"""Report what the probe of a node found, and decide which hosts are bad.

Each reason names the host's own number.

Invariant: a host is bad for what its own ranks could not do, or because ranks of it did not answer.
A failure of all ranks together, such as of the all-reduce, is attributed to no host.
"""

import json
import math
import re
import statistics
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron.base.outside_file import load_json
from megatron.plan.rules.finding import Finding, error

OWN_PARTS = ("memory", "product", "disk")
"""Parts of the probe that involve no other host. A rank that hangs in one has a bad host."""


@dataclass(frozen=True)
class NodeLimits:
    """What a node must do."""

    slower_than: float = 0.5
    """A rank is bad if its matrix product is slower than this fraction of the median rank's. 0
    turns the check of the speed off."""
    memory_gib: float = 1.0
    """Free memory in GiB that each rank must be able to fill on its device."""
    disk: str = "/tmp"
    """Folder to which each rank writes 64 MiB and from which it reads them back. %h is the host's
    name."""
    seconds: float = 180.0
    """Time limit of the complete probe in seconds. A rank that has not answered by then is bad."""

    def format_flags(self) -> list[str]:
        """Return the limits as flags of tools/node_check.py."""
        return [f"--{name.replace('_', '-')}={value}" for name, value in asdict(self).items()]


def check_limits(limits: NodeLimits) -> Iterator[Finding]:
    """Check that a node can meet the limits."""
    # NaN fails these comparisons as well.
    if not 0 <= limits.slower_than <= 1:
        yield error(f"--slower-than {limits.slower_than:g} must be from 0 to 1")
    if not 0 <= limits.memory_gib < math.inf:
        yield error(f"--memory-gib {limits.memory_gib:g} must be at least 0, and finite")
    if not 0 < limits.seconds <= threading.TIMEOUT_MAX:
        yield error(f"--seconds {limits.seconds:g} must be above 0, and finite")


@dataclass(frozen=True)
class NodeReport:
    """What the probe of one rank found."""

    host: str
    rank: int
    tflops: float | None = None
    """Speed of the matrix product, or None if the probe did not reach it."""
    disk_mb_per_second: float | None = None
    """Speed of writing to the disk and reading back."""
    all_reduce_gb_per_second: float | None = None
    """Bytes of one rank's tensor in GB, divided by the time of its all-reduce."""
    failures: tuple[str, ...] = ()
    """Failures of the host's own."""
    doing: str = ""
    """The part that is running. In the last report of a rank that hangs, it names that part."""
    all_reduce_failure: str | None = None
    """Failure of all ranks together."""

    def format_line(self) -> str:
        """Return the line that is printed for this rank."""
        numbers = (
            (self.tflops, "TFLOPS"),
            (self.disk_mb_per_second, "MB/s to disk and back"),
            (self.all_reduce_gb_per_second, "GB/s all-reduce"),
        )
        shown = ", ".join(f"{value:.3g} {unit}" for value, unit in numbers if value is not None)
        failures = [*self.failures, *([self.all_reduce_failure] if self.all_reduce_failure else [])]
        return f"node check: {self.host}, rank {self.rank}: {shown}" + (
            f"; BAD: {'; '.join(failures)}" if failures else ""
        )


def write(folder: Path, report: NodeReport) -> None:
    """Write the report of a rank, so that a reader sees a complete report or none.

    Raises:
        OSError: The report cannot be written.
    """
    final = folder / f"{report.rank:05d}.json"
    fresh = final.with_suffix(".new")
    fresh.write_text(json.dumps(asdict(report)))
    # The reader may look at any time, so the complete file gets its name by an atomic rename.
    fresh.replace(final)


def read(folder: Path) -> list[NodeReport]:
    """Return the reports in a folder in the order of ranks."""
    # The names have leading zeros, so their order is that of the ranks.
    records = [load_json(path) for path in sorted(folder.glob("*.json"))]
    # JSON has no tuples, and a list would compare as different.
    return [NodeReport(**{**record, "failures": tuple(record["failures"])}) for record in records]


def find_bad_hosts(
    reports: Sequence[NodeReport], tasks: Mapping[str, int], limits: NodeLimits
) -> dict[str, str]:
    """Return the bad hosts, each with the reason.

    Args:
        reports: The reports of all ranks that answered.
        tasks: Host -> number of its ranks that should have answered. Hosts have Slurm's names.
        limits: What a node must do.
    """
    bad = {}
    names = {report.host: find_slurm_name(report.host, tasks) for report in reports}
    for host, count in tasks.items():
        answered = sum(names[report.host] == host for report in reports)
        # A rank that could not start leaves no report.
        if answered < count:
            bad[host] = (
                f"{count - answered} of {count} ranks did not answer within {limits.seconds:g} s"
            )
    speeds = [report.tflops for report in reports if report.tflops is not None]
    # A few slow ranks do not move the median.
    usual = statistics.median(speeds or [0.0])
    for report in reports:
        name = names[report.host]
        # A failure explains more than a missing answer, so it replaces that reason.
        if report.failures:
            bad[name] = f"rank {report.rank}: {'; '.join(report.failures)}"
        # The last report still names a part, so the rank did not get through it.
        elif report.doing in OWN_PARTS:
            bad[name] = (
                f"rank {report.rank}: hung in the check of its {report.doing} for "
                f"{limits.seconds:g} s"
            )
        elif report.tflops is not None and report.tflops < limits.slower_than * usual:
            # A slow rank is the weakest reason, so it does not replace another one.
            bad.setdefault(
                name,
                f"rank {report.rank}: {report.tflops:.3g} TFLOPS, where the median rank has "
                f"{usual:.3g}",
            )
    return bad


def find_slurm_name(host: str, names: Iterable[str]) -> str:
    """Return Slurm's name of a host.

    A rank that does not know Slurm's name reports the system's name, which may be `n1.site.org`
    where Slurm has `n1`, or the other way round.

    Returns:
        The name in `names` with the same first part. `host` itself if it is among them, or if there
        is not exactly one such name.
    """
    short = host.partition(".")[0]
    alike = [name for name in names if name.partition(".")[0] == short]
    if host in alike or len(alike) != 1:
        return host
    return alike[0]


def parse_tasks_per_node(text: str, nodes: int) -> list[int]:
    """Return the number of tasks on each node from Slurm's text, such as 4, 4, 3 for "4(x2),3".

    A text that does not match the number of nodes counts as one task on each node.
    """
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    if len(counts) == nodes:
        return counts
    return [1] * nodes

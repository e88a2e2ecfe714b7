"""What a probe of a node found, and which hosts are bad by it: each check names the host and its number.

Invariant: a host is bad for what its own ranks could not do, or because none of them answered; what all ranks fail at together (an
all-reduce over the whole job) accuses nobody.
"""

import json
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

OWN_PARTS = ("memory", "product", "disk")


@dataclass(frozen=True)
class NodeLimits:
    """What a node must do."""

    slower_than: float = 0.5
    """Bad is a rank whose matrix product is slower than this part of the median rank's; 0 judges no speed."""
    memory_gib: float = 1.0
    """Free memory that each rank must be able to fill, on its device."""
    disk: str = "/tmp"
    """A folder that each rank writes 64 MiB to and reads back; %h is the host's name."""
    seconds: float = 180.0
    """For the whole probe; who has not answered by then is bad."""

    def format_flags(self) -> list[str]:
        return [
            f"--slower-than={self.slower_than}",
            f"--memory-gib={self.memory_gib}",
            f"--disk={self.disk}",
            f"--seconds={self.seconds}",
        ]


@dataclass(frozen=True)
class NodeReport:
    """Of one rank."""

    host: str
    rank: int
    tflops: float | None = None
    """Of a matrix product; None where it was not reached."""
    disk_mb_per_second: float | None = None
    all_reduce_gb_per_second: float | None = None
    failures: tuple[str, ...] = ()
    """Of the host's own."""
    doing: str = ""
    """The part that is under way: a report that ends with one says what hangs."""
    all_reduce_failure: str | None = None
    """Of all ranks together."""

    def format_line(self) -> str:
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
    """Whole or not at all: the reader may look at any time. Raises OSError."""
    final = folder / f"{report.rank:05d}.json"
    fresh = final.with_suffix(".new")
    fresh.write_text(json.dumps(asdict(report)))
    fresh.replace(final)


def read(folder: Path) -> list[NodeReport]:
    """In the order of ranks."""
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return [NodeReport(**{**record, "failures": tuple(record["failures"])}) for record in records]


def find_bad_hosts(
    reports: Sequence[NodeReport], tasks: Mapping[str, int], limits: NodeLimits
) -> dict[str, str]:
    """Host -> what is wrong. `tasks`: how many ranks of each host should have answered; hosts are named as Slurm names them."""
    bad = {}
    for host, count in tasks.items():
        answered = sum(report.host == host for report in reports)
        if answered < count:
            bad[host] = (
                f"{count - answered} of {count} ranks did not answer within {limits.seconds:g} s"
            )
    speeds = [report.tflops for report in reports if report.tflops is not None]
    usual = statistics.median(speeds) if speeds else 0.0
    for report in reports:
        name = report.host
        if report.failures:
            bad[name] = f"rank {report.rank}: {'; '.join(report.failures)}"
        elif report.doing in OWN_PARTS:
            bad[name] = (
                f"rank {report.rank}: hung in the check of its {report.doing} for {limits.seconds:g} s"
            )
        elif report.tflops is not None and report.tflops < limits.slower_than * usual:
            bad.setdefault(
                name,
                f"rank {report.rank}: {report.tflops:.3g} TFLOPS, where the median rank has {usual:.3g}",
            )
    return bad


def parse_tasks_per_node(text: str, nodes: int) -> list[int]:
    """Of each node, from what Slurm writes: "4(x2),3" -> 4, 4, 3. Where it says something else, one each."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts if len(counts) == nodes else [1] * nodes

"""The probe that each rank of a job runs on its own device before training: product, memory, disk, then all ranks' all-reduce.

Invariant: a report is written after each part, so that what hangs later does not hide what was found before.
"""

import os
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.operations.node_report import NodeLimits, NodeReport
from megatron.parallel.launcher import read_launcher_world

_DISK_BYTES = 64 << 20
_REPEATS = 5
_SIZES = {"cuda": (8192, torch.bfloat16), "cpu": (512, torch.float32)}


@dataclass
class _ProbeFindings:
    rank: int
    tell: Callable[[NodeReport], None]
    report: NodeReport = field(init=False)

    def __post_init__(self) -> None:
        self.report = NodeReport(host=_host(), rank=self.rank)

    def set(self, **values: object) -> None:
        self.report = replace(self.report, **values)  # type: ignore[arg-type]
        self.tell(self.report)

    def add_failure(self, failure: str) -> None:
        self.set(failures=(*self.report.failures, failure))


def probe(limits: NodeLimits, tell: Callable[[NodeReport], None]) -> NodeReport:
    """`tell` is given the report each time that it grows; returns the last."""
    world = read_launcher_world()
    findings = _ProbeFindings(int(os.environ.get("RANK", "0")), tell)
    device = torch.device("cpu")
    for part in (_memory, _product):
        findings.set(doing=part.__name__[1:])
        try:
            if torch.cuda.is_available():
                device = torch.device("cuda", world.local_rank)
                torch.cuda.set_device(device)
            part(findings, limits, device)
        except (RuntimeError, MemoryError) as error:
            findings.add_failure(
                f"{part.__name__[1:]}: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
            )
    findings.set(doing="disk")
    try:
        _disk(findings, limits)
    except OSError as error:
        findings.add_failure(f"disk: {error}")
    findings.set(doing="all-reduce")
    if world.size > 1:
        try:
            _all_reduce(findings, limits, device)
        except RuntimeError as error:
            findings.set(
                all_reduce_failure=f"all-reduce over {world.size} ranks: {str(error).splitlines()[0]}"
            )
    findings.set(doing="")
    return findings.report


def _product(findings: _ProbeFindings, limits: NodeLimits, device: torch.device) -> None:
    """The same product several times: its speed, and that it is the same."""
    size, dtype = _SIZES[device.type]
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(size, size, generator=generator).to(device, dtype) for _ in range(2))
    first, best = left @ right, float("inf")
    for _ in range(_REPEATS):
        _wait(device)
        start = time.perf_counter()
        again = left @ right
        _wait(device)
        best = min(best, time.perf_counter() - start)
        if not torch.equal(first, again):
            findings.add_failure(
                f"product: two products of the same matrices differ, in {int((first != again).sum())} elements"
            )
            break
    findings.set(tflops=2 * size**3 / best / 1e12)


def _memory(findings: _ProbeFindings, limits: NodeLimits, device: torch.device) -> None:
    """That so much can be had, and holds what is put there."""
    count = int(limits.memory_gib * (1 << 30)) // 4
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        if free < 4 * count:
            findings.add_failure(
                f"memory: {free / (1 << 30):.3g} GiB are free on {device}, and {limits.memory_gib:g} are needed"
            )
            return
    filled = torch.full((count,), 0x5A5A5A5A, dtype=torch.int32, device=device)
    wrong = int((filled != 0x5A5A5A5A).sum())
    if wrong:
        findings.add_failure(f"memory: {wrong} of {count} words do not hold what was written")


def _disk(findings: _ProbeFindings, limits: NodeLimits) -> None:
    folder = Path(limits.disk.replace("%h", _host()))
    path = folder / f".node-check-{os.getpid()}"
    free = shutil.disk_usage(folder).free
    if free < _DISK_BYTES:
        findings.add_failure(f"disk: {folder} has {free} bytes free, and {_DISK_BYTES} are written")
        return
    content = os.urandom(1 << 20) * (_DISK_BYTES >> 20)
    try:
        start = time.perf_counter()
        with open(path, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if path.read_bytes() != content:
            findings.add_failure(f"disk: {folder} does not give back what was written")
        findings.set(disk_mb_per_second=2 * _DISK_BYTES / 1e6 / (time.perf_counter() - start))
    finally:
        path.unlink(missing_ok=True)


def _all_reduce(findings: _ProbeFindings, limits: NodeLimits, device: torch.device) -> None:
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=limits.seconds / 2))
    numbers = torch.ones(1 << (26 if device.type == "cuda" else 20), device=device)
    dist.all_reduce(numbers)  # the first one connects
    _wait(device)
    start = time.perf_counter()
    dist.all_reduce(numbers)
    _wait(device)
    seconds, size = time.perf_counter() - start, dist.get_world_size()
    if not bool((numbers == float(size) ** 2).all()):
        findings.add_failure(
            f"all-reduce: {int((numbers != float(size) ** 2).sum())} of {numbers.numel()} sums are wrong"
        )
    findings.set(all_reduce_gb_per_second=4 * numbers.numel() / 1e9 / seconds)
    dist.destroy_process_group()


def _host() -> str:
    """As Slurm names it, where it does."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

"""Probe the device, disk and network of each rank before training.

The parts are memory, a matrix product, the disk, and an all-reduce over all ranks.

Invariant: a report is written after each part. A part that hangs does not hide what was found
earlier.
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

from megatron.extras.operations.slurm.node_report import NodeLimits, NodeReport
from megatron.parallel.launcher import read_launcher_world
from megatron.parallel.rendezvous import choose_device

_DISK_BYTES = 64 << 20
"""Bytes that each rank writes to its disk."""
_COMPARED_WORDS = 64 << 20
"""Words that are compared at a time. The result of a comparison has a byte for each."""
_REPEATS = 5
"""Number of products that are timed and compared."""
_SIZES = {"cuda": (8192, torch.bfloat16), "cpu": (512, torch.float32)}
"""Type of the device -> rows and columns of the matrices, and their data type."""


@dataclass
class _ProbeFindings:
    """The report of one rank, which is passed on after each change."""

    rank: int
    on_change: Callable[[NodeReport], None]
    report: NodeReport = field(init=False)

    def __post_init__(self) -> None:
        """Start with an empty report."""
        self.report = NodeReport(host=_host(), rank=self.rank)

    def set(self, **values: object) -> None:
        """Set fields of the report and pass it on."""
        self.report = replace(self.report, **values)  # type: ignore[arg-type]
        self.on_change(self.report)

    def add_failure(self, failure: str) -> None:
        """Add a failure of this host to the report and pass it on."""
        self.set(failures=(*self.report.failures, failure))


def probe(limits: NodeLimits, on_change: Callable[[NodeReport], None]) -> NodeReport:
    """Run all parts of the probe and return the last report.

    Args:
        limits: What a node must do.
        on_change: Function that is called with the report each time it changes.
    """
    world = read_launcher_world()
    findings = _ProbeFindings(int(os.environ.get("RANK", "0")), on_change)
    device = torch.device("cpu")
    for part in (_memory, _product):
        # The name of the part is reported first. If the part hangs, the report shows which one it
        # was.
        findings.set(doing=part.__name__[1:])
        try:
            # A broken driver can raise here too, so this is part of what is probed.
            device = choose_device(world.local_rank)
            part(findings, limits, device)
        # CUDA errors, including those of memory, are RuntimeErrors. The other parts are still
        # probed.
        except (RuntimeError, MemoryError) as error:
            findings.add_failure(
                f"{part.__name__[1:]}: "
                f"{str(error).splitlines()[0] if str(error) else type(error).__name__}"
            )
    findings.set(doing="disk")
    try:
        _disk(findings, limits)
    except OSError as error:
        findings.add_failure(f"disk: {error}")
    # The all-reduce is last, because it waits for all ranks and may hang for another host's fault.
    findings.set(doing="all-reduce")
    if world.size > 1:
        try:
            # Half of the time limit leaves time to report a timeout before the probe is ended.
            limit = timedelta(seconds=limits.seconds / 2)
            dist.init_process_group({"cuda": "nccl"}.get(device.type, "gloo"), timeout=limit)
            _all_reduce(findings, device)
            dist.destroy_process_group()
        except RuntimeError as error:
            # This failure is kept apart, because it does not show which host is bad.
            findings.set(
                all_reduce_failure=f"all-reduce over {world.size} ranks: "
                f"{str(error).splitlines()[0]}"
            )
    findings.set(doing="")
    return findings.report


def _product(findings: _ProbeFindings, limits: NodeLimits, device: torch.device) -> None:
    """Compute the same product several times, measure its speed, and compare the results."""
    size, dtype = _SIZES[device.type]
    # All ranks multiply the same matrices, so that their speeds can be compared.
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(size, size, generator=generator).to(device, dtype) for _ in range(2))
    # The first product also loads the kernels, so it is not timed.
    first = left @ right
    best = float("inf")
    for _ in range(_REPEATS):
        _wait(device)
        start = time.perf_counter()
        again = left @ right
        _wait(device)
        # The best time is the least disturbed by other processes.
        best = min(best, time.perf_counter() - start)
        # The same product on the same device must give the same bits. A difference is a hardware
        # fault.
        if not torch.equal(first, again):
            findings.add_failure(
                "product: two products of the same matrices differ, in "
                f"{int((first != again).sum())} elements"
            )
            break
    findings.set(tflops=2 * size**3 / best / 1e12)


def _memory(findings: _ProbeFindings, limits: NodeLimits, device: torch.device) -> None:
    """Check that `memory_gib` can be allocated and hold what is written to them."""
    # The number of 32-bit words.
    count = int(limits.memory_gib * (1 << 30)) // 4
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        # The free memory is checked first, which gives a clearer message than a failed allocation.
        if free < 4 * count + _COMPARED_WORDS:
            findings.add_failure(
                f"memory: {free / (1 << 30):.3g} GiB are free on {device}, but "
                f"{limits.memory_gib:g} GiB are needed"
            )
            return
    # The pattern has ones and zeros in each byte.
    filled = torch.full((count,), 0x5A5A5A5A, dtype=torch.int32, device=device)
    # A comparison needs a byte for each word, so the words are compared in parts.
    wrong = sum(int((part != 0x5A5A5A5A).sum()) for part in filled.split(_COMPARED_WORDS))
    del filled
    if device.type == "cuda":
        # Otherwise torch would keep the memory for this process, and the training would have less.
        torch.cuda.empty_cache()
    if wrong:
        findings.add_failure(f"memory: {wrong} of {count} words do not hold what was written")


def _disk(findings: _ProbeFindings, limits: NodeLimits) -> None:
    """Write a file, read it back, and measure the speed."""
    folder = Path(limits.disk.replace("%h", _host()))
    path = folder / f".node-check-{os.getpid()}"
    free = shutil.disk_usage(folder).free
    if free < _DISK_BYTES:
        findings.add_failure(f"disk: {folder} has {free} bytes free, but {_DISK_BYTES} are needed")
        return
    # Random bytes cannot be compressed. One MiB is repeated, because random bytes are slow to make.
    content = os.urandom(1 << 20) * (_DISK_BYTES >> 20)
    try:
        start = time.perf_counter()
        with open(path, "wb") as file:
            file.write(content)
            file.flush()
            # Without fsync the time would be that of the page cache.
            os.fsync(file.fileno())
            # The cache must not answer the read either. Written pages can be dropped from it.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if path.read_bytes() != content:
            findings.add_failure(f"disk: what was read from {folder} is not what was written")
        findings.set(disk_mb_per_second=2 * _DISK_BYTES / 1e6 / (time.perf_counter() - start))
    finally:
        path.unlink(missing_ok=True)


def _all_reduce(findings: _ProbeFindings, device: torch.device) -> None:
    """Check the result of an all-reduce over all ranks, and measure its speed."""
    numbers = torch.ones(1 << (26 if device.type == "cuda" else 20), device=device)
    # The first all-reduce opens the connections, so it is not timed.
    dist.all_reduce(numbers)
    _wait(device)
    start = time.perf_counter()
    dist.all_reduce(numbers)
    _wait(device)
    seconds = time.perf_counter() - start
    size = dist.get_world_size()
    # Ones that were summed twice over all ranks are the square of their number.
    if not bool((numbers == float(size) ** 2).all()):
        findings.add_failure(
            f"all-reduce: {int((numbers != float(size) ** 2).sum())} of {numbers.numel()} sums "
            "are wrong"
        )
    findings.set(all_reduce_gb_per_second=4 * numbers.numel() / 1e9 / seconds)


def _host() -> str:
    """Return the host's name as Slurm spells it, or the system's name outside of Slurm."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _wait(device: torch.device) -> None:
    """Wait until the device is done. Without it only the launch of a CUDA kernel would be timed."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)

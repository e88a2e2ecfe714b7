"""A micro-benchmark of this device: a matrix product, a copy, and an all-reduce of all ranks."""

import os
import time
from collections.abc import Callable

import torch

from megatron.extras.planner.cost.calibration import Measured
from megatron.parallel.launcher import read_launcher_world
from megatron.parallel.rendezvous import choose_device

_SECONDS = 10.0
"""Time that each measurement may take. Devices slow down when they get warm."""
_SIZES = {"cuda": (8192, torch.bfloat16), "cpu": (1024, torch.float32)}
_COPIED = {"cuda": 1 << 30, "cpu": 1 << 27}
"""Bytes of a tensor that is copied. They exceed every cache."""


def measure_device(seconds: float = _SECONDS) -> Measured:
    """Measure the device of this rank. With torchrun, also a ring of all ranks.

    Args:
        seconds: Time of each measurement.
    """
    world = read_launcher_world()
    device = choose_device(world.local_rank)
    ring = None
    if world.size > 1:
        ring = _measure_ring(device, world.size, seconds)
    memory_gib, multiprocessors = _read_properties(device)
    return Measured(
        tflops=_measure_product(device, seconds),
        memory_tb_per_second=_measure_copy(device, seconds),
        memory_gib=memory_gib,
        multiprocessors=multiprocessors,
        ring_gb_per_second=ring,
        ranks=world.size,
    )


def _read_properties(device: torch.device) -> tuple[float, int]:
    """Return the memory in GiB and the number of multiprocessors."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return properties.total_memory / 2**30, properties.multi_processor_count
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return pages / 2**30, os.cpu_count() or 1


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _time_call(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Return the mean seconds of a call that is repeated for about `seconds`."""
    # The first call loads kernels.
    call()
    _wait(device)
    start = time.perf_counter()
    calls = 0
    while calls == 0 or time.perf_counter() - start < seconds:
        # Several calls are queued, so that launches overlap with the computation as in training.
        for _ in range(10):
            call()
        _wait(device)
        calls += 10
    return (time.perf_counter() - start) / calls


def _measure_product(device: torch.device, seconds: float) -> float:
    """Return the TFLOPs of a large matrix product of normal random numbers.

    Constant matrices need less power, and would be faster than those of training.
    """
    size, dtype = _SIZES[device.type]
    left = torch.randn(size, size, device=device).to(dtype)
    right = torch.randn(size, size, device=device).to(dtype)
    out = torch.empty(size, size, device=device, dtype=dtype)
    return 2 * size**3 / _time_call(lambda: torch.mm(left, right, out=out), device, seconds) / 1e12


def _measure_copy(device: torch.device, seconds: float) -> float:
    """Return the bytes that a copy reads and writes, in 10^12 a second."""
    # A copy reads and writes each element once.
    source = torch.ones(_COPIED[device.type] // 4, device=device)
    target = torch.empty_like(source)
    taken = _time_call(lambda: target.copy_(source), device, seconds)
    return 2 * source.numel() * 4 / taken / 1e12


def _measure_ring(device: torch.device, ranks: int, seconds: float) -> float:
    """Return the GB a second that a device sends in an all-reduce of all ranks."""
    # The backends of training.
    backend = "nccl" if device.type == "cuda" else "gloo"
    torch.distributed.init_process_group(backend)
    try:
        tensor = torch.zeros(_COPIED[device.type] // 8, device=device)
        # A fixed number of calls: ranks must not disagree on when to stop.
        calls = max(5, int(seconds))
        torch.distributed.all_reduce(tensor)
        _wait(device)
        start = time.perf_counter()
        for _ in range(calls):
            torch.distributed.all_reduce(tensor)
        _wait(device)
        taken = (time.perf_counter() - start) / calls
    finally:
        torch.distributed.destroy_process_group()
    # Each rank sends 2 (n - 1) / n of the bytes.
    return 2 * (ranks - 1) / ranks * tensor.numel() * 4 / taken / 1e9

"""Measure the collectives of training between all ranks: seconds and bytes a second by size.

    torchrun --nproc-per-node 8 benchmarks/collectives.py
    torchrun --nproc-per-node 2 benchmarks/collectives.py --quick       also on a CPU, by gloo

Rates are the bytes that one rank must send, divided by the time ("bus bandwidth" of nccl-tests).
Each collective is measured in a group of all ranks. Messages between neighbours go around a ring.
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import tyro
from results import add_row

from megatron.parallel.launcher import read_launcher_world
from megatron.parallel.rendezvous import choose_device, start_process_group


@dataclass(frozen=True)
class Arguments:
    """The command line."""

    mib: tuple[int, ...] = (1, 16, 256)
    """Sizes of the complete tensor in MiB."""
    calls: int = 20
    """Calls of each measurement, after three that are not timed."""
    quick: bool = False
    """One small size, which checks that the script runs."""


def build_calls(size: int, device: torch.device) -> dict[str, tuple[Callable[[], object], float]]:
    """Return the collectives of a tensor of `size` bytes: name -> call, bytes that a rank sends."""
    ranks = dist.get_world_size()
    rank = dist.get_rank()
    part = size // 4 // ranks
    whole = torch.zeros(part * ranks, device=device)
    target = torch.empty_like(whole)
    shard = torch.zeros(part, device=device)

    def exchange() -> None:
        messages = [
            dist.P2POp(dist.isend, whole, (rank + 1) % ranks),
            dist.P2POp(dist.irecv, target, (rank - 1) % ranks),
        ]
        for work in dist.batch_isend_irecv(messages):
            work.wait()

    share = whole.nbytes * (ranks - 1) / ranks
    calls: dict[str, tuple[Callable[[], object], float]] = {
        "all-reduce": (lambda: dist.all_reduce(whole), 2 * share),
        "all-gather": (lambda: dist.all_gather_into_tensor(whole, shard), share),
        "reduce-scatter": (lambda: dist.reduce_scatter_tensor(shard, whole), share),
        "all-to-all": (lambda: dist.all_to_all_single(target, whole), share),
        "neighbours": (exchange, float(whole.nbytes)),
    }
    return calls


def time_call(call: Callable[[], object], calls: int, device: torch.device) -> float:
    """Return the median seconds of a call on this rank."""
    seconds = []
    for number in range(calls + 3):
        dist.barrier()
        _wait(device)
        start = time.perf_counter()
        call()
        _wait(device)
        if number >= 3:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> int:
    """Run the benchmark and return the exit code."""
    arguments = tyro.cli(Arguments, description=__doc__)
    world = read_launcher_world()
    if world.size < 2:
        print("start at least two ranks: torchrun --nproc-per-node 2 ...", file=sys.stderr)
        return 2
    device = choose_device(world.local_rank)
    start_process_group(None, 2.0, device)
    backend = dist.get_backend()
    if backend == "gloo":
        # gloo sends no tensors of a GPU.
        device = torch.device("cpu")
    sizes = (1,) if arguments.quick else arguments.mib
    for mib in sizes:
        for name, (call, sent) in build_calls(mib << 20, device).items():
            seconds = time_call(call, 2 if arguments.quick else arguments.calls, device)
            if dist.get_rank() == 0:
                rate = sent / seconds / 1e9
                print(f"{name:15} {mib:5} MiB  {1e3 * seconds:9.3f} ms  {rate:8.2f} GB/s")
                add_row(
                    "collectives", name=name, ranks=world.size, backend=backend, mib=mib,
                    seconds=seconds, gb_per_second=rate,
                )  # fmt: skip
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())

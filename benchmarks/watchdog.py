"""Measure what --hang-timeout and --straggler-interval cost.

These are the calls of a heartbeat, the changes of the phase, and the clock of a block.

    python benchmarks/watchdog.py

Four processes share one store, as on one host. Rank 0 keeps it. All of them beat as fast as they
can, which is the hardest case for the store. The share of a step is that of the time in which this
rank's interpreter is busy, at 4/3 heartbeats a second and four looks at the time of the phase.
"""

import multiprocessing
import statistics
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron.extras.watchdog.watchdog import TICK_SECONDS, Watchdog
from megatron.observe.timers import Timers
from megatron.parallel.rank_progress import RankProgress, Stopwatch
from megatron.parallel.time_limit import TimeLimit

RANKS = 4
ROUNDS = 2000


def measure_heartbeats(rank: int, port: int) -> None:
    """Print the median time of a heartbeat and its CPU time, on rank 1."""
    store = dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=rank == 0,
        timeout=timedelta(seconds=60),
        wait_for_workers=False,
    )
    progress = RankProgress()
    watchdog = Watchdog(
        store,
        rank,
        [f"rank {each}" for each in range(RANKS)],
        TimeLimit(10.0),
        progress=progress,
        hang_timeout=100.0,
        folder=None,
        report=lambda error, message: None,
    )
    store.add("ready", 1)
    while int(store.add("ready", 0)) < RANKS:
        time.sleep(0.01)
    seconds = []
    begin = time.thread_time()
    for _ in range(ROUNDS):
        start = time.perf_counter()
        watchdog.beat(store)
        seconds.append(time.perf_counter() - start)
    cpu = (time.thread_time() - begin) / ROUNDS
    if rank == 1:
        stopwatch = Stopwatch(progress, 100.0, TICK_SECONDS)
        look = measure(lambda: stopwatch.exceeds_limit(time.monotonic()))
        change = measure(lambda: progress.begin_step("training iteration", 5))
        share = 4 / 3 * cpu + look / TICK_SECONDS
        print(
            f"a heartbeat       {statistics.median(seconds) * 1e6:8.1f} us, {cpu * 1e6:.1f} us CPU"
        )
        print(f"a look at a phase {look * 1e6:8.2f} us")
        print(f"a change of phase {change * 1e6:8.2f} us, in the main thread")
        print(f"together          {share:8.3%} of the time, and {change * 1e6:.2f} us a step")
        measure_block_timer()
    store.add("done", 1)
    while rank == 0 and int(store.add("done", 0)) < RANKS:
        time.sleep(0.01)


def measure_block_timer() -> None:
    """Print what the clock of a block costs on a CPU, in the iterations that are measured."""
    block = torch.nn.Identity()
    plain = measure(lambda: block(None))
    timer = Timers().blocks
    timer.begin_step()
    hooks = (
        block.register_forward_pre_hook(lambda *_: timer.enter_block()),
        block.register_forward_hook(lambda *_: timer.leave_block(), prepend=True),
    )
    measured = measure(lambda: block(None))
    for hook in hooks:
        hook.remove()
    print(f"a measured block  {(measured - plain) * 1e6:8.2f} us, in the measured iterations")


def measure(act: object) -> float:
    """Return the seconds of a call."""
    assert callable(act)
    start = time.perf_counter()
    for _ in range(ROUNDS * 10):
        act()
    return (time.perf_counter() - start) / (ROUNDS * 10)


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    port = 29_000 + threading.get_native_id() % 1000
    processes = [
        context.Process(target=measure_heartbeats, args=(rank, port)) for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()

"""Processes that run Triton's kernels on the CPU, in its interpreter.

Triton chooses between interpreter and compiler when it is imported. So these processes are not
those of `process_pool.py`, where other tests import it.
"""

import contextlib
import io
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from process_pool import find_free_port, pretrain

RANKS = 2


def _start() -> None:
    """Prepare a process, before it imports Triton."""
    os.environ["TRITON_INTERPRET"] = "1"
    import numpy
    import torch
    from triton import language
    from triton.runtime import interpreter

    torch.set_num_threads(1)
    convert = interpreter._convert_float
    float8 = {language.float8e4nv: torch.float8_e4m3fn, language.float8e5: torch.float8_e5m2}

    def convert_as_a_gpu(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        # The interpreter cuts the digits off that bf16 and float8 do not have. A GPU rounds to
        # nearest, and in float8 it cuts off large values.
        if source == language.bfloat16 and target == language.float32:
            # It also reads the smallest numbers of bf16 wrongly.
            return (data.astype(numpy.uint32) << 16).reshape(data.shape)
        if source != language.float32 or target not in (language.bfloat16, *float8):
            return convert(data, source, target, rounding)
        values = torch.from_numpy(data.copy())
        if target == language.bfloat16:
            return values.bfloat16().view(torch.uint16).numpy()
        dtype = float8[target]
        top = torch.finfo(dtype).max
        return values.clamp(-top, top).to(dtype).view(torch.uint8).numpy()

    interpreter._convert_float = convert_as_a_gpu


@contextlib.contextmanager
def start_interpreters() -> Iterator[ProcessPoolExecutor]:
    """Yield the processes. Each one starts when it is first needed."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(RANKS, context, initializer=_start) as processes:
        yield processes


def _run_rank(
    rank: int, port: int, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> Any:
    """Call a function as a rank of a world. Return its result and what it printed."""
    import torch.distributed as dist

    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            value = function(*arguments)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return value, printed.getvalue()


def run_ranks(
    processes: ProcessPoolExecutor, function: Callable[..., Any], *arguments: Any
) -> list[tuple[Any, str]]:
    """Call a function on each of `RANKS` ranks, and return the result and the output of each."""
    port = find_free_port()
    # A rank waits for the others, so each one has a process of its own.
    waiting = [
        processes.submit(_run_rank, rank, port, function, arguments) for rank in range(RANKS)
    ]
    return [each.result(timeout=300) for each in waiting]


def train(processes: ProcessPoolExecutor, argv: list[str]) -> str:
    """Train on `RANKS` ranks, and return what rank 0 printed."""
    return str(run_ranks(processes, pretrain, argv)[0][1])

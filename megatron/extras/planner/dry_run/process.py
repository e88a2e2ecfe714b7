"""Dry runs in processes of their own, because the fake GPU changes torch for a whole process."""

import importlib.metadata
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.base.errors import ConfigError, TrainingError
from megatron.base.plain_text import print_to_stderr
from megatron.extras.planner.dry_run.cuda_guard import build_guard, load_guard
from megatron.extras.planner.dry_run.record import find_line_of_error
from megatron.parallel.grid import GridCoordinate
from megatron.parallel.launcher import die_with_parent
from megatron.plan.kernel_choice import KernelDevice, apply_kernel_choice, choose_kernels
from megatron.plan.run_plan import Plan
from megatron.schedule.pipeline_schedule import choose_schedule

_FAKE_GPU = KernelDevice("9.0")


def list_rank_kinds(plan: Plan) -> list[int]:
    """Return a rank of each kind: first, middle and last stage, first and last data rank.

    Of context-parallel ranks, the first one needs most memory.
    """
    # The other axes have ranks of one kind.
    grid = plan.grid
    stages = sorted({0, grid.pipeline // 2, grid.pipeline - 1})
    data_ranks = sorted({0, grid.data - 1})
    return [
        grid.get_rank(GridCoordinate(stage, data, 0)) for stage in stages for data in data_ranks
    ]


def choose_microbatches(plan: Plan) -> int:
    """Return how many microbatches of the final batch show everything that a step does.

    A stage has at most as many microbatches in flight as there are stages, and one more shows what
    is repeated. ZeRO 2 drops weights during the last one, so it needs another one. Interleaved
    schedules need a multiple of the pipeline size. Looped BFS keeps all microbatches, so all of
    them are run.
    """
    of_step = plan.get_num_microbatches(plan.batch_size.final)
    schedule = choose_schedule(of_step, plan.pipeline_size, plan.stages_per_rank)
    if schedule.name == "looped BFS":
        return of_step
    if plan.stages_per_rank > 1:
        return min(of_step, 2 * plan.pipeline_size)
    repeated = 2 if plan.zero_stage == 2 else 1
    return min(of_step, plan.pipeline_size + repeated)


def open_pool(workers: int) -> ProcessPoolExecutor:
    """Return a pool of processes that can import `megatron.extras.planner.dry_run.fake_rank`.

    Raises:
        ConfigError: See `build_guard`.
    """
    return ProcessPoolExecutor(
        workers,
        # A fork would inherit torch, which has looked for CUDA already.
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(build_guard(), os.getpid()),
    )


def _start_worker(library: Path, parent: int) -> None:
    """Prepare a process of the pool."""
    die_with_parent(parent)
    # Ctrl-C reaches all processes of a terminal. The one that was called ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        load_guard(library)
    except OSError as error:
        # The pool would print a traceback. It reports that this process has ended.
        print_to_stderr(f"error: {error}")
        os._exit(1)


def _end_with_parent() -> None:
    """End this process when its parent has ended, however that came about.

    Otherwise the processes of a pool whose owner was killed would wait for work permanently.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "this is not a process of a pool"
    parent.join()
    os._exit(1)


def choose_fake_kernels(plan: Plan) -> Plan:
    """Return the plan with the kernels that a run on such GPUs uses.

    Raises:
        ConfigError: This version of torch has no shapes for a kernel that the plan asks for.
    """
    choice = choose_kernels(plan, _FAKE_GPU)
    version = importlib.metadata.version("torch")
    major, minor = version.split(".")[:2]
    if choice.kernels.gradient_accumulation_fusion and (int(major), int(minor)) < (2, 13):
        if plan.config.kernels.gradient_accumulation_fusion is None:
            kernels = replace(choice.kernels, gradient_accumulation_fusion=False)
            return apply_kernel_choice(plan, replace(choice, kernels=kernels))
        raise ConfigError(
            "--dry-run with --gradient-accumulation-fusion needs torch 2.13 or newer, and this is "
            f"{version}, which cannot compute the shapes of the fused product; install a newer "
            "torch, or leave out the flag for the dry run"
        )
    return apply_kernel_choice(plan, choice)


def call_in_pool(pool: ProcessPoolExecutor, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a function that runs in a process of the pool.

    Raises:
        TrainingError: The function raised.
    """
    return pool.submit(call_on_fake_gpu, function, *arguments).result()


def call_on_fake_gpu(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a process of the pool, and describe an error of it as text.

    torch's own errors may hold objects that cannot be sent to another process.

    Raises:
        TrainingError: The function raised.
    """
    # torch logs each error of a fake operator with its traceback. The error is raised anyway.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    try:
        return function(*arguments)
    except Exception as error:
        line = find_line_of_error(error)
        where = ""
        if line is not None:
            where = f" at {line}"
        raise TrainingError(
            f"the step fails on a fake GPU{where}: {type(error).__name__}: {error}"
        ) from None

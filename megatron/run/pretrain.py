"""Everything that one rank does, from the command line to the end of training."""

import gc
import os
import sys
import time
from contextlib import ExitStack
from dataclasses import replace

import torch.distributed as dist

from megatron.base.errors import MegatronError
from megatron.run.evaluate import evaluate_only
from megatron.run.exits import ignore_stop_signals
from megatron.run.leaving import (
    close_after_error,
    close_within_limit,
    leave_after_crash,
    leave_with_error,
)
from megatron.run.parts import Parts
from megatron.run.run import Run
from megatron.run.start.build import (
    build_exits,
    build_timers,
    divide_ranks,
    hold_folder_lease,
    open_store,
    start_run,
)
from megatron.run.start.job import agree_on_job
from megatron.run.start.launch import Launch
from megatron.run.start.launch_record import train_and_record
from megatron.run.start.meet import check_agreement, join_ranks, name_lost_ranks


def run_launch(launch: Launch) -> None:
    """Train, and end the process after an error. See `megatron.commands.pretrain`.

    An error is printed first, and then the files and threads of the run are closed.
    """
    closing = ExitStack()
    try:
        stopped = pretrain(launch, closing)
        leave(closing, stopped=stopped)
    except MegatronError as error:
        leave_with_error(error, closing)
    except Exception as error:
        leave_after_crash(error, closing)
    except KeyboardInterrupt:
        # A signal during the start or --eval-only. Later, `train` handles it.
        close_after_error(closing)
        raise


def pretrain(launch: Launch, closing: ExitStack | None = None) -> bool:
    """Run everything between the configuration and the end of training.

    Args:
        launch: What this rank was started with.
        closing: Receives what must be closed at the end of the run. The caller closes it. If None,
            everything is closed before this function returns.

    Returns:
        Whether a signal has stopped the run.
    """
    if closing is None:
        with ExitStack() as own:
            return pretrain(launch, own)
    started = time.monotonic()
    ranks = join_ranks(launch)
    exits = build_exits(launch.config, ranks)
    with name_lost_ranks(launch, ranks) as roll_call:
        check_agreement(launch, ranks)
        store = open_store(launch, ranks)
        # Mistakes are reported here, before this run touches its folder or waits for the lease.
        job = agree_on_job(launch, ranks)
        tasks = launch.parts.prepare_tasks(job.plan, ranks, ranks.log)
        timers = build_timers(launch.world)
        mesh = divide_ranks(job.plan, ranks, launch.world, timers, roll_call)
        lease = closing.enter_context(hold_folder_lease(launch.config, mesh, store))
        # Each pass trains from a checkpoint or from scratch. Only a rollback of the spike guard
        # starts another pass.
        while True:
            opened = closing.enter_context(ExitStack())
            run = start_run(launch, job, mesh, timers, lease, exits, store)
            run.tasks = tasks
            _close_with(opened, run)
            _use(run, launch.parts, started)
            rollback = run.rollback
            if rollback is None:
                return ranks.progress.stopped or ranks.progress.stop_signal > 0
            started = time.monotonic()
            # The watchdog grants this start as much time as the first one.
            mesh.progress.begin_start()
            # If this host is lost now, another one completes the rollback.
            store.publish_rollback()
            # The next pass needs as much memory as this one. Reference cycles would keep the memory
            # of this one allocated.
            del run
            ranks.work(opened.close, "closing the files", ranks.log)
            gc.collect()
            launch.parts.load_guard().roll_back(rollback, job.plan, mesh, lease)
            store.publish_rollback()
            # The early plan is that of a run from scratch.
            launch = replace(launch, early=None)
            job = agree_on_job(launch, ranks)


def _close_with(opened: ExitStack, run: Run) -> None:
    """Let a stack close what the run has opened. It closes the last one first."""
    # A read that hangs must not keep the files from being closed, so the data come last.
    opened.callback(run.sources.close)
    opened.callback(run.reporter.close)
    opened.callback(run.exporter.stop)


def _use(run: Run, parts: Parts, started: float) -> None:
    """Train, or evaluate with --eval-only."""
    if run.plan.config.batch.eval_only:
        evaluate_only(run)
    else:
        train_and_record(run, time.monotonic() - started, parts)


def leave(closing: ExitStack, *, stopped: bool = False) -> None:
    """End a run that succeeded or was stopped, on all ranks together. See `close_within_limit`."""
    closed = close_within_limit(closing, stopped=stopped)
    if dist.is_initialized():
        dist.destroy_process_group()
    if not closed:
        # At its normal exit, Python would wait for the threads that hang.
        sys.stdout.flush()
        os._exit(0)
    ignore_stop_signals()

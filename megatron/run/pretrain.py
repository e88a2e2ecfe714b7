"""Everything that one rank does, from the command line to the end of training."""

import gc
import os
import sys
import time
from contextlib import ExitStack
from dataclasses import replace

import torch.distributed as dist

from megatron.base.errors import MegatronError
from megatron.parallel.ranks import build_roll_call
from megatron.run.evaluate import evaluate_only
from megatron.run.exits import ignore_stop_signals
from megatron.run.leaving import (
    close_after_error,
    close_within_limit,
    leave_after_crash,
    leave_with_error,
)
from megatron.run.start.build import (
    build_exits,
    build_timers,
    divide_ranks,
    hold_folder_lease,
    start_run,
)
from megatron.run.start.job import agree_on_job, select_checkpoint_config
from megatron.run.start.launch import Launch
from megatron.run.start.launch_record import train_and_record
from megatron.run.start.meet import check_agreement, join_ranks


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
    config = launch.config
    parts = launch.parts
    ranks = join_ranks(launch)
    exits = build_exits(config, ranks)
    # A rank that is lost from here on is named. Without the roll call, the others would only report
    # that a collective has failed.
    saving = select_checkpoint_config(config).save_folder
    with build_roll_call(
        ranks,
        config.parallel.distributed_timeout_minutes,
        hang_timeout=config.parallel.hang_timeout,
        load_watchdog=lambda: parts.load_watchdog(saving),
    ) as roll_call:
        check_agreement(launch, ranks)
        store = parts.build_store(select_checkpoint_config(config), ranks)
        store.open()
        guards = parts.load_guard()
        # First, because no run starts from a folder that is half rolled back.
        if guards.finish_interrupted_rollback(config, ranks, ranks.log):
            store.open()
        # Mistakes are reported here, before this run touches its folder or waits for the lease.
        job = agree_on_job(launch, ranks)
        tasks = parts.prepare_tasks(job.plan, ranks, ranks.log)
        timers = build_timers(launch.world)
        mesh = divide_ranks(job.plan, ranks, launch.world, timers)
        if roll_call is not None:
            roll_call.use_names(mesh.names)
        lease = closing.enter_context(hold_folder_lease(config, mesh, store))
        # Each pass trains from a checkpoint or from scratch. Only a rollback of the spike guard
        # starts another pass.
        while True:
            opened = closing.enter_context(ExitStack())
            run = start_run(launch, job, mesh, timers, lease, exits, store)
            run.tasks = tasks
            # A read that hangs must not keep the files from being closed, so the data come last.
            opened.callback(run.sources.close)
            opened.callback(run.reporter.close)
            opened.callback(run.exporter.stop)
            if config.batch.eval_only:
                evaluate_only(run)
            else:
                train_and_record(run, time.monotonic() - started, parts)
            if run.rollback is None:
                return ranks.progress.stopped or ranks.progress.stop_signal > 0
            started = time.monotonic()
            # The watchdog grants this start as much time as the first one.
            mesh.progress.begin_start()
            rollback = run.rollback
            # If this host is lost now, another one completes the rollback.
            store.publish_rollback()
            # The next pass needs as much memory as this one. Reference cycles would keep the memory
            # of this one allocated.
            del run
            mesh.ranks.work(opened.close, "closing the files", ranks.log)
            gc.collect()
            guards.roll_back(rollback, job.plan, mesh, lease)
            store.publish_rollback()
            # The early plan is that of a run from scratch.
            launch = replace(launch, early=None)
            job = agree_on_job(launch, ranks)


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

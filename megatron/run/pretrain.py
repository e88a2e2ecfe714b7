"""Everything that one rank does, from the command line to the end of training."""

import gc
import os
import sys
import time
from contextlib import ExitStack

import torch.distributed as dist

from megatron.base.errors import MegatronError
from megatron.config.config_with_origin import LoadedConfig
from megatron.engine.native_kind import NATIVE
from megatron.parallel.launcher import read_launcher_world
from megatron.parallel.ranks import build_ranks, build_roll_call
from megatron.plan.run_plan import Plan
from megatron.run.closing import close_within_limit
from megatron.run.evaluate import evaluate_only
from megatron.run.exits import ignore_stop_signals
from megatron.run.leaving import (
    close_after_error,
    leave_after_crash,
    leave_with_error,
)
from megatron.run.parts import NO_PARTS, Parts
from megatron.run.start.agreement import check_agreement
from megatron.run.start.job import agree_on_job, select_checkpoint_config
from megatron.run.start.join import join_ranks, make_printer
from megatron.run.start.launch_record import train_and_record
from megatron.run.start.setup import (
    build_exits,
    build_timers,
    divide_ranks,
    hold_folder_lease,
    start_run,
)


def run_loaded(loaded: LoadedConfig, parts: Parts = NO_PARTS, early: Plan | None = None) -> None:
    """Train, and end the process after an error. See `megatron.commands.pretrain`.

    An error is printed first, and then the files and threads of the run are closed.
    """
    closing = ExitStack()
    try:
        stopped = pretrain(loaded, closing, parts, early)
        leave(closing, stopped=stopped)
    except MegatronError as error:
        leave_with_error(error, closing)
    except Exception as error:
        leave_after_crash(error, closing)
    except KeyboardInterrupt:
        # A signal during the start or --eval-only. Later, `train` handles it.
        close_after_error(closing)
        raise


def pretrain(
    loaded: LoadedConfig,
    closing: ExitStack | None = None,
    parts: Parts = NO_PARTS,
    early: Plan | None = None,
) -> bool:
    """Run everything between the configuration and the end of training.

    Args:
        loaded: The configuration of this rank.
        closing: Receives what must be closed at the end of the run. The caller closes it. If None,
            everything is closed before this function returns.
        parts: The parts of the run besides the core.
        early: What `check_before_torch` returned, if it was called.

    Returns:
        Whether a signal has stopped the run.
    """
    if closing is None:
        with ExitStack() as own:
            return pretrain(loaded, own, parts, early)
    started = time.monotonic()
    config = loaded.config
    world = read_launcher_world(config.parallel.local_rank)
    ranks = join_ranks(loaded, world)
    exits = build_exits(config, ranks)
    # A rank that is lost from here on is named. Without the roll call, the others would only report
    # that a collective has failed.
    saving = select_checkpoint_config(config).save
    with build_roll_call(
        ranks,
        config.parallel.distributed_timeout_minutes,
        hang_timeout=config.parallel.hang_timeout,
        build_watchdog=parts.load_watchdog(saving),
    ) as roll_call:
        if ranks.size > 1:
            check_agreement(config, ranks, parts.engine or NATIVE)
        log = make_printer(ranks.rank)
        guards = parts.load_guard()
        # First, because no run starts from a folder that is half rolled back.
        guards.finish_interrupted_rollback(config, ranks, log)
        # Mistakes are reported here, before this run touches its folder or waits for the lease.
        job = agree_on_job(loaded, ranks, log, parts, early)
        tasks = parts.prepare_tasks(job.plan, ranks, log)
        timers = build_timers(world)
        mesh = divide_ranks(job.plan, ranks, world, timers)
        if roll_call is not None:
            roll_call.use_names(mesh.names)
        lease = closing.enter_context(hold_folder_lease(config, mesh))
        # Each pass trains from a checkpoint or from scratch. Only a rollback of the spike guard
        # starts another pass.
        while True:
            opened = closing.enter_context(ExitStack())
            run = start_run(loaded, job, mesh, timers, lease, exits)
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
            # The next pass needs as much memory as this one. Reference cycles would keep the memory
            # of this one allocated.
            del run
            build_ranks(mesh).work(opened.close, "closing the files", log)
            gc.collect()
            guards.roll_back(rollback, job.plan, mesh, lease)
            job = agree_on_job(loaded, ranks, log, parts)


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

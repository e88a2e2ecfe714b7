"""Everything that one rank does, from the command line to the end of training.

The chronicle records the start of a launch, its stop, and the reason of the stop.
"""

import gc
import json
import os
import platform
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megatron.base.code_version import get_code_version
from megatron.base.errors import MegatronError
from megatron.config.fields import all_fields, flatten
from megatron.config.tree import Config
from megatron.observe.timers import EVALUATE, SAVE
from megatron.run.evaluate import evaluate_only
from megatron.run.exits import StopReason, ignore_stop_signals
from megatron.run.leaving import (
    close_after_error,
    close_within_limit,
    leave_after_crash,
    leave_with_error,
)
from megatron.run.loop import train
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


_LONGEST_ERROR = 2000
"""Characters of an error's message that are recorded."""


def train_and_record(run: Run, start_seconds: float, parts: Parts) -> None:
    """Train, and record the start of the launch and the reason of its stop.

    Args:
        run: The run.
        start_seconds: Seconds from the start of this launch until now.
        parts: They may predict the time of a step, and add to the record of the start.

    Raises:
        MegatronError: See `train`.
    """
    if run.reporter.has_chronicle:
        details = describe_start(run, start_seconds)
        # The report compares the measured time of a step with the predicted one.
        if run.mesh.device.type == "cuda":
            details |= parts.predict(run.plan, run.reporter.device_name)
        details |= parts.describe_start(run.plan, run.reporter.device_name, run.reporter.log)
        run.reporter.record("start", details, run.state.iteration)
    try:
        stop = train(run)
    except BaseException as error:
        # The event is written when the files are closed, after the error was printed. A file system
        # that does not respond must not delay the message.
        details = {**describe_error(error), **run.replay.finish()}
        run.reporter.record("stop", details, at_close=True)
        raise
    reason = "complete"
    if stop != StopReason.NONE:
        reason = stop.name.lower().replace("_", " ")
    # The last save and evaluation come after the last iteration.
    phases = run.timers.take()
    run.reporter.add_last_phases(phases)
    # The metrics file has these seconds for each iteration. No iteration follows the last ones.
    seconds = {f"{name}_seconds": round(phases.get(name, 0.0), 3) for name in (SAVE, EVALUATE)}
    details = {"reason": reason, **seconds, **run.replay.finish()}
    run.reporter.record("stop", details, at_close=True)


def describe_start(run: Run, start_seconds: float) -> dict[str, Any]:
    """Return versions, shape, layout and settings of a launch, for its event."""
    plan = run.plan
    model = plan.config.model
    job_started = os.environ.get("SLURM_JOB_START_TIME", "")
    return {
        "seconds": round(start_seconds, 3),
        # In seconds since the epoch. It separates the time in the queue from the start.
        **({"job_started": int(job_started)} if job_started.isdigit() else {}),
        "version": get_code_version(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "host": platform.node(),
        "devices": plan.world_size,
        "layout": str(run.mesh.grid),
        "parameters": plan.parameters,
        "layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "attention_heads": model.num_attention_heads,
        "seq_length": model.seq_length,
        "train_iterations": plan.train_iters,
        "data": _list_data(run),
        "settings": list_settings(plan.config),
    }


def _list_data(run: Run) -> list[dict[str, Any]]:
    """Return each training data set, its tokens, and its share of the tokens of the run.

    The report computes epochs from them. The list is empty for a run by time, whose number of
    tokens is not known, and for streamed or synthetic data.
    """
    if not run.plan.train_tokens:
        return []
    return [
        {"name": use.prefix, "tokens": use.tokens, "share": use.asked / run.plan.train_tokens}
        for use in run.training_data
    ]


def list_settings(config: Config) -> dict[str, str]:
    """Return the settings that differ from their defaults, as flag -> value in JSON."""
    table = all_fields()
    shown = {dotted: json.dumps(value) for dotted, value in flatten(config).items()}
    return {
        table[dotted].flag: value
        for dotted, value in shown.items()
        if value != json.dumps(table[dotted].default, default=str)
    }


def describe_error(error: BaseException) -> dict[str, Any]:
    """Return the details of a stop by an error."""
    text = f"{type(error).__name__}: {error}"
    return {"reason": "error", "error": text[:_LONGEST_ERROR]}

"""What the chronicle records about a launch: its start, its stop, and the reason of the stop."""

import json
import os
import platform
from typing import Any

import torch

from megatron.base.code_version import get_code_version
from megatron.config.fields import all_fields, flatten
from megatron.config.tree import Config
from megatron.observe.timers import EVALUATE, SAVE
from megatron.run.exits import StopReason
from megatron.run.loop import train
from megatron.run.parts import Parts
from megatron.run.run import Run

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
    if stop == StopReason.NONE:
        reason = "complete"
    else:
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

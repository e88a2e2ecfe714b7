"""The log lines that people search and scripts parse: training, validation, checkpoints, exits.

Invariant: the formats are those of Megatron-DeepSpeed (BigScience), byte for byte. The training
line has more fields at its end. Golden tests compare them. A change of a line breaks scripts that
parse it. The short form of the training line is for people at a terminal. The parser reads both
forms.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from megatron.config.logging import LogFormat
from megatron.observe.report import EvaluationResult, IterationReport
from megatron.schedule.clock import format_duration

Fields = tuple[tuple[str, str, str], ...]
"""(label in the line, field of the report, format of its value), in their order."""
_MEGATRON_FIELDS: Fields = (
    ("consumed samples", "consumed_samples", "12d"),
    ("consumed tokens", "consumed_tokens", "12d"),
    ("elapsed time per iteration (s)", "seconds", ".2f"),
    ("learning rate", "learning_rate", ".3E"),
    ("decoupled learning rate", "decoupled_learning_rate", ".3E"),
    ("global batch size", "global_batch_size", "5d"),
    ("lm loss", "lm_loss", ".6E"),
    ("loss scale", "loss_scale", ".1f"),
    ("grad norm", "grad_norm", ".3f"),
    ("num zeros", "num_zeros", ".1f"),
    ("params norm", "params_norm", ".3f"),
    ("curriculum seqlen", "curriculum_seqlen", "5d"),
    # These follow the optional fields in Megatron's line.
    ("number of skipped iterations", "skipped_iterations", "3d"),
    ("number of nan iterations", "nan_iterations", "3d"),
    ("samples per second", "samples_per_second", ".3f"),
    ("TFLOPs", "tflops", ".2f"),
    # Megatron's line has no further fields. These are at the end, where no parser looks for others.
    ("tokens per second", "tokens_per_second", ".1f"),
    ("largest expert load", "largest_expert_load", ".2f"),
    ("smallest expert load", "smallest_expert_load", ".2f"),
    ("load balancing loss", "expert_balancing_loss", ".4f"),
    ("router z loss", "router_z_loss", ".4f"),
    ("router entropy", "router_entropy", ".3f"),
    ("remaining", "remaining", "s"),
)
_SHORT_FIELDS: Fields = (
    ("loss", "lm_loss", ".4f"),
    ("lr", "learning_rate", ".3E"),
    ("decoupled lr", "decoupled_learning_rate", ".3E"),
    ("norm", "grad_norm", ".3f"),
    ("tokens/s", "tokens_per_second", ".0f"),
    ("scale", "loss_scale", ".0f"),
    ("length", "curriculum_seqlen", "d"),
    ("largest expert load", "largest_expert_load", ".2f"),
    ("skipped", "skipped_iterations", "d"),
    ("nan", "nan_iterations", "d"),
    ("remaining", "remaining", "s"),
)
_PARSED: dict[str, tuple[str, type[int] | type[float]]] = {
    label: (key, int if form.endswith("d") else float)
    for label, key, form in (
        *(*_MEGATRON_FIELDS, *_SHORT_FIELDS),
        # Earlier versions had it in the short form.
        ("samples/s", "samples_per_second", ".3f"),
    )
    if form != "s"
}
"""Label -> key of the parsed dictionary, and the type of its value."""
FIRST_START_LINE = "the first start of a run has no checkpoint to load, which is normal"
"""Comes before `format_no_checkpoint_line`, which sounds like an error."""
FROM_SCRATCH_LINE = "starting from scratch"
"""Follows `format_no_checkpoint_line`."""
_SMALLEST_TFLOPS = 0.005
_KILL_SWITCH = "Detected kill switch at "
_NOTHING_STARTS = "; nothing starts until it is removed"
_SLOW_RANKS = "slow ranks at iteration "
_NO_SLOW_RANKS = "none"
_SHOWN_RANKS = 8
"""Largest number of slow ranks in a line."""
# The pattern is not anchored at the line's start. Launchers put `[default7]:` or a time there.
_TRAINING = re.compile(r"(?:^|[\s:\]])iteration +(\d+)/ *(\d+) \|(.*)")
_VALIDATION = re.compile(
    r"(?:^\s*\d+:|^|\]:?) ?(?P<name>[^|\]]*?) loss at iteration (?P<iteration>\d+) \|"
    r" lm loss value: (?P<loss>\S+) \| lm loss PPL: (?P<ppl>\S+) \|"
)


def format_training_line(report: IterationReport) -> str:
    """Return the line of one report. Optional fields are left out if they are None."""
    start = f" iteration {report.iteration:8d}/{report.train_iters:8d}"
    return _join_fields(start, _MEGATRON_FIELDS, _list_values(report))


def format_short_training_line(report: IterationReport) -> str:
    """Return the short line of one report, which fits into a terminal.

    Skipped and nan iterations are rare. They are left out if there are none.
    """
    values = _list_values(report)
    for key in ("skipped_iterations", "nan_iterations"):
        values[key] = values[key] or None
    start = f" iteration {report.iteration}/{report.train_iters}"
    return _join_fields(start, _SHORT_FIELDS, values)


def _list_values(report: IterationReport) -> dict[str, Any]:
    """Return the values of a report by the names of `Fields`."""
    values = {**vars(report), **report.experts}
    # On a CPU they would be 0.00.
    if report.tflops < _SMALLEST_TFLOPS:
        del values["tflops"]
    if report.remaining_seconds is not None:
        values["remaining"] = format_duration(report.remaining_seconds)
    return values


def _join_fields(start: str, fields: Fields, values: Mapping[str, Any]) -> str:
    """Return a line with the fields whose value is there and not None.

    Each field ends with a separator. The parser ignores a field without one, because it was cut
    off.
    """
    shown = [
        f"{label}: {values[key]:{form}}"
        for label, key, form in fields
        if values.get(key) is not None
    ]
    return " | ".join([start, *shown]) + " |"


LINE_FORMATS: dict[LogFormat, Callable[[IterationReport], str]] = {
    "short": format_short_training_line,
    "megatron": format_training_line,
}
"""Value of --log-format -> the function that makes a log line."""


def format_validation_line(iteration: int, lm_loss: float, name: str = "validation") -> str:
    """Return the line of one evaluation. `name` is the set's, for runs with several sets."""
    return (
        f" {name} loss at iteration {iteration} | lm loss value: {lm_loss:.6E} | lm loss "
        f"PPL: {compute_perplexity(lm_loss):.6E} |"
    )


def format_task_line(iteration: int, task: str, scores: Mapping[str, float]) -> str:
    """Return the line of one task's scores, by metric."""
    values = [f"{metric}: {value:.6g} |" for metric, value in scores.items()]
    return " ".join([f" task {task} at iteration {iteration} |", *values])


def format_measures_line(iteration: int, result: EvaluationResult, name: str = "validation") -> str:
    """Return the line after that of an evaluation, with the measures that Megatron lacks."""
    line = f" {name} measures at iteration {iteration} |"
    if result.bits_per_byte is not None:
        line += f" bits per byte: {result.bits_per_byte:.6E} |"
    return f"{line} next-token accuracy: {result.accuracy:.6E} |"


def compute_perplexity(lm_loss: float) -> float:
    """Return exp(loss), or infinity if the result is too large for a float.

    Megatron limits the loss to 20 here. Its perplexity is therefore the same for all higher losses.
    """
    try:
        return math.exp(lm_loss)
    except OverflowError:
        return math.inf


def parse_log_line(text: str) -> dict[str, int | float] | None:
    """Parse one training line.

    Launcher prefixes are accepted. Milliseconds of older logs (`elapsed time per iteration (ms)`)
    are converted to seconds. Of a line that was cut off, the complete fields are returned.

    Returns:
        {report field: number}, or None if `text` is no training line or is mixed with the output of
        other ranks.
    """
    match = _TRAINING.search(text)
    if match is None:
        return None
    found: dict[str, int | float] = {"iteration": int(match[1]), "train_iters": int(match[2])}
    try:
        # The part after the last separator is either empty or cut off in the middle of a number.
        for part in match[3].split("|")[:-1]:
            label, _, value = part.partition(":")
            label = label.strip()
            if label == "elapsed time per iteration (ms)":
                found["seconds"] = float(value) / 1000.0
            elif label in _PARSED:
                key, kind = _PARSED[label]
                found[key] = kind(value)
    except ValueError:
        # A number is followed by something else, so the outputs of two ranks are mixed.
        return None
    return found


def parse_validation_log_line(text: str) -> dict[str, str | int | float] | None:
    """Parse one validation line into {name, iteration, lm_loss, ppl}, or None if it is none."""
    match = _VALIDATION.search(text)
    if match is None:
        return None
    loss = float(match["loss"])
    ppl = float(match["ppl"])
    return {
        "name": match["name"].strip(),
        "iteration": int(match["iteration"]),
        "lm_loss": loss,
        "ppl": ppl,
    }


def format_saved_checkpoint_line(iteration: int, path: str) -> str:
    """Return the line for a checkpoint that was saved."""
    return f"successfully saved checkpoint at iteration {iteration:7d} to {path}"


def format_loaded_checkpoint_line(path: str, iteration: int) -> str:
    """Return the line for a checkpoint that was loaded."""
    return f"successfully loaded checkpoint from {path} at iteration {iteration}"


def format_no_checkpoint_line(path: str) -> str:
    """Return the line for a start without a checkpoint.

    `path` is the checkpoint folder, without /latest.
    """
    return f"Unable to find latest file at {path}/latest"


def starts_launch(line: str) -> bool:
    """Return whether a line is written once at the start of a launch, before its first step."""
    return "successfully loaded checkpoint from " in line or FROM_SCRATCH_LINE in line


def format_slow_ranks_line(
    iteration: int, slow: Mapping[str, float], slowest: tuple[str, float], median: float
) -> str:
    """Return the line about ranks that compute more slowly than the others.

    Args:
        iteration: The iteration.
        slow: Name of a slow rank -> its time as a multiple of the median. It may be empty.
        slowest: The same of the slowest rank, whether it counts as slow or not.
        median: The median in seconds.
    """
    what = f"x the median of {1000 * median:.3g} ms for the forward pass of a block"
    if slow:
        shown = [f"{name} takes {ratio:.2f}" for name, ratio in list(slow.items())[:_SHOWN_RANKS]]
        if len(slow) > _SHOWN_RANKS:
            shown.append(f"and {len(slow) - _SHOWN_RANKS} more ranks, which take less")
        return f"{_SLOW_RANKS}{iteration}: {', '.join(shown)} {what}"
    name, ratio = slowest
    return (
        f"{_SLOW_RANKS}{iteration}: {_NO_SLOW_RANKS}; the slowest, {name}, takes {ratio:.2f} {what}"
    )


def parse_slow_ranks_line(line: str) -> str | None:
    """Return which ranks are slow if the line is about slow ranks, and None otherwise.

    The text is empty if the line reports that no rank is slow.
    """
    _, found, text = line.partition(_SLOW_RANKS)
    if not found:
        return None
    if text.partition(": ")[2].startswith(_NO_SLOW_RANKS):
        return ""
    return f"{_SLOW_RANKS}{text}".strip()


def format_kill_switch_line(path: str, *, before_start: bool = False) -> str:
    """Return the line for a stop by the kill switch, or for a start that it prevents."""
    if before_start:
        return f"{_KILL_SWITCH}{path}{_NOTHING_STARTS}"
    return f"{_KILL_SWITCH}{path}"


def parse_kill_switch_line(line: str) -> str | None:
    """Return the path of the kill switch if the line reports a stop by it, and None otherwise."""
    # A launcher may have put a prefix before the text.
    _, found, path = line.partition(_KILL_SWITCH)
    if not found:
        return None
    return path.strip().removesuffix(_NOTHING_STARTS)


def format_exit_duration_line(minutes: float) -> str:
    """Return the line for a stop by --exit-duration-in-mins."""
    return f"exiting program after {minutes:g} minutes"


def format_training_complete_line() -> str:
    """Return the line for the end of training."""
    return "training is complete"


def format_exit_iteration_line(iteration: int) -> str:
    """Return the line for a stop at an iteration."""
    return f"exiting program at iteration {iteration}"


def format_skipped_range_line(first: int, last: int, *, by_guard: bool = False) -> str:
    """Return the line for one merged range of skipped iterations, both ends inclusive.

    Args:
        first: The first iteration.
        last: The last iteration.
        by_guard: Whether a rollback of the spike guard skips some of them.
    """
    if by_guard:
        return f"Skipped iterations {first} to {last} due to a rollback of the spike guard."
    return f"Skipped iterations {first} to {last} due to --skip-train-iteration-range flag."

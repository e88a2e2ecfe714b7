"""What a run recorded about the steps that are trained again.

Invariant: nothing is written. The steps belong to the lineage of the checkpoint, so what a rollback
has undone is never compared.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.base.errors import OperationsError
from megatron.base.outside_file import INDEX_BYTES, check_regular, iterate_lines
from megatron.checkpoint.folder import find_stored_folder, list_saved_iterations, read_pointer
from megatron.checkpoint.lineage import find_lineage_before
from megatron.checkpoint.manifest import CONFIG, Manifest, read_checked_text, read_manifest
from megatron.config.compare import load_yaml
from megatron.config.tree import Config
from megatron.extras.operations.chronicle.history import find_metrics_file
from megatron.extras.operations.chronicle.records import Event, parse_time, read_events
from megatron.observe.chronicle import CHRONICLE
from megatron.observe.log_line import parse_log_line
from megatron.observe.metrics import read_metrics

Step = Mapping[str, Any]
"""The numbers of an iteration, by their key in the metrics file."""
_TAGS = {
    "lm loss": "lm_loss",
    "learning-rate": "learning_rate",
    "grad-norm": "grad_norm",
    "params-norm": "params_norm",
    "loss-scale": "loss_scale",
    "batch-size": "global_batch_size",
    "curriculum_seqlen": "curriculum_seqlen",
}
"""Tag of Megatron's TensorBoard events, without its folder -> key in the metrics file.

The step of these tags is the iteration.
"""
_TAG_OF_SAMPLES = "learning-rate vs samples"
"""A tag that follows `learning-rate`, and has the consumed samples as its step."""


class TooFewStepsError(Exception):
    """No checkpoint has enough recorded steps after it. The text says what is missing."""


@dataclass(frozen=True)
class RecordedSteps:
    """A checkpoint, and the steps that the run trained after it."""

    iteration: int
    """The checkpoint's."""
    last: int
    """The last iteration that is trained again."""
    config: Config
    """The configuration of the checkpoint."""
    steps: Mapping[int, Step]
    """The steps after it, by iteration. Skipped iterations have none."""
    start: Mapping[str, Any] = field(default_factory=dict)
    """What the chronicle has about the start that trained the first of them. It may be empty."""
    is_foreign: bool = False
    """Whether they are of another trainer's log, which rounds its numbers."""


def read_recorded_steps(
    root: Path, iteration: int | None, count: int, log: Path | None = None
) -> RecordedSteps:
    """Find a checkpoint of a run and the recorded steps after it.

    Args:
        root: The run's folder.
        iteration: Iteration of the checkpoint. None: the newest one with enough recorded steps.
        count: Iterations after it.
        log: The log of another trainer, from which the checkpoint was imported.

    Raises:
        TooFewStepsError: Not enough steps are recorded after it.
        OperationsError: The run has no such checkpoint, or checkpoint and record do not belong
            together.
        CheckpointError: A checkpoint is damaged.
    """
    if not root.is_dir():
        raise OperationsError(f"{root} is no folder; give the --save folder of a run")
    events = read_events(root / CHRONICLE)
    if log is None:
        steps = read_recorded(find_metrics_file(root, events))
    else:
        steps = _read_foreign_log(log)
    lineage = _read_lineage(root)
    if iteration is not None and iteration not in lineage:
        listed = ", ".join(f"global_step{each}" for each in lineage)
        raise OperationsError(
            f"--from {iteration}: the run has no checkpoint of that iteration in its lineage; "
            f"there are: {listed or 'none'}"
        )
    # The newest one is closest to what the run trains now.
    wanted = [at for at in sorted(lineage, reverse=True) if iteration in (None, at)]
    reason = "there is no checkpoint; give the --save folder or the address of a run"
    for number in wanted:
        manifest = lineage[number]
        found = {at: steps[at] for at in range(number + 1, number + count + 1) if at in steps}
        reason = _find_gap(manifest, found, count, events)
        if reason:
            continue
        folder = find_stored_folder(root, number)
        config = load_yaml(read_checked_text(folder, CONFIG, manifest))
        start = _find_start(events, found)
        return RecordedSteps(number, number + count, config, found, start, log is not None)
    raise TooFewStepsError(reason)


def read_recorded(path: Path) -> dict[int, Step]:
    """Return the steps of a metrics file, without those that a later launch has undone."""
    if not path.exists():
        return {}
    # An evaluation alone has an entry without a learning rate.
    return {step["iteration"]: step for step in read_metrics(path) if "learning_rate" in step}


def _read_foreign_log(path: Path) -> dict[int, Step]:
    """Read Megatron's log lines, or a TensorBoard event file, or a folder of such files."""
    files = [path]
    if path.is_dir():
        # The name of a file begins with the time of its launch.
        files = sorted(path.glob("*tfevents*"))
    steps: dict[int, Step] = {}
    for file in files:
        read = _iterate_events if "tfevents" in file.name else _iterate_log_lines
        for iteration, found in read(file):
            # A launch that goes back undoes the iterations that follow.
            if iteration < next(reversed(steps), 0):
                steps = {at: step for at, step in steps.items() if at < iteration}
            steps[iteration] = {**steps.get(iteration, {}), **found}
    if not steps:
        raise OperationsError(f"--log {path} has no line or TensorBoard event of Megatron's steps")
    return steps


def _iterate_log_lines(path: Path) -> Iterator[tuple[int, Step]]:
    parsed = (parse_log_line(line.decode(errors="replace")) for line in iterate_lines(path))
    return ((int(step["iteration"]), step) for step in parsed if step is not None)


def _iterate_events(path: Path) -> Iterator[tuple[int, Step]]:
    # The import takes a second, and only event files need it.
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    check_regular(path, INDEX_BYTES)
    iteration: int | None = None
    # It ends at the first record whose checksum is wrong.
    for event in LegacyEventFileLoader(str(path)).Load():
        for value in event.summary.value:
            tag = value.tag.rpartition("/")[2]
            if tag in _TAGS and value.HasField("simple_value"):
                iteration = event.step
                yield iteration, {_TAGS[tag]: value.simple_value}
            elif tag == _TAG_OF_SAMPLES and iteration is not None:
                yield iteration, {"consumed_samples": event.step}


def _read_lineage(root: Path) -> dict[int, Manifest]:
    """Return the manifests of the checkpoints on the disk that led to the present one."""
    # If the job removes a checkpoint meanwhile, its manifest is missing, which is an error.
    pointer = read_pointer(root)
    if pointer is None:
        return {}
    before = find_lineage_before(root, pointer.iteration) or ()
    # Iterations repeat after a rollback, so checkpoints are identified by their digests.
    digests = {entry.iteration: entry.digest for entry in before}
    found = {}
    for number in list_saved_iterations(root):
        if number != pointer.iteration and number not in digests:
            continue
        manifest = read_manifest(find_stored_folder(root, number))
        if number == pointer.iteration or manifest.digest == digests[number]:
            found[number] = manifest
    return found


def _find_gap(
    manifest: Manifest, found: Mapping[int, Step], count: int, events: Sequence[Event]
) -> str:
    """Return why the steps after a checkpoint cannot be compared, or an empty text."""
    first, last = manifest.iteration + 1, manifest.iteration + count
    skips = [event.details for event in events if event.kind == "skip"]
    skipped = {
        at
        for each in skips
        for at in range(max(first, int(each["first"])), min(last, int(each["last"])) + 1)
    }
    # A skipped iteration has no line, and its samples are passed.
    missing = [at for at in range(first, last + 1) if at not in found and at not in skipped]
    if missing:
        return (
            f"iteration {missing[0]} after global_step{manifest.iteration} is not recorded, and "
            f"{count} iterations after the checkpoint are needed. --keep-for-handover {count} "
            "keeps a checkpoint with enough recorded steps"
        )
    if not found:
        return f"all iterations from {first} to {last} were skipped; give more --steps"
    # The samples of the first step follow those of the checkpoint, or the record is another run's.
    step = found[min(found)]
    consumed, batch = step.get("consumed_samples", 0), step.get("global_batch_size", 0)
    expected = manifest.state.get("consumed_samples")
    # Another trainer's log may have one of both only.
    if min(found) == first and consumed and batch and consumed - batch != expected:
        raise OperationsError(
            f"iteration {first} of the record ends at sample {consumed} with a batch of {batch}, "
            f"but global_step{manifest.iteration} has consumed {expected}: the record belongs to "
            "another run, or to another lineage"
        )
    return ""


def _find_start(events: Sequence[Event], steps: Mapping[int, Step]) -> Mapping[str, Any]:
    """Return the details of the last start before the first step was recorded."""
    time = parse_time(steps[min(steps)].get("time"))
    # An earlier start may have trained these iterations too, before a later one undid them.
    starts: list[Mapping[str, Any]] = [
        event.details
        for event in events
        if event.kind == "start" and time is not None and event.time <= time
    ]
    return [{}, *starts][-1]

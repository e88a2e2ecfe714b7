"""Plan a rollback: the checkpoint, the records of later iterations, and the flags to continue with.

Invariant: planning changes nothing. A plan holds everything that its execution needs, so that an
interrupted execution can be continued.
"""

import contextlib
import json
import os
import re
import shlex
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron.base.errors import CheckpointError, ConfigError, DamagedError, OperationsError
from megatron.base.outside_file import parse_json
from megatron.checkpoint.folder import (
    LATEST,
    LATEST_ITERATION,
    find_stored_folder,
    list_saved_iterations,
    read_pointer,
    read_pointer_text,
)
from megatron.checkpoint.lineage import find_lineage_before
from megatron.checkpoint.manifest import (
    CONFIG,
    INDEX,
    Manifest,
    check_size,
    read_checked_text,
    read_manifest,
)
from megatron.config.compare import load_yaml
from megatron.config.tree import Config
from megatron.extras.operations.rollback import cutting
from megatron.observe.report import Axes
from megatron.schedule.skip import parse_ranges

ROLLED_BACK = "rolled-back"
"""Folder of all rollbacks, in the run's folder."""
PLAN = "plan.json"
"""File name of the plan, in the folder of its rollback."""
CHRONICLES = "chronicles.md"
"""File name of the notes that people keep about a run (chronicles), in the run's folder."""
NOTHING = "nowhere"
"""A value for a flag that takes a path. It means that the run wrote no such records."""


@dataclass(frozen=True)
class RollbackRequest:
    """What an operator asks for."""

    to: int
    """Iteration of the checkpoint to go back to."""
    skip: tuple[str, ...] = ()
    """FIRST-LAST ...: iterations to skip after the rollback. They are checked, and printed as a
    flag to continue the run with."""
    lr: float | None = None
    """Learning rate to continue with. It implies --override-lr-scheduler."""
    override_lr_scheduler: bool = False
    """Continue with another schedule of the learning rate."""
    reason: str = ""
    """Reason of the rollback. It is written to interventions.jsonl and the chronicles."""
    main_log: str | None = None
    """Log that the launches append to. Its later lines are moved out of it. Default: no log is
    changed."""
    chronicles: str | None = None
    """File in which the rollback is noted. Default: chronicles.md in RUN_FOLDER, if it exists."""
    tensorboard_dir: str | None = None
    """Folder of the run's TensorBoard events. Default, also of --metrics-file: the path in the
    checkpoint's configuration. 'nowhere': the run wrote none."""
    metrics_file: str | None = None
    """metrics.jsonl of the run."""

    def make_absolute(self) -> "RollbackRequest":
        """Return the request with absolute paths, so that it is the same in another folder."""
        names = ("main_log", "chronicles", "tensorboard_dir", "metrics_file")
        paths: dict[str, Any] = {name: _make_absolute(getattr(self, name)) for name in names}
        return replace(self, **paths)

    def convert_to_record(self) -> dict[str, Any]:
        """Return the request in the form in which it is read back from JSON."""
        # JSON turns tuples into lists. The record is compared with one that was read from a file.
        return dict(json.loads(json.dumps(asdict(self))))


def _make_absolute(path: str | None) -> str | None:
    """Return an absolute path. Keep None and 'nowhere'."""
    if path is None or path == NOTHING:
        return path
    return os.path.abspath(path)


@dataclass(frozen=True)
class FileCut:
    """A file from which the records of later iterations are moved out."""

    kind: str
    """One of tensorboard, metrics and log."""
    path: str
    """Path of the file."""
    part: str
    """Path of what is removed, in the rollback's own folder."""
    said: str
    """Description of the cut for people."""


@dataclass(frozen=True)
class RollbackPlan:
    """Everything about one rollback, decided before anything is changed."""

    name: str
    """Name of the rollback's folder."""
    time: str
    """Time of the plan, in UTC."""
    request: dict[str, Any]
    """What the operator asked for."""
    stood_at: int
    """Iteration of the checkpoint that the pointers named."""
    trained_to: int
    """Last iteration in the metrics, and at least `stood_at`."""
    digest: str
    """Digest of the checkpoint that the run goes back to."""
    axes: dict[str, Any]
    """Counters of that checkpoint, for the axes of the charts."""
    files: list[FileCut]
    """Files to cut."""
    checkpoints: list[str]
    """Names of the folders of later checkpoints."""
    chronicles: str | None
    """File in which the rollback is noted, or None."""
    pointers: bool
    """Whether the pointers have to move."""
    flags: str
    """Flags to continue the run with."""
    notes: list[str]
    """Remarks for the operator."""

    @property
    def to(self) -> int:
        """Iteration of the checkpoint that the run goes back to."""
        return int(self.request["to"])

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.files or self.checkpoints or self.pointers)

    def dump_json(self) -> str:
        """Return the plan as JSON."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def parse_json(cls, text: str) -> "RollbackPlan":
        """Parse a plan.

        Raises:
            ValueError, TypeError, KeyError: The text is no plan, or the plan would write outside of
                the rollback's folder.
        """
        record = parse_json(text)
        files = [FileCut(**entry) for entry in record["files"]]
        # A plan of an earlier version also cuts the emissions, from a time on.
        record.pop("moment", None)
        kept = [file for file in files if file.kind != "emissions"]
        plan = cls(**{**record, "files": kept})
        # A plan is read back from the disk. A damaged one must not move files to another folder.
        for name in (plan.name, *(file.part for file in plan.files)):
            leads_out = os.path.isabs(name) or ".." in Path(name).parts
            if leads_out or not name or not name.isprintable():
                raise ValueError(f"{name!r} leads out of the rollback's folder")
        return plan


def explain_manual_fix(root: Path) -> str:
    """Return what an operator can do when the plan or the pointer is lost."""
    saved = _format_checkpoints(list_saved_iterations(root)) or "none"
    return (
        f"write one of the existing checkpoints into {root / LATEST} by hand ({saved}), then roll "
        "back to it"
    )


def _format_checkpoints(iterations: Iterable[int]) -> str:
    """Return the names of checkpoints as a list for people."""
    return ", ".join(f"global_step{iteration}" for iteration in iterations)


# The checkpoint


def read_target(root: Path, iteration: int) -> tuple[Manifest, Config]:
    """Read and check the checkpoint to go back to, as a run does before it loads.

    The manifest, all sizes and the small files are checked. Tensors are checked only when they are
    loaded.

    Raises:
        OperationsError: The checkpoint is missing or damaged.
        CheckpointError: It has another version, or it cannot be read.
    """
    saved = list_saved_iterations(root)
    if iteration not in saved:
        raise OperationsError(
            f"--to {iteration}: {root} has no finished checkpoint of that iteration; there "
            f"are: {_format_checkpoints(saved) or 'none'}"
        )
    folder = find_stored_folder(root, iteration)
    try:
        manifest = read_manifest(folder)
        for name, facts in manifest.files.items():
            check_size(folder, name, facts["bytes"])
        read_checked_text(folder, INDEX, manifest)
        return manifest, load_yaml(read_checked_text(folder, CONFIG, manifest))
    except DamagedError as damage:
        others = _format_checkpoints(i for i in saved if i != iteration) or "none"
        raise OperationsError(
            f"{folder} is damaged: {damage}; restore it from a copy, or go back to another; "
            f"there are: {others}"
        ) from damage
    # The configuration is not one that this version accepts.
    except ConfigError as error:
        raise CheckpointError(
            f"{folder / CONFIG} was written by another version, {manifest.version}: {error}"
        ) from error


def _find_current_iteration(root: Path, to: int, target: Manifest) -> int:
    """Return the iteration that the run is at, if `target` is on its lineage.

    Charts, metrics and log up to `to` are those of the present lineage. A checkpoint of another
    lineage would not match them.

    Raises:
        OperationsError: The target is not on the lineage.
        CheckpointError: The pointers name no checkpoint.
    """
    pointer = read_pointer(root)
    if pointer is None:
        raise OperationsError(
            f"{root} has no pointer {LATEST}, which names the run's present checkpoint; "
            f"{explain_manual_fix(root)}"
        )
    now = pointer.iteration
    if now == to:
        return now
    forward = (
        f"to go there write global_step{to} into {root / LATEST}, and give this command "
        "again to move out the records of later iterations"
    )
    if to > now:
        raise OperationsError(
            f"--to {to}: the run is at global_step{now}, and a rollback does not go forward; "
            f"{forward}"
        )
    # The present checkpoint may be damaged. Its lineage then comes from the copy beside the
    # pointers.
    lineage = find_lineage_before(root, now)
    if lineage is None:
        raise OperationsError(
            f"--to {to}: the lineage of global_step{now} cannot be read, because that checkpoint "
            f"is damaged; {forward}"
        )
    # Iterations repeat after a rollback, so checkpoints are identified by their digests.
    if target.digest not in {entry.digest for entry in lineage}:
        saved = list_saved_iterations(root)
        earlier = _format_checkpoints(
            entry.iteration for entry in lineage if entry.iteration in saved
        )
        raise OperationsError(
            f"--to {to}: this checkpoint is not in the lineage of global_step{now} (those "
            f"that led to it), so the charts up to {to} are not those of its training; "
            f"the lineage has: {earlier or 'none that exists'}; "
            f"{forward}"
        )
    return now


@dataclass(frozen=True)
class RollbackFacts:
    """What is known without reading the records.

    It is enough to refuse most mistakes before the folder is changed.
    """

    target: Manifest
    """Manifest of the checkpoint to go back to."""
    stands_at: int
    """Iteration of the checkpoint that the pointers name."""
    files: list[tuple[str, Path]]
    """(kind, path) of all files that may have to be cut."""
    chronicles: str | None
    """File in which the rollback is noted, or None."""
    flags: str
    """Flags to continue the run with."""
    notes: list[str]
    """Remarks for the operator."""


def gather_facts(root: Path, request: RollbackRequest) -> RollbackFacts:
    """Gather what is known without reading the records, and refuse what makes no sense.

    Raises:
        OperationsError, CheckpointError, ConfigError: The run cannot go back there, or the request
            makes no sense.
    """
    target, config = read_target(root, request.to)
    now = _find_current_iteration(root, request.to, target)
    # The present checkpoint knows ranges and paths of the launches that are rolled back. It may be
    # damaged, and that may be the reason for the rollback.
    present, newest = target, config
    folder = find_stored_folder(root, now)
    with contextlib.suppress(CheckpointError, ConfigError):
        manifest = read_manifest(folder)
        present, newest = manifest, load_yaml(read_checked_text(folder, CONFIG, manifest))
    notes: list[str] = []
    flags = _plan_flags(root, request, target, present, newest, notes)
    files = _find_records(root, request, [config, newest], notes)
    # A rename fails between file systems. That must show before the folder is changed.
    _refuse_another_file_system(root, request.to)
    return RollbackFacts(target, now, files, _find_chronicles(root, request), flags, notes)


def make_plan(
    root: Path, request: RollbackRequest
) -> tuple[RollbackPlan, dict[str, cutting.CutSpans]]:
    """Read all records and return the plan, and the places at which each path is cut.

    Raises:
        OperationsError: A file is not what it should be, or as in `gather_facts`.
        CheckpointError, ConfigError: As in `gather_facts`.
    """
    found = gather_facts(root, request)
    to = request.to
    axes = {f.name: found.target.state[f.name] for f in fields(Axes)}
    trained = [cutting.find_last_iteration(path) for kind, path in found.files if kind == "metrics"]
    files: list[FileCut] = []
    cuts: dict[str, cutting.CutSpans] = {}
    for kind, path in found.files:
        cut = find_cut(kind, path, axes)
        if cut.gone:
            # Files of different folders may have the same name, and plan.json is in the same
            # folder.
            part = cutting.find_unused_name(
                f"tensorboard/{path.name}" if kind == "tensorboard" else path.name,
                {PLAN, *(file.part for file in files)}.__contains__,
            )
            files.append(FileCut(kind, str(path), part, cut.description))
            cuts[str(path)] = cut
    time = datetime.now(UTC)
    aside = root / ROLLED_BACK
    plan = RollbackPlan(
        # Two rollbacks may be made in the same second. The name has no space, because the text in
        # `latest` is split at spaces.
        name=cutting.find_unused_name(
            time.strftime("%Y-%m-%dT%H-%M-%SZ"), lambda name: os.path.lexists(aside / name)
        ),
        time=time.isoformat(timespec="seconds"),
        request=request.convert_to_record(),
        stood_at=found.stands_at,
        trained_to=max([found.stands_at, *trained]),
        digest=found.target.digest,
        axes=axes,
        files=files,
        checkpoints=[entry.name for entry in list_later_entries(root, to)],
        chronicles=found.chronicles,
        # Somebody may have edited only one of the two pointers.
        pointers=read_pointer_text(root / LATEST) != f"global_step{to}"
        or read_pointer_text(root / LATEST_ITERATION) != str(to),
        flags=found.flags,
        notes=found.notes,
    )
    return plan, cuts


def list_later_entries(root: Path, to: int) -> list[Path]:
    """Return whatever a save has made for iterations after `to`, complete or not.

    Names with a suffix come first. If the plain name were moved first, a run that starts between
    the two moves could rename the `.replaced` folder to the plain name.
    """
    named = (
        # A name with a suffix (.unfinished, .replaced, .deleting, .damaged) belongs to an iteration
        # too.
        (re.match(r"global_step(\d{1,15})(?:\.|$)", entry.name, re.ASCII), entry)
        for entry in root.iterdir()
    )
    return sorted(
        (entry for match, entry in named if match and int(match[1]) > to),
        key=lambda entry: entry.name,
        reverse=True,
    )


def _refuse_another_file_system(root: Path, to: int) -> None:
    """Check that the later checkpoints can be moved by a rename.

    Raises:
        OperationsError: One is on another file system.
    """
    aside = root / ROLLED_BACK
    # The folder is created in `root` if it does not exist, and may be a mount if it does.
    device = (aside if aside.exists() else root).stat().st_dev
    for entry in list_later_entries(root, to):
        if entry.lstat().st_dev != device:
            raise OperationsError(
                f"{entry} and {aside} are on different file systems, so a rename cannot move it; "
                f"make {aside} a folder on the file system of {root}"
            )


def _find_chronicles(root: Path, request: RollbackRequest) -> str | None:
    """Return the file in which the rollback is noted, or None.

    Raises:
        OperationsError: The given path cannot be a file.
    """
    if request.chronicles is not None:
        path = Path(request.chronicles)
        if path.is_dir() or not path.parent.is_dir():
            raise OperationsError(
                f"--chronicles {path} is a folder, or the folder for it does not exist; give a "
                "file to append to"
            )
        # The note is written to a new file, which is renamed to this path. A symbolic link at this
        # path would be replaced, so it is resolved here.
        return os.path.realpath(path)
    own = root / CHRONICLES
    if own.is_file():
        return os.path.realpath(own)
    return None


# Records


def _find_records(
    root: Path, request: RollbackRequest, configs: list[Config], notes: list[str]
) -> list[tuple[str, Path]]:
    """Return (kind, file) of all files that may have to be cut, and add remarks to `notes`.

    The configurations are those of the target and of the checkpoint that the run is at. The run may
    have changed its paths in between.
    """
    found: list[tuple[str, Path]] = []
    metrics = [config.logging.metrics_file for config in configs]
    for path in _find_paths(root, "--tensorboard-dir", request.tensorboard_dir, configs, notes):
        for entry in sorted(
            entry for entry in path.iterdir() if "tfevents" in entry.name and entry.is_file()
        ):
            real = Path(os.path.realpath(entry))
            if real.is_relative_to(path):
                found.append(("tensorboard", real))
            # A link to elsewhere is for a comparison, or the file was moved. It is not rewritten.
            else:
                notes.append(
                    f"{entry} is a link to {real}, outside of the run's folder of events; it was "
                    "not cut"
                )
    for path in _find_paths(root, "--metrics-file", request.metrics_file, configs, notes):
        found.append(("metrics", path))
    # Without the flag a run writes its metrics here.
    usual = root / "metrics.jsonl"
    if request.metrics_file is None and None in metrics and usual.is_file():
        found.append(("metrics", Path(os.path.realpath(usual))))
    if request.main_log is not None:
        log = Path(request.main_log)
        if not log.is_file():
            raise OperationsError(
                f"--main-log {log} is not a file; give the log that the launches append to, or "
                "omit the flag"
            )
        found.append(("log", Path(os.path.realpath(log))))
    # Both configurations usually name the same files, and each is cut once.
    return list(dict.fromkeys(found))


def _find_paths(
    root: Path, flag: str, given: str | None, configs: list[Config], notes: list[str]
) -> list[Path]:
    """Return the paths of a flag that exist, each once.

    Raises:
        OperationsError: The given path does not exist. Or the configuration's path may be another
            run's, because this folder is a copy or the path is relative to another folder.
    """
    is_right, kind = Path.is_dir, "folder"
    if flag == "--metrics-file":
        is_right, kind = Path.is_file, "file"
    # The operator knows that no such records exist, so the configuration is not used.
    if given == NOTHING:
        return []
    if given is not None:
        if not is_right(Path(given)):
            raise OperationsError(
                f"{flag} {given} is not a {kind}; give the one that the run wrote to, or "
                f"'{NOTHING}' if it wrote none"
            )
        return [Path(os.path.realpath(given))]
    found: list[Path] = []
    for config in configs:
        text = getattr(config.logging, flag.removeprefix("--").replace("-", "_"))
        save = config.checkpoint.save
        if text is None:
            continue
        # If the checkpoint was saved elsewhere, this folder is a copy. The records may then be the
        # original run's.
        in_place = save is not None and os.path.realpath(save) == os.path.realpath(root)
        # A relative path depends on the folder in which the run was started, which is not recorded.
        if not in_place or (os.path.isabs(str(save)) and not os.path.isabs(text)):
            raise OperationsError(
                f"{flag} {text} of the checkpoint's configuration may belong to another run; the "
                f"checkpoint was saved to {save}, this is {root}, and a relative path is relative "
                "to the folder in which the run was started; "
                f"give {flag} with this run's own path, or '{NOTHING}' if it wrote none"
            )
        if is_right(Path(text)):
            found.append(Path(os.path.realpath(text)))
        else:
            notes.append(
                f"{flag} {text} of the checkpoint's configuration does not exist; it was not cut"
            )
    # Two configurations with the same path give the same note.
    notes[:] = dict.fromkeys(notes)
    return list(dict.fromkeys(found))


def find_cut(kind: str, path: Path, axes: dict[str, Any]) -> cutting.CutSpans:
    """Find where a file is to be cut, by its kind."""
    if kind == "tensorboard":
        return cutting.find_events_cut(path, Axes(**axes))
    if kind == "metrics":
        return cutting.find_metrics_cut(path, axes["iteration"])
    assert kind == "log", kind
    return cutting.find_log_cut(path, axes["iteration"])


# Flags


def _plan_flags(
    root: Path,
    request: RollbackRequest,
    target: Manifest,
    present: Manifest,
    newest: Config,
    notes: list[str],
) -> str:
    """Return the flags to continue the run with, and add remarks to `notes`.

    Raises:
        ConfigError, OperationsError: The request makes no sense.
    """
    _check_skip(root, request, newest.batch.train_iters)
    flags = _plan_skip_flags(request, target, present, newest, notes)
    flags += _plan_schedule_flags(request, newest, notes)
    # That flag would win over the pointers, and load another checkpoint.
    if newest.checkpoint.load_iteration is not None:
        notes.append(
            f"omit --load-iteration {newest.checkpoint.load_iteration}, because the pointers name "
            f"global_step{request.to}"
        )
    if not newest.checkpoint.resumes_itself:
        notes.append(
            f"the run's --load was not its --save; to continue from here give --load {root}"
        )
    return shlex.join(flags)


def _check_skip(root: Path, request: RollbackRequest, last: int | None) -> None:
    """Check that --skip has only iterations that are still to be trained.

    Skipping what the checkpoint has already trained would have no effect.

    Args:
        root: The run's folder.
        request: What the operator asks for.
        last: The run's --train-iters, or None if the run has none.

    Raises:
        ConfigError, OperationsError: A range is malformed, or it begins too early or too late.
    """
    asked = parse_ranges(request.skip)
    for text, (first, _) in zip(_format_ranges(asked), asked, strict=True):
        if first <= request.to:
            raise OperationsError(
                f"--skip {text} begins at {first}, but the checkpoint was trained up to "
                f"{request.to}; begin after {request.to}, or go back to a checkpoint before "
                f"{first}; there are: {_format_checkpoints(list_saved_iterations(root))}"
            )
        if last is not None and first > last:
            raise OperationsError(
                f"--skip {text} begins after the end of the run, which is at --train-iters {last}"
            )


def _plan_skip_flags(
    request: RollbackRequest, target: Manifest, present: Manifest, newest: Config, notes: list[str]
) -> list[str]:
    """Return the flags for the iterations to skip, and add remarks to `notes`."""
    flags: list[str] = []
    # The checkpoint has ranges of its own. A flag replaces them, so they are repeated in it.
    known = _list_ranges_ahead(target, request.to)
    # parse_ranges also joins ranges that overlap.
    covered = parse_ranges((*request.skip, *known))
    if request.skip:
        flags = ["--skip-train-iteration-range", *_format_ranges(covered)]
        if known:
            notes.append(
                f"the flag repeats the checkpoint's own ranges to skip, {' '.join(known)}, "
                "because it would otherwise replace them"
            )
    elif known:
        notes.append(
            f"the checkpoint's --skip-train-iteration-range {' '.join(known)} stays in effect "
            "without the flag"
        )
    # Ranges of the launches that are rolled back are in the present checkpoint only.
    lost = []
    for text in _list_ranges_ahead(present, request.to):
        ((begin, end),) = parse_ranges((text,))
        if not any(first <= begin and end <= last for first, last in covered):
            lost.append(text)
    if lost:
        notes.append(
            f"later launches also skipped {' '.join(lost)}; add that to "
            "--skip-train-iteration-range if it should still be skipped"
        )
    # Without --train-iters, the iteration at which the run ends is not known here.
    last = newest.batch.train_iters
    if last is not None and any(end >= last for _, end in parse_ranges(request.skip)):
        notes.append(
            f"the ranges to skip reach the end of the run, --train-iters {last}; nothing is "
            "trained after them"
        )
    return flags


def _plan_schedule_flags(request: RollbackRequest, newest: Config, notes: list[str]) -> list[str]:
    """Return the flags for another learning rate, and add remarks to `notes`.

    Raises:
        OperationsError: The learning rate is not a positive number.
    """
    flags: list[str] = []
    if request.lr is not None or request.override_lr_scheduler:
        # Without this flag the run refuses a schedule that differs from the checkpoint's.
        flags.append("--override-lr-scheduler")
        notes.append(
            "--override-lr-scheduler: the complete schedule of the command line is used, which is "
            "--lr, --min-lr, warm-up and decay; remove the flag after a checkpoint was saved with "
            "it"
        )
    if request.lr is not None:
        if not 0 < request.lr < float("inf"):
            raise OperationsError(f"--lr {request.lr} must be above 0 and finite")
        flags += ["--lr", str(request.lr)]
        # The run would refuse a rate above the maximum.
        for flag, value in (
            ("--min-lr", newest.optimizer.min_lr),
            ("--lr-warmup-init", newest.optimizer.lr_warmup_init),
        ):
            if value > request.lr:
                notes.append(f"{flag} {value} is above --lr {request.lr}: lower it, too")
        if newest.optimizer.decoupled_lr is not None:
            notes.append(
                f"--lr {request.lr} does not change --decoupled-lr "
                f"{newest.optimizer.decoupled_lr}, the rate of the word embedding and the output "
                "matrix"
            )
    return flags


def _list_ranges_ahead(manifest: Manifest, to: int) -> list[str]:
    """Return the parts after iteration `to` of the ranges that a checkpoint's run skips."""
    return [
        f"{max(first, to + 1)}-{last}"
        for first, last in manifest.state.get("skip_ranges", [])
        if last > to
    ]


def _format_ranges(ranges: tuple[tuple[int, int], ...]) -> list[str]:
    """Format ranges as FIRST-LAST."""
    return [f"{first}-{last}" for first, last in ranges]

"""What a rollback would do: the checkpoint, the records of later iterations, and the flags to go on with.

Invariant: only looks. A plan holds all that carrying it out needs, so that it can be gone on with after a cut-off.
"""

import json
import os
import re
import shlex
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron.checkpoint.folder import (
    LATEST,
    LATEST_ITERATION,
    find_stored_folder,
    list_saved_iterations,
    read_pointer,
)
from megatron.checkpoint.lineage import find_lineage_before
from megatron.checkpoint.manifest import (
    CONFIG,
    INDEX,
    MANIFEST,
    Manifest,
    check_size,
    read_checked_text,
    read_manifest,
)
from megatron.config.cli import load_yaml
from megatron.config.tree import Config
from megatron.errors import CheckpointError, ConfigError, DamagedError, OperationsError
from megatron.observe.report import Axes
from megatron.operations.cutting import (
    CutSpans,
    find_emissions_cut,
    find_events_cut,
    find_log_cut,
    find_metrics_cut,
    find_when_passed,
)
from megatron.schedule.skip import parse_ranges

ROLLED_BACK = "rolled-back"
PLAN = "plan.json"
CHRONICLES = "chronicles.md"
NOTHING = "nowhere"
"""In place of a path: the run wrote no such records."""


@dataclass(frozen=True)
class RollbackRequest:
    """What an operator asks for."""

    to: int
    """Iteration of the checkpoint to go back to."""
    skip: tuple[str, ...] = ()
    """FIRST-LAST ...: iterations to skip from there; checked, and printed as the flag to go on with."""
    lr: float | None = None
    """Learning rate to go on with; brings --override-lr-scheduler."""
    override_lr_scheduler: bool = False
    """Go on with another schedule of the learning rate."""
    reason: str = ""
    """For the notes."""
    main_log: str | None = None
    """Log that the launches append to; cut, too. Default: none is."""
    chronicles: str | None = None
    """File that the rollback is noted in. Default: chronicles.md in RUN_FOLDER, where there is one."""
    tensorboard_dir: str | None = None
    """Default of this and the next two: as the checkpoint's configuration says; 'nowhere': there is nothing to cut."""
    metrics_file: str | None = None
    """metrics.jsonl of the run."""
    codecarbon_dir: str | None = None
    """Folder of emissions.csv."""

    def make_absolute(self) -> "RollbackRequest":
        """The same command may be given again elsewhere."""
        return replace(
            self,
            main_log=_make_absolute(self.main_log),
            chronicles=_make_absolute(self.chronicles),
            tensorboard_dir=_make_absolute(self.tensorboard_dir),
            metrics_file=_make_absolute(self.metrics_file),
            codecarbon_dir=_make_absolute(self.codecarbon_dir),
        )

    def convert_to_record(self) -> dict[str, Any]:
        """As JSON gives it back."""
        return dict(json.loads(json.dumps(asdict(self))))


def _make_absolute(path: str | None) -> str | None:
    return path if path is None or path == NOTHING else os.path.abspath(path)


@dataclass(frozen=True)
class FileCut:
    kind: str
    path: str
    part: str
    """What goes, in the rollback's own folder."""
    said: str


@dataclass(frozen=True)
class RollbackPlan:
    """Of one rollback, settled before anything is changed."""

    name: str
    """Of its folder."""
    time: str
    request: dict[str, Any]
    stood_at: int
    """The checkpoint that the pointers named."""
    trained_to: int
    """The last iteration that the metrics know; at least `stood_at`."""
    digest: str
    """Of the checkpoint that the run goes back to."""
    moment: str | None
    """When the run went beyond it; None: it did not."""
    axes: dict[str, Any]
    files: list[FileCut]
    checkpoints: list[str]
    chronicles: str | None
    pointers: bool
    """They have to move."""
    flags: str
    """To go on with."""
    notes: list[str]

    @property
    def to(self) -> int:
        return int(self.request["to"])

    @property
    def is_empty(self) -> bool:
        return not (self.files or self.checkpoints or self.pointers)

    def dump_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def parse_json(cls, text: str) -> "RollbackPlan":
        """
        Raises:
            ValueError, TypeError, KeyError: it is none, or would write outside of the rollback's folder.
        """
        record = json.loads(text)
        plan = cls(**{**record, "files": [FileCut(**entry) for entry in record["files"]]})
        for name in (plan.name, *(file.part for file in plan.files)):
            if (
                not name
                or os.path.isabs(name)
                or ".." in Path(name).parts
                or not name.isprintable()
            ):
                raise ValueError(f"{name!r} leads out of the rollback's folder")
        return plan


def explain_manual_fix(root: Path) -> str:
    """The way out where nothing tells what to do."""
    there = ", ".join(f"global_step{i}" for i in list_saved_iterations(root)) or "none"
    return f"write one of the checkpoints that are there into {root / LATEST} by hand ({there}), then roll back to it"


# The checkpoint


def read_target(root: Path, iteration: int) -> tuple[Manifest, Config]:
    """What a run looks at before it loads: the manifest, all sizes, the small files. Tensors are checked as they are loaded.

    Raises:
        OperationsError: it is not there, or damaged. CheckpointError: it is of another version, or cannot be read.
    """
    saved = list_saved_iterations(root)
    if iteration not in saved:
        there = ", ".join(f"global_step{i}" for i in saved) or "none"
        raise OperationsError(
            f"--to {iteration}: {root} has no finished checkpoint of that iteration; there are: {there}"
        )
    folder = find_stored_folder(root, iteration)
    try:
        manifest = read_manifest(folder)
        for name, facts in manifest.files.items():
            check_size(folder, name, facts["bytes"])
        read_checked_text(folder, INDEX, manifest)
        return manifest, load_yaml(read_checked_text(folder, CONFIG, manifest))
    except DamagedError as damage:
        others = ", ".join(f"global_step{i}" for i in saved if i != iteration) or "none"
        raise OperationsError(
            f"{folder} is damaged: {damage}; restore it from a copy, or go back to another; there are: {others}"
        ) from damage
    except ConfigError as error:
        raise CheckpointError(
            f"{folder / CONFIG} is of another version, {manifest.version}: {error}"
        ) from error


def _find_current_iteration(root: Path, to: int, target: Manifest) -> int:
    """The iteration that the run stands at; `target` is on its lineage.

    Charts, metrics and log up to `to` are those of the present lineage, so a checkpoint of another one would not belong to them.

    Raises:
        OperationsError: it is not. CheckpointError: the pointers name nothing.
    """
    pointer = read_pointer(root)
    if pointer is None:
        raise OperationsError(
            f"{root} has no pointer {LATEST} that says where the run stands; {explain_manual_fix(root)}"
        )
    now = pointer.iteration
    if now == to:
        return now
    forward = f"to go there write global_step{to} into {root / LATEST}, and give this command again to cut what is later"
    if to > now:
        raise OperationsError(
            f"--to {to}: the run stands at global_step{now}, and a rollback does not go forward; {forward}"
        )
    lineage = find_lineage_before(root, now)
    if lineage is None:
        raise OperationsError(
            f"--to {to}: which checkpoints global_step{now} came through cannot be read, for it is damaged; {forward}"
        )
    if target.digest not in {entry.digest for entry in lineage}:
        there = [a.iteration for a in lineage if a.iteration in list_saved_iterations(root)]
        listed = ", ".join(f"global_step{i}" for i in there) or "none that is still there"
        raise OperationsError(
            f"--to {to}: global_step{now} did not come through this checkpoint, which is of a lineage that was left; the charts are "
            f"not its own. global_step{now} came through: {listed}; {forward}"
        )
    return now


@dataclass(frozen=True)
class RollbackFacts:
    """What is known without reading the records: enough to refuse most mistakes before the folder is touched."""

    target: Manifest
    stands_at: int
    files: list[tuple[str, Path]]
    """(kind, path) of all that may have to be cut."""
    chronicles: str | None
    flags: str
    notes: list[str]


def gather_facts(root: Path, request: RollbackRequest) -> RollbackFacts:
    """
    Raises:
        OperationsError, CheckpointError, ConfigError: the run cannot go back there, or what is asked for makes no sense.
    """
    target, config = read_target(root, request.to)
    now = _find_current_iteration(root, request.to, target)
    present, newest = _read_present(root, now, target, config)
    flags, notes = _plan_flags(root, request, target, present, newest)
    files, about_files = _find_records(root, request, [config, newest])
    _refuse_another_file_system(root, request.to)
    return RollbackFacts(
        target, now, files, _find_chronicles(root, request), flags, [*notes, *about_files]
    )


def make_plan(root: Path, request: RollbackRequest) -> tuple[RollbackPlan, dict[str, CutSpans]]:
    """With where each path is to be cut, which takes time to find. Reads all records.

    Raises:
        As `gather_facts`. OperationsError: a file is not what it should be.
    """
    found, to = gather_facts(root, request), request.to
    axes = {f.name: found.target.state[f.name] for f in fields(Axes)}
    trained = [find_when_passed(path, to) for kind, path in found.files if kind == "metrics"]
    moment: datetime | None = datetime.fromtimestamp(
        (find_stored_folder(root, to) / MANIFEST).stat().st_mtime, UTC
    )
    if any(
        each.passed for each in trained
    ):  # a copy of a checkpoint may be younger than what followed it
        moment = min((each.moment for each in trained if each.moment is not None), default=None)
    files: list[FileCut] = []
    cuts: dict[str, CutSpans] = {}
    for kind, path in found.files:
        cut = find_cut(kind, path, axes, moment)
        if cut.gone:
            part = _find_unused_name(
                f"tensorboard/{path.name}" if kind == "tensorboard" else path.name,
                {PLAN, *(file.part for file in files)},
            )
            files.append(FileCut(kind, str(path), part, cut.said))
            cuts[str(path)] = cut
    time, aside = datetime.now(UTC), root / ROLLED_BACK
    plan = RollbackPlan(
        name=_find_unused_name(
            time.strftime("%Y-%m-%dT%H-%M-%SZ"), set(os.listdir(aside)) if aside.is_dir() else set()
        ),
        time=time.isoformat(timespec="seconds"),
        request=request.convert_to_record(),
        stood_at=found.stands_at,
        trained_to=max([found.stands_at, *(each.to for each in trained)]),
        digest=found.target.digest,
        moment=None if moment is None else moment.isoformat(),
        axes=axes,
        files=files,
        checkpoints=[entry.name for entry in list_later_entries(root, to)],
        chronicles=found.chronicles,
        pointers=read_pointer_text(root / LATEST) != f"global_step{to}"
        or read_pointer_text(root / LATEST_ITERATION) != str(to),
        flags=found.flags,
        notes=found.notes,
    )
    return plan, cuts


def read_pointer_text(path: Path) -> str:
    """As it is; empty where there is none."""
    return path.read_text(errors="replace").strip() if path.is_file() else ""


def _read_present(
    root: Path, now: int, target: Manifest, config: Config
) -> tuple[Manifest, Config]:
    """Of the checkpoint that the run stands at; the target's, where it is damaged: that may be why one goes back."""
    folder = find_stored_folder(root, now)
    try:
        manifest = read_manifest(folder)
        return manifest, load_yaml(read_checked_text(folder, CONFIG, manifest))
    except (CheckpointError, ConfigError):
        return target, config


def list_later_entries(root: Path, to: int) -> list[Path]:
    """Whatever a save has made for later iterations, whole or not. Those with a suffix first: a run that starts in between gives an
    `.replaced` one the plain name where that is free."""
    named = (
        (re.match(r"global_step(\d{1,15})(?:\.|$)", entry.name, re.ASCII), entry)
        for entry in root.iterdir()
    )
    return sorted(
        (entry for match, entry in named if match and int(match[1]) > to),
        key=lambda entry: entry.name,
        reverse=True,
    )


def _refuse_another_file_system(root: Path, to: int) -> None:
    aside = root / ROLLED_BACK
    device = (aside if aside.exists() else root).stat().st_dev
    for entry in list_later_entries(root, to):
        if entry.lstat().st_dev != device:
            raise OperationsError(
                f"{entry} and {aside} are on different file systems; it is moved by a rename: make {aside} a folder beside it"
            )


def _find_unused_name(name: str, taken: set[str]) -> str:
    unused, number = name, 1
    while unused in taken:
        number += 1
        unused = f"{name}.{number}"
    return unused


def _find_chronicles(root: Path, request: RollbackRequest) -> str | None:
    if request.chronicles is not None:
        path = Path(request.chronicles)
        if path.is_dir() or not path.parent.is_dir():
            raise OperationsError(
                f"--chronicles {path} is no file, and its folder is not there; give a file to append to"
            )
        return os.path.realpath(path)
    own = root / CHRONICLES
    return os.path.realpath(own) if own.is_file() else None


# Which records there are


def _find_records(
    root: Path, request: RollbackRequest, configs: list[Config]
) -> tuple[list[tuple[str, Path]], list[str]]:
    """(kind, file) of all that may have to be cut, and what there is to say.

    The configurations are the target's and that of the checkpoint that the run stands at: it may have changed its paths in between.
    """
    found: list[tuple[str, Path]] = []
    notes: list[str] = []
    metrics = [config.logging.metrics_file for config in configs]
    for path in _find_paths(root, "--tensorboard-dir", request.tensorboard_dir, configs, notes):
        for entry in sorted(
            entry for entry in path.iterdir() if "tfevents" in entry.name and entry.is_file()
        ):
            real = Path(os.path.realpath(entry))
            if real.is_relative_to(path):
                found.append(("tensorboard", real))
            else:  # linked to be compared with, or moved away: not ours to rewrite
                notes.append(
                    f"{entry} is a link to {real}, outside of the run's folder of events: nothing was cut of it"
                )
    for path in _find_paths(root, "--metrics-file", request.metrics_file, configs, notes):
        found.append(("metrics", path))
    usual = root / "metrics.jsonl"
    if request.metrics_file is None and None in metrics and usual.is_file():
        found.append(("metrics", Path(os.path.realpath(usual))))
    for path in _find_paths(root, "--codecarbon-dir", request.codecarbon_dir, configs, notes):
        if (path / "emissions.csv").is_file():
            found.append(("emissions", Path(os.path.realpath(path / "emissions.csv"))))
    if request.main_log is not None:
        log = Path(request.main_log)
        if not log.is_file():
            raise OperationsError(
                f"--main-log {log} is no file; give the log that the launches append to, or leave the flag out"
            )
        found.append(("log", Path(os.path.realpath(log))))
    return list(dict.fromkeys(found)), notes


def _find_paths(
    root: Path, flag: str, given: str | None, configs: list[Config], notes: list[str]
) -> list[Path]:
    """Those of a flag that are there, each once.

    Raises:
        OperationsError: the one given is not there; or a configuration names one, and may be another run's: of the run that this
            folder is a copy of, or relative to another folder.
    """
    is_right, kind = (Path.is_file, "file") if flag == "--metrics-file" else (Path.is_dir, "folder")
    if given == NOTHING:
        return []
    if given is not None:
        if not is_right(Path(given)):
            raise OperationsError(
                f"{flag} {given} is no {kind}; give the one that the run wrote to, or '{NOTHING}' if it wrote none"
            )
        return [Path(os.path.realpath(given))]
    found: list[Path] = []
    for config in configs:
        text, save = (
            getattr(config.logging, flag.removeprefix("--").replace("-", "_")),
            config.checkpoint.save,
        )
        if text is None:
            continue
        in_place = save is not None and os.path.realpath(save) == os.path.realpath(root)
        if not in_place or (os.path.isabs(str(save)) and not os.path.isabs(text)):
            raise OperationsError(
                f"{flag} {text} of the checkpoint's configuration may be another run's: the checkpoint was saved to {save}, "
                f"this is {root}, and a relative path is relative to where the run began; give {flag} with the run's own, or "
                f"'{NOTHING}' if it wrote none"
            )
        if is_right(Path(text)):
            found.append(Path(os.path.realpath(text)))
        else:
            notes.append(
                f"{flag} {text}, as the checkpoint's configuration has it, is not there: nothing was cut of it"
            )
    notes[:] = dict.fromkeys(notes)
    return list(dict.fromkeys(found))


def find_cut(kind: str, path: Path, axes: dict[str, Any], moment: datetime | None) -> CutSpans:
    """Where one of the files is to be cut."""
    if kind == "tensorboard":
        return find_events_cut(path, Axes(**axes))
    if kind == "metrics":
        return find_metrics_cut(path, axes["iteration"])
    if kind == "emissions":
        return find_emissions_cut(path, moment)
    assert kind == "log", kind
    return find_log_cut(path, axes["iteration"])


# How to go on


def _plan_flags(
    root: Path, request: RollbackRequest, target: Manifest, present: Manifest, newest: Config
) -> tuple[str, list[str]]:
    """(flags, remarks).

    Raises:
        ConfigError, OperationsError: what is asked for makes no sense.
    """
    to, flags, notes = request.to, [], []
    asked = parse_ranges(request.skip)
    last = newest.batch.train_iters
    for text, (first, _) in zip(_format_ranges(asked), asked, strict=True):
        if first <= to:
            raise OperationsError(
                f"--skip {text} begins at {first}, but the checkpoint was trained up to {to} and stays so; begin behind that, or "
                f"go back to a checkpoint before {first}; there are: {', '.join(f'global_step{i}' for i in list_saved_iterations(root))}"
            )
        if last is not None and first > last:
            raise OperationsError(
                f"--skip {text} begins behind the end of the run, which is at --train-iters {last}"
            )
    known = _list_ranges_ahead(target, to)
    if asked:
        flags += [
            "--skip-train-iteration-range",
            *_format_ranges(parse_ranges((*request.skip, *known))),
        ]
        if known:
            notes.append(
                f"the checkpoint's own ranges to skip, {' '.join(known)}, are among them: flags replace those"
            )
    elif known:
        notes.append(
            f"the checkpoint's --skip-train-iteration-range {' '.join(known)} holds on without the flag"
        )
    covered = parse_ranges((*request.skip, *known))
    lost = [
        text
        for text, (first, end) in (
            (text, parse_ranges((text,))[0]) for text in _list_ranges_ahead(present, to)
        )
        if not any(a <= first and end <= b for a, b in covered)
    ]
    if lost:
        notes.append(
            f"later launches skipped {' '.join(lost)}, too; add that to --skip-train-iteration-range if it is still to be"
        )
    if any(end >= (last or end + 1) for _, end in asked):
        notes.append(
            f"what is skipped reaches to the end of the run, --train-iters {last}: nothing is trained behind it"
        )
    if request.lr is not None or request.override_lr_scheduler:
        flags.append("--override-lr-scheduler")
        what = "the whole schedule of the command line holds: --lr, --min-lr, warm-up and decay"
        notes.append(
            f"--override-lr-scheduler: {what}; once a checkpoint is saved with it the flag may go"
        )
    if request.lr is not None:
        if not 0 < request.lr < float("inf"):
            raise OperationsError(f"--lr {request.lr} must be above 0 and finite")
        flags += ["--lr", str(request.lr)]
        if newest.optimizer.min_lr > request.lr:
            notes.append(
                f"--min-lr {newest.optimizer.min_lr} is above --lr {request.lr}: lower it, too"
            )
    if newest.checkpoint.load_iteration is not None:
        notes.append(
            f"leave --load-iteration {newest.checkpoint.load_iteration} out: the pointers lead to global_step{to}"
        )
    if not newest.checkpoint.resumes_itself:
        notes.append(f"the run's --load was not its --save; to go on from here give --load {root}")
    return shlex.join(flags), notes


def _list_ranges_ahead(manifest: Manifest, to: int) -> list[str]:
    """Its ranges to skip, as far as they lie behind `to`."""
    return [
        f"{max(first, to + 1)}-{last}"
        for first, last in manifest.state.get("skip_ranges", [])
        if last > to
    ]


def _format_ranges(ranges: tuple[tuple[int, int], ...]) -> list[str]:
    return [f"{first}-{last}" for first, last in ranges]

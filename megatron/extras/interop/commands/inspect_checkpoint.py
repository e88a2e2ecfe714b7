"""Show what a checkpoint holds, verify it, or compare it with another one.

    python tools/inspect_checkpoint.py runs/a                 the latest checkpoint and the folder
    python tools/inspect_checkpoint.py runs/a/global_step300 --parameters    norm, range, mean, NaN
    python tools/inspect_checkpoint.py runs/a --iteration 300 --verify       all damage and NaN
    python tools/inspect_checkpoint.py runs/a --compare runs/b     bit by bit, and the configuration
    python tools/inspect_checkpoint.py runs/a --config > run.yaml  the resolved configuration

The tool takes no lease and writes nothing, so the run may be active. It holds one tensor in memory,
or two with --compare.

Exit code 0 means success. Exit code 1 means that --verify found damage or a number that is not
finite, or that --compare found a tensor that is not bit-equal. Exit code 2 means an error.
"""

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tyro

from megatron.base import exit_codes
from megatron.base.errors import CheckpointError, ConfigError, DamagedError, MegatronError
from megatron.base.plain_text import format_bytes, make_plain, print_line, print_to_stderr
from megatron.checkpoint.finite import counts_text
from megatron.checkpoint.folder import (
    DAMAGED,
    LATEST,
    LATEST_ITERATION,
    find_stored_folder,
    list_saved_iterations,
    read_pointer,
    read_pointer_text,
)
from megatron.checkpoint.lease import get_heartbeat_age, is_alive, read_holder
from megatron.checkpoint.load import Checkpoint, open_folder
from megatron.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from megatron.checkpoint.tensor_file import count_bytes
from megatron.console.checkpoint_path import locate_checkpoint
from megatron.console.parse import parse_arguments
from megatron.console.run_tool import run_tool
from megatron.extras.interop.inspection.comparison import (
    CheckpointComparison,
    TensorStatistics,
    add_folder_to_errors,
    compare,
    compute_statistics,
)
from megatron.extras.interop.inspection.verification import (
    Verification,
    ensure_undisturbed,
    format_shape,
    verify,
)
from megatron.extras.object_store.addresses import CheckpointSource, open_source
from megatron.model.shape import ModelShape
from megatron.run.state import TrainState
from megatron.schedule.lr import LRSchedule

_ITEM = 4
"""Bytes of a weight, which is fp32."""
_OF_ROPE_SCALING = (
    "rope_scaling_factor",
    "rope_low_freq_factor",
    "rope_high_freq_factor",
    "rope_original_length",
    "rope_beta_fast",
    "rope_beta_slow",
    "rope_truncate",
)
"""Fields of the model that have no effect without --rope-scaling."""


@dataclass(frozen=True)
class InspectCheckpointArguments:
    """The command line."""

    path: tyro.conf.Positional[str]
    """A run's folder or s3:// address, one of its checkpoints, or a checkpoint that was renamed or
    copied."""
    iteration: int | None = None
    """Iteration of the checkpoint in the run's folder. Default: the one that `latest` names."""
    parameters: bool = False
    """Print statistics of every tensor. Numbers that are not finite are counted and left out."""
    verify: bool = False
    """Read every file. Check the digests, that the shards tile each tensor exactly once, that
    safetensors finds what the index lists, and that every number is finite."""
    compare: str | None = None
    """Another checkpoint, or a run's folder, which means the checkpoint that its pointers name."""
    config: bool = False
    """Print the configuration, defaults included, as YAML."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class InspectionReport:
    """A report as a record for --json and as lines for people."""

    record: dict[str, Any]
    lines: Sequence[str]
    code: int = 0


def main(argv: list[str] | None = None) -> int:
    """Print the report that `argv` asks for and return the exit code."""
    given = parse_arguments(InspectCheckpointArguments, args=argv, description=__doc__)
    return run_tool(lambda: _inspect(given))


def _inspect(given: InspectCheckpointArguments) -> int:
    """Print a report or an error, and return the exit code."""
    try:
        # Each flag selects another report, and a JSON output can hold only one of them.
        if sum((given.parameters, given.verify, given.compare is not None, given.config)) > 1:
            raise ConfigError(
                "--parameters, --verify, --compare and --config select different reports; "
                "give one of them"
            )
        with open_source(given.path) as place, open_source(given.compare or ".") as second:
            report = read_report(given, place, second)
            text = format_report(report, as_json=given.json)
            text = second.show(place.show(text))
    except (MegatronError, OSError) as error:
        # Damage is found at the first file that is read. `--verify` reads all files.
        if isinstance(error, DamagedError):
            message = f"{error}; --verify lists all damage"
        else:
            message = str(error)
        if given.json:
            print_line(json.dumps({"error": message}, indent=1))
        print_to_stderr(f"error: {message}")
        return exit_codes.USER_ERROR
    print_line(text)
    return report.code


def read_report(
    given: InspectCheckpointArguments, place: CheckpointSource, second: CheckpointSource
) -> InspectionReport:
    """Find the checkpoints, and build the report on them.

    Args:
        given: The command line.
        place: Where the checkpoint is.
        second: Where the one to compare with is.

    Raises:
        MegatronError: See `find_checkpoint` and `build_report`.
    """
    folder, root = find_checkpoint(place.folder, given.iteration)
    complete = given.verify or given.parameters or given.compare is not None
    place.fetch_files(folder, complete=complete)
    other = None
    if given.compare is not None:
        other = find_checkpoint(second.folder, None)[0]
        second.fetch_files(other, complete=True)
    with (
        # A run that is active may remove or replace a checkpoint while it is read. Without this
        # guard such a change would be reported as damage.
        ensure_undisturbed(folder),
        nullcontext() if other is None else ensure_undisturbed(other),
    ):
        return build_report(given, folder, root, other)


def format_report(report: InspectionReport, *, as_json: bool) -> str:
    """Return the text to print."""
    if not as_json:
        return "\n".join(map(make_plain, report.lines))
    # JSON has no NaN and no infinity. Python's encoder writes them anyway, and strict readers fail.
    # Reading the text back with `parse_constant` turns them into null.
    record = json.loads(json.dumps(report.record), parse_constant=lambda name: None)
    return json.dumps(record, indent=1)


def build_report(
    given: InspectCheckpointArguments, folder: Path, root: Path | None, other: Path | None
) -> InspectionReport:
    """Build the report that was asked for.

    Args:
        given: The command line.
        folder: The checkpoint's folder.
        root: The run's folder, if the path on the command line was one.
        other: The folder of the checkpoint to compare with.

    Raises:
        DamagedError: A needed file is damaged. `--verify` reports damage instead of raising.
        CheckpointError: The checkpoint has another format or cannot be read.
    """
    if given.verify:
        # Verification opens the files itself. `open_folder` would raise at the first damage, and
        # the report must list all of it.
        checked = verify(folder)
        if checked.damage or checked.not_finite:
            code = exit_codes.FOUND
        else:
            code = 0
        return InspectionReport(
            {"path": str(folder), **asdict(checked)}, format_verification(folder, checked), code
        )
    checkpoint = open_folder(folder)
    title = f"{folder}, iteration {checkpoint.iteration:,}"
    if given.config:
        return InspectionReport(
            {"config": checkpoint.config_yaml}, checkpoint.config_yaml.splitlines()
        )
    if given.parameters:
        rows = compute_statistics(checkpoint)
        record: dict[str, Any] = {
            "path": str(folder),
            "iteration": checkpoint.iteration,
            "tensors": list(map(asdict, rows)),
        }
        return InspectionReport(record, [title, "", *format_statistics(rows)])
    if other is not None:
        second = open_folder(other)
        found = compare(checkpoint, second)
        record = {
            "paths": [str(folder), str(other)],
            "iterations": [checkpoint.iteration, second.iteration],
        }
        lines = [title, f"{other}, iteration {second.iteration:,}", *format_comparison(found)]
        return InspectionReport(
            {**record, **asdict(found), "equal": found.equal},
            lines,
            exit_codes.SUCCESS if found.equal else exit_codes.FOUND,
        )
    record = summarise_checkpoint(checkpoint)
    if root is None:
        return InspectionReport(record, format_overview(record))
    around = describe_run_folder(root, folder)
    return InspectionReport(
        {**record, "folder": around}, [*format_overview(record), "", *format_run_folder(around)]
    )


# Finding it


def find_checkpoint(path: Path, iteration: int | None) -> tuple[Path, Path | None]:
    """Return the checkpoint's folder, and the run's folder if `path` is one.

    Raises:
        CheckpointError: There is no such checkpoint.
        ConfigError: The iteration is given twice.
    """
    # A copy of a checkpoint may have any name. Its manifest identifies it then.
    itself = path.is_dir() and (path.name.startswith("global_step") or (path / MANIFEST).is_file())
    if itself and iteration is not None:
        raise ConfigError(
            f"--iteration {iteration} selects a checkpoint in a run's folder, but {path} is a "
            "checkpoint itself; remove the flag or give the run's folder"
        )
    if itself:
        return path, None
    # A save that replaces this iteration may have moved the checkpoint aside for the moment.
    return find_stored_folder(*locate_checkpoint(path, iteration)), path


# The overview


def summarise_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return counters, sizes and model shape of a checkpoint as plain data.

    Raises:
        DamagedError: The index is missing or altered.
    """
    with add_folder_to_errors(checkpoint.folder):
        manifest = checkpoint.manifest
        tensors = checkpoint.read_index().tensors
    # Keys are `kind/name`, where kind is `weight` or a state of the optimizer. See `Kind`.
    kinds: Counter[str] = Counter()
    for key, tensor in tensors.items():
        kinds[key.partition("/")[0]] += count_bytes(tensor)
    found: dict[str, Any] = {
        "path": str(checkpoint.folder),
        **{
            name: getattr(manifest, name)
            for name in ("iteration", "version", "format", "layout", "state", "optimizer")
        },
        "learning_rate": _compute_learning_rate(manifest),
        # The weights alone count as parameters.
        "parameters": kinds["weight"] // _ITEM,
        "tensors": len(tensors),
        "bytes_by_kind": kinds,
        "files": {name: facts["bytes"] for name, facts in manifest.files.items()},
        "bytes": manifest.bytes + (checkpoint.folder / MANIFEST).stat().st_size,
    }
    try:
        # A configuration that this version cannot read must not hide the rest of the report.
        config = checkpoint.read_config()
    except CheckpointError as error:
        return found | {"model": None, "problem": str(error)}
    # The configuration does not hold the vocabulary size. The stored embedding [v, h] does, without
    # padding.
    embedding = tensors.get("weight/embedding.word.weight")
    if embedding:
        vocab_size = embedding["shape"][0]
    else:
        vocab_size = 0
    # Unset fields get their defaults from the shape, so that the report shows the sizes in use.
    shape = ModelShape(config.model, vocab_size, vocab_size)
    # These fields may be unset in the configuration. The model has them in any case.
    derived = {
        "ffn_hidden_size": shape.ffn_hidden_size,
        "num_query_groups": shape.query_groups,
        "kv_channels": shape.head_dim,
    }
    return found | {"model": {**vars(config.model), **derived, "vocab_size": vocab_size}}


def _compute_learning_rate(manifest: Manifest) -> float | None:
    """Return the next step's learning rate, or None if the state has no schedule."""
    try:
        state = TrainState.from_json(manifest.state)
    except CheckpointError:
        return None
    if state.lr_schedule:
        return state.compute_learning_rate(LRSchedule(**state.lr_schedule))
    return None


def format_overview(found: Mapping[str, Any]) -> list[str]:
    """Format the result of `summarise_checkpoint` for people."""
    state = found["state"]
    optimizer = found["optimizer"]
    rate = found["learning_rate"]
    progress = (
        f"schedule at {_count(state, 'lr_samples')} samples, {_count(state, 'lr_tokens')} tokens "
        "of applied steps"
    )
    rows = [
        ("checkpoint", found["path"]),
        ("iteration", f"{found['iteration']:,}"),
        (
            "written by",
            f"version {found['version'] or '?'}, format {found['format']}, "
            f"{found['layout'] or 'layout not recorded'}",
        ),
        (
            "consumed",
            f"{_count(state, 'consumed_samples')} samples, {_count(state, 'consumed_tokens')} "
            "tokens",
        ),
    ]
    if rate is not None:
        progress = f"{rate:.4g} at the next step; {progress}"
    rows.append(("learning rate", progress))
    if optimizer is None:
        rows.append(("optimizer", "not stored"))
    else:
        rows.append(("optimizer", f"stored, {_count(optimizer, 'optimizer_step')} steps"))
        scale = optimizer.get("loss_scale")
        if scale is None:
            scale_text = "none"
        else:
            scale_text = ", ".join(f"{key} {value}" for key, value in scale.items())
        rows.append(("loss scale", scale_text))
    if state.get("skip_ranges"):
        rows.append(
            ("skipped ranges", " ".join(f"{first}-{last}" for first, last in state["skip_ranges"]))
        )
    rows.append(("parameters", f"{found['parameters']:,}"))
    rows += [(kind, format_bytes(size)) for kind, size in found["bytes_by_kind"].items()]
    rows.append(
        (
            "files",
            f"{len(found['files']) + 1}, {format_bytes(found['bytes'])} in total, "
            f"{found['tensors']:,} tensors",
        )
    )
    if found["model"] is None:
        rows.append(("configuration", found["problem"]))
    else:
        shown = {name: value for name, value in found["model"].items() if value is not None}
        if "rope_scaling" not in shown:
            # The defaults of its flags would look as if the positions were scaled.
            shown = {name: value for name, value in shown.items() if name not in _OF_ROPE_SCALING}
        rows += [
            (f"  {name}", f"{value:,}" if type(value) is int else str(value))
            for name, value in shown.items()
        ]
    return align_columns(rows, left=2)


def describe_run_folder(root: Path, shown: Path) -> dict[str, Any]:
    """Return the pointers, checkpoints, leftovers and lease of a run's folder.

    Only the manifests of the other checkpoints are read.
    """
    try:
        pointer = read_pointer(root)
        pointed = None
        remark = None
        if pointer is not None:
            pointed = pointer.iteration
            remark = pointer.contradiction
    except CheckpointError as error:
        pointed = None
        remark = str(error)
    checkpoints = []
    for iteration in list_saved_iterations(root):
        folder = find_stored_folder(root, iteration)
        size = None
        problem = None
        try:
            size = read_manifest(folder).bytes
        except CheckpointError as error:
            # The run removed the checkpoint after it was listed. That is no problem to report.
            if not folder.exists():
                continue
            problem = str(error)
        marks = {"pointed_to": iteration == pointed, "shown": folder == shown, "problem": problem}
        checkpoints.append({"name": folder.name, "iteration": iteration, "bytes": size, **marks})
    finished = {entry["name"] for entry in checkpoints}
    holder = read_holder(root)
    lease = None
    if holder is not None:
        # Clocks of hosts differ, so the heartbeat may be in the future by this host's clock.
        lease = {
            **vars(holder),
            "holder": holder.describe(),
            "silent_seconds": max(0.0, get_heartbeat_age(root)),
            "alive": is_alive(holder),
        }
    # Folders with a suffix are the remains of a save or a deletion, or damaged checkpoints that
    # were renamed.
    leftovers = sorted(
        e.name
        for e in root.iterdir()
        if e.name.startswith("global_step") and e.name not in finished
    )
    # The second pointer is for scripts made for Megatron-LM.
    pointers = [root / LATEST, root / LATEST_ITERATION]
    return {
        "path": str(root),
        "pointers": {pointer.name: read_pointer_text(pointer) for pointer in pointers},
        "remark": remark,
        "checkpoints": checkpoints,
        "damaged": [name for name in leftovers if DAMAGED in name],
        "unfinished": [name for name in leftovers if DAMAGED not in name],
        "lease": lease,
    }


def format_run_folder(folder: Mapping[str, Any]) -> list[str]:
    """Format the result of `describe_run_folder` for people."""
    rows = [("folder", folder["path"])]
    rows += [
        (name, "missing" if text is None else text) for name, text in folder["pointers"].items()
    ]
    if folder["remark"]:
        rows.append(("pointers", folder["remark"]))
    for entry in folder["checkpoints"]:
        if entry["problem"] is None:
            size = format_bytes(entry["bytes"])
        else:
            size = entry["problem"]
        marks = [
            mark
            for mark, holds in (("shown here", entry["shown"]), ("pointed to", entry["pointed_to"]))
            if holds
        ]
        rows.append((f"  {entry['name']}", ", ".join([size, *marks])))
    rows += [(f"  {name}", "damaged, renamed") for name in folder["damaged"]]
    rows += [
        (f"  {name}", "being written or removed, or left by an interrupted save or removal")
        for name in folder["unfinished"]
    ]
    lease = folder["lease"]
    alive = {True: "running", False: "no longer running", None: "on another host"}
    if lease is None:
        rows.append(("lease", "not held"))
    else:
        heartbeat = f"last heartbeat {lease['silent_seconds']:.0f} s ago"
        rows.append(("lease", f"{lease['holder']}, {alive[lease['alive']]}, {heartbeat}"))
    return align_columns(rows, left=2)


# The other reports, for people


def format_statistics(rows: Sequence[TensorStatistics]) -> list[str]:
    """Format a table of tensors, and count the tensors with numbers that are not finite."""
    head = ("parameter", "kind", "shape", "norm", "min", "max", "mean", "nan", "inf")
    table = [
        (
            r.name,
            r.kind,
            format_shape(r.shape),
            *map(_number, (r.norm, r.min, r.max, r.mean)),
            str(r.nan),
            str(r.inf),
        )
        for r in rows
    ]
    bad = sum(bool(row.nan or row.inf) for row in rows)
    if bad:
        summary = f"{bad} of {len(rows)} tensors hold numbers that are not finite"
    else:
        summary = "all numbers are finite"
    return [*align_columns([head, *table], left=3), "", summary]


def format_comparison(found: CheckpointComparison) -> list[str]:
    """Format all differences, and count the tensors that are equal."""
    lines = []
    # Configuration and state come first, since a difference there often explains those of the
    # tensors.
    for title, entries in (("configuration", found.config), ("state", found.state)):
        lines += [
            "",
            f"{title}: {len(entries) or 'no'} differences",
            *(f"  {entry}" for entry in entries),
        ]
    lines += ["", *(f"only in the first: {key}" for key in found.only_in_first)]
    lines += [f"only in the second: {key}" for key in found.only_in_second]
    lines += [
        f"{entry.tensor} is {format_shape(entry.first)} and {format_shape(entry.second)}"
        for entry in found.shapes
    ]
    # Equal tensors are only counted, because a checkpoint has thousands of them.
    unequal = [row for row in found.tensors if not row.bit_equal]
    if unequal:
        head = ("tensor", "different", "max absolute", "relative")
        rows = [
            (row.tensor, f"{row.different:,}", _number(row.max_absolute), _number(row.relative))
            for row in unequal
        ]
        lines += [*align_columns([head, *rows], left=1), ""]
    return [
        *lines,
        f"{len(found.tensors) - len(unequal)} of {len(found.tensors)} common tensors are bit-equal",
    ]


def format_verification(folder: Path, found: Verification) -> list[str]:
    """Format all damage, the tensors with numbers that are not finite, and the notes."""
    notes = [f"note: {note}" for note in found.notes]
    if found.not_finite:
        head = "numbers that are not finite, so no run can resume from it:"
        listed = [
            f"  {each.tensor}: {counts_text(each.nan, each.inf)} of {each.numbers:,} numbers"
            for each in found.not_finite
        ]
        notes = [head, *listed, *notes]
    if found.damage:
        head = (
            f"{folder} is damaged in {len({damage.file for damage in found.damage})} of its files:"
        )
        return [
            head,
            *(f"  {each.file}: {each.what.removeprefix(each.file + ' ')}" for each in found.damage),
            *notes,
        ]
    what = f"{found.files} files, {found.tensors:,} tensors, {format_bytes(found.bytes)}"
    return [f"{folder} is undamaged: iteration {found.iteration:,}, {what}", *notes]


def align_columns(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Return one line per row, with the first `left` columns left-aligned and the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [f"<{width}" if at < left else f">{width}" for at, width in enumerate(widths)]
    return ["  ".join(map(format, row, sides)).rstrip() for row in rows]


def _count(state: Mapping[str, Any], name: str) -> str:
    if name in state:
        return f"{state[name]:,}"
    return "?"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}"


if __name__ == "__main__":
    sys.exit(main())

"""What is in a checkpoint, whether it is whole, and where it differs from another one.

    python tools/inspect_checkpoint.py runs/a                              the checkpoint that the pointers name, and the folder
    python tools/inspect_checkpoint.py runs/a/global_step300 --parameters  norm, range, mean, NaN of every tensor
    python tools/inspect_checkpoint.py runs/a --iteration 300 --verify     read everything, list all damage
    python tools/inspect_checkpoint.py runs/a --compare runs/b             configuration, state, tensors bit by bit
    python tools/inspect_checkpoint.py runs/a --config > run.yaml          the resolved configuration

Takes no lease and writes nothing: the run may be alive. Holds one tensor in memory, or two for --compare.
Exit code: 0; 1 if --verify finds damage, or --compare a tensor that is not bit-equal; 2 on an error.
"""

import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from megatron.checkpoint.digest import BLOCK, Digester, FileDigest
from megatron.checkpoint.folder import (
    DAMAGED,
    LATEST,
    LATEST_ITERATION,
    iteration_of,
    locate,
    read_pointer,
    saved_iterations,
    stored_folder,
)
from megatron.checkpoint.lease import heartbeat_age, is_alive, read_holder
from megatron.checkpoint.load import Checkpoint
from megatron.checkpoint.manifest import (
    CONFIG,
    INDEX,
    MANIFEST,
    Index,
    Manifest,
    check_size,
    digests_of,
    read_checked_text,
    read_manifest,
)
from megatron.checkpoint.tensor_file import Box, TensorReader, intersect
from megatron.config.compare import differences
from megatron.errors import CheckpointError, ConfigError, DamagedError, MegatronError
from megatron.model.shape import ModelShape
from megatron.schedule.lr import LRSchedule
from megatron.training.state import TrainState

_ITEM = 4  # bytes of an fp32
_PIECE = 1 << 20
"""Elements that statistics are computed over at a time: they are computed in float64."""
_SHOWN_TENSORS = 4
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Arguments:
    path: tyro.conf.Positional[str]
    """A run's folder, one of its checkpoints, or one that was set aside or copied."""
    iteration: int | None = None
    """Which checkpoint of the run's folder. Default: the one that `latest` names."""
    parameters: bool = False
    """Statistics of every tensor; those of numbers that are not finite are counted and left out."""
    verify: bool = False
    """Read every file; check digests, that boxes tile each tensor exactly once, and that safetensors finds what the index says."""
    compare: str | None = None
    """Another checkpoint, or run's folder (the checkpoint that its pointers name)."""
    config: bool = False
    """Print the configuration, defaults included, as YAML."""
    json: bool = False
    """Print JSON."""


def main(argv: list[str] | None = None) -> int:
    given = tyro.cli(Arguments, args=argv, description=__doc__)
    places: list[Place] = []
    try:
        if sum((given.parameters, given.verify, given.compare is not None, given.config)) > 1:
            raise ConfigError("--parameters, --verify, --compare and --config are different reports; ask for one at a time")
        places = [find(Path(given.path), given.iteration)]
        if given.compare is not None:
            places.append(find(Path(given.compare), None))
        try:
            found, lines, code = _report(given, places)
        except DamagedError as damage:
            raise DamagedError(f"{damage}; --verify lists all damage", damage.file) from damage
        for place in places:
            place.check_same()
    except (MegatronError, OSError) as failure:
        error = next((place.change() for place in places if place.changed), failure)  # then it is no damage
        if given.json:
            print(json.dumps({"error": str(error)}, indent=1))
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    print(json.dumps(_plain(found), indent=1, allow_nan=False) if given.json else "\n".join(lines))
    return code


def _report(given: Arguments, places: Sequence["Place"]) -> tuple[dict[str, Any], list[str], int]:
    """(for --json, for people, exit code)."""
    if given.verify:
        found = verify(places[0])
        return found, verification_text(found), 1 if found["damage"] else 0
    checkpoints = [place.open() for place in places]
    first = checkpoints[0]
    if given.config:
        return {"config": first.config_yaml}, first.config_yaml.splitlines(), 0
    if given.parameters:
        found = parameters(first)
        return found, parameters_text(found), 0
    if given.compare is not None:
        found = compare(*checkpoints)
        return found, comparison_text(found), 0 if found["equal"] else 1
    found = overview(first)
    if places[0].root is not None:
        found["folder"] = run_folder(places[0].root, first.folder)
    return found, overview_text(found), 0


def _plain(value: Any) -> Any:
    """JSON knows no NaN and no infinity: they become null."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# Finding it


@dataclass(frozen=True)
class Place:
    """A checkpoint's folder, which a run that is alive may replace or remove while it is read."""

    folder: Path
    root: Path | None
    """The run's folder, where that is what was given."""
    identity: tuple[int, int]

    def open(self) -> Checkpoint:
        """
        Raises:
            DamagedError: its small files are missing or altered. CheckpointError: of another format, or they cannot be read.
        """
        with folder_named(self.folder):
            manifest = read_manifest(self.folder)
            return Checkpoint(self.folder, manifest, read_checked_text(self.folder, CONFIG, manifest))

    @property
    def changed(self) -> bool:
        try:
            return identity_of(self.folder) != self.identity
        except FileNotFoundError:
            return True

    def check_same(self) -> None:
        """
        Raises:
            CheckpointError: it is not the folder any more that it was when it was found.
        """
        if self.changed:
            raise self.change()

    def change(self) -> CheckpointError:
        return CheckpointError(f"{self.folder} was removed, renamed or replaced while it was read: is its run alive? Ask again")


def identity_of(folder: Path) -> tuple[int, int]:
    """Its number, which a later folder may get again, and when the last file was put into it."""
    found = folder.stat()
    return found.st_ino, found.st_mtime_ns


@contextmanager
def folder_named(folder: Path) -> Iterator[None]:
    """Errors name it: there may be two."""
    try:
        yield
    except DamagedError as damage:
        raise DamagedError(f"{folder} is damaged: {damage}", damage.file) from damage


def index_of(checkpoint: Checkpoint) -> Index:
    """
    Raises:
        DamagedError: the file is missing or altered.
    """
    with folder_named(checkpoint.folder):
        return checkpoint.index()


def find(path: Path, iteration: int | None) -> Place:
    """
    Raises:
        CheckpointError: there is no such checkpoint. ConfigError: an iteration is named twice.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is not there; give a run's folder (--save) or one of its checkpoints")
    named = iteration_of(path.name)
    itself = named is not None or (path / MANIFEST).is_file() or path.name.startswith("global_step")
    if itself and iteration is not None:
        raise ConfigError(f"--iteration {iteration} goes with a run's folder, and {path} is one checkpoint; leave one of them out")
    if itself:
        return Place(path, None, identity_of(path))
    if iteration is not None and iteration not in saved_iterations(path):
        there = ", ".join(f"global_step{i}" for i in saved_iterations(path)) or "none"
        raise CheckpointError(f"--iteration {iteration}: {path} has no such checkpoint; there are: {there}")
    folder = stored_folder(*locate(path, iteration))
    try:
        return Place(folder, path, identity_of(folder))
    except FileNotFoundError as gone:
        raise CheckpointError(f"{folder} was removed while it was looked for: is its run alive? Ask again") from gone


# The overview


def overview(checkpoint: Checkpoint) -> dict[str, Any]:
    """
    Raises:
        DamagedError: the index is missing or altered.
    """
    manifest, index = checkpoint.manifest, index_of(checkpoint)
    kinds: dict[str, int] = {}
    for key, tensor in index.tensors.items():
        kinds[key.partition("/")[0]] = kinds.get(key.partition("/")[0], 0) + _ITEM * math.prod(tensor["shape"])
    found: dict[str, Any] = {
        "path": str(checkpoint.folder),
        "iteration": manifest.iteration,
        "version": manifest.version,
        "format": manifest.format,
        "layout": manifest.layout,
        "state": manifest.state,
        "optimizer": manifest.optimizer,
        "learning_rate": _learning_rate(manifest),
        "parameters": kinds.get("weight", 0) // _ITEM,
        "tensors": len(index.tensors),
        "bytes_by_kind": kinds,
        "files": {name: facts["bytes"] for name, facts in manifest.files.items()},
        "bytes": manifest.bytes + (checkpoint.folder / MANIFEST).stat().st_size,
    }
    try:
        config = checkpoint.config()
    except CheckpointError as error:
        return found | {"model": None, "problem": str(error)}
    embedding = index.tensors.get("weight/embedding.word.weight")
    vocab_size = embedding["shape"][0] if embedding else 0
    shape = ModelShape(config.model, vocab_size, vocab_size)
    derived = {"ffn_hidden_size": shape.ffn_hidden_size, "num_query_groups": shape.query_groups, "kv_channels": shape.head_dim}
    return found | {"model": {**vars(config.model), **derived, "vocab_size": vocab_size}}


def _learning_rate(manifest: Manifest) -> float | None:
    """The next step's; None where the state has no schedule."""
    try:
        state = TrainState.from_json(manifest.state)
    except CheckpointError:
        return None
    return state.learning_rate(LRSchedule(**state.lr_schedule)) if state.lr_schedule else None


def run_folder(root: Path, shown: Path) -> dict[str, Any]:
    """What else a run's folder holds. Other checkpoints are only looked at by their manifests."""
    try:
        pointer = read_pointer(root)
        pointed, remark = (None, None) if pointer is None else (pointer.iteration, pointer.contradiction)
    except CheckpointError as error:
        pointed, remark = None, str(error)
    checkpoints = []
    for iteration in saved_iterations(root):
        folder = stored_folder(root, iteration)
        try:
            size, problem = read_manifest(folder).bytes, None
        except CheckpointError as error:
            if not folder.exists():  # removed by the run meanwhile
                continue
            size, problem = None, str(error)
        checkpoints.append(
            {
                "name": folder.name,
                "iteration": iteration,
                "bytes": size,
                "pointed_to": iteration == pointed,
                "shown": folder == shown,
                "problem": problem,
            }
        )
    finished = {entry["name"] for entry in checkpoints}
    leftovers = sorted(e.name for e in root.iterdir() if e.name.startswith("global_step") and e.name not in finished)
    return {
        "path": str(root),
        "pointers": {name: _text(root / name) for name in (LATEST, LATEST_ITERATION)},
        "remark": remark,
        "checkpoints": checkpoints,
        "damaged": [name for name in leftovers if DAMAGED in name],
        "unfinished": [name for name in leftovers if DAMAGED not in name],
        "lease": lease_of(root),
    }


def _text(path: Path) -> str | None:
    return path.read_text(errors="replace").strip() if path.is_file() else None


def lease_of(root: Path) -> dict[str, Any] | None:
    """Who writes to the folder, or did; None: nobody."""
    holder = read_holder(root)
    if holder is None:
        return None
    return {
        **vars(holder),
        "holder": holder.describe(),
        "silent_seconds": max(0.0, heartbeat_age(root)),
        "alive": is_alive(holder),
    }


def overview_text(found: Mapping[str, Any]) -> list[str]:
    state, optimizer = found["state"], found["optimizer"]
    rows = [
        ("checkpoint", found["path"]),
        ("iteration", f"{found['iteration']:,}"),
        ("written by", f"version {found['version'] or '?'}, format {found['format']}, {found['layout'] or 'layout not said'}"),
        ("consumed", f"{_count(state, 'consumed_samples')} samples, {_count(state, 'consumed_tokens')} tokens"),
        ("learning rate", _learning_rate_text(found)),
    ]
    if optimizer is None:
        rows.append(("optimizer", "not in it"))
    else:
        rows.append(("optimizer", f"in it, {_count(optimizer, 'optimizer_step')} steps"))
        scale = optimizer.get("loss_scale")
        rows.append(("loss scale", "none" if scale is None else ", ".join(f"{key} {value}" for key, value in scale.items())))
    if state.get("skip_ranges"):
        rows.append(("skipped ranges", " ".join(f"{first}-{last}" for first, last in state["skip_ranges"])))
    rows += [
        ("parameters", f"{found['parameters']:,}"),
        *((kind, gigabytes(size)) for kind, size in found["bytes_by_kind"].items()),
        ("files", f"{len(found['files']) + 1}, {gigabytes(found['bytes'])} in all, {found['tensors']:,} tensors"),
    ]
    if found["model"] is None:
        rows.append(("configuration", found["problem"]))
    else:
        rows += [(f"  {name}", _value(value)) for name, value in found["model"].items() if value is not None]
    lines = align(rows)
    return lines if "folder" not in found else [*lines, "", *run_folder_text(found["folder"])]


def _learning_rate_text(found: Mapping[str, Any]) -> str:
    state, rate = found["state"], found["learning_rate"]
    clock = f"clock at {_count(state, 'lr_samples')} samples, {_count(state, 'lr_tokens')} tokens of applied steps"
    return clock if rate is None else f"{rate:.4g} at the next step; {clock}"


def run_folder_text(folder: Mapping[str, Any]) -> list[str]:
    rows = [("folder", folder["path"])]
    rows += [(name, "not there" if text is None else text) for name, text in folder["pointers"].items()]
    if folder["remark"]:
        rows.append(("pointers", folder["remark"]))
    for entry in folder["checkpoints"]:
        size = gigabytes(entry["bytes"]) if entry["problem"] is None else entry["problem"]
        marks = [mark for mark, holds in (("shown here", entry["shown"]), ("pointed to", entry["pointed_to"])) if holds]
        rows.append((f"  {entry['name']}", ", ".join([size, *marks])))
    rows += [(f"  {name}", "damaged, set aside") for name in folder["damaged"]]
    rows += [(f"  {name}", "being written or removed, or left by one that was cut off") for name in folder["unfinished"]]
    lease = folder["lease"]
    if lease is None:
        rows.append(("lease", "held by nobody"))
    else:
        state = {True: "alive", False: "gone", None: "on another host"}[lease["alive"]]
        rows.append(("lease", f"{lease['holder']}, {state}, last sign of life {lease['silent_seconds']:.0f} s ago"))
    return align(rows)


def _count(state: Mapping[str, Any], name: str) -> str:
    return f"{state[name]:,}" if name in state else "?"


def _value(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def gigabytes(size: int) -> str:
    return f"{size / 1e9:,.3f} GB" if size >= 1e6 else f"{size:,} bytes"


def align(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Two columns."""
    width = max(len(name) for name, _ in rows)
    return [f"{name:{width}}  {text}" for name, text in rows]


def align_table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int) -> list[str]:
    """Columns; the first `left` begin, the others end at the same place."""
    table = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        cells = [cell.ljust(w) if at < left else cell.rjust(w) for at, (cell, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines


# The tensors


class Tensors:
    """Reads whole tensors of a checkpoint, one after the other, checked against their digests."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.index = index_of(checkpoint)
        self._folder = checkpoint.folder
        self._reader = TensorReader(checkpoint.folder, digests_of(checkpoint.manifest, self.index))

    def __enter__(self) -> "Tensors":
        return self

    def __exit__(self, *error: object) -> None:
        self._reader.__exit__(*error)

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self.index.tensors[key]["shape"])

    def read(self, key: str) -> Tensor:
        """
        Raises:
            DamagedError: what it lies in is missing, cut off or altered.
        """
        tensor = torch.empty(self.shape(key))
        with folder_named(self._folder):
            self._reader.read_into(tensor, ((0,) * tensor.dim(), tuple(tensor.shape)), self.index.tensors[key]["boxes"], key)
        return tensor


def bar(total: int, what: str) -> "tqdm[None]":
    """On stderr, for people at a terminal; in bytes."""
    return tqdm(total=total, unit="B", unit_scale=True, desc=what, disable=None, file=sys.stderr, dynamic_ncols=True)


def parameters(checkpoint: Checkpoint) -> dict[str, Any]:
    """
    Raises:
        DamagedError: a tensor cannot be read as it was written.
    """
    rows = []
    with Tensors(checkpoint) as tensors:
        keys = by_parameter(tensors.index.tensors)
        with bar(sum(_ITEM * math.prod(tensors.shape(key)) for key in keys), "read") as progress:
            for key in keys:
                kind, _, name = key.partition("/")
                tensor = tensors.read(key)
                rows.append({"name": name, "kind": kind, "shape": list(tensor.shape), **statistics_of(tensor)})
                progress.update(_ITEM * tensor.numel())
    return {"path": str(checkpoint.folder), "iteration": checkpoint.iteration, "tensors": rows}


def by_parameter(keys: Iterable[str]) -> list[str]:
    """A parameter's kinds together, weight first; layers by number."""
    order = ("weight", *_MOMENTS)

    def place(key: str) -> tuple[list[tuple[int, str]], int]:
        kind, _, name = key.partition("/")
        words = [(int(word), "") if word.isdigit() else (-1, word) for word in re.split(r"(\d+)", name)]
        return words, order.index(kind) if kind in order else len(order)

    return sorted(keys, key=place)


def statistics_of(tensor: Tensor) -> dict[str, Any]:
    """Of the finite numbers; `nan` and `inf` count the others. None where there are no finite ones."""
    squares = total = 0.0
    low, high, count, nans = math.inf, -math.inf, 0, 0
    for piece in tensor.reshape(-1).split(_PIECE):
        nans += int(piece.isnan().sum())
        finite = piece[piece.isfinite()].double()
        if finite.numel():
            squares += float(finite.square().sum())
            total += float(finite.sum())
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
            count += finite.numel()
    some = count > 0
    return {
        "norm": math.sqrt(squares),
        "min": low if some else None,
        "max": high if some else None,
        "mean": total / count if some else None,
        "nan": nans,
        "inf": tensor.numel() - count - nans,
    }


def parameters_text(found: Mapping[str, Any]) -> list[str]:
    numbers = ("norm", "min", "max", "mean")
    rows = [
        (row["name"], row["kind"], _shape(row["shape"]), *(_number(row[n]) for n in numbers), str(row["nan"]), str(row["inf"]))
        for row in found["tensors"]
    ]
    bad = [f"{row['kind']}/{row['name']}" for row in found["tensors"] if row["nan"] or row["inf"]]
    summary = f"{len(bad)} of {len(rows)} tensors hold numbers that are not finite" if bad else "all numbers are finite"
    head = ("parameter", "kind", "shape", *numbers, "nan", "inf")
    return [f"{found['path']}, iteration {found['iteration']:,}", "", *align_table(head, rows, left=3), "", summary]


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "one number"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


# Two checkpoints


def compare(a: Checkpoint, b: Checkpoint) -> dict[str, Any]:
    """`equal`: every tensor of one is in the other, and equal to it bit by bit.

    Raises:
        DamagedError: a tensor cannot be read as it was written. CheckpointError: a configuration is not this version's.
    """
    found: dict[str, Any] = {
        "paths": [str(a.folder), str(b.folder)],
        "iterations": [a.iteration, b.iteration],
        "config": differences(a.config(), b.config()),
        "state": _differences_of_state(a, b),
        "only_in_first": [],
        "only_in_second": [],
        "shapes": [],
        "tensors": [],
    }
    with Tensors(a) as left, Tensors(b) as right:
        here, there = left.index.tensors, right.index.tensors
        found["only_in_first"] = by_parameter(here.keys() - there.keys())
        found["only_in_second"] = by_parameter(there.keys() - here.keys())
        common = []
        for key in by_parameter(here.keys() & there.keys()):
            if left.shape(key) == right.shape(key):
                common.append(key)
            else:
                found["shapes"].append({"tensor": key, "first": list(left.shape(key)), "second": list(right.shape(key))})
        with bar(sum(_ITEM * math.prod(left.shape(key)) for key in common), "compare") as progress:
            for key in common:
                tensor = left.read(key)
                found["tensors"].append({"tensor": key, **difference_of(tensor, right.read(key))})
                progress.update(_ITEM * tensor.numel())
    unequal = any(not row["bit_equal"] for row in found["tensors"])
    found["equal"] = not (unequal or found["only_in_first"] or found["only_in_second"] or found["shapes"])
    return found


def difference_of(a: Tensor, b: Tensor) -> dict[str, Any]:
    """Between tensors of one shape. `relative` is the norm of the difference over the larger norm of the two, so at most 2.

    Both are NaN where one has a number that is not finite and the other has not the same bits there.
    """
    different, largest, squares, of_a, of_b = 0, 0.0, 0.0, 0.0, 0.0
    for x, y in zip(a.reshape(-1).split(_PIECE), b.reshape(-1).split(_PIECE), strict=True):
        unequal = x.view(torch.int32) != y.view(torch.int32)
        different += int(unequal.sum())
        x, y = x.double(), y.double()
        of_a += float(x.square().sum())
        of_b += float(y.square().sum())
        if unequal.any():
            distance = (x - y)[unequal].abs()
            largest = max(largest, float(distance.max())) if distance.isfinite().all() else math.nan
            squares += float(distance.square().sum())
    norm = math.sqrt(max(of_a, of_b))
    relative = math.nan if math.isnan(largest) else math.sqrt(squares) / norm if squares else 0.0
    return {"bit_equal": different == 0, "different": different, "max_absolute": largest, "relative": relative}


def _differences_of_state(a: Checkpoint, b: Checkpoint) -> list[str]:
    x, y = (_flat({"state": checkpoint.state, "optimizer": checkpoint.optimizer}) for checkpoint in (a, b))
    shown = {name: tuple(json.dumps(side[name]) if name in side else "nothing" for side in (x, y)) for name in [*x, *y]}
    return [f"{name}: {first} and {second}" for name, (first, second) in shown.items() if first != second]


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping) or not value:
        return {name: value}
    return {k: v for key, item in value.items() for k, v in _flat(item, f"{name}.{key}" if name else key).items()}


def comparison_text(found: Mapping[str, Any]) -> list[str]:
    lines = [f"{path}, iteration {at:,}" for path, at in zip(found["paths"], found["iterations"], strict=True)]
    for title, entries in (("configuration", found["config"]), ("state", found["state"])):
        lines += ["", f"{title}: {len(entries) or 'no'} differences", *(f"  {entry}" for entry in entries)]
    lines += ["", *(f"only in the first: {key}" for key in found["only_in_first"])]
    lines += [f"only in the second: {key}" for key in found["only_in_second"]]
    lines += [f"{entry['tensor']} is {_shape(entry['first'])} and {_shape(entry['second'])}" for entry in found["shapes"]]
    unequal = [row for row in found["tensors"] if not row["bit_equal"]]
    head = ("tensor", "different", "max absolute", "relative")
    if unequal:
        rows = [(r["tensor"], f"{r['different']:,}", _number(r["max_absolute"]), _number(r["relative"])) for r in unequal]
        lines += [*align_table(head, rows, left=1), ""]
    lines.append(f"{len(found['tensors']) - len(unequal)} of {len(found['tensors'])} tensors of both are equal bit by bit")
    return lines


# Whether it is whole


def verify(place: Place) -> dict[str, Any]:
    """All damage, each as {"file", "what"}.

    Raises:
        CheckpointError: it has another format.
    """
    damage: list[dict[str, str]] = []
    notes: list[str] = []
    found: dict[str, Any] = {"path": str(place.folder), "iteration": None, "bytes": 0, "files": 0, "tensors": 0}

    def say(file: str, what: str) -> None:
        damage.append({"file": file, "what": what})

    try:
        manifest = read_manifest(place.folder)
    except DamagedError as error:
        say(error.file, f"{error}; nothing else can be checked without it")
        return found | {"damage": damage, "notes": notes}
    found |= {"iteration": manifest.iteration, "bytes": manifest.bytes, "files": len(manifest.files) + 1}
    named = iteration_of(place.folder.name)
    if named is not None and named != manifest.iteration:
        say(MANIFEST, f"it is the checkpoint of iteration {manifest.iteration}, renamed")
    index = _readable_index(place.folder, manifest, say)
    digests = {} if index is None else digests_of(manifest, index)
    with bar(manifest.bytes, "verify") as progress:
        for name, facts in manifest.files.items():
            check_file(place.folder, name, facts, digests.get(name), index, say, progress.update)
    if index is not None:
        found["tensors"] = len(index.tensors)
        check_tiling(index, say)
        check_kinds(index, manifest, say)
        check_headers(place.folder, index, manifest, say)
    else:
        notes.append(f"which tensors are concerned cannot be told, nor whether all are there: that stands in {INDEX}")
    strangers = sorted({entry.name for entry in place.folder.iterdir()} - manifest.files.keys() - {MANIFEST})
    if strangers:
        notes.append(f"not part of it: {', '.join(strangers)}")
    return found | {"damage": damage, "notes": notes}


Say = Callable[[str, str], None]


def _readable_index(folder: Path, manifest: Manifest, say: Say) -> Index | None:
    """None where it cannot be believed; its damage is told by `check_file`, as every file's."""
    if INDEX not in manifest.files:
        say(INDEX, f"{MANIFEST} does not name it")
        return None
    try:
        return Index(**json.loads(read_checked_text(folder, INDEX, manifest)))
    except CheckpointError:
        return None


def check_file(
    folder: Path,
    name: str,
    facts: Mapping[str, Any],
    expected: FileDigest | None,
    index: Index | None,
    say: Say,
    progress: Callable[[int], object],
) -> None:
    """One file against its digests; says which bytes differ, and which tensors lie in them."""
    try:
        check_size(folder, name, facts["bytes"])
        wrong_size = None
    except DamagedError as error:
        wrong_size = str(error)
    except OSError as error:
        say(name, f"{name} cannot be read: {error}")
        return
    digester = Digester()
    try:
        with open(folder / name, "rb", buffering=0) as file:
            while data := file.read(BLOCK):
                digester.update(data)
                progress(len(data))
    except FileNotFoundError:
        pass  # wrong_size says so
    except OSError as error:
        say(name, f"{name} cannot be read: {error}")
        return
    found = digester.digest()
    if found.xxh128 == facts["xxh128"] and wrong_size is None:
        return
    what = wrong_size or f"{name} is not what was written: its digest is {found.xxh128}, not {facts['xxh128']}"
    if expected is not None and index is not None:
        blocks = range(-(-expected.bytes // BLOCK))
        differing = {number for number in blocks if found.block(number) != expected.block(number)}
        what += f"; {_ranges(sorted(differing), expected.bytes)} differ" if differing and found.bytes else ""
        what += _lost(index, name, differing)
    say(name, what)


def _ranges(blocks: Sequence[int], size: int) -> str:
    """bytes 0-4194303, ...: where the blocks are, neighbours together."""
    runs: list[list[int]] = []
    for number in blocks:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return "bytes " + ", ".join(f"{low * BLOCK}-{min(size, (high + 1) * BLOCK) - 1}" for low, high in runs)


def _lost(index: Index, file: str, blocks: set[int]) -> str:
    keys = []
    for key, tensor in index.tensors.items():
        for box in tensor["boxes"]:
            size = _ITEM * math.prod(box["shape"])
            if box["file"] == file and size and blocks & set(range(box["begin"] // BLOCK, (box["begin"] + size - 1) // BLOCK + 1)):
                keys.append(key)
                break
    more = f" and {len(keys) - _SHOWN_TENSORS} more" if len(keys) > _SHOWN_TENSORS else ""
    return f"; concerns {', '.join(keys[:_SHOWN_TENSORS])}{more}" if keys else ""


def check_tiling(index: Index, say: Say) -> None:
    """Every element of every tensor must be in exactly one box."""
    for key, tensor in index.tensors.items():
        whole: Box = ((0,) * len(tensor["shape"]), tuple(tensor["shape"]))
        boxes: list[Box] = [(tuple(box["offset"]), tuple(box["shape"])) for box in tensor["boxes"]]
        outside = [box for box in boxes if math.prod(box[1]) and intersect(box, whole) != box]
        for box in outside:
            say(INDEX, f"{key} is {_shape(whole[1])}, and a box of {_shape(box[1])} at {list(box[0])} is not within it")
        inside = [box for box in boxes if math.prod(box[1]) and box not in outside]
        if sum(math.prod(box[1]) for box in inside) != math.prod(whole[1]) or _overlap(inside):
            missing, double = _uneven(inside, whole[1])
            say(INDEX, f"of {key}'s {math.prod(whole[1])} elements {missing} are in no box, {double} in more than one")


def _overlap(boxes: Sequence[Box]) -> bool:
    ordered = sorted(boxes)
    for place, a in enumerate(ordered):
        for b in ordered[place + 1 :]:
            if a[0] and b[0][0] >= a[0][0] + a[1][0]:
                break  # so do all behind it
            if intersect(a, b) is not None:
                return True
    return False


def _uneven(boxes: Sequence[Box], shape: tuple[int, ...]) -> tuple[int, int]:
    """Elements in no box, and in more than one: counted on the grid that the boxes' edges make."""
    edges = [sorted({0, n, *(o[d] for o, _ in boxes), *(o[d] + s[d] for o, s in boxes)}) for d, n in enumerate(shape)]
    times = np.zeros([len(edge) - 1 for edge in edges], dtype=np.int64)
    for offset, size in boxes:
        cells = zip(edges, offset, size, strict=True)
        times[tuple(slice(edge.index(o), edge.index(o + n)) for edge, o, n in cells)] += 1
    volume = np.ones_like(times)
    for dim, edge in enumerate(edges):
        volume *= np.diff(edge).reshape([-1 if d == dim else 1 for d in range(len(edges))])
    return int(volume[times == 0].sum()), int(volume[times > 1].sum())


def check_kinds(index: Index, manifest: Manifest, say: Say) -> None:
    """Each moment has its weight's shape, and none is missing where the optimizer is in the checkpoint."""
    shapes: dict[str, dict[str, list[int]]] = {}
    for key, tensor in index.tensors.items():
        kind, _, name = key.partition("/")
        shapes.setdefault(name, {})[kind] = tensor["shape"]
    wanted = {"weight", *(_MOMENTS if manifest.optimizer is not None else ())}
    for name, kinds in shapes.items():
        for kind in sorted(wanted - kinds.keys()):
            say(INDEX, f"{kind}/{name} is not in it")
        if len({tuple(shape) for shape in kinds.values()}) > 1:
            say(INDEX, f"the kinds of {name} have different shapes: {kinds}")


def check_headers(folder: Path, index: Index, manifest: Manifest, say: Say) -> None:
    """The safetensors library must open each file and find in it what the index says, where the index says."""
    expected: dict[str, set[Stored]] = {name: set() for name in index.blocks}
    for key, tensor in index.tensors.items():
        for box in tensor["boxes"]:
            name = f"{key}@{','.join(map(str, box['offset']))}"
            expected.setdefault(box["file"], set()).add((box["begin"], name, tuple(box["shape"])))
    for file in sorted(expected.keys() - manifest.files.keys()):
        say(INDEX, f"it has tensors in {file}, which {MANIFEST} does not name")
    for file in sorted(expected.keys() & manifest.files.keys()):
        try:
            found = stored_in(folder / file)
        except FileNotFoundError:
            continue  # told already
        except (SafetensorError, OSError, ValueError, TypeError) as error:
            say(file, f"safetensors cannot open {file}: {error}")
            continue
        for begin, name, shape in sorted(expected[file] - found):
            say(file, f"{INDEX} has {name}, {_shape(shape)}, at byte {begin} of {file}, and safetensors does not find it there")
        for begin, name, shape in sorted(found - expected[file]):
            say(file, f"safetensors finds {name}, {_shape(shape)}, at byte {begin} of {file}, and {INDEX} does not have it there")


Stored = tuple[int, str, tuple[int, ...]]
"""(first byte in the file, name, shape)."""


def stored_in(path: Path) -> set[Stored]:
    """What the library finds, and where. It checks that the header fits the file but does not tell positions: the header does.

    Raises:
        SafetensorError: it is not a whole safetensors file. OSError: it cannot be read.
    """
    with safe_open(path, framework="pt") as opened:
        shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118, it is no dict
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return {(8 + length + header[name]["data_offsets"][0], name, shape) for name, shape in shapes.items()}


def verification_text(found: Mapping[str, Any]) -> list[str]:
    damage, notes = found["damage"], [f"note: {note}" for note in found["notes"]]
    if damage:
        files = len({entry["file"] for entry in damage})
        head = f"{found['path']} is damaged; in {files} of its files:"
        return [head, *(f"  {entry['file']}: {entry['what'].removeprefix(entry['file'] + ' ')}" for entry in damage), *notes]
    what = f"{found['files']} files, {found['tensors']:,} tensors, {gigabytes(found['bytes'])}"
    return [f"{found['path']} is whole: iteration {found['iteration']:,}, {what}", *notes]


if __name__ == "__main__":
    sys.exit(main())

"""Everything that a run's folder records about the run, read into arrays.

Sources: the metrics file, the parts that rollbacks moved out of it, the chronicle,
`interventions.jsonl`, the verdicts of the watchdog, and the loss that a ladder foretold.

Invariant: an iteration that was trained several times has several rows, and at most one of them is
kept. The others are those of an abandoned lineage.
"""

import json
import math
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.base.errors import DataError
from megatron.base.outside_file import iterate_lines
from megatron.extras.operations.chronicle.records import (
    EnergyUse,
    EvaluationPoint,
    Event,
    PredictedLoss,
    iterate_objects,
    list_departures,
    parse_time,
    read_energy,
    read_events,
    read_objects,
    read_predicted_loss,
)
from megatron.extras.operations.rollback.execution import INTERVENTIONS
from megatron.extras.operations.rollback.rollback_plan import ROLLED_BACK
from megatron.observe.chronicle import CHRONICLE

FIELDS = (
    "iteration",
    "consumed_samples",
    "consumed_tokens",
    "lm_loss",
    "dropped_loss",
    "grad_norm",
    "learning_rate",
    "global_batch_size",
    "tokens_per_second",
    "tflops",
    "mfu",
    "params_norm",
    "loss_scale",
    "output_logit",
    "seconds",
    "data_wait_seconds",
    "save_seconds",
    "evaluate_seconds",
    "skipped_iterations",
    "largest_expert_load",
    "smallest_expert_load",
    "expert_balancing_loss",
    "router_z_loss",
    "router_entropy",
)
"""Fields of the metrics file that are read, in its units."""

LAYER_FIELDS = {
    "layer_output_rms": "root mean square of the output",
    "layer_grad_norm": "gradient norm",
    "layer_params_norm": "norm of the parameters",
    "layer_attention_logit": "largest attention logit",
    **{
        f"layer_fp8_{operand}_{what}": f"share of {operand}s that {verb}"
        for what, verb in (("flushed", "become zero in float8"), ("saturated", "float8 cuts off"))
        for operand in ("input", "weight", "gradient")
    },
}
"""Fields with a number for each layer -> what it is. Only some iterations have them."""

# As the watchdog names them. Its module imports torch, which an operator's tools do without.
_VERDICTS = "hangs/*/verdict.txt"

Column = NDArray[np.float64]


@dataclass(frozen=True)
class LayerColumns:
    """A statistic of the layers."""

    rows: NDArray[np.int64]
    """Rows of the run that have it, [n]."""
    values: Column
    """Its value for each layer, [n, layers]."""


@dataclass(frozen=True)
class ExpertLoads:
    """How many tokens the experts of each layer got in an iteration."""

    iteration: int
    values: Column
    """In multiples of the mean, [layers with experts, experts]."""


@dataclass(frozen=True)
class RunHistory:
    """A run as its files describe it."""

    folder: Path
    columns: dict[str, Column]
    """Field -> its value in each row, [rows]. `time` has seconds since the epoch. A value that is
    missing is nan. The rows are in the order of time."""
    layers: dict[str, LayerColumns]
    """Field -> the statistic of the layers, for the fields that were recorded."""
    kept: NDArray[np.bool_]
    """Whether the weights of the run still have the row's iteration, [rows]."""
    expert_loads: ExpertLoads | None
    """The last loads that were recorded and kept."""
    evaluations: list[EvaluationPoint]
    events: list[Event]
    """Events of the chronicle and interventions, in the order of time."""
    loop_starts: list[float]
    """Seconds since the epoch at which the training loop started, for each launch."""
    hang_verdicts: list[float]
    """Seconds since the epoch at which the watchdog has ended a launch."""
    energy: EnergyUse | None
    """Energy and CO2, or None if codecarbon did not measure them."""
    damaged: list[str]
    """A message for each line of these files that was left out. A killed run leaves such lines."""
    predicted: PredictedLoss | None = None
    """The loss that a ladder foretold."""


class _MetricsReader:
    """Collects the rows of several metrics files."""

    def __init__(self) -> None:
        self.columns = {name: array("d") for name in (*FIELDS, "time")}
        self.layers: dict[str, dict[int, array[float]]] = {name: {} for name in LAYER_FIELDS}
        """Field -> row -> a value for each layer."""
        # Arrays of numbers, because objects for a million rows would take gigabytes.
        self.kept = bytearray()
        self._loads: tuple[int, Column] | None = None
        """The last row with loads of experts, and the loads."""
        self.evaluations: list[EvaluationPoint] = []
        self.loop_starts: list[float] = []
        self.damaged: list[str] = []

    def read(self, path: Path, *, is_removed: bool, end: int | None = None) -> None:
        """Read a metrics file. The rows of a part that a rollback removed are not kept.

        Args:
            path: The file.
            is_removed: Whether a rollback removed its rows.
            end: Bytes to read. Default: all.
        """
        # Rows and evaluations that no later line has undone.
        present: list[int] = []
        first_evaluation = len(self.evaluations)
        last = 0
        # A launch that still runs appends to the file, and counts its own rows.
        lines = _take_bytes(iterate_lines(path), end)
        for record in iterate_objects(path, lines, self.damaged):
            iteration = record.get("iteration")
            moment = parse_time(record.get("time"))
            kind = record.get("kind")
            # A torn line gives an empty object, which has neither.
            if type(iteration) is not int or moment is None:
                continue
            if kind == "validation":
                loss = _read_number(record.get("lm_loss"))
                name = str(record.get("name"))
                self.evaluations.append(
                    EvaluationPoint(name, iteration, loss, moment.timestamp(), not is_removed)
                )
                continue
            if kind not in ("start", "train"):
                continue
            # A start at an iteration, or an iteration that comes again, undoes all later ones.
            keep = iteration - (kind == "train")
            if keep < last:
                self._undo(keep, present, first_evaluation)
            if kind == "start":
                self.loop_starts.append(moment.timestamp())
            else:
                present.append(len(self.kept))
                self._append(record, moment.timestamp(), kept=not is_removed)
            last = iteration

    def _append(self, record: dict[str, Any], time: float, *, kept: bool) -> None:
        for name in FIELDS:
            self.columns[name].append(_read_number(record.get(name)))
        for name in LAYER_FIELDS:
            values = record.get(name)
            if isinstance(values, list) and values:
                self.layers[name][len(self.kept)] = array("d", map(_read_number, values))
        loads = _read_loads(record.get("expert_loads"))
        if loads is not None:
            self._loads = len(self.kept), loads
        self.columns["time"].append(time)
        self.kept.append(kept)

    def get_loads(self) -> ExpertLoads | None:
        """Return the last loads of experts, or None if they were undone or there are none."""
        if self._loads is None or not self.kept[self._loads[0]]:
            return None
        row, values = self._loads
        return ExpertLoads(int(self.columns["iteration"][row]), values)

    def _undo(self, keep: int, present: list[int], first_evaluation: int) -> None:
        iterations = self.columns["iteration"]
        while present and iterations[present[-1]] > keep:
            self.kept[present.pop()] = False
        for number in range(first_evaluation, len(self.evaluations)):
            found = self.evaluations[number]
            if found.kept and found.iteration > keep:
                self.evaluations[number] = replace(found, kept=False)


def _read_loads(value: object) -> NDArray[np.float64] | None:
    """Return loads of the metrics file as an array [layers, experts], or None for another value."""
    if not isinstance(value, list) or not value:
        return None
    try:
        loads = np.array(value, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        return None
    if loads.ndim != 2 or loads.size == 0 or not np.isfinite(loads).all():
        return None
    return loads


def _take_bytes(lines: Iterable[bytes], end: int | None) -> Iterator[bytes]:
    """Yield the lines that lie in the first `end` bytes. None: all of them."""
    read = 0
    for line in lines:
        read += len(line)
        if end is not None and read > end:
            return
        yield line


def _read_number(value: Any) -> float:
    """Return a value of the metrics file as a number. None and other values are nan."""
    # Most rows lack several values, and an exception takes longer than the rest.
    if value is None:
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def read_history(folder: Path, *, metrics_bytes: int | None = None) -> RunHistory:
    """Read the history of a run.

    Args:
        folder: The run's --save folder.
        metrics_bytes: Bytes of the metrics file to read. Default: all.

    Raises:
        DataError: The folder has neither metrics nor a chronicle.
        OSError: A file cannot be read.
    """
    reader = _MetricsReader()
    events = read_events(folder / CHRONICLE, reader.damaged)
    metrics = find_metrics_file(folder, events)
    if not events and not metrics.exists():
        raise DataError(
            f"{folder} has no metrics.jsonl and no {CHRONICLE}; give the --save folder of a run"
        )
    interventions = read_objects(folder / INTERVENTIONS, reader.damaged)
    # The parts that rollbacks removed come first, because they are older than the present file.
    for record in interventions:
        for part in _list_removed_parts(folder, record, "metrics"):
            reader.read(part, is_removed=True)
    if metrics.exists():
        reader.read(metrics, is_removed=False, end=metrics_bytes)
    columns = {name: np.array(values) for name, values in reader.columns.items()}
    # A stable sort keeps the order of rows with the same millisecond.
    order = np.argsort(columns["time"], kind="stable")
    columns = {name: values[order] for name, values in columns.items()}
    _add_losses_of_guard(columns, interventions)
    found = [_make_intervention_event(record) for record in interventions]
    events += [event for event in found if event is not None]
    predicted = read_predicted_loss(folder)
    events += list_departures(predicted, reader.evaluations)
    return RunHistory(
        folder,
        columns,
        _build_layer_columns(reader.layers, order),
        np.frombuffer(bytes(reader.kept), dtype=np.bool_)[order],
        reader.get_loads(),
        reader.evaluations,
        sorted(events, key=lambda event: event.time),
        sorted(reader.loop_starts),
        sorted(path.stat().st_mtime for path in folder.glob(_VERDICTS)),
        read_energy(_list_energy_tables(folder, events, interventions)),
        reader.damaged,
        predicted,
    )


def _build_layer_columns(
    layers: dict[str, dict[int, "array[float]"]], order: NDArray[np.int64]
) -> dict[str, LayerColumns]:
    """Return the statistics of layers, whose rows are moved to their place in the order of time."""
    places = np.argsort(order)
    built = {}
    for name, by_row in layers.items():
        # A row with another number of layers is no row of this model.
        count = max((len(values) for values in by_row.values()), default=0)
        rows = sorted(
            (row for row in by_row if len(by_row[row]) == count), key=lambda row: int(places[row])
        )
        if rows:
            values = np.array([by_row[row] for row in rows])
            built[name] = LayerColumns(places[rows], values)
    return built


def _add_losses_of_guard(columns: dict[str, Column], interventions: list[dict[str, Any]]) -> None:
    """Take the loss of a dropped step from the guard's record, if the metrics file lacks it.

    Earlier versions did not write it.
    """
    dropped = (columns["skipped_iterations"] > 0) & np.isnan(columns["dropped_loss"])
    for record in interventions:
        moment = parse_time(record.get("time"))
        if moment is None or record.get("dropped") is not True:
            continue
        rows = np.flatnonzero(dropped & (columns["iteration"] == record.get("iteration")))
        if rows.size:
            # After a rollback, another step may have the same number.
            distances = np.abs(columns["time"][rows] - moment.timestamp())
            columns["dropped_loss"][rows[np.argmin(distances)]] = _read_number(record.get("loss"))


def _list_energy_tables(
    folder: Path, events: list[Event], interventions: list[dict[str, Any]]
) -> list[Path]:
    """Return the tables of codecarbon that the starts name, and the parts that were removed."""
    found = []
    for event in events:
        directory = _read_setting(event, "--codecarbon-dir")
        if directory:
            found.append(Path(directory) / "emissions.csv")
    for record in interventions:
        found += _list_removed_parts(folder, record, "emissions")
    return list(dict.fromkeys(found))


def _read_setting(event: Event, flag: str) -> str | None:
    """Return a text of the settings of a start, or None if it was not given."""
    settings = event.details.get("settings")
    if event.kind != "start" or not isinstance(settings, dict):
        return None
    try:
        value = json.loads(settings.get(flag, "null"))
    except (TypeError, ValueError):
        return None
    return value if isinstance(value, str) else None


def find_metrics_file(folder: Path, events: list[Event]) -> Path:
    """Return the path of the metrics file, which the settings of the last start may name."""
    for event in reversed(events):
        if event.kind == "start":
            given = _read_setting(event, "--metrics-file")
            if given:
                return Path(given)
            break
    return folder / "metrics.jsonl"


def _list_removed_parts(folder: Path, record: dict[str, Any], kind: str) -> Iterator[Path]:
    """Yield the parts of the metrics file or the emissions that a rollback removed."""
    files = record.get("files")
    if not isinstance(files, list):
        return
    for file in files:
        if isinstance(file, dict) and file.get("kind") == kind:
            # Only names are used, so that no record leads out of the folder.
            parts = Path(str(record.get("parts"))).name
            path = folder / ROLLED_BACK / parts / Path(str(file.get("part"))).name
            if path.is_file():
                yield path


def _make_intervention_event(record: dict[str, Any]) -> Event | None:
    """Return the event of a line of `interventions.jsonl`, or None without a time."""
    moment = parse_time(record.get("time"))
    if moment is None:
        return None
    details = {
        name: record[name]
        for name in ("decision", "to", "skip", "lr", "dropped", "reason")
        if record.get(name)
    }
    iteration = record.get("trained_to", record.get("iteration"))
    if type(iteration) is not int:
        iteration = None
    return Event(moment, str(record.get("action")), iteration, details)

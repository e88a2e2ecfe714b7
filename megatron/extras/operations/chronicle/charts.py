"""The curves, marks and shaded ranges of a report.

Invariants:
- A curve has no line across iterations that it lacks, and none between two lineages or launches.
- The number of points does not depend on the number of iterations, because curves are downsampled.

`page.js` draws them, for each axis, scale and range.
"""

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron.base.plain_text import make_plain
from megatron.extras.operations.chronicle.events import DescribedEvent
from megatron.extras.operations.chronicle.goodput import list_launches
from megatron.extras.operations.chronicle.history import LAYER_FIELDS, Column, RunHistory
from megatron.extras.operations.chronicle.summary import list_skipped

POINTS = 1500
"""Largest number of points of a curve."""
_LAYERS = 8
"""Largest number of layers with a curve. They are spread evenly over the model."""
_LAYER_POINTS = POINTS // 5
"""Largest number of points of the curve of a layer."""
AXES = {
    "iteration": "iteration",
    "consumed_samples": "samples",
    "consumed_tokens": "tokens",
    "hours": "hours since the first start",
}
"""Column of the x axis -> its title."""
MEANS = (1, 10, 100, 1000)
"""Iterations over which a curve can be averaged. 1 is no average."""
_PANELS = {
    "lm_loss": "loss",
    "grad_norm": "gradient norm",
    "learning_rate": "learning rate",
    "global_batch_size": "batch size [samples]",
    "tokens_per_second": "tokens per second",
    "tflops": "TFLOPs per second of a device",
    "mfu": "MFU",
    "goodput": "goodput so far",
    "data_wait_seconds": "wait for data [s per iteration]",
    "energy": "energy [kWh]",
    "params_norm": "norm of the parameters",
    "loss_scale": "loss scale",
    "output_logit": "largest output logit",
    "largest_expert_load": "largest load of an expert [times the mean]",
    "smallest_expert_load": "smallest load of an expert [times the mean]",
    "expert_balancing_loss": "balancing loss of experts",
    "router_z_loss": "z-loss of routers",
    "router_entropy": "entropy of routers [nats]",
    **{name: f"layers: {title}" for name, title in LAYER_FIELDS.items()},
}
"""Column of a panel -> its title."""
_PERCENT = ("mfu", "goodput")
_SMOOTHED = (
    "lm_loss",
    "grad_norm",
    "tokens_per_second",
    "tflops",
    "mfu",
    "data_wait_seconds",
)
"""Panels whose curves are noisy. Evaluations and schedules are shown as they are."""
_LINES = ("launch", "continued", "rollback", "hang", "killed")
"""Events that have a line through all panels."""

WIDTH = 1000
LEFT = 88
RIGHT = 14
TOP = 6
BOTTOM = 20
_HEIGHT = 130
_LOSS_HEIGHT = 240
LANE = 17
"""Height of a row of events."""
LARGEST = 1e300
"""Larger numbers have no distances that a float can hold."""

Positions = dict[str, list[float | None]]
"""Axis -> positions on it."""


@dataclass(frozen=True)
class Curve:
    """One curve. A value of None is a gap."""

    name: str
    kind: str
    """kept, abandoned, evaluation or layer."""
    colour: int
    x: Positions
    y: dict[int, list[float | None]]
    """Iterations of the mean -> the values."""


@dataclass(frozen=True)
class Mark:
    """A single point with a text, such as a dropped step."""

    x: Positions
    y: float | None
    """Its value. None: the value is not finite, so it is at the upper edge."""
    text: str
    kind: str
    colour: int


@dataclass(frozen=True)
class Band:
    """A range of the x axis that is shaded in all panels."""

    x: Positions
    """The first and the last position."""
    kind: str
    """abandoned or skipped."""
    text: str


@dataclass
class Panel:
    """One chart."""

    key: str
    title: str
    height: int
    is_percent: bool
    curves: list[Curve] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)


@dataclass
class Charts:
    """Everything that is drawn for one run or several."""

    panels: list[Panel]
    constants: list[tuple[str, str]]
    """(title, text) of each quantity that never changes."""
    bands: list[Band]
    events: list[Mark]
    labels: list[str]
    """Labels of the events. Each has a row."""


def build_charts(
    histories: Sequence[RunHistory],
    names: Sequence[str],
    events: Sequence[Sequence[DescribedEvent]],
) -> Charts:
    """Return the charts of one run or of several that are compared.

    Args:
        histories: The runs.
        names: Their names, which differ.
        events: The events of each run that are shown.
    """
    panels = {
        key: Panel(key, title, _LOSS_HEIGHT if key == "lm_loss" else _HEIGHT, key in _PERCENT)
        for key, title in _PANELS.items()
    }
    labels = list(dict.fromkeys(each.label for of_run in events for each in of_run))
    charts = Charts([], [], [], [], labels)
    is_compared = len(histories) > 1
    for number, (history, described) in enumerate(zip(histories, events, strict=True)):
        # A run that ended before its first iteration has no curves.
        if not len(history.kept):
            continue
        prefix = f"{names[number]}: " if is_compared else ""
        run = _Run(history, number, prefix)
        for panel in panels.values():
            panel.curves += run.list_curves(panel.key)
        panels["lm_loss"].curves += run.list_evaluations(1 if is_compared else 2)
        panels["lm_loss"].curves += run.list_prediction()
        panels["lm_loss"].marks += run.list_dropped()
        charts.bands += run.list_bands()
        charts.events += run.list_events(described)
    for panel in panels.values():
        # A curve that never changes needs no panel.
        constant = _find_constant(panel)
        if constant is not None:
            charts.constants.append((panel.title, constant))
        elif panel.curves or panel.marks:
            charts.panels.append(panel)
    return charts


class _Run:
    """Builds the curves and marks of one run."""

    def __init__(self, history: RunHistory, number: int, prefix: str) -> None:
        self._history = history
        self._number = number
        self._prefix = prefix
        self._columns = _add_derived_columns(history)
        launches = [launch.begin for launch in list_launches(history)]
        self._launch = np.searchsorted(launches, history.columns["time"], side="right")
        """Launch of each row, [rows]."""

    def list_curves(self, key: str) -> Iterator[Curve]:
        """Yield the curves of a panel: of each lineage, or of each layer."""
        statistic = self._history.layers.get(key)
        if statistic is not None:
            count = statistic.values.shape[1]
            # A chart of a hundred layers could not be read.
            shown = np.unique(np.linspace(0, count - 1, min(_LAYERS, count)).round().astype(int))
            for colour, layer in enumerate(shown.tolist()):
                rows = statistic.rows[self._history.kept[statistic.rows]]
                of_layer = np.full(len(self._history.kept), np.nan)
                of_layer[statistic.rows] = statistic.values[:, layer]
                # Layers have colours of their own. Runs differ by their names.
                yield from self._build(
                    f"layer {layer}", "layer", colour, of_layer, rows, points=_LAYER_POINTS
                )
            return
        if key not in self._columns:
            return
        values = self._columns[key]
        kept = self._history.kept
        means = MEANS if key in _SMOOTHED else (1,)
        yield from self._build(
            "abandoned", "abandoned", self._number, values, np.flatnonzero(~kept)
        )
        yield from self._build(
            _PANELS[key], "kept", self._number, values, np.flatnonzero(kept), means
        )

    def _build(
        self,
        name: str,
        kind: str,
        colour: int,
        values: Column,
        rows: np.ndarray,
        means: Sequence[int] = (1,),
        points: int = POINTS,
    ) -> Iterator[Curve]:
        """Yield the curve of some rows, unless it has no value."""
        chosen = rows[select_points(values[rows], points)]
        if not len(chosen):
            return
        finite = rows[np.isfinite(values[rows])]
        stretch = np.zeros(len(values), np.int64)
        stretch[finite] = find_stretches(self._columns["iteration"][finite], self._launch[finite])
        # No line joins two stretches, because nothing was trained between them.
        gaps = np.flatnonzero(np.diff(stretch[chosen])) + 1
        y = {}
        for count in means:
            # A mean over more iterations than there are would be one point.
            if count > 1 and count > len(rows):
                continue
            mean = np.full(len(values), np.nan)
            # The mean is that of all iterations, not only of those that are drawn.
            mean[rows] = values[rows]
            if count > 1:
                mean[rows] = compute_running_mean(values[rows], count)
            y[count] = _list_with_gaps(mean[chosen], gaps)
        x = {axis: _list_with_gaps(self._columns[axis][chosen], gaps) for axis in AXES}
        yield Curve(f"{self._prefix}{name}", kind, colour, x, y)

    def _find(self, iterations: Sequence[float], times: Sequence[float]) -> Positions:
        """Return the position of iterations on each x axis, by the rows that were kept.

        Args:
            iterations: The iterations.
            times: When they happened, in seconds since the epoch. An iteration that was undone
                happened earlier than the kept one.
        """
        columns = self._columns
        rows = np.flatnonzero(self._history.kept)
        # If all iterations were undone, their own positions are the best that is known.
        if not rows.size:
            rows = np.arange(len(self._history.kept))
        known = columns["iteration"][rows]
        found: Positions = {
            axis: [shorten(value) for value in np.interp(iterations, known, columns[axis][rows])]
            for axis in AXES
        }
        found["iteration"] = [shorten(float(value)) for value in iterations]
        first = columns["time"][0] - 3600 * columns["hours"][0]
        found["hours"] = [shorten((time - first) / 3600) for time in times]
        return found

    def list_evaluations(self, colours: int) -> Iterator[Curve]:
        """Yield the curves of the evaluations. One run alone has other colours for them."""
        evaluations = self._history.evaluations
        names = list(dict.fromkeys(found.name for found in evaluations))
        for number, name in enumerate(names, 1):
            colour = self._number + number * (colours - 1)
            for is_kept in (True, False):
                found = [
                    each
                    for each in evaluations
                    if each.name == name and each.kept == is_kept and np.isfinite(each.loss)
                ]
                # Evaluations are smooth, so every n-th one is enough.
                found = found[:: 1 + len(found) // POINTS]
                if not found:
                    continue
                iterations = np.array([float(each.iteration) for each in found])
                times = [each.time for each in found]
                gaps = np.flatnonzero(np.diff(find_stretches(iterations))) + 1
                x = {
                    axis: _insert_gaps(values, gaps)
                    for axis, values in self._find(iterations.tolist(), times).items()
                }
                shown = f"{self._prefix}{make_plain(name)}"
                kind = "evaluation"
                if not is_kept:
                    shown += ", abandoned"
                    kind = "abandoned"
                yield Curve(
                    shown,
                    kind,
                    colour,
                    x,
                    {1: _list_with_gaps(np.array([each.loss for each in found]), gaps)},
                )

    def list_prediction(self) -> Iterator[Curve]:
        """Yield the range of the predicted loss, a line at the end of the run."""
        predicted = self._history.predicted
        if predicted is None:
            return
        last = predicted.iteration
        # The end of a run that still trains is known in iterations only.
        x: Positions = {axis: [None, None] for axis in AXES}
        if (self._columns["iteration"] >= last).any():
            x = self._find([last, last], [float(self._columns["time"][-1])] * 2)
        x["iteration"] = [float(last)] * 2
        yield Curve(
            f"{self._prefix}predicted", "evaluation", self._number + 1, x,
            {1: [shorten(predicted.low), shorten(predicted.high)]},
        )  # fmt: skip

    def list_dropped(self) -> Iterator[Mark]:
        """Yield a mark for each step whose update was not applied."""
        columns = self._columns
        rows = np.flatnonzero(columns["skipped_iterations"] > 0)
        losses = columns["dropped_loss"]
        chosen = rows[select_points(np.nan_to_num(losses[rows]), POINTS)]
        for row in chosen.tolist():
            loss = shorten(losses[row])
            text = f"{self._prefix}dropped step {int(columns['iteration'][row]):,}"
            if loss is not None:
                text += f", loss {loss:.6g}"
            x: Positions = {axis: [shorten(columns[axis][row])] for axis in AXES}
            yield Mark(x, loss, text, "dropped", self._number)

    def list_bands(self) -> Iterator[Band]:
        """Yield the ranges of abandoned and of skipped iterations."""
        columns = self._columns
        rows = np.flatnonzero(~self._history.kept)
        stretches = find_stretches(columns["iteration"][rows], self._launch[rows])
        for number in np.unique(stretches)[-POINTS:].tolist():
            of_band = rows[stretches == number]
            ends = of_band[[0, -1]]
            x = {axis: [shorten(value) for value in columns[axis][ends]] for axis in AXES}
            first, last = columns["iteration"][ends].astype(int).tolist()
            text = f"{self._prefix}iterations {first:,} to {last:,} were abandoned"
            yield Band(x, "abandoned", text)
        known = columns["iteration"][self._history.kept]
        times = columns["time"][self._history.kept]
        for first, last in list_skipped(self._history)[-POINTS:]:
            # No step of the range was trained, so it begins after the row before it.
            time = float(np.interp(first, known, times)) if known.size else columns["time"][0]
            text = f"{self._prefix}iterations {first:,} to {last:,} were skipped"
            yield Band(self._find([first, last], [time, time]), "skipped", text)

    def list_events(self, described: Sequence[DescribedEvent]) -> Iterator[Mark]:
        """Yield a mark for each event. The iteration of a note is the last one before it."""
        columns = self._columns
        times = [each.event.time.timestamp() for each in described]
        last = np.interp(times, columns["time"], columns["iteration"]).tolist()
        iterations = [
            at if each.event.iteration is None else each.event.iteration
            for each, at in zip(described, last, strict=True)
        ]
        found = self._find(iterations, times)
        for number, each in enumerate(described):
            x = {axis: [positions[number]] for axis, positions in found.items()}
            text = f"{self._prefix}{each.label}: {each.text}"[:300]
            yield Mark(x, None, text, each.label, self._number)


def _add_derived_columns(history: RunHistory) -> dict[str, Column]:
    """Return the columns, and with them the hours since the first start and the goodput so far."""
    columns = dict(history.columns)
    times = columns["time"]
    first = min([*times[:1], *(event.time.timestamp() for event in history.events)], default=0.0)
    columns["hours"] = (times - first) / 3600
    steps = np.where(history.kept, np.nan_to_num(columns["seconds"]), 0.0)
    columns["goodput"] = np.cumsum(steps) / np.maximum(times - first, 1e-9)
    # The clock of the first step began before the first record of a run without a chronicle.
    columns["goodput"] = np.minimum(columns["goodput"], 1.0)
    if history.energy is not None:
        # codecarbon writes a row at each save. Nothing is known before the first one.
        columns["energy"] = np.interp(
            times, history.energy.times, history.energy.kilowatt_hours, left=np.nan, right=np.nan
        )
    return columns


def find_stretches(iterations: Column, launches: np.ndarray | None = None) -> np.ndarray:
    """Return the number of the stretch of each row, [n]. A curve is cut between two stretches.

    A stretch ends where the iterations go back, where some are missing, and with a launch.

    Args:
        iterations: The iterations of the rows that have a value, [n].
        launches: The launch of each row, [n]. None: all have the same.
    """
    if not len(iterations):
        return np.zeros(0, np.int64)
    steps = np.diff(iterations)
    forward = steps[steps > 0]
    # Statistics and evaluations are not in each iteration.
    usual = float(np.median(forward)) if forward.size else 1.0
    is_cut = (steps <= 0) | (steps > 1.5 * usual)
    if launches is not None:
        is_cut |= np.diff(launches) != 0
    return np.concatenate([[0], np.cumsum(is_cut)])


def compute_running_mean(values: Column, count: int) -> Column:
    """Return the mean of each value and the `count - 1` values before it. nan is left out.

    The first means have fewer values. A mean without any finite value is nan.

    Args:
        values: The values of a curve, [n].
        count: Number of values of a mean, at least 1.
    """
    finite = np.isfinite(values)
    # The level is subtracted, so that the sum over a long curve loses no digits.
    level = float(np.mean(values[finite])) if finite.any() else 0.0
    sums = np.cumsum(np.where(finite, values - level, 0.0))
    counts = np.cumsum(finite).astype(np.float64)
    for total in (sums, counts):
        total[count:] -= total[:-count].copy()
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(level + sums / counts)


def select_points(values: Column, points: int = POINTS) -> np.ndarray:
    """Return the positions of at most `points` finite values, in order.

    Each stretch of a long curve keeps its smallest and its largest value, so no spike disappears.

    Args:
        values: The values of a curve, [n].
        points: Largest number of positions.
    """
    finite = np.flatnonzero(np.isfinite(values))
    if len(finite) <= points:
        return finite
    # Two points are taken from each stretch.
    stretches = np.array_split(finite, points // 2)
    chosen = [
        stretch[pick(values[stretch])] for stretch in stretches for pick in (np.argmin, np.argmax)
    ]
    return np.unique(chosen)


def _list_with_gaps(values: Column, gaps: np.ndarray) -> list[float | None]:
    """Return values as a list, with None before each position in `gaps`."""
    return _insert_gaps([shorten(value) for value in values.tolist()], gaps)


def _insert_gaps(shown: list[float | None], gaps: np.ndarray) -> list[float | None]:
    for position in reversed(gaps.tolist()):
        shown.insert(position, None)
    return shown


def shorten(value: float) -> float | None:
    """Return a number with the digits that a screen shows. Counters stay exact."""
    if not np.isfinite(value):
        return None
    # Larger ones are no counters, and JSON libraries refuse integers beyond 64 bits.
    if float(value).is_integer() and abs(value) < 1 << 53:
        return int(value)
    return float(f"{value:.7g}")


def _find_constant(panel: Panel) -> str | None:
    """Return the value of each run as text, if no curve of the panel changes."""
    if panel.marks or not panel.curves:
        return None
    texts = {}
    for curve in panel.curves:
        values = {value for value in curve.y[1] if value is not None}
        if len(values) != 1 or curve.kind == "layer":
            return None
        (value,) = values
        name, colon, _ = curve.name.rpartition(": ")
        texts[f"{name}{colon}"] = format_number(value, is_percent=panel.is_percent)
    return ", ".join(f"{name}{text}" for name, text in texts.items())


def format_number(value: float, *, is_percent: bool = False) -> str:
    """Return a number with the digits that a reader needs."""
    if is_percent:
        return f"{100 * value:.4g} %"
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.4g}"
    if float(value).is_integer():
        return f"{value:,.10g}"
    return f"{value:.4g}"


# Drawing


def draw_charts(charts: Charts) -> str:
    """Return the charts as HTML with SVG. `page.js` places everything in them."""
    drawn = [_draw_panel(number, panel, charts) for number, panel in enumerate(charts.panels)]
    if charts.events:
        drawn.insert(1, _draw_events(charts))
    return "\n".join(drawn)


def _draw_panel(number: int, panel: Panel, charts: Charts) -> str:
    bottom = panel.height - BOTTOM
    curves = "".join(f'<path class="{curve.kind} c{curve.colour % 8}"/>' for curve in panel.curves)
    marks = "".join(
        f'<path class="dropped c{mark.colour % 8}" d="M-4-4L4 4M-4 4L4-4">'
        f"<title>{html.escape(mark.text)}</title></path>"
        for mark in panel.marks
    )
    # Only the colours of layers differ within a panel.
    layers = {c.colour: c.name.rpartition(": ")[2] for c in panel.curves if c.kind == "layer"}
    keys = "".join(f'<span class="key c{colour}">{name}</span>' for colour, name in layers.items())
    return (
        f'<figure data-panel="{number}"><figcaption>{html.escape(panel.title)}{keys}'
        f'<span class="values"></span></figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {panel.height}" role="img" '
        f'aria-label="{html.escape(panel.title)} by iteration">'
        f'<clipPath id="clip{number}"><rect x="{LEFT}" y="0" width="{WIDTH - LEFT - RIGHT}" '
        f'height="{bottom + 1}"/></clipPath><g class="grid"></g>'
        f'<g clip-path="url(#clip{number})">{_draw_background(charts, bottom)}'
        f'<g class="curves">{curves}</g></g><g class="marks">{marks}</g>'
        f'<line class="cursor" y1="0" y2="{bottom}" x1="-9" x2="-9"/></svg></figure>'
    )


def _draw_events(charts: Charts) -> str:
    """Return the rows of events, one for each label."""
    height = LANE * len(charts.labels) + BOTTOM
    names = "".join(
        f'<text x="{LEFT - 9}" y="{LANE * row + 12}" class="y">{html.escape(label[:13])}</text>'
        for row, label in enumerate(charts.labels)
    )
    marks = "".join(
        f'<circle class="event c{mark.colour % 8} {_get_class(mark.kind)}" r="4.5">'
        f"<title>{html.escape(mark.text)}</title></circle>"
        for mark in charts.events
    )
    return (
        '<figure data-panel="events"><figcaption>events<span class="values"></span></figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="events by iteration">'
        f'<g class="grid">{names}</g>{_draw_background(charts, height - BOTTOM)}'
        f'<g class="marks">{marks}</g>'
        f'<line class="cursor" y1="0" y2="{height - BOTTOM}" x1="-9" x2="-9"/></svg></figure>'
    )


def _get_class(label: str) -> str:
    """Return the class of a label. Foreign labels have none."""
    if label.isalpha() and label.isascii():
        return label
    return ""


def _draw_background(charts: Charts, bottom: float) -> str:
    """Return the shaded ranges, and the lines of launches and rollbacks."""
    bands = "".join(
        f'<rect class="{band.kind}" y="0" height="{bottom}"><title>{html.escape(band.text)}</title>'
        "</rect>"
        for band in charts.bands
    )
    lines = "".join(
        f'<line class="{mark.kind}" y1="0" y2="{bottom}"/>' for mark in list_lines(charts)
    )
    return f'<g class="bands">{bands}</g><g class="lines">{lines}</g>'


def list_lines(charts: Charts) -> list[Mark]:
    """Return the events that have a line through all panels."""
    return [mark for mark in charts.events if mark.kind in _LINES]

"""The report of one run or several as a page with charts, by plotly.

Invariants:
- The page is one file. Its content-security policy forbids every request to a network.
- Text from a run is escaped. No text of a note, an error or a setting becomes HTML or a script.
- Its size does not depend on the number of iterations, because each curve is downsampled.
"""

import html
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron.durable import replace_file
from megatron.errors import ConfigError
from megatron.observe.chronicle import Event
from megatron.operations.chronicle.goodput import compute_goodput
from megatron.operations.chronicle.history import Column, RunHistory
from megatron.operations.chronicle.summary import describe_events, list_facts, list_goodput
from megatron.schedule.clock import format_duration

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

POINTS = 1500
"""Largest number of points of a curve."""
_EVENTS = 300
"""Largest number of events of one kind, so that many saves or alerts hide no rollback."""
_SYMBOLS = {
    "start": "triangle-right-open",
    "stop": "square-open",
    "save": "line-ns-open",
    "rollback": "x-thin-open",
    "alert": "triangle-up-open",
    "note": "circle-open",
}
"""Kind of an event -> its marker. All other kinds are diamonds."""
_PANELS = {
    "lm_loss": "loss",
    "grad_norm": "gradient norm",
    "learning_rate": "learning rate",
    "global_batch_size": "batch size",
    "tokens_per_second": "tokens/s",
    "tflops": "TFLOPs of a device",
    "mfu": "MFU",
    "goodput": "goodput",
    "energy": "energy [kWh]",
}
"""Column of a panel -> its title."""
_TICKS = {
    "learning_rate": {"exponentformat": "e"},
    # A constant batch size would otherwise have ticks between two integers.
    "global_batch_size": {"tickformat": ",d", "rangemode": "tozero"},
    "mfu": {"tickformat": ".1%"},
    "goodput": {"tickformat": ".0%"},
}
"""Column of a panel -> how its axis shows numbers, if not as plotly does by itself."""
_AXES = {
    "iteration": "iterations",
    "consumed_samples": "samples",
    "consumed_tokens": "tokens",
    "hours": "hours since the first start",
}
"""Column of the x axis -> its title."""
_COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#17becf")
_SMOOTHED = ("lm_loss", "grad_norm", "tokens_per_second", "tflops", "mfu")
"""Panels whose curves are noisy. Evaluations and schedules are shown as they are."""
_SMOOTHING = (1, 10, 100, 1000)
"""Choices of the slider: iterations of the mean. 1 is no smoothing."""
_FAINT = 0.3
"""Opacity of an abandoned lineage."""
_INTERVENTIONS = "events"
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)
_STYLE = (
    "body{font-family:sans-serif;margin:1em auto;max-width:1200px}"
    "table{border-collapse:collapse}td,th{padding:2px 10px 2px 0;text-align:left;"
    "vertical-align:top;overflow-wrap:anywhere}"
    ".bar{background:#1f77b4;height:0.8em}"
)


@dataclass(frozen=True)
class _Trace:
    """One curve or one set of markers. Its x values are known for each axis."""

    panel: str
    name: str
    x: dict[str, list[float | None]]
    y: list[float | None]
    style: dict[str, Any]
    smoothed: dict[int, list[float | None]] = field(default_factory=dict)
    """Iterations of the mean -> the y values. It is empty for a curve that is not smoothed."""


def write_page(histories: Sequence[RunHistory], path: Path) -> None:
    """Write the page of one run or of several that are compared.

    Raises:
        ConfigError: plotly is not installed.
        OSError: The page cannot be written.
    """
    text = build_page(histories)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text)


def build_page(histories: Sequence[RunHistory]) -> str:
    """Return the page as HTML.

    Raises:
        ConfigError: plotly is not installed.
    """
    names = [str(history.folder) for history in histories]
    # A file that was edited may have numbers whose sums are infinite. They are left out.
    with np.errstate(over="ignore", invalid="ignore"):
        figure = _draw(histories)
    charts = figure.to_html(
        # The page has its own head, with the policy that forbids requests.
        full_html=False,
        include_plotlyjs=True,
        div_id="charts",
        config={
            "displaylogo": False,
            "responsive": True,
            # This button would send the charts to a server of plotly.
            "modeBarButtonsToRemove": ["sendChartToCloud"],
            "plotlyServerURL": "",
        },
    )
    title = html.escape(f"Report of {', '.join(names)}")
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        f"<title>{title}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{title}</h1>",
        charts,
        *map(_format_tables, histories),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _draw(histories: Sequence[RunHistory]) -> "Figure":
    try:
        from plotly.graph_objects import Scatter
        from plotly.subplots import make_subplots
    except ImportError as error:
        raise ConfigError(
            f"a page needs the package plotly ({error}): pip install 'plotly>=7.1'. "
            "Without --html, the report is text"
        ) from error
    traces = [
        trace
        for number, history in enumerate(histories)
        for trace in _list_traces(history, _COLOURS[number % len(_COLOURS)])
    ]
    # A panel without values, such as MFU on a CPU, is left out.
    panels = [panel for panel in _PANELS if any(trace.panel == panel for trace in traces)]
    figure = make_subplots(
        rows=max(1, len(panels)), cols=1, shared_xaxes=True, vertical_spacing=0.02
    )
    for trace in traces:
        row = panels.index(trace.panel) + 1
        figure.add_trace(
            Scatter(name=trace.name, x=trace.x["iteration"], y=trace.y, **trace.style),
            row=row,
            col=1,
        )
    for number, panel in enumerate(panels, 1):
        figure.update_yaxes(title_text=_PANELS[panel], **_TICKS.get(panel, {}), row=number, col=1)
    last = f"xaxis{len(panels) if len(panels) > 1 else ''}"
    buttons = [
        {
            "label": title.partition(" ")[0],
            "method": "update",
            "args": [{"x": [trace.x[axis] for trace in traces]}, {f"{last}.title.text": title}],
        }
        for axis, title in _AXES.items()
    ]
    figure.update_layout(
        {f"{last}_title_text": _AXES["iteration"]},
        height=200 * max(2, len(panels)),
        template="plotly_white",
        margin={"t": 60, "r": 20},
        legend={"orientation": "h", "x": 1, "xanchor": "right", "y": 1.01, "yanchor": "bottom"},
        updatemenus=[
            {
                "buttons": buttons,
                "type": "buttons",
                "direction": "right",
                "x": 0,
                # Otherwise the buttons would be left of the charts, and make these narrower.
                "xanchor": "left",
                "y": 1.01,
                "yanchor": "bottom",
            }
        ],
        sliders=[_build_smoothing_slider(traces)],
    )
    return figure


def _build_smoothing_slider(traces: Sequence[_Trace]) -> dict[str, Any]:
    """Return the slider that chooses over how many iterations the curves are averaged."""
    numbers = [number for number, trace in enumerate(traces) if trace.smoothed]
    steps = [
        {
            "label": "off" if count == 1 else f"{count:,}",
            "method": "restyle",
            "args": [{"y": [traces[number].smoothed[count] for number in numbers]}, numbers],
        }
        for count in _SMOOTHING
    ]
    return {
        "steps": steps,
        "currentvalue": {"prefix": "smoothing (mean of iterations): "},
        # It is below the charts and the title of their x axis.
        "pad": {"t": 60},
        # Otherwise the label of the last step would be outside of the page.
        "len": 0.95,
    }


def _list_traces(history: RunHistory, colour: str) -> Iterator[_Trace]:
    """Yield the curves of a run, its evaluations, and the markers of its events."""
    run = html.escape(history.folder.name)
    columns = _add_derived_columns(history)
    kept = history.kept
    for panel in _PANELS:
        values = columns[panel]
        for rows, is_kept in ((np.flatnonzero(kept), True), (np.flatnonzero(~kept), False)):
            chosen = rows[select_points(values[rows])]
            if not len(chosen):
                continue
            name = f"{run}: {_PANELS[panel]}" if is_kept else f"{run}: abandoned"
            smoothed = {}
            if is_kept and panel in _SMOOTHED:
                # The mean is that of all iterations, not only of those that are drawn.
                for count in _SMOOTHING:
                    means = np.full_like(values, np.nan)
                    means[rows] = compute_running_mean(values[rows], count)
                    smoothed[count] = _list_with_gaps(columns, means, chosen)
            yield _Trace(
                panel,
                name,
                {axis: _list_with_gaps(columns, columns[axis], chosen) for axis in _AXES},
                _list_with_gaps(columns, values, chosen),
                {
                    "mode": "lines",
                    "line": {"color": colour, "width": 1.2},
                    "opacity": 1.0 if is_kept else _FAINT,
                    "showlegend": is_kept and panel == "lm_loss",
                },
                smoothed,
            )
    if kept.any():
        yield from _list_evaluation_traces(history, columns, colour, run)
        yield from _list_event_traces(history, columns, colour, run)


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
    columns["energy"] = np.full(len(times), np.nan)
    if history.energy is not None:
        # codecarbon writes a row at each save. Nothing is known before the first one.
        columns["energy"] = np.interp(
            times, history.energy.times, history.energy.kilowatt_hours, left=np.nan, right=np.nan
        )
    return columns


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


def select_points(values: Column) -> np.ndarray:
    """Return the positions of at most `POINTS` finite values, in order.

    Each stretch of a long curve keeps its smallest and its largest value, so no spike disappears.

    Args:
        values: The values of a curve, [n].
    """
    finite = np.flatnonzero(np.isfinite(values))
    if len(finite) <= POINTS:
        return finite
    # Two points are taken from each stretch.
    stretches = np.array_split(finite, POINTS // 2)
    chosen = [
        stretch[pick(values[stretch])] for stretch in stretches for pick in (np.argmin, np.argmax)
    ]
    return np.unique(chosen)


def _list_with_gaps(columns: dict[str, Column], values: Column, rows: np.ndarray) -> list[Any]:
    """Return the values of rows as a list, with None where the iterations go back.

    The chart then has no line between two branches.
    """
    iterations = columns["iteration"][rows]
    # Seven digits suffice on a screen. Counters stay exact.
    shown: list[Any] = [_shorten(value) for value in values[rows].tolist()]
    for position in reversed(np.flatnonzero(np.diff(iterations) <= 0) + 1):
        shown.insert(int(position), None)
    return shown


def _shorten(value: float) -> float | None:
    if not np.isfinite(value):
        return None
    # Larger ones are no counters, and JSON libraries refuse integers beyond 64 bits.
    if value.is_integer() and abs(value) < 1 << 53:
        return int(value)
    return float(f"{value:.7g}")


def _find_on_axes(
    columns: dict[str, Column],
    kept: np.ndarray,
    iterations: Sequence[float],
    times: Sequence[float],
) -> dict[str, list[float | None]]:
    """Return the position of iterations on each x axis, by the rows that were kept.

    Args:
        columns: The columns of the run.
        kept: Which rows were kept.
        iterations: The iterations.
        times: When they happened, in seconds since the epoch. An iteration that was undone
            happened earlier than the kept one.
    """
    known = columns["iteration"][kept]
    found = {
        axis: [_shorten(value) for value in np.interp(iterations, known, columns[axis][kept])]
        for axis in _AXES
    }
    first = columns["time"][0] - 3600 * columns["hours"][0]
    return {**found, "hours": [_shorten((time - first) / 3600) for time in times]}


def _list_evaluation_traces(
    history: RunHistory, columns: dict[str, Column], colour: str, run: str
) -> Iterator[_Trace]:
    names = list(dict.fromkeys(found.name for found in history.evaluations))
    for name in names:
        for is_kept in (True, False):
            found = [
                each
                for each in history.evaluations
                if each.name == name and each.kept == is_kept and np.isfinite(each.loss)
            ]
            # Evaluations are smooth, so every n-th one is enough.
            found = found[:: 1 + len(found) // POINTS]
            if not found:
                continue
            yield _Trace(
                "lm_loss",
                f"{run}: {html.escape(name)}" + ("" if is_kept else " (abandoned)"),
                _find_on_axes(
                    columns,
                    history.kept,
                    [each.iteration for each in found],
                    [each.time for each in found],
                ),
                [_shorten(each.loss) for each in found],
                {
                    "mode": "lines+markers" if is_kept else "markers",
                    "line": {"color": colour, "dash": "dot"},
                    "marker": {"size": 5},
                    "opacity": 1.0 if is_kept else _FAINT,
                    "showlegend": is_kept,
                },
            )


def _list_event_traces(
    history: RunHistory, columns: dict[str, Column], colour: str, run: str
) -> Iterator[_Trace]:
    """Yield the markers of the events, on the curve of the training loss."""
    described, _ = _limit_by_kind(describe_events(history))
    kept = history.kept & np.isfinite(columns["lm_loss"])
    if not described or not kept.any():
        return
    times = columns["time"]
    # The iteration of a note is the last one before it.
    iterations = [
        float(np.interp(event.time.timestamp(), times, columns["iteration"]))
        if event.iteration is None
        else float(event.iteration)
        for event, _ in described
    ]
    losses = np.interp(iterations, columns["iteration"][kept], columns["lm_loss"][kept])
    yield _Trace(
        "lm_loss",
        f"{run}: {_INTERVENTIONS}",
        _find_on_axes(
            columns, kept, iterations, [event.time.timestamp() for event, _ in described]
        ),
        [_shorten(loss) for loss in losses],
        {
            "mode": "markers",
            "marker": {
                "color": colour,
                "size": 10,
                "symbol": [_SYMBOLS.get(event.kind, "diamond-open") for event, _ in described],
            },
            "text": [html.escape(f"{event.kind}: {text}"[:300]) for event, text in described],
            "hoverinfo": "text",
        },
    )


def _limit_by_kind(
    described: Sequence[tuple[Event, str]],
) -> tuple[list[tuple[Event, str]], dict[str, int]]:
    """Return the last events of each kind, in order, and how many of each kind are left out."""
    left_out = Counter(event.kind for event, _ in described)
    left_out = Counter({kind: count - _EVENTS for kind, count in left_out.items()})
    seen: Counter[str] = Counter()
    chosen = []
    for event, text in described:
        seen[event.kind] += 1
        if seen[event.kind] > left_out[event.kind]:
            chosen.append((event, text))
    return chosen, {kind: count for kind, count in left_out.items() if count > 0}


def _format_tables(history: RunHistory) -> str:
    """Return the tables of a run: what it is, where its time went, what happened."""
    goodput = compute_goodput(history)
    facts = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>"
        for name, value in list_facts(history)
    )
    causes = "".join(
        f"<tr><th>{html.escape(cause)}</th><td>{share:.1%}</td><td>{seconds:,.1f} s</td>"
        f'<td><div class="bar" style="width:{300 * share:.0f}px"></div></td></tr>'
        for cause, seconds, share in list_goodput(history)
    )
    described, left_out = _limit_by_kind(describe_events(history))
    events = "".join(
        f"<tr><td>{event.time.isoformat(sep=' ', timespec='seconds')}</td>"
        f"<td>{'' if event.iteration is None else f'{event.iteration:,}'}</td>"
        f"<td>{html.escape(event.kind)}</td><td>{html.escape(text)}</td></tr>"
        for event, text in described
    )
    shortened = "".join(
        f"<p>{count:,} earlier events of the kind {html.escape(kind)} are left out.</p>"
        for kind, count in left_out.items()
    )
    return (
        f"<h2>{html.escape(str(history.folder))}</h2><table>{facts}</table>"
        f"<h3>Goodput {goodput.share:.1%} of {format_duration(goodput.wall_seconds)}</h3>"
        f"<table>{causes}</table>"
        f"<h3>Events</h3>{shortened}<table><tr><th>time</th><th>iteration</th><th>kind</th>"
        f"<th>details</th></tr>{events}</table>"
    )

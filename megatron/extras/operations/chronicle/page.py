"""The report of one run or several as a page with charts.

Invariants:
- The page is one file. Its content-security policy forbids every request to a network, and every
  script but that of the page, whose digest it names.
- Text from a run is escaped. No text of a note, an error or a setting becomes HTML or a script.
- Its size does not depend on the number of iterations, because each curve is downsampled.
- Without a script, the page has the same charts and tables. Only what needs a reader's input, such
  as the search and the other axes, is missing.
"""

import base64
import hashlib
import html
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from urllib.parse import quote

import numpy as np

from megatron.base.durable import replace_file
from megatron.base.plain_text import make_plain
from megatron.extras.operations.chronicle import charts, summary
from megatron.extras.operations.chronicle.events import (
    DescribedEvent,
    compare_settings,
    describe_events,
    is_important,
    read_setting,
)
from megatron.extras.operations.chronicle.goodput import KEPT, compute_goodput
from megatron.extras.operations.chronicle.history import ExpertLoads, RunHistory
from megatron.schedule.clock import format_duration

_EVENTS = 300
"""Largest number of events of one kind, so that many saves or alerts hide no rollback."""
_IMPORTANT = 12
"""Largest number of events above the charts."""
_QUIET = ("checkpoint",)
"""Events that are frequent and expected. A reader has to ask for them."""
_HELP = "Point at a chart to read its values. Drag to enlarge a range."
_LINE = '<line class="c{}" x2="26" y1="6" y2="6" stroke-width="{}"/>'
_LEGEND = (
    (
        '<rect class="abandoned" width="26" height="12"/>'
        '<line class="c0" x2="26" y1="6" y2="6" stroke-dasharray="4 2" opacity="0.5"/>',
        "abandoned: lost by a kill, or undone by a rollback; a solid line there was trained again",
    ),
    ('<rect class="skipped" width="26" height="12"/>', "skipped: these data were not trained"),
    (
        '<path class="dropped" d="M9 2L17 10M9 10L17 2"/>',
        "dropped step: its loss, without an update",
    ),
)
_COMMON_NAMES = frozenset(
    ("checkpoint", "checkpoints", "ckpt", "ckpts", "model", "models", "output", "outputs", "save")
)
"""Names of --save folders that many runs share."""


def write_page(histories: Sequence[RunHistory], path: Path) -> None:
    """Write the page of one run or of several that are compared.

    Raises:
        OSError: The page cannot be written.
    """
    text = build_page(histories)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text)


def build_page(histories: Sequence[RunHistory]) -> str:
    """Return the page as HTML."""
    folder = files(__package__)
    style = (folder / "page.css").read_text(encoding="utf-8")
    script = (folder / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'"
    names = name_runs(histories)
    # A file that was edited may have numbers whose sums are infinite. They are left out.
    with np.errstate(over="ignore", invalid="ignore"):
        shown = [_limit_by_label(describe_events(history)) for history in histories]
        drawn = charts.build_charts(histories, names, [events for events, _ in shown])
        body = [
            *(
                part
                for history, name, (events, _) in zip(histories, names, shown, strict=True)
                for part in _list_summary(history, name, events, is_compared=len(names) > 1)
            ),
            *_list_differences(histories, names),
            _format_charts(drawn, names),
            *(
                # What happened, where the time went, what the run is, and its settings.
                f"<section><h2>{html.escape(name)}</h2>"
                f"{_format_events(events, left_out)}{_format_goodput(history)}"
                f"{draw_loads(history.expert_loads)}"
                f"{_format_facts(history)}{_format_settings(history, name)}</section>"
                for history, name, (events, left_out) in zip(histories, names, shown, strict=True)
            ),
        ]
    title = html.escape(f"Report of {', '.join(names)}")
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title><style>{style}</style></head><body>",
        f"<h1>{title}</h1>",
        *body,
        f'<script type="application/json" id="data">{_format_data(drawn)}</script>',
        f"<script>{script}</script>",
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def name_runs(histories: Sequence[RunHistory]) -> list[str]:
    """Return the name of each run, with as many folders above it as make the names differ."""
    folders = [history.folder.absolute().parts for history in histories]
    parts = list(map(_leave_out_common_names, folders))
    if len(set(parts)) < len(set(folders)):
        parts = folders
    longest = max(map(len, parts), default=1)
    for count in range(1, longest + 1):
        names = [make_plain("/".join(each[-count:])) for each in parts]
        if len(set(names)) == len(set(parts)):
            break
    return names


def _leave_out_common_names(parts: tuple[str, ...]) -> tuple[str, ...]:
    """Return the parts of a --save folder up to the one that names the run."""
    while len(parts) > 2 and parts[-1].lower() in _COMMON_NAMES:
        parts = parts[:-1]
    return parts


def _format_data(drawn: charts.Charts) -> str:
    """Return what the script needs as JSON."""
    layout = {
        "left": charts.LEFT,
        "right": charts.RIGHT,
        "width": charts.WIDTH,
        "top": charts.TOP,
        "bottom": charts.BOTTOM,
        "lane": charts.LANE,
        "largest": charts.LARGEST,
        "axes": charts.AXES,
    }
    lines = charts.list_lines(drawn)
    data = {"layout": layout, "lines": lines, **vars(drawn)}
    text = json.dumps(data, default=vars, allow_nan=False, separators=(",", ":"))
    # No text of a run may end the element.
    return text.replace("<", "\\u003c")


def _list_summary(
    history: RunHistory, name: str, events: Sequence[DescribedEvent], *, is_compared: bool
) -> Iterable[str]:
    """Yield what happened to a run, when, what it cost, and with which model."""
    if is_compared:
        yield f"<h2>{html.escape(name)}</h2>"
    yield f'<p class="path">{html.escape(make_plain(history.folder))}</p>'
    yield from (f"<p>{html.escape(each)}</p>" for each in summary.describe_outcome(history))
    model = summary.describe_model(history)
    if model:
        yield (
            f"<p>Trained with {html.escape(model)}. "
            f'<a href="#{_make_anchor(name)}">All settings</a></p>'
        )
    tiles = "".join(
        f'<div class="tile{" bad" * tile.is_bad}"><span class="name">'
        f"{html.escape(tile.name)}</span><b>{html.escape(tile.value)}</b>"
        f'<span class="note">{html.escape(tile.note)}</span></div>'
        for tile in summary.list_tiles(history)
    )
    yield f'<div class="tiles">{tiles}</div>'
    # The table of all events is long, and most of them are checkpoints.
    important = [each for each in events if is_important(each)]
    if important:
        yield "<h3>The most important events</h3>"
        if len(important) > _IMPORTANT:
            yield f"<p>{len(important) - _IMPORTANT:,} earlier ones are in the table below.</p>"
        yield _format_event_table(important[-_IMPORTANT:])


def _list_differences(histories: Sequence[RunHistory], names: Sequence[str]) -> Iterable[str]:
    """Yield the table of the settings in which the runs differ."""
    if len(histories) < 2:
        return
    launches = [_list_launch_settings(history) for history in histories]
    yield "<h2>Settings in which the runs differ</h2>"
    # Runs of older versions did not record them.
    if not all(launches):
        yield "<p>A run has no record of its settings.</p>"
        return
    yield _format_comparison(names, [of_run[-1][1] for of_run in launches])


def _list_launch_settings(history: RunHistory) -> list[tuple[str, dict[str, object]]]:
    """Return (name, settings) of each launch that recorded them."""
    found: list[tuple[str, dict[str, object]]] = []
    for event in history.events:
        settings = event.details.get("settings")
        if event.kind == "start" and isinstance(settings, dict):
            name = f"launch {len(found) + 1}, {event.time:%Y-%m-%d %H:%M}"
            # A rollback by the spike guard starts the loop again with the same settings.
            if not found or found[-1][1] != settings:
                found.append((name, settings))
    return found


def _format_comparison(names: Sequence[str], settings: Sequence[object]) -> str:
    differing = compare_settings(settings)
    if not differing:
        return "<p>All settings are equal.</p>"
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    rows = "".join(
        f"<tr><td><code>{html.escape(flag)}</code></td>{''.join(map(_format_setting, values))}</tr>"
        for flag, values in differing.items()
    )
    return f"<table><thead><tr><th>setting</th>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _format_setting(value: str | None) -> str:
    if value is None:
        return '<td class="default">default</td>'
    return f"<td>{html.escape(value)}</td>"


def _format_charts(drawn: charts.Charts, names: Sequence[str]) -> str:
    is_empty = not drawn.panels and not drawn.constants
    axes = "".join(
        f'<option value="{axis}">{title}</option>' for axis, title in charts.AXES.items()
    )
    means = '<option value="1">off</option>' + "".join(
        f'<option value="{count}">mean of {count:,} iterations</option>'
        for count in charts.MEANS
        if count > 1
    )
    # Runs that are compared have one colour each. Evaluations are the thick lines.
    colours = [(_LINE.format(0, 2), "training"), (_LINE.format(1, 3), "evaluation")]
    if len(names) > 1:
        colours = [(_LINE.format(n % 8, 2), name) for n, name in enumerate(names)]
    legend = "".join(
        f'<span><svg viewBox="0 0 26 12">{drawing}</svg>{html.escape(text)}</span>'
        for drawing, text in (*colours, *_LEGEND)
    )
    constants = "".join(
        f"<p><b>{html.escape(title)}:</b> {html.escape(text)} in all iterations</p>"
        for title, text in drawn.constants
    )
    return (
        f"<h2>Charts</h2>{'<p>No iteration was recorded.</p>' * is_empty}"
        f'<div id="controls"{" hidden" * is_empty}>'
        f'<label>x axis <select id="axis">{axes}</select></label>'
        f'<label>smoothing <select id="mean">{means}</select></label>'
        '<label><input type="checkbox" id="log"> log scale</label>'
        '<button id="reset" hidden>show all</button>'
        f'<div id="readout" data-help="{_HELP}"></div></div>'
        f'<div class="legend">{legend}</div><noscript><p>The charts need JavaScript. '
        "<code>--png FILE</code> writes a picture of the loss.</p></noscript>"
        f"{charts.draw_charts(drawn)}{constants}"
    )


def _format_events(events: Sequence[DescribedEvent], left_out: dict[str, int]) -> str:
    counts = Counter(each.label for each in events)
    boxes = "".join(
        f'<label><input type="checkbox" class="kind" value="{html.escape(label)}"'
        f"{' checked' * (label not in _QUIET)}> {html.escape(label)} ({count:,})</label>"
        for label, count in counts.items()
    )
    shortened = "".join(
        f"<p>{count:,} earlier events of the kind {html.escape(label)} are left out.</p>"
        for label, count in left_out.items()
    )
    return (
        f'<h3>What happened</h3><div class="script">{boxes}</div>{shortened}'
        f"{_format_event_table(events)}"
    )


def _format_event_table(events: Sequence[DescribedEvent]) -> str:
    rows = "".join(
        f'<tr data-kind="{html.escape(each.label)}">'
        f'<td class="time">{each.event.time:%Y-%m-%d %H:%M:%S}</td>'
        f'<td class="number">'
        f"{'' if each.event.iteration is None else f'{each.event.iteration:,}'}</td>"
        f'<td class="label">{html.escape(each.label)}</td><td>{html.escape(each.text)}</td></tr>'
        for each in events
    )
    zone = events[0].event.time.tzname() if events else "UTC"
    return (
        f"<table><thead><tr><th>time ({html.escape(str(zone))})</th>"
        '<th class="number">iteration</th>'
        f"<th>event</th><th>what</th></tr></thead><tbody>{rows}</tbody></table>"
    )


def _format_goodput(history: RunHistory) -> str:
    goodput = compute_goodput(history)
    causes = "".join(
        f'<tr><td>{html.escape(cause)}</td><td class="number">{share:.1%}</td>'
        f'<td class="number">{format_duration(seconds)}</td><td><span class="bar'
        f'{" kept" * (cause == KEPT)}" style="width:{400 * share:.0f}px"></span></td></tr>'
        for cause, seconds, share in summary.list_goodput(history)
    )
    return (
        f"<h3>Where the time went: goodput {goodput.share:.1%} of "
        f"{format_duration(goodput.wall_seconds)}</h3><table>{causes}</table>"
    )


def _format_facts(history: RunHistory) -> str:
    facts = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>"
        for name, value in summary.list_facts(history)
    )
    return f"<h3>Facts</h3><table>{facts}</table>"


def _make_anchor(name: str) -> str:
    """Return the anchor of the settings of a run."""
    return f"settings-{quote(name, safe='')}"


def _format_settings(history: RunHistory, name: str) -> str:
    """Return the settings of the last launch, and what changed between launches."""
    launches = _list_launch_settings(history)
    if not launches:
        return ""
    _, last = launches[-1]
    rows = "".join(
        f"<tr><td><code>{html.escape(make_plain(flag))}</code></td>"
        f"{_format_setting(read_setting(last[flag]))}</tr>"
        for flag in sorted(last)
    )
    text = (
        f'<h3 id="{_make_anchor(name)}">Settings of the last launch that differ from their '
        "defaults</h3>"
        '<div class="script"><input type="search" class="search" '
        'placeholder="search for a setting or a value" aria-label="search the settings"></div>'
        f'<table><tbody class="settings">{rows}</tbody></table>'
    )
    if len(launches) > 1:
        names, settings = zip(*launches, strict=True)
        text += "<h3>Settings that changed between launches</h3>"
        text += _format_comparison(names, settings)
    return text


def _limit_by_label(
    described: Sequence[DescribedEvent],
) -> tuple[list[DescribedEvent], dict[str, int]]:
    """Return the last events of each kind, in order, and how many of each kind are left out."""
    left_out = Counter(each.label for each in described)
    left_out = Counter({label: count - _EVENTS for label, count in left_out.items()})
    seen: Counter[str] = Counter()
    chosen = []
    for each in described:
        seen[each.label] += 1
        if seen[each.label] > left_out[each.label]:
            chosen.append(each)
    return chosen, {label: count for label, count in left_out.items() if count > 0}


_WIDTH = 1000
_LARGEST_CELL = 28.0
_STRONGEST = 2.0
"""A cell has its full colour if the load is the mean times or divided by 2 to this power."""
_CELLS = 40_000
"""Largest number of cells. A page with more would be slow."""


def draw_loads(loads: ExpertLoads | None) -> str:
    """Return a section of the page with the latest loads, or an empty text if there are none.

    The picture has a row for each layer with experts, and a column for each expert. It is SVG
    without a script, so the page's policy allows it, and it can be printed.
    """
    if loads is None:
        return ""
    values = loads.values
    layers, experts = values.shape
    title = f"<h3>Loads of the experts at iteration {loads.iteration:,}</h3>"
    facts = (
        f"<p>{layers:,} layers with {experts:,} experts. Blue: fewer tokens than the mean, red: "
        f"more. Largest load {values.max():.2f} and smallest {values.min():.2f} times the mean, "
        f"{int((values == 0).sum()):,} experts without a token.</p>"
    )
    if values.size > _CELLS:
        return f"{title}{facts}<p>A picture would have {values.size:,} cells, so there is none.</p>"
    size = min(_LARGEST_CELL, _WIDTH / experts)
    cells = "".join(
        _draw_cell(layer, expert, float(values[layer, expert]), size)
        for layer in range(layers)
        for expert in range(experts)
    )
    name = html.escape("Loads of the experts, a row for each layer with experts")
    return (
        f'{title}{facts}<figure><svg role="img" aria-label="{name}" '
        f'viewBox="0 0 {_WIDTH} {layers * size:.1f}">{cells}</svg></figure>'
    )


def _draw_cell(layer: int, expert: int, load: float, size: float) -> str:
    colour = "#c0392b" if load > 1 else "#2166ac"
    return (
        f'<rect x="{expert * size:.2f}" y="{layer * size:.2f}" width="{size:.2f}" '
        f'height="{size:.2f}" fill="{colour}" fill-opacity="{_choose_opacity(load):.2f}">'
        f"<title>layer {layer + 1} of those with experts, expert {expert}: {load:.2f} times the "
        "mean</title></rect>"
    )


def _choose_opacity(load: float) -> float:
    """Return 0 for the mean, and 1 for a load that is far from it."""
    if load <= 0:
        return 1.0
    return min(1.0, abs(math.log2(load)) / _STRONGEST)

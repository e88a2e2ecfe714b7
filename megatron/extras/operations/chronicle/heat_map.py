"""A picture of the loads of experts: a row for each layer with experts, a column for each expert.

The picture is SVG without a script, so the page's policy allows it, and it can be printed.
"""

import html
import math

from megatron.extras.operations.chronicle.history import ExpertLoads

_WIDTH = 1000
_LARGEST_CELL = 28.0
_STRONGEST = 2.0
"""A cell has its full colour if the load is the mean times or divided by 2 to this power."""
_CELLS = 40_000
"""Largest number of cells. A page with more would be slow."""


def draw_loads(loads: ExpertLoads | None) -> str:
    """Return a section of the page with the latest loads, or an empty text if there are none."""
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

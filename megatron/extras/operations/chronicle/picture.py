"""The charts of a report as one picture, drawn with matplotlib, an optional dependency."""

from pathlib import Path
from typing import Any

from megatron.extras.figure import make_figure, save_figure
from megatron.extras.operations.chronicle.charts import LARGEST, Charts, Curve

_PIXELS_PER_INCH = 100
_LEAST_INCHES = 1.6
"""Height of the smallest panel, with its title."""
_STYLES: dict[str, dict[str, Any]] = {
    "abandoned": {"linestyle": "--", "alpha": 0.5},
    "evaluation": {"marker": "o", "markersize": 3},
}


def draw_picture(charts: Charts, path: Path) -> None:
    """Draw the charts by iteration. The suffix of `path` names the format: PNG without one.

    Raises:
        ConfigError: matplotlib is not installed, or it does not know the format.
        OSError: The picture cannot be written.
    """
    heights = [max(_LEAST_INCHES, panel.height / _PIXELS_PER_INCH) for panel in charts.panels]
    figure = make_figure(10, sum(heights) or _LEAST_INCHES)
    # A run without an iteration has no panel, and its picture is empty.
    rows = figure.subplots(
        max(1, len(heights)), 1, squeeze=False, sharex=True, height_ratios=heights or None
    )
    for axes, panel in zip(rows[:, 0], charts.panels, strict=False):
        axes.set_title(panel.title, fontsize=9, loc="left")
        axes.grid(alpha=0.3)
        for curve in panel.curves:
            style = {"linewidth": 1.0, "color": f"C{curve.colour}", **_STYLES.get(curve.kind, {})}
            axes.plot(*_list_points(curve), label=curve.name, **style)
        for mark in panel.marks:
            if mark.y is not None and abs(mark.y) < LARGEST:
                axes.plot(mark.x["iteration"], [mark.y], "x", color=f"C{mark.colour}")
        for band in charts.bands:
            first, last = band.x["iteration"]
            axes.axvspan(first, last, color="tab:gray", alpha=0.15, linewidth=0)
        if len(panel.curves) > 1:
            axes.legend(fontsize=7, frameon=False)
    rows[-1, 0].set_xlabel("iteration")
    save_figure(figure, path)


def _list_points(curve: Curve) -> tuple[list[float], list[float]]:
    """Return the iterations and values. matplotlib draws no line over nan."""
    nan = float("nan")
    x = [nan if value is None else value for value in curve.x["iteration"]]
    y = [nan if value is None or abs(value) >= LARGEST else value for value in curve.y[1]]
    return x, y

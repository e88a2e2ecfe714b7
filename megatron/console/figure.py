"""Functions that draw pictures with matplotlib, an optional dependency."""

from pathlib import Path
from typing import TYPE_CHECKING

from megatron.base.durable import replace_file_by
from megatron.base.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def make_figure(width_inches: float, height_inches: float) -> "Figure":
    """Return an empty figure.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        # `Figure` without pyplot needs no display and keeps no global state.
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"a picture needs the package matplotlib ({error}): pip install matplotlib."
        ) from error
    return Figure(figsize=(width_inches, height_inches), layout="constrained")


def save_figure(figure: "Figure", path: Path) -> None:
    """Write a figure in the format that the suffix of `path` names, or PNG without a suffix.

    Missing folders are created.

    Raises:
        ConfigError: matplotlib does not know the format.
        OSError: The file cannot be written.
    """
    format = path.suffix.removeprefix(".").lower() or "png"
    known = figure.canvas.get_supported_filetypes()
    if format not in known:
        raise ConfigError(
            f"{path}: the format {format!r} is not known; use one of {', '.join(sorted(known))}."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    # A full disk must not leave a part of a picture, or destroy the last one.
    replace_file_by(path, lambda file: figure.savefig(file, dpi=120, format=format))

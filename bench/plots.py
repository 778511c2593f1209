"""Figures of matplotlib as PNG and SVG files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from redraft.errors import UsageError

COLOURS = ("#80b1d3", "#fb8072", "#8dd3c7", "#fdb462", "#bebada", "#b3de69", "#fccde5", "#bc80bd", "#d9d9d9", "#636363")


def check_plots() -> None:
    """Raise UsageError if plots cannot be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError("plots need matplotlib", "install redraft[bench], or leave the plots out") from None


def figure(width: float, height: float, rows: int = 1) -> tuple[Any, Any]:
    """Return a figure of this size in inches, and its axes: an array of `rows` axes if there are several."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(rows, figsize=(width, height), layout="constrained")


def saved(drawn: Any, folder: Path, name: str) -> list[Path]:
    """Write a figure as PNG and as SVG. Raises UsageError if that fails."""
    from matplotlib import pyplot, rc_context

    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with rc_context({"svg.hashsalt": name}):
            drawn.savefig(paths[0], dpi=110)
            drawn.savefig(paths[1], metadata={"Date": None})
    except OSError as error:
        raise UsageError(f"cannot write plots to {folder}: {error.strerror}", "give another folder") from None
    finally:
        pyplot.close(drawn)
    return paths

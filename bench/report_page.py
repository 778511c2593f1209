"""A report as one HTML page that needs no other file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from redraft.bench.controllers import tables
from redraft.bench.peers.table import ratio_rows, speed_rows
from redraft.bench.report_latency import tables as latency_tables
from redraft.bench.report_plots import progress_name
from redraft.bench.report_trained import SIGNIFICANT
from redraft.errors import UsageError

PAGE, FIGURES = "report.html", "report.json"
_TEMPLATE = "report.html.jinja"


def write_page(report: Mapping[str, Any], pictures: Mapping[str, Sequence[Path]], folder: Path) -> Path:
    """Write the page into a folder. Pictures are its SVG files, as part of the page. Raises UsageError."""
    import jinja2

    source = files("redraft.bench").joinpath(_TEMPLATE).read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    filters: dict[str, Any] = {
        "bounds": _bounds,
        "megabytes": _megabytes,
        "controller_tables": tables,
        "latency_tables": latency_tables,
        "peer_tables": _peer_tables,
    }
    environment.filters |= filters
    environment.globals |= {"progress_name": progress_name, "SIGNIFICANT": SIGNIFICANT}
    drawn = {
        name: _inline(next(path for path in paths if path.suffix == ".svg"), name) for name, paths in pictures.items()
    }
    path = folder / PAGE
    try:
        path.write_text(environment.from_string(source).render(report=report, pictures=drawn), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", "give another folder") from None
    return path


def _peer_tables(peers: Mapping[str, Any]) -> list[tuple[str, list[list[str]]]]:
    """Return titles and rows of the tables of peers, headers first."""
    speeds = f"Tokens a second over {peers['prompts']} prompts"
    return [(speeds, speed_rows(peers)), ("Speed of redraft over the best mode of a peer", ratio_rows(peers))]


def _megabytes(size: int) -> str:
    """Return bytes as text."""
    return f"{size / 1e6:.1f} MB"


def _bounds(interval: Sequence[float] | None, digits: int = 2) -> str:
    """Return an interval as text, empty for none."""
    return f"{interval[0]:.{digits}f} to {interval[1]:.{digits}f}" if interval else ""


def _inline(path: Path, name: str) -> str:
    """Return an SVG file as an element. Its ids get the picture's name, so that pictures do not share any."""
    text = path.read_text(encoding="utf-8")
    text = text[text.index("<svg") :]
    text = re.sub(r'\bid="', f'id="{name}-', text)
    return re.sub(r'(url\(#|href="#)', rf"\g<1>{name}-", text)

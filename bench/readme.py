"""A page's table of methods, out of the figures of reports.

    python -m redraft.bench.readme docs/reports/smollm2/report.json [INT8_REPORT] [--write docs/benchmarks.md]

It prints a Markdown table: every method's speed over plain decoding at temperature 0 with its interval, τ, and its
speed at temperature 1 (GRIFFIN's table 1, over all kinds). A second report, of another precision, adds a column of
speeds over its own plain decoding at temperature 0. `--write` replaces the lines between the markers of a file.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from redraft.bench.command import one_line_errors
from redraft.bench.prompts import ALL
from redraft.bench.statistics import interval_text
from redraft.errors import UsageError

BEGIN, END = "<!-- report: begin -->", "<!-- report: end -->"
_FORM = "report.json of `redraft bench --report`"


def main() -> None:
    """Print the table, or write it between the markers of a file. Raises UsageError."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="report.json of `redraft bench --report`")
    parser.add_argument("second", type=Path, nargs="?", help="report.json of another precision")
    parser.add_argument("--write", type=Path, help="a file with the markers")
    options = parser.parse_args()
    text = table(_read(options.report), _read(options.second) if options.second else None)
    if options.write is None:
        print(text)
        return
    try:
        page = options.write.read_text(encoding="utf-8")
        options.write.write_text(placed(page, text), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {options.write}: {error.strerror}", "give another file") from None
    except UnicodeDecodeError:
        raise UsageError(f"{options.write} is not UTF-8", "give another file") from None


def table(report: Mapping[str, Any], second: Mapping[str, Any] | None = None) -> str:
    """Return the table as Markdown. Speeds are ratios; a figure that a report lacks is `-`.

    Raises UsageError for JSON of another form.
    """
    try:
        head = ["method", "speed, T = 0", "τ", "speed, T = 1"]
        rows = [[f"`{name}`", *_cells(report, name)] for name in report["methods"]]
        if second is not None:
            head.append(f"{second['environment']['model']['precision']}: speed, T = 0")
            for name, row in zip(report["methods"], rows, strict=True):
                row.append(_speed(second, "0", name))
    except (LookupError, TypeError, AttributeError, ValueError):
        raise UsageError("the file has no figures of a report", f"give {_FORM}") from None
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


def placed(page: str, text: str) -> str:
    """Return the page with this text between the markers. Raises UsageError for a page without both, in order."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UsageError("the file has no place for the table", f"put the lines {BEGIN} and {END} into it")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def _cells(report: Mapping[str, Any], name: str) -> list[str]:
    tau = report["temperatures"]["0"]["tokens_a_step"].get(name, {}).get(ALL)
    return [_speed(report, "0", name), f"{tau['tau']:.2f}" if tau else "-", _speed(report, "1", name)]


def _speed(report: Mapping[str, Any], temperature: str, name: str) -> str:
    """Return a method's speed with its interval, if it has one."""
    found = report["temperatures"].get(temperature, {}).get("speeds", {}).get(name, {}).get(ALL)
    if not found:
        return "-"
    bounds: Sequence[float] | None = found["interval"]
    return f"{found['speed']:.2f}" + (f" ({interval_text(bounds[0], bounds[1])})" if bounds else "")


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", "give a report.json") from None
    except ValueError:
        raise UsageError(f"{path} is no JSON", f"give {_FORM}") from None
    return found if isinstance(found, dict) else {}


if __name__ == "__main__":
    with one_line_errors():
        main()

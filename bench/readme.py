"""A page's table of methods, out of the figures of reports.

    python -m redraft.bench.readme docs/reports/smollm2/report.json [INT8_REPORT] [--write docs/benchmarks.md]

It prints a Markdown table: every method's speed over plain decoding at temperature 0 with its interval, τ, and its
speed at temperature 1 (GRIFFIN's table 1, over all kinds). A second report, of another precision, adds a column of
speeds over its own plain decoding at temperature 0. `--write` replaces the lines between the markers of a file.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from redraft.bench.command import markdown_table, one_line_errors, read_json
from redraft.bench.prompts import ALL
from redraft.bench.statistics import interval_text
from redraft.errors import UsageError
from redraft.files import read_text

BEGIN, END = "<!-- report: begin -->", "<!-- report: end -->"
_HINT = "give report.json of `redraft bench --report`"


def main() -> None:
    """Print the table, or write it between the markers of a file. Raises UsageError and DataError."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="report.json of `redraft bench --report`")
    parser.add_argument("second", type=Path, nargs="?", help="report.json of another precision")
    parser.add_argument("--write", type=Path, help="a file with the markers")
    options = parser.parse_args()
    text = table(*(read_json(path, _HINT) for path in (options.report, options.second) if path))
    if options.write is None:
        print(text)
        return
    page = placed(read_text(options.write), text)
    try:
        options.write.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {options.write}: {error.strerror}", "give another file") from None


def table(report: Mapping[str, Any], second: Mapping[str, Any] | None = None) -> str:
    """Return the table as Markdown. Speeds are ratios; a figure that a report lacks is `-`.

    Raises UsageError for JSON of another form.
    """
    try:
        rows = [["method", "speed, T = 0", "τ", "speed, T = 1"]]
        for name in report["methods"]:
            tau = report["temperatures"]["0"]["tokens_a_step"].get(name, {}).get(ALL)
            shown = f"{tau['tau']:.2f}" if tau else "-"
            rows.append([f"`{name}`", _speed(report, "0", name), shown, _speed(report, "1", name)])
        if second is not None:
            rows[0].append(f"{second['environment']['model']['precision']}: speed, T = 0")
            for name, row in zip(report["methods"], rows[1:], strict=True):
                row.append(_speed(second, "0", name))
    except (LookupError, TypeError, AttributeError, ValueError):
        raise UsageError("the file has no figures of a report", _HINT) from None
    return markdown_table(rows)


def placed(page: str, text: str) -> str:
    """Return the page with this text between the markers. Raises UsageError for a page without both, in order."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UsageError("the file has no place for the table", f"put the lines {BEGIN} and {END} into it")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def _speed(report: Mapping[str, Any], temperature: str, name: str) -> str:
    """Return a method's speed with its interval, if it has one."""
    figures = report["temperatures"].get(temperature, {}).get("speeds", {}).get(name, {}).get(ALL)
    if not figures:
        return "-"
    interval = figures["interval"]
    return f"{figures['speed']:.2f}" + (f" ({interval_text(interval)})" if interval else "")


if __name__ == "__main__":
    with one_line_errors():
        main()

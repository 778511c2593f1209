"""The page of a report, which needs no other file, and its pictures."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bench.test_report import METHODS, run
from tests.bench.test_report_inputs import RESULTS, latency, make_result, write_comparison

from redraft.bench.report import compared
from redraft.bench.report_inputs import trained
from redraft.bench.report_page import draw, write_page


def write(folder: Path, results: Sequence[Any], tables: dict[str, Any] | None = None, **changes: Any) -> Any:
    """Write a page with a comparison of these results. Returns its text, and the pictures by name."""
    comparison = trained([write_comparison(folder / "comparison", results, **tables or {})])
    found = {**figures(), "trained": comparison, **changes}
    pictures = draw(found, "a title", folder)
    return write_page(found, pictures, folder).read_text(encoding="utf-8"), pictures


def figures() -> dict[str, Any]:
    """The figures of a report without comparisons of training."""
    own = {"kinds": {"a": {}}, "differing_outputs": 0, "outputs": 8, "lossless": True}
    runs = [run(n, (6, 12), (150, 200)) for n in range(8)]
    temperature = {"methods": dict.fromkeys(METHODS, own), **compared(runs, METHODS, "first")}
    tau = {"tau": 2.25, "interval": (2.0, 2.5), "prompts": 8}
    temperature["tokens_a_step"] = {name: {"a": tau, "all": tau} for name in METHODS}
    depths = {"conditional": [0.75, 0.5], "misaligned": [0.25, 0.625], "drafts": [4, 4, 0, 0, 0]}
    sizes = {"bytes": 2_500_000, "hidden_states": ["last"], "nodes": 12, "depth": 4, "products": {"draft": 7_100_000},
             "training": {"steps": 7, "tokens": None, "seconds": 9.0}}  # fmt: skip
    model = {"name": "<odd & name>", "precision": "fp32", "caveats": ["a caveat"]}
    libraries = {"redraft": "1", "onnxruntime": "2"}
    return {
        "environment": {"model": model, "cpu": "a CPU", "threads": 2, "device": "host", "libraries": libraries},
        "prompts": 8, "chat": True, "max_new_tokens": 16, "command": "redraft bench", "controller": "adaptive",
        "budget": None, "methods": METHODS, "temperatures": {"0": temperature, "1": temperature},
        "depths": dict.fromkeys(METHODS, depths), "baseline": "first",
        "positions": {"first": [{"position": 8, "accepted": 1.5, "blocks": 4}], "second": []},
        "estimates": {"first": {"predicted": 1.75, "measured": 2.0, "steps": 1}, "second": None},
        "costs": {"kv_len": 256, "verify_ms": {"1": 2.0, "4": 3.0}, "draft_ms": {"first": 0.5, "second": 0.25}},
        "sizes": {"first": sizes}, "controllers": None, "peers": None, "latency": None,
    }  # fmt: skip


def test_the_page_needs_no_other_file(tmp_path: Path) -> None:
    text, pictures = write(tmp_path, RESULTS, controller="fixed", budget={"nodes": 9, "depth": 3, "width": 2})
    assert not re.search(r'(?:src|href)="(?!#)|url\((?!#)|<script|@import', text.replace("xlink:", ""))
    assert text.count("<svg") == len(pictures) == 8  # with the curve of the comparison's table
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    for shown in ("&lt;odd &amp; name&gt;", "1.50", "2.00 to 2.50", "2.5 MB", "a caveat", "A table", "2.100",
                  "draft 7.1", "0.88"):  # fmt: skip
        assert shown in text
    assert "fixed, at most 9 drafted nodes, 3 deep and 2 wide." in text.replace("\n", " ")
    assert all(path.stat().st_size > 1000 for some in pictures.values() for path in some)


def test_the_page_has_all_parts_that_other_commands_measured(tmp_path: Path) -> None:
    """The parts of a draft, and of training: frequencies, depths of runs that differ, tests over seeds, progress.

    The page takes a picture of progress by the place of its table, of those with rows.
    """
    one = [make_result("one", seed, 2.0 + seed / 5, acceptance={"a": [0.375]}) for seed in range(2)]
    two = make_result("two", 0, 2.0, wide={"a": [0.9375, 0.8125]})
    three = [make_result("three", seed, tau, chain_tokens={"a": tau, "b": tau}) for seed, tau in enumerate((9.0, 9.1))]
    progress = [{"step": n, "chain_tokens": {"a": 1.5 + n}, "accuracy": {"a": 0.5}} for n in (10, 20)]
    results = [{**result, "progress": progress} for result in (*one, two, *three)]
    results[0]["frequencies"] = [(0.25, 0.9434), (1.0, 1.0)]
    text, pictures = write(tmp_path, results, {"Empty": {"runs": ["gone"], "progress": True}}, latency=latency())
    assert text.count("<svg") == len(pictures) == 11
    assert {"frequencies", "logits", "progress-0"} <= set(pictures)
    assert "94.3 % are among the most frequent\n25.0 % of the vocabulary" in text
    assert "<td>eagle like chain<td>3.0000<td>0.300" in text
    p = re.search(r"<b>([\d.]+)</b>", text)
    assert p
    assert float(p[1]) < 0.05
    (table,) = re.findall(r"<table><tr><th>run<th>acceptance 1.*?</table>", text, re.DOTALL)
    header, *rows = [re.split("<t[hd]>", row)[1:] for row in table.split("<tr>")[1:]]
    assert [cell.strip() for cell in header] == ["run", "acceptance 1", "acceptance 2", "among four 1", "among four 2"]
    figures_of = {row[0].strip(): [cell.strip()[:5] for cell in row[1:]] for row in rows}
    assert figures_of["one"][:2] == ["0.375", ""]
    assert figures_of["two"][2:] == ["0.938", "0.812"]

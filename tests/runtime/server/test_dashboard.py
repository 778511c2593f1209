"""The dashboard of Grafana and the page of metrics name metrics that a server has, and all of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from redraft.runtime.server.metrics import ServerMetrics
from tests.runtime.fakes import greedy, make_runtime, script

NAME = re.compile(r"redraft:\w+")


@pytest.fixture
def dashboard(root: Path) -> dict[str, Any]:
    return json.loads((root / "deploy/grafana/redraft.json").read_text("utf-8"))


@pytest.fixture
def series() -> dict[str, set[str]]:
    """Names of the series of a server that has answered and refused a request, with their labels."""
    found: dict[str, set[str]] = {}
    with make_runtime(script(b"abcdefgh" * 9, 9)) as runtime:
        metrics = ServerMetrics(runtime, "toy")
        metrics.refused("queue")
        one = runtime.submit([*b"abcdefgh "], greedy(60))
        one.result(30)
        metrics.ended(one.request)
        for family in text_string_to_metric_families(metrics.render().decode()):
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
    return found


def expressions(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def test_the_dashboard_shows_all_metrics_and_no_other(dashboard: dict[str, Any], series: dict[str, set[str]]) -> None:
    shown = {name for expression in expressions(dashboard) for name in NAME.findall(expression)}
    assert shown - series.keys() == set()
    beside = {name for name in series if name.endswith(("_created", "_sum", "_count"))}  # of histograms
    assert series.keys() - shown - beside == set()


def test_each_expression_is_of_the_chosen_model_and_a_rate_of_a_counter(dashboard: dict[str, Any]) -> None:
    for expression in expressions(dashboard):
        names = NAME.findall(expression)
        assert expression.count('{model_name=~"$model_name"}') == len(names) > 0
        growing = [name for name in names if name.endswith(("_total", "_bucket"))]
        assert expression.count("[$__rate_interval]") == expression.count("(rate(") == len(growing)
        assert expression.count("(") == expression.count(")")


def test_labels_are_those_of_the_metrics(dashboard: dict[str, Any], series: dict[str, set[str]]) -> None:
    grouped = 0
    for expression in expressions(dashboard):
        for label, name in re.findall(r"by \((\w+)\) \(rate\((redraft:\w+)", expression):
            grouped += 1
            assert label in series[name]
    assert grouped > 10
    models = dashboard["templating"]["list"][1]["definition"]
    assert NAME.findall(models)[0] in series
    assert models.endswith(", model_name)")


def test_panels_do_not_overlap(dashboard: dict[str, Any]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken
        assert at["x"] + at["w"] <= 24
        assert panel["title"]
        assert panel["description"]
        taken |= cells
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_the_page_explains_all_metrics_and_no_other(root: Path, series: dict[str, set[str]]) -> None:
    rows = re.findall(r"^\| `(redraft:\w+)", (root / "docs/serving-metrics.md").read_text("utf-8"), re.MULTILINE)
    families = {name.removesuffix("_bucket") for name in series if not name.endswith(("_created", "_sum", "_count"))}
    assert sorted(rows) == sorted(families)


def test_alerts_name_metrics_that_a_server_has(root: Path, series: dict[str, set[str]]) -> None:
    names = set(NAME.findall((root / "deploy/prometheus/alerts.yml").read_text("utf-8")))
    assert len(names) > 4
    assert names - series.keys() == set()

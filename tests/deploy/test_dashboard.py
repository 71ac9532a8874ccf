from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from tests.deploy.files import ROOT, labels_in, metrics_in, read_dashboard, read_yaml

DASHBOARD = read_dashboard()
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TARGETS = [
    pytest.param(target, id=f"{panel['title']}-{target['refId']}")
    for panel in PANELS
    for target in panel["targets"]
    if panel["type"] != "logs"
]


def test_three_sections() -> None:
    rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert rows == ["Latency", "KV cache and batch", "Throughput and logs"]


@pytest.mark.parametrize("target", TARGETS)
def test_a_query_uses_what_the_server_exposes(exposed: dict[str, set[str]], target: dict[str, Any]) -> None:
    """Bug kind: a metric is renamed, and its panel stays empty without a word."""
    metrics, labels = metrics_in(target["expr"]), labels_in(target["expr"])
    assert metrics and metrics <= exposed.keys()
    for metric in metrics:
        assert labels <= exposed[metric], metric
    assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= labels | {"model_name"}


def test_all_metrics_are_shown(exposed: dict[str, set[str]]) -> None:
    shown = set().union(*(metrics_in(target["expr"]) for panel in PANELS for target in panel["targets"]))
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in exposed} == families


def test_data_sources_are_the_provisioned_ones() -> None:
    provisioned = {
        (source["type"], source["uid"])
        for source in read_yaml("grafana/provisioning/datasources/miniserve.yml")["datasources"]
    }
    variables = DASHBOARD["templating"]["list"]
    used = [*PANELS, *(target for panel in PANELS for target in panel["targets"]), *variables]
    assert {(item["datasource"]["type"], item["datasource"]["uid"]) for item in used} == provisioned


def test_a_right_axis_is_of_a_query_that_is_there() -> None:
    for panel in PANELS:
        overrides = panel.get("fieldConfig", {}).get("overrides", ())
        frames = {item["matcher"]["options"] for item in overrides if item["matcher"]["id"] == "byFrameRefID"}
        assert frames <= {target["refId"] for target in panel["targets"]}, panel["title"]


def test_panels_do_not_overlap() -> None:
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in DASHBOARD["panels"])
        for x, y in itertools.product(
            range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        )
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))


def test_the_manual_explains_every_panel() -> None:
    manual = (ROOT / "docs" / "MONITORING.md").read_text()
    assert [panel["title"] for panel in PANELS if f"| {panel['title']} |" not in manual] == []
    assert all(panel["description"] for panel in PANELS)

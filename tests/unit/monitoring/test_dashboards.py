"""The dashboards: generated as committed, well-formed, laid out without overlaps, and every query has an answer."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from unit.agent.one_node import NODE as NODE_NAME
from unit.monitoring.living import NAME
from unit.monitoring.server import Prometheus, finite
from unit.operator.world import NAMESPACE

REPO = Path(__file__).parents[3]
FOLDER = REPO / "charts/dlo-operator/files/dashboards"
FILES = sorted(FOLDER.glob("*.json"))
DASHBOARDS: dict[str, dict[str, Any]] = {file.stem: json.loads(file.read_text()) for file in FILES}
PANELS = [
    pytest.param(dashboard, panel, id=f"{name}-{panel['title']}")
    for name, dashboard in DASHBOARDS.items()
    for panel in dashboard["panels"]
    if panel["type"] != "row"
]
#: Units that Grafana knows, of those that fit our metrics.
UNITS = {"short", "s", "bytes", "Bps", "ops", "reqps", "percentunit"}
KINDS = {"timeseries", "stat", "table", "bargauge", "state-timeline"}


def variables(dashboard: dict[str, Any]) -> dict[str, str]:
    """What a person would have chosen, by variable."""
    chosen = {"namespace": NAMESPACE, "name": NAME, "node": NODE_NAME}
    return {
        each["name"]: ".*" if each.get("includeAll") else chosen[each["name"]]
        for each in dashboard["templating"]["list"]
        if each["type"] == "query"
    }


def filled(expression: str, dashboard: dict[str, Any]) -> str:
    """The expression as Grafana would send it."""
    for name, value in {
        "__rate_interval": "1m",
        "__range": "5m",
        "__interval": "5s",
        **variables(dashboard),
    }.items():
        expression = re.sub(rf"\$(?:{name}\b|\{{{name}\}})", value, expression)
    assert "$" not in expression, expression
    return expression


def test_there_are_three() -> None:
    """Fleet, one deployment, one node."""
    assert set(DASHBOARDS) == {"fleet", "deployment", "node"}


def test_files_are_generated() -> None:
    """`make generate` after every change of charts/dashboards."""
    script = "import runpy, sys, json; found = runpy.run_path(sys.argv[1]); json.dump(found['rendered'](), sys.stdout)"
    done = subprocess.run(
        [sys.executable, "-c", script, str(REPO / "charts/make_dashboards.py")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == {file.name: file.read_text() for file in FILES}


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_dashboard_is_well_formed(name: str) -> None:
    """Ids, data source, variables and links: what Grafana needs to load it and people to find their way."""
    dashboard = DASHBOARDS[name]
    assert dashboard["uid"] == f"dlo-{name}"
    assert dashboard["title"].startswith("DLO / ")
    assert dashboard["description"]
    assert dashboard["tags"] == ["dlo"]
    assert dashboard["schemaVersion"] >= 39
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    assert dashboard["panels"][0]["type"] == "row"
    names = [each["name"] for each in dashboard["templating"]["list"]]
    assert names[0] == "datasource"
    text = json.dumps(dashboard["panels"])
    for each in names:
        assert f"${each}" in text or f"${{{each}}}" in text, f"variable {each} is used by no panel"


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_lie_beside_each_other(name: str) -> None:
    """Inside 24 columns, no two on one place, no hole above a row's title, one height in a line."""
    taken: dict[tuple[int, int], str] = {}
    heights: dict[int, int] = {}
    bottom = 0
    for panel in DASHBOARDS[name]["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        assert heights.setdefault(place["y"], place["h"]) == place["h"], panel["title"]
        if panel["type"] == "row":
            assert place["y"] == bottom, f"{panel['title']} does not follow what is above it"
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, f"{panel['title']} covers {taken[x, y]}"
                taken[x, y] = panel["title"]
        bottom = max(bottom, place["y"] + place["h"])


@pytest.mark.parametrize(("dashboard", "panel"), PANELS)
def test_a_panel_says_what_it_shows(dashboard: dict[str, Any], panel: dict[str, Any]) -> None:
    """Title, unit, legend, the chosen data source."""
    assert panel["type"] in KINDS
    assert 3 <= len(panel["title"]) <= 40
    siblings = [each["title"] for each in dashboard["panels"] if each["type"] != "row"]
    assert siblings.count(panel["title"]) == 1, "two panels of one name cannot be told apart"
    assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert panel["targets"]
    assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    for target in panel["targets"]:
        assert target["datasource"] == panel["datasource"]
        assert target["legendFormat"] or panel["type"] == "table", "a series without a name"
        for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
            assert re.search(rf"\b{label}\b", target["expr"]), (
                f"the legend's {label} is no label of the query"
            )


@pytest.mark.parametrize(("dashboard", "panel"), PANELS)
def test_every_query_has_an_answer(
    asked: Prometheus, dashboard: dict[str, Any], panel: dict[str, Any]
) -> None:
    """Asked of a Prometheus that has scraped operator, agent and engine at work; numbers, not just NaN."""
    for target in panel["targets"]:
        expression = filled(target["expr"], dashboard)
        values = asked.query(expression)
        assert values, f"no series: {expression}"
        assert finite(values), f"only NaN: {expression}"


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_variable_has_values(asked: Prometheus, name: str) -> None:
    """What a person can choose from."""
    dashboard = DASHBOARDS[name]
    for each in dashboard["templating"]["list"]:
        if each["type"] == "query":
            found = re.fullmatch(r"label_values\((.+), (\w+)\)", each["definition"])
            assert found is not None, each["definition"]
            assert asked.label_values(found[2], filled(found[1], dashboard)), each["definition"]

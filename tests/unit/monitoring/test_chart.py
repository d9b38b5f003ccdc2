"""What the chart makes of rules and dashboards: the same text, in objects that a cluster takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from clusterbin import missing
from unit.chart.rendering import CHART, render

VARIANT = CHART / "ci/monitoring-values.yaml"
MOST_BYTES = 1 << 20  # of a ConfigMap


@pytest.fixture(autouse=True)
def _needs_helm() -> None:
    if missing(["helm"]):
        pytest.skip("helm not built: run python tests/clusterbin.py helm (needs Go)")


def files(folder: str) -> dict[str, str]:
    """The chart's files by name."""
    return {file.name: file.read_text() for file in sorted((CHART / "files" / folder).iterdir())}


def test_rules_arrive_unchanged() -> None:
    """One PrometheusRule a file, with Prometheus's own templates untouched by Helm's."""
    made = [each.obj for each in render(variant=VARIANT) if each.obj["kind"] == "PrometheusRule"]
    specs = sorted((each["spec"]["groups"] for each in made), key=lambda groups: groups[0]["name"])
    given = [yaml.safe_load(text)["groups"] for text in files("rules").values()]
    assert specs == sorted(given, key=lambda groups: groups[0]["name"])
    assert "{{ $labels.node }}" in json.dumps(specs)


def test_dashboards_arrive_unchanged() -> None:
    """One ConfigMap a file, found by Grafana's sidecar, and small enough."""
    made = [
        each.obj
        for each in render(variant=VARIANT)
        if each.obj["kind"] == "ConfigMap" and "grafana_dashboard" in each.obj["metadata"]["labels"]
    ]
    found = {name: text for each in made for name, text in each["data"].items()}
    given = files("dashboards")
    assert {name: json.loads(text) for name, text in found.items()} == {
        name: json.loads(text) for name, text in given.items()
    }
    assert "{{reason}}" in found["node.json"]
    assert all(len(text.encode()) < MOST_BYTES // 4 for text in found.values())


def test_nothing_of_the_sources_of_dashboards_is_in_the_chart() -> None:
    """They lie beside it."""
    assert not list(Path(CHART).rglob("make_dashboards.py"))

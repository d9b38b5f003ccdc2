"""Writes the chart's Grafana dashboards from `charts/dashboards/*.yaml` (part of `make generate`).

The YAML has rows of panels with their queries; here ids, places and what Grafana wants besides are filled in. A
test asks a real Prometheus every query. Knows no metric.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
FOLDER = HERE / "dlo-operator/files/dashboards"
WIDTH = 24
SCHEMA_VERSION = 39  # Grafana 10.3 and later read it
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
GREEN, ORANGE, RED, BLUE, GRAY = "green", "orange", "red", "blue", "text"
STEPS: Mapping[str, Sequence[Sequence[Any]]] = {
    "green": [[None, GREEN]],
    "plain": [[None, BLUE]],
    "gray": [[None, GRAY]],
    "bad": [[None, GREEN], [1, RED]],  # anything is too much
    "good": [[None, RED], [1, GREEN]],  # nothing is too little
}
WORDS: Mapping[str, Mapping[int, tuple[str, str]]] = {
    "": {},
    "up": {1: ("Yes", GREEN), 0: ("No", RED)},
    "truth": {1: ("True", GREEN), 0: ("False", RED), -1: ("Unknown", ORANGE)},
    "inverted": {1: ("True", ORANGE), 0: ("False", GREEN), -1: ("Unknown", ORANGE)},
}


@dataclass(frozen=True)
class Panel:
    """One panel of a YAML file; `width` of 24, `height` in grid units, `steps` and `words` by their names here.

    `inverted` are conditions that are False in a settled world; `columns` are units of a table's columns, `changes`
    Grafana's transformations.
    """

    title: str
    queries: Sequence[Mapping[str, str]]
    unit: str = "short"
    kind: str = "timeseries"
    text: str = ""
    width: int = 0
    height: int = 0
    stack: bool = False
    steps: str | Sequence[Sequence[Any]] = "green"
    words: str = ""
    inverted: Sequence[str] = ()
    least: float | None = 0
    most: float | None = None
    changes: Sequence[Mapping[str, Any]] = ()
    columns: Mapping[str, str] = field(default_factory=dict)

    @property
    def size(self) -> tuple[int, int]:
        """Width and height."""
        width, height = (4, 4) if self.kind == "stat" else (8, 8)
        return self.width or width, self.height or height


def variable(name: str, label: str, query: str, several: bool) -> dict[str, Any]:
    """A choice among the values of a label."""
    made: dict[str, Any] = {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "definition": query,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": several,
        "includeAll": several,
        "options": [],
        "hide": 0,
        "regex": "",
        "skipUrlSync": False,
    }
    return {**made, "allValue": ".*", "current": {"text": "All", "value": "$__all"}} if several else made


def render(described: Mapping[str, Any]) -> str:
    """The JSON of one dashboard; panels flow from left to right and wrap at 24 units."""
    panels: list[dict[str, Any]] = []
    top = 0
    for row in described["rows"]:
        panels.append(_row(len(panels) + 1, row["title"], top))
        top += 1
        left = tallest = 0
        for panel in (Panel(**each) for each in row["panels"]):
            width, height = panel.size
            if left + width > WIDTH:
                left, top, tallest = 0, top + tallest, 0
            place = {"x": left, "y": top, "w": width, "h": height}
            panels.append(_panel(len(panels) + 1, panel, place))
            left, tallest = left + width, max(tallest, height)
        top += tallest
    source = {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "refresh": 1,
        "hide": 0,
        "includeAll": False,
        "multi": False,
        "options": [],
        "regex": "",
        "skipUrlSync": False,
    }
    others = {
        "title": "DLO dashboards",
        "type": "dashboards",
        "tags": ["dlo"],
        "asDropdown": True,
        "icon": "external link",
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
        "tooltip": "",
        "url": "",
    }
    made = {
        "uid": described["uid"],
        "title": described["title"],
        "description": described["description"],
        "tags": ["dlo"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "fiscalYearStartMonth": 0,
        "graphTooltip": 1,
        "refresh": "30s",
        "timezone": "browser",
        "time": {"from": "now-3h", "to": "now"},
        "timepicker": {},
        "weekStart": "",
        "annotations": {"list": []},
        "links": [others],
        "templating": {"list": [source, *(variable(**each) for each in described["variables"])]},
        "panels": panels,
    }
    return json.dumps(made, indent=2) + "\n"


def _row(number: int, title: str, top: int) -> dict[str, Any]:
    place = {"x": 0, "y": top, "w": 24, "h": 1}
    return {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}


def _panel(number: int, panel: Panel, place: Mapping[str, int]) -> dict[str, Any]:
    instant = panel.kind in ("stat", "table", "bargauge")
    targets = [
        {
            "refId": chr(ord("A") + at),
            "datasource": SOURCE,
            "editorMode": "code",
            "expr": query["expr"],
            "legendFormat": query.get("legend", ""),
            "instant": instant,
            "range": not instant,
            **({"format": "table"} if panel.kind == "table" else {}),
        }
        for at, query in enumerate(panel.queries)
    ]
    steps: Sequence[Sequence[Any]] = STEPS[panel.steps] if isinstance(panel.steps, str) else panel.steps
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "color": {"mode": "thresholds" if panel.kind != "timeseries" else "palette-classic"},
        "mappings": _mappings(WORDS[panel.words]),
        "thresholds": {
            "mode": "absolute",
            "steps": [{"value": value, "color": color} for value, color in steps],
        },
        "custom": _custom(panel),
    }
    if panel.kind == "timeseries" and panel.least is not None:
        defaults["min"] = panel.least
    if panel.most is not None:
        defaults["max"] = panel.most
    made = {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": SOURCE,
        "gridPos": dict(place),
        "targets": targets,
        "options": _OPTIONS[panel.kind],
        "fieldConfig": {"defaults": defaults, "overrides": _overrides(panel)},
    }
    return {**made, "transformations": list(panel.changes)} if panel.changes else made


def _custom(panel: Panel) -> dict[str, Any]:
    if panel.kind == "timeseries":
        return {
            "drawStyle": "line",
            "lineInterpolation": "linear",
            "lineWidth": 1,
            "fillOpacity": 25 if panel.stack else 8,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"mode": "normal" if panel.stack else "none", "group": "A"},
            "axisPlacement": "auto",
            "scaleDistribution": {"type": "linear"},
        }
    if panel.kind == "table":
        return {"align": "auto", "cellOptions": {"type": "color-text"}, "inspect": False, "filterable": True}
    if panel.kind == "state-timeline":
        return {"lineWidth": 0, "fillOpacity": 70}
    return {}


def _mappings(words: Mapping[int, tuple[str, str]]) -> list[dict[str, Any]]:
    if not words:
        return []
    options = {
        str(value): {"text": text, "color": color, "index": at}
        for at, (value, (text, color)) in enumerate(words.items())
    }
    return [{"type": "value", "options": options}]


def _overrides(panel: Panel) -> list[dict[str, Any]]:
    made = [_override(name, "unit", unit) for name, unit in panel.columns.items()]
    inverted = _mappings(WORDS["inverted"])
    return [*made, *(_override(name, "mappings", inverted) for name in panel.inverted)]


def _override(field_name: str, what: str, value: Any) -> dict[str, Any]:
    return {
        "matcher": {"id": "byName", "options": field_name},
        "properties": [{"id": what, "value": value}],
    }


_REDUCE = {"calcs": ["lastNotNull"], "fields": "", "values": False}
_OPTIONS: dict[str, dict[str, Any]] = {
    "timeseries": {
        "legend": {"showLegend": True, "displayMode": "list", "placement": "bottom", "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {
        "reduceOptions": _REDUCE,
        "colorMode": "value",
        "graphMode": "none",
        "justifyMode": "auto",
        "orientation": "auto",
        "textMode": "value",
        "wideLayout": True,
        "showPercentChange": False,
        "percentChangeColorMode": "standard",
    },
    "table": {
        "frameIndex": 0,
        "showHeader": True,
        "cellHeight": "sm",
        "footer": {"show": False, "countRows": False, "reducer": ["sum"]},
    },
    "state-timeline": {
        "showValue": "auto",
        "mergeValues": True,
        "alignValue": "left",
        "rowHeight": 0.8,
        "legend": {"showLegend": False, "displayMode": "list", "placement": "bottom", "calcs": []},
        "tooltip": {"mode": "single", "sort": "none"},
    },
    "bargauge": {
        "reduceOptions": _REDUCE,
        "displayMode": "basic",
        "orientation": "horizontal",
        "showUnfilled": True,
        "valueMode": "color",
        "namePlacement": "auto",
        "legend": {"showLegend": False, "displayMode": "list", "placement": "bottom", "calcs": []},
        "sizing": "auto",
        "minVizHeight": 16,
        "minVizWidth": 8,
        "maxVizHeight": 300,
    },
}


def rendered() -> dict[str, str]:
    """The text of every file by its name."""
    files = sorted((HERE / "dashboards").glob("*.yaml"))
    return {f"{file.stem}.json": render(yaml.safe_load(file.read_text())) for file in files}


if __name__ == "__main__":
    for name, text in rendered().items():
        (FOLDER / name).write_text(text)

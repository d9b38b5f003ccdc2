"""Objects of the Prometheus operator and dashboards: when they are made, and that they fit what is scraped."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml
from dlo_operator.reconcile.pod import pod_spec
from dlo_operator.reconcile.workload import DEPLOYMENT_LABEL, selector
from unit.chart.rendering import CHART, MONITORING, Object, Rendered, of_kind, one, render, rendered

SWITCHES = {
    "serviceMonitor": ("ServiceMonitor", 1),
    "podMonitor": ("PodMonitor", 2),
    "rules": ("PrometheusRule", len(list(CHART.glob("files/rules/*.yaml")))),
    "dashboards": ("ConfigMap", len(list(CHART.glob("files/dashboards/*.json")))),
}
SERVED = ("--api-versions", MONITORING)


def made(*words: str) -> dict[str, int]:
    """How many objects each switch made."""
    objects = render("--set", "crds.enabled=false", *words)
    return {name: len(of_kind(objects, kind)) for name, (kind, _) in SWITCHES.items()}


@pytest.mark.parametrize(
    ("mode", "served", "expected"),
    [
        ("Off", True, False),
        ("false", True, False),
        ("IfAvailable", False, False),
        ("IfAvailable", True, True),
        ("Required", False, True),
    ],
)
def test_switches_have_three_ways(mode: str, served: bool, expected: bool) -> None:
    """Each switch alone, and a bare `Off`, which YAML reads as false."""
    for name, (_, count) in SWITCHES.items():
        off = [f"monitoring.{other}.mode=Off" for other in SWITCHES if other != name]
        assert count > 0
        found = made(*(SERVED if served else ()), "--set", ",".join([*off, f"monitoring.{name}.mode={mode}"]))
        assert found == {other: count if expected and other == name else 0 for other in SWITCHES}


def test_rules_and_dashboards_are_the_files_unchanged() -> None:
    """Their own templates are Prometheus's and Grafana's, not helm's."""
    objects = rendered("monitoring")
    for file in CHART.glob("files/rules/*.yaml"):
        rule = one(objects, "PrometheusRule", f"-{file.stem}")
        assert rule["spec"] == yaml.safe_load(file.read_text())
        assert rule["metadata"]["labels"]["release"] == "prometheus"
    for file in CHART.glob("files/dashboards/*.json"):
        dashboard = one(objects, "ConfigMap", f"-{file.stem}")
        assert dashboard["metadata"]["namespace"] == "monitoring"
        assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert dashboard["metadata"]["annotations"] == {"grafana_folder": "DLO"}
        assert json.loads(dashboard["data"][file.name]) == json.loads(file.read_text())


def targets(objects: tuple[Rendered, ...]) -> dict[str, dict[str, Any]]:
    """The labels that targets get, by job: label -> where it comes from."""
    found = {}
    monitors = [*of_kind(objects, "ServiceMonitor"), *of_kind(objects, "PodMonitor")]
    for spec in (monitor["spec"] for monitor in monitors):
        (endpoint,) = spec.get("endpoints") or spec["podMetricsEndpoints"]
        labels = {
            rule["targetLabel"]: rule.get("replacement", rule.get("sourceLabels"))
            for rule in endpoint["relabelings"]
        }
        found[labels.pop("job")] = {
            **labels,
            "port": endpoint["port"],
            "selector": spec["selector"]["matchLabels"],
        }
    return found


def test_jobs_and_labels_are_those_that_dashboards_and_rules_ask_for() -> None:
    """A query for a label that no target has returns nothing, and says nothing."""
    found = targets(rendered("monitoring"))
    text = "".join(file.read_text() for file in CHART.glob("files/dashboards/*.json")).replace('\\"', '"')
    text += "".join(file.read_text() for file in CHART.glob("files/rules/*.yaml"))
    assert set(re.findall(r'job="([^"]+)"', text)) <= set(found)
    assert found["dlo-agent"]["node"] == found["dlo-engine"]["node"] == ["__meta_kubernetes_pod_node_name"]
    meta = re.sub(r"[^a-z]", "_", DEPLOYMENT_LABEL)
    assert found["dlo-engine"]["name"] == [f"__meta_kubernetes_pod_label_{meta}"]


def port_names(pod: Object) -> set[str]:
    """The names of the ports of a pod."""
    return {port["name"] for container in pod["containers"] for port in container.get("ports", ())}


def test_what_is_selected_is_there_to_be_scraped() -> None:
    """Selectors meet labels, and ports have the names that are asked for."""
    objects = rendered("monitoring")
    found = targets(objects)
    service = one(objects, "Service", "metrics")
    assert found["dlo-operator"]["selector"].items() <= service["metadata"]["labels"].items()
    assert found["dlo-operator"]["port"] in {port["name"] for port in service["spec"]["ports"]}
    operator = one(objects, "Deployment", "dlo-operator")["spec"]["template"]
    assert service["spec"]["selector"].items() <= operator["metadata"]["labels"].items()
    assert {port["targetPort"] for port in service["spec"]["ports"]} <= port_names(operator["spec"])
    agent = one(objects, "DaemonSet", "agent-default")["spec"]["template"]
    assert found["dlo-agent"]["selector"].items() <= agent["metadata"]["labels"].items()
    assert found["dlo-agent"]["port"] in port_names(agent["spec"])
    assert found["dlo-engine"]["selector"].items() <= selector("digits").items()


def test_engines_have_the_port_that_is_scraped() -> None:
    """As the operator renders them."""
    from unit.operator.test_render import digits, record
    from unit.operator.world import SETTINGS

    pod = pod_spec("digits", digits(), record(digits()), SETTINGS.plan)
    assert targets(rendered("monitoring"))["dlo-engine"]["port"] in port_names(pod)

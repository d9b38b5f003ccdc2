"""Names, units and labels of every metric, and that the page about them is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from dlo_agent import reasons
from dlo_agent.world import State
from prometheus_client import generate_latest
from unit.monitoring.conftest import require_prometheus
from unit.monitoring.living import Parts
from unit.monitoring.registries import REGISTRIES, Described, described
from unit.monitoring.tool import promtool

REPO = Path(__file__).parents[3]
PAGE = REPO / "docs/monitoring.md"
CHART = REPO / "charts/dlo-operator"
ALL = described()
#: What a metric may measure, as the end of its name.
UNITS = ("seconds", "bytes", "ratio", "info")
#: Things that are counted have no unit; each is a plural or an adjective that the page explains.
COUNTED = {
    "dlo_leader",
    "dlo_resources",
    "dlo_deployment_condition",
    "dlo_workqueue_depth",
    "dlo_cache_entries",
    "dlo_cache_failing",
    "dlo_cache_inodes_free",
    "dlo_cache_root_usable",
    "dlo_cache_wanted_entries",
    "dlo_fetch_inflight",
    "dlo_quarantined_entries",
    "dlo_engine_queue_length",
    "dlo_engine_ready",
    "dlo_engine_running_requests",
}
#: Labels with few values by nature.
BOUNDED = {
    "action",
    "cause",
    "code",
    "component",
    "condition",
    "coordinate",
    "fallback_code",
    "kind",
    "outcome",
    "phase",
    "reason",
    "resource",
    "result",
    "source_kind",
    "state",
    "status",
    "verb",
    "verified",
    "version",
}
HEX = re.compile(r"[0-9a-f]{12,}")


def ids(metric: Described) -> str:
    """A metric in the name of a test."""
    return f"{metric.component}-{metric.name}"


@pytest.mark.parametrize("metric", ALL, ids=ids)
def test_names_follow_prometheus(metric: Described) -> None:
    """Prefix, unit, ending; a help text that is a sentence."""
    assert re.fullmatch(r"dlo(_[a-z0-9]+)+", metric.name)
    assert re.fullmatch(r"[A-Z0-9].+\.", metric.text)
    assert not re.search(r"_(milliseconds|ms|minutes|hours|kb|mb|mib|gib|percent)\b", metric.name)
    if metric.kind == "counter":
        assert metric.name.endswith("_total")
        return
    assert not metric.name.endswith(("_total", "_count", "_sum", "_bucket"))
    has_unit = metric.name.endswith(tuple(f"_{unit}" for unit in UNITS))
    assert has_unit or metric.name in COUNTED, "add it to COUNTED only if it has no unit"
    if metric.kind == "histogram":
        assert metric.name.endswith(("_seconds", "_bytes"))


@pytest.mark.parametrize("metric", ALL, ids=ids)
def test_labels_are_bounded(metric: Described) -> None:
    """No key, digest, path or name of an object, except where conditions are shown by object."""
    allowed = BOUNDED | ({"namespace", "name"} if metric.name == "dlo_deployment_condition" else set())
    assert set(metric.labels) <= allowed
    assert "le" not in metric.labels


def test_one_name_has_one_meaning() -> None:
    """A name that several programs expose has the same kind and labels in each."""
    known: dict[str, tuple[str, tuple[str, ...]]] = {}
    for metric in ALL:
        found = metric.kind, metric.labels
        assert known.setdefault(metric.name, found) == found, metric.name


def test_every_program_says_what_it_costs() -> None:
    """The metrics of every process: CPU, memory, files, start."""
    for registry in REGISTRIES.values():
        text = generate_latest(registry).decode()
        for name in ("cpu_seconds_total", "resident_memory_bytes", "open_fds", "start_time_seconds"):
            assert f"\nprocess_{name} " in text


def test_no_identity_reaches_a_label_at_work(parts: Parts) -> None:
    """What real work leaves in the registries: no digest, no path, no name of an object."""
    for text in parts.expositions():
        assert text.count("\ndlo_") > 20
        for line in text.splitlines():
            labels = re.findall(r'(\w+)="([^"]*)"', line)
            for name, value in labels:
                assert not HEX.search(value), line
                assert "/" not in value or name == "coordinate", line
                if name in ("namespace", "name"):
                    assert line.startswith("dlo_deployment_condition{"), line


def test_label_values_are_those_of_the_code() -> None:
    """Reasons and states are all there from the start, so that the first event is not lost."""
    value = REGISTRIES["agent"].get_sample_value
    for reason in reasons.ALL:
        assert value("dlo_cache_build_errors_total", {"reason": reason}) == 0
    assert value("dlo_verify_total", {"result": "corrupt"}) == 0
    assert value("dlo_fsync_errors_total") == 0
    assert len(State) == len({each.value for each in State})


def test_promtool_finds_nothing_to_say(parts: Parts) -> None:
    """Prometheus's own linter of expositions."""
    require_prometheus()
    for text in parts.expositions():
        done = promtool("check", "metrics", text=text)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def table() -> dict[str, tuple[tuple[str, ...], ...]]:
    """The page's tables: by component, rows of name, kind and labels."""
    found: dict[str, list[tuple[str, ...]]] = {}
    component = ""
    for line in PAGE.read_text().splitlines():
        if heading := re.fullmatch(r"### (Operator|Agent|Engine)", line):
            component = heading[1].lower()
        elif line.startswith("#"):
            component = ""
        elif component and (row := re.fullmatch(r"\| `(\w+)` \| (\w+) \| (.*?) \| (.+) \|", line)):
            found.setdefault(component, []).append((row[1], row[2], row[3].replace("`", ""), row[4]))
    return {component: tuple(rows) for component, rows in found.items()}


@pytest.mark.parametrize("component", REGISTRIES)
def test_the_page_lists_every_metric_and_no_other(component: str) -> None:
    """Name, kind and labels as in the registry, in its order; the words are the page's own."""
    rows = table()[component]
    assert [row[:3] for row in rows] == [
        (each.name, each.kind, ", ".join(each.labels) or "–") for each in ALL if each.component == component
    ]
    assert all(len(row[3]) > 10 for row in rows)


def test_the_chart_scrapes_with_the_labels_of_the_rules() -> None:
    """Job, node and name come from the monitors; rules and dashboards rely on them."""
    pods = (CHART / "templates/monitoring/podmonitor.yaml").read_text()
    services = (CHART / "templates/monitoring/servicemonitor.yaml").read_text()
    agent, engine = pods.split("\n---\n")
    for text, job, labels in (
        (services, "dlo-operator", ()),
        (agent, "dlo-agent", ("node",)),
        (engine, "dlo-engine", ("node", "name")),
    ):
        assert re.search(rf"- targetLabel: job\n\s+replacement: {job}(\n|$)", text), job
        for label in labels:
            assert f"targetLabel: {label}\n" in text
    assert "__meta_kubernetes_pod_label_dlo_dev_deployment" in engine
    assert "honorLabels: true" in services


def test_the_example_without_the_prometheus_operator_is_a_configuration(tmp_path: Path) -> None:
    """The scrape configuration of the page gives the same labels, and Prometheus takes it."""
    found = re.search(r"```yaml\n(# prometheus\.yml\n.+?)```", PAGE.read_text(), flags=re.DOTALL)
    assert found is not None
    config = yaml.safe_load(found[1])
    jobs = {each["job_name"]: each for each in config["scrape_configs"]}
    assert set(jobs) == {"dlo-operator", "dlo-agent", "dlo-engine"}
    assert jobs["dlo-operator"]["honor_labels"] is True
    for job, labels in (("dlo-agent", {"node"}), ("dlo-engine", {"node", "name"})):
        given = {each.get("target_label") for each in jobs[job]["relabel_configs"]}
        assert labels | {"namespace", "pod"} <= given
    require_prometheus()
    file = tmp_path / "prometheus.yml"
    file.write_text(found[1])
    done = promtool("check", "config", "--syntax-only", str(file))
    assert done.returncode == 0, done.stdout + done.stderr

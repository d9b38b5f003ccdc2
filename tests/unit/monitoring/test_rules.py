"""The alert rules: well-formed, each with words and a runbook, each seen to fire and to keep still."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from unit.monitoring.conftest import require_prometheus
from unit.monitoring.registries import described
from unit.monitoring.tool import promtool

REPO = Path(__file__).parents[3]
FILES = sorted((REPO / "charts/dlo-operator/files/rules").glob("*.yaml"))
TESTS = Path(__file__).parent / "rules"
RULES: dict[str, dict[str, Any]] = {
    rule["alert"]: rule
    for file in FILES
    for group in yaml.safe_load(file.read_text())["groups"]
    for rule in group["rules"]
}
CASES: list[dict[str, Any]] = [
    case
    for file in sorted(TESTS.glob("*.yaml"))
    for test in yaml.safe_load(file.read_text())["tests"]
    for case in test["alert_rule_test"]
]
EXPOSED = {
    ending
    for metric in described()
    for ending in (
        {metric.name}
        | (
            {f"{metric.name}_{part}" for part in ("bucket", "sum", "count")}
            if metric.kind == "histogram"
            else set()
        )
    )
}


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", RULES)
def test_an_alert_says_what_to_do(name: str) -> None:
    """Severity, a summary that names the thing, a description, a runbook that exists."""
    rule = RULES[name]
    assert re.fullmatch(r"Dlo([A-Z][a-z]+)+", name)
    assert set(rule["labels"]) == {"severity"}
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    notes = rule["annotations"]
    assert set(notes) == {"summary", "description", "runbook"}
    assert len(notes["summary"]) < 90
    assert not notes["summary"].endswith(".")
    assert notes["description"].endswith(".")
    page, _, anchor = notes["runbook"].partition("#")
    assert page == "docs/runbooks.md"
    assert anchor == name.lower()
    assert anchor in anchors(REPO / page)


def test_no_runbook_without_its_alert() -> None:
    """The page has one section an alert, each with its three parts."""
    text = (REPO / "docs/runbooks.md").read_text()
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    titles = [section.split("\n", 1)[0] for section in sections]
    assert len(titles) == len(set(titles))
    assert set(titles) == set(RULES)
    for section in sections:
        for part in ("**Means**", "**Look at**", "**Do**"):
            assert section.count(part) == 1, section.split("\n", 1)[0]


@pytest.mark.parametrize("name", RULES)
def test_an_alert_asks_for_metrics_that_exist(name: str) -> None:
    """Every metric of ours in its expression is exposed by some registry, under that very name."""
    asked = set(re.findall(r"\bdlo_[a-z0-9_]+", RULES[name]["expr"]))
    assert asked
    assert asked <= EXPOSED


@pytest.mark.parametrize("name", RULES)
def test_an_alert_has_a_case_that_fires_and_one_that_does_not(name: str) -> None:
    """Both, or it may fire always or never."""
    expected = [case["exp_alerts"] for case in CASES if case["alertname"] == name]
    assert any(expected), "no case in which it fires"
    assert not all(expected), "no case in which it keeps still"


def test_no_case_is_of_an_alert_that_is_not_there() -> None:
    """promtool would take a misspelt name for an alert that keeps still."""
    assert {case["alertname"] for case in CASES} == set(RULES)


def test_no_rule_is_shadowed() -> None:
    """One alert, one rule."""
    texts = "".join(file.read_text() for file in FILES)
    assert texts.count("- alert: ") == len(RULES)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_prometheus_takes_the_rules(file: Path) -> None:
    """`promtool check rules`, with its lint."""
    require_prometheus()
    done = promtool("check", "rules", "--lint=all", "--lint-fatal", str(file))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_unit_tests_of_the_rules_pass(file: Path) -> None:
    """`promtool test rules`; every rule file has its file of tests."""
    require_prometheus()
    done = promtool("test", "rules", str(TESTS / file.name))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout


def test_the_unit_tests_see_a_changed_threshold(tmp_path: Path) -> None:
    """A rule that fires always fails its tests, and so does one that never does."""
    require_prometheus()
    rules, tests = FILES[0].read_text(), (TESTS / FILES[0].name).read_text()
    for old, new in ((">= 3", ">= 0"), (">= 3", ">= 300")):
        assert rules.count(old) == 1
        (tmp_path / "rules.yaml").write_text(rules.replace(old, new))
        changed = re.sub(
            r"^  - \.\./.+$", f"  - {tmp_path / 'rules.yaml'}", tests, count=1, flags=re.MULTILINE
        )
        (tmp_path / "tests.yaml").write_text(changed)
        done = promtool("test", "rules", str(tmp_path / "tests.yaml"))
        assert done.returncode != 0
        assert "DloBuildFailing" in done.stdout + done.stderr

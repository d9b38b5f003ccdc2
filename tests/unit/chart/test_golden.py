"""Every variant of charts/dlo-operator/ci, as it renders; a change shows in the golden file beside it.

DLO_WRITE_GOLDEN=1 .venv/bin/pytest tests/unit/chart/test_golden.py     writes them again
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from unit.chart.rendering import CHART, VARIANTS, helm, rendered

GOLDEN = Path(__file__).parent / "golden"
#: Copied from files that have tests of their own: see test_crds and the tests of monitoring.
COPIED = ("crds/", "monitoring/rules.yaml", "monitoring/dashboards.yaml")


def name_of(variant: Path) -> str:
    """`default` for `default-values.yaml`."""
    return variant.name.removesuffix("-values.yaml")


def text_of(name: str) -> str:
    """What is compared: everything but what is copied from files."""
    return "---\n".join(item.text for item in rendered(name) if not item.source.startswith(COPIED))


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_variant_renders_as_its_golden_file_says(variant: Path) -> None:
    """A difference is either a fault or a change that belongs into the golden file."""
    golden = GOLDEN / f"{name_of(variant)}.yaml"
    text = text_of(name_of(variant))
    if os.environ.get("DLO_WRITE_GOLDEN") == "1":
        golden.write_text(text)
    assert text == golden.read_text(), "see the first lines of this file for how to write it again"


def test_no_golden_file_without_its_variant() -> None:
    """None is left behind."""
    assert {file.stem for file in GOLDEN.glob("*.yaml")} == {name_of(variant) for variant in VARIANTS}


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_lint_has_nothing_to_say(variant: Path) -> None:
    """`helm lint --strict`: warnings are errors."""
    done = helm("lint", str(CHART), "--strict", "-f", str(variant))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[WARNING]" not in done.stdout


def test_every_template_renders_in_some_variant() -> None:
    """A template that no variant switches on is not tested by any of this."""
    templates = CHART / "templates"
    all_of_them = {
        str(file.relative_to(templates))
        for file in templates.rglob("*.yaml")
        if file.name != "validation.yaml"
    }
    for empty in ("rules", "dashboards"):
        if not any((CHART / "files" / empty).glob("*")):
            all_of_them.discard(f"monitoring/{empty}.yaml")
    used = {item.source for variant in VARIANTS for item in rendered(name_of(variant))}
    assert all_of_them - used == set()

"""The CustomResourceDefinitions in the chart are the generated ones, whole and unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from dlo_api.crdgen import check_folder, render_all
from unit.chart.rendering import CHART, of_kind, render

REPO = Path(__file__).parents[3]
COPIES = CHART / "files" / "crds"


def test_copies_are_those_of_the_models() -> None:
    """`make generate` writes both folders; there is no other file in either."""
    assert check_folder(COPIES) == []
    assert {file.name for file in COPIES.iterdir()} == set(render_all())
    for name in render_all():
        assert (COPIES / name).read_bytes() == (REPO / "crds" / name).read_bytes()


def types(value: Any) -> Any:
    """The value with the types of its numbers, which an equal value may not have."""
    if isinstance(value, dict):
        return {key: types(item) for key, item in value.items()}
    if isinstance(value, list):
        return [types(item) for item in value]
    return (type(value).__name__, value)


def test_rendered_ones_differ_by_annotation_and_labels_alone() -> None:
    """Whole numbers stay whole: a schema with `maximum: 1e+06` is another schema."""
    found = {crd["metadata"]["name"]: crd for crd in of_kind(render(), "CustomResourceDefinition")}
    generated = [yaml.safe_load(text) for text in render_all().values()]
    assert set(found) == {crd["metadata"]["name"] for crd in generated}
    for crd in generated:
        rendered = found[crd["metadata"]["name"]]
        assert rendered["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
        assert rendered["metadata"].pop("labels")["app.kubernetes.io/managed-by"] == "Helm"
        assert types(rendered) == types(crd)


def test_not_kept_and_not_installed() -> None:
    """`crds.keep=false` leaves the annotation out, `crds.enabled=false` the definitions."""
    for crd in of_kind(render("--set", "crds.keep=false"), "CustomResourceDefinition"):
        assert "annotations" not in crd["metadata"]
    assert of_kind(render("--set", "crds.enabled=false"), "CustomResourceDefinition") == []

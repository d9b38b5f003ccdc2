"""The generated CRDs: structural, bounded, described, and equal to the committed files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import re2  # type: ignore[import-untyped]
import yaml
from dlo_api.crdgen import (
    KINDS,
    check_folder,
    custom_resource_definition,
    main,
    reference,
    render,
    render_all,
)
from dlo_api.rules import RULES
from dlo_api.v1alpha1 import DiffusionDeploymentSpec, NodeWeightCache
from unit.api.manifests import deployment, manifest
from unit.api.schema_server import SchemaServer

_REPOSITORY = Path(__file__).parents[3]
_CRDS = {kind.name: custom_resource_definition(kind) for kind in KINDS}
# Everything JSONSchemaProps knows of the words we use; anything else is dropped or refused by the server.
_ALLOWED = {
    "type", "description", "default", "properties", "required", "items", "additionalProperties", "enum",
    "format",
    "minimum", "maximum", "minLength", "maxLength", "pattern", "minItems", "maxItems", "minProperties",
    "maxProperties", "x-kubernetes-preserve-unknown-fields", "x-kubernetes-int-or-string",
    "x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-validations",
}  # fmt: skip


def _version(name: str) -> dict[str, Any]:
    version: dict[str, Any] = _CRDS[name]["spec"]["versions"][0]
    return version


def _schema(name: str) -> dict[str, Any]:
    schema: dict[str, Any] = _version(name)["schema"]["openAPIV3Schema"]
    return schema


def _nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, field in schema.get("properties", {}).items():
        yield from _nodes(field, f"{path}.{name}")
    for word in ("items", "additionalProperties"):
        if word in schema:
            yield from _nodes(schema[word], f"{path}[]")


_NODES = [
    pytest.param(path, node, id=f"{kind.name}{path}")
    for kind in KINDS
    for path, node in _nodes(_schema(kind.name))
    if path != ".metadata"
]


@pytest.mark.parametrize(("path", "node"), _NODES)
def test_node_is_structural(path: str, node: dict[str, Any]) -> None:
    """Only known words, one type, nothing a rule could not be estimated over."""
    assert node.keys() <= _ALLOWED
    assert ("type" in node) != ("x-kubernetes-int-or-string" in node)
    if node.get("type") == "array":
        assert "items" in node
        assert "maxItems" in node
    if node.get("type") == "object" and "properties" not in node:
        assert "maxProperties" in node
        assert ("additionalProperties" in node) != ("x-kubernetes-preserve-unknown-fields" in node)
    if node.get("type") == "string" and path not in {".apiVersion", ".kind"}:
        assert "maxLength" in node or "enum" in node
    if "properties" in node:
        assert "additionalProperties" not in node
        assert set(node.get("required", ())) <= node["properties"].keys()
        for name in node.get("required", ()):
            assert "default" not in node["properties"][name]
    if "pattern" in node:
        re2.compile(node["pattern"])
    for key in node.get("x-kubernetes-list-map-keys", ()):
        assert key in node["items"]["required"]


@pytest.mark.parametrize(("path", "node"), [p for p in _NODES if not str(p.id).endswith("[]")])
def test_field_has_a_description(path: str, node: dict[str, Any]) -> None:
    """A person reads `kubectl explain`."""
    assert len(node["description"]) > 8
    assert node["description"][0].isupper(), path
    assert node["description"].endswith(".")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_committed_file_is_the_generated_one(kind: Any) -> None:
    """Drift is a failure; run `make generate`."""
    assert (_REPOSITORY / "crds" / kind.file).read_text(encoding="utf-8") == render(kind)


def test_nothing_else_lies_among_the_generated_files() -> None:
    """A renamed kind leaves no old file behind."""
    assert {file.name for file in (_REPOSITORY / "crds").iterdir()} == {
        "dlo.dev_diffusiondeployments.yaml",
        "dlo.dev_nodeweightcaches.yaml",
    }


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_file_is_the_object_and_small(kind: Any) -> None:
    """No aliases, nothing lost in YAML, and room in kubectl's annotation of 256 KiB."""
    text = render(kind)
    assert yaml.safe_load(text) == custom_resource_definition(kind)
    assert "&id" not in text
    assert len(text) < 100_000
    assert render(kind) == text


def test_names_and_subresources() -> None:
    """As api.md has them."""
    for name, short, scope in (
        ("DiffusionDeployment", "ddep", "Namespaced"),
        ("NodeWeightCache", "nwcache", "Cluster"),
    ):
        spec = _CRDS[name]["spec"]
        assert (spec["group"], spec["scope"]) == ("dlo.dev", scope)
        assert spec["names"]["shortNames"] == [short]
        assert spec["names"]["categories"] == ["dlo"]
        assert _CRDS[name]["metadata"]["name"] == f"{spec['names']['plural']}.dlo.dev"
        assert _version(name)["subresources"]["status"] == {}
    assert _version("DiffusionDeployment")["subresources"]["scale"] == {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }


def test_printer_columns_show_existing_fields() -> None:
    """Names and order of api.md; every path leads to a field of the column's type."""
    columns = _version("DiffusionDeployment")["additionalPrinterColumns"]
    assert [c["name"] for c in columns if "priority" not in c] == [
        "READY", "REASON", "CACHE", "REPLICAS", "MODE", "AGE",
    ]  # fmt: skip
    assert [c["name"] for c in columns if c.get("priority") == 1] == ["MODEL", "REVISION", "SAVED"]
    for kind in KINDS:
        for column in _version(kind.name)["additionalPrinterColumns"]:
            if "[" in column["jsonPath"] or column["jsonPath"].startswith(".metadata"):
                continue
            node = _schema(kind.name)
            for name in column["jsonPath"][1:].split("."):
                node = node["properties"][name]
            assert node["type"] == column["type"]


def test_metadata_is_left_to_the_server() -> None:
    """A schema may say nothing more of it."""
    for kind in KINDS:
        assert _schema(kind.name)["properties"]["metadata"] == {"type": "object"}


def test_conditions_are_a_map_keyed_by_type() -> None:
    """So that every writer keeps its own."""
    for kind in KINDS:
        conditions = _schema(kind.name)["properties"]["status"]["properties"]["conditions"]
        assert conditions["x-kubernetes-list-type"] == "map"
        assert conditions["x-kubernetes-list-map-keys"] == ["type"]
        assert {"type", "status", "reason", "lastTransitionTime"} <= set(conditions["items"]["required"])


def test_status_has_no_defaults() -> None:
    """Unknown is absent."""
    for kind in KINDS:
        assert not [
            path for path, node in _nodes(_schema(kind.name)["properties"]["status"]) if "default" in node
        ]


def test_every_rule_is_in_the_schema() -> None:
    """CEL and message as in the table, with a path that exists."""
    schema = _schema("DiffusionDeployment")
    spec = schema["properties"]["spec"]
    written = schema["x-kubernetes-validations"] + spec["x-kubernetes-validations"]
    assert [(w["rule"], w["message"]) for w in written] == [(r.cel, r.message) for r in RULES]
    for validation in spec["x-kubernetes-validations"]:
        node = spec
        for name in validation["fieldPath"][1:].split("."):
            node = node["properties"][name]
    for rule in RULES:
        assert len(rule.message) <= 2048
        assert "\n" not in rule.cel


def test_defaults_of_the_schema_are_those_of_the_models() -> None:
    """The server's defaulting of a small object gives the models' full one, and each default validates."""
    server = SchemaServer(_CRDS["DiffusionDeployment"])
    stored, errors = server.admit(manifest())
    assert errors == []
    assert stored["spec"] == deployment().spec.to_json()
    for path, node in _nodes(_schema("DiffusionDeployment")["properties"]["spec"]):
        if node.get("properties") and "default" in node:
            optional = {name for name, field in node["properties"].items() if "default" in field}
            assert set(node["default"]) == optional, path


def test_defaults_of_the_node_kind() -> None:
    """The same for NodeWeightCache, entries included."""
    spec = {
        "sources": [{"id": "3f2a", "source": {"s3": {"bucket": "models"}}}],
        "entries": [{"id": "a1", "sourceId": "3f2a", "kind": "Files", "select": "All"}],
    }
    value = {
        "apiVersion": "dlo.dev/v1alpha1",
        "kind": "NodeWeightCache",
        "metadata": {"name": "node-1"},
        "spec": spec,
    }
    stored, errors = SchemaServer(_CRDS["NodeWeightCache"]).admit(value)
    assert errors == []
    assert stored["spec"] == NodeWeightCache.model_validate_json(json.dumps(value)).spec.to_json()


def test_every_model_field_is_in_the_schema() -> None:
    """JSON names of the models and of the schema agree at the top of spec."""
    names = {field.alias for field in DiffusionDeploymentSpec.model_fields.values()}
    assert set(_schema("DiffusionDeployment")["properties"]["spec"]["properties"]) == names


def test_write_and_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command writes, compares, and tells what differs."""
    folder = tmp_path / "new" / "crds"
    assert main(["--check", str(folder)]) == 1
    assert main([str(folder)]) == 0
    assert {file.name: file.read_text(encoding="utf-8") for file in folder.iterdir()} == render_all()
    assert main(["--check", str(folder)]) == 0
    assert check_folder(folder) == []
    changed = folder / "dlo.dev_nodeweightcaches.yaml"
    changed.write_text("other", encoding="utf-8")
    capsys.readouterr()
    assert main(["--check", str(folder)]) == 1
    assert check_folder(folder) == [changed.name]
    assert changed.name in capsys.readouterr().err


def test_reference_lists_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    """Each field has a row with its description, each rule too, and tables keep their shape."""
    assert main(["--reference"]) == 0
    page = capsys.readouterr().out
    assert page == reference()
    rows = set(page.splitlines())
    for kind in KINDS:
        for path, node in _nodes(_schema(kind.name)):
            if path.count(".") < 2 or path.endswith("[]"):
                continue
            name, what = path.rsplit(".", 1)[1], node["description"].replace("|", "\\|")
            assert any(row.startswith(f"| `{name}` |") and row.endswith(f"| {what} |") for row in rows), path
    for rule in RULES:
        assert any(row.startswith(f"| `{rule.name}` |") and rule.what in row for row in rows)
    tables = [block.splitlines() for block in page.split("\n\n") if block.startswith("|")]
    for table in tables:
        assert len({row.replace("\\|", "").count("|") for row in table}) == 1


def test_reference_shows_types_and_defaults() -> None:
    """A few rows in full."""
    rows = reference().splitlines()
    for row in (
        '| `dtype` | `Source`, `bfloat16`, `float16`, `float32` | `"Source"` | Type of the cached weights; '
        "Source keeps each tensor's own. |",
        "| `port` | integer, 1 to 65535 | `8000` | Port of the Service and the pods. |",
        "| `suspend` | boolean | `false` | Stops all engines without forgetting the deployment; "
        "entries are kept. |",
        "| `affinity` | object, handed on | `{}` | Affinity (core type) of the engine pods. |",
        "| `id` | string, at most 64 | needed | Identity of the entry in this list. |",
    ):
        assert row in rows


def test_folder_is_needed() -> None:
    """Without DIR the command says so."""
    with pytest.raises(SystemExit, match="2"):
        main([])

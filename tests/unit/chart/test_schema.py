"""values.schema.json: every value has a bad one that is refused, by its path; every object refuses unknown keys."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from unit.chart.rendering import CHART, template

SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
Path = tuple[str, ...]


def resolved(schema: Any) -> Any:
    """A schema with its reference followed."""
    if isinstance(schema, dict) and "$ref" in schema:
        return {**SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]], **schema}
    return schema


def places(schema: Any, path: Path = ()) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Every value that the schema knows, with one item of each list and one member of each free map."""
    schema = resolved(schema)
    if schema is False:
        return
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from places(child, (*path, name))
    for free in (schema.get("additionalProperties"), *schema.get("patternProperties", {}).values()):
        if isinstance(free, dict):
            yield from places(free, (*path, "some"))
    if "items" in schema:
        yield from places(schema["items"], (*path, "0"))


def is_leaf(schema: dict[str, Any]) -> bool:
    """Whether nothing below it is described."""
    described = any(schema.get(key) for key in ("properties", "patternProperties", "items"))
    return not described and not isinstance(schema.get("additionalProperties"), dict)


def wrong(schema: dict[str, Any]) -> Any:
    """A value that the schema must refuse."""
    if "enum" in schema:
        return "Nonsense"
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if "pattern" in schema and "string" in types:
        return "no way: !"
    return next(
        value
        for kinds, value in (({"string"}, "text"), ({"object"}, {}), ({"integer", "number"}, 1))
        if not kinds & set(types)
    )


def put(tree: Any, path: Path, value: Any) -> Any:
    """`tree` with a value at a path; numbers are places in lists."""
    if not path:
        return value
    head, *rest = path
    if head == "0":
        return [put(tree[0] if tree else {}, tuple(rest), value)]
    tree = dict(tree or {})
    tree[head] = put(tree.get(head), tuple(rest), value)
    return tree


def refusals(values: dict[str, Any]) -> str:
    """What helm says; the test fails where it takes the values."""
    done = template(values=values)
    assert done.returncode != 0, "helm took values that it should refuse"
    assert "values don't meet the specifications of the schema" in done.stderr, done.stderr
    return done.stderr


LEAVES = [
    (path, schema) for path, schema in places(SCHEMA) if path and is_leaf(schema) and path != ("global",)
]
BRANCHES = [(path, schema) for path, schema in places(SCHEMA) if schema.get("additionalProperties") is False]


def test_every_value_has_a_bad_one_that_is_refused_by_its_path() -> None:
    """All of them at once: helm names every one."""
    values: dict[str, Any] = {}
    for path, schema in LEAVES:
        values = put(values, path, wrong(schema))
    said = refusals(values)
    missed = [path for path, _ in LEAVES if f"at '/{'/'.join(path)}'" not in said]
    assert missed == []
    assert len(LEAVES) > 90


def test_every_object_refuses_unknown_keys_by_name() -> None:
    """A misspelt value is an error and not a default."""
    values: dict[str, Any] = {}
    for path, _ in BRANCHES:
        values = put(values, (*path, "not a key!"), 1)
    said = refusals(values)
    missed = []
    for path, _ in BRANCHES:
        where = re.escape("/" + "/".join(path) if path else "")
        if not re.search(rf"at '{where}'.*'not a key!'", said):
            missed.append(path)
    assert missed == []
    assert len(BRANCHES) > 25


def test_every_default_is_described() -> None:
    """No value in values.yaml that the schema does not know, and none in the schema that values.yaml hides."""
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    for name, schema in SCHEMA["properties"].items():
        if name == "global":
            continue
        assert name in defaults
        for child in resolved(schema).get("properties", {}):
            assert child in defaults[name], f"{name}.{child} is not in values.yaml"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"operator": {"replicas": 0}}, "at '/operator/replicas': minimum: got 0, want 1"),
        ({"operator": {"replicas": 4}}, "at '/operator/replicas': maximum: got 4, want 3"),
        ({"operator": {"workers": 1.5}}, "at '/operator/workers': got number, want integer"),
        ({"image": {"pullPolicy": "Sometimes"}}, "at '/image/pullPolicy': value must be one of 'Always'"),
        ({"agent": {"resources": {"limits": {"memory": "1Gi"}}}}, "at '/agent/resources/limits/memory': false schema"),
        ({"agent": {"image": {"digest": "sha256:abc"}}}, "at '/agent/image/digest': 'sha256:abc' does not match"),
        ({"agent": {"maxUnavailable": "200%"}}, "at '/agent/maxUnavailable'"),
        ({"nodeClasses": []}, "at '/nodeClasses': minItems: got 0, want 1"),
        ({"sourceRoots": [{"name": "a"}]}, "at '/sourceRoots/0': 'oneOf' failed"),
        ({"sourceRoots": [{"name": "a", "hostPath": "/a", "persistentVolumeClaim": "b"}]},
          "at '/sourceRoots/0': 'oneOf'"),
        ({"sourceRoots": [{"name": "samples", "hostPath": "/a"}]}, "at '/sourceRoots/0/name': 'not' failed"),
        ({"sourceRoots": [{"name": "a", "hostPath": "/a/../b"}]}, "at '/sourceRoots/0/hostPath': 'not' failed"),
        ({"endpoints": {"s3": [{"name": "a", "url": "ftp://a"}]}}, "at '/endpoints/s3/0/url': 'ftp://a' does not"),
        ({"endpoints": {"hub": [{"name": "a", "url": "https://user:word@a"}]}}, "at '/endpoints/hub/0/url'"),
        ({"layouts": {"Bad Name": "{}"}}, "at '/layouts': additional properties 'Bad Name' not allowed"),
        ({"monitoring": {"rules": {"mode": True}}}, "at '/monitoring/rules/mode': value must be one of 'Off'"),
        ({"networkPolicy": {"apiServer": {"ports": []}}}, "at '/networkPolicy/apiServer/ports': minItems"),
        ({"cleanup": None}, "missing property 'cleanup'"),
    ],
)  # fmt: skip
def test_messages_say_where_and_what(values: dict[str, Any], message: str) -> None:
    """Ranges, words and patterns that a wrong type does not try."""
    assert message in refusals(values)


NODE_CLASS = {"root": {"path": "/a", "init": True}, "warmBudget": "0", "headroom": "0"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"nodeClasses": [{"name": "a", **NODE_CLASS}, {"name": "b", **NODE_CLASS, "nodeSelector": {"disk": "b"}}]},
            "a and b may pick the same node",
        ),
        (
            {
                "nodeClasses": [
                    {"name": "a", **NODE_CLASS, "nodeSelector": {"disk": "a", "zone": "x"}},
                    {"name": "b", **NODE_CLASS, "nodeSelector": {"zone": "x"}},
                ]
            },
            "set one label in both nodeSelectors, with two values",
        ),
        (
            {
                "nodeClasses": [
                    {"name": "a", **NODE_CLASS, "nodeSelector": {"disk": "a"}},
                    {"name": "a", **NODE_CLASS, "nodeSelector": {"disk": "b"}},
                ]
            },
            "nodeClasses: the name a is given twice",
        ),
        (
            {"endpoints": {"hub": [{"name": "a", "url": "https://a"}, {"name": "a", "url": "https://b"}]}},
            "endpoints.hub: the name a is given twice",
        ),
        (
            {"sourceRoots": [{"name": "a", "hostPath": "/a", "nodeClasses": ["fast"]}]},
            "sourceRoots: a names the node class fast, which is not one of nodeClasses (default)",
        ),
        ({"layouts": {"mine": "not: json"}}, "layouts: mine is not a JSON object"),
    ],
)  # fmt: skip
def test_what_a_schema_cannot_say_is_refused_while_rendering(values: dict[str, Any], message: str) -> None:
    """Two agents on a node would be two owners of one disk."""
    done = template(values=values)
    assert done.returncode != 0
    assert message in done.stderr

"""The reference page of the API: fields, rules and gaps as Markdown tables, from the schemas. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from dlo_api.advice import ADVICE
from dlo_api.conditions import DEPLOYMENT_CONDITIONS, NODE_CONDITIONS, NODE_REASONS, REASONS
from dlo_api.names import API_VERSION
from dlo_api.rules import RULES
from dlo_api.structural import Schema
from dlo_api.unbuilt import UNBUILT

_INTRODUCTION = (
    f"Both kinds belong to `{API_VERSION}`. Sizes are quantity strings such as `64Gi`; durations are whole "
    "numbers with the unit in the name. A field without a default that is not marked as needed may be absent."
)


def render_reference(kinds: Sequence[tuple[str, Schema]]) -> str:
    """The page: one section a kind, then admission rules, what is not built yet, and conditions.

    Args:
        kinds: name and `openAPIV3Schema` of each kind, in order.
    """
    lines = ["<!-- Generated from dlo_api by `make generate`; do not edit. -->", "", "# API reference", ""]
    lines += [_INTRODUCTION, ""]
    for name, schema in kinds:
        lines += [f"## {name}", "", schema["description"], ""]
        for part in ("spec", "status"):
            lines += _object(part, schema["properties"][part])
    lines += _rules() + _gaps() + _conditions()
    return "\n".join(lines).rstrip() + "\n"


def _object(path: str, schema: Schema) -> list[str]:
    """Tables of the object at `path` and of the objects below it."""
    fields: Schema = schema.get("properties", {})
    needed = schema.get("required", [])
    rows = [
        [f"`{name}`", _type(field), _default(field, needed=name in needed), field.get("description", "")]
        for name, field in fields.items()
    ]
    lines = [f"### `{path}`", "", *_table(("field", "type", "default", "meaning"), rows), ""]
    for name, field in fields.items():
        if "properties" in field:
            lines += _object(f"{path}.{name}", field)
        elif "properties" in field.get("items", {}):
            lines += _object(f"{path}.{name}[]", field["items"])
    return lines


def _type(schema: Schema) -> str:
    if "enum" in schema:
        return ", ".join(f"`{word}`" for word in schema["enum"])
    kind = schema.get("type", "integer or string")
    if kind == "array":
        items = schema["items"]
        bounds = _bounds(schema, "minItems", "maxItems")
        text = f"list of {'object' if items['type'] == 'object' else _type(items).partition(',')[0]}{bounds}"
    elif "additionalProperties" in schema:
        text = f"map of {schema['additionalProperties']['type']}{_bounds(schema, '', 'maxProperties')}"
    elif schema.get("x-kubernetes-preserve-unknown-fields"):
        text = "object, handed on"
    elif kind == "string":
        text = "time" if schema.get("format") == "date-time" else f"string{_bounds(schema, '', 'maxLength')}"
    else:
        text = f"{kind}{_bounds(schema, 'minimum', 'maximum')}"
    return text


def _bounds(schema: Schema, least: str, most: str) -> str:
    low, high = schema.get(least), schema.get(most)
    if low is not None and high is not None:
        return f", {low} to {high}"
    if high is not None:
        return f", at most {high}"
    return f", at least {low}" if low is not None else ""


def _default(schema: Schema, *, needed: bool) -> str:
    if needed:
        return "needed"
    if "default" not in schema:
        return ""
    if schema.get("properties"):
        return "as below"
    return f"`{json.dumps(schema['default'], ensure_ascii=False)}`"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


def _rules() -> list[str]:
    rows = [
        [
            f"`{rule.name}`",
            f"`{rule.field_path}`",
            rule.what,
            rule.change,
            "cluster" if rule.cluster_only else "update" if rule.transition else "always",
        ]
        for rule in RULES
    ]
    text = "Checked by the API server on every write, and by `dlo run` and `dlo plan`."
    return [
        "## Admission rules",
        "",
        text,
        "",
        *_table(("rule", "field", "refused because", "what to change", "when"), rows),
        "",
    ]


def _gaps() -> list[str]:
    rows = [
        [
            f"`{entry.name}`",
            f"`{entry.field_path}`",
            entry.what,
            entry.change,
            ", ".join(sorted(place.value.lower() for place in entry.where)),
        ]
        for entry in UNBUILT
    ]
    return [
        "## Admitted, but not built yet",
        "",
        "Refused with the reason `UnsupportedCombination`.",
        "",
        *_table(("name", "field", "refused because", "what to change", "where"), rows),
        "",
    ]


def _conditions() -> list[str]:
    lines = ["## Conditions", ""]
    for title, types, reasons in (
        ("DiffusionDeployment", DEPLOYMENT_CONDITIONS, REASONS),
        ("NodeWeightCache", NODE_CONDITIONS, NODE_REASONS),
    ):
        rows = [[f"`{kind}`", ", ".join(f"`{reason}`" for reason in reasons[kind])] for kind in types]
        lines += [f"### Conditions of a {title}", "", *_table(("type", "reasons"), rows), ""]
    advice = [[f"`{reason}`", ADVICE[reason]] for reason in sorted(ADVICE)]
    return [*lines, "### What to do about a reason", "", *_table(("reason", "what to do"), advice), ""]

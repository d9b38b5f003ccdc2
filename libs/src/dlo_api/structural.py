"""A pydantic model to a structural schema, as a CustomResourceDefinition needs it. Pure.

Pydantic writes JSON Schema, the API server takes a narrow part of OpenAPI 3.0. `structural_schema` has
pydantic write its schema and walks it once, turning each construct into what the server accepts and refusing,
at generation time, what the server cannot be told.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel

from dlo_api.errors import SchemaUnsupported

Schema = dict[str, Any]

_PRESERVE: Final = "x-kubernetes-preserve-unknown-fields"
_INT_OR_STRING: Final = "x-kubernetes-int-or-string"
_DROPPED: Final = frozenset({"title", "deprecated", "readOnly", "writeOnly", "examples", "$defs"})
_REFUSED: Final = {
    "prefixItems": "a tuple of several types; use an object with named fields",
    "oneOf": "a union; use one optional member per variant and a rule",
    "discriminator": "a union; use one optional member per variant and a rule",
    "not": "a negation",
    "if": "a condition",
    "contains": "a condition on items",
}
# Look-around and back-references: the server compiles patterns with RE2.
_NOT_RE2: Final = re.compile(r"\(\?(=|!|<=|<!|P=|>)|\\[1-9]|[*+?}]\+")
_CAMEL_CASE: Final = re.compile(r"[a-z][a-zA-Z0-9]*")
_MAX_DESCRIPTION: Final = 512


def structural_schema(model: type[BaseModel]) -> Schema:
    """The structural schema of `model`, with JSON names, everything inlined.

    Raises:
        SchemaUnsupported: the model holds something a CRD cannot express; names where.
    """
    written = model.model_json_schema(by_alias=True, mode="validation")
    return normalise(written, written.get("$defs", {}))


def normalise(node: Mapping[str, Any], definitions: Mapping[str, Any], where: str = "") -> Schema:
    """One JSON Schema node, and all below it, as a structural schema; `where` names it in errors."""
    schema = _inlined(dict(node), definitions, where, ())
    for word, meaning in _REFUSED.items():
        if word in schema:
            raise _refused(where, meaning)
    _words(schema, where)
    _numbers(schema)
    _lists(schema, where)
    _maps(schema, where)
    if "pattern" in schema and _NOT_RE2.search(schema["pattern"]):
        raise _refused(where, f"the pattern {schema['pattern']}, which RE2 does not take")
    if not {"type", _INT_OR_STRING, _PRESERVE} & schema.keys():
        raise _refused(where, "a value without a type")
    if "properties" in schema:
        for name in schema["properties"]:
            if not _CAMEL_CASE.fullmatch(name):
                raise _refused(f"{where}.{name}", "a name that is not camelCase")
        schema["properties"] = {
            name: normalise(value, definitions, f"{where}.{name}")
            for name, value in schema["properties"].items()
        }
    for word in ("items", "additionalProperties"):
        if word in schema:
            schema[word] = normalise(schema[word], definitions, f"{where}[]")
    if "default" in schema:
        schema["default"] = _without_nulls(schema["default"])
    return schema


def _refused(where: str, what: str) -> SchemaUnsupported:
    return SchemaUnsupported(f"{where or 'the model'}: {what}", hint="a CRD schema cannot express it")


def _inlined(schema: Schema, definitions: Mapping[str, Any], where: str, seen: tuple[str, ...]) -> Schema:
    """References and nullable unions resolved; words beside a reference win over the referred ones."""
    if "$ref" in schema:
        name = schema.pop("$ref").rsplit("/", 1)[-1]
        if name in seen or where.count(".") > 32:
            raise _refused(where, f"the recursive model {name}")
        return _inlined({**definitions[name], **schema}, definitions, where, (*seen, name))
    if len(schema.get("allOf", ())) == 1:
        (only,) = schema.pop("allOf")
        return _inlined({**only, **schema}, definitions, where, seen)
    if "allOf" in schema:
        raise _refused(where, "an intersection")
    if "anyOf" in schema:
        branches = [branch for branch in schema.pop("anyOf") if branch.get("type") != "null"]
        if schema.get("default", ...) is None:
            del schema["default"]
        if len(branches) == 1:
            return _inlined({**branches[0], **schema}, definitions, where, seen)
        if {branch.get("type") for branch in branches} != {"integer", "string"}:
            raise _refused(where, "a union; use one optional member per variant and a rule")
        schema[_INT_OR_STRING] = True
    return schema


def _words(schema: Schema, where: str) -> None:
    """Keywords that are dropped, renamed or bounded."""
    remarks = ["Deprecated."] if schema.get("deprecated") else []
    if schema.get("readOnly"):
        remarks.append("Read-only.")
    remarks += [f"For example {example!r}." for example in schema.get("examples", ())]
    for word in _DROPPED & schema.keys():
        del schema[word]
    if remarks:
        schema["description"] = " ".join([schema.get("description", ""), *remarks]).strip()
    if "description" in schema:
        schema["description"] = " ".join(schema["description"].split())
        if len(schema["description"]) > _MAX_DESCRIPTION:
            raise _refused(where, f"a description of more than {_MAX_DESCRIPTION} characters")
    if "const" in schema:
        schema["enum"] = [schema.pop("const")]
    if schema.get("format") == "duration":
        raise _refused(where, "a duration; use a whole number of seconds with the unit in its name")
    if schema.get("format") == "binary":
        schema["format"] = "byte"


def _numbers(schema: Schema) -> None:
    """Numeric exclusive bounds: inclusive ones for integers, a boolean beside the bound for numbers."""
    for exclusive, inclusive, step in (
        ("exclusiveMinimum", "minimum", 1),
        ("exclusiveMaximum", "maximum", -1),
    ):
        bound = schema.get(exclusive)
        if bound is None or isinstance(bound, bool):
            continue
        if schema.get("type") == "integer":
            del schema[exclusive]
            schema[inclusive] = bound + step
        else:
            schema[inclusive] = bound
            schema[exclusive] = True


def _lists(schema: Schema, where: str) -> None:
    if schema.pop("uniqueItems", False):
        if schema.get("items", {}).get("type") not in {"string", "integer", "boolean"}:
            raise _refused(where, "a set of something other than plain values")
        schema["x-kubernetes-list-type"] = "set"
    if schema.get("type") == "array" and "items" not in schema:
        raise _refused(where, "a list without a type of its items")


def _maps(schema: Schema, where: str) -> None:
    keys = schema.pop("propertyNames", {}).get("pattern")
    patterns = schema.pop("patternProperties", {})
    if len(patterns) > 1:
        raise _refused(where, "a map with several patterns of keys")
    for pattern, value in patterns.items():
        keys, schema["additionalProperties"] = pattern, value
    if keys is not None:
        if "maxProperties" not in schema:
            raise _refused(where, "a map with constrained keys and no bound")
        rule = {
            "rule": f"self.all(key, key.matches(r'{keys}'))",
            "message": f"a key does not have the form {keys}: rename it",
        }
        schema.setdefault("x-kubernetes-validations", []).append(rule)
    if schema.get("additionalProperties") is False or schema.get(_PRESERVE):
        schema.pop("additionalProperties", None)
    elif schema.get("type") == "object" and (
        schema.get("additionalProperties", ...) in (True, ...) and "properties" not in schema
    ):
        raise _refused(where, f"a free object; mark it {_PRESERVE}")


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value

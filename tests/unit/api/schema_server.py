"""A fake of the API server's admission of one kind: pruning, defaulting, schema validation, then CEL rules.

Works from the generated CRD alone and knows nothing of the models, so that it can be held against them.
Patterns are run by RE2 and rules by cel-python, as close to the server as Python comes.
"""

from __future__ import annotations

import copy
from typing import Any

import celpy
import re2  # type: ignore[import-untyped]

_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
}
_SET, _MAP = "set", "map"


class SchemaServer:
    """Admits or refuses objects of one CRD."""

    def __init__(self, crd: dict[str, Any]) -> None:
        self.schema: dict[str, Any] = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        environment = celpy.Environment()
        self.rules = [
            (
                where,
                rule["message"],
                "oldSelf" in rule["rule"],
                environment.program(environment.compile(rule["rule"])),
            )
            for where, holder in (("", self.schema), ("spec", self.schema["properties"]["spec"]))
            for rule in holder.get("x-kubernetes-validations", ())
        ]

    def admit(
        self, value: dict[str, Any], old: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], list[str]]:
        """The object as it would be stored, and why it is refused (empty when it is not)."""
        stored = _defaulted(self.schema, copy.deepcopy(value))
        errors = _errors(self.schema, stored, "")
        return stored, errors or self.broken(stored, old)

    def broken(self, stored: dict[str, Any], old: dict[str, Any] | None = None) -> list[str]:
        """Messages of the rules that a stored object breaks."""
        now = celpy.json_to_cel(stored)
        before = celpy.json_to_cel(old) if old is not None else None
        messages = []
        for where, message, transition, program in self.rules:
            if transition and before is None:
                continue
            context = {"self": now[where] if where else now}
            if before is not None:
                context["oldSelf"] = before[where] if where else before
            if not program.evaluate(context):
                messages.append(message)
        return messages


def _defaulted(schema: dict[str, Any], value: Any) -> Any:
    """Nulls and unknown fields dropped, defaults put in, as the server does it."""
    if isinstance(value, dict):
        for name in [name for name, item in value.items() if item is None]:
            del value[name]
        if "properties" in schema:
            for name, field in schema["properties"].items():
                if name not in value and "default" in field:
                    value[name] = copy.deepcopy(field["default"])
            for name in [name for name in value if name not in schema["properties"]]:
                del value[name]
        for name, item in value.items():
            inner = schema.get("properties", {}).get(name, schema.get("additionalProperties", {}))
            value[name] = _defaulted(inner, item)
    elif isinstance(value, list):
        value[:] = [_defaulted(schema.get("items", {}), item) for item in value]
    return value


def _errors(schema: dict[str, Any], value: Any, where: str) -> list[str]:
    if schema.get("x-kubernetes-int-or-string"):
        right = isinstance(value, int | str) and not isinstance(value, bool)
        return [] if right else [f"{where}: not an integer or string"]
    wanted = schema.get("type")
    if wanted is not None and (
        not isinstance(value, _TYPES[wanted]) or (isinstance(value, bool) and wanted != "boolean")
    ):
        return [f"{where}: not a {wanted}"]
    errors = _scalar_errors(schema, value, where)
    if isinstance(value, dict):
        errors += [f"{where}.{name}: required" for name in schema.get("required", ()) if name not in value]
        if len(value) > schema.get("maxProperties", len(value)):
            errors.append(f"{where}: too many")
        for name, item in value.items():
            inner = schema.get("properties", {}).get(name, schema.get("additionalProperties", {}))
            errors += _errors(inner, item, f"{where}.{name}")
    if isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            errors.append(f"{where}: too few or too many")
        for item in value:
            errors += _errors(schema.get("items", {}), item, f"{where}[]")
        errors += _list_errors(schema, value, where) if not errors else []
    return errors


def _list_errors(schema: dict[str, Any], value: list[Any], where: str) -> list[str]:
    kind = schema.get("x-kubernetes-list-type")
    if kind == _SET:
        keys = [str(item) for item in value]
    elif kind == _MAP:
        keys = [str([item.get(key) for key in schema["x-kubernetes-list-map-keys"]]) for item in value]
    else:
        return []
    return [f"{where}: duplicate"] if len(set(keys)) != len(keys) else []


def _scalar_errors(schema: dict[str, Any], value: Any, where: str) -> list[str]:
    errors = []
    if "enum" in schema and value not in schema["enum"]:
        errors.append(f"{where}: not one of {schema['enum']}")
    if isinstance(value, str):
        if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)):
            errors.append(f"{where}: too short or too long")
        if "pattern" in schema and re2.search(schema["pattern"], value) is None:
            errors.append(f"{where}: does not match {schema['pattern']}")
    if isinstance(value, int) and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        errors.append(f"{where}: out of range")
    return errors

"""A manifest's text to a checked DiffusionDeployment, with errors a person can act on.

Accepts what the API server accepts, and says why not where it does not; unknown fields, which the server
would prune, are refused. Never raises anything but ApiError, whatever the text.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any, Final, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from dlo_api.errors import ManifestInvalid, Problem, RuleViolated, combine
from dlo_api.meta import SERVER_FIELDS
from dlo_api.names import API_VERSION, DIFFUSION_DEPLOYMENT
from dlo_api.rules import violations
from dlo_api.v1alpha1.diffusion_deployment import DiffusionDeployment
from dlo_api.yamldoc import Document, Path, read_document

_METADATA: Final = frozenset({"name", "namespace", "labels", "annotations"}) | SERVER_FIELDS
_WANTED: Final = {
    "int_type": "a whole number",
    "string_type": "a string",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "a map",
    "model_type": "a map",
    "model_attributes_type": "a map",
    "too_short": "a list with more items",
}
_MOST_SHOWN: Final = 50


def load_manifest(text: str, file: str, *, cluster: bool = False) -> DiffusionDeployment:
    """The DiffusionDeployment in `text`.

    Args:
        text: the manifest, one YAML (or JSON) document.
        file: its name, for messages.
        cluster: whether the rules that hold only in a cluster count.

    Raises:
        ManifestUnreadable: not one plain YAML document; names the line.
        ManifestInvalid: not a DiffusionDeployment, unknown fields, wrong types or values; names each path.
        RuleViolated: admission rules are broken; lists all of them.
    """
    document = read_document(text, file)
    _check_kind(document, file)
    value = _without_nulls(document.value)
    unknown = _unknown_metadata(value, document)
    _drop_server_fields(value)
    try:
        deployment = DiffusionDeployment.model_validate_json(json.dumps(value), by_alias=True, by_name=False)
    except ValidationError as error:
        problems = (*unknown, *_problems(error, document))
        raise combine(ManifestInvalid, file, problems[:_MOST_SHOWN]) from error
    if unknown:
        raise combine(ManifestInvalid, file, unknown)
    broken = violations(deployment, cluster=cluster)
    if broken:
        placed = tuple(
            Problem(p.path, p.message, p.hint, document.line(tuple(p.path.split("."))), p.rule)
            for p in broken
        )
        raise combine(RuleViolated, file, placed)
    return deployment


def _check_kind(document: Document, file: str) -> None:
    value = document.value
    if value is None:
        raise ManifestInvalid(f"{file} is empty", hint=f"give a {DIFFUSION_DEPLOYMENT}")
    if not isinstance(value, dict):
        raise ManifestInvalid(
            f"{file}: {_found(value)} where a map is needed", hint=f"give a {DIFFUSION_DEPLOYMENT}"
        )
    problems = [
        Problem(
            name,
            f"{wanted} is needed, found {_found(value.get(name))}",
            f"set it to {wanted}",
            document.line((name,)),
        )
        for name, wanted in (("apiVersion", API_VERSION), ("kind", DIFFUSION_DEPLOYMENT))
        if value.get(name) != wanted
    ]
    if problems:
        raise combine(ManifestInvalid, file, tuple(problems))


def _without_nulls(value: Any) -> Any:
    """The value as the API server sees it: a null field is no field."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _unknown_metadata(value: Mapping[str, Any], document: Document) -> tuple[Problem, ...]:
    metadata = value.get("metadata")
    if not isinstance(metadata, dict):
        return ()
    return tuple(
        _unknown(("metadata", name), sorted(_METADATA), document)
        for name in metadata
        if name not in _METADATA
    )


def _drop_server_fields(value: dict[str, Any]) -> None:
    """Leaves out what the API server wrote into an exported object; none of it is asked for."""
    value.pop("status", None)
    metadata = value.get("metadata")
    if isinstance(metadata, dict):
        value["metadata"] = {key: item for key, item in metadata.items() if key not in SERVER_FIELDS}


def _problems(error: ValidationError, document: Document) -> tuple[Problem, ...]:
    """Pydantic's findings in our words, in the file's order, one for each path."""
    found: dict[Path, Problem] = {}
    for details in error.errors(include_url=False):
        path = _in_document(tuple(details["loc"]), document.value)
        found.setdefault(path, _problem(path, details, document))
    return tuple(sorted(found.values(), key=lambda problem: problem.line or 0))


def _in_document(path: Path, value: Any) -> Path:
    """`path` without the parts that name a branch of a union and no field of the document."""
    kept: list[str | int] = []
    for index, part in enumerate(path):
        if isinstance(value, dict) and isinstance(part, str):
            if part in value or index == len(path) - 1:
                kept.append(part)
                value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            kept.append(part)
            value = value[part]
    return tuple(kept)


def _problem(path: Path, details: ErrorDetails, document: Document) -> Problem:
    kind = details["type"]
    context: Mapping[str, Any] = details.get("ctx") or {}
    if kind == "extra_forbidden":
        return _unknown(path, _known_names(path), document)
    dotted, line = spell(path), document.line(path)
    if kind == "missing":
        return Problem(dotted, "is missing", "add it", line)
    if path == ("spec", "offload", "residentLayers"):
        return Problem(
            dotted, f"a whole number or Auto is needed, found {_found(details['input'])}", "", line
        )
    found = _found(details["input"])
    if path in document.words and isinstance(details["input"], bool):
        word = document.words[path]
        return Problem(
            dotted, f"YAML reads {word} as {found}, and a string is needed", f'quote it: "{word}"', line
        )
    message, hint = _words(kind, path, details, context)
    return Problem(dotted, message, hint, line)


def _words(kind: str, path: Path, details: ErrorDetails, context: Mapping[str, Any]) -> tuple[str, str]:
    found = _found(details["input"])
    message, hint = f"{_lower(details['msg'])}, found {found}", ""
    if kind == "literal_error":
        near = difflib.get_close_matches(str(details["input"]), _choices(str(context["expected"])), 1)
        hint = f"did you mean {near[0]}?" if near else ""
        message = f"one of {context['expected']} is needed, found {found}"
    elif kind in _WANTED:
        message = f"{_WANTED[kind]} is needed, found {found}"
    elif kind == "string_pattern_mismatch":
        message, hint = f"{found} does not have the form {context['pattern']}", _FORMS.get(path[-1], "")
    elif kind == "value_error":
        message, hint = str(context["error"]), "remove one of the two"
    return message, hint


_FORMS: Final[dict[str | int, str]] = {
    "name": "use lower-case letters, digits and '-'",
    "deviceMemoryBudget": "write a size like 20Gi, as a string",
    "limit": "write a size like 64Gi, as a string",
}


def _unknown(path: Path, known: list[str], document: Document) -> Problem:
    name = str(path[-1])
    near = difflib.get_close_matches(name, known, 1, 0.6) or [k for k in known if k.lower() == name.lower()]
    hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}"
    return Problem(spell(path), "unknown field", hint, document.line(path))


def _known_names(path: Path) -> list[str]:
    """Names of the fields beside the one at `path`."""
    model: type[BaseModel] | None = DiffusionDeployment
    for part in path[:-1]:
        if model is None or isinstance(part, int):
            continue
        model = next(
            (_model_in(info.annotation) for info in model.model_fields.values() if info.alias == part), None
        )
    return [info.alias or name for name, info in model.model_fields.items()] if model is not None else []


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for part in get_args(annotation) if (model := _model_in(part)) is not None), None)


def _choices(expected: str) -> list[str]:
    return [word.strip("' ") for word in expected.replace(" or ", ",").split(",")]


def _found(value: Any) -> str:
    """A value in a message: short, and never a dump."""
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a map"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def spell(path: Path) -> str:
    """A path as people write it: `spec.engine.extraArgs[2]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text

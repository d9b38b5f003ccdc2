"""The generated files: one CustomResourceDefinition a kind, and the reference page of all fields.

    python -m dlo_api.crdgen DIR            write the CRDs into DIR
    python -m dlo_api.crdgen --check DIR    compare DIR with them; exit status 1 when it differs
    python -m dlo_api.crdgen --reference    print docs/reference/api.md

The models are the one source; these files are never edited by hand.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import BaseModel

from dlo_api import names
from dlo_api.reference import render_reference
from dlo_api.rules import RULES, Rule
from dlo_api.structural import Schema, structural_schema
from dlo_api.v1alpha1 import DiffusionDeployment, NodeWeightCache

_HEADER: Final = "# Generated from dlo_api by `make generate`; do not edit.\n"


@dataclass(frozen=True)
class Column:
    """One column of `kubectl get`; `wide` ones only with `-o wide`."""

    name: str
    type: str
    path: str
    wide: bool = False


@dataclass(frozen=True)
class Kind:
    """What a CRD says of a kind beside its schema."""

    model: type[BaseModel]
    name: str
    plural: str
    short: str
    scope: str
    columns: tuple[Column, ...]
    scale: bool = False
    rules: tuple[Rule, ...] = ()

    @property
    def crd(self) -> str:
        """Name of the CRD object."""
        return f"{self.plural}.{names.GROUP}"

    @property
    def file(self) -> str:
        """Name of the generated file."""
        return f"{names.GROUP}_{self.plural}.yaml"


def _condition(kind: str, member: str) -> str:
    return f'.status.conditions[?(@.type=="{kind}")].{member}'


_AGE: Final = Column("AGE", "date", ".metadata.creationTimestamp")

KINDS: Final = (
    Kind(
        model=DiffusionDeployment,
        name=names.DIFFUSION_DEPLOYMENT,
        plural=names.DIFFUSION_DEPLOYMENTS,
        short="ddep",
        scope="Namespaced",
        scale=True,
        rules=RULES,
        columns=(
            Column("READY", "string", _condition("Ready", "status")),
            Column("REASON", "string", _condition("Ready", "reason")),
            Column("CACHE", "string", ".status.cache.summary"),
            Column("REPLICAS", "integer", ".status.readyReplicas"),
            Column("MODE", "string", ".spec.offload.mode"),
            _AGE,
            Column(
                "MODEL",
                "string",
                ".spec.model.source['directory.path','huggingFace.repo','s3.bucket']",
                wide=True,
            ),
            Column("REVISION", "string", ".status.revision.current", wide=True),
            Column("SAVED", "integer", ".status.cache.savedBytesPerNode", wide=True),
        ),
    ),
    Kind(
        model=NodeWeightCache,
        name=names.NODE_WEIGHT_CACHE,
        plural=names.NODE_WEIGHT_CACHES,
        short="nwcache",
        scope="Cluster",
        columns=(
            Column("READY", "string", _condition("Ready", "status")),
            Column("REASON", "string", _condition("Ready", "reason")),
            Column("USED", "integer", ".status.root.usedBytes"),
            Column("FREE", "integer", ".status.root.freeBytes"),
            _AGE,
            Column("PATH", "string", ".status.root.path", wide=True),
            Column("AGENT", "string", ".status.agentVersion", wide=True),
        ),
    ),
)


def object_schema(kind: Kind) -> Schema:
    """The `openAPIV3Schema` of a kind, admission rules included."""
    schema = structural_schema(kind.model)
    properties = schema["properties"]
    for name in ("apiVersion", "kind"):
        properties[name] = {"type": "string", "description": properties[name]["description"]}
    # The server owns metadata; a schema may say nothing more of it.
    properties["metadata"] = {"type": "object"}
    properties["status"] = without_defaults(properties["status"])
    schema["required"] = [name for name in schema["required"] if name == "spec"]
    if not schema["required"]:
        del schema["required"]
    for holder, prefix, rules in (
        (schema, "", [rule for rule in kind.rules if not rule.on_spec]),
        (properties["spec"], "spec", [rule for rule in kind.rules if rule.on_spec]),
    ):
        if rules:
            holder["x-kubernetes-validations"] = [_validation(rule, prefix) for rule in rules]
    return schema


def _validation(rule: Rule, prefix: str) -> dict[str, str]:
    validation = {"rule": rule.cel, "message": rule.message}
    if prefix:
        # A root rule's path may not go into metadata, of which the schema knows nothing.
        validation["fieldPath"] = rule.field_path.removeprefix(prefix)
    return validation


def without_defaults(schema: Any) -> Any:
    """The schema without defaults: what is not known stays absent from a status."""
    if isinstance(schema, list):
        return [without_defaults(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: {key: without_defaults(value) for key, value in item.items()}
        if name == "properties"
        else without_defaults(item)
        for name, item in schema.items()
        if name != "default"
    }


def custom_resource_definition(kind: Kind) -> dict[str, Any]:
    """The CRD object of a kind."""
    subresources: dict[str, Any] = {"status": {}}
    if kind.scale:
        subresources["scale"] = {
            "specReplicasPath": ".spec.replicas",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.selector",
        }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": kind.crd},
        "spec": {
            "group": names.GROUP,
            "names": {
                "kind": kind.name,
                "listKind": f"{kind.name}List",
                "plural": kind.plural,
                "singular": kind.name.lower(),
                "shortNames": [kind.short],
                "categories": [names.CATEGORY],
            },
            "scope": kind.scope,
            "versions": [
                {
                    "name": names.VERSION,
                    "served": True,
                    "storage": True,
                    "additionalPrinterColumns": [_column(column) for column in kind.columns],
                    "subresources": subresources,
                    "schema": {"openAPIV3Schema": object_schema(kind)},
                }
            ],
        },
    }


def _column(column: Column) -> dict[str, Any]:
    written: dict[str, Any] = {"name": column.name, "type": column.type, "jsonPath": column.path}
    if column.wide:
        written["priority"] = 1
    return written


class _Dumper(yaml.SafeDumper):
    """Lists indented below their key, and equal parts written out each time."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - the base class's signature
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002 - as above
        super().increase_indent(flow, False)


def render(kind: Kind) -> str:
    """The generated file of a kind."""
    body = yaml.dump(
        custom_resource_definition(kind), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110
    )
    return _HEADER + body


def render_all() -> dict[str, str]:
    """All generated CRDs: file name -> text."""
    return {kind.file: render(kind) for kind in KINDS}


def check_folder(folder: Path) -> list[str]:
    """Names of the files in `folder` that are missing or differ from the generated ones."""
    return [name for name, text in render_all().items() if _read(folder / name) != text]


def _read(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def reference() -> str:
    """The text of docs/reference/api.md."""
    return render_reference([(kind.name, object_schema(kind)) for kind in KINDS])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m dlo_api.crdgen", description="Write the generated CRDs.")
    parser.add_argument("folder", metavar="DIR", type=Path, nargs="?", help="folder of the CRDs")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument("--reference", action="store_true", help="print the reference page instead")
    options = parser.parse_args(arguments)
    if options.reference:
        sys.stdout.write(reference())
        return 0
    if options.folder is None:
        parser.error("DIR is needed")
    if options.check:
        differing = check_folder(options.folder)
        for name in differing:
            sys.stderr.write(f"error: Drift: {options.folder / name} differs — run `make generate`\n")
        return 1 if differing else 0
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, text in render_all().items():
        (options.folder / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

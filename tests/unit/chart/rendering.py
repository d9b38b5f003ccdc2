"""Renders the chart with the real helm, and finds things in what comes out."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from clusterbin import binary

CHART = Path(__file__).parents[3] / "charts" / "dlo-operator"
VARIANTS = tuple(sorted(CHART.glob("ci/*-values.yaml")))
RELEASE, NAMESPACE = "dlo", "dlo-system"
MONITORING = "monitoring.coreos.com/v1"

Object = dict[str, Any]


class Rendered(NamedTuple):
    """One object, the template that it came from, and its text."""

    source: str
    obj: Object
    text: str


def helm(*words: str, values: Mapping[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    """One helm command, with values on its standard input where there are some."""
    more = ("-f", "-") if values is not None else ()
    return subprocess.run(
        [str(binary("helm")), *words, *more],
        input=json.dumps(values) if values is not None else None,
        capture_output=True,
        text=True,
        timeout=120,
    )


def template(
    *words: str, values: Mapping[str, Any] | None = None, variant: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """`helm template` of the chart, on top of a variant's values."""
    base = ("-f", str(variant)) if variant is not None else ()
    return helm("template", RELEASE, str(CHART), "-n", NAMESPACE, *base, *words, values=values)


def render(
    *words: str, values: Mapping[str, Any] | None = None, variant: Path | None = None
) -> tuple[Rendered, ...]:
    """The objects; fails the test where helm refuses the values."""
    done = template(*words, values=values, variant=variant)
    assert done.returncode == 0, done.stderr
    return tuple(split(done.stdout))


@lru_cache
def rendered(variant: str) -> tuple[Rendered, ...]:
    """The objects of a variant, by its name; do not change them."""
    return render(variant=CHART / "ci" / f"{variant}-values.yaml")


def split(text: str) -> Iterator[Rendered]:
    """The objects of a stream; each begins with a comment that names its template."""
    for document in text.split("\n---\n"):
        part = document.removeprefix("---\n").strip()
        obj = yaml.safe_load(part)
        if obj is None:
            continue
        source = part.splitlines()[0].removeprefix("# Source: dlo-operator/templates/")
        yield Rendered(source, obj, part + "\n")


def of_kind(objects: Sequence[Rendered], kind: str) -> list[Object]:
    """The objects of a kind."""
    return [item.obj for item in objects if item.obj["kind"] == kind]


def one(objects: Sequence[Rendered], kind: str, name: str) -> Object:
    """The object of this kind whose name ends with `name`."""
    found = [obj for obj in of_kind(objects, kind) if obj["metadata"]["name"].endswith(name)]
    assert len(found) == 1, [obj["metadata"]["name"] for obj in of_kind(objects, kind)]
    return found[0]


def pods(objects: Sequence[Rendered]) -> list[tuple[str, Object]]:
    """Name and pod spec of everything that makes pods."""
    found = []
    for obj in (item.obj for item in objects):
        where = f"{obj['kind']}/{obj['metadata']['name']}"
        if obj["kind"] == "Pod":
            found.append((where, obj["spec"]))
        elif obj["kind"] in ("Deployment", "DaemonSet", "Job", "StatefulSet", "CronJob", "ReplicaSet"):
            found.append((where, obj["spec"]["template"]["spec"]))
    return found


def containers(pod: Object) -> list[Object]:
    """All containers of a pod, init containers first."""
    return [*pod.get("initContainers", []), *pod["containers"]]

"""Finds out what a source is: its files with their digests, what can be cut, and the sizes a plan is made of.

Reads headers and configuration of what ``origins`` has opened. Must not write anything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final

from dlo_api.v1alpha1.node_weight_cache import NodeSource
from dlo_cache.canonical import canonical_json
from dlo_cache.errors import CacheError
from dlo_cache.image_plan import ImagePlan, plan_images
from dlo_cache.layout import Layout
from dlo_cache.layouts import builtin_architectures, builtin_layout
from dlo_cache.source import Component
from dlo_sources.pipeline import Pipeline

from dlo_agent.errors import SourceProblem
from dlo_agent.origins import Opened
from dlo_agent.references import Resolution

_SHORT: Final = 12


def check_pin(source: NodeSource, opened: Opened) -> None:
    """Raises SourceProblem (SourceMismatch) unless the bytes are those that the spec pins."""
    check_digest(source, opened, source.pin.digest or opened.digest)


def check_digest(source: NodeSource, opened: Opened, digest: str) -> None:
    """Raises SourceProblem (SourceMismatch) unless the source has this digest."""
    if opened.digest != digest:
        raise SourceProblem(
            f"source {source.id} has other bytes here than those pinned: "
            f"{opened.digest[:_SHORT]}, not {digest[:_SHORT]}",
            hint="restore the checkpoint on this node, or change spec.model to take the new one for all",
            code="SourceMismatch",
        )


def layout_for(component: Component, named: str, layouts: Mapping[str, Layout]) -> Layout:
    """The layout that cuts a component: the one of ``layouts`` that is named, else the built-in one of its
    class, else the first of ``layouts`` for it. Raises SourceProblem (UnknownLayout, UnknownArchitecture)."""
    if named:
        layout = layouts.get(named)
        if layout is None:
            raise SourceProblem(
                f"this node has no layout named {named!r} (known: {', '.join(sorted(layouts)) or 'none'})",
                hint="add it to the Helm values, or leave model.layout empty for the built-in one",
                code="UnknownLayout",
            )
        if layout.architecture != component.class_name:
            raise SourceProblem(
                f"layout {named!r} is for {layout.architecture}; component {component.name} is a"
                f" {component.class_name}",
                hint="name a layout of the component's class, or leave model.layout empty",
                code="UnknownLayout",
            )
        return layout
    found = _usual_layout(component.class_name, layouts)
    if found is None:
        raise SourceProblem(
            f"component {component.name}: no layout for the architecture {component.class_name}",
            hint=f"built in are {', '.join(builtin_architectures())}",
            code="UnknownArchitecture",
        )
    return found


def resolution_of(source: NodeSource, opened: Opened, known: Mapping[str, Layout]) -> Resolution:
    """What status says about a source, and what entries built from it depend on."""
    pipeline = opened.pipeline
    layouts: dict[str, Layout] = {}
    components: list[dict[str, Any]] = []
    for component in pipeline.components.values():
        if not component.weights:
            continue
        found: dict[str, Any] = {"name": component.name, "bytes": component.tensor_bytes}
        fitting = _fitting(component, known)
        if fitting is not None:
            layouts[component.name], plans = fitting
            found |= _block_facts(plans)
        components.append(found)
    files = pipeline.all_files()
    streamed = tuple(layouts)
    facts: dict[str, Any] = {
        "revision": opened.revision,
        "digest": opened.digest,
        "files": len(files),
        "bytes": sum(file.size for file in files),
        "components": components,
        "restBytes": sum(file.size for file in pipeline.rest_files(streamed)),
        **_architecture(pipeline, layouts),
    }
    return Resolution(
        digest=opened.digest,
        basis=basis_of(
            opened.digest, layouts, {name: each for name, each in known.items() if _is_for(each, pipeline)}
        ),
        pin=source.pin.digest,
        facts=facts,
        layouts={
            component.class_name: _layout_digest(component.class_name, known)
            for component in pipeline.components.values()
            if component.weights
        },
    )


def basis_of(digest: str, layouts: Mapping[str, Layout], known: Mapping[str, Layout]) -> str:
    """What stands for the files and the rules that cut them: entries of another basis have other keys.

    ``known`` are the layouts by name that an entry may ask for.
    """
    rules = {name: layout.digest for name, layout in layouts.items()}
    named = {name: layout.digest for name, layout in known.items()}
    extra = {"named": named} if named else {}
    return hashlib.sha256(canonical_json({"digest": digest, "layouts": rules, **extra})).hexdigest()


def is_current(resolution: Resolution, known: Mapping[str, Layout]) -> bool:
    """Whether the layouts of this release and of this agent are those that a remembered resolution was made
    with."""
    return all(_layout_digest(name, known) == digest for name, digest in resolution.layouts.items())


def _is_for(layout: Layout, pipeline: Pipeline) -> bool:
    return any(each.class_name == layout.architecture for each in pipeline.components.values())


def _usual_layout(class_name: str, known: Mapping[str, Layout]) -> Layout | None:
    layout = builtin_layout(class_name)
    if layout is not None:
        return layout
    return next((known[name] for name in sorted(known) if known[name].architecture == class_name), None)


def _layout_digest(class_name: str, known: Mapping[str, Layout]) -> str:
    """Digest of every layout that may cut this class, "" for none."""
    layout = builtin_layout(class_name)
    own = "" if layout is None else layout.digest
    named = {name: each.digest for name, each in known.items() if each.architecture == class_name}
    return own if not named else hashlib.sha256(canonical_json({"own": own, "named": named})).hexdigest()


def _architecture(pipeline: Pipeline, layouts: Mapping[str, Layout]) -> dict[str, Any]:
    """Class, layout and head counts of the first component that can be cut; else the class alone."""
    for name, layout in layouts.items():
        component = pipeline.component(name)
        return {
            "architecture": component.class_name,
            "layoutDigest": layout.digest,
            "headCounts": sorted(set(layout.head_counts(component.config).values())),
        }
    transformer = pipeline.components.get("transformer")
    return {} if transformer is None else {"architecture": transformer.class_name}


def _fitting(
    component: Component, known: Mapping[str, Layout]
) -> tuple[Layout, tuple[ImagePlan, ...]] | None:
    """The usual layout with the plan of the undivided component, or None where none fits it."""
    layout = _usual_layout(component.class_name, known)
    if layout is None:
        return None
    try:
        return layout, plan_images(
            component.tensors,
            layout,
            dtype="Source",
            tensor_size=1,
            tensor_ranks=[0],
            config=component.config,
        )
    except CacheError:  # a tensor or a config that the layout does not know: it does not fit
        return None


def _block_facts(plans: tuple[ImagePlan, ...]) -> dict[str, Any]:
    blocks = [plan.images[0].data_bytes for plan in plans if plan.group is not None]
    return {
        "blocks": len(blocks),
        "largestBlockBytes": max(blocks, default=0),
        "residentBytes": sum(plan.images[0].data_bytes for plan in plans if plan.group is None),
    }

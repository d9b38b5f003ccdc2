"""Finds out what a source is: its files with their digests, what can be cut, and the sizes a plan is made of.

Reads headers and configuration; a file's bytes only to hash them once. Directory sources below named roots;
everything else is refused with its reason. Must not write anything but the digest cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dlo_api.v1alpha1.node_weight_cache import NodeSource
from dlo_cache.canonical import canonical_json
from dlo_cache.errors import CacheError
from dlo_cache.image_plan import ImagePlan, plan_images
from dlo_cache.layout import Layout
from dlo_cache.layouts import builtin_architectures, builtin_layout
from dlo_cache.progress import Cancel, Progress
from dlo_cache.source import Component, SourceFile
from dlo_sources.digests import DigestCache, hash_files
from dlo_sources.pipeline import Pipeline, open_directory

from dlo_agent.errors import SourceProblem
from dlo_agent.references import Resolution

_SHORT: Final = 12


@dataclass(frozen=True)
class Opened:
    """A source whose files all have their digests."""

    pipeline: Pipeline
    digest: str


def open_source(
    source: NodeSource,
    roots: Mapping[str, Path],
    digests: DigestCache,
    *,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
) -> Opened:
    """The source as it is now. Raises SourceProblem, the errors of ``dlo_sources``, Cancelled."""
    folder, within = locate(source, roots)
    pipeline = open_directory(folder, variant=source.variant, within=within)
    files = hash_files(pipeline.all_files(), digests, progress, cancel)
    return Opened(pipeline.with_files(files), digest_of(files))


def locate(source: NodeSource, roots: Mapping[str, Path]) -> tuple[Path, Path]:
    """The folder of a directory source and the root that it must lie in."""
    directory = source.source.directory
    if directory is None:
        kind = "huggingFace" if source.source.hugging_face is not None else "s3"
        raise SourceProblem(
            f"source {source.id}: {kind} sources are not built yet",
            hint="put the checkpoint in a named root and use model.source.directory",
            code="SourceUnsupported",
        )
    root = roots.get(directory.root)
    if root is None:
        known = ", ".join(sorted(roots)) or "none"
        raise SourceProblem(
            f"this node has no source root named {directory.root!r} (known: {known})",
            hint="add it to the agent's Helm values, or correct model.source.directory.root",
            code="UnknownRoot",
        )
    return root / directory.path, root


def digest_of(files: list[SourceFile]) -> str:
    """The digest of a file list: sha256 of the canonical JSON of its names, sizes and digests, by name."""
    listed = [
        {"name": file.name, "size": file.size, "sha256": file.sha256}
        for file in sorted(files, key=lambda file: file.name)
    ]
    return hashlib.sha256(canonical_json(listed)).hexdigest()


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


def layout_for(component: Component, named: str) -> Layout:
    """The layout that cuts a component; raises SourceProblem (UnknownLayout, UnknownArchitecture)."""
    if named:
        raise SourceProblem(
            f"this node has no layout named {named!r}",
            hint="leave model.layout empty for the built-in layout of the component's class",
            code="UnknownLayout",
        )
    layout = builtin_layout(component.class_name)
    if layout is None:
        raise SourceProblem(
            f"component {component.name}: no layout for the architecture {component.class_name}",
            hint=f"built in are {', '.join(builtin_architectures())}",
            code="UnknownArchitecture",
        )
    return layout


def resolution_of(source: NodeSource, opened: Opened) -> Resolution:
    """What status says about a source, and what entries built from it depend on."""
    pipeline = opened.pipeline
    layouts: dict[str, Layout] = {}
    components: list[dict[str, Any]] = []
    for component in pipeline.components.values():
        if not component.weights:
            continue
        found: dict[str, Any] = {"name": component.name, "bytes": component.tensor_bytes}
        fitting = _fitting(component)
        if fitting is not None:
            layouts[component.name], plans = fitting
            found |= _block_facts(plans)
        components.append(found)
    files = pipeline.all_files()
    streamed = tuple(layouts)
    facts: dict[str, Any] = {
        "revision": opened.digest[:_SHORT],
        "digest": opened.digest,
        "files": len(files),
        "bytes": sum(file.size for file in files),
        "components": components,
        "restBytes": sum(file.size for file in pipeline.rest_files(streamed)),
        **_architecture(pipeline, layouts),
    }
    return Resolution(
        digest=opened.digest,
        basis=basis_of(opened.digest, layouts),
        pin=source.pin.digest,
        facts=facts,
        layouts={
            component.class_name: _layout_digest(component.class_name)
            for component in pipeline.components.values()
            if component.weights
        },
    )


def basis_of(digest: str, layouts: Mapping[str, Layout]) -> str:
    """What stands for the files and the rules that cut them: entries of another basis have other keys."""
    rules = {name: layout.digest for name, layout in layouts.items()}
    return hashlib.sha256(canonical_json({"digest": digest, "layouts": rules})).hexdigest()


def is_current(resolution: Resolution) -> bool:
    """Whether the layouts of this release are those that a remembered resolution was made with."""
    return all(_layout_digest(name) == digest for name, digest in resolution.layouts.items())


def _layout_digest(class_name: str) -> str:
    layout = builtin_layout(class_name)
    return "" if layout is None else layout.digest


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


def _fitting(component: Component) -> tuple[Layout, tuple[ImagePlan, ...]] | None:
    """The built-in layout with the plan of the undivided component, or None where none fits it."""
    layout = builtin_layout(component.class_name)
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

"""What a rank's pipeline is put together from: family, model, images, plan, host source.

Decides by configuration and entries what is built; keeps nothing. Must not run a model and must not open entries.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from dlo_cache.errors import Invalid
from dlo_cache.layout import Layout
from dlo_cache.layouts import builtin_layout

from dlo_engine.checkpoint import checkpoint_images
from dlo_engine.config import Backing, EngineConfig
from dlo_engine.errors import BadEntry, InvalidConfiguration, Unsupported
from dlo_engine.families import Family, family_of
from dlo_engine.groups import Groups
from dlo_engine.host_source import HostSource, MappedSource, StagedSource
from dlo_engine.mapping import Entries, OpenEntry
from dlo_engine.placement import Plan, plan_residency
from dlo_engine.specs import BlockImage, block_image
from dlo_engine.streams import Streams
from dlo_engine.tp import shard

STAGING_THREADS = 8
"""Most host threads that fill one rank's pinned pieces."""
NO_ENTRY = "NoLayoutEntry"
"""Fallback code: the component has no entry, its weights come from the checkpoint's files."""


class Weights(NamedTuple):
    """A component's images in execution order, what is outside the blocks, and the backing they amount to.

    `backing` None leaves it to the host source.
    """

    blocks: list[BlockImage]
    rest: BlockImage | None
    backing: Backing | None


def import_families(entries: Entries) -> None:
    """Import what the components' families need, so that it counts as import and not as building."""
    for component in entries.components:
        family_of(_architecture(entries.config(component)))


def the_component(entries: Entries) -> tuple[str, OpenEntry | None]:
    """The one component that streams, and its entry. Raises Unsupported for several."""
    if len(entries.components) != 1:
        raise Unsupported(
            f"Components {', '.join(entries.components)} cannot be streamed together by this engine",
            hint="stream the transformer alone",
        )
    return next(iter(entries.components.items()))


def build_model(
    config: Mapping[str, Any], opened: OpenEntry | None, groups: Groups
) -> tuple[Family, torch.nn.Module]:
    """The component on `meta` in this rank's shapes. Raises Unsupported, BadEntry, InvalidConfiguration."""
    family = family_of(_architecture(config))
    model = family.build(config)
    if groups.tensor_size > 1:
        layout = _layout(family.architecture, opened)
        try:
            layout.check(config, groups.tensor_size)
        except Invalid as error:
            raise InvalidConfiguration(error.message, hint=error.hint, code=error.code) from error
        shard(model, layout, config, groups.replica)
        family.adapt(model, groups.tensor_size)
    return family, model


def weights_of(
    entries: Entries, component: str, opened: OpenEntry | None, config: Mapping[str, Any], groups: Groups
) -> Weights:
    """Images from the component's entry, or without one from the checkpoint's own files."""
    if opened is None:
        layout = _layout(_architecture(config), None)
        return Weights(
            *checkpoint_images(
                entries.rest.entry,
                component,
                layout,
                config,
                tensor_size=groups.tensor_size,
                tensor_rank=groups.tensor_rank,
            )
        )
    entry = opened.entry
    blocks = [block_image(str(file.group), file.data, file.tensors.values()) for file in entry.blocks]
    rest = entry.resident
    return Weights(blocks, None if rest is None else block_image("", rest.data, rest.tensors.values()), None)


def host_source(config: EngineConfig, device: torch.device, streams: Streams) -> HostSource:
    """The best way from the mapping to this device."""
    if device.type == "cpu":
        return MappedSource()
    cores = len(os.sched_getaffinity(0)) // config.world
    return StagedSource(streams, threads=config.threads or max(1, min(STAGING_THREADS, cores)))


def plan(config: EngineConfig, blocks: list[BlockImage], groups: Groups) -> Plan:
    """Residents and slots as configured. Raises InvalidConfiguration for a budget that is too small."""
    resident: int | None = len(blocks) if config.mode == "None" else 0
    if config.mode != "None":
        resident = None if config.resident_layers == "Auto" else config.resident_layers
    try:
        return plan_residency(
            [block.nbytes for block in blocks],
            resident=resident,
            budget=config.device_memory_budget,
            slots=config.slots,
            group_size=config.data if groups.weights is not None else 1,
        )
    except Invalid as error:
        raise InvalidConfiguration(error.message, hint=error.hint, code=error.code) from error


def _architecture(config: Mapping[str, Any]) -> str:
    return str(config.get("_class_name"))


def _layout(architecture: str, opened: OpenEntry | None) -> Layout:
    """The layout of a class, and that which cut the entry. Raises BadEntry when they differ."""
    layout = builtin_layout(architecture)
    if layout is None:
        raise Unsupported(f"Architecture {architecture} has no layout in this release")
    cut_by = layout.digest if opened is None else opened.entry.manifest.preimage["layout"]["digest"]
    if opened is not None and layout.digest != cut_by:
        raise BadEntry(
            f"Entry {opened.record.dir} was cut by another layout than this engine's {layout.id}",
            hint="build the entries with the release that runs them",
            code="LayoutMismatch",
        )
    return layout

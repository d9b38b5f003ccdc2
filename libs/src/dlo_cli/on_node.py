"""A plan held against a real node: may engines run there, does what they need fit, and what is not known. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dlo_api.eligibility import Refusal, engines_that_fit, gpus, refusals
from dlo_api.errors import QuantityInvalid
from dlo_api.planned import Plan
from dlo_api.quantity import parse_quantity
from dlo_api.topology import world_size
from dlo_api.v1alpha1 import DiffusionDeploymentSpec
from dlo_api.wanted import entries_for, id_of_source

from dlo_cli.causes import conditions
from dlo_cli.nodes import ListedNode, listed_node

#: What the GPU operator's feature discovery says of a node's GPUs, in MiB.
GPU_MEMORY_LABEL = "nvidia.com/gpu.memory"
Json = Mapping[str, Any]


@dataclass(frozen=True)
class Need:
    """One thing that an engine, or its entries, need of a node; a number that is not known is None.

    Attributes:
        name: the thing.
        needed, has: in `unit`.
        unit: `bytes` or `count`.
        note: where the number is from, or why it is not known.
    """

    name: str
    needed: int | None
    has: int | None
    unit: str
    note: str = ""

    @property
    def fits(self) -> bool | None:
        """Whether it fits; None where either number is not known."""
        return None if self.needed is None or self.has is None else self.needed <= self.has


@dataclass(frozen=True)
class Verdict:
    """A node judged.

    Attributes:
        node: its name.
        refused: rules that keep engines off it; also a node that is not ready.
        needs: what they need and what it has.
        engines: how many fit by its GPUs; None on the CPU, where nothing bounds them.
    """

    node: str
    refused: tuple[Refusal, ...]
    needs: tuple[Need, ...]
    engines: int | None

    @property
    def eligible(self) -> bool:
        """Whether nothing that is known keeps an engine off it."""
        return not self.refused and not any(need.fits is False for need in self.needs)

    def to_json(self) -> dict[str, Any]:
        """JSON values; what is not known is absent."""
        value: dict[str, Any] = {
            "node": self.node,
            "eligible": self.eligible,
            "refused": [
                {"field": each.field_path, "message": each.message, "hint": each.hint}
                for each in self.refused
            ],
            "needs": [
                {
                    name: item
                    for name, item in (
                        ("name", need.name),
                        ("unit", need.unit),
                        ("needed", need.needed),
                        ("has", need.has),
                        ("fits", need.fits),
                        ("note", need.note or None),
                    )
                    if item is not None
                }
                for need in self.needs
            ],
        }
        return value | ({"engines": self.engines} if self.engines is not None else {})


def judge_node(
    spec: DiffusionDeploymentSpec, namespace: str, plan: Plan, obj: Json, cache: Json | None
) -> Verdict:
    """The verdict on one node.

    Args:
        spec: an admitted spec.
        namespace: of the deployment; part of the identity of a source with a credential.
        plan: of one engine.
        obj: the Node.
        cache: its NodeWeightCache; None where it was not given.
    """
    node = listed_node(obj)
    on_gpus = spec.engine.device == "Cuda"
    return Verdict(
        node=node.name,
        refused=(*_unusable(obj, cache), *refusals(spec.placement, node)),
        needs=(
            *(_gpu_needs(spec, plan, node) if on_gpus else ()),
            Need(
                "CPUs",
                None,
                _whole(node.allocatable.get("cpu")),
                "count",
                "the engine asks for spec.engine.resources, or the operator's default",
            ),
            Need(
                "Memory, private",
                plan.private_host_bytes,
                _size(node.allocatable.get("memory")),
                "bytes",
                "allocatable; other pods' share, activations and libraries are not counted",
            ),
            *_cache_needs(spec, namespace, plan, cache),
        ),
        engines=engines_that_fit(spec, node) if on_gpus else None,
    )


def _unusable(obj: Json, cache: Json | None) -> Iterator[Refusal]:
    """States of node and agent that keep engines off, whatever the placement."""
    if (obj.get("spec") or {}).get("unschedulable"):
        yield Refusal("node.spec.unschedulable", "the node is cordoned", "kubectl uncordon it")
    ready = conditions(obj).get("Ready", {})
    if ready and ready.get("status") != "True":
        yield Refusal(
            "node.status.conditions",
            f"the node is not Ready: {ready.get('message') or ready.get('reason')}",
            "repair it",
        )
    storage = conditions(cache or {}).get("StorageHealthy", {})
    if storage.get("status") == "False":
        yield Refusal(
            "nodeweightcache.status.conditions",
            f"its cache root cannot be used: {storage.get('reason')}: {storage.get('message') or ''}".rstrip(
                ": "
            ),
            "repair the node's cache root",
        )


def _gpu_needs(spec: DiffusionDeploymentSpec, plan: Plan, node: ListedNode) -> Iterator[Need]:
    resource = spec.placement.gpu_resource
    listed = resource in node.allocatable
    yield Need(
        "GPUs",
        world_size(spec.parallelism),
        gpus(spec, node) if listed or node.allocatable else None,
        "count",
        resource if listed else f"the node offers no {resource}",
    )
    stated = _whole(node.labels.get(GPU_MEMORY_LABEL))
    yield Need(
        "Device memory",
        plan.device_bytes,
        stated * 2**20 if stated is not None else None,
        "bytes",
        "the fullest rank; activations come on top" if stated is not None else f"no label {GPU_MEMORY_LABEL}",
    )


def _cache_needs(
    spec: DiffusionDeploymentSpec, namespace: str, plan: Plan, cache: Json | None
) -> Iterator[Need]:
    status = (cache or {}).get("status") or {}
    root, memory = status.get("root") or {}, status.get("memory") or {}
    why = "" if status else "no NodeWeightCache was given" if cache is None else "its agent has not reported"
    there = _held(spec, namespace, status)
    note = why or (
        f"free at {root.get('path')}" + (f"; {there} bytes of its entries are there" if there else "")
    )
    yield Need(
        "Disk", max(0, plan.disk_bytes + plan.build_bytes - there), root.get("freeBytes"), "bytes", note
    )
    budget = memory.get("warmBudgetBytes") or None
    yield Need(
        "Memory, shared",
        plan.shared_host_bytes,
        budget,
        "bytes",
        why
        or (
            "page cache that the agent may warm"
            if budget
            else "the agent warms nothing, or does not say how much"
        ),
    )
    registered = plan.backing == "RegisteredCache"
    yield Need(
        "Memory, pinned",
        plan.locked_bytes,
        memory.get("lockLimitBytes") if registered else None,
        "bytes",
        why
        or (
            "limit of locked memory of a process"
            if registered
            else "staging buffers are the driver's: no limit"
        ),
    )


def _held(spec: DiffusionDeploymentSpec, namespace: str, status: Json) -> int:
    """Bytes of the deployment's entries that the node holds already."""
    wanted = {entry.id for entry in entries_for(spec, id_of_source(spec, namespace))}
    return sum(
        entry.get("bytes") or 0
        for entry in status.get("entries") or ()
        if entry.get("phase") == "Ready" and entry.get("id") in wanted
    )


def _size(text: str | None) -> int | None:
    try:
        return parse_quantity(text) if text is not None else None
    except QuantityInvalid:
        return None


def _whole(text: str | None) -> int | None:
    """A whole number; thousandths (`7910m`) are rounded down."""
    try:
        return int(text[:-1]) // 1000 if text is not None and text.endswith("m") else int(text or "")
    except ValueError:
        return None

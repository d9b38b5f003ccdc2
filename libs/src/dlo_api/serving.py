"""What a manifest means for an engine's command line: the same flags for `dlo run` and for a pod. Pure.

Nothing in a manifest chooses a path, an address or a program: those are the caller's, and extra arguments are
held to a short list by the admission rules.
"""

from __future__ import annotations

from dlo_api.quantity import parse_quantity
from dlo_api.v1alpha1 import DiffusionDeploymentSpec


def serve_flags(
    name: str, spec: DiffusionDeploymentSpec, *, handover: str, host: str, port: int
) -> list[str]:
    """The flags of ``dlo_engine serve`` for this spec, up to the lone ``--``."""
    offload = spec.offload
    flags = [
        *("--handover", handover, "--model-name", name),
        *("--device", spec.engine.device.lower()),
        *("--tensor", str(spec.parallelism.tensor), "--data", str(spec.parallelism.data)),
        *("--mode", offload.mode, "--transfer", offload.transfer),
        *("--resident-layers", str(offload.resident_layers)),
        *("--registration", offload.host_registration.policy),
        *("--cache-policy", spec.cache.policy, "--verify", spec.cache.verify),
        *("--on-fallback", spec.cache.on_fallback),
        *("--max-queued-requests", str(spec.serving.max_queued_requests)),
        *("--drain-timeout-seconds", str(spec.rollout.drain_timeout_seconds)),
        *("--host", host, "--port", str(port)),
    ]
    if offload.device_memory_budget:
        flags += ["--device-memory-budget", str(parse_quantity(offload.device_memory_budget))]
    if offload.host_registration.limit:
        flags += ["--registration-limit", str(parse_quantity(offload.host_registration.limit))]
    for component in spec.model.components:
        flags += ["--component", component]
    return flags


def extra_flags(spec: DiffusionDeploymentSpec) -> list[str]:
    """What the manifest itself adds, behind a lone ``--``; empty when it adds nothing."""
    return ["--", *spec.engine.extra_args] if spec.engine.extra_args else []

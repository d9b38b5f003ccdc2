"""The pod of one engine: the gate, the engine, their mounts, memory and rights. Pure."""

from __future__ import annotations

import copy
import json
from typing import Any, Final, cast

from dlo_api.quantity import format_quantity
from dlo_api.serving import extra_flags, serve_flags
from dlo_api.topology import world_size
from dlo_api.v1alpha1 import DiffusionDeploymentSpec

from dlo_operator.reconcile.inputs import Object, PlanSettings
from dlo_operator.reconcile.memory import pod_memory
from dlo_operator.reconcile.record import ModelSizes, Record
from dlo_operator.reconcile.volumes import claim_name

#: Where pods see the cache root, whatever its path on the host.
CACHE: Final = "/var/lib/dlo/cache"
HANDOVER: Final = "/run/dlo/handover.json"
PREFERS: Final = "preferredDuringSchedulingIgnoredDuringExecution"
GATE: Final = "cache-gate"
ENGINE: Final = "engine"

#: Endpoints stop sending requests within this time of a pod's deletion.
_PRE_STOP_SECONDS: Final = 5
#: Unregistering pages and ending the ranks comes after the drain limit.
_AFTER_DRAIN_SECONDS: Final = 30
_STARTUP_TRIES: Final = 60
_TMP: Final = "1Gi"

UNPRIVILEGED: Final[Object] = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
}


def pod_spec(name: str, spec: DiffusionDeploymentSpec, record: Record, settings: PlanSettings) -> Object:
    """The pod of an engine of this revision."""
    memory = pod_memory(spec, record.sizes)
    placed = placed_pod(spec, settings)
    return {
        **placed,
        "terminationGracePeriodSeconds": spec.rollout.drain_timeout_seconds
        + _PRE_STOP_SECONDS
        + _AFTER_DRAIN_SECONDS,
        "securityContext": placed["securityContext"] | {"supplementalGroups": [record.gid]},
        "affinity": _affinity(spec.placement.affinity, record.claim.warm_label),
        "initContainers": [_gate(spec, record, settings)],
        "containers": [_engine(name, spec, record, settings)],
        "volumes": [
            {"name": "run", "emptyDir": {"sizeLimit": "16Mi"}},
            {"name": "tmp", "emptyDir": {"sizeLimit": _TMP}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": format_quantity(memory.shared)}},
            _cache(spec, record),
        ],
    }


def placed_pod(spec: DiffusionDeploymentSpec, settings: PlanSettings) -> Object:
    """What every pod of a deployment has: its rights, and where it may run."""
    placement = spec.placement
    secrets = [*settings.images.pull_secrets, *(ref.name for ref in spec.engine.image_pull_secrets)]
    optional: Object = {
        "affinity": copy.deepcopy(placement.affinity),
        "nodeSelector": dict(placement.node_selector),
        "tolerations": copy.deepcopy(list(placement.tolerations)),
        "priorityClassName": placement.priority_class_name,
        "runtimeClassName": placement.runtime_class_name,
        "serviceAccountName": spec.engine.service_account_name,
        "imagePullSecrets": [{"name": secret} for secret in dict.fromkeys(secrets)],
    }
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        **{key: value for key, value in optional.items() if value},
    }


def engine_args(name: str, spec: DiffusionDeploymentSpec) -> list[str]:
    """The engine's flags: those of `dlo run`, on the pod's own address."""
    flags = serve_flags(name, spec, handover=HANDOVER, host="0.0.0.0", port=spec.serving.port)  # noqa: S104
    return [*flags, "--termination-message-path", "/dev/termination-log", *extra_flags(spec)]


def _cache(spec: DiffusionDeploymentSpec, record: Record) -> Object:
    """The root as a volume: a path of the host, or the claim that stands for it."""
    if spec.cache.mount == "PersistentVolume":
        source = {"claimName": claim_name(record.root), "readOnly": True}
        return {"name": "cache", "persistentVolumeClaim": source}
    return {"name": "cache", "hostPath": {"path": record.root, "type": "Directory"}}


def _gate(spec: DiffusionDeploymentSpec, record: Record, settings: PlanSettings) -> Object:
    wanted = json.dumps([entry.handover() for entry in record.wanted], separators=(",", ":"))
    return {
        "name": GATE,
        "image": settings.images.agent,
        "imagePullPolicy": settings.images.pull_policy,
        "command": ["dlo-agent"],
        "args": [
            "gate",
            *("--root", CACHE, "--out", HANDOVER, "--want-json", wanted),
            *("--deadline", str(settings.gate_deadline_seconds)),
            *(("--optional-layout",) if spec.cache.policy == "Opportunistic" else ()),
        ],
        "resources": {
            "requests": {"cpu": "10m", "memory": "64Mi"},
            "limits": {"memory": "256Mi"},
        },
        "securityContext": copy.deepcopy(UNPRIVILEGED),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "run", "mountPath": "/run/dlo"},
            _read_only({"name": "cache", "mountPath": CACHE}),
        ],
    }


def _engine(name: str, spec: DiffusionDeploymentSpec, record: Record, settings: PlanSettings) -> Object:
    return {
        "name": ENGINE,
        "image": spec.engine.image or settings.images.engine,
        "imagePullPolicy": settings.images.pull_policy,
        # -P: nothing in the image's working folder is ever imported.
        "command": ["python", "-P", "-m", "dlo_engine", "serve"],
        "args": engine_args(name, spec),
        "env": _environment(spec),
        "ports": [{"name": "http", "containerPort": spec.serving.port, "protocol": "TCP"}],
        "resources": _merged(_resources(spec, record), spec.engine.resources),
        "securityContext": copy.deepcopy(UNPRIVILEGED),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "lifecycle": {"preStop": {"sleep": {"seconds": _PRE_STOP_SECONDS}}},
        "startupProbe": _probe("/livez", period=5, failures=_STARTUP_TRIES),
        "livenessProbe": _probe("/livez", period=10, failures=6),
        "readinessProbe": _probe("/health", period=5, failures=2),
        "volumeMounts": [
            _read_only({"name": "run", "mountPath": "/run/dlo"}),
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - a volume of the pod's own
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108
            *(
                _read_only({"name": "cache", "mountPath": f"{CACHE}/{path}", "subPath": path})
                for path in _entry_paths(spec, record)
            ),
        ],
    }


def _environment(spec: DiffusionDeploymentSpec) -> list[Object]:
    """The user's variables, and a home that can be written unless he names another."""
    given = copy.deepcopy(list(spec.engine.extra_env))
    home = {"name": "HOME", "value": "/tmp"}  # noqa: S108 - a volume of the pod's own
    return given if any(variable.get("name") == "HOME" for variable in given) else [home, *given]


def _entry_paths(spec: DiffusionDeploymentSpec, record: Record) -> list[str]:
    """What the engine sees of the root: under `Required` its own entries and no others.

    Elsewhere an entry may be missing on the node, and a mount of a path that is not there would keep the pod
    from starting.
    """
    if spec.cache.policy != "Required":
        return ["v1/entries"]
    return [f"v1/entries/{key}" for key in dict.fromkeys(entry.input_key for entry in record.wanted)]


def _read_only(mount: Object) -> Object:
    return {**mount, "readOnly": True, "recursiveReadOnly": "IfPossible"}


def _probe(path: str, *, period: int, failures: int) -> Object:
    return {
        "httpGet": {"path": path, "port": "http", "scheme": "HTTP"},
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _resources(spec: DiffusionDeploymentSpec, record: Record) -> Object:
    memory = pod_memory(spec, record.sizes)
    # Registering or first touching a cold page of an entry charges the engine, so its limit has room for all.
    most = memory.private + memory.fallback + memory.shared + record.entry_bytes
    return _asked(spec, private_bytes(spec, record), most)


def node_resources(spec: DiffusionDeploymentSpec, sizes: ModelSizes) -> Object:
    """What an engine asks of its node, merged with the user's words, before its entries are known."""
    memory = pod_memory(spec, sizes)
    asked = _asked(spec, memory.private, memory.private + memory.fallback + memory.shared)
    return cast("Object", _merged(asked, spec.engine.resources))


def _asked(spec: DiffusionDeploymentSpec, request: int, limit: int) -> Object:
    """Requests and limits; memory in bytes."""
    world = world_size(spec.parallelism)
    cpu = spec.engine.device == "Cpu"
    limits: Object = {"memory": format_quantity(_mebibytes(limit))}
    requests: Object = {
        "cpu": f"{250 * world}m" if cpu else str(world),
        "memory": format_quantity(request),
    }
    if requests["cpu"].endswith("000m"):
        requests["cpu"] = requests["cpu"].removesuffix("000m")
    if not cpu:
        requests[spec.placement.gpu_resource] = str(world)
        limits[spec.placement.gpu_resource] = str(world)
    return {"requests": requests, "limits": limits}


def private_bytes(spec: DiffusionDeploymentSpec, record: Record) -> int:
    """What an engine of this revision is expected to allocate on a node that holds its entries."""
    memory = pod_memory(spec, record.sizes)
    cut = not any(entry.kind == "Layout" for entry in record.wanted)
    return memory.private + (memory.fallback if cut else 0)


def _mebibytes(size: int) -> int:
    return -(-size // 2**20) * 2**20


def _merged(planned: Any, given: Any) -> Any:
    if given is None:
        return planned
    if isinstance(planned, dict) and isinstance(given, dict):
        return planned | {key: _merged(planned.get(key), value) for key, value in given.items()}
    return copy.deepcopy(given)


def _affinity(given: Object, warm: str) -> Object:
    """The user's affinity, and a wish for nodes that hold the entries: never more than a wish."""
    affinity = copy.deepcopy(given)
    node = affinity["nodeAffinity"] = affinity.get("nodeAffinity") or {}
    node[PREFERS] = [
        *(node.get(PREFERS) or ()),
        {
            "weight": 100,
            "preference": {"matchExpressions": [{"key": warm, "operator": "In", "values": ["true"]}]},
        },
    ]
    return affinity

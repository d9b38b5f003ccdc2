"""Reads everything a decision is made from. The only reader of the API in a reconcile; decides nothing.

What a Secret holds never enters the inputs: only whether it may be read, and a ready-made copy beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from dlo_api.names import OPERATOR_FIELD_MANAGER, label
from dlo_api.v1alpha1 import DiffusionDeploymentSpec
from dlo_api.wanted import id_of_source, secret_of
from dlo_kube.errors import Denied
from dlo_kube.gateway import Gateway, Object
from dlo_kube.kinds import (
    DEPLOYMENT,
    DIFFUSION_DEPLOYMENT,
    NAMESPACE,
    PERSISTENT_VOLUME,
    PERSISTENT_VOLUME_CLAIM,
    POD,
    POD_DISRUPTION_BUDGET,
    SECRET,
    SERVICE,
)

from dlo_operator import observe
from dlo_operator.facts import Facts
from dlo_operator.heartbeats import Heartbeats
from dlo_operator.mirror import Mirror
from dlo_operator.reconcile.inputs import (
    DeploymentInputs,
    EngineReport,
    PlanSettings,
    SecretState,
    VolumeFacts,
)
from dlo_operator.reconcile.shortlist import interest
from dlo_operator.reconcile.volumes import claim_name, volume_name
from dlo_operator.reconcile.workload import selector

SOURCE_LABEL = label("source")
ENFORCE_LABEL = "pod-security.kubernetes.io/enforce"


class Engines(Protocol):
    """Asks engines what they run on."""

    def report(self, pod: Object, port: int) -> EngineReport | None:
        """What the engine in a pod says of itself; None when it cannot be asked, or has not answered yet."""

    def asking(self, pod: Object) -> bool:
        """Whether an answer is under way."""


@dataclass(frozen=True)
class Gathered:
    """Inputs, and the objects that writes are compared with.

    Attributes:
        inputs: for the plan.
        live: children and volumes that exist, by kind and name.
        secret_copy: the credential as agents shall see it; None when there is none.
        asking: whether engines were asked that have not answered yet.
    """

    inputs: DeploymentInputs
    live: Mapping[tuple[str, str], Object]
    secret_copy: Object | None
    asking: bool = False

    def standing(self, intent: Object) -> Object | None:
        """The object that an intent would change, as it was read; None when there was none."""
        return self.live.get((intent["kind"], intent["metadata"]["name"]))


class Gatherer:
    """Reads for decisions."""

    def __init__(
        self,
        gateway: Gateway,
        reader: Mirror,
        settings: PlanSettings,
        heartbeats: Heartbeats,
        engines: Engines,
        now: Callable[[], datetime],
    ) -> None:
        self._gateway = gateway
        self._reader = reader
        self._settings = settings
        self._facts = Facts(reader, heartbeats)
        self._engines = engines
        self._now = now

    def deployment(self, obj: Object) -> Gathered:
        """Everything about one DiffusionDeployment, which was just read."""
        meta = obj["metadata"]
        name, namespace, uid = meta["name"], meta["namespace"], meta["uid"]
        spec, error = observe.read_spec(obj)
        live, foreign, leaving = self._children(name, namespace, uid)
        secret, copy = self._secret(spec, namespace)
        workload = live.get((DEPLOYMENT.kind, name))
        facts = observe.read_workload(workload) if workload is not None else None
        found = self._reader.list(POD, namespace, labels=selector(name)).items
        pods = tuple(observe.read_pod(pod, self._report(pod, spec)) for pod in found)
        records = [pod.record for pod in pods] + ([facts.record] if facts is not None else [])
        ids = interest(spec, namespace, (record for record in records if record is not None))
        fleet = self._facts.look(spec, ids)
        volumes = self._volumes(spec, namespace, fleet.shortlist.roots, live)
        inputs = DeploymentInputs(
            name=name,
            namespace=namespace,
            uid=uid,
            generation=meta.get("generation", 0),
            spec=spec,
            spec_error=error,
            status=obj.get("status") or {},
            nodes=fleet.nodes,
            caches=fleet.caches,
            pods=pods,
            workload=facts,
            foreign=foreign,
            leaving=leaving,
            has_budget=(POD_DISRUPTION_BUDGET.kind, name) in live,
            secret=secret,
            pod_security=self._enforced(spec, namespace),
            volumes=volumes,
            settings=self._settings,
            now=self._now(),
            shortlist=fleet.shortlist,
        )
        return Gathered(inputs, live, copy, any(self._engines.asking(pod) for pod in found))

    def _children(
        self, name: str, namespace: str, uid: str
    ) -> tuple[dict[tuple[str, str], Object], tuple[str, ...], tuple[str, ...]]:
        live: dict[tuple[str, str], Object] = {}
        foreign: list[str] = []
        leaving: list[str] = []
        for kind in (DEPLOYMENT, SERVICE, POD_DISRUPTION_BUDGET):
            found = self._reader.get(kind, name, namespace)
            if found is None:
                continue
            owners = found["metadata"].get("ownerReferences") or ()
            if any(owner.get("uid") == uid for owner in owners):
                live[kind.kind, name] = found
            elif any((o.get("kind"), o.get("name")) == (DIFFUSION_DEPLOYMENT.kind, name) for o in owners):
                # Of a deployment that was deleted and made again: the garbage collector is on its way.
                leaving.append(f"{kind.kind} {name}")
            else:
                foreign.append(f"{kind.kind} {name}")
        return live, tuple(foreign), tuple(leaving)

    def _enforced(self, spec: DiffusionDeploymentSpec | None, namespace: str) -> str:
        """The level of Pod Security that the namespace enforces, where that may matter."""
        if spec is None or spec.cache.mount != "HostPath":
            return ""
        try:
            found = self._reader.get(NAMESPACE, namespace)
        except Denied:
            return ""  # then the pods' own refusal tells
        return str(((found or {}).get("metadata", {}).get("labels") or {}).get(ENFORCE_LABEL, ""))

    def _volumes(
        self,
        spec: DiffusionDeploymentSpec | None,
        namespace: str,
        roots: Iterable[str],
        live: dict[tuple[str, str], Object],
    ) -> dict[str, VolumeFacts]:
        """What stands of the volume of each root, also put into `live`; read only where volumes are asked for."""
        if spec is None or spec.cache.mount != "PersistentVolume":
            return {}
        found: dict[str, VolumeFacts] = {}
        for root in sorted(roots):
            volume = self._gateway.get(PERSISTENT_VOLUME, volume_name(namespace, root))
            claim = self._gateway.get(PERSISTENT_VOLUME_CLAIM, claim_name(root), namespace)
            for obj in (volume, claim):
                if obj is not None:
                    live[obj["kind"], obj["metadata"]["name"]] = obj
            found[root] = observe.read_volume(volume, claim)
        return found

    def _report(self, pod: Object, spec: DiffusionDeploymentSpec | None) -> EngineReport | None:
        return self._engines.report(pod, spec.serving.port) if spec is not None else None

    def _secret(
        self, spec: DiffusionDeploymentSpec | None, namespace: str
    ) -> tuple[SecretState, Object | None]:
        wanted = secret_of(spec) if spec is not None else None
        if spec is None or wanted is None:
            return "None", None
        name, key = wanted
        try:
            found = self._gateway.get(SECRET, name, namespace)
        except Denied:
            return "Denied", None
        data = (found or {}).get("data") or {}
        keys = {key: "token"} if key else {"accessKeyId": "accessKeyId", "secretAccessKey": "secretAccessKey"}
        if any(given not in data for given in keys):
            return "Missing", None
        identity = id_of_source(spec, namespace)
        copy = {
            "apiVersion": SECRET.api_version,
            "kind": SECRET.kind,
            "metadata": {
                "name": f"dlo-source-{identity}",
                "namespace": self._settings.agent_namespace,
                "labels": {
                    "app.kubernetes.io/managed-by": OPERATOR_FIELD_MANAGER,
                    SOURCE_LABEL: identity,
                },
            },
            "type": "Opaque",
            "data": {copied: data[given] for given, copied in keys.items()},
        }
        return "Copied", copy

"""Reads everything a decision is made from. The only reader of the API in a reconcile; decides nothing.

What a Secret holds never enters the inputs: only whether it may be read, and a ready-made copy beside them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from dlo_api.names import OPERATOR_FIELD_MANAGER, label
from dlo_api.v1alpha1 import DiffusionDeploymentSpec
from dlo_kube.errors import Denied
from dlo_kube.gateway import Gateway, Listing, Object
from dlo_kube.kinds import (
    DEPLOYMENT,
    NODE,
    NODE_WEIGHT_CACHE,
    POD,
    POD_DISRUPTION_BUDGET,
    SECRET,
    SERVICE,
    Kind,
)

from dlo_operator import observe
from dlo_operator.heartbeats import Heartbeats
from dlo_operator.reconcile.entries import id_of_source, secret_of
from dlo_operator.reconcile.inputs import (
    CacheFacts,
    DeploymentInputs,
    EngineReport,
    NodeFacts,
    PlanSettings,
    SecretState,
)
from dlo_operator.reconcile.workload import selector

SOURCE_LABEL = label("source")


class Reader(Protocol):
    """Where objects are read: the API itself, or a mirror of it."""

    def get(self, kind: Kind, name: str, namespace: str | None = None) -> Object | None:
        """See Gateway.get."""

    def list(
        self,
        kind: Kind,
        namespace: str | None = None,
        *,
        labels: Mapping[str, str] | None = None,
        fields: Mapping[str, str] | None = None,
    ) -> Listing:
        """See Gateway.list."""


class Engines(Protocol):
    """Asks engines what they run on."""

    def report(self, pod: Object, port: int) -> EngineReport | None:
        """What the engine in a pod says of itself; None when it cannot be asked."""


@dataclass(frozen=True)
class Gathered:
    """Inputs, and the objects that writes are compared with.

    Attributes:
        inputs: for the plan.
        live: children that exist, by kind.
        secret_copy: the credential as agents shall see it; None when there is none.
    """

    inputs: DeploymentInputs
    live: Mapping[str, Object]
    secret_copy: Object | None


class Gatherer:
    """Reads for decisions. Parsed nodes and caches are kept by version, since most do not change."""

    def __init__(
        self,
        gateway: Gateway,
        reader: Reader,
        settings: PlanSettings,
        heartbeats: Heartbeats,
        engines: Engines,
        now: Callable[[], datetime],
    ) -> None:
        self._gateway = gateway
        self._reader = reader
        self._settings = settings
        self._heartbeats = heartbeats
        self._engines = engines
        self._now = now
        self._lock = threading.Lock()
        self._parsed: dict[tuple[str, str], tuple[str, Any]] = {}

    def deployment(self, obj: Object) -> Gathered:
        """Everything about one DiffusionDeployment, which was just read."""
        meta = obj["metadata"]
        name, namespace, uid = meta["name"], meta["namespace"], meta["uid"]
        spec, error = observe.read_spec(obj)
        live, foreign = self._children(name, namespace, uid)
        secret, copy = self._secret(spec, namespace)
        workload = live.get(DEPLOYMENT.kind)
        inputs = DeploymentInputs(
            name=name,
            namespace=namespace,
            uid=uid,
            generation=meta.get("generation", 0),
            spec=spec,
            spec_error=error,
            status=obj.get("status") or {},
            nodes=tuple(self._nodes()),
            caches=self._caches(),
            pods=tuple(
                observe.read_pod(pod, self._report(pod, spec))
                for pod in self._reader.list(POD, namespace, labels=selector(name)).items
            ),
            workload=observe.read_workload(workload) if workload is not None else None,
            foreign=foreign,
            has_budget=POD_DISRUPTION_BUDGET.kind in live,
            secret=secret,
            settings=self._settings,
            now=self._now(),
        )
        return Gathered(inputs, live, copy)

    def _children(self, name: str, namespace: str, uid: str) -> tuple[dict[str, Object], tuple[str, ...]]:
        live: dict[str, Object] = {}
        foreign: list[str] = []
        for kind in (DEPLOYMENT, SERVICE, POD_DISRUPTION_BUDGET):
            found = self._reader.get(kind, name, namespace)
            if found is None:
                continue
            owners = found["metadata"].get("ownerReferences") or ()
            if any(owner.get("uid") == uid for owner in owners):
                live[kind.kind] = found
            else:
                foreign.append(f"{kind.kind} {name}")
        return live, tuple(foreign)

    def _nodes(self) -> list[NodeFacts]:
        return [self._once(obj, observe.read_node) for obj in self._reader.list(NODE).items]

    def _caches(self) -> dict[str, CacheFacts]:
        found: dict[str, CacheFacts] = {}
        for obj in self._reader.list(NODE_WEIGHT_CACHE).items:
            if "deletionTimestamp" in obj["metadata"]:
                continue
            parsed: CacheFacts = self._once(obj, lambda cache: observe.read_cache(cache, None))
            age = self._heartbeats.age(parsed.name)
            found[parsed.name] = parsed if age is None else _aged(parsed, age)
        return found

    def _once(self, obj: Object, read: Callable[[Object], Any]) -> Any:
        meta = obj["metadata"]
        key, version = (obj["kind"], meta["name"]), f"{meta.get('uid')}@{meta.get('resourceVersion')}"
        with self._lock:
            known = self._parsed.get(key)
        if known is not None and known[0] == version:
            return known[1]
        value = read(obj)
        with self._lock:
            self._parsed[key] = (version, value)
        return value

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


def _aged(cache: CacheFacts, age: float) -> CacheFacts:
    return CacheFacts(
        name=cache.name,
        spec=cache.spec,
        status=cache.status,
        generation=cache.generation,
        lease_age=age,
        reported=cache.reported,
    )

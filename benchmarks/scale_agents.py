"""The agents of many nodes, simulated in one process: they answer each spec as an agent does, without any bytes.

One watch on all NodeWeightCaches stands for a thousand watches on one each. A source is resolved at once, an entry
is Ready after a short time, and what is written has the shape and the size of a real agent's status. Heartbeats are
renewed as often as real ones.
"""

from __future__ import annotations

import argparse
import itertools
import json
import queue
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dlo_api.identity import digest_of, node_lease_name
from dlo_api.names import AGENT_FIELD_MANAGER
from dlo_kube.client import ClusterGateway
from dlo_kube.connection import from_kubeconfig
from dlo_kube.errors import Conflict, KubeError, NotFound
from dlo_kube.gateway import Object
from dlo_kube.informer import Watcher
from dlo_kube.kinds import LEASE, NODE, NODE_WEIGHT_CACHE

GIB = 2**30
BEAT_SECONDS = 40.0
BUILD_SECONDS = (0.2, 1.0)
WORKERS = 6
_SINCE = "2026-01-01T00:00:00Z"


class Agents:
    """All agents of a cluster."""

    def __init__(self, gateway: ClusterGateway, namespace: str) -> None:
        self.gateway, self.namespace = gateway, namespace
        self.work: queue.Queue[str] = queue.Queue()
        self.queued: set[str] = set()
        self.specs: dict[str, Object] = {}
        self.lock = threading.Lock()

    def run(self) -> None:
        """Never ends."""
        for target in (*itertools.repeat(self.answer, WORKERS), self.beat):
            threading.Thread(target=target, daemon=True).start()
        Watcher(self.gateway, NODE_WEIGHT_CACHE, None, self.changed).run()

    def changed(self, obj: Object | None) -> None:
        """A cache object has changed: its agent comes to it after as long as a build takes."""
        if obj is None:
            return
        name = obj["metadata"]["name"]
        with self.lock:
            self.specs[name] = obj
            if name in self.queued or _observed(obj) == obj["metadata"]["generation"]:
                return
            self.queued.add(name)
        threading.Timer(random.uniform(*BUILD_SECONDS), self.work.put, (name,)).start()

    def answer(self) -> None:
        """Writes statuses, one after the other."""
        while True:
            name = self.work.get()
            with self.lock:
                self.queued.discard(name)
                obj = self.specs[name]
            identity = {"apiVersion": obj["apiVersion"], "kind": obj["kind"], "metadata": {"name": name}}
            try:
                self.gateway.apply_status({**identity, "status": status_of(obj)}, manager=AGENT_FIELD_MANAGER)
            except NotFound:
                continue
            except KubeError as error:
                print(f"{name}: {error}", flush=True)
                self.work.put(name)

    def beat(self) -> None:
        """Renews every node's Lease: a new one soon, as an agent that starts does, the others in turn."""
        due: dict[str, float] = {}

        def renew(name: str) -> None:
            first = due[name] == 0.0
            if self.renew(name):
                due[name] = time.monotonic() + BEAT_SECONDS * (random.random() if first else 1.0)

        # Several at a time: with a slow server, a thousand in turn would not be done before the first is late.
        with ThreadPoolExecutor(WORKERS) as pool:
            while True:
                for obj in self.gateway.heads(NODE).items:
                    due.setdefault(obj["metadata"]["name"], 0.0)
                list(pool.map(renew, [name for name, at in due.items() if at <= time.monotonic()]))
                time.sleep(1.0)

    def renew(self, node: str) -> bool:
        """Renews the Lease that the operator has made, if it has; makes none."""
        meta = {"name": node_lease_name(node), "namespace": self.namespace}
        lease = self.gateway.get(LEASE, meta["name"], self.namespace)
        if lease is None:
            return False
        stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {"holderIdentity": node, "leaseDurationSeconds": 120, "renewTime": stamp}
        body = {"apiVersion": LEASE.api_version, "kind": LEASE.kind, "metadata": meta, "spec": spec}
        try:
            self.gateway.apply(body, manager=AGENT_FIELD_MANAGER)
        except (Conflict, KubeError) as error:
            print(f"{node}: {error}", flush=True)
            return False
        return True


def status_of(obj: Object) -> Object:
    """What an agent says once everything that is listed is there."""
    spec, generation = obj.get("spec") or {}, obj["metadata"]["generation"]
    pins = {source["id"]: (source.get("pin") or {}).get("digest") for source in spec.get("sources") or ()}
    entries = [_entry(entry, pins.get(entry["sourceId"])) for entry in spec.get("entries") or ()]
    sources = [_source(source) for source in spec.get("sources") or ()]
    ready = all(entry["phase"] == "Ready" for entry in entries)
    conditions = (
        ("Ready", "True" if ready else "False", "Ready" if ready else "Pending"),
        ("StorageHealthy", "True", "Healthy"),
        ("SpaceAvailable", "True", "Available"),
    )
    found: Object = {
        "observedGeneration": generation,
        "agentVersion": "simulated",
        "bootID": digest_of(obj["metadata"]["name"])[:32],
        "root": {
            "path": "/var/lib/dlo/cache",
            "gid": 65532,
            "filesystem": "xfs",
            "totalBytes": 2000 * GIB,
            "freeBytes": 1500 * GIB,
            "reservedBytes": 0,
            "usedBytes": sum(entry.get("bytes", 0) for entry in entries),
        },
        "memory": {
            "totalBytes": 512 * GIB,
            "warmBudgetBytes": 256 * GIB,
            "lockLimitBytes": 512 * GIB,
            "maxMapCount": 1_048_576,
        },
        "conditions": [
            {
                "type": kind,
                "status": status,
                "reason": reason,
                "message": "",
                "lastTransitionTime": _SINCE,
                "observedGeneration": generation,
            }
            for kind, status, reason in conditions
        ],
    }
    return found | {name: items for name, items in (("sources", sources), ("entries", entries)) if items}


def _source(source: Object) -> Object:
    digest = digest_of(source["source"])
    return {
        "id": source["id"],
        "revision": digest[:40],
        "digest": digest,
        "files": 24,
        "bytes": 34 * GIB,
        "architecture": "FluxTransformer2DModel",
        "layoutDigest": digest_of("layout"),
        "headCounts": [24],
        "components": [
            {
                "name": "transformer",
                "bytes": 24 * GIB,
                "blocks": 57,
                "largestBlockBytes": GIB // 2,
                "residentBytes": GIB,
            }
        ],
        "restBytes": 10 * GIB,
    }


def _entry(entry: Object, pin: str | None) -> Object:
    found: Object = {"id": entry["id"], "kind": entry["kind"]}
    if entry["kind"] == "Layout":
        rank, size = entry.get("tensorRank", 0), entry.get("tensorSize", 1)
        found |= {"component": entry["component"], "coordinate": f"{rank}/{size}"}
    if not pin:
        return found | {"phase": "Pending"}
    key = digest_of([pin, entry])
    return found | {
        "phase": "Ready",
        "inputKey": key,
        "contentDigest": digest_of([key, "content"]),
        "manifestSha256": digest_of([key, "manifest"]),
        "bytes": 24 * GIB if entry["kind"] == "Layout" else 10 * GIB,
        "lastVerified": _SINCE,
        "lastUsed": _SINCE,
    }


def _observed(obj: Object) -> Any:
    return (obj.get("status") or {}).get("observedGeneration")


def main() -> None:
    """Runs until it is killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--namespace", required=True)
    given = parser.parse_args()
    gateway = ClusterGateway(from_kubeconfig(given.kubeconfig), user_agent="dlo-agents")
    print(json.dumps({"beat": BEAT_SECONDS, "build": BUILD_SECONDS}), flush=True)
    Agents(gateway, given.namespace).run()


if __name__ == "__main__":
    main()

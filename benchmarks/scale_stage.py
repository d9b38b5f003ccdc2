"""The cluster that the scale benchmark runs on: a real control plane, KWOK's nodes and pods, our operator's process."""

from __future__ import annotations

import contextlib
import ctypes
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil
from api.apiserver import ApiServer
from clusterbin import binary
from dlo_kube.client import ClusterGateway
from dlo_kube.gateway import Object
from dlo_kube.informer import Watcher
from dlo_kube.kinds import DIFFUSION_DEPLOYMENT, NODE, Kind

SYSTEM = "dlo-system"
TEAM = "scale"
CRDS = Path(__file__).parents[1] / "crds"
CONTROLLERS = ("deployment-controller", "replicaset-controller", "garbage-collector-controller")
WRITES = frozenset({"create", "update", "patch", "delete"})
METRICS_PORT = 19090
ENGINE_PORT = 19080
_T = TypeVar("_T")


@contextlib.contextmanager
def running(name: str, command: list[str], folder: Path) -> Iterator[psutil.Process]:
    """A process beside the benchmark, with a log; killed at the end."""
    with (folder / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            cwd=folder,
            env={**os.environ, "HOME": str(folder)},
            preexec_fn=_die_with_parent,  # noqa: PLW1509 - one system call, whatever threads there are
        )
    try:
        yield psutil.Process(process.pid)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def _die_with_parent() -> None:
    """In the child: the kernel ends it when the benchmark ends, however that happens."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


@contextlib.contextmanager
def control_plane(folder: Path) -> Iterator[ApiServer]:
    """API server, controllers, scheduler and KWOK, with our CRDs and namespaces."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ApiServer(folder))
        server.kubectl("apply", "--server-side", "-f", str(CRDS))
        server.kubectl("wait", "--for=condition=Established", "--timeout=60s", "-f", str(CRDS))
        for name in (SYSTEM, TEAM):
            server.kubectl("create", "namespace", name)
        stack.enter_context(server.controllers(*CONTROLLERS))
        config = f"--kubeconfig={server.kubeconfig}"
        scheduler = [str(binary("kube-scheduler")), config, "--leader-elect=false", "--secure-port=0"]
        scheduler += ["--kube-api-qps=400", "--kube-api-burst=800"]
        stack.enter_context(running("kube-scheduler", scheduler, folder))
        kwok = [str(binary("kwok")), config, "--manage-all-nodes", "--node-lease-duration-seconds=400"]
        kwok.append(f"--config={Path(__file__).with_name('scale_stages.yaml')}")
        stack.enter_context(running("kwok", [*kwok, "--server-address=127.0.0.1:0"], folder))
        yield server


def operator_command(server: ApiServer, identity: str) -> list[str]:
    """The operator as the chart starts it, but for where it finds the API server."""
    flags = {
        "--namespace": SYSTEM,
        "--agent-namespace": SYSTEM,
        "--engine-image": "engine:1",
        "--agent-image": "agent:1",
        "--identity": identity,
        "--metrics-port": str(METRICS_PORT),
        "--health-port": "0",
        "--kubeconfig": str(server.kubeconfig),
    }
    return [sys.executable, "-m", "dlo_operator", *(word for pair in flags.items() for word in pair)]


def node(number: int) -> Object:
    """A node of the usual size, as a kubelet would register it."""
    return {
        "apiVersion": "v1",
        "kind": NODE.kind,
        "metadata": {
            "name": f"node-{number:04d}",
            "labels": {"kubernetes.io/hostname": f"node-{number:04d}", "kubernetes.io/os": "linux"},
            "annotations": {"kwok.x-k8s.io/node": "fake"},
        },
        "status": {"allocatable": {"cpu": "64", "memory": "512Gi", "pods": "110"}},
    }


def deployment(number: int, nodes: int) -> Object:
    """A deployment of a model of its own, with one engine, whose entries lie on so many nodes."""
    return {
        "apiVersion": DIFFUSION_DEPLOYMENT.api_version,
        "kind": DIFFUSION_DEPLOYMENT.kind,
        "metadata": {"name": f"model-{number:04d}", "namespace": TEAM},
        "spec": {
            "model": {"source": {"directory": {"root": "samples", "path": f"model-{number:04d}"}}},
            "engine": {"device": "Cpu"},
            "serving": {"port": ENGINE_PORT},
            "replicas": 1,
            "cache": {
                "prewarm": {"minReadyNodes": nodes, "spareNodes": nodes - 1, "maxParallelNodes": nodes}
            },
            "placement": {"tolerations": [{"operator": "Exists"}]},
        },
    }


@dataclass
class View:
    """The objects of one kind as a watch shows them, and when each was last seen to change."""

    gateway: ClusterGateway
    kind: Kind
    objects: dict[str, Object] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def start(self) -> None:
        """Follows in a thread."""
        watcher = Watcher(self.gateway, self.kind, None, self.take, namespace=TEAM, resync_seconds=1e6)
        threading.Thread(target=watcher.run, daemon=True).start()

    def take(self, obj: Object | None) -> None:
        """One change."""
        with self.changed:
            if obj is not None:
                self.objects[obj["metadata"]["name"]] = obj
            self.changed.notify_all()

    def now(self) -> list[Object]:
        """All objects, as of now."""
        with self.changed:
            return list(self.objects.values())

    def until(self, done: Callable[[Mapping[str, Object]], Any], seconds: float) -> float:
        """Waits; the time at which `done` held, on the monotonic clock."""
        end = time.monotonic() + seconds
        with self.changed:
            while not done(self.objects):
                left = end - time.monotonic()
                assert left > 0, f"{self.kind.kind}: not done within {seconds:.0f} s"
                self.changed.wait(min(left, 1.0))
            return time.monotonic()


@contextlib.contextmanager
def engines() -> Iterator[None]:
    """Every engine: all pods have this machine's address, and say that they run on the cache."""
    said = {
        "backing": {"kind": "MappedCache", "fallbackCode": None},
        "offload": {"mode": "DistributedLayerwise"},
    }

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(said).encode())

        def log_message(self, format: str, *_: Any) -> None:
            del format

    server = http.server.ThreadingHTTPServer(("127.0.0.1", ENGINE_PORT), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


class Usage:
    """Memory and processor time of a process, sampled twice a second."""

    def __init__(self, process: psutil.Process) -> None:
        self.process, self.peak = process, 0
        self._stop = threading.Event()
        threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        while not self._stop.wait(0.5):
            with contextlib.suppress(psutil.Error):
                self.peak = max(self.peak, self.process.memory_info().rss)

    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process.is_running() and self.process.status() != psutil.STATUS_ZOMBIE

    def now(self) -> tuple[float, float]:
        """Resident MB, and seconds of processor time so far."""
        times = self.process.cpu_times()
        return self.process.memory_info().rss / 1e6, times.user + times.system


class Audit:
    """The writes in the API server's audit log, read on from where it was left."""

    def __init__(self, path: Path) -> None:
        self.path, self.offset = path, 0

    def writes(self) -> Counter[tuple[str, str]]:
        """Writes since the last call, by who and what: verb, resource and subresource; renewals of Leases apart."""
        found: Counter[tuple[str, str]] = Counter()
        with self.path.open("rb") as log:
            log.seek(self.offset)
            for line in log:
                if not line.endswith(b"\n"):
                    break
                self.offset += len(line)
                entry = json.loads(line)
                if entry["verb"] not in WRITES:
                    continue
                who, ref = _who(entry.get("userAgent", "")), entry.get("objectRef", {})
                what = "/".join(w for w in (ref.get("resource"), ref.get("subresource")) if w)
                if what == "leases" and entry["verb"] != "create":
                    what = "leases (renewed)"
                found[who, f"{entry['verb']} {what}"] += 1
        return found


def _who(agent: str) -> str:
    for prefix, name in (("dlo-operator", "operator"), ("kopf", "operator"), ("dlo-agents", "agents")):
        if agent.startswith(prefix):
            return name
    return "others"


def metric(name: str) -> float:
    """The sum of a metric's series on the operator's page; 0 where there is none."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{METRICS_PORT}/metrics", timeout=5) as page:
            lines = page.read().decode().splitlines()
    except OSError:
        return 0.0
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)


def spread(items: Iterable[_T], act: Callable[[_T], Any]) -> None:
    """Acts on every item, eight at a time."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(act, items))


def percentile(values: list[float], share: float) -> float:
    """The value that so many of the others do not exceed."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]

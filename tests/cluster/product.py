"""The product as a user has it: installed by Helm, used with kubectl and an OpenAI client."""

from __future__ import annotations

import base64
import copy
import importlib.util
import io
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import openai
import yaml
from cluster.clusters import Cluster, until
from cluster.machine import ROOT, command
from cluster.nodeshell import NodeShell

CHART = ROOT / "charts" / "dlo-operator"
EXAMPLE = ROOT / "examples" / "digits-cluster.yaml"
CLASSIFIER = ROOT / "tests" / "data" / "samples" / "digit_classifier.safetensors"
CACHE = "/var/lib/dlo/cache"


@dataclass
class Release:
    """An installed chart.

    Attributes:
        values: as given to Helm, beside the chart's own.
    """

    cluster: Cluster
    registry: str
    name: str = "dlo"
    namespace: str = "dlo-system"
    values: dict[str, Any] = field(default_factory=dict)

    def install(self, *flags: str, **more: Any) -> str:
        """Installs, or upgrades with more values; waits for the pods; what Helm prints."""
        self.values |= more
        done = self._helm("upgrade", "--install", *self._chart(), *flags)
        self.cluster.kubectl("-n", self.namespace, "rollout", "status", "daemonset", "--timeout=180s")
        return done

    def uninstall(self) -> str:
        """Uninstalls, and waits for Helm's hooks; what Helm prints."""
        return self._helm("uninstall", self.name, "-n", self.namespace, "--wait", "--timeout", "180s")

    def _chart(self) -> list[str]:
        return [
            *(self.name, str(CHART), "-n", self.namespace, "--create-namespace"),
            *("-f", "-", "--wait", "--timeout", "180s"),
        ]

    def _helm(self, *arguments: str) -> str:
        given = yaml.safe_dump({"image": {"registry": self.registry}, **self.values})
        return command(self.cluster.words("helm", *arguments), text=given)

    def pods(self, component: str) -> list[dict[str, Any]]:
        """The pods of `operator` or `agent`."""
        return self.objects("pods", component)

    def objects(self, kind: str, component: str) -> list[dict[str, Any]]:
        """Objects of one of the two in the release's namespace."""
        label = {"app.kubernetes.io/component": component}
        found: list[dict[str, Any]] = self.cluster.get(kind, namespace=self.namespace, **label)
        return found


class Deployed:
    """A DiffusionDeployment, as `kubectl` shows it."""

    def __init__(self, cluster: Cluster, name: str, namespace: str) -> None:
        self.cluster, self.name, self.namespace = cluster, name, namespace

    def get(self) -> dict[str, Any]:
        """The object."""
        found: dict[str, Any] = self.cluster.get("ddep", self.name, self.namespace)
        return found

    def conditions(self) -> dict[str, dict[str, Any]]:
        """Its conditions by type, those judged on the newest generation."""
        obj = self.get()
        return {
            c["type"]: c
            for c in obj.get("status", {}).get("conditions", [])
            if c["observedGeneration"] == obj["metadata"]["generation"]
        }

    def wait(self, condition: str = "Ready", reason: str = "", status: str = "", seconds: float = 240) -> Any:
        """Waits for a condition: for its reason, or its status, or for True; what it then says."""

        def reached() -> Any:
            found = self.conditions().get(condition)
            if found is None:
                return None
            wanted = found["reason"] == reason if reason else found["status"] == (status or "True")
            return found if wanted else None

        return until(f"{condition} {reason or status or 'True'}", reached, seconds, self.story)

    def patch(self, spec: dict[str, Any]) -> None:
        """Changes its spec as a user does, by merge patch."""
        self.cluster.kubectl(
            *("patch", "ddep", self.name, "-n", self.namespace, "--type=merge", "-p"),
            yaml.safe_dump({"spec": spec}),
        )

    def pods(self) -> list[dict[str, Any]]:
        """Its engine pods that are not being deleted."""
        found = self.cluster.get("pods", namespace=self.namespace, **{"dlo.dev/deployment": self.name})
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def story(self) -> str:
        """What a person would look at first, for a failed test."""
        lines = [
            f"{c['type']}={c['status']} {c['reason']}: {c['message']}" for c in self.conditions().values()
        ]
        with suppress(RuntimeError):
            lines.append(self.cluster.kubectl("get", "pods,nwcache", "-n", self.namespace, "-o", "wide"))
        for pod in self.pods():
            name = pod["metadata"]["name"]
            lines.append(
                self.cluster.kubectl(
                    *("logs", name, "-n", self.namespace, "--all-containers", "--tail=5"), check=False
                )
            )
        return "\n".join(["", *lines])

    @contextmanager
    def service(self) -> Iterator[str]:
        """The address of its Service, forwarded to this machine."""
        with forwarded(self.cluster, self.namespace, f"svc/{self.name}", 8000) as url:
            yield url

    def draw(self, prompt: str, seed: int = 0) -> bytes:
        """A PNG through the Service, asked for with the official OpenAI client."""
        with self.service() as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
            return draw(client, prompt, seed)


def example(namespace: str, name: str = "digits", **spec: Any) -> dict[str, Any]:
    """`examples/digits-cluster.yaml` with another name and with some of its spec replaced."""
    found: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    found["metadata"] = {"name": name, "namespace": namespace}
    found["spec"] = copy.deepcopy(found["spec"]) | spec
    return found


def entries_on(shell: NodeShell) -> set[str]:
    """The entries on a node's disk, each with the inode and time of its manifest: one built again differs."""
    program = (
        f"import pathlib\nfor p in pathlib.Path('/host{CACHE}/v1/entries').glob('*/manifest.json'):\n"
        "    print(p.parent.name, p.stat().st_ino, p.stat().st_mtime_ns)"
    )
    return set(shell.python(program).splitlines())


@contextmanager
def forwarded(cluster: Cluster, namespace: str, target: str, port: int) -> Iterator[str]:
    """The local address of a Service or pod of the cluster."""
    words = cluster.words("kubectl", "port-forward", "-n", namespace, target, f":{port}")
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        assert running.stdout is not None
        try:
            line = running.stdout.readline()
            found = re.search(r"127\.0\.0\.1:([0-9]+)", line)
            assert found is not None, line
            yield f"http://127.0.0.1:{found[1]}"
        finally:
            running.terminate()


def draw(client: openai.OpenAI, prompt: str, seed: int = 0) -> bytes:
    """One PNG."""
    answer = client.images.generate(
        prompt=prompt, model="digits", response_format="b64_json", extra_body={"seed": seed}
    )
    assert answer.data is not None
    assert answer.data[0].b64_json is not None
    return base64.b64decode(answer.data[0].b64_json)


def digit_in(png: bytes) -> int:
    """The digit that a classifier, trained on real handwriting, reads in a picture."""
    import numpy
    import torch
    from PIL import Image

    place = ROOT / "examples" / "digits" / "digits.py"
    spec = importlib.util.spec_from_file_location("sample_digits", place)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules.setdefault(spec.name, importlib.util.module_from_spec(spec))
    if not hasattr(module, "load_classifier"):
        spec.loader.exec_module(module)
    classifier, _ = module.load_classifier(CLASSIFIER)
    with Image.open(io.BytesIO(png)) as picture:
        pixels = torch.from_numpy(numpy.asarray(picture.convert("RGB")).copy()).float() / 255
    return int(classifier.read(pixels.mean(2)[None, None])[0])

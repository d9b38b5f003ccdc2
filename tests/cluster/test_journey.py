"""The path of a newcomer: apply the example, wait, draw, scale, change the model, roll back, delete."""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from cluster.clusters import Cluster, until
from cluster.conftest import MODELS, new_namespace
from cluster.nodeshell import NodeShell
from cluster.product import Deployed, Release, digit_in, entries_on, example

#: Every mapping of a layout entry by the engines' ranks: process, device, inode, resident and shared bytes.
_MAPPINGS = """
import json, pathlib, re
head = re.compile(r"^[0-9a-f]+-[0-9a-f]+ (\\S+) \\S+ (\\S+) (\\d+) +(.*)$")
found = []
for maps in pathlib.Path("/proc").glob("[0-9]*/smaps"):
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        continue
    row = None
    for line in lines:
        match = head.match(line)
        if match:
            row = None
            if re.search(r"/v1/entries/[0-9a-f]+/\\d+-[^/]+$", match[4]):
                row = dict(pid=maps.parent.name, mode=match[1], device=match[2], inode=match[3], path=match[4])
                found.append(row)
        elif row is not None and line.split(":")[0] in ("Rss", "Pss", "Private_Dirty"):
            row[line.split(":")[0]] = int(line.split()[1])
print(json.dumps(found))
"""
#: Two versions of the sample model under the source root `models`: one number differs from the sample and from any
#: earlier run's, of which entries may lie on the disk.
_TWO_VERSIONS = f"""
import json, pathlib, shutil, struct, sys
root = pathlib.Path("/host{MODELS}")
for name in ("v1", "v2"):
    shutil.rmtree(root / name, ignore_errors=True)
    shutil.copytree("/opt/dlo/samples/digits", root / name)
for name, run in (("v1", sys.argv[1]), ("v2", sys.argv[2])):
    file = next((root / name / "transformer").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + length])
    start, _ = header["proj_out.bias"]["data_offsets"]
    # The low bytes of the first numbers.
    data[8 + length + start], data[10 + length + start] = bytes.fromhex(run)
    file.write_bytes(data)
"""


@pytest.fixture(scope="module")
def digits(cluster: Cluster, release: Release) -> Iterator[Deployed]:
    """The example itself, in a namespace that this file's tests share."""
    assert release.name
    with new_namespace(cluster, "journey") as name:
        cluster.apply(example(name))
        yield Deployed(cluster, "digits", name)


def test_the_example_becomes_ready_and_draws_the_digit_asked_for(digits: Deployed) -> None:
    digits.cluster.kubectl(
        "wait", "--for=condition=Ready", "ddep/digits", "-n", digits.namespace, "--timeout=240s"
    )
    for prompt, digit in (("a handwritten seven", 7), ("a handwritten three", 3)):
        picture = digits.draw(prompt)
        assert picture.startswith(b"\x89PNG")
        assert digit_in(picture) == digit
    shown = digits.cluster.kubectl("get", "ddep", "digits", "-n", digits.namespace, "-o", "wide")
    header, row = (line.split() for line in shown.splitlines())
    assert header[1:6] == ["READY", "REASON", "CACHE", "REPLICAS", "MODE"]
    assert row[1:3] == ["True", "Ready"]
    assert row[4:6] == ["2", "DistributedLayerwise"]


def test_the_engines_of_both_replicas_share_the_pages_of_an_entry(
    digits: Deployed, shells: dict[str, NodeShell], worker: str
) -> None:
    """Two engines of two ranks: a coordinate's files are mapped by two processes, from one device and inode."""
    digits.wait()
    rows: list[dict[str, Any]] = json.loads(shells[worker].python(_MAPPINGS))
    entries: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        entries.setdefault(row["path"].rsplit("/", 1)[0], []).append(row)
    assert len(entries) == 2, rows
    for mapped in entries.values():
        files = {(row["device"], row["inode"]) for row in mapped}
        assert len(files) == len({row["path"] for row in mapped}) > 1
        assert len({row["pid"] for row in mapped}) == 2
        assert len(mapped) == 2 * len(files)
        assert all(row["mode"].startswith("r-") and row["Private_Dirty"] == 0 for row in mapped)
        # Each process is charged half of what both have resident: the pages are the same ones.
        assert sum(row["Pss"] for row in mapped) <= 1.05 * sum(row["Rss"] for row in mapped) / 2


def test_scale_to_zero_suspend_and_back(digits: Deployed) -> None:
    digits.wait()
    digits.cluster.kubectl("scale", "ddep", "digits", "-n", digits.namespace, "--replicas=0")
    assert digits.wait()["message"] == "scaled to zero"
    assert digits.conditions()["EngineAvailable"]["reason"] == "ScaledToZero"
    until("without pods", lambda: not digits.pods(), 60, digits.story)
    digits.cluster.kubectl("scale", "ddep", "digits", "-n", digits.namespace, "--replicas=1")
    digits.wait()
    digits.patch({"suspend": True})
    digits.wait("Ready", "Suspended")
    until("suspended", lambda: not digits.pods(), 60, digits.story)
    digits.patch({"suspend": False, "replicas": 2})
    digits.wait()
    assert len(digits.pods()) == 2


def test_a_new_model_rolls_without_a_failed_request_and_back_without_a_build(
    digits: Deployed, shells: dict[str, NodeShell], worker: str
) -> None:
    """Engines of the new model start when its entries are there; the old ones serve until then."""
    versions = (secrets.token_hex(2), secrets.token_hex(2))
    for shell in shells.values():
        shell.python(_TWO_VERSIONS, *versions)
    digits.patch(_model("v1"))
    digits.wait()
    before = entries_on(shells[worker])
    address = f"http://digits.{digits.namespace}.svc:8000/v1/images/generations"
    with _Asking(shells[worker], address) as asked:
        digits.patch(_model("v2"))
        until("rolled", lambda: _serves(digits, "v2"), 240, digits.story)
        digits.wait()
    assert asked.failures == []
    assert asked.answers >= 20
    both = entries_on(shells[worker])
    assert before < both
    digits.patch(_model("v1"))
    until("rolled back", lambda: _serves(digits, "v1"), 240, digits.story)
    digits.wait()
    # The same files, by inode and time of publication: nothing was built.
    assert entries_on(shells[worker]) == both


def test_deleted_it_leaves_no_child_and_its_entries_go_after_the_retention_time(
    digits: Deployed, shells: dict[str, NodeShell], worker: str
) -> None:
    digits.patch({"cache": {"retentionSeconds": 20}})
    digits.wait()
    cluster, shell = digits.cluster, shells[worker]
    keys = {entry["inputKey"] for entry in digits.get()["status"]["cache"]["entries"]}
    assert keys <= _keys(shell)
    others = _keys(shell) - keys
    assert others
    # Agents learn the new time with their next look at the spec.
    cache = ["get", "nwcache", worker, "-o", "jsonpath={.spec.entries[*].retentionSeconds}"]
    until("told", lambda: set(cluster.kubectl(*cache).split()) == {"20"}, 180)
    cluster.kubectl("delete", "ddep", "digits", "-n", digits.namespace, "--wait")
    kinds = "deployments,replicasets,services,poddisruptionbudgets,pods"
    selector = "app.kubernetes.io/managed-by=dlo-operator"
    until(
        "without children",
        lambda: (
            not cluster.kubectl("get", kinds, "-n", digits.namespace, "-l", selector, "-o", "name").strip()
        ),
        120,
    )
    until("without its entries", lambda: not keys & _keys(shell), 120, lambda: _keys(shell))
    # Those of the model before were let go under the longer time of then.
    assert _keys(shell) == others
    nodes = cluster.get("nodes")
    assert not [key for node in nodes for key in node["metadata"]["labels"] if key.startswith("dlo.dev/")]


def _model(version: str) -> dict[str, Any]:
    return {"model": {"source": {"directory": {"root": "models", "path": version}}}}


def _serves(digits: Deployed, version: str) -> bool:
    """Whether the engines that run are of the deployment's newest model, which is this one."""
    obj = digits.get()
    directory = obj["spec"]["model"]["source"]["directory"]
    revision = obj["status"].get("revision", {})
    return directory["path"] == version and not revision.get("updating") and _ready(digits) == "True"


def _ready(digits: Deployed) -> str:
    return str(digits.conditions().get("Ready", {}).get("status", ""))


def _keys(shell: NodeShell) -> set[str]:
    return {line.split()[0] for line in entries_on(shell)}


class _Asking:
    """Asks the Service for pictures from inside the cluster, one after another, as long as the block runs."""

    def __init__(self, shell: NodeShell, address: str) -> None:
        self._shell, self._address = shell, address
        self._thread = threading.Thread(target=self._ask)
        self.failures: list[str] = []
        self.answers = 0

    def __enter__(self) -> _Asking:
        self._shell.python(f"import os, contextlib\nwith contextlib.suppress(OSError): os.remove({_STOP!r})")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._shell.python(f"open({_STOP!r}, 'w').close()")
        self._thread.join()

    def _ask(self) -> None:
        told = json.loads(self._shell.python(_ASK, self._address, _STOP))
        self.answers, self.failures = told["answers"], told["failures"]


_STOP = "/tmp/stop-asking"
_ASK = """
import json, os, sys, urllib.request
address, stop = sys.argv[1:]
body = json.dumps({"prompt": "a handwritten five", "response_format": "b64_json"}).encode()
told = {"answers": 0, "failures": []}
while not os.path.exists(stop):
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            told["answers"] += len(json.load(answer)["data"])
    except OSError as error:
        told["failures"].append(repr(error))
print(json.dumps(told))
"""

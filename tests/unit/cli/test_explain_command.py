"""`dlo explain NAME` from the prompt to the server and back; and every way in which there is nothing to explain."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from dlo_kube.errors import Denied
from fakes.kube import Call
from unit.cli.api_over_http import ClusterOverHttp, kubeconfig
from unit.cli.prompt import Dlo
from unit.cli.test_bad_input import refused
from unit.cli.test_explain_print import ready
from unit.kube.http_server import Answer, Asked, HttpServer, status
from unit.operator.world import NAMESPACE, World

ENGINE = {"backing": {"kind": "MappedCache", "fallbackCode": None, "verified": True}}


@pytest.fixture
def world() -> World:
    """A deployment that is ready, and one of the same name elsewhere."""
    world = ready()
    for namespace in (NAMESPACE, "empty"):
        world.cluster.put({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    return world


@pytest.fixture
def server(world: World) -> Iterator[HttpServer]:
    """That cluster over HTTP."""
    with HttpServer(ClusterOverHttp(world.cluster, ENGINE)) as server:
        yield server


@pytest.fixture
def config(server: HttpServer, tmp_path: Path) -> Path:
    """How to reach it."""
    return kubeconfig(tmp_path, server.url, namespace=NAMESPACE)


def test_the_whole_way(dlo: Dlo, config: Path, server: HttpServer) -> None:
    """The context's namespace, every read, each engine asked through the server; one document."""
    said = dlo("explain", "digits", "--kubeconfig", config, "-o", "json")
    assert (said.status, said.err) == (0, ""), said
    value = json.loads(said.out)
    assert value["namespace"] == NAMESPACE
    assert [engine["backing"] for engine in value["engines"]] == ["MappedCache"] * 3
    assert value["unread"] == []
    assert {asked.method for asked in server.asked} == {"GET"}
    assert {asked.headers["user-agent"] for asked in server.asked} == {"dlo"}
    asked = [asked.path for asked in server.asked if "/proxy/" in asked.path]
    assert f"/api/v1/namespaces/{NAMESPACE}/pods/digits-1:8000/proxy/v1/engine/status" in asked


def test_kubeconfig_is_found_as_kubectl_finds_it(
    dlo: Dlo, config: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KUBECONFIG, several files with colons; else ~/.kube/config; a flag before both."""
    monkeypatch.delenv("KUBECONFIG", raising=False)
    (home / ".kube").mkdir()
    (home / ".kube/config").write_text(config.read_text())
    assert dlo("explain", "digits").status == 0
    (tmp_path / "other").write_text(
        '{"apiVersion": "v1", "kind": "Config", "contexts": [], "clusters": [], "users": []}'
    )
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path / 'other'}:{tmp_path / 'gone'}:{config}")
    assert dlo("explain", "ddep/digits", "--context", "lab").status == 0
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "gone"))
    refused(dlo("explain", "digits"), 1, "NoCredentials", "gone: no such file", "--kubeconfig")
    assert dlo("explain", "digits", "--kubeconfig", config).status == 0


@pytest.mark.parametrize(
    ("words", "status", "expected"),
    [
        (["digit"], 1, ["no DiffusionDeployment digit in namespace team", "did you mean digits?"]),
        (["zzz"], 1, ["there are: digits"]),
        (["digits", "-n", "empty"], 1, ["in namespace empty", "there is one in team: add -n team"]),
        (["zzz", "-n", "empty"], 1, ["none is there", "kubectl apply"]),
        (["digits", "-n", "teem"], 1, ["there is no namespace teem", "did you mean -n team?"]),
        (["pod/digits"], 2, ["pod/digits is no DiffusionDeployment"]),
        ([], 2, ["NAME", "-f"]),
        (["digits", "-f", "x.yaml"], 2, ["not both"]),
        (["digits", "--context", "prod"], 1, ["no context 'prod'", "--context: lab"]),
    ],
)
def test_nothing_to_explain(
    dlo: Dlo, config: Path, words: list[str], status: int, expected: list[str]
) -> None:
    """One line with the nearest that there is."""
    refused(dlo("explain", *words, "--kubeconfig", config), status, *expected)


def test_who_may_list_nothing_gets_the_plain_line(dlo: Dlo, world: World, config: Path) -> None:
    """No list, no guess."""

    def only_get(call: Call) -> None:
        if call.verb == "list":
            raise Denied(f"{call.kind} is forbidden")

    world.cluster.before.append(only_get)
    refused(
        dlo("explain", "digit", "--kubeconfig", config), 1, "no DiffusionDeployment digit", "kubectl apply"
    )
    said = dlo("explain", "digits", "--kubeconfig", config)
    assert said.status == 0
    assert said.out.count("Not looked at:") == 4


def test_who_may_not_read_the_object(dlo: Dlo, world: World, config: Path) -> None:
    """The server's words, and what to do."""

    def deny(call: Call) -> None:
        raise Denied(f'User "jane" cannot {call.verb} {call.kind}')

    world.cluster.before.append(deny)
    refused(dlo("explain", "digits", "--kubeconfig", config), 1, "Forbidden", 'User "jane" cannot get', "-n")


def test_credentials_that_have_expired(dlo: Dlo, server: HttpServer, tmp_path: Path) -> None:
    """The server does not know who asks."""
    config = kubeconfig(tmp_path, server.url, token="old")
    refused(dlo("explain", "digits", "--kubeconfig", config), 1, "Unauthorized", "context lab", "log in")


def test_a_server_without_our_kinds(dlo: Dlo, tmp_path: Path) -> None:
    """The CRDs are not installed."""

    def answer(asked: Asked) -> Answer:
        return Answer(404, b"404 page not found\n")

    with HttpServer(answer) as server:
        config = kubeconfig(tmp_path, server.url)
        refused(dlo("explain", "digits", "--kubeconfig", config), 1, "KindNotServed", "install the chart")


def test_a_server_that_is_not_there_or_broken(dlo: Dlo, tmp_path: Path) -> None:
    """No connection, and a proxy's error page: each one line with the address."""
    config = kubeconfig(tmp_path, "http://127.0.0.1:9")
    refused(
        dlo("explain", "digits", "--kubeconfig", config),
        1,
        "Unavailable",
        "127.0.0.1:9",
        "is the cluster up?",
    )
    with HttpServer(lambda _: status(500, "InternalError", "etcd is gone")) as server:
        config = kubeconfig(tmp_path, server.url)
        refused(dlo("explain", "digits", "--kubeconfig", config), 1, "etcd is gone")


@pytest.mark.parametrize("text", ["", "{", "[]", "a: 1", '{"contexts": [1], "clusters": [], "users": []}'])
def test_a_file_that_is_no_kubeconfig(dlo: Dlo, tmp_path: Path, text: str) -> None:
    """Named, whatever it holds."""
    file = tmp_path / "strange"
    file.write_text(text)
    refused(dlo("explain", "digits", "--kubeconfig", file), 1, "NoCredentials", "strange")


def test_a_credential_plugin_that_fails_is_one_line(dlo: Dlo, server: HttpServer, tmp_path: Path) -> None:
    """What the client library only logs is the error."""
    file = kubeconfig(tmp_path, server.url)
    value = json.loads(file.read_text())
    plugin = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "command": sys.executable,
        "args": ["-c", "import sys; sys.exit('token has expired')"],
        "interactiveMode": "Never",
    }
    value["users"][0]["user"] = {"exec": plugin}
    file.write_text(json.dumps(value))
    refused(dlo("explain", "digits", "--kubeconfig", file), 1, "NoCredentials", "context lab", "log in")


def test_without_the_kubernetes_client(home: Path, tmp_path: Path) -> None:
    """Commands without a cluster never look for it; `explain NAME` says in one line how to install it."""
    script = (
        "import sys\n"
        "class Lacks:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'kubernetes':\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.modules['kubernetes'] = None\n"
        "sys.meta_path.insert(0, Lacks())\n"
        "from dlo_cli.__main__ import main\n"
        "main()\n"
    )

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", script, *words],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "HOME": str(home)},
        )

    examples = Path(__file__).parents[3] / "examples"
    assert run("plan", "-f", str(examples / "digits.yaml")).returncode == 0
    assert run("version").returncode == 0
    said = run("explain", "digits")
    assert said.returncode == 1
    assert said.stderr == (
        "error: NotInstalled: the Kubernetes client is not installed, and this command asks a cluster"
        " — pip install 'dlo-operator[cluster]'\n"
    )

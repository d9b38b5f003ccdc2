"""A real API server for tests: etcd and kube-apiserver as plain processes of this user, on loopback only.

Everything lies in one folder, dies with this process, and needs neither root nor a container. There is no node
and, unless asked for, no controller: what is not collected or scheduled here is the test's to say.
"""

from __future__ import annotations

import ctypes
import json
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import urllib3
from clusterbin import KUBERNETES, binary
from dlo_kube.client import ClusterGateway
from dlo_kube.connection import by_address
from dlo_kube.errors import KubeError
from dlo_kube.responses import failure

_START_SECONDS = 60
_AUDIT_POLICY = """\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- {level: None, users: ["system:apiserver"]}
- {level: Metadata}
"""


class ApiServer:
    """One running server.

    Attributes:
        url: its address.
        token: bearer token of a cluster administrator.
        ca_file: the server's certificate.
        kubeconfig: file with all of that.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.token = secrets.token_hex(16)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        etcd, peer, port = _free_ports(3)
        self._etcd, self._peer = f"http://127.0.0.1:{etcd}", f"http://127.0.0.1:{peer}"
        self._port = port
        self.url = f"https://127.0.0.1:{port}"
        self.ca_file = folder / "certificates" / "apiserver.crt"
        self.kubeconfig = folder / "kubeconfig"
        self.audit_log = folder / "audit.log"
        self._pool = urllib3.PoolManager(ca_certs=str(self.ca_file), retries=False, timeout=10)

    def __enter__(self) -> Self:
        try:
            self._prepare()
            self.start_etcd()
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.clear()
        for name in reversed(list(self._processes)):
            self.stop(name)

    def gateway(self, token: str | None = None, **options: Any) -> ClusterGateway:
        """A gateway to it, as the administrator or with another token."""
        by = by_address(self.url, token=token or self.token, ca_file=self.ca_file)
        return ClusterGateway(by, **options)

    def kubectl(self, *arguments: str, text: str | None = None, check: bool = True) -> str:
        """What `kubectl` prints on stdout; fails the test with its stderr when it fails."""
        done = subprocess.run(
            [str(binary("kubectl")), "--kubeconfig", str(self.kubeconfig), *arguments],
            input=text,
            capture_output=True,
            text=True,
            timeout=60,
            env={"HOME": str(self.folder), "PATH": "/usr/bin:/bin"},
        )
        if check:
            assert done.returncode == 0, done.stderr
            return done.stdout
        return done.stdout + done.stderr

    def admit(self, obj: dict[str, Any], plural: str) -> tuple[dict[str, Any], None] | tuple[None, KubeError]:
        """What would be stored if a user created `obj`, or why it is refused; nothing is stored."""
        place = f"namespaces/{obj['metadata']['namespace']}/" if "namespace" in obj["metadata"] else ""
        answer = self._pool.request(
            "POST",
            f"{self.url}/apis/{obj['apiVersion']}/{place}{plural}?dryRun=All",
            body=json.dumps(obj),
            headers={"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"},
        )
        if answer.status == 201:
            return answer.json(), None
        return None, failure(answer.status, answer.data, "create", answer.headers)

    def audit(self) -> list[dict[str, Any]]:
        """Every finished request so far, as the audit log has it (written without delay)."""
        return [json.loads(line) for line in self.audit_log.read_text().splitlines()]

    def start_etcd(self) -> None:
        """Starts the store; it keeps what it held before."""
        self._spawn(
            "etcd",
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={self._etcd}",
            f"--advertise-client-urls={self._etcd}",
            f"--listen-peer-urls={self._peer}",
            f"--initial-advertise-peer-urls={self._peer}",
            f"--initial-cluster=default={self._peer}",
            "--unsafe-no-fsync",
            "--log-level=error",
        )
        self._wait("etcd", lambda: _status(f"{self._etcd}/health") == 200)

    def start(self) -> None:
        """Starts the API server and waits until it is ready."""
        self._spawn(
            "kube-apiserver",
            f"--etcd-servers={self._etcd}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self._port}",
            f"--cert-dir={self.folder / 'certificates'}",
            f"--token-auth-file={self.folder / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--anonymous-auth=false",
            "--endpoint-reconciler-type=none",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-signing-key-file={self.folder / 'accounts.key'}",
            f"--service-account-key-file={self.folder / 'accounts.key'}",
            "--disable-admission-plugins=ServiceAccount",
            f"--audit-policy-file={self.folder / 'audit.yaml'}",
            f"--audit-log-path={self.audit_log}",
            "--audit-log-mode=blocking",
        )
        self._wait("kube-apiserver", lambda: self._ready("/readyz"))
        served = json.loads(self._request("/version").data)["gitVersion"]
        assert served == KUBERNETES, (
            f"{binary('kube-apiserver')} is {served}: remove it and build {KUBERNETES}"
        )

    @contextmanager
    def controllers(self, *names: str) -> Iterator[None]:
        """The controllers of these names run meanwhile, e.g. `garbage-collector-controller`."""
        self._spawn(
            "kube-controller-manager",
            f"--kubeconfig={self.kubeconfig}",
            f"--controllers={','.join(names)}",
            f"--service-account-private-key-file={self.folder / 'accounts.key'}",
            "--leader-elect=false",
            "--secure-port=0",
            "--use-service-account-credentials=false",
            "--concurrent-gc-syncs=4",
        )
        try:
            yield
        finally:
            self.stop("kube-controller-manager")

    def stop(self, name: str, how: signal.Signals = signal.SIGTERM) -> None:
        """Ends one of its processes and waits for it."""
        process = self._processes.pop(name, None)
        if process is None:
            return
        process.send_signal(how)
        try:
            process.wait(3)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _prepare(self) -> None:
        (self.folder / "certificates").mkdir(parents=True)
        (self.folder / "audit.yaml").write_text(_AUDIT_POLICY)
        (self.folder / "tokens.csv").write_text(f'{self.token},administrator,1,"system:masters"\n')
        key = self.folder / "accounts.key"
        if shutil.which("openssl"):
            command = ["openssl", "genrsa", "-out", str(key), "2048"]
        else:
            command = ["ssh-keygen", "-q", "-t", "rsa", "-b", "2048", "-m", "PEM", "-N", "", "-f", str(key)]
        subprocess.run(command, check=True, capture_output=True)
        self.kubeconfig.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "test",
                    "clusters": [
                        {
                            "name": "test",
                            "cluster": {"server": self.url, "certificate-authority": str(self.ca_file)},
                        }
                    ],
                    "users": [{"name": "test", "user": {"token": self.token}}],
                    "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
                }
            )
        )
        self.kubeconfig.chmod(0o600)

    def _spawn(self, name: str, *flags: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [str(binary(name)), *flags],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=self.folder,
                env={"HOME": str(self.folder), "PATH": "/usr/bin:/bin"},
                start_new_session=True,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - one system call, and no thread yet
            )

    def _wait(self, name: str, ready: Callable[[], bool]) -> None:
        end = time.monotonic() + _START_SECONDS
        while not ready():
            tail = (self.folder / f"{name}.log").read_text(errors="replace")[-2000:]
            assert self._processes[name].poll() is None, f"{name} ended:\n{tail}"
            assert time.monotonic() < end, f"{name} was not ready in {_START_SECONDS} s:\n{tail}"
            time.sleep(0.1)

    def _ready(self, path: str) -> bool:
        if not self.ca_file.is_file():
            return False
        try:
            return self._request(path).status == 200
        except urllib3.exceptions.HTTPError:
            return False

    def _request(self, path: str) -> urllib3.BaseHTTPResponse:
        return self._pool.request("GET", self.url + path, headers={"Authorization": f"Bearer {self.token}"})


def _status(url: str) -> int:
    try:
        return urllib3.request("GET", url, retries=False, timeout=1).status
    except urllib3.exceptions.HTTPError:
        return 0


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def _die_with_parent() -> None:
    """In the child: the kernel ends it when this process ends, however that happens."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)

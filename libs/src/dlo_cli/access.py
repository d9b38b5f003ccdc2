"""A person's way to a cluster: which kubeconfig, which context, which namespace, as `kubectl` resolves them.

The Kubernetes client is optional: commands without a cluster never import it, and where it lacks, one line says
how to install it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlo_kube.errors import Denied, KubeError, NotFound, Unavailable

from dlo_cli.errors import CliError
from dlo_cli.roots import home_folder

if TYPE_CHECKING:
    from dlo_kube.gateway import Gateway

USER_AGENT = "dlo"


@dataclass(frozen=True)
class Where:
    """Which cluster the command line names; None: as `kubectl` would."""

    kubeconfig: Path | None = None
    context: str | None = None
    namespace: str | None = None


@dataclass(frozen=True)
class Cluster:
    """An open cluster.

    Attributes:
        gateway: reads objects.
        engines: asks an engine in a pod for its status.
        namespace: the one that is meant.
        place: the cluster for people: context and address.
    """

    gateway: Gateway
    engines: EngineStatus
    namespace: str
    place: str


class EngineStatus:
    """The status documents of engines, through the API server."""

    def __init__(self, proxy: Any) -> None:
        self._proxy = proxy

    def status(self, namespace: str, pod: str, port: int) -> Mapping[str, Any]:
        """What the engine in a pod says of itself. Raises KubeError."""
        said: Mapping[str, Any] = self._proxy.get_json(namespace, pod, port, "/v1/engine/status")
        return said


@contextmanager
def open_cluster(where: Where) -> Iterator[Cluster]:
    """The cluster, until the end of the block; failures in it that concern the cluster as a whole name it."""
    if find_spec("kubernetes") is None:
        raise CliError(
            "the Kubernetes client is not installed, and this command asks a cluster",
            hint="pip install 'dlo-operator[cluster]'",
            code="NotInstalled",
        )
    from dlo_kube.client import ClusterGateway
    from dlo_kube.podproxy import PodProxy

    configuration, context, namespace = _access(where)
    place = f"{context} ({configuration.host})"
    gateway = ClusterGateway(configuration, user_agent=USER_AGENT)
    proxy = PodProxy(configuration, user_agent=USER_AGENT)
    try:
        yield Cluster(gateway, EngineStatus(proxy), where.namespace or namespace, place)
    except KubeError as error:
        raise _in_words(error, place) from error
    finally:
        gateway.close()
        proxy.close()


def _access(where: Where) -> tuple[Any, str, str]:
    """Configuration, name and namespace: the flag, then KUBECONFIG, then the home folder, then this pod's own."""
    from dlo_kube.connection import in_cluster
    from dlo_kube.kubeconfig import open_kubeconfig

    files = str(where.kubeconfig) if where.kubeconfig is not None else os.environ.get("KUBECONFIG", "")
    if not files:
        default = Path(home_folder()) / ".kube" / "config"
        if not default.exists() and "KUBERNETES_SERVICE_HOST" in os.environ:
            account = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
            named = account.read_text().strip() if account.exists() else "default"
            return in_cluster(), "this pod's service account", named
        files = str(default)
    access = open_kubeconfig(files, where.context)
    return access.configuration, f"context {access.context}", access.namespace


def _in_words(error: KubeError, place: str) -> CliError:
    """A failure that no single object is the cause of, with what to do about it at a prompt."""
    if isinstance(error, NotFound) and error.code == "KindNotServed":
        return CliError(
            f"{place}: the cluster does not know our kinds: {error.message}",
            hint="install the chart charts/dlo-operator there, or choose another cluster with --context",
            code=error.code,
        )
    if isinstance(error, Denied) and (error.code == "Unauthorized" or "system:anonymous" in error.message):
        return CliError(
            f"{place}: the API server does not take these credentials: {error.message}",
            hint="they may have expired: log in to the cluster again, or choose another --context",
            code="Unauthorized",
        )
    if isinstance(error, Unavailable):
        return CliError(
            f"{place}: {error.message}",
            hint="is the cluster up? check the network, or choose another with --context",
            code=error.code,
        )
    return CliError(f"{place}: {error.message}", hint=error.hint, code=error.code)

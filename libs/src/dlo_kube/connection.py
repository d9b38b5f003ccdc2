"""How to reach an API server: from inside a pod, from a kubeconfig file, or by address.

Makes the client library's configuration and decides nothing else. Nothing is read from the environment but
what the platform sets for pods, and that only by `in_cluster`.
"""

from __future__ import annotations

from pathlib import Path

from kubernetes.client import Configuration
from kubernetes.config import ConfigException, load_incluster_config, load_kube_config
from urllib3.util.retry import Retry

from dlo_kube.errors import Denied

# A connection that never was may be tried again; anything else is the caller's decision.
_RETRIES = Retry(total=1, connect=1, read=0, redirect=0, status=0, other=0, respect_retry_after_header=False)


def in_cluster() -> Configuration:
    """By the pod's own service account; its token is read again as it is renewed.

    Raises:
        Denied: this is not a pod, or it has no service account token.
    """
    configuration = _blank()
    try:
        load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    except ConfigException as error:
        raise Denied(
            f"no access to the cluster from here: {error}",
            code="NoCredentials",
            hint="run it in a pod that mounts its service account token",
        ) from error
    return configuration


def from_kubeconfig(file: Path, context: str | None = None) -> Configuration:
    """By a kubeconfig file.

    Raises:
        Denied: the file does not hold usable access.
    """
    configuration = _blank()
    try:
        load_kube_config(  # type: ignore[no-untyped-call]
            config_file=str(file), context=context, client_configuration=configuration, persist_config=False
        )
    except Exception as error:
        # The loader lets through whatever its parsers and a strange file raise.
        raise Denied(
            f"{file}: {error}", code="NoCredentials", hint="name a kubeconfig file with a current context"
        ) from error
    return configuration


def by_address(
    host: str,
    *,
    token: str | None = None,
    ca_file: Path | None = None,
    certificate: tuple[Path, Path] | None = None,
) -> Configuration:
    """By address, with a bearer token or a client certificate.

    Args:
        host: URL, such as `https://10.0.0.1:6443`.
        token: bearer token.
        ca_file: certificates to trust instead of the machine's.
        certificate: files of the client's certificate and key.
    """
    configuration = _blank()
    configuration.host = host
    if token is not None:
        configuration.api_key["BearerToken"] = f"Bearer {token}"
    if ca_file is not None:
        configuration.ssl_ca_cert = str(ca_file)
    if certificate is not None:
        configuration.cert_file, configuration.key_file = (str(file) for file in certificate)
    return configuration


def _blank() -> Configuration:
    configuration = Configuration()
    configuration.retries = _RETRIES
    configuration.connection_pool_maxsize = 16
    return configuration

"""A person's access to a cluster, resolved as `kubectl` does: files, context, namespace.

Reads only the files it is told; what the environment says is the caller's to hand in. Credential plugins that the
kubeconfig names are run by the client library; what they complain of becomes the error here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kubernetes.client import Configuration
from kubernetes.config.kube_config import KubeConfigMerger

from dlo_kube.connection import from_kubeconfig
from dlo_kube.errors import Denied

_DEFAULT_NAMESPACE: Final = "default"


@dataclass(frozen=True)
class Access:
    """How to reach a cluster, and what a person's commands mean there.

    Attributes:
        configuration: for a gateway.
        context: name of the context.
        namespace: of the context; `default` where it names none.
    """

    configuration: Configuration
    context: str
    namespace: str

    @property
    def server(self) -> str:
        """Address of the API server."""
        return str(self.configuration.host)


def open_kubeconfig(files: str, context: str | None = None) -> Access:
    """The access that these files give.

    Args:
        files: one path, or several with colons between them, merged as `kubectl` merges them.
        context: another than the current one.

    Raises:
        Denied: there is no such file or context, or it gives no usable access.
    """
    known, current = _contexts(files)
    name = context or current
    if name is None or name not in known:
        what = f"there is no context {name!r}" if name else "no context is current"
        raise Denied(
            f"{files}: {what}",
            code="NoCredentials",
            hint=f"choose one with --context: {', '.join(sorted(known)) or 'there is none'}",
        )
    with _complaints() as said:
        configuration = from_kubeconfig(Path(files), name)
    if said and not configuration.api_key and not configuration.cert_file:
        raise Denied(
            f"{files}: context {name} gives no credentials: {' '.join(said[0].split())}",
            code="NoCredentials",
            hint="log in to the cluster again",
        )
    return Access(configuration, name, known[name] or _DEFAULT_NAMESPACE)


def _contexts(files: str) -> tuple[dict[str, str], str | None]:
    """Namespace of every context by its name (empty where it has none), and the current one's name."""
    try:
        merged = KubeConfigMerger(files).config  # type: ignore[no-untyped-call]
    except Exception as error:
        # The loader lets through whatever its parser and a strange file raise.
        raise _unusable(files, f"cannot be read: {' '.join(str(error).split())}") from error
    if merged is None:
        raise _unusable(files, "no such file")
    value: dict[str, Any] = merged.value
    try:
        named = {
            str(item["name"]): str((item["context"] or {}).get("namespace") or "")
            for item in (getattr(node, "value", node) for node in value.get("contexts") or ())
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise _unusable(files, "its contexts cannot be read") from error
    return named, value.get("current-context") or None


def _unusable(files: str, why: str) -> Denied:
    return Denied(
        f"{files}: {why}",
        code="NoCredentials",
        hint="name a kubeconfig file with --kubeconfig, or with the variable KUBECONFIG",
    )


@contextmanager
def _complaints() -> Iterator[list[str]]:
    """What the client library logs instead of raising: a credential plugin that failed."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield said
    finally:
        root.removeHandler(handler)

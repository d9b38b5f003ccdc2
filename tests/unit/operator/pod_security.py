"""The rules of Pod Security levels `baseline` and `restricted`, as the Kubernetes documentation lists them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_BASELINE_CAPABILITIES = frozenset(
    {
        *("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE"),
        *("SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"),
    }
)
#: Kinds of volumes that `restricted` allows.
RESTRICTED_VOLUMES = frozenset(
    {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
)
_PROBES = ("livenessProbe", "readinessProbe", "startupProbe")
_SECCOMP = frozenset({"RuntimeDefault", "Localhost"})
_SELINUX_TYPES = frozenset({"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"})


def refused(pod: dict[str, Any], level: str) -> list[str]:
    """What of a pod's spec the level refuses, by the names of the controls."""
    found = list(_baseline(pod))
    return found + list(_restricted(pod)) if level == "restricted" else found


def _containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        container
        for kind in ("initContainers", "containers", "ephemeralContainers")
        for container in pod.get(kind, ())
    ]


def _contexts(pod: dict[str, Any]) -> list[dict[str, Any]]:
    """The pod's security context, and each container's."""
    return [pod.get("securityContext", {}), *(c.get("securityContext", {}) for c in _containers(pod))]


def _baseline(pod: dict[str, Any]) -> Iterator[str]:
    yield from (name for name in ("hostNetwork", "hostPID", "hostIPC") if pod.get(name))
    yield from ("hostPath" for volume in pod.get("volumes", ()) if "hostPath" in volume)
    if pod.get("securityContext", {}).get("sysctls"):
        yield "sysctls"
    for context in _contexts(pod):
        yield from _context(context)
    for container in _containers(pod):
        yield from _container(container)


def _context(context: dict[str, Any]) -> Iterator[str]:
    """What pod and containers have alike."""
    if context.get("windowsOptions", {}).get("hostProcess"):
        yield "hostProcess"
    options = context.get("seLinuxOptions", {})
    if options.get("type", "") not in _SELINUX_TYPES or options.get("user") or options.get("role"):
        yield "seLinuxOptions"
    for profile in ("seccompProfile", "appArmorProfile"):
        if context.get(profile, {}).get("type") == "Unconfined":
            yield profile


def _container(container: dict[str, Any]) -> Iterator[str]:
    context = container.get("securityContext", {})
    if context.get("privileged"):
        yield "privileged"
    if set(context.get("capabilities", {}).get("add", ())) - _BASELINE_CAPABILITIES:
        yield "capabilities"
    if context.get("procMount", "Default") != "Default":
        yield "procMount"
    if any(port.get("hostPort") for port in container.get("ports", ())):
        yield "hostPort"
    if any(_names_a_host(container, probe) for probe in _PROBES):
        yield "probeHost"


def _names_a_host(container: dict[str, Any], probe: str) -> bool:
    found = container.get(probe, {})
    return any(found.get(kind, {}).get("host") for kind in ("httpGet", "tcpSocket"))


def _restricted(pod: dict[str, Any]) -> Iterator[str]:
    for volume in pod.get("volumes", ()):
        if set(volume) - {"name"} - RESTRICTED_VOLUMES:
            yield f"volume {volume['name']}"
    whole = pod.get("securityContext", {})
    for container in _containers(pod):
        name, context = container["name"], container.get("securityContext", {})
        if context.get("allowPrivilegeEscalation") is not False:
            yield f"allowPrivilegeEscalation of {name}"
        if not context.get("runAsNonRoot", whole.get("runAsNonRoot", False)):
            yield f"runAsNonRoot of {name}"
        if context.get("runAsUser", whole.get("runAsUser")) == 0:
            yield f"runAsUser of {name}"
        profile = context.get("seccompProfile", whole.get("seccompProfile", {}))
        if profile.get("type") not in _SECCOMP:
            yield f"seccompProfile of {name}"
        capabilities = context.get("capabilities", {})
        if "ALL" not in capabilities.get("drop", ()) or set(capabilities.get("add", ())) - {
            "NET_BIND_SERVICE"
        }:
            yield f"capabilities of {name}"

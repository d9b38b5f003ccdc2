"""What a person can do about a failing reason, in one table, for conditions and for the command line. Pure data."""

from __future__ import annotations

from typing import Final

_SEPARATOR: Final = " — "

#: One clause for each reason of a False or Unknown condition, and for each word that agents have for a failure.
ADVICE: Final[dict[str, str]] = {
    # Accepted
    "InvalidTopology": "correct spec.parallelism",
    "UnsupportedCombination": "change the spec as the message says",
    "UnknownArchitecture": "use a model of a supported architecture, or name a layout in model.layout",
    "EngineTooOld": "set engine.image to an engine of this release, or leave it empty",
    "WorldTooLarge": "lower the degrees of parallelism, or add larger nodes",
    "EndpointNotAllowed": "name the endpoint in the Helm values, or use one that is named there",
    "SecretNotPermitted": "bind ClusterRole dlo-secret-reader to the operator in this namespace",
    "PodSecurityDenied": "set cache.mount: PersistentVolume",
    "PodTemplateInvalid": "correct what the API server refuses",
    "TooManyEntries": "lower parallelism.tensor, or list fewer components",
    # SourceResolved
    "NotAccepted": "correct the spec: condition Accepted says how",
    "Hashing": "wait until the files are read once",
    "SourceUnauthorized": "give a credential that may read it (tokenSecretRef or secretRef), or correct its Secret",
    "SourceNotFound": "correct model.source, or put the model there",
    "SourceUntrusted": "remove the link or the name that leads out of the checkpoint",
    "SourceUnreachable": "check the endpoint and the network of the agents; it is tried again",
    "SourceAmbiguous": "name one set of weights in model.variant",
    "SourceInvalid": "repair the checkpoint, or name another",
    "SourceIncomplete": "complete the checkpoint: part of it is missing",
    "SourceMismatch": "give every node the same files, or change spec.model to pin anew",
    "SourceUnsupported": "use another kind of source",
    "AgentNotReady": "look at the agent's pod on that node: is it scheduled, running and up to date?",
    # CapacitySufficient
    "NoEligibleNodes": "change spec.placement, or add nodes",
    "InsufficientDisk": "free space on the cache's disk, or use nodes with larger disks",
    "InsufficientHostMemory": "use nodes with more memory, raise the agent's warm budget, or serve fewer models there",
    "MapCountTooLow": "raise vm.max_map_count on the node",
    "RootNotMounted": "mount the cache's disk on the node and prepare it (dlo-agent init-root)",
    # CacheReady
    "Warming": "wait: agents build and check the entries; status.cache and status.problems tell how far",
    "BuildFailed": "read the agent's log on that node; it is tried again",
    "IntegrityFailed": "check the node's disk; the entry is built again",
    "DiskFull": "free space on the cache's disk, or use a larger one",
    "NodeLost": "bring the node or its agent back, or remove the Node",
    "DeadlineExceeded": "find in status.problems what holds it up, or raise progressDeadlineSeconds",
    # EngineAvailable, Progressing, UsingCache, Ready
    "PodsPending": "wait, or look at the pods' events",
    "PodsCrashing": "read the engine's log (kubectl logs --previous), correct the spec or the node",
    "StartupTimeout": "look at the pods' events and logs, or raise rollout.progressDeadlineSeconds",
    "Suspended": "set spec.suspend to false to serve again",
    "RollingOut": "wait, or look at the pods' events",
    "Deferred": "see the condition that fails first",
    "FellBack": "repair what kept the engine from the cache, or change cache.onFallback or the policy",
    "Unreported": "wait, or let the operator reach the engines' port (NetworkPolicy)",
    # Conditions of nodes, and words of agents that have no condition of their own
    "Pending": "wait until the entries are built and checked",
    "RootBroken": "empty the folder and prepare it again (dlo-agent init-root)",
    "Denied": "give the agent's user the root: owner and modes",
    "ReadOnly": "mount the cache's disk read-write for the agent",
    "LocksUnsupported": "use a local file system such as ext4 or xfs for the root",
    "UnsafeOwner": "let one user own the root and all in it",
    "Unavailable": "check the node's disk: the system log may say what it reported",
    "InodesExhausted": "free inodes on the cache's disk",
    "NewerFormat": "bring the agents to the newest release, or remove what the newer one made",
    "UnknownLayout": "name the layout in the Helm values, or leave model.layout empty",
    "UnknownTensor": "use a layout that knows every tensor (model.layout)",
    "NotDivisible": "choose a tensor degree that divides the model",
    "UnsupportedQuantization": "set model.quantization to None",
    "NotUnderstood": "bring the agents to the operator's release",
    "Busy": "wait: another process holds the entry; it is tried again",
}


def advised(reason: str, message: str) -> str:
    """The message with the reason's advice behind it, unless it gives some of its own."""
    advice = ADVICE.get(reason, "")
    return message if not advice or _SEPARATOR in message else f"{message}{_SEPARATOR}{advice}"

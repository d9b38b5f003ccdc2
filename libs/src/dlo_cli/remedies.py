"""What a person can do about each reason: the API's own advice, and words for what only pods and nodes show. Data."""

from typing import Final

from dlo_api.advice import ADVICE

#: Reasons that say that something goes on by itself.
UNDER_WAY: Final = frozenset(
    {"Hashing", "Warming", "RollingOut", "Pending", "PodsPending", "Busy", "Unreported"}
)

_IMAGE: Final = "check the image's name, the registry and its pull secrets"
_RUNTIME: Final = "look at the node's container runtime: kubectl describe pod"

REMEDIES: Final[dict[str, str]] = {
    **ADVICE,
    "WorldTooLarge": "lower the degrees of spec.parallelism, or add a node with more GPUs",
    "RollingOut": "wait: the rollout is under way",
    "Failed": "read the agent's log on that node; it is tried again",
    "Quarantined": ADVICE["IntegrityFailed"],
    "ReplicaFailure": "correct what it names: a quota, a policy or a webhook of the namespace",
    "Unschedulable": "free or add what the scheduler says is short, or change spec.placement",
    "GateDeadline": "see what its node lacks; the pod is started again by itself",
    "OOMKilled": "raise limits.memory in spec.engine.resources",
    "ErrImagePull": _IMAGE,
    "ImagePullBackOff": _IMAGE,
    "InvalidImageName": "correct the image's name",
    "CreateContainerConfigError": "create the Secret or ConfigMap that spec.engine.extraEnv refers to",
    "CreateContainerError": _RUNTIME,
    "RunContainerError": _RUNTIME,
    "CrashLoopBackOff": "kubectl logs --previous has the container's last words",
    "Evicted": "look at the pressure on its node: kubectl describe node",
}


def remedy_of(reason: str) -> str:
    """What to do about a reason; for one that is not known here, where to look."""
    return REMEDIES.get(
        reason, "kubectl describe shows its events; dlo of the cluster's own release may know more"
    )

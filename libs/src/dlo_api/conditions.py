"""The Condition type, and every condition type and reason of both kinds.

Types and reasons are part of the API: they are added, never renamed.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field, StringConstraints

from dlo_api.meta import ApiModel

ConditionStatus = Literal["True", "False", "Unknown"]

# Types of a DiffusionDeployment.
ACCEPTED: Final = "Accepted"
SOURCE_RESOLVED: Final = "SourceResolved"
CAPACITY_SUFFICIENT: Final = "CapacitySufficient"
CACHE_READY: Final = "CacheReady"
ENGINE_AVAILABLE: Final = "EngineAvailable"
PROGRESSING: Final = "Progressing"
USING_CACHE: Final = "UsingCache"
STALLED: Final = "Stalled"
READY: Final = "Ready"

# Types of a NodeWeightCache (and Ready).
STORAGE_HEALTHY: Final = "StorageHealthy"
SPACE_AVAILABLE: Final = "SpaceAvailable"

DEPLOYMENT_CONDITIONS: Final = (
    ACCEPTED,
    SOURCE_RESOLVED,
    CAPACITY_SUFFICIENT,
    CACHE_READY,
    ENGINE_AVAILABLE,
    PROGRESSING,
    USING_CACHE,
    STALLED,
    READY,
)
NODE_CONDITIONS: Final = (READY, STORAGE_HEALTHY, SPACE_AVAILABLE)

#: The reasons of each condition of a DiffusionDeployment, for True first. `Stalled` and `Ready` also copy the
#: first failing reason up.
REASONS: Final[dict[str, tuple[str, ...]]] = {
    ACCEPTED: (
        "Accepted",
        "InvalidTopology",
        "UnsupportedCombination",
        "UnknownArchitecture",
        "EngineTooOld",
        "WorldTooLarge",
        "EndpointNotAllowed",
        "SecretNotPermitted",
        "PodSecurityDenied",
        "PodTemplateInvalid",
        "TooManyEntries",
    ),
    SOURCE_RESOLVED: (
        "Resolved",
        "NotAccepted",
        "Hashing",
        "SourceUnauthorized",
        "SourceNotFound",
        "SourceUntrusted",
        "SourceUnreachable",
        "SourceAmbiguous",
        "SourceInvalid",
        "SourceIncomplete",
        "SourceMismatch",
        "AgentNotReady",
    ),
    CAPACITY_SUFFICIENT: (
        "Sufficient",
        "NotAccepted",
        "NoEligibleNodes",
        "InsufficientDisk",
        "InsufficientHostMemory",
        "MapCountTooLow",
        "RootNotMounted",
    ),
    CACHE_READY: (
        "Warm",
        "CacheDisabled",
        "NotAccepted",
        "Warming",
        "BuildFailed",
        "IntegrityFailed",
        "DiskFull",
        "AgentNotReady",
        "NodeLost",
        "DeadlineExceeded",
    ),
    ENGINE_AVAILABLE: (
        "Available",
        "PodsPending",
        "PodsCrashing",
        "StartupTimeout",
        "ScaledToZero",
        "Suspended",
    ),
    PROGRESSING: ("Complete", "Warming", "RollingOut", "Deferred", "DeadlineExceeded", "Suspended"),
    USING_CACHE: ("AsAsked", "CacheDisabled", "FellBack", "Unreported"),
    STALLED: ("NotStalled",),
    READY: ("Ready", "Suspended"),
}
#: The reasons of each condition of a NodeWeightCache. `Ready` also copies a source's or an entry's reason up.
NODE_REASONS: Final[dict[str, tuple[str, ...]]] = {
    READY: ("Ready", "Pending"),
    STORAGE_HEALTHY: (
        "Healthy",
        "RootNotMounted",
        "RootBroken",
        "Denied",
        "ReadOnly",
        "LocksUnsupported",
        "NewerFormat",
        "UnsafeOwner",
        "DiskFull",
        "Unavailable",
    ),
    SPACE_AVAILABLE: ("Available", "InsufficientDisk", "DiskFull", "InodesExhausted"),
}

_REASON = r"^[A-Z][A-Za-z0-9]*$"
TIME: Final[dict[str, Any]] = {"format": "date-time"}


class Condition(ApiModel):
    """One aspect of an object's state, with when and on which generation it was judged."""

    type: Annotated[str, StringConstraints(max_length=64, pattern=r"^[A-Za-z][A-Za-z0-9./-]*$")] = Field(
        description="What the condition is about; at most one of each type."
    )
    status: ConditionStatus = Field(description="Whether it holds; Unknown when it cannot be told.")
    reason: Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=_REASON)] = Field(
        description="One stable CamelCase word that says why."
    )
    message: Annotated[str, StringConstraints(max_length=1024)] = Field(
        default="", description="For people: what is so, and what to do about it."
    )
    last_transition_time: Annotated[str, StringConstraints(max_length=40)] = Field(
        description="When the status last changed.", json_schema_extra=TIME
    )
    observed_generation: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="Generation of the spec that was judged."
    )


def find(conditions: tuple[Condition, ...], kind: str) -> Condition | None:
    """The condition of this type, or None (which readers take as Unknown)."""
    return next((condition for condition in conditions if condition.type == kind), None)

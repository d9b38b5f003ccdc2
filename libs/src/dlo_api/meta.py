"""The base of all models, and the part of ObjectMeta that we read."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from pydantic.alias_generators import to_camel


class ApiModel(BaseModel):
    """Frozen, strict, camelCase in JSON, snake_case in Python; unknown fields are refused."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        alias_generator=to_camel,
        validate_by_alias=True,
        validate_by_name=True,
        allow_inf_nan=False,
    )

    def to_json(self) -> dict[str, Any]:
        """The object as JSON values with camelCase names; what is not set is absent, never null."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


#: Fields of ObjectMeta that the API server knows and we do not read; an exported object may carry them.
SERVER_FIELDS: Final = frozenset(
    {
        "creationTimestamp",
        "deletionGracePeriodSeconds",
        "deletionTimestamp",
        "finalizers",
        "generateName",
        "generation",
        "managedFields",
        "ownerReferences",
        "resourceVersion",
        "selfLink",
        "uid",
    }
)

_DNS_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
_DNS_SUBDOMAIN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"


class ObjectMeta(ApiModel):
    """What we read of `metadata`; the rest of it belongs to the API server and is left out."""

    model_config = ConfigDict(extra="ignore")

    name: Annotated[str, StringConstraints(max_length=253, pattern=_DNS_SUBDOMAIN)] = Field(
        description="Name of the object, unique in its namespace."
    )
    namespace: Annotated[str, StringConstraints(max_length=63, pattern=_DNS_LABEL)] | None = Field(
        default=None,
        description="Namespace of the object; absent for cluster-scoped kinds and local manifests.",
    )
    labels: dict[str, str] = Field(default={}, description="Labels of the object.")
    annotations: dict[str, str] = Field(default={}, description="Annotations of the object.")
    uid: str | None = Field(default=None, description="Identity given by the API server.")
    generation: int | None = Field(
        default=None, description="Generation of the spec, counted by the API server."
    )
    resource_version: str | None = Field(
        default=None, description="Version of the object, for preconditions."
    )
    deletion_timestamp: str | None = Field(
        default=None, description="Present while the object is being deleted."
    )

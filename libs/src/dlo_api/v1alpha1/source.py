"""Where the bytes of a model come from; both kinds carry it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from dlo_api.meta import ApiModel
from dlo_api.v1alpha1.types import OptionalDnsLabel, PathText, SecretKeyReference, SecretReference

_REPO = r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?$"


class DirectorySource(ApiModel):
    """A folder below a named root of the agent."""

    root: OptionalDnsLabel = Field(
        default="",
        description="Named source root from the agent's Helm values; `samples` ships with the product. "
        "Needed in a cluster; without it, `dlo run` takes the path relative to the manifest.",
    )
    path: PathText = Field(
        description="Folder of the pipeline (the one with model_index.json) below the root."
    )


class HuggingFaceSource(ApiModel):
    """A repository of a Hugging Face hub."""

    repo: Annotated[str, StringConstraints(max_length=200, pattern=_REPO)] = Field(
        description="Repository, as org/name."
    )
    revision: Annotated[str, StringConstraints(max_length=255, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")] = (
        Field(default="main", description="Branch, tag or commit; pinned to a commit when it is resolved.")
    )
    token_secret_ref: SecretKeyReference | None = Field(
        default=None, description="Token for gated or private repositories."
    )
    endpoint: OptionalDnsLabel = Field(
        default="", description="Name of a hub endpoint from the Helm values; empty for the public hub."
    )


class S3Source(ApiModel):
    """A prefix of an S3 bucket."""

    bucket: Annotated[str, StringConstraints(max_length=63, pattern=r"^[a-z0-9][a-z0-9.-]*[a-z0-9]$")] = (
        Field(description="Name of the bucket.")
    )
    prefix: Annotated[str, StringConstraints(max_length=1024, pattern=r"^[^\x00-\x1f\x7f]*$")] = Field(
        default="", description="Prefix of the pipeline in the bucket (where model_index.json lies)."
    )
    secret_ref: SecretReference | None = Field(
        default=None, description="Secret with accessKeyId and secretAccessKey; absent for public buckets."
    )
    endpoint: OptionalDnsLabel = Field(
        default="", description="Name of an S3 endpoint from the Helm values; empty for the default one."
    )


class Source(ApiModel):
    """Where the model comes from: exactly one member."""

    directory: DirectorySource | None = Field(
        default=None, description="A folder below a named root of the agent."
    )
    hugging_face: HuggingFaceSource | None = Field(
        default=None, description="A repository of a Hugging Face hub."
    )
    s3: S3Source | None = Field(default=None, description="A prefix of an S3 bucket.")

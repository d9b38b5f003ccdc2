"""Field types that both kinds share: bounded strings, counts, sizes, references, pass-through values.

Every string, list and map has a bound: without one, the API server takes the worst for the cost of rules.
Patterns are RE2: no look-around, no back-references.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field, StringConstraints

from dlo_api.conditions import TIME
from dlo_api.meta import ApiModel
from dlo_api.quantity import SIZE_MAX_LENGTH, SIZE_PATTERN

PRESERVE_UNKNOWN: Final[dict[str, Any]] = {"x-kubernetes-preserve-unknown-fields": True}

_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"

#: A name in lower-case letters, digits and dashes; empty where a field may be unset.
OptionalDnsLabel = Annotated[str, StringConstraints(max_length=63, pattern=rf"^({_LABEL})?$")]
DnsSubdomain = Annotated[str, StringConstraints(max_length=253, pattern=rf"^{_LABEL}(\.{_LABEL})*$")]
OptionalDnsSubdomain = Annotated[
    str, StringConstraints(max_length=253, pattern=rf"^({_LABEL}(\.{_LABEL})*)?$")
]
#: A folder name of a diffusers pipeline.
ComponentName = Annotated[str, StringConstraints(max_length=63, pattern=r"^[A-Za-z][A-Za-z0-9_]*$")]
#: A word that may become part of a file name.
OptionalWord = Annotated[str, StringConstraints(max_length=63, pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]*)?$")]
#: A path: any text without control characters.
PathText = Annotated[str, StringConstraints(min_length=1, max_length=1024, pattern=r"^[^\x00-\x1f\x7f]+$")]
#: A digest, key or content address in lower-case hexadecimal.
Hex = Annotated[str, StringConstraints(max_length=128, pattern=r"^[0-9a-f]+$")]
#: A sha256 digest, or empty while it is not known.
OptionalHex = Annotated[str, StringConstraints(max_length=128, pattern=r"^[0-9a-f]*$")]
Message = Annotated[str, StringConstraints(max_length=256)]
Reason = Annotated[str, StringConstraints(max_length=64, pattern=r"^[A-Z][A-Za-z0-9]*$")]
Word = Annotated[str, StringConstraints(max_length=64)]
Line = Annotated[str, StringConstraints(max_length=256)]
#: A coordinate: tensor rank / tensor size.
Coordinate = Annotated[str, StringConstraints(max_length=16, pattern=r"^[0-9]+/[0-9]+$")]
Time = Annotated[str, StringConstraints(max_length=40), Field(json_schema_extra=TIME)]

#: A size in bytes as a quantity string; always a string, since integers break `quantity()` in rules.
Size = Annotated[str, StringConstraints(max_length=SIZE_MAX_LENGTH, pattern=SIZE_PATTERN)]

Count = Annotated[int, Field(ge=0)]
#: One degree of parallelism. Its lower bound is an admission rule, so that the message says what to change.
Degree = Annotated[int, Field(le=1024)]

StringMap = Annotated[
    dict[str, Annotated[str, StringConstraints(max_length=4096)]],
    Field(max_length=64),
]
#: An object of a core Kubernetes type, handed on as it is.
PassThrough = Annotated[dict[str, Any], Field(max_length=64, json_schema_extra=PRESERVE_UNKNOWN)]

Dtype = Literal["Source", "bfloat16", "float16", "float32"]
Quantization = Literal["None", "Fp8PerTensor"]
EntryKind = Literal["Layout", "Files"]


def _distinct(values: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(values)) != len(values):
        raise ValueError("holds the same value twice")
    return values


ComponentSet = Annotated[
    tuple[ComponentName, ...],
    Field(min_length=1, max_length=8, json_schema_extra={"x-kubernetes-list-type": "set"}),
    AfterValidator(_distinct),
]


def unique_by(key: str) -> AfterValidator:
    """Goes with `keyed_by`: the server takes no two items of one key, and neither do the models."""

    def check(values: tuple[Any, ...]) -> tuple[Any, ...]:
        if len({getattr(value, key) for value in values}) != len(values):
            raise ValueError(f"holds the same {key} twice")
        return values

    return AfterValidator(check)


def keyed_by(key: str) -> dict[str, Any]:
    """Schema words of a list that is a map keyed by `key`, so that writers own single items."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


class SecretReference(ApiModel):
    """A Secret in the object's own namespace."""

    name: DnsSubdomain = Field(description="Name of the Secret, in the same namespace.")


class SecretKeyReference(ApiModel):
    """One key of a Secret in the object's own namespace."""

    name: DnsSubdomain = Field(description="Name of the Secret, in the same namespace.")
    key: Annotated[str, StringConstraints(min_length=1, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$")] = (
        Field(default="token", description="Key in the Secret that holds the token.")
    )

"""PURE: the body of an images request, checked field by field and filled with defaults.

Every refusal names the field and the limit. Fields of the official API that this engine cannot honour are
refused with the reason, those without an effect on the picture are accepted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dlo_engine.config import MAX_GUIDANCE, MAX_STEPS, EngineConfig
from dlo_engine.errors import EngineError
from dlo_engine.protocol import GenerateRequest, Limits

MAX_PROMPT = 10_000
MAX_N = 8
MAX_SEED = 2**63 - 1


class RequestRefused(EngineError):
    """The request is wrong. Subject: param (the field, or None), status (the HTTP status)."""

    code = "InvalidRequest"

    def __init__(
        self, message: str, *, param: str | None, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message, code=code)
        self.param = param
        self.status = status


@dataclass(frozen=True)
class Admitted:
    """A request that can run, and how its pictures are returned."""

    request: GenerateRequest
    response_format: Literal["b64_json", "url"]


@dataclass(frozen=True)
class Defaults:
    """What a request gets for fields that it leaves out."""

    width: int
    height: int
    steps: int
    guidance: float | None


def defaults_for(config: EngineConfig, limits: Limits) -> Defaults:
    """The command line's defaults, else the model's own."""

    def first(own: Any, models: Any) -> Any:
        return models if own is None else own

    return Defaults(
        width=first(config.default_width, limits.default_width),
        height=first(config.default_height, limits.default_height),
        steps=first(config.default_steps, limits.default_steps),
        guidance=first(config.default_guidance, limits.default_guidance),
    )


def parse_body(body: bytes) -> dict[str, Any]:
    """The JSON object of a body, without members that are null. Raises RequestRefused."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", "not UTF-8, nested too deeply, or a number of too many digits")
        raise RequestRefused(f"the body is not JSON: {reason}", param=None, code="InvalidJson") from error
    if not isinstance(value, dict):
        raise RequestRefused("the body is not a JSON object", param=None, code="InvalidJson")
    return {key: item for key, item in value.items() if item is not None}


def admit(
    fields: Mapping[str, Any],
    *,
    request_id: str,
    model_name: str,
    limits: Limits,
    defaults: Defaults,
    random_seed: Callable[[], int],
) -> Admitted:
    """Check every field and fill in the defaults. Raises RequestRefused naming the first wrong field."""
    unknown = sorted(set(fields) - _OWN_FIELDS - set(_OFFICIAL_FIELDS))
    if unknown:
        name = _shown(unknown[0])
        raise RequestRefused(f"unknown field {name}", param=unknown[0][:100], code="UnknownField")
    _check_model(fields.get("model"), model_name)
    for name, (accepted, reason) in _OFFICIAL_FIELDS.items():
        if name in fields and accepted is not None and fields[name] not in accepted:
            raise RequestRefused(f"{name} {_shown(fields[name])} is not supported: {reason}", param=name)
    width, height = _size(fields.get("size", "auto"), limits, defaults)
    seed = _integer(fields, "seed", 0, MAX_SEED)
    response_format = fields.get("response_format", "b64_json")
    if response_format not in ("b64_json", "url"):
        raise _wrong("response_format", response_format, "b64_json or url")
    request = GenerateRequest(
        id=request_id,
        prompt=_prompt(fields.get("prompt")),
        n=_integer(fields, "n", 1, MAX_N, default=1),
        width=width,
        height=height,
        steps=_integer(fields, "num_inference_steps", 1, MAX_STEPS, default=defaults.steps),
        guidance=_guidance(fields, defaults),
        seed=random_seed() if seed is None else seed,
    )
    return Admitted(request, response_format)


_OWN_FIELDS = frozenset(
    ("prompt", "n", "size", "seed", "num_inference_steps", "guidance_scale", "response_format", "model")
)

# Official fields: the values that this engine honours (None: any), and why others are refused.
_OFFICIAL_FIELDS: dict[str, tuple[tuple[Any, ...] | None, str]] = {
    "user": (None, ""),
    "moderation": (None, ""),
    "quality": (("auto", "standard"), "set num_inference_steps instead"),
    "style": ((), "the model has no styles; say it in the prompt"),
    "background": (("auto", "opaque"), "pictures have no transparency"),
    "output_format": (("png",), "pictures are PNG files"),
    "output_compression": ((100,), "PNG files are lossless"),
    "stream": ((False,), "a request is answered once"),
    "partial_images": ((0,), "a request is answered once"),
}


def _check_model(value: Any, model_name: str) -> None:
    if value is None or value == model_name:
        return
    if not isinstance(value, str):
        raise _wrong("model", value, "a string")
    raise RequestRefused(
        f"model {_shown(value)} is not served here; this engine serves {model_name!r}",
        param="model",
        code="ModelNotFound",
        status=404,
    )


def _prompt(value: Any) -> str:
    if not isinstance(value, str):
        raise _wrong("prompt", value, "a string")
    if not value.strip():
        raise RequestRefused("prompt is empty", param="prompt")
    if len(value) > MAX_PROMPT:
        raise RequestRefused(
            f"prompt has {len(value)} characters; the limit is {MAX_PROMPT}",
            param="prompt",
            code="PromptTooLong",
        )
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise RequestRefused("prompt holds half a surrogate pair, which is no character", param="prompt")
    return value


def _size(value: Any, limits: Limits, defaults: Defaults) -> tuple[int, int]:
    if value == "auto":
        return defaults.width, defaults.height
    match = re.fullmatch(r"([0-9]{1,6})x([0-9]{1,6})", value, re.ASCII) if isinstance(value, str) else None
    if match is None:
        raise _wrong("size", value, "WIDTHxHEIGHT, such as 1024x1024, or auto")
    width, height = int(match[1]), int(match[2])
    if expected := size_problem(width, height, limits):
        raise _wrong("size", value, expected)
    return width, height


def size_problem(width: int, height: int, limits: Limits) -> str:
    """What the sides must be where they are not; empty for a size that the model takes."""
    multiple, largest = limits.pixel_multiple, limits.max_side
    if all(side % multiple == 0 and multiple <= side <= largest for side in (width, height)):
        return ""
    return f"sides that are multiples of {multiple} from {multiple} to {largest}"


def _integer(
    fields: Mapping[str, Any], name: str, least: int, most: int, *, default: int | None = None
) -> Any:
    value = fields.get(name, default)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise _wrong(name, value, f"an integer from {least} to {most}")
    return value


def _guidance(fields: Mapping[str, Any], defaults: Defaults) -> float | None:
    if "guidance_scale" not in fields:
        return defaults.guidance
    value = fields["guidance_scale"]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= MAX_GUIDANCE:
        raise _wrong("guidance_scale", value, f"a number from 0 to {MAX_GUIDANCE}")
    return float(value)


def _wrong(name: str, value: Any, expected: str) -> RequestRefused:
    if value is None:
        return RequestRefused(f"{name} is missing; it must be {expected}", param=name, code="MissingField")
    return RequestRefused(f"{name} is {_shown(value)}; it must be {expected}", param=name)


def _shown(value: Any) -> str:
    """The value as JSON, cut short, safe to send back."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = type(value).__name__
    return text if len(text) <= 60 else text[:57] + "..."

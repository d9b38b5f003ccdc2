"""Every field of an images request: limits, refusals by name, defaults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from dlo_engine.config import EngineConfig
from dlo_engine.front.admission import Admitted, Defaults, RequestRefused, admit, defaults_for, parse_body
from dlo_engine.protocol import Limits

LIMITS = Limits(pixel_multiple=16, max_side=256, default_steps=4)
DEFAULTS = Defaults(width=64, height=32, steps=4, guidance=3.5)


def check(**fields: Any) -> Admitted:
    """Admit a request with these fields."""
    return admit(
        {"prompt": "a cat", **fields},
        request_id="r",
        model_name="fake",
        limits=LIMITS,
        defaults=DEFAULTS,
        random_seed=lambda: 42,
    )


def test_defaults_are_filled_in_at_admission() -> None:
    request = check().request
    assert (request.width, request.height, request.steps, request.guidance) == (64, 32, 4, 3.5)
    assert (request.n, request.seed, request.discard) == (1, 42, False)
    assert check(size="auto").request == request


def test_given_values_win_over_defaults() -> None:
    admitted = check(
        size="256x16", n=8, seed=2**63 - 1, num_inference_steps=1000, guidance_scale=0, response_format="url"
    )
    request = admitted.request
    assert (request.width, request.height, request.n, request.seed) == (256, 16, 8, 2**63 - 1)
    assert (request.steps, request.guidance, admitted.response_format) == (1000, 0.0, "url")


def test_the_command_line_decides_defaults_before_the_model() -> None:
    config = EngineConfig(Path("h"), "m", default_steps=9, default_width=16, default_height=16)
    assert defaults_for(config, LIMITS) == Defaults(width=16, height=16, steps=9, guidance=3.5)
    assert defaults_for(EngineConfig(Path("h"), "m"), LIMITS).steps == 4


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": " \n"}, "prompt", "empty"),
    ({"prompt": "x" * 10_001}, "prompt", "10000"),
    ({"prompt": 7}, "prompt", "a string"),
    ({"prompt": ["a"]}, "prompt", "a string"),
    ({"prompt": "\ud800"}, "prompt", "surrogate"),
    ({"n": 0}, "n", "1 to 8"),
    ({"n": 9}, "n", "1 to 8"),
    ({"n": True}, "n", "integer"),
    ({"n": 1.0}, "n", "integer"),
    ({"n": "1"}, "n", "integer"),
    ({"size": "100x64"}, "size", "multiples of 16"),
    ({"size": "64x100"}, "size", "multiples of 16"),
    ({"size": "0x64"}, "size", "multiples of 16"),
    ({"size": "272x64"}, "size", "256"),
    ({"size": "64"}, "size", "WIDTHxHEIGHT"),
    ({"size": "64x64 "}, "size", "WIDTHxHEIGHT"),
    ({"size": "６４x64"}, "size", "WIDTHxHEIGHT"),
    ({"size": 64}, "size", "WIDTHxHEIGHT"),
    ({"num_inference_steps": 0}, "num_inference_steps", "1 to 1000"),
    ({"num_inference_steps": -1}, "num_inference_steps", "1 to 1000"),
    ({"num_inference_steps": 10_001}, "num_inference_steps", "1 to 1000"),
    ({"num_inference_steps": "20"}, "num_inference_steps", "integer"),
    ({"seed": -1}, "seed", "9223372036854775807"),
    ({"seed": 2**63}, "seed", "9223372036854775807"),
    ({"seed": 1.5}, "seed", "integer"),
    ({"guidance_scale": -0.1}, "guidance_scale", "0 to 100"),
    ({"guidance_scale": 101}, "guidance_scale", "0 to 100"),
    ({"guidance_scale": float("nan")}, "guidance_scale", "0 to 100"),
    ({"guidance_scale": 10**400}, "guidance_scale", "0 to 100"),
    ({"guidance_scale": True}, "guidance_scale", "number"),
    ({"response_format": "png"}, "response_format", "b64_json or url"),
    ({"response_format": ["url"]}, "response_format", "b64_json or url"),
    ({"model": 3}, "model", "a string"),
    ({"model": "other"}, "model", "'fake'"),
    ({"stream": True}, "stream", "answered once"),
    ({"quality": "hd"}, "quality", "num_inference_steps"),
    ({"style": "vivid"}, "style", "prompt"),
    ({"background": "transparent"}, "background", "transparency"),
    ({"output_format": "webp"}, "output_format", "PNG"),
    ({"output_compression": 50}, "output_compression", "lossless"),
    ({"partial_images": 2}, "partial_images", "answered once"),
    ({"negative_prompt": "dogs"}, "negative_prompt", "unknown field"),
    ({"num_steps": 3, "zz": 1}, "num_steps", "unknown field"),
]


@pytest.mark.parametrize(("fields", "param", "says"), REFUSED)
def test_wrong_fields_are_refused_by_name_with_the_limit(
    fields: dict[str, Any], param: str, says: str
) -> None:
    with pytest.raises(RequestRefused) as caught:
        check(**fields)
    assert caught.value.param == param
    assert param in caught.value.message
    assert says in caught.value.message
    assert len(caught.value.message) < 300
    assert caught.value.status == (404 if fields == {"model": "other"} else 400)


def test_a_prompt_of_exactly_the_limit_is_admitted() -> None:
    assert len(check(prompt="x" * 10_000).request.prompt) == 10_000


def test_a_missing_prompt_is_named() -> None:
    with pytest.raises(RequestRefused, match="prompt is missing") as caught:
        admit({}, request_id="r", model_name="m", limits=LIMITS, defaults=DEFAULTS, random_seed=lambda: 1)
    assert caught.value.code == "MissingField"


def test_official_fields_without_effect_are_accepted() -> None:
    official = {"user": "me", "moderation": "low", "quality": "auto", "background": "opaque", "stream": False}
    assert check(model="fake", output_format="png", **official).request == check().request


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b"\xff{}",
        b"[" * 100_000,
        b'{"n": ' + b"9" * 5000 + b"}",
        b"{'a': 1}",
    ],
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(RequestRefused) as caught:
        parse_body(body)
    assert caught.value.code == "InvalidJson"


def test_null_members_count_as_absent() -> None:
    assert parse_body(json.dumps({"prompt": "x", "seed": None}).encode()) == {"prompt": "x"}

"""Tiny pipelines, their entries and their reference results, made once a session."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from dlo_engine.protocol import GenerateRequest
from fakes.engine_model import Model
from fakes.reference import reference_pipeline
from fakes.tiny_flux import make_tiny_flux


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """One and two threads differ in the last bits: engine and reference use one."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Model]:
    """Make a model (`make_tiny_flux`'s options); the same options give the same one."""
    made: dict[tuple[tuple[str, Any], ...], Model] = {}

    def make(**options: Any) -> Model:
        key = tuple(sorted(options.items()))
        if key not in made:
            work = tmp_path_factory.mktemp("model")
            folder = make_tiny_flux(work / "pipeline", **options)
            made[key] = Model(folder, work, reference_pipeline(folder), {})
        return made[key]

    return make


@pytest.fixture(scope="session")
def float32(make_model: Callable[..., Model]) -> Model:
    """Two double and three single blocks in float32."""
    return make_model(dtype="float32", double_blocks=2, single_blocks=3)


@pytest.fixture(scope="session")
def bfloat16(make_model: Callable[..., Model]) -> Model:
    """The same in bfloat16, in shards, with guidance."""
    return make_model(
        dtype="bfloat16",
        double_blocks=2,
        single_blocks=3,
        max_shard_bytes=300_000,
        guidance_embeds=True,
    )


@pytest.fixture(scope="session")
def request_of() -> Callable[..., GenerateRequest]:
    """A small request; options replace its fields."""

    def make(**options: Any) -> GenerateRequest:
        fixed: dict[str, Any] = {
            "id": "r1",
            "prompt": "a red cat",
            "n": 1,
            "width": 32,
            "height": 48,
            "steps": 3,
            "guidance": None,
            "seed": 5,
        }
        return GenerateRequest(**{**fixed, **options})

    return make

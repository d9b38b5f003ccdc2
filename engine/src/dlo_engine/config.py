"""The engine's configuration: one frozen value and the combinations refused up front.

Must not read the environment, open files or import torch. The command-line flags are in `flags.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dlo_engine.errors import InvalidConfiguration

MAX_STEPS = 1000
MAX_GUIDANCE = 100
MIN_SLOTS, MAX_SLOTS = 2, 4

Backing = Literal[
    "RegisteredCache", "StagedCache", "MappedCache", "MappedCheckpoint", "PrivateLoad", "Resident"
]


@dataclass(frozen=True)
class EngineConfig:
    """Everything a rank and the front need to know. Bytes, pixels and seconds are plain numbers."""

    handover: Path
    model_name: str
    device: Literal["cpu", "cuda"] = "cuda"
    tensor: int = 1
    data: int = 1
    ulysses: int = 1
    mode: Literal["None", "DistributedLayerwise"] = "DistributedLayerwise"
    transfer: Literal["RankLocal", "AllGather"] = "RankLocal"
    resident_layers: int | Literal["Auto"] = 0
    device_memory_budget: int | None = None
    slots: int = 2
    registration: Literal["Auto", "Required", "Off"] = "Auto"
    registration_limit: int | None = None
    cache_policy: Literal["Required", "Opportunistic", "Disabled"] = "Required"
    verify: Literal["Always", "OnPublish"] = "Always"
    on_fallback: Literal["Fail", "Continue"] = "Fail"
    components: tuple[str, ...] = ("transformer",)
    host: str = "127.0.0.1"
    port: int = 8000
    max_queued_requests: int = 64
    drain_timeout_seconds: float = 600.0
    default_width: int | None = None
    default_height: int | None = None
    default_steps: int | None = None
    default_guidance: float | None = None
    max_sequence_length: int | None = None
    threads: int | None = None
    termination_message_path: Path | None = None

    @property
    def world(self) -> int:
        """Number of rank processes. Global rank = data_index * tensor + tensor_rank."""
        return self.tensor * self.data * self.ulysses

    def tensor_rank(self, rank: int) -> int:
        """Tensor-parallel rank of a global rank."""
        return rank % self.tensor

    def data_index(self, rank: int) -> int:
        """Data replica a global rank belongs to."""
        return rank // (self.tensor * self.ulysses)

    def __post_init__(self) -> None:
        """Refuse what can never work, saying what to change. Raises InvalidConfiguration."""
        for refused, what, todo in (*_topology_rules(self), *_offload_rules(self), *_serving_rules(self)):
            if refused:
                raise InvalidConfiguration(what, hint=todo)


Rule = tuple[bool, str, str]
"""Whether it is violated, what is wrong, what to do."""


def _topology_rules(config: EngineConfig) -> Iterator[Rule]:
    for name in ("tensor", "data", "ulysses"):
        degree = getattr(config, name)
        yield degree < 1, f"--{name} is {degree}", "use a degree of at least 1"
    yield config.ulysses > 1, f"--ulysses is {config.ulysses}", "Ulysses is not built yet: use 1"
    group = config.data * config.ulysses
    yield (
        config.transfer == "AllGather" and group == 1,
        "--transfer AllGather has no group to gather over",
        "use --data 2 or more, or --transfer RankLocal",
    )


def _offload_rules(config: EngineConfig) -> Iterator[Rule]:
    layers, budget = config.resident_layers, config.device_memory_budget
    resident, required = config.mode == "None", config.registration == "Required"
    slots_ok = MIN_SLOTS <= config.slots <= MAX_SLOTS
    yield not slots_ok, f"--slots is {config.slots}", f"use {MIN_SLOTS} to {MAX_SLOTS}"
    yield (
        resident and config.transfer == "AllGather",
        "--mode None transfers nothing",
        "leave out --transfer AllGather, or use --mode DistributedLayerwise",
    )
    yield resident and layers != 0, "--mode None keeps every layer", "leave out --resident-layers"
    yield resident and required, "--mode None registers nothing", "use --registration Auto or Off"
    yield (
        required and config.device == "cpu",
        "--registration Required needs a CUDA device",
        "use --registration Auto",
    )
    yield (
        required and config.cache_policy == "Disabled",
        "--registration Required needs the cache",
        "use --cache-policy Required, or --registration Auto",
    )
    limit = config.registration_limit
    yield limit is not None and limit < 1, "--registration-limit is 0", "use a number of bytes"
    yield (
        layers == "Auto" and budget is None,
        "--resident-layers Auto has no budget",
        "add --device-memory-budget",
    )
    yield (
        isinstance(layers, int) and layers < 0,
        f"--resident-layers is {layers}",
        "use 0 or more, or Auto",
    )
    yield budget is not None and budget < 1, "--device-memory-budget is 0", "use bytes, such as 20Gi"
    once = len(set(config.components)) == len(config.components) > 0
    yield not once, "--component is empty or named twice", "name each streamed component once"


def _serving_rules(config: EngineConfig) -> Iterator[Rule]:
    yield not config.model_name, "--model-name is empty", "give the name that requests use"
    yield not 0 <= config.port <= 65535, f"--port is {config.port}", "use 0 (any free port) to 65535"
    queued, drain = config.max_queued_requests, config.drain_timeout_seconds
    yield queued < 1, f"--max-queued-requests is {queued}", "use 1 or more"
    yield not 0 <= drain < float("inf"), f"--drain-timeout-seconds is {drain}", "use 0 or more seconds"
    yield (
        (config.default_width is None) != (config.default_height is None),
        "a default size needs width and height",
        "use --default-size WxH",
    )
    for name in ("default_width", "default_height", "max_sequence_length", "threads"):
        value = getattr(config, name)
        flag = "--" + name.replace("_", "-")
        yield value is not None and value < 1, f"{flag} is {value}", "use 1 or more"
    steps, guidance = config.default_steps, config.default_guidance
    yield (
        steps is not None and not 1 <= steps <= MAX_STEPS,
        f"--default-steps is {steps}",
        f"use 1 to {MAX_STEPS}",
    )
    yield (
        guidance is not None and not 0 <= guidance <= MAX_GUIDANCE,
        f"--default-guidance is {guidance}",
        f"use 0 to {MAX_GUIDANCE}",
    )


def is_fallback(config: EngineConfig, backing: Backing) -> bool:
    """Whether this backing is less than what was asked for (api.md, "What is a fallback")."""
    if config.mode == "None":
        return backing != "Resident"
    if config.cache_policy == "Disabled":
        return False
    if config.registration == "Required":
        return backing != "RegisteredCache"
    return backing in ("MappedCheckpoint", "PrivateLoad")

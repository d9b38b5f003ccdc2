"""Flags, illegal combinations, and what a manifest's extra arguments may set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dlo_engine.config import Backing, EngineConfig, is_fallback
from dlo_engine.errors import InvalidConfiguration
from dlo_engine.flags import EXTRA_FLAGS, add_flags, check_extra_args, config_from, make_parser


def config(**fields: Any) -> EngineConfig:
    """A valid CPU configuration with these fields changed."""
    return EngineConfig(**{"handover": Path("h"), "model_name": "m", "device": "cpu", **fields})


def parse(*arguments: str, extra: tuple[str, ...] = ()) -> EngineConfig:
    """The configuration of a command line."""
    parser = make_parser("serve", "test")
    add_flags(parser)
    required = ["--handover", "h", "--model-name", "m"]
    return config_from(vars(parser.parse_args([*required, *arguments])), extra)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tensor": 0}, "--tensor is 0"),
    ({"data": -1}, "--data is -1"),
    ({"ulysses": 2}, "--ulysses is 2"),
    ({"transfer": "AllGather"}, "no group to gather over"),
    ({"slots": 1}, "--slots is 1"),
    ({"slots": 5}, "--slots is 5"),
    ({"mode": "None", "transfer": "AllGather", "data": 2}, "transfers nothing"),
    ({"mode": "None", "resident_layers": 3}, "keeps every layer"),
    ({"mode": "None", "registration": "Required", "device": "cuda"}, "registers nothing"),
    ({"registration": "Required"}, "needs a CUDA device"),
    ({"registration": "Required", "device": "cuda", "cache_policy": "Disabled"}, "needs the cache"),
    ({"registration_limit": 0}, "--registration-limit"),
    ({"resident_layers": "Auto"}, "no budget"),
    ({"resident_layers": -1}, "--resident-layers is -1"),
    ({"device_memory_budget": 0}, "--device-memory-budget"),
    ({"components": ()}, "--component"),
    ({"components": ("a", "a")}, "--component"),
    ({"model_name": ""}, "--model-name"),
    ({"port": 65536}, "--port is 65536"),
    ({"max_queued_requests": 0}, "--max-queued-requests is 0"),
    ({"drain_timeout_seconds": float("nan")}, "--drain-timeout-seconds"),
    ({"default_width": 16}, "width and height"),
    ({"default_steps": 1001}, "--default-steps is 1001"),
    ({"default_guidance": 101.0}, "--default-guidance"),
    ({"max_sequence_length": 0}, "--max-sequence-length is 0"),
    ({"threads": 0}, "--threads is 0"),
]


@pytest.mark.parametrize(("fields", "says"), REFUSED)
def test_what_can_never_work_is_refused_with_what_to_do(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidConfiguration) as caught:
        config(**fields)
    assert says in caught.value.message
    assert caught.value.hint
    assert caught.value.exit_status == 2


def test_flags_become_fields_and_absent_flags_keep_defaults() -> None:
    found = parse(
        *("--device", "cpu", "--tensor", "2", "--data", "2", "--transfer", "AllGather"),
        *(
            "--resident-layers",
            "Auto",
            "--device-memory-budget",
            "2Gi",
            "--component",
            "a",
            "--component",
            "b",
        ),
        *("--default-size", "64x32", "--port", "0", "--termination-message-path", "t"),
    )
    assert found == config(
        tensor=2,
        data=2,
        transfer="AllGather",
        resident_layers="Auto",
        device_memory_budget=2 * 2**30,
        components=("a", "b"),
        default_width=64,
        default_height=32,
        port=0,
        termination_message_path=Path("t"),
    )
    assert parse() == EngineConfig(Path("h"), "m")


def test_extra_arguments_win_over_flags() -> None:
    found = parse("--slots", "2", extra=("--slots=3", "--default-size", "32x16", "--threads", "4"))
    assert (found.slots, found.default_width, found.default_height, found.threads) == (3, 32, 16, 4)


@pytest.mark.parametrize(
    "arguments",
    [["--port", "1"], ["--host=0.0.0.0"], ["--slot", "3"], ["stray"], ["--slots", "x"], ["--slots"], ["-h"]],
)
def test_other_extra_arguments_are_refused_by_name(arguments: list[str]) -> None:
    with pytest.raises(InvalidConfiguration) as caught:
        check_extra_args(arguments)
    assert caught.value.code == "ExtraArgRefused"
    assert arguments[0].split("=")[0] in caught.value.message
    assert all(flag in caught.value.hint for flag in EXTRA_FLAGS)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--resident-layers", "some"],
        ["--device-memory-budget", "2 Gi"],
        ["--device-memory-budget", "2Zi"],
        ["--default-size", "64"],
        ["--default-size", "0x64"],
        ["--device", "tpu"],
        ["--no-such-flag"],
        ["--tens", "2"],
    ],
)
def test_malformed_flags_raise_and_never_exit(arguments: list[str]) -> None:
    with pytest.raises(InvalidConfiguration):
        parse(*arguments)


def test_global_ranks_are_data_index_times_tensor_plus_tensor_rank() -> None:
    both = config(tensor=2, data=3)
    assert both.world == 6
    assert [(both.data_index(rank), both.tensor_rank(rank)) for rank in range(6)] == [
        *((0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1))
    ]


CACHED: tuple[Backing, ...] = ("RegisteredCache", "StagedCache", "MappedCache")
POORER: tuple[Backing, ...] = ("MappedCheckpoint", "PrivateLoad")


@pytest.mark.parametrize(
    ("fields", "as_asked"),
    [
        ({"registration": "Auto"}, CACHED),
        ({"registration": "Off"}, CACHED),
        ({"registration": "Required", "device": "cuda"}, ("RegisteredCache",)),
        ({"cache_policy": "Disabled"}, (*CACHED, *POORER)),
        ({"mode": "None"}, ("Resident",)),
    ],
)
def test_what_counts_as_a_fallback(fields: dict[str, Any], as_asked: tuple[Backing, ...]) -> None:
    asked = config(**fields)
    kinds: tuple[Backing, ...] = (*CACHED, *POORER)
    if asked.mode == "None":
        kinds = (*kinds, "Resident")
    assert {kind for kind in kinds if not is_fallback(asked, kind)} == set(as_asked)

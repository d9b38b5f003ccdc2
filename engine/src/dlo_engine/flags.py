"""The command-line flags of `python -m dlo_engine serve`, and the few that a manifest may set.

Flags behind a lone `--` are what the manifest's `engine.extraArgs` said: only those of `EXTRA_FLAGS` are
accepted there (`check_extra_args`), and they win over the flags before the `--`. Must not read files or the
environment.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from dlo_engine.config import EngineConfig
from dlo_engine.errors import InvalidConfiguration

EXTRA_FLAGS: tuple[str, ...] = (
    "--default-size",
    "--default-steps",
    "--default-guidance",
    "--max-sequence-length",
    "--slots",
    "--threads",
)
"""The only flags a manifest's `engine.extraArgs` may set."""


def check_extra_args(args: Sequence[str]) -> dict[str, Any]:
    """The EngineConfig fields that a manifest's `engine.extraArgs` set.

    Raises InvalidConfiguration (code ExtraArgRefused) naming the first argument outside `EXTRA_FLAGS`.
    """
    for arg in args:
        flag = arg.split("=", 1)[0]
        if flag.startswith("--") and flag not in EXTRA_FLAGS:
            raise InvalidConfiguration(
                f"extra argument {flag} is not allowed",
                hint="allowed are " + ", ".join(EXTRA_FLAGS),
                code="ExtraArgRefused",
            )
    parser = _Parser(prog="extraArgs", add_help=False, allow_abbrev=False)
    _add_extra_flags(parser)
    try:
        values = vars(parser.parse_args(list(args)))
    except InvalidConfiguration as error:
        raise InvalidConfiguration(
            f"extra arguments are wrong: {error.message}",
            hint="allowed are " + ", ".join(EXTRA_FLAGS),
            code="ExtraArgRefused",
        ) from error
    return _fields(values)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Every flag of `serve` that becomes a field of EngineConfig."""
    model = parser.add_argument_group("model")
    model.add_argument(
        "--handover",
        type=Path,
        required=True,
        metavar="FILE",
        help="hand-over file that names this engine's cache entries",
    )
    model.add_argument(
        "--model-name", required=True, metavar="NAME", help="name that requests use for the model"
    )
    model.add_argument(
        "--component",
        action="append",
        dest="components",
        metavar="NAME",
        help="a streamed component; may be repeated (default: transformer)",
    )
    topology = parser.add_argument_group("topology")
    topology.add_argument("--device", choices=("cpu", "cuda"), help="where the ranks compute (default: cuda)")
    topology.add_argument("--tensor", type=int, metavar="N", help="tensor-parallel degree (default: 1)")
    topology.add_argument("--data", type=int, metavar="N", help="data replicas in this engine (default: 1)")
    topology.add_argument("--ulysses", type=int, metavar="N", help="sequence-parallel degree (default: 1)")
    offload = parser.add_argument_group("offload")
    offload.add_argument(
        "--mode",
        choices=("None", "DistributedLayerwise"),
        help="stream the blocks, or keep all on the device (default: DistributedLayerwise)",
    )
    offload.add_argument(
        "--transfer",
        choices=("RankLocal", "AllGather"),
        help="every rank copies whole blocks, or byte ranges that are gathered (default: RankLocal)",
    )
    offload.add_argument(
        "--resident-layers",
        type=_count_or_auto,
        metavar="N|Auto",
        help="blocks kept on the device; Auto fills the budget (default: 0)",
    )
    offload.add_argument(
        "--device-memory-budget",
        type=_bytes,
        metavar="BYTES",
        help="device memory for resident blocks and slots, such as 20Gi",
    )
    offload.add_argument(
        "--registration",
        choices=("Auto", "Required", "Off"),
        help="register the mapped entries with CUDA (default: Auto)",
    )
    offload.add_argument(
        "--registration-limit",
        type=_bytes,
        metavar="BYTES",
        help="most distinct entry bytes this engine registers, such as 64Gi",
    )
    cache = parser.add_argument_group("cache")
    cache.add_argument(
        "--cache-policy",
        choices=("Required", "Opportunistic", "Disabled"),
        help="what the manifest's cache.policy says (default: Required)",
    )
    cache.add_argument(
        "--verify",
        choices=("Always", "OnPublish"),
        help="check every byte of the entries at start (default: Always)",
    )
    cache.add_argument(
        "--on-fallback",
        choices=("Fail", "Continue"),
        help="what to do when the weights get less than was asked for (default: Fail)",
    )
    serving = parser.add_argument_group("serving")
    serving.add_argument("--host", metavar="ADDRESS", help="address to serve on (default: 127.0.0.1)")
    serving.add_argument("--port", type=int, metavar="N", help="port; 0 takes a free one (default: 8000)")
    serving.add_argument(
        "--max-queued-requests",
        type=int,
        metavar="N",
        help="requests that may wait; one more is answered 429 (default: 64)",
    )
    serving.add_argument(
        "--drain-timeout-seconds",
        type=float,
        metavar="S",
        help="longest wait for admitted requests at shutdown (default: 600)",
    )
    serving.add_argument(
        "--termination-message-path",
        type=Path,
        metavar="FILE",
        help="file that gets the code and message of a failure",
    )
    _add_extra_flags(parser.add_argument_group("also allowed behind -- (the manifest's engine.extraArgs)"))


def config_from(values: dict[str, Any], extra_args: Sequence[str] = ()) -> EngineConfig:
    """EngineConfig from parsed flags and the arguments behind `--`. Raises InvalidConfiguration."""
    return EngineConfig(**{**_fields(values), **check_extra_args(extra_args)})


class _Parser(argparse.ArgumentParser):
    """A parser that raises instead of printing usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise InvalidConfiguration(message, hint=f"see {self.prog} --help")


def make_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """A parser whose mistakes raise InvalidConfiguration; flags cannot be abbreviated."""
    return _Parser(prog=prog, description=description, allow_abbrev=False)


def _add_extra_flags(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--default-size", type=_size, metavar="WxH", help="size of a request that names none")
    parser.add_argument("--default-steps", type=int, metavar="N", help="steps of a request that names none")
    parser.add_argument(
        "--default-guidance", type=float, metavar="F", help="guidance scale of a request that names none"
    )
    parser.add_argument("--max-sequence-length", type=int, metavar="N", help="longest prompt in tokens")
    parser.add_argument("--slots", type=int, metavar="N", help="device slots, 2 to 4 (default: 2)")
    parser.add_argument(
        "--threads", type=int, metavar="N", help="CPU threads of each rank (default: cores / ranks on cpu)"
    )


def _fields(values: dict[str, Any]) -> dict[str, Any]:
    """Only the values that were given, under their field names."""
    fields = {key: value for key, value in values.items() if value is not None}
    size = fields.pop("default_size", None)
    if size is not None:
        fields["default_width"], fields["default_height"] = size
    if "components" in fields:
        fields["components"] = tuple(fields["components"])
    known = {field.name for field in dataclasses.fields(EngineConfig)}
    return {key: value for key, value in fields.items() if key in known}


def _size(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not WIDTHxHEIGHT, such as 1024x1024")
    return int(match[1]), int(match[2])


def _count_or_auto(text: str) -> int | str:
    if text == "Auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor Auto") from None


_UNITS = {
    "": 1,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
}


def _bytes(text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,18})([A-Za-z]{0,2})", text)
    if match is None or match[2] not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes, such as 1073741824 or 20Gi")
    return int(match[1]) * _UNITS[match[2]]

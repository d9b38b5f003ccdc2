"""Options that can be refused before any work, with the words that the engine would use for the same request."""

import errno
import re
import socket
from collections.abc import Sequence
from pathlib import Path

from dlo_cli.errors import CliError, UsageError

MAX_PROMPT = 10_000
MAX_STEPS = 1_000
MAX_SEED = 2**63 - 1
MAX_PORT = 65_535


def check_prompts(prompts: Sequence[str]) -> None:
    """Every prompt has words, and not too many."""
    for prompt in prompts:
        if not prompt.strip():
            raise UsageError("--prompt is empty", hint="say what to draw")
        if len(prompt) > MAX_PROMPT:
            raise UsageError(f"--prompt has {len(prompt)} characters", hint=f"use at most {MAX_PROMPT}")


def check_numbers(*, seed: int, steps: int | None, port: int | None) -> None:
    """Seed, steps and port are in range."""
    if not 0 <= seed <= MAX_SEED:
        raise UsageError(f"--seed is {seed}", hint=f"use 0 to {MAX_SEED}")
    if steps is not None and not 1 <= steps <= MAX_STEPS:
        raise UsageError(f"--steps is {steps}", hint=f"use 1 to {MAX_STEPS}")
    if port is not None and not 0 <= port <= MAX_PORT:
        raise UsageError(f"--port is {port}", hint=f"use 1 to {MAX_PORT}, or 0 for any free port")


def check_size(size: str | None) -> None:
    """The size reads WIDTHxHEIGHT; which sizes a model accepts, the engine knows."""
    if size is not None and not re.fullmatch(r"[1-9][0-9]{0,4}x[1-9][0-9]{0,4}", size):
        raise UsageError(f"--size is {size!r}", hint="write WIDTHxHEIGHT in pixels, such as 1024x1024")


def named_path(text: str) -> Path:
    """A path from the command line. An empty one, such as an unset variable leaves, would mean this folder."""
    if not text:
        raise UsageError("a file or folder is named by nothing", hint="is a variable in the command empty?")
    return Path(text)


def check_address(host: str, port: int) -> None:
    """An engine could listen there now: said before anything is built, for builds can be long."""
    try:
        found = (
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE) if host else []
        )
    except (OSError, UnicodeError):
        found = []
    if not found:
        raise UsageError(f"--host is {host!r}, which is no address", hint="use 127.0.0.1 or 0.0.0.0")
    family, kind, proto, _, address = found[0]
    try:
        with socket.socket(family, kind, proto) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(1)
    except OSError as error:
        what = f"cannot listen on {host} port {port}: {error.strerror}"
        if error.errno == errno.EADDRINUSE:
            raise CliError(
                what, hint="choose another --port, or 0 for any free one", code="PortInUse"
            ) from error
        hint = "choose a --port above 1023 and a --host of this machine"
        raise UsageError(what, hint=hint, code="PortDenied") from error

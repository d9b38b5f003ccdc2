"""Options that can be refused before any work, with the words that the engine would use for the same request."""

import re
from collections.abc import Sequence

from dlo_cli.errors import UsageError

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

"""Pictures from a running engine: the same HTTP call that any client makes, and one PNG file a prompt."""

import base64
import os
import re
from pathlib import Path

import urllib3

from dlo_cli.errors import CliError, UsageError

TIMEOUT = urllib3.Timeout(connect=10.0, read=None)


def picture_path(folder: Path, index: int, prompt: str) -> Path:
    """``out/01-a-handwritten-seven.png``: the prompt's place and its first words."""
    slug = "-".join(re.findall(r"[a-z0-9]+", prompt.lower()))[:48].strip("-")
    return folder / f"{index + 1:02d}-{slug or 'picture'}.png"


def writable_folder(folder: Path) -> Path:
    """Make the output folder, before any long work."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"--out {folder}: cannot be made: {error.strerror}",
            hint="name a folder that you can write",
            code="OutDenied",
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(
            f"--out {folder}: not writable", hint="name a folder that you can write", code="OutDenied"
        )
    return folder


def request_body(prompt: str, *, seed: int, steps: int | None, size: str | None) -> dict[str, object]:
    """The OpenAI images request; what is None is left to the engine's defaults."""
    body: dict[str, object] = {"prompt": prompt, "n": 1, "seed": seed, "response_format": "b64_json"}
    if steps is not None:
        body["num_inference_steps"] = steps
    if size is not None:
        body["size"] = size
    return body


def draw(http: urllib3.PoolManager, url: str, body: dict[str, object]) -> bytes:
    """One picture as PNG bytes. A refused request is the user's to mend; anything else is the engine's failure."""
    try:
        response = http.request(
            "POST", f"{url}/v1/images/generations", json=body, timeout=TIMEOUT, retries=False
        )
    except urllib3.exceptions.HTTPError as error:
        raise CliError(
            "the engine went away while it drew", hint="run it again with --verbose", code="EngineGone"
        ) from error
    try:
        answer = response.json()
    except ValueError:
        answer = {}
    if response.status != 200:
        said = answer.get("error", {}) if isinstance(answer, dict) else {}
        message = str(said.get("message", f"the engine answered {response.status}"))
        if response.status == 400:
            raise UsageError(message, code=str(said.get("code") or "BadRequest"))
        raise CliError(message, code=str(said.get("code") or "EngineFailed"))
    return base64.b64decode(answer["data"][0]["b64_json"])


def save(path: Path, content: bytes) -> None:
    """Write one picture; it appears whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise CliError(
            f"{path}: cannot be written: {error.strerror}",
            hint="free space, or choose another --out",
            code="OutDenied",
        ) from error

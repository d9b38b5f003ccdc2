"""What this machine has for an engine: memory, GPUs, the engine's own packages. Reads, and starts only nvidia-smi."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from shutil import which

NVIDIA_SMI_SECONDS = 20.0
ENGINE_PACKAGES = ("torch", "diffusers", "transformers", "fastapi", "uvicorn")
_MEMINFO = Path("/proc/meminfo")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU; sizes in bytes."""

    name: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class Memory:
    """Host memory in bytes; None where it cannot be told.

    Attributes:
        total: of the machine, or of this process's control group where that allows less.
        available: what can be had without swapping.
    """

    total: int | None
    available: int | None


def memory() -> Memory:
    """The memory that processes started here may use."""
    try:
        fields = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines() if ":" in line)
        total, available = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError, IndexError):
        return Memory(None, None)
    try:
        limit = int(_CGROUP_LIMIT.read_text())
    except (OSError, ValueError):  # no such group, or `max`
        return Memory(total, available)
    return Memory(min(total, limit), min(available, limit))


def gpus() -> tuple[Gpu, ...] | str:
    """The GPUs that the driver shows, or why it shows none."""
    tool = which("nvidia-smi")
    if tool is None:
        return "no NVIDIA driver is installed (nvidia-smi is not there)"
    query = [tool, "--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(  # noqa: S603 - the tool was found on PATH, its words are fixed
            query, capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi gives no answer: {type(error).__name__}"
    if done.returncode != 0:
        said = " ".join((done.stdout or done.stderr).split())
        return f"nvidia-smi fails: {said[:200]}"
    return tuple(gpu for line in done.stdout.splitlines() if (gpu := _gpu(line)) is not None)


def _gpu(line: str) -> Gpu | None:
    try:
        name, total, free = (part.strip() for part in line.rsplit(",", 2))
        return Gpu(name, int(total) * 2**20, int(free) * 2**20)
    except ValueError:
        return None


def lacking_packages() -> tuple[str, ...]:
    """Packages of the engine that are not installed here; none is imported."""
    return tuple(name for name in ENGINE_PACKAGES if find_spec(name) is None)

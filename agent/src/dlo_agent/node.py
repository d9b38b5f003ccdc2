"""What the node says about itself: boot, memory, limits, the kind of file system. A number that cannot be read
is None.
"""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Final

from dlo_agent.world import NodeFacts

_PROC: Final = Path("/proc")


def node_facts(root: Path, gid: int | None, proc: Path = _PROC) -> NodeFacts:
    """The facts of this node, with the root's path and group as engines are told them."""
    memory = _memory(proc)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    # No limit means that memory is the limit; where that is not known either, nothing is said.
    lock = memory if soft == resource.RLIM_INFINITY else soft
    return NodeFacts(
        agent_version=version("dlo-operator"),
        boot_id=_line(proc / "sys/kernel/random/boot_id"),
        root_path=str(root),
        gid=gid,
        memory_bytes=memory,
        lock_limit_bytes=lock,
        max_map_count=_number(proc / "sys/vm/max_map_count"),
    )


def filesystem_of(path: Path, proc: Path = _PROC) -> str | None:
    """The kind of file system that ``path`` is on."""
    with suppress(OSError):
        device = path.stat().st_dev
        wanted = f"{os.major(device)}:{os.minor(device)}"
        found = None
        for line in (proc / "self/mountinfo").read_text("utf-8").splitlines():
            before, _, after = line.partition(" - ")
            fields = before.split()
            if len(fields) > 2 and fields[2] == wanted and after:
                found = after.split()[0]
        return found
    return None


def _memory(proc: Path) -> int | None:
    with suppress(OSError, ValueError, IndexError):
        for line in (proc / "meminfo").read_text("utf-8").splitlines():
            if line.startswith("MemTotal:"):
                return int(line.split()[1]) * 1024
    return None


def _number(path: Path) -> int | None:
    line = _line(path)
    return int(line) if line is not None and line.isdigit() else None


def _line(path: Path) -> str | None:
    with suppress(OSError):
        return path.read_text("utf-8").strip() or None
    return None

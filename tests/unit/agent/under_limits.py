"""One process of a test of memory limits: an agent that warms and builds, or an engine that pins.

``python -P under_limits.py agent ROOT KEY SOURCE`` and ``python -P under_limits.py engine ROOT KEY``; each does one
step a line on standard input, and answers with a line.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from pathlib import Path


def agent(root_path: Path, key: str, source: Path) -> None:
    """``warm`` brings the entry in, ``build`` copies the source as another entry; both with the agent's code."""
    from dlo_agent.warm import warm_entry
    from dlo_cache.files_entry import build_files_entry
    from dlo_cache.root import open_root
    from dlo_sources.digests import DigestCache, hash_files
    from dlo_sources.files import look_at

    root = open_root(root_path)
    for step in sys.stdin:
        if step.strip() == "warm":
            say(f"warmed {warm_entry(root, key).resident}")
        else:
            files = hash_files([look_at("weights.bin", source)], DigestCache(None))
            say(f"built {build_files_entry(root, files, select='All', producer={}).bytes}")


def engine(root_path: Path, key: str) -> None:
    """``pin`` maps the entry read-only and shared, and locks its pages, as registering it with a GPU does."""
    libc = ctypes.CDLL(None, use_errno=True)
    held = []
    for step in sys.stdin:
        if step.strip() == "pin":
            file = next((root_path / "v1/entries" / key).glob("*.bin"))
            fd = os.open(file, os.O_RDONLY)
            window = mmap.mmap(fd, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
            held.append(window)
            address = ctypes.c_void_p(_address(window))
            if libc.mlock(address, ctypes.c_size_t(len(window))) != 0:
                say(f"refused {os.strerror(ctypes.get_errno())}")
            else:
                say(f"pinned {len(window)}")


def _address(window: mmap.mmap) -> int:
    import numpy as np

    return int(np.frombuffer(window, np.uint8).ctypes.data)


def say(line: str) -> None:
    """To whoever drives the test."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    role, root, key, *more = sys.argv[1:]
    say("here")
    if role == "agent":
        agent(Path(root), key, Path(more[0]))
    else:
        engine(Path(root), key)

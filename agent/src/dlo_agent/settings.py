"""The agent's settings: parsed once, by ``__main__``, from flags whose defaults the environment may give.

Nothing else reads the environment. Frozen; a value that cannot be right is refused here with its name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dlo_agent.errors import UsageError

_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SIZE: Final = re.compile(r"([0-9]+)(Ki|Mi|Gi|Ti|K|M|G|T)?")
_UNITS: Final = {
    None: 1,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
}


@dataclass(frozen=True)
class Settings:
    """Everything that ``dlo-agent run`` is told.

    ``host_root`` is the root's path on the host, as engine pods mount it; ``gid`` the group that may read it.
    Zero for ``warm_budget_bytes`` warms nothing; ``headroom_bytes`` is kept free at least.
    """

    node: str
    root: Path
    namespace: str
    source_roots: Mapping[str, Path] = field(default_factory=dict)
    host_root: Path | None = None
    gid: int | None = None
    warm_budget_bytes: int = 0
    headroom_bytes: int = 0
    port: int = 8080
    kubeconfig: Path | None = None
    scrub_seconds: float = 7 * 86_400.0
    verify_threads: int = 2
    lock_timeout_seconds: float = 30.0

    def __post_init__(self) -> None:
        if not self.node:
            raise UsageError("the node's name is empty", hint="give --node, or set DLO_NODE_NAME")
        if not self.root.is_absolute():
            raise UsageError(f"--root {self.root} is not an absolute path")
        if self.verify_threads < 1:
            raise UsageError("--verify-threads is at least 1")


def parse_source_roots(pairs: Sequence[str]) -> dict[str, Path]:
    """``NAME=DIR`` words as a mapping; raises UsageError for one of another form or a name given twice."""
    roots: dict[str, Path] = {}
    for pair in pairs:
        name, separator, folder = pair.partition("=")
        if not separator or not _NAME.fullmatch(name) or not Path(folder).is_absolute():
            raise UsageError(
                f"--source-root {pair}: not of the form NAME=DIR",
                hint="a name of lower-case letters, digits and dashes, and an absolute path",
            )
        if name in roots:
            raise UsageError(f"--source-root {pair}: the name {name} is given twice")
        roots[name] = Path(folder)
    return roots


def parse_size(text: str) -> int:
    """Bytes of a size like ``20Gi``; raises UsageError."""
    found = _SIZE.fullmatch(text)
    if found is None:
        raise UsageError(f"{text!r} is no size", hint="write it like 20Gi or 500M, or in bytes")
    return int(found[1]) * _UNITS[found[2]]

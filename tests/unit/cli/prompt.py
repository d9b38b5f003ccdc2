"""What a command printed, and a look at the files around it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Said:
    """What a command printed and returned."""

    status: int
    out: str
    err: str


Dlo = Callable[..., Said]


def files_below(folder: Path) -> list[str]:
    """Every file below a folder, by relative path."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())

"""Which host weight cache a command uses: the one that was named, or the user's own."""

import os
from pathlib import Path

from dlo_cache.root import Root, default_root, init_root, open_root


def user_root() -> Path:
    """``$XDG_CACHE_HOME/dlo``, or ``~/.cache/dlo``."""
    return default_root(os.environ.get("XDG_CACHE_HOME"), str(Path.home()))


def cache_root(named: Path | None) -> Root:
    """Open the named root, which must have been initialised, or the user's own, which is made on first use."""
    return open_root(named) if named is not None else init_root(user_root())

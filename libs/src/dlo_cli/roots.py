"""Which host weight cache a command uses: the one that was named, or the user's own."""

import os
import pwd
from pathlib import Path

from dlo_cache.root import Root, default_root, init_root, open_root

from dlo_cli.errors import CliError


def user_root() -> Path:
    """``$XDG_CACHE_HOME/dlo``, or ``~/.cache/dlo``. A folder that is not absolute counts as none."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return default_root(cache or None, "" if cache.startswith("/") else home_folder())


def home_folder() -> str:
    """``$HOME``, or the home of this user in the system's list. Raises CliError where there is neither."""
    home = os.environ.get("HOME", "")
    try:
        home = home if home.startswith("/") else pwd.getpwuid(os.getuid()).pw_dir
    except KeyError as error:
        raise CliError(
            f"user {os.getuid()} has no home folder for the cache",
            hint="set HOME or XDG_CACHE_HOME, or make a root with `dlo cache init` and name it with --cache-root",
            code="NoHome",
        ) from error
    return home


def cache_root(named: Path | None) -> Root:
    """Open the named root, which must have been initialised, or the user's own, which is made on first use."""
    return open_root(named) if named is not None else init_root(user_root())

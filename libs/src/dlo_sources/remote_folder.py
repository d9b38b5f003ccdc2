"""The folder of a pipeline in a store: the names that the store listed, and nothing that was not listed.

Names come from strangers here too, so each is judged before it is asked for; the bytes go through the fetcher.
"""

from __future__ import annotations

from typing import Any, Final

from dlo_sources.errors import SourceIncomplete
from dlo_sources.fetch import Fetcher, RemoteFile
from dlo_sources.folder import check_name, json_of

_FETCH: Final = "push the checkpoint again, whole"


class RemoteFolder:
    """See ``dlo_sources.folder.CheckpointFolder``."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._files, self._store = fetcher.files, fetcher.store

    @property
    def name(self) -> str:
        """The repository, or bucket and prefix."""
        return self._store.name

    @property
    def place(self) -> str:
        """The same."""
        return self._store.name

    def file(self, name: str) -> RemoteFile:
        """The file ``name``; raises SourceIncomplete if the store does not list it, SourceUntrusted."""
        found = self._files.get(check_name(name))
        if found is None:
            raise SourceIncomplete(f"{self.place}: {name} is missing", hint=_FETCH, file=name)
        return found

    def has(self, name: str) -> bool:
        """Whether there is a file of that name, or one below it."""
        below = check_name(name) + "/"
        return name in self._files or any(each.startswith(below) for each in self._files)

    def json(self, name: str) -> dict[str, Any]:
        """The JSON object in the file ``name``; raises SourceInvalid if it is none."""
        return json_of(self.file(name))

    def names(self, folder: str) -> list[str]:
        """All names below ``folder``, sorted; what starts with a dot is left out. Raises SourceIncomplete,
        SourceUntrusted for a name that is no plain path."""
        below = check_name(folder) + "/"
        found = [name for name in self._files if name.startswith(below) and "/." not in name]
        if not found:
            raise SourceIncomplete(f"{self.place}: {folder} is missing", hint=_FETCH, file=folder)
        return sorted(check_name(name) for name in found)

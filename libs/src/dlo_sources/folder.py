"""A checkpoint's folder, and nothing outside it.

Names come from strangers (an index, ``model_index.json``), and this process may see the files of others. So
every name is judged before anything is opened, links are resolved first and must end inside the folder, and
the one exception is the hub cache, whose snapshots are links to the ``blobs`` folder beside them.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from typing import Any, Final, Protocol

from dlo_cache.canonical import strict_json
from dlo_cache.errors import Invalid
from dlo_cache.header import STRUCTURE_LIMIT

from dlo_sources.errors import (
    SourceIncomplete,
    SourceInvalid,
    SourceNotFound,
    SourceUnavailable,
    SourceUntrusted,
)
from dlo_sources.files import CheckpointFile, LocalFile, look_at, unreadable

JSON_LIMIT: Final = 64 * 2**20
_LONGEST_PART: Final = 255
_MOST_PARTS: Final = 16
_MOST_FILES: Final = 10_000
_FETCH: Final = "fetch the checkpoint again, or wait until it has arrived"


class CheckpointFolder(Protocol):
    """The folder of one pipeline, wherever it lies; names are relative to it. Methods as in ``Folder``."""

    @property
    def name(self) -> str: ...
    @property
    def place(self) -> str:
        """Where it is, for messages."""
        ...

    def file(self, name: str) -> CheckpointFile: ...
    def has(self, name: str) -> bool: ...
    def json(self, name: str) -> dict[str, Any]: ...
    def names(self, folder: str) -> list[str]: ...


class Folder:
    """The folder of one pipeline; ``root`` is its real path, names are relative to it."""

    def __init__(self, path: Path, *, within: Path | None = None) -> None:
        """Looks at ``path``; with ``within`` it must be inside that folder once all links are resolved.

        Raises SourceNotFound, SourceInvalid if it is no folder, SourceUntrusted if it is not inside.
        """
        try:
            self.root = path.resolve(strict=True)
            bound = within.resolve(strict=True) if within else None
            is_folder = self.root.is_dir()
        except FileNotFoundError as error:
            raise SourceNotFound(f"{path} does not exist", hint="check the path") from error
        except (OSError, RuntimeError) as error:
            raise SourceUnavailable(
                f"{path} cannot be looked at: {error}", hint="check owner and mode"
            ) from error
        if bound is not None and not self.root.is_relative_to(bound):
            raise SourceUntrusted(f"{path} leads out of {within}", hint="use a path inside the source root")
        if not is_folder:
            raise SourceInvalid(
                f"{path} is a single file, not a pipeline's folder; single-file checkpoints are not read",
                hint="convert it to a diffusers folder (from_single_file, then save_pretrained)",
            )
        self._bounds = [self.root]
        blobs = self.root.parent.parent / "blobs"
        if self.is_snapshot and blobs.is_dir() and (bound is None or blobs.resolve().is_relative_to(bound)):
            self._bounds.append(blobs.resolve())

    @property
    def is_snapshot(self) -> bool:
        """Whether this is a snapshot in the hub's cache."""
        return self.root.parent.name == "snapshots"

    @property
    def name(self) -> str:
        """What to call the checkpoint: the repository of a hub snapshot, else the folder's name."""
        repo = self.root.parent.parent.name
        if self.is_snapshot and repo.startswith("models--"):
            return repo.removeprefix("models--").replace("--", "/")
        return self.root.name

    @property
    def place(self) -> str:
        """Its path."""
        return str(self.root)

    def file(self, name: str) -> LocalFile:
        """The file ``name``, not opened.

        Raises SourceIncomplete if it or what it links to is missing, SourceUntrusted if it leads out of the
        folder, SourceInvalid if it is not a regular file.
        """
        return look_at(name, self._resolve(name))

    def has(self, name: str) -> bool:
        """Whether there is a file or a link of that name, be it a link to nothing."""
        return os.path.lexists(self.root / check_name(name))

    def json(self, name: str) -> dict[str, Any]:
        """The JSON object in the file ``name``; raises SourceInvalid if it is none."""
        return json_of(self.file(name))

    def names(self, folder: str) -> list[str]:
        """The names of all files and links below ``folder``, sorted; what starts with a dot is left out.

        Raises SourceIncomplete if the folder is missing, SourceInvalid for a folder inside that is a link.
        """
        top = self._resolve(folder)
        found: list[str] = []
        waiting = [(top, PurePosixPath(folder))]
        while waiting:
            real, at = waiting.pop()
            try:
                with os.scandir(real) as entries:
                    for entry in entries:
                        if entry.name.startswith("."):
                            continue
                        if entry.is_dir(follow_symlinks=False):
                            waiting.append((real / entry.name, at / entry.name))
                        elif entry.is_symlink() and os.path.isdir(real / entry.name):
                            raise SourceInvalid(
                                f"{at / entry.name} is a link to a folder", hint="use a real folder"
                            )
                        else:
                            found.append(str(at / entry.name))
                        if len(found) > _MOST_FILES or len(at.parts) > _MOST_PARTS:
                            raise SourceInvalid(
                                f"{folder} holds more than {_MOST_FILES} files or is nested too deep"
                            )
            except NotADirectoryError as error:
                raise SourceInvalid(f"{at} is not a folder") from error
            except OSError as error:
                raise unreadable(error, str(at)) from error
        return sorted(found)

    def _resolve(self, name: str) -> Path:
        path = self.root / check_name(name)
        try:
            real = Path(os.path.realpath(path, strict=True))
        except FileNotFoundError as error:
            if path.is_symlink():
                what = f"{name} is a link to nothing ({path.readlink()}): its content has not arrived"
            else:
                what = f"{name} is missing"
            raise SourceIncomplete(what, hint=_FETCH, file=name) from error
        except OSError as error:
            raise unreadable(error, name) from error
        if not any(real.is_relative_to(bound) for bound in self._bounds):
            raise SourceUntrusted(
                f"{name} is a link that leads out of the checkpoint's folder; it was not opened",
                hint="put the file itself there",
                file=name,
            )
        return real


def check_name(name: str) -> str:
    """``name`` if it is a plain relative path; raises SourceUntrusted for one that could lead elsewhere."""
    parts = name.split("/")
    plain = all(
        part not in ("", ".", "..") and len(part.encode("utf-8", "replace")) <= _LONGEST_PART
        for part in parts
    )
    if not plain or len(parts) > _MOST_PARTS or "\\" in name or not name.isprintable():
        raise SourceUntrusted(
            f"{name[:300]!r} is not a plain path inside the checkpoint; it was not opened", file=name
        )
    return name


def json_of(file: CheckpointFile) -> dict[str, Any]:
    """The JSON object in a file; raises SourceInvalid if it is none."""
    name = file.name
    if file.size > JSON_LIMIT:
        raise SourceInvalid(f"{name} has {file.size} bytes, too many for such a file", file=name)
    data = file.read(0, file.size)
    if data.count(b"{") + data.count(b"[") + data.count(b",") > STRUCTURE_LIMIT:
        raise SourceInvalid(f"{name} states more than {STRUCTURE_LIMIT} values", file=name)
    try:
        value = strict_json(data, name)
    except Invalid as error:
        raise SourceInvalid(error.message, hint=_FETCH, file=name) from error
    if not isinstance(value, dict):
        raise SourceInvalid(f"{name} is no JSON object", hint=_FETCH, file=name)
    return value

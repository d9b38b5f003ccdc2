"""A whole checkpoint in the diffusers folder form: what ``model_index.json`` names, checked from headers
alone.

Nothing is loaded and no code of the checkpoint is run. What is returned stands for the files as they were
now.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from dlo_cache.source import Component, SourceFile, swap_files

from dlo_sources.component import check_count, read_component, read_config
from dlo_sources.errors import SourceIncomplete, SourceInvalid, SourceNotFound
from dlo_sources.fetch import Fetcher
from dlo_sources.folder import CheckpointFolder, Folder
from dlo_sources.remote_folder import RemoteFolder
from dlo_sources.weights import has_variant

MODEL_INDEX: Final = "model_index.json"
_MOST_COMPONENTS: Final = 64
_COMPONENT: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


@dataclass(frozen=True)
class Pipeline:
    """A checkpoint; ``root`` is its folder, None where it lies in a store.

    ``files`` are those of the pipeline itself, outside its components' folders.
    """

    root: Path | None
    name: str
    class_name: str
    config: Mapping[str, Any]
    components: Mapping[str, Component]
    files: tuple[SourceFile, ...]

    def component(self, name: str) -> Component:
        """The component ``name``; raises SourceNotFound naming those there are."""
        try:
            return self.components[name]
        except KeyError:
            raise SourceNotFound(
                f"{self.name} has no component {name!r}",
                hint=f"its components are {', '.join(self.components)}",
                component=name,
            ) from None

    def all_files(self) -> tuple[SourceFile, ...]:
        """Every file of the checkpoint, sorted by name."""
        files = [*self.files, *(file for component in self.components.values() for file in component.files)]
        return tuple(sorted(files, key=lambda file: file.name))

    def rest_files(self, streamed: Sequence[str]) -> tuple[SourceFile, ...]:
        """Every file but the weights of the ``streamed`` components and the indexes of those weights."""
        left_out = set()
        for name in streamed:
            component = self.component(name)
            if not component.weights:
                raise SourceInvalid(f"component {name} has no weights that could be streamed", component=name)
            left_out |= {file.name for file in component.weights}
            left_out |= {file.name for file in component.files if ".safetensors.index." in file.name}
        return tuple(file for file in self.all_files() if file.name not in left_out)

    def with_files(self, files: Iterable[SourceFile]) -> Pipeline:
        """The same checkpoint over ``files``, matched by name: how later digests come in."""
        known = {file.name: file for file in files}
        components = {
            name: component.with_files(known.values()) for name, component in self.components.items()
        }
        return replace(self, files=swap_files(self.files, known), components=components)


def open_directory(path: Path, *, variant: str = "", within: Path | None = None) -> Pipeline:
    """The checkpoint in the folder ``path``, every component checked as far as headers and indexes allow.

    ``variant`` picks among several whole sets of weights ("fp16"); a component without one gives its plain
    set. With ``within`` the folder must lie inside that one. Raises a SourceError that says what, where,
    and what to do.
    """
    folder = Folder(path, within=within)
    if not folder.has(MODEL_INDEX):
        raise _no_pipeline(folder)
    return replace(_opened(folder, variant), root=folder.root)


def open_remote(fetcher: Fetcher, *, variant: str = "") -> Pipeline:
    """The checkpoint in a store, checked in the same way; only headers and configurations are fetched."""
    folder = RemoteFolder(fetcher)
    if not folder.has(MODEL_INDEX):
        raise SourceInvalid(
            f"{folder.place} is no pipeline: it has no {MODEL_INDEX}",
            hint="name the repository or the prefix that holds model_index.json",
            file=MODEL_INDEX,
        )
    return _opened(folder, variant)


def _opened(folder: CheckpointFolder, variant: str) -> Pipeline:
    index = read_config(folder, MODEL_INDEX)
    class_name = index.get("_class_name")
    if not isinstance(class_name, str):
        raise SourceInvalid(f"{folder.place}: {MODEL_INDEX} names no pipeline class", file=MODEL_INDEX)
    listed = _listed_components(index)
    if not listed:
        raise SourceInvalid(f"{folder.place}: {MODEL_INDEX} names no component", file=MODEL_INDEX)
    _check_folders(folder, listed)
    if variant:
        _check_variant(folder, listed, variant)
    components: dict[str, Component] = {}
    for name, (library, component_class) in listed.items():
        components[name] = read_component(folder, name, library, component_class, variant)
        check_count(sum(len(each.tensors) for each in components.values()), folder.place)
    return Pipeline(None, folder.name, class_name, index, components, (folder.file(MODEL_INDEX),))


def _listed_components(index: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Name to library and class; settings and components that are absent on purpose are left out."""
    listed = {}
    for name, stated in index.items():
        if name.startswith("_") or not isinstance(stated, list) or stated == [None, None]:
            continue
        if len(stated) != 2 or not all(isinstance(word, str) for word in stated):
            continue
        if not _COMPONENT.fullmatch(name):
            raise SourceInvalid(f"{MODEL_INDEX}: {name[:100]!r} is no name of a component", file=MODEL_INDEX)
        listed[name] = (stated[0], stated[1])
        if len(listed) > _MOST_COMPONENTS:
            raise SourceInvalid(
                f"{MODEL_INDEX} names more than {_MOST_COMPONENTS} components", file=MODEL_INDEX
            )
    return listed


def _check_folders(folder: CheckpointFolder, listed: Iterable[str]) -> None:
    missing = [name for name in listed if not folder.has(name)]
    if missing:
        raise SourceIncomplete(
            f"{folder.place}: {MODEL_INDEX} names component {missing[0]}, but folder {missing[0]} is missing",
            hint="fetch the checkpoint again, or wait until it has arrived",
            component=missing[0],
        )


def _check_variant(folder: CheckpointFolder, listed: Mapping[str, tuple[str, str]], variant: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9_]{1,40}", variant):
        raise SourceInvalid(f"variant {variant!r} is no plain word")
    for name, (library, _) in listed.items():
        names = [found.removeprefix(f"{name}/") for found in folder.names(name)]
        if has_variant(names, library, variant):
            return
    raise SourceIncomplete(
        f"{folder.place}: no component has weights of variant {variant!r}",
        hint="leave the variant out, or fetch it",
    )


def _no_pipeline(folder: Folder) -> SourceInvalid:
    hint = "give the folder that holds model_index.json and one folder for each component"
    if (folder.root / "snapshots").is_dir():
        hint = (
            f"this is a repository in the hub's cache: give one of the folders in {folder.root / 'snapshots'}"
        )
    elif (folder.root.parent / MODEL_INDEX).is_file():
        hint = f"this is one component: give the folder above it, {folder.root.parent}"
    return SourceInvalid(
        f"{folder.root} is no pipeline: it has no {MODEL_INDEX}", hint=hint, file=MODEL_INDEX
    )

"""The model that a manifest or a command names, opened: its folder, its pipeline, the layout of what streams.

Reads headers and configuration only. Writes nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dlo_api.v1alpha1.source import DirectorySource
from dlo_cache.layout import Layout
from dlo_cache.layouts import builtin_architectures, builtin_layout
from dlo_cache.source import Component
from dlo_sources.pipeline import Pipeline, open_directory

from dlo_cli.errors import CliError, UsageError
from dlo_cli.samples import samples_root


@dataclass(frozen=True)
class Streamed:
    """A component that streams, with the layout that cuts it."""

    component: Component
    layout: Layout


@dataclass(frozen=True)
class Model:
    """A pipeline on this machine and its streamed components."""

    pipeline: Pipeline
    streamed: tuple[Streamed, ...]


def parse_source_roots(pairs: Sequence[str]) -> dict[str, Path]:
    """``NAME=DIR`` options as a mapping; `samples` is the product's own."""
    roots = {"samples": samples_root()}
    for pair in pairs:
        name, separator, folder = pair.partition("=")
        if not separator or not name or not folder:
            raise UsageError(f"--source-root {pair}: not of the form NAME=DIR")
        if name == "samples":
            raise UsageError(
                "--source-root samples=…: the name is taken by the product", hint="choose another name"
            )
        roots[name] = Path(folder)
    return roots


def locate(source: DirectorySource, manifest: Path, roots: Mapping[str, Path]) -> Path:
    """The folder of a directory source. Its path cannot leave its root; without a root it is the manifest's folder."""
    if source.root:
        if source.root not in roots:
            known = ", ".join(sorted(roots))
            raise UsageError(
                f"spec.model.source.directory.root: no root named {source.root!r}",
                hint=f"known are {known}; add one with --source-root {source.root}=DIR",
                code="UnknownRoot",
            )
        base = roots[source.root]
    else:
        base = manifest.parent
    folder = base / source.path
    if source.root and not folder.resolve().is_relative_to(base.resolve()):
        raise UsageError(
            f"spec.model.source.directory.path: {source.path!r} leaves the root {source.root!r}",
            hint="name a folder inside the root",
            code="PathLeavesRoot",
        )
    return folder


def open_model(folder: Path, components: Sequence[str], *, variant: str, layout_file: Path | None) -> Model:
    """Open a pipeline folder and find the layout of each streamed component."""
    pipeline = open_directory(folder, variant=variant)
    supplied = read_layout(layout_file) if layout_file is not None else None
    streamed = []
    for name in components:
        component = pipeline.component(name)
        layout = supplied if supplied and supplied.architecture == component.class_name else None
        layout = layout or builtin_layout(component.class_name)
        if layout is None:
            raise CliError(
                f"component {name}: no layout for the architecture {component.class_name}",
                hint=f"built in are {', '.join(builtin_architectures())}; bring one with --layout FILE",
                code="UnknownArchitecture",
            )
        streamed.append(Streamed(component, layout))
    return Model(pipeline, tuple(streamed))


def read_layout(file: Path) -> Layout:
    """A user's layout file."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--layout {file}: cannot be read: {error}", code="LayoutUnreadable") from error
    return Layout.from_json(text)

"""The entries that a manifest needs: found where they exist, built where they lack."""

import platform
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from dlo_cache.build import build_layout_entries
from dlo_cache.files_entry import build_files_entry
from dlo_cache.handover import Handover, HandoverEntry
from dlo_cache.presence import Built
from dlo_cache.recovery import recover
from dlo_cache.root import Root
from dlo_sources.digests import DigestCache, hash_files

from dlo_cli.console import SHORT, Console, human_bytes
from dlo_cli.model import Model

Cancel = Callable[[], bool]


def producer() -> dict[str, str]:
    """Who builds, for `producer.json`; no part of any digest."""
    return {"program": "dlo", "version": version("dlo-operator"), "python": platform.python_version()}


def ensure_entries(
    root: Root,
    model: Model,
    *,
    dtype: str,
    quantization: str,
    tensor_size: int,
    tensor_ranks: Sequence[int] | None = None,
    console: Console,
    cancel: Cancel,
) -> Handover:
    """Every entry of the model at this tensor size (or of some ranks), built if it lacks, as a hand-over.

    Raises the errors of `dlo_cache` and `dlo_sources`; a build that fails or is cancelled leaves nothing behind.
    """
    recover(root)
    files = hash_files(model.pipeline.all_files(), DigestCache(root.digests_dir), console.progress, cancel)
    hashed = model.pipeline.with_files(files)
    entries: list[HandoverEntry] = []
    ranks = tuple(range(tensor_size)) if tensor_ranks is None else tuple(tensor_ranks)
    for streamed in model.streamed:
        name = streamed.component.name
        built = build_layout_entries(
            root,
            hashed.component(name),
            streamed.layout,
            dtype=dtype,
            quantization=quantization,
            tensor_size=tensor_size,
            tensor_ranks=tensor_ranks,
            progress=console.progress,
            cancel=cancel,
            producer=producer(),
        )
        for rank, entry in zip(ranks, built, strict=True):
            coordinate = f"{rank}/{tensor_size}"
            _say(console, f"{name} {coordinate}", entry)
            entries.append(
                HandoverEntry(
                    rank=rank,
                    component=name,
                    coordinate=coordinate,
                    kind="Layout",
                    input_key=entry.key,
                    dir=str(entry.path),
                    manifest_sha256=entry.manifest_sha256,
                )
            )
    names = tuple(streamed.component.name for streamed in model.streamed)
    rest = build_files_entry(
        root,
        hashed.rest_files(names),
        select="PipelineRest",
        streamed=names,
        progress=console.progress,
        cancel=cancel,
        producer=producer(),
    )
    _say(console, "rest of the pipeline", rest)
    entries.append(
        HandoverEntry(
            rank=None,
            component=None,
            coordinate=None,
            kind="Files",
            input_key=rest.key,
            dir=str(rest.path),
            manifest_sha256=rest.manifest_sha256,
        )
    )
    return Handover(root=str(root.path), entries=tuple(entries))


def _say(console: Console, what: str, entry: Built) -> None:
    state = "found" if entry.reused else "built"
    console.step("Entry", f"{what:<22} {state}  {human_bytes(entry.bytes):>9}  {entry.key[:SHORT]}")


def relative(path: Path) -> str:
    """A path for people: relative to where they are, when it is below."""
    return (
        str(path.relative_to(Path.cwd()))
        if path.is_absolute() and path.is_relative_to(Path.cwd())
        else str(path)
    )

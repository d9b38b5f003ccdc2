"""Real cache entries and a hand-over file for a pipeline folder, made with the product's own builder.

What `dlo run` does before it starts an engine, without its command line.
"""

from __future__ import annotations

from pathlib import Path

from dlo_cache.build import build_layout_entries
from dlo_cache.files_entry import build_files_entry
from dlo_cache.handover import Handover, HandoverEntry, write_handover
from dlo_cache.layouts import builtin_layout
from dlo_cache.root import init_root
from dlo_sources.digests import DigestCache, hash_files
from dlo_sources.pipeline import open_directory

PRODUCER = {"name": "tests"}


def prepare(
    folder: Path, root_path: Path, *, tensor: int = 1, component: str = "transformer", variant: str = ""
) -> Path:
    """Builds the entries of `component` for `tensor` ranks and of the rest; returns the hand-over file."""
    root_path.mkdir(parents=True)
    root = init_root(root_path)
    pipeline = open_directory(folder, variant=variant)
    pipeline = pipeline.with_files(hash_files(pipeline.all_files(), DigestCache(None)))
    streamed = pipeline.component(component)
    layout = builtin_layout(str(streamed.config["_class_name"]))
    assert layout is not None
    built = build_layout_entries(root, streamed, layout, tensor_size=tensor, producer=PRODUCER)
    records = [
        HandoverEntry(
            rank, component, f"{rank}/{tensor}", "Layout", one.key, str(one.path), one.manifest_sha256
        )
        for rank, one in enumerate(built)
    ]
    rest = build_files_entry(
        root,
        pipeline.rest_files([component]),
        select="PipelineRest",
        streamed=[component],
        producer=PRODUCER,
    )
    records.append(HandoverEntry(None, None, None, "Files", rest.key, str(rest.path), rest.manifest_sha256))
    path = root_path.parent / "handover.json"
    write_handover(path, Handover(str(root_path), tuple(records)))
    return path

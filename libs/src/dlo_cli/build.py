"""``dlo build``: the entries of a model folder, without a manifest and without an engine."""

import threading
from dataclasses import dataclass
from pathlib import Path

from dlo_cli.console import Console
from dlo_cli.entries import ensure_entries
from dlo_cli.errors import UsageError
from dlo_cli.model import open_model
from dlo_cli.roots import cache_root

DTYPES = ("Source", "bfloat16", "float16", "float32")
MAX_TENSOR = 64


@dataclass(frozen=True)
class BuildOptions:
    """What to build. ``ranks`` None means every coordinate."""

    model: Path
    cache_root: Path | None = None
    tensor: int = 1
    ranks: tuple[int, ...] | None = None
    dtype: str = "Source"
    components: tuple[str, ...] = ("transformer",)
    variant: str = ""
    layout: Path | None = None


def build(options: BuildOptions, console: Console, stopping: threading.Event) -> None:
    """Build what lacks and print one input key a line on standard output."""
    if not 1 <= options.tensor <= MAX_TENSOR:
        raise UsageError(f"--tensor is {options.tensor}", hint=f"use 1 to {MAX_TENSOR}")
    if options.dtype not in DTYPES:
        raise UsageError(f"--dtype is {options.dtype!r}", hint=f"use one of {', '.join(DTYPES)}")
    for rank in options.ranks or ():
        if not 0 <= rank < options.tensor:
            raise UsageError(f"--rank is {rank}", hint=f"use 0 to {options.tensor - 1}, below --tensor")
    model = open_model(options.model, options.components, variant=options.variant, layout_file=options.layout)
    root = cache_root(options.cache_root)
    handover = ensure_entries(
        root,
        model,
        dtype=options.dtype,
        quantization="None",
        tensor_size=options.tensor,
        tensor_ranks=options.ranks,
        console=console,
        cancel=stopping.is_set,
    )
    console.settle()
    for entry in handover.entries:
        console.result(entry.input_key)

"""The layouts that ship with the product: one JSON file per architecture, named after the diffusers class."""

from __future__ import annotations

from importlib import resources

from dlo_cache.layout import Layout

_SUFFIX = ".json"


def builtin_architectures() -> tuple[str, ...]:
    """The class names that have a layout here, sorted."""
    names = (item.name for item in resources.files(__name__).iterdir())
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)))


def builtin_layout(architecture: str) -> Layout | None:
    """The layout of a diffusers class, or None if there is none."""
    if architecture not in builtin_architectures():
        return None
    return Layout.from_json(resources.files(__name__).joinpath(architecture + _SUFFIX).read_text("utf-8"))

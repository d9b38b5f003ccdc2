"""Which names may become paths inside a cache root. Pure.

An entry's directory is named by 64 hexadecimal digits and nothing else; a file inside an entry has a relative
path whose parts are plain names. Whatever fails here never reaches an open call. Must not look at a disk.
"""

from __future__ import annotations

import re
from typing import Final

from dlo_cache.errors import Invalid

MANIFEST: Final = "manifest.json"
LEASE: Final = "lease"
PRODUCER: Final = "producer.json"
RESERVED: Final = frozenset({MANIFEST, LEASE, PRODUCER})

_KEY: Final = re.compile(r"[0-9a-f]{64}")
_PREFIX: Final = re.compile(r"[0-9a-f]{6,64}")
_LONGEST_NAME: Final = 255
_DEEPEST: Final = 16


def is_key(name: str) -> bool:
    """Whether ``name`` is an input key: 64 lower-case hexadecimal digits."""
    return _KEY.fullmatch(name) is not None


def check_key(key: str) -> str:
    """``key``, if it is an input key; otherwise raises Invalid (InvalidKey)."""
    if not is_key(key):
        raise Invalid(
            f"{key[:80]!r} is no entry key", code="InvalidKey", hint="a key has 64 hexadecimal digits"
        )
    return key


def check_prefix(prefix: str) -> str:
    """``prefix``, if it may abbreviate a key: 6 to 64 hexadecimal digits; otherwise raises Invalid
    (InvalidKey)."""
    if _PREFIX.fullmatch(prefix) is None:
        raise Invalid(
            f"{prefix[:80]!r} is no entry key",
            code="InvalidKey",
            hint="give the key's first 6 or more hexadecimal digits",
        )
    return prefix


def split_path(path: str) -> tuple[str, ...]:
    """The parts of a relative path inside an entry; raises Invalid (UnsafePath) for one that could lead out
    of it.

    The store's own names (manifest, lease, producer) are refused at the top.
    """
    parts = tuple(path.split("/"))
    plain = all(part not in ("", ".", "..") and "\0" not in part and _fits(part) for part in parts)
    if not plain or len(parts) > _DEEPEST:
        raise Invalid(f"{path[:80]!r} is no safe file name for an entry", code="UnsafePath")
    if path in RESERVED:
        raise Invalid(f"{path!r} is a name that the cache keeps for itself", code="UnsafePath")
    return parts


def _fits(part: str) -> bool:
    try:
        return len(part.encode()) <= _LONGEST_NAME
    except UnicodeEncodeError:  # a lone surrogate: a file name that is not text
        return False

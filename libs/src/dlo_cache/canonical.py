"""Canonical JSON, the one form whose bytes are hashed, and strict reading of JSON written by others. Pure."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NoReturn

from dlo_cache.errors import Invalid


def canonical_json(value: Any) -> bytes:
    """``value`` with sorted keys, no white space, ASCII only: equal values give equal bytes.

    Raises Invalid for what JSON cannot hold, floating point numbers included: their text is not unique.
    """
    _refuse_floats(value)
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise Invalid(f"not a canonical JSON value: {error}") from error
    return text.encode("ascii")


def strict_json(text: str | bytes, what: str) -> Any:
    """The value of a JSON document; raises Invalid, naming ``what``, also for a key twice or NaN."""

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(found)
        if len(value) != len(found):
            twice, _ = Counter(name for name, _ in found).most_common(1)[0]
            raise ValueError(f"key {twice!r} stands twice")
        return value

    try:
        return json.loads(text, object_pairs_hook=pairs, parse_constant=_no_constant)
    except RecursionError:
        raise Invalid(f"{what} is nested too deep") from None
    except ValueError as error:
        raise Invalid(f"{what} is no valid JSON: {error}", hint="correct or restore it") from error


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON number")


def _refuse_floats(value: Any) -> None:
    if isinstance(value, float):
        raise Invalid(f"floating point number {value!r} has no canonical text")
    if isinstance(value, dict):
        for item in value.values():
            _refuse_floats(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _refuse_floats(item)

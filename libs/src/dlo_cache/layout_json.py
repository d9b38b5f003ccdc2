"""Layouts as JSON: strict reading of what a user wrote, and the canonical text that names a layout by its
digest.

Pure. Every unknown key or word is an error that names it, with the nearest known one.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from typing import Any

from dlo_cache.canonical import canonical_json, strict_json
from dlo_cache.errors import Invalid
from dlo_cache.layout_rules import BlockGroup, Heads, Role, Rule, Section

_LAYOUT_KEYS = ("id", "architecture", "groups", "rules", "keepFp32")
_RULE_KEYS = ("pattern", "role", "sections", "heads")
_SECTION_KEYS = ("share", "size", "heads")


def parse_layout(text: str | bytes) -> dict[str, Any]:
    """The fields of a ``Layout`` that ``text`` states; raises Invalid naming the wrong key or word."""
    stated = strict_json(text, "layout")
    _check_keys(stated, "layout", known=_LAYOUT_KEYS, needed=("id", "architecture", "groups", "rules"))
    rules = enumerate(_list(stated["rules"], "rules"))
    return {
        "id": _text(stated["id"], "id"),
        "architecture": _text(stated["architecture"], "architecture"),
        "groups": tuple(BlockGroup(_text(name, "groups")) for name in _list(stated["groups"], "groups")),
        "rules": tuple(_rule(rule, f"rules[{at}]") for at, rule in rules),
        "keep_fp32": tuple(_text(name, "keepFp32") for name in _list(stated.get("keepFp32", []), "keepFp32")),
    }


def render_layout(
    layout_id: str,
    architecture: str,
    groups: Iterable[BlockGroup],
    rules: Iterable[Rule],
    keep_fp32: Iterable[str],
) -> str:
    """The canonical text of these fields."""
    document: dict[str, Any] = {
        "id": layout_id,
        "architecture": architecture,
        "groups": [group.name for group in groups],
        "rules": [_rule_document(rule) for rule in rules],
    }
    if patterns := list(keep_fp32):
        document["keepFp32"] = patterns
    return canonical_json(document).decode("ascii")


def _rule_document(rule: Rule) -> dict[str, Any]:
    sections = [_without_none(section._asdict()) for section in rule.sections]
    stated = {
        "pattern": rule.pattern,
        "role": rule.role.value,
        "heads": rule.heads,
        "sections": sections or None,
    }
    return _without_none(stated)


def _without_none(stated: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in stated.items() if value is not None}


def _rule(stated: Any, where: str) -> Rule:
    _check_keys(stated, where, known=_RULE_KEYS, needed=("pattern", "role"))
    word = _text(stated["role"], f"{where}.role")
    roles = [role.value for role in Role]
    if word not in roles:
        raise Invalid(
            f"layout: {where}: unknown role {word!r}{_nearest(word, roles)}", hint=f"use {', '.join(roles)}"
        )
    sections = enumerate(_list(stated.get("sections", []), f"{where}.sections"))
    return Rule(
        pattern=_text(stated["pattern"], f"{where}.pattern"),
        role=Role(word),
        sections=tuple(_section(section, f"{where}.sections[{at}]") for at, section in sections),
        heads=_heads(stated.get("heads"), where),
    )


def _section(stated: Any, where: str) -> Section:
    _check_keys(stated, where, known=_SECTION_KEYS, needed=())
    for key in ("share", "size"):
        if key in stated and type(stated[key]) is not int:
            raise Invalid(f"layout: {where}.{key} is {stated[key]!r}, not a whole number")
    return Section(stated.get("share"), stated.get("size"), _heads(stated.get("heads"), where))


def _heads(stated: Any, where: str) -> Heads:
    if stated is not None and type(stated) not in (int, str):
        raise Invalid(f"layout: {where}.heads is {stated!r}, not a number or the name of a config key")
    heads: Heads = stated
    return heads


def _check_keys(stated: Any, where: str, *, known: Collection[str], needed: Collection[str]) -> None:
    if not isinstance(stated, dict):
        raise Invalid(f"layout: {where} is not an object")
    for key in stated:
        if key not in known:
            raise Invalid(
                f"layout: {where}: unknown key {key!r}{_nearest(key, known)}",
                hint=f"keys: {', '.join(known)}",
            )
    for key in needed:
        if key not in stated:
            raise Invalid(f"layout: {where}: key {key!r} is missing")


def _nearest(word: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _text(stated: Any, where: str) -> str:
    if not isinstance(stated, str):
        raise Invalid(f"layout: {where} is {stated!r}, not text")
    return stated


def _list(stated: Any, where: str) -> list[Any]:
    if not isinstance(stated, list):
        raise Invalid(f"layout: {where} is not a list")
    return stated

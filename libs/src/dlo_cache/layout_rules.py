"""The words of a layout: roles, rules with their patterns, sections and block groups. Pure.

Must not know a model: what a layout says of a tensor is ``layout``'s part.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Final, NamedTuple

from dlo_cache.errors import Invalid

_SEGMENT: Final = re.compile(r"[^.*\s]+")
_GROUP: Final = re.compile(r"[A-Za-z_]\w*(\.\w+)*", re.ASCII)
_LONGEST_GROUP: Final = 100
_ONE_SEGMENT: Final = r"\.[^.]+"


class Role(StrEnum):
    """What becomes of a tensor under tensor parallelism."""

    COLUMN = "column"
    """Dimension 0 is cut; for weights and biases."""
    ROW = "row"
    """Dimension 1 is cut; for weights. The bias has a rule of its own: replicated, added after the reduce."""
    REPLICATED = "replicated"
    """Every rank has the whole tensor."""
    COLUMN_GATHERED = "column-gathered"
    """Cut as ``column``; the module's output is gathered to full width."""
    VOCABULARY = "vocabulary"
    """Rows of an embedding table are cut."""


CUT_DIMENSION: Final[Mapping[Role, int]] = {
    Role.COLUMN: 0,
    Role.COLUMN_GATHERED: 0,
    Role.VOCABULARY: 0,
    Role.ROW: 1,
}

Heads = int | str | None


class Section(NamedTuple):
    """A run of a cut dimension that is divided by itself.

    It has ``size`` elements, or ``share`` parts of what the sizes leave. ``heads`` (a number or the name of a
    config key) says into how many pieces it may be divided at all.
    """

    share: int | None = None
    size: int | None = None
    heads: Heads = None


class Rule(NamedTuple):
    """The role of all tensors whose name matches ``pattern``; see ``Layout`` for patterns."""

    pattern: str
    role: Role
    sections: tuple[Section, ...] = ()
    heads: Heads = None


class BlockGroup(NamedTuple):
    """A list of blocks that run one after another: the attribute path of the module list."""

    name: str


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """The expression that a pattern stands for, to be matched against a whole name with a dot in front.

    What stands between two ``**`` is taken where it first fits and never moved again (an atomic group). That
    loses no match, and keeps the time in bounds for the patterns and names of strangers.
    """
    runs: list[str] = [""]
    for segment in pattern.split("."):
        if segment == "**":
            runs.append("")
        else:
            runs[-1] += _ONE_SEGMENT if segment == "*" else rf"\.{re.escape(segment)}"
    if len(runs) == 1:
        return re.compile(runs[0])
    first, *middle, last = runs
    moving = "".join(f"(?>(?:{_ONE_SEGMENT})*?{run})" for run in middle if run)
    return re.compile(f"{first}{moving}(?:{_ONE_SEGMENT})*{last}")


def check_group(where: str, group: BlockGroup) -> None:
    """Raises Invalid for a group that is no attribute path."""
    if not _GROUP.fullmatch(group.name) or len(group.name) > _LONGEST_GROUP:
        raise Invalid(f"{where}: group {group.name!r} is not the path of a module list")


def check_pattern(where: str, pattern: str) -> None:
    """Raises Invalid for a pattern that is not made of dotted segments, each whole or a star."""
    for segment in pattern.split("."):
        if segment not in ("*", "**") and not _SEGMENT.fullmatch(segment):
            raise Invalid(
                f"{where}: pattern {pattern!r} is not made of dotted segments",
                hint="a star stands for a whole segment",
            )


def check_rule(where: str, rule: Rule) -> None:
    """Raises Invalid for a rule that can mean nothing; types are the caller's part."""
    check_pattern(where, rule.pattern)
    where = f"{where}: rule {rule.pattern}"
    if rule.role is Role.REPLICATED and (rule.sections or rule.heads is not None):
        raise Invalid(f"{where} is replicated, so heads and sections mean nothing")
    if rule.sections and rule.heads is not None:
        raise Invalid(f"{where} has sections and heads", hint="state heads in the sections")
    for section in rule.sections:
        amounts = [amount for amount in (section.share, section.size) if amount is not None]
        if len(amounts) != 1 or amounts[0] < 1:
            raise Invalid(f"{where}: a section has a share or a size, and it is positive")
    for heads in (rule.heads, *(section.heads for section in rule.sections)):
        if heads is not None and (not heads or (isinstance(heads, int) and heads < 1)):
            raise Invalid(f"{where}: heads is a positive number or the name of a config key")

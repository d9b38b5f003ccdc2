"""How a component is divided: into blocks that stream, and each tensor among tensor-parallel ranks.

A layout is data (rules by tensor name), not code. The builder cuts bytes with it and the engine shards its
modules with the same object, so that both cannot disagree. Pure: no file is touched and no tensor is read.
A tensor that no rule names is an error, never silently replicated.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

from dlo_cache.errors import Invalid, NotDivisible, UnknownTensor
from dlo_cache.layout_json import parse_layout, render_layout
from dlo_cache.layout_rules import (
    CUT_DIMENSION,
    BlockGroup,
    Heads,
    Role,
    Rule,
    Section,
    check_group,
    check_pattern,
    check_rule,
    compile_pattern,
)

__all__ = ["BlockGroup", "Cut", "Heads", "Layout", "Role", "Rule", "Section", "replicated_layout"]

_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_SHOWN_RULES: Final = 3


class Cut(NamedTuple):
    """One rank's part of a tensor: ranges of ``dim`` to join in order, or with ``dim`` None all of it."""

    dim: int | None
    ranges: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """The rules of one architecture. The first rule that matches a tensor's name counts.

    In patterns ``*`` stands for exactly one dotted segment and ``**`` for any number of them. ``groups``
    are in execution order. ``keep_fp32`` patterns name the tensors that a dtype policy turns into float32.
    """

    id: str
    architecture: str
    groups: tuple[BlockGroup, ...]
    rules: tuple[Rule, ...]
    keep_fp32: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> Layout:
        """The layout that ``text`` describes; raises Invalid that says which key or word is wrong."""
        return cls(**parse_layout(text))

    def to_json(self) -> str:
        """Canonical JSON: equal layouts give equal text, and ``from_json`` takes it back."""
        return render_layout(self.id, self.architecture, self.groups, self.rules, self.keep_fp32)

    @cached_property
    def digest(self) -> str:
        """Sha256 of the canonical JSON, in hexadecimal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def rule(self, name: str) -> Rule:
        """The rule for the tensor ``name``; raises UnknownTensor if there is none."""
        for pattern, rule in self._compiled:
            if pattern.fullmatch(f".{name}"):
                return rule
        raise UnknownTensor(
            f"layout {self.id} has no rule for tensor {name}{self._near(name)}",
            hint="supply a layout with a rule for it; nothing is replicated by default",
            tensor=name,
            layout=self.id,
        )

    def block_of(self, name: str) -> str | None:
        """The block that a tensor belongs to ("transformer_blocks.3"), or None for the resident part."""
        found = self._block_pattern.match(name) if self.groups else None
        return None if found is None else found[0][:-1]

    def execution_order(self, names: Iterable[str]) -> list[str]:
        """The blocks that the tensors ``names`` belong to, in the order in which they run."""
        place = {group.name: index for index, group in enumerate(self.groups)}
        blocks = {block for block in map(self.block_of, names) if block is not None}

        def position(block: str) -> tuple[int, int]:
            group, _, index = block.rpartition(".")
            return place[group], int(index)

        return sorted(blocks, key=position)

    def keeps_fp32(self, name: str) -> bool:
        """Whether a dtype policy keeps this tensor in float32."""
        return any(pattern.fullmatch(f".{name}") for pattern in self._fp32_patterns)

    def head_counts(self, config: Mapping[str, Any]) -> dict[str, int]:
        """Every head count that a rule refers to, by config key (a plain number by its own digits)."""
        stated = [rule.heads for rule in self.rules]
        stated += [section.heads for rule in self.rules for section in rule.sections]
        return {str(heads): _head_count(heads, config) for heads in stated if heads is not None}

    def check(self, config: Mapping[str, Any], tensor_size: int, ulysses: int = 1) -> None:
        """Raises NotDivisible, naming head counts, unless all are multiples of ``tensor_size * ulysses``."""
        wrong = {
            key: count for key, count in self.head_counts(config).items() if count % (tensor_size * ulysses)
        }
        if wrong:
            counts = ", ".join(key if key.isdigit() else f"{key} = {n}" for key, n in sorted(wrong.items()))
            degrees = f"tensor {tensor_size}" + (f" x ulysses {ulysses}" if ulysses > 1 else "")
            fits = [
                str(size)
                for size in range(1, min(wrong.values()) + 1)
                if not any(n % size for n in wrong.values())
            ]
            raise NotDivisible(
                f"{self.architecture}: head counts {counts} are not divisible by {degrees}",
                hint=f"tensor x ulysses may be {', '.join(fits)}",
                heads=wrong,
                tensor_size=tensor_size,
            )

    def cut(
        self, name: str, shape: Sequence[int], tensor_size: int, tensor_rank: int, config: Mapping[str, Any]
    ) -> Cut:
        """What rank ``tensor_rank`` of ``tensor_size`` gets of the tensor ``name``.

        Raises UnknownTensor, NotDivisible naming tensor, size and heads, or Invalid where the role does not
        fit the shape (a 0-d tensor cannot be cut, so it needs a rule that says replicated).
        """
        if not 0 <= tensor_rank < tensor_size:
            raise Invalid(f"tensor rank {tensor_rank} is not below tensor size {tensor_size}")
        rule, whole = self.rule(name), tuple(shape)
        dim = CUT_DIMENSION.get(rule.role)
        if dim is None:
            return Cut(None, (), whole)
        if len(whole) <= dim:
            raise Invalid(
                f"tensor {name} of shape {list(whole)} has the role {rule.role} but no dimension {dim}",
                hint="give it a rule with role replicated",
                tensor=name,
            )
        ranges: list[tuple[int, int]] = []
        for start, size, heads in _sections(name, rule, whole[dim]):
            part = _part(name, size, heads, tensor_size, config)
            ranges.append((start + tensor_rank * part, start + (tensor_rank + 1) * part))
        if tensor_size == 1:
            return Cut(None, (), whole)
        width = sum(stop - start for start, stop in ranges)
        return Cut(dim, tuple(ranges), (*whole[:dim], width, *whole[dim + 1 :]))

    @cached_property
    def _compiled(self) -> tuple[tuple[re.Pattern[str], Rule], ...]:
        return tuple((compile_pattern(rule.pattern), rule) for rule in self.rules)

    @cached_property
    def _fp32_patterns(self) -> tuple[re.Pattern[str], ...]:
        return tuple(map(compile_pattern, self.keep_fp32))

    @cached_property
    def _block_pattern(self) -> re.Pattern[str]:
        groups = "|".join(re.escape(group.name) for group in self.groups)
        return re.compile(rf"(?:{groups})\.(?:0|[1-9][0-9]*)\.")

    def _near(self, name: str) -> str:
        last = name.rpartition(".")[2]
        near = [rule.pattern for rule in self.rules if rule.pattern.rpartition(".")[2] == last]
        return f" (rules that end alike: {', '.join(near[:_SHOWN_RULES])})" if near else ""


def replicated_layout(architecture: str, groups: Sequence[str]) -> Layout:
    """The layout of a component that streams but is never divided, such as a text encoder's layers."""
    blocks = tuple(map(BlockGroup, groups))
    return Layout(f"replicated-{architecture}", architecture, blocks, (Rule("**", Role.REPLICATED),))


def _sections(name: str, rule: Rule, length: int) -> list[tuple[int, int, Heads]]:
    """Start, size and heads of each run of the cut dimension that is divided by itself."""
    if not rule.sections:
        return [(0, length, rule.heads)]
    left = length - sum(section.size or 0 for section in rule.sections)
    shares = sum(section.share or 0 for section in rule.sections)
    if left < 0 or (left % shares if shares else left):
        raise NotDivisible(
            f"tensor {name}: its {length} elements do not fall into the sections {_described(rule.sections)}",
            hint="correct the layout's sections",
            tensor=name,
            size=length,
        )
    found, at = [], 0
    for section in rule.sections:
        size = section.size if section.size is not None else left // shares * (section.share or 0)
        found.append((at, size, section.heads))
        at += size
    return found


def _described(sections: Sequence[Section]) -> str:
    words = (
        f"size {section.size}" if section.size is not None else f"share {section.share}"
        for section in sections
    )
    return ", ".join(words)


def _part(name: str, size: int, heads: Heads, tensor_size: int, config: Mapping[str, Any]) -> int:
    """Elements of one rank's part of a section of ``size`` elements."""
    count = None if heads is None else _head_count(heads, config)
    if count is not None and size % count:
        raise NotDivisible(
            f"tensor {name}: {size} elements do not fall into {count} heads ({heads})",
            hint="correct the layout or the config",
            tensor=name,
            size=size,
            heads=count,
        )
    if (size if count is None else count) % tensor_size:
        in_heads = "" if count is None else f" in {count} heads ({heads})"
        raise NotDivisible(
            f"tensor {name}: {size} elements{in_heads} cannot be divided among {tensor_size} ranks",
            hint="use a smaller tensor-parallel size",
            tensor=name,
            size=size,
            heads=count,
            tensor_size=tensor_size,
        )
    return size // tensor_size


def _head_count(heads: Heads, config: Mapping[str, Any]) -> int:
    count = config.get(heads) if isinstance(heads, str) else heads
    if type(count) is not int or count < 1:
        raise Invalid(
            f"config key {heads!r} is {count!r}, not a head count", hint="correct the layout or the config"
        )
    return count


def _check(layout: Layout) -> None:
    """Raises Invalid for a layout that can mean nothing."""
    if not _ID.fullmatch(layout.id) or not layout.architecture:
        raise Invalid(f"layout id {layout.id!r} or architecture {layout.architecture!r} is not a plain name")
    where = f"layout {layout.id}"
    names = [group.name for group in layout.groups]
    for group in layout.groups:
        check_group(where, group)
        if names.count(group.name) > 1 or any(other.startswith(f"{group.name}.") for other in names):
            raise Invalid(f"{where}: group {group.name} stands twice or holds another group")
    if not layout.rules:
        raise Invalid(f"{where} has no rules")
    for rule in layout.rules:
        check_rule(where, rule)
    for pattern in layout.keep_fp32:
        check_pattern(where, pattern)

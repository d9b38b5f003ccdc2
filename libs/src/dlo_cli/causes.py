"""A cause: one line of an explanation, with what to do about it or with the cause that it follows from. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from dlo_cli.remedies import remedy_of

Subject = Literal["Operator", "Agent", "DiffusionDeployment", "Node", "Pod", "Deployment"]
_MOST_NAMED = 3


@dataclass(frozen=True)
class Cause:
    """One cause.

    Attributes:
        subject: kind of the thing that it is about.
        names: the things; several where all have the same trouble.
        reason: one stable CamelCase word.
        message: what is so, without the thing's name.
        remedy: what to do; empty where it follows from the causes before it.
    """

    subject: Subject
    names: tuple[str, ...]
    reason: str
    message: str
    remedy: str = ""

    @property
    def follows(self) -> bool:
        """Whether it goes away with the causes before it."""
        return not self.remedy

    @property
    def text(self) -> str:
        """The cause on one line, without its remedy."""
        named = ", ".join(self.names[:_MOST_NAMED])
        if len(self.names) > _MOST_NAMED:
            named += f" and {len(self.names) - _MOST_NAMED} more"
        plural = "s" if len(self.names) > 1 else ""
        who = {"DiffusionDeployment": "", "Operator": "operator"}.get(
            self.subject, f"{self.subject.lower()}{plural} {named}".rstrip()
        )
        return f"{who}: {self.message}" if who else self.message

    def to_json(self) -> dict[str, Any]:
        """JSON values; no remedy where it follows."""
        value: dict[str, Any] = {
            "subject": self.subject,
            "names": list(self.names),
            "reason": self.reason,
            "message": self.message,
            "follows": self.follows,
        }
        return value | ({"remedy": self.remedy} if self.remedy else {})


def cause(subject: Subject, name: str | tuple[str, ...], reason: str, said: str) -> Cause:
    """A cause in the words of whoever found it; what to do comes from those words if they say so, else by reason.

    Args:
        subject, name, reason: see Cause.
        said: `what — what to do`, or only what.
    """
    names = (name,) if isinstance(name, str) else name
    what, _, do = said.strip().partition(" — ")
    for each in names:
        what = what.removeprefix(f"{each}: ")
    return Cause(subject, tuple(n for n in names if n), reason, what or reason, do or remedy_of(reason))


def following(found: Cause) -> Cause:
    """The same cause, as one that follows from those before it."""
    return replace(found, remedy="")


def grouped(found: Iterable[Cause]) -> list[Cause]:
    """Causes that differ in their names alone as one, where the first of them stood."""
    merged: dict[tuple[str, str, str, str], Cause] = {}
    for each in found:
        key = (each.subject, each.reason, each.message, each.remedy)
        known = merged.get(key)
        merged[key] = each if known is None else replace(known, names=(*known.names, *each.names))
    return list(merged.values())


def conditions(obj: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """An object's conditions by type."""
    return {str(each.get("type")): each for each in (obj.get("status") or {}).get("conditions") or ()}

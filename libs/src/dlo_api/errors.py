"""Errors of this package: one base, each kind with a stable code.

A message says what is wrong and where, the hint what to do about it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a manifest.

    Attributes:
        path: dotted path of the field, e.g. `spec.parallelism.tensor`; empty for the document as a whole.
        message: what is wrong, without the path.
        hint: what to change; may be empty.
        line: line of the field in the file, counted from 1; None when unknown.
        rule: name of the admission rule or table entry; empty for anything else.
    """

    path: str
    message: str
    hint: str = ""
    line: int | None = None
    rule: str = ""

    def __str__(self) -> str:
        """Path, message and hint in one line."""
        what = f"{self.path}: {self.message}" if self.path else self.message
        return f"{what} — {self.hint}" if self.hint else what


class ApiError(Exception):
    """Base of everything this package raises on purpose."""

    code: str = "ApiError"

    def __init__(
        self, message: str, *, hint: str = "", code: str | None = None, problems: tuple[Problem, ...] = ()
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.problems = problems
        if code is not None:
            self.code = code

    def __str__(self) -> str:
        """Message and hint in one line (several, when the message lists problems)."""
        return f"{self.message} — {self.hint}" if self.hint else self.message


class ManifestUnreadable(ApiError):
    """The text is not one YAML document that can be read safely."""

    code = "ManifestUnreadable"


class ManifestInvalid(ApiError):
    """The document is YAML but not a valid object: kind, fields, types or bounds."""

    code = "ManifestInvalid"


class RuleViolated(ApiError):
    """The object breaks at least one admission rule; `problems` holds all of them."""

    code = "RuleViolated"


class UnsupportedCombination(ApiError):
    """The object is admitted by the API but not built yet."""

    code = "UnsupportedCombination"


class QuantityInvalid(ApiError):
    """A size string is not a quantity this product takes."""

    code = "QuantityInvalid"


class SchemaUnsupported(ApiError):
    """A model cannot be expressed as a CRD schema; a mistake in the models, found at generation time."""

    code = "SchemaUnsupported"


def combine(kind: type[ApiError], file: str, problems: tuple[Problem, ...]) -> ApiError:
    """One error for all `problems` of `file`: a single line for one, a list with one line each for more."""
    if len(problems) == 1:
        (only,) = problems
        where = f"{file}:{only.line}" if only.line is not None else file
        what = f"{only.path}: {only.message}" if only.path else only.message
        return kind(f"{where}: {what}", hint=only.hint, problems=problems)
    lines = [f"  {f'line {p.line}: ' if p.line is not None else ''}{p}" for p in problems]
    return kind("\n".join([f"{file}: {len(problems)} problems", *lines]), problems=problems)

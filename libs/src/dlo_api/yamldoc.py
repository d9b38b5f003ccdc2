"""One YAML document to JSON values, read as `kubectl` reads it and never trusting the text.

No tags, no second document, no duplicate keys; size, depth and content are bounded after aliases are
expanded, so that neither a bomb nor a deep nest costs more than its text. The document is built from parser
events: nothing recurses and no Python object other than JSON values is made.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, Final

import yaml

from dlo_api.errors import ManifestUnreadable

MAX_BYTES: Final = 262_144
MAX_DEPTH: Final = 64
#: Bound on the document's weight: a value weighs 1, and 1 more for every 8 characters of it.
MAX_WEIGHT: Final = 65_536

_NULL: Final = frozenset({"", "~", "null", "Null", "NULL"})
# As YAML 1.1, which kubectl follows: an unquoted Off is false.
_TRUE: Final = frozenset({"true", "True", "TRUE", "yes", "Yes", "YES", "on", "On", "ON"})
_FALSE: Final = frozenset({"false", "False", "FALSE", "no", "No", "NO", "off", "Off", "OFF"})
_INT: Final = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_OCTAL: Final = re.compile(r"[-+]?0o?[0-7]+")
_RADIX: Final = re.compile(r"[-+]?(0x[0-9a-fA-F]+|0b[01]+)")
_FLOAT: Final = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_UNUSABLE: Final = re.compile("[\\0\ud800-\udfff]")
_STANDARD: Final = "tag:yaml.org,2002:"

Path = tuple[str | int, ...]


@dataclass
class Document:
    """A document's value, and where its parts stand.

    Attributes:
        value: JSON values only.
        lines: line (from 1) of each field, by path.
        words: what was written for plain scalars that are not strings, by path (`Off` for a false).
    """

    value: Any
    lines: dict[Path, int] = field(default_factory=dict)
    words: dict[Path, str] = field(default_factory=dict)

    def line(self, path: Path) -> int | None:
        """Line of the field at `path`, or of the nearest field around it."""
        while path not in self.lines and path:
            path = path[:-1]
        return self.lines.get(path)


@dataclass
class _Open:
    """A collection that is being filled."""

    value: dict[str, Any] | list[Any]
    path: Path
    anchor: str | None
    weight: int = 1
    key: str | None = None


def read_document(text: str, file: str) -> Document:
    """The one document in `text`; `file` names it in errors.

    Raises:
        ManifestUnreadable: anything that keeps it from being one plain document; names the line.
    """
    if len(text) > MAX_BYTES or len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise ManifestUnreadable(f"{file} is larger than {MAX_BYTES // 1024} KiB", hint="give a manifest")
    if "\0" in text:
        line = text[: text.index("\0")].count("\n") + 1
        raise ManifestUnreadable(f"{file}:{line}: a NUL byte, so not a text file", hint="give a manifest")
    try:
        return _Builder(file).build(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{file}:{mark.line + 1}" if mark is not None else file
        raise ManifestUnreadable(f"{where}: not YAML: {error.problem}", hint="correct the line") from error
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        raise ManifestUnreadable(
            f"{file}:{line}: not YAML: a character that YAML does not allow (#x{error.character:04x})",
            hint="remove it",
        ) from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # The scanner lets chr() of an escape like \\UFFFFFFFF fail as it may.
        raise ManifestUnreadable(f"{file}: not YAML: {error}", hint="correct the file") from error


class _Builder:
    def __init__(self, file: str) -> None:
        self.file = file
        self.document = Document(None)
        self.stack: list[_Open] = []
        self.anchors: dict[str, tuple[Any, int]] = {}
        self.weight = 0

    def build(self, text: str) -> Document:
        documents = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            line = event.start_mark.line + 1 if event.start_mark is not None else 1
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise self._refuse(line, "a second document", "give one object a file")
            elif isinstance(event, yaml.ScalarEvent):
                self._scalar(event, line)
            elif isinstance(event, yaml.AliasEvent):
                self._alias(event, line)
            elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
                self._open(event, line)
            elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
                self._close(line)
        if not documents:
            raise ManifestUnreadable(f"{self.file} is empty", hint="give a manifest")
        return self.document

    def _refuse(self, line: int, what: str, hint: str) -> ManifestUnreadable:
        return ManifestUnreadable(f"{self.file}:{line}: {what}", hint=hint)

    def _count(self, line: int, weight: int) -> None:
        self.weight += weight
        if self.weight > MAX_WEIGHT:
            raise self._refuse(line, "too much content once aliases are expanded", "write a smaller file")

    def _path(self) -> Path:
        """Path of the value that comes next."""
        if not self.stack:
            return ()
        top = self.stack[-1]
        return (*top.path, len(top.value) if isinstance(top.value, list) else top.key or "")

    def _add(self, value: Any, weight: int, line: int) -> None:
        """Puts a finished value where it belongs; a mapping takes it as a key when it waits for one."""
        if not self.stack:
            self.document.value = value
            return
        top = self.stack[-1]
        top.weight += weight
        if isinstance(top.value, list):
            top.value.append(value)
        elif top.key is None:
            self._key(top, value, line)
        else:
            top.value[top.key] = value
            top.key = None

    def _key(self, top: _Open, key: Any, line: int) -> None:
        if not isinstance(key, str):
            raise self._refuse(line, f"a key that is not a string ({json.dumps(key)[:32]})", "quote it")
        if key == "<<":
            raise self._refuse(line, "a merge key (<<)", "write the fields out")
        if isinstance(top.value, dict) and key in top.value:
            raise self._refuse(line, f"the key {key!r} stands twice in the same map", "remove one of the two")
        top.key = key
        self.document.lines[(*top.path, key)] = line

    def _scalar(self, event: yaml.ScalarEvent, line: int) -> None:
        weight = 1 + len(event.value) // 8
        self._count(line, weight)
        path = self._path()
        top = self.stack[-1] if self.stack else None
        waits_for_key = top is not None and isinstance(top.value, dict) and top.key is None
        value = self._resolve(event, line)
        if not waits_for_key:
            self.document.lines.setdefault(path, line)
            if not isinstance(value, str):
                self.document.words[path] = event.value
        self._keep(event.anchor, value, weight)
        self._add(value, weight, line)

    def _resolve(self, event: yaml.ScalarEvent, line: int) -> Any:
        text, tag = event.value, event.tag
        if _UNUSABLE.search(text):
            raise self._refuse(line, "a string with a NUL byte or half a character", "remove it")
        if tag in {"!", f"{_STANDARD}str"} or (tag is None and event.style is not None):
            return text
        if tag is not None and tag not in {f"{_STANDARD}{word}" for word in ("int", "float", "bool", "null")}:
            raise self._refuse(line, f"the tag {tag}", "remove it; plain values are enough")
        return self._plain(text, line)

    def _plain(self, text: str, line: int) -> Any:
        if text in _NULL:
            return None
        if text in _TRUE or text in _FALSE:
            return text in _TRUE
        if len(text) > 64:
            return text
        number: int | float
        if _INT.fullmatch(text):
            number = int(text)
        elif _OCTAL.fullmatch(text):
            number = int(text.replace("o", ""), 8)
        elif _RADIX.fullmatch(text):
            number = int(text, 0)
        elif _FLOAT.fullmatch(text):
            number = float(text)
        else:
            return text
        if not -(2**63) <= number < 2**63:
            raise self._refuse(line, f"the number {text} is out of range", "give a smaller one")
        return number

    def _open(self, event: yaml.MappingStartEvent | yaml.SequenceStartEvent, line: int) -> None:
        self._count(line, 1)
        if len(self.stack) >= MAX_DEPTH:
            raise self._refuse(line, f"more than {MAX_DEPTH} levels deep", "write a flatter file")
        if event.tag is not None and event.tag not in {"!", f"{_STANDARD}map", f"{_STANDARD}seq"}:
            raise self._refuse(line, f"the tag {event.tag}", "remove it; plain values are enough")
        top = self.stack[-1] if self.stack else None
        if top is not None and isinstance(top.value, dict) and top.key is None:
            raise self._refuse(line, "a key that is a list or a map", "give keys as plain words")
        path = self._path()
        self.document.lines.setdefault(path, line)
        mapping = isinstance(event, yaml.MappingStartEvent)
        self.stack.append(_Open({} if mapping else [], path, event.anchor))

    def _close(self, line: int) -> None:
        closed = self.stack.pop()
        self._keep(closed.anchor, closed.value, closed.weight)
        self._add(closed.value, closed.weight, line)

    def _keep(self, anchor: str | None, value: Any, weight: int) -> None:
        if anchor is not None:
            self.anchors[anchor] = (value, weight)

    def _alias(self, event: yaml.AliasEvent, line: int) -> None:
        if event.anchor not in self.anchors:
            what = f"the alias *{event.anchor} has no finished anchor before it"
            raise self._refuse(line, what, "write it out")
        value, weight = self.anchors[event.anchor]
        self._count(line, weight)
        if not isinstance(value, dict | list):
            self.document.lines.setdefault(self._path(), line)
        self._add(value, weight, line)

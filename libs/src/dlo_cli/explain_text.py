"""An explanation for people: readable at 80 columns, colours only on a terminal. Decides nothing."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from typing import Final

from rich.text import Text

from dlo_cli.causes import Cause
from dlo_cli.console import human_bytes
from dlo_cli.errors import printable
from dlo_cli.explanation import Backing, Explanation
from dlo_cli.nodes import EntryRow, NodeRow
from dlo_cli.pods import EngineRow

#: More nodes or engines than these are counted, the JSON has them all.
MOST_ROWS: Final = 12
#: No column of a table is cut below this.
_NARROWEST: Final = 10
_GOOD: Final = "green"
_BAD: Final = "red"
_DO: Final = "cyan"
_QUIET: Final = "dim"
_STYLES: Final = {"Ready": _GOOD, "Failed": _BAD, "Quarantined": _BAD, "Failing": _BAD}


def lines(found: Explanation, width: int) -> Iterator[Text]:
    """The lines, none wider than `width` columns where words allow."""
    head = f"{found.name} in namespace {found.namespace} {found.summary}"
    for line in wrapped(head, width, "", "  "):
        yield Text(line, style=f"bold {_GOOD if found.ready else _BAD}")
    if found.backing is not None:
        yield from _plain(_paragraph(found, found.backing), width)
    if found.causes:
        yield Text()
        yield from _causes(found.causes, width)
    if found.current or found.updating:
        yield Text()
        yield from _plain(_revisions(found), width)
    if found.nodes:
        yield Text()
        yield from _nodes(found.nodes, width, several=_several(found))
    if found.engines:
        yield Text()
        yield from _engines(found.engines, width)
    if found.unread:
        yield Text()
        for each in found.unread:
            yield from _plain(f"Not looked at: {each.what}: {each.why}", width, _QUIET)


def _causes(causes: Iterable[Cause], width: int) -> Iterator[Text]:
    """Roots numbered, each with what to do; what follows from them below them."""
    number = 0
    for each in causes:
        if each.follows:
            yield from (
                Text(line, style=_QUIET) for line in wrapped(f"   so {each.text}", width, "", "      ")
            )
            continue
        number += 1
        yield from (Text(line) for line in wrapped(f"{number}. {each.text}", width, "", "   "))
        yield from (Text(line, style=_DO) for line in wrapped(f"→ {each.remedy}", width, "   ", "     "))


def _paragraph(found: Explanation, backing: Backing) -> str:
    size = f", {human_bytes(backing.bytes_per_node)} a node" if backing.bytes_per_node is not None else ""
    entries = f"{len(backing.entries)} entries ({', '.join(backing.entries)}){size}"
    holders = f", held by {_named(backing.nodes)}" if backing.nodes else ""
    if found.replicas == 0:
        return f"No engine was asked for; {entries} stay warm{holders}."
    kind = backing.kind if backing.kind not in (None, "Unreported") else "a backing that no engine has named"
    code = f" (fallback {backing.fallback_code})" if backing.fallback_code else ""
    engines = f"{found.ready_replicas or 0} of {found.replicas} engines serve"
    where = f" on {_named(backing.engines)}" if backing.engines else ""
    saved = (
        f" A node saves up to {human_bytes(backing.saved_bytes_per_node)} that private copies would take."
        if backing.saved_bytes_per_node
        else ""
    )
    return f"{engines}{where} from {kind}{code}: {entries}{holders}.{saved}"


def _named(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown


def _revisions(found: Explanation) -> str:
    if not found.current:
        return f"Revision {found.updating} is being prepared; none serves yet."
    if not found.updating or found.updating == found.current:
        return f"Revision {found.current} serves."
    return f"Revision {found.current} serves, {found.updating} is being warmed or rolled out."


def _several(found: Explanation) -> bool:
    """Whether the entries are of more than one revision, so that each must say of which."""
    return len({entry.revision for row in found.nodes for entry in row.entries}) > 1


def _nodes(rows: tuple[NodeRow, ...], width: int, *, several: bool) -> Iterator[Text]:
    worst_first = sorted(rows, key=lambda row: (row.whole and row.agent in ("Alive", "Unknown"), row.name))
    for row in worst_first[:MOST_ROWS]:
        agent = {"Alive": "agent alive", "Late": "heartbeat stopped", "Silent": "no agent"}.get(row.agent, "")
        free = f"{human_bytes(row.free_bytes)} free" if row.free_bytes is not None else ""
        facts = ", ".join(part for part in (agent, row.root, free) if part)
        yield from (
            Text(line, style="bold") for line in wrapped(f"Node {row.name}: {facts}", width, "", "  ")
        )
        table = [["ENTRY", "PHASE", "PROGRESS", "REASON"], *(_cells(entry, several) for entry in row.entries)]
        yield from _table(table, width)
    if len(rows) > MOST_ROWS:
        yield Text(f"… and {len(rows) - MOST_ROWS} more nodes: -o json has them all", style=_QUIET)


def _cells(entry: EntryRow, several: bool) -> list[str]:
    name = f"{entry.what} ({entry.revision.lower()})" if several and entry.revision != "Both" else entry.what
    return [name, entry.phase, _progress(entry), entry.reason or "–"]


def _progress(entry: EntryRow) -> str:
    if entry.bytes is None:
        return "–"
    if entry.phase == "Ready" or entry.done_bytes is None:
        return human_bytes(entry.bytes)
    percent = 100 * entry.done_bytes // max(1, entry.bytes)
    return f"{percent} % of {human_bytes(entry.bytes)}"


def _engines(rows: tuple[EngineRow, ...], width: int) -> Iterator[Text]:
    worst_first = sorted(rows, key=lambda row: (row.state == "Ready", row.pod))
    yield from _table(
        [
            ["ENGINE", "NODE", "STATE", "BACKING", "REVISION"],
            *(
                [row.pod, row.node or "–", row.state, _backing(row), row.revision or "–"]
                for row in worst_first[:MOST_ROWS]
            ),
        ],
        width,
        indent="",
    )
    if len(rows) > MOST_ROWS:
        yield Text(f"… and {len(rows) - MOST_ROWS} more engines: -o json has them all", style=_QUIET)


def _backing(row: EngineRow) -> str:
    return f"{row.backing} ({row.fallback_code})" if row.fallback_code else row.backing or "–"


def _table(rows: list[list[str]], width: int, indent: str = "  ") -> Iterator[Text]:
    """Columns as wide as they must be; where that is too wide, the longest names lose their middle."""
    shown = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in shown) for column in range(len(shown[0]))]
    gaps = len(indent) + 2 * (len(widths) - 1)
    while sum(widths) + gaps > width and max(widths) > _NARROWEST:
        widths[widths.index(max(widths))] -= 1
    for at, row in enumerate(shown):
        line = Text(indent)
        for column, cell in enumerate(row):
            text = _shortened(cell, widths[column])
            last = column == len(row) - 1
            line.append(
                text if last else text.ljust(widths[column]), "bold" if at == 0 else _STYLES.get(cell, "")
            )
            line.append("" if last else "  ")
        yield line


def _shortened(cell: str, width: int) -> str:
    if len(cell) <= width:
        return cell
    tail = (width - 1) // 2
    return f"{cell[: width - 1 - tail]}…{cell[len(cell) - tail :]}"


def _plain(text: str, width: int, style: str = "") -> Iterator[Text]:
    yield from (Text(line, style=style) for line in wrapped(text, width, "", "  "))


def wrapped(text: str, width: int, first: str, later: str) -> list[str]:
    """A text of any origin in lines of at most `width` columns, words kept whole."""
    return textwrap.wrap(
        printable(text),
        width,
        initial_indent=first,
        subsequent_indent=later,
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
    )

"""A results page: what ran, where, when, and the figures with their ratios."""

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

REPO = Path(__file__).parents[1]
RESULTS = REPO / "benchmarks/results"


@dataclass(frozen=True)
class Row:
    """One line of the table: ours and what it is compared with, as medians in one unit, and their ratio."""

    what: str
    unit: str
    ours: float
    theirs: float
    peer: str
    ratio: float
    better: str


def rate(what: str, ours: Sequence[float], theirs: Sequence[float], peer: str) -> Row:
    """Rates in GB/s: the ratio is ours over theirs, more is better."""
    mine, other = median(ours), median(theirs)
    return Row(what, "GB/s", mine, other, peer, mine / other, "higher")


def duration(what: str, ours: Sequence[float], theirs: Sequence[float], peer: str) -> Row:
    """Times in ms: the ratio is theirs over ours, more is better."""
    mine, other = median(ours) * 1000, median(theirs) * 1000
    return Row(what, "ms", mine, other, peer, other / mine, "higher")


def hardware() -> dict[str, str]:
    """Processor, cores, memory, kernel."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "processor": model,
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory:.0f} GiB",
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
    }


def commit() -> str:
    """The commit that ran, marked when the tree differs from it."""
    git = ["git", "-C", str(REPO)]
    head = subprocess.run(
        [*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    dirty = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True).stdout.strip()  # noqa: PLW1510
    return head + ("+changes" if dirty else "")


def write(
    name: str, title: str, command: str, subject: Mapping[str, str], rows: Sequence[Row], notes: Sequence[str]
) -> Path:
    """Write `<date>-<name>.md` and `.json`; returns the page."""
    now = datetime.now(UTC)
    facts = {
        **subject,
        **hardware(),
        "commit": commit(),
        "date": now.strftime("%Y-%m-%d %H:%M UTC"),
        "command": command,
    }
    lines = [f"# {title}", "", "| | |", "|---|---|"]
    lines += [
        f"| {key} | {f'`{value}`' if key in {'command', 'commit'} else value} |"
        for key, value in facts.items()
    ]
    lines += ["", "| what | unit | DLO | compared with | its figure | ratio |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {row.what} | {row.unit} | {row.ours:.3g} | {row.peer} | {row.theirs:.3g} | {row.ratio:.2f} |"
        for row in rows
    ]
    lines += [
        "",
        "Ratio: how many times better than what it is compared with; medians of the runs in one process order.",
        "",
    ]
    lines += [f"- {note}" for note in notes]
    RESULTS.mkdir(parents=True, exist_ok=True)
    page = RESULTS / f"{now:%Y-%m-%d}-{name}.md"
    page.write_text("\n".join(lines).rstrip() + "\n")
    document = {"facts": facts, "rows": [row.__dict__ for row in rows], "notes": list(notes)}
    page.with_suffix(".json").write_text(json.dumps(document, indent=2) + "\n")
    return page

"""``dlo plan``: what a manifest will take on this machine, from headers alone."""

import json
from enum import StrEnum
from pathlib import Path

import yaml
from dlo_api.plan import compute_plan
from dlo_api.planned import Plan
from dlo_api.v1alpha1 import DiffusionDeployment
from rich.table import Table

from dlo_cli.console import Console, human_bytes
from dlo_cli.errors import printable
from dlo_cli.facts import model_facts, residency
from dlo_cli.manifest import open_manifest_model, read_manifest
from dlo_cli.model import Model
from dlo_cli.node_file import read_nodes
from dlo_cli.on_node import Verdict, judge_node

GROUPS = {"Data": "data-parallel ranks", "Sequence": "sequence-parallel ranks"}


class Format(StrEnum):
    """How a plan is printed."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


def plan(
    file: Path,
    roots: dict[str, Path],
    layout: Path | None,
    output: Format,
    console: Console,
    nodes: Path | None = None,
) -> None:
    """Print the plan of a manifest: on this machine, or on the nodes of a file.

    Raises what `dlo run` would raise before it builds anything.
    """
    manifest = read_manifest(file)
    given = read_nodes(nodes) if nodes is not None else None
    made = plan_of(manifest, open_manifest_model(manifest, file, roots, layout))
    verdicts = (
        [
            judge_node(
                manifest.spec,
                manifest.metadata.namespace or "default",
                made,
                node,
                given.caches.get(node["metadata"]["name"]),
            )
            for node in given.nodes
        ]
        if given is not None
        else None
    )
    document = made.to_json()
    if verdicts is not None:
        document["nodes"] = [verdict.to_json() for verdict in verdicts]
    if output is Format.JSON:
        console.result(json.dumps(document, indent=2))
    elif output is Format.YAML:
        console.result(yaml.safe_dump(document, sort_keys=False).rstrip())
    else:
        _print(made, manifest.metadata.name, console)
        for verdict in verdicts or ():
            console.result("")
            _print_verdict(verdict, console)


def plan_of(manifest: DiffusionDeployment, model: Model) -> Plan:
    """The plan of a manifest's engine, from the headers of its model."""
    facts = model_facts(model, manifest.spec)
    return compute_plan(manifest.spec, facts, residency(manifest.spec, facts))


def _print(made: Plan, name: str, console: Console) -> None:
    count = f"{len(made.ranks)} rank{'s' if len(made.ranks) > 1 else ''}"
    console.result(f"{name}: {made.architecture} on {made.device}, {count}, backing {made.backing}")
    console.result("")
    ranks = _table("RANK", "COORDINATE", "REPLICA", "DEVICE" if made.device == "Cuda" else "MEMORY", "PINNED")
    for rank in made.ranks:
        held = rank.device_bytes if made.device == "Cuda" else rank.private_host_bytes
        ranks.add_row(
            str(rank.global_rank),
            rank.coordinate,
            str(rank.data_rank),
            human_bytes(held),
            human_bytes(rank.locked_bytes),
        )
    console.table(ranks)
    console.result("")
    entries = _table("ENTRY", "COMPONENT", "COORDINATE", "SIZE")
    for entry in made.entries:
        what = entry.component or "rest of the pipeline"
        entries.add_row(entry.kind, what, entry.coordinate or "–", human_bytes(entry.bytes))
    console.table(entries)
    console.result("")
    rows = [
        ("Disk", made.disk_bytes, "entries on this node, each once"),
        ("Host memory, shared", made.shared_host_bytes, "page cache: entries mapped by all ranks, each once"),
        (
            "Host memory, private",
            made.private_host_bytes,
            "what the ranks allocate; activations and libraries come on top",
        ),
        ("Host memory, pinned", made.locked_bytes, "part of the above that is locked for copies"),
    ]
    if made.device == "Cuda":
        rows.append(("Device memory", made.device_bytes, "the fullest rank; activations come on top"))
    for step in made.steps:
        shared = (
            f", shared by {made.group_size} {GROUPS.get(made.group_kind, 'ranks')}"
            if made.group_size > 1
            else ""
        )
        rows.append((f"Copied a step, {step.component}", step.streamed_bytes, f"by every rank{shared}"))
    totals = Table(box=None, pad_edge=False, show_header=False)
    totals.add_column(no_wrap=True)
    totals.add_column(justify="right", no_wrap=True)
    totals.add_column()
    for label, size, words in rows:
        totals.add_row(label, human_bytes(size), words)
    console.table(totals)


def _print_verdict(verdict: Verdict, console: Console) -> None:
    fits = "an engine can run there" if verdict.eligible else "no engine can run there"
    room = f", {verdict.engines} by its GPUs" if verdict.engines and verdict.eligible else ""
    console.result(printable(f"Node {verdict.node}: {fits}{room}"))
    for each in verdict.refused:
        console.result(printable(f"  {each.field_path}: {each.message} — {each.hint}"))
    needs = _table("NEEDS", "NEEDED", "HAS", "FITS", "NOTE")
    for need in verdict.needs:
        shown = human_bytes if need.unit == "bytes" else str
        needs.add_row(
            need.name,
            shown(need.needed) if need.needed is not None else "–",
            shown(need.has) if need.has is not None else "unknown",
            {True: "yes", False: "no", None: "?"}[need.fits],
            printable(need.note),
        )
    console.table(needs)


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(
            title,
            justify="right" if title in {"SIZE", "DEVICE", "MEMORY", "PINNED", "NEEDED", "HAS"} else "left",
            no_wrap=True,
        )
    return table

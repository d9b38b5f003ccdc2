"""`python benchmarks/scale.py`: the control plane at size, on one machine.

Real: etcd, kube-apiserver, controller manager, scheduler, our operator as its own process with its real command
line. Simulated: nodes, kubelets and pods (KWOK), agents (`scale_agents.py`). Every deployment has a model of its own
whose entries lie on ten nodes. Measured: time to settle from nothing, writes by the audit log, the time from one
change to the children that show it, writes at rest, memory and processor time of the operator, and a restart.
Stopped early (ctrl-C, SIGTERM, `--most`), it writes the page with what it has.
"""

import argparse
import contextlib
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import report
from dlo_kube.kinds import DEPLOYMENT, DIFFUSION_DEPLOYMENT, NODE_WEIGHT_CACHE, POD_DISRUPTION_BUDGET
from scale_stage import (
    SYSTEM,
    TEAM,
    Audit,
    Usage,
    View,
    control_plane,
    deployment,
    engines,
    metric,
    node,
    operator_command,
    percentile,
    running,
    spread,
)

NODES_EACH = 10
GOALS = {
    "change to children, p99": "< 1 s",
    "writes at rest": "0",
    "peak memory": "< 300 MB",
    "restart": "< 20 s",
}


def is_ready(obj: dict[str, Any]) -> bool:
    """Whether it is ready at its newest generation."""
    return any(
        c["type"] == "Ready"
        and c["status"] == "True"
        and c["observedGeneration"] == obj["metadata"]["generation"]
        for c in (obj.get("status") or {}).get("conditions", ())
    )


def quiet(audit: Audit, seconds: float, most: float) -> Counter[tuple[str, str]]:
    """Waits until the operator has written nothing for so long; all writes until then."""
    found, end, last = Counter[tuple[str, str]](), time.monotonic() + most, time.monotonic()
    while time.monotonic() - last < seconds and time.monotonic() < end:
        time.sleep(1)
        new = audit.writes()
        found += new
        if any(who == "operator" and what != "patch leases" and "renewed" not in what for who, what in new):
            last = time.monotonic()
    return found


def change(gateway: Any, views: dict[str, View], name: str, number: int) -> float:
    """Makes one change as a user does; the seconds until every child that it concerns shows it."""
    obj = views["ddep"].objects[name]
    again = obj["spec"]["replicas"] == 1
    spec: dict[str, Any] = {"replicas": 2 if again else 1}
    if number % 2:
        spec = {"engine": {"extraEnv": [{"name": "ROUND", "value": str(number)}]}}
    body = {key: obj[key] for key in ("apiVersion", "kind")}
    began = time.monotonic()
    gateway.apply({**body, "metadata": {"name": name, "namespace": TEAM}, "spec": spec}, manager="user")

    def shown(found: Any) -> bool:
        child = found[name]["spec"]
        if "replicas" in spec:
            return bool(child["replicas"] == spec["replicas"])
        env = child["template"]["spec"]["containers"][0].get("env", ())
        return {"name": "ROUND", "value": str(number)} in env

    end = views["deploy"].until(shown, 60)
    if spec.get("replicas") == 2:
        end = max(end, views["pdb"].until(lambda found: name in found, 60))
    return end - began


def settled(given: argparse.Namespace, views: dict[str, View], usage: Usage, began: float) -> float:
    """Waits until every deployment is ready, and tells how far they are; the seconds since `began`."""
    told = began
    while True:
        found = views["ddep"].now()
        ready = sum(map(is_ready, found))
        now = time.monotonic()
        if ready == given.deployments:
            return now - began
        if now - told >= 10:
            told = now
            rss, seconds = usage.now()
            print(
                f"{now - began:.0f} s: {ready} of {len(found)} ready, {rss:.0f} MB, {seconds:.1f} s",
                flush=True,
            )
        assert now - began < given.limit, f"{ready} of {given.deployments} ready after {given.limit:.0f} s"
        assert usage.alive(), "the operator has ended; see operator.log (--folder keeps it)"
        time.sleep(0.5)


def measure(given: argparse.Namespace, folder: Path, figures: dict[str, Any]) -> None:
    """Runs everything; puts in the figures by name as they come."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(control_plane(folder))
        stack.enter_context(engines())
        gateway = server.gateway(user_agent="user")
        views = {
            name: View(server.gateway(user_agent="bench"), kind)
            for name, kind in (
                ("ddep", DIFFUSION_DEPLOYMENT),
                ("deploy", DEPLOYMENT),
                ("pdb", POD_DISRUPTION_BUDGET),
            )
        }
        for view in views.values():
            view.start()
        spread(range(given.nodes), lambda number: gateway.create(node(number)))
        agents = [sys.executable, str(Path(__file__).with_name("scale_agents.py"))]
        agents += ["--kubeconfig", str(server.kubeconfig), "--namespace", SYSTEM]
        stack.enter_context(running("agents", agents, folder))
        audit = Audit(server.audit_log)
        with running("operator", operator_command(server, "operator-0"), folder) as process:
            usage = Usage(process)
            known = time.monotonic() + 600
            while len(gateway.heads(NODE_WEIGHT_CACHE).items) < given.nodes:
                assert time.monotonic() < known, "the operator has not made a NodeWeightCache for every node"
                time.sleep(1)
            figures["nodes known"] = given.nodes
            say("nodes", quiet(audit, 10, 600), usage)
            # Until the operator has heard of every heartbeat: it looks four times a minute.
            time.sleep(20)
            began = time.monotonic()
            each = min(NODES_EACH, given.nodes)
            spread(range(given.deployments), lambda number: gateway.create(deployment(number, each)))
            figures["created in, s"] = time.monotonic() - began
            figures["all Ready after, s"] = settled(given, views, usage, began)
            writes = quiet(audit, 20, 300)
            mine = {what: count for (who, what), count in sorted(writes.items()) if who == "operator"}
            figures["writes of the operator from nothing to Ready"] = mine
            figures["writes for each deployment"] = each_write(mine, given)
            figures["memory after settling, MB"], figures["processor time to settle, s"] = usage.now()
            say("settled", writes, usage)
            figures["change to children, s"] = changes(given, gateway, views)
            say("changed", audit.writes(), usage)
            quiet(audit, 20, 300)
            before = usage.now()[1]
            time.sleep(given.rest)
            rest = audit.writes()
            figures["writes at rest"] = {
                f"{who}: {what}": n for (who, what), n in sorted(rest.items()) if who != "others"
            }
            figures["processor at rest, share of one core"] = (usage.now()[1] - before) / given.rest
            figures["memory at rest, MB"] = usage.now()[0]
            figures["peak memory, MB"] = usage.peak / 1e6
            say("rested", rest, usage)
            process.kill()
            process.wait()
        figures |= restart(given, server, audit, folder)


def each_write(mine: dict[str, int], given: argparse.Namespace) -> dict[str, float]:
    """Writes by what they are about: the deployment itself and its children, or what a node shall hold for it.

    Of a node's objects, so many as there are nodes that hold the deployment are work that has to be written, each
    a first time with its source, with its entries, and with its label; a burst shares them between deployments.
    """
    parts = {
        "children": ("patch deployments", "patch services", "patch poddisruptionbudgets"),
        "status": ("patch diffusiondeployments/status",),
        "events": ("create events",),
        "node caches": ("patch nodeweightcaches",),
        "node labels": ("patch nodes",),
    }
    found = {
        part: sum(mine.get(what, 0) for what in whats) / given.deployments for part, whats in parts.items()
    }
    return {"all": sum(mine.values()) / given.deployments, **found}


def changes(given: argparse.Namespace, gateway: Any, views: dict[str, View]) -> dict[str, float]:
    """Single changes, one after the other."""
    chance, taken = random.Random(1), []
    names = sorted(views["ddep"].objects)
    for number in range(given.changes):
        taken.append(change(gateway, views, chance.choice(names), number))
        if number % 50 == 49:
            print(f"{number + 1} changes, the longest {max(taken):.2f} s", flush=True)
        time.sleep(given.pause)
    return {
        "p50": percentile(taken, 0.5),
        "p99": percentile(taken, 0.99),
        "longest": max(taken),
        "changes": len(taken),
    }


def restart(given: argparse.Namespace, server: Any, audit: Audit, folder: Path) -> dict[str, Any]:
    """Killed and started again under the same name, as a container is."""
    audit.writes()
    began, wanted = time.monotonic(), given.deployments + given.nodes
    with running("operator", operator_command(server, "operator-0"), folder) as process:
        usage = Usage(process)
        while metric("dlo_reconcile_total") < wanted:
            assert time.monotonic() - began < 300, "the operator has not looked at everything within 300 s"
            assert usage.alive(), "the operator has ended; see operator.log (--folder keeps it)"
            time.sleep(0.2)
        seconds = time.monotonic() - began
        writes = quiet(audit, 20, 120)
        say("restarted", writes, usage)
        return {
            "restart until all was looked at, s": seconds,
            "writes after a restart": {
                what: n
                for (who, what), n in sorted(writes.items())
                if who == "operator" and "renewed" not in what
            },
            "memory after a restart, MB": usage.now()[0],
        }


def say(what: str, writes: Counter[tuple[str, str]], usage: Usage) -> None:
    """Progress, for the one who waits."""
    mine = {key[1]: count for key, count in sorted(writes.items()) if key[0] == "operator"}
    rss, seconds = usage.now()
    print(f"{what}: {rss:.0f} MB, {seconds:.1f} s of processor time, writes {mine}", flush=True)


def write(given: argparse.Namespace, command: str, figures: dict[str, Any]) -> Path:
    """The page of results."""
    now = datetime.now(UTC)
    commit = given.commit or report.commit()
    facts = {
        **report.hardware(),
        "commit": commit,
        "date": f"{now:%Y-%m-%d %H:%M UTC}",
        "command": f"`{command}`",
    }
    if given.note:
        facts["note"] = given.note
    lines = [
        f"# Control plane at {given.nodes} nodes and {given.deployments} deployments",
        "",
        "| | |",
        "|---|---|",
    ]
    lines += [f"| {key} | {value} |" for key, value in facts.items()]
    lines += ["", "| what | measured |", "|---|---|"]
    lines += [f"| {key} | {_shown(value)} |" for key, value in figures.items()]
    lines += [
        "",
        "Goals at 1,000 and 1,000: " + ", ".join(f"{key} {value}" for key, value in GOALS.items()) + ".",
        "",
    ]
    lines += [line.strip() for line in (__doc__ or "").split("\n\n", 1)[1].splitlines()]
    report.RESULTS.mkdir(parents=True, exist_ok=True)
    page: Path = report.RESULTS / f"{now:%Y-%m-%d}-scale-{given.nodes}-{given.deployments}.md"
    page.write_text("\n".join(lines).rstrip() + "\n")
    page.with_suffix(".json").write_text(json.dumps({"facts": facts, "figures": figures}, indent=2) + "\n")
    return page


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(item)}" for key, item in value.items()) or "none"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main() -> None:
    """Parses, measures, writes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--nodes", type=int, default=1000)
    add("--deployments", type=int, default=1000)
    add("--changes", type=int, default=200, help="single changes whose way to the children is timed")
    add("--pause", type=float, default=0.5, help="seconds between them")
    add("--rest", type=float, default=120.0, help="seconds at rest in which writes are counted")
    add("--limit", type=float, default=1800.0, help="longest time to settle, in seconds")
    add("--most", type=int, default=5400, help="longest time of all, in seconds; what was measured is kept")
    add("--folder", type=Path, help="keep logs and data here")
    add("--commit", default="", help="what ran, where it is not a checkout")
    add("--note", default="", help="a line for the page, e.g. what else ran on the machine")
    given = parser.parse_args()
    told = ("nodes", "deployments", "changes", "pause", "rest", "limit")
    command = " ".join(
        ["python benchmarks/scale.py", *(f"--{name} {getattr(given, name):g}" for name in told)]
    )
    figures: dict[str, Any] = {}
    for what in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(what, _stop)
    signal.alarm(given.most)
    with contextlib.ExitStack() as stack:
        folder = given.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dlo-scale-")))
        try:
            measure(given, folder, figures)
        except BaseException as error:
            figures["stopped before the end"] = f"{type(error).__name__}: {error}".replace("\n", " ")
            raise
        finally:
            signal.alarm(0)
            if len(figures) > 1 or "stopped before the end" not in figures:
                print(write(given, command, figures))


def _stop(number: int, _frame: Any) -> None:
    raise Stopped(f"by {signal.Signals(number).name}")


class Stopped(Exception):
    """Told to end, or out of time."""


if __name__ == "__main__":
    main()

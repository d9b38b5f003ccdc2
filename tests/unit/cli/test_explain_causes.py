"""Every cause is found at its root, and the conditions that repeat it stand as what follows from it."""

from __future__ import annotations

from typing import Any

import pytest
from dlo_api import conditions as names
from dlo_api.advice import ADVICE
from dlo_cli.remedies import REMEDIES
from dlo_kube.kinds import DEPLOYMENT, LEASE, NODE, NODE_WEIGHT_CACHE, POD
from unit.cli.explained import SYSTEM, beat, edit, explained, follows, pod_status, roots, text
from unit.operator import causes
from unit.operator.world import NAMESPACE, World


def settled(setup: Any = None) -> World:
    """A world in which a cause was made and everybody acted."""
    world = World()
    (setup or causes.with_())(world)
    world.settle()
    beat(world)
    return world


@pytest.mark.parametrize(
    "case", causes.CASES, ids=[f"{number}-{case[2]}" for number, case in enumerate(causes.CASES)]
)
def test_whatever_is_not_ready_has_a_cause_with_a_remedy(case: tuple[str, str, str, Any]) -> None:
    """For every reason of the API: a root where it is not ready, something to do at each, 80 columns."""
    world = settled(case[3])
    found = explained(world)
    assert found.ready == (world.condition(names.READY)[0] == "True")
    assert found.ready or roots(found), text(found)
    for cause in found.causes:
        assert cause.message
        assert cause.reason
        assert cause.follows or len(cause.remedy) > 5, cause
    assert "None" not in text(found).replace("quantization to None", "")
    assert max(map(len, text(found).splitlines())) <= 80


@pytest.mark.parametrize(
    "reason", sorted({*ADVICE, *(r for k in names.NODE_REASONS.values() for r in k[1:])})
)
def test_every_reason_has_something_to_do(reason: str) -> None:
    """Nobody is left with a word alone."""
    assert REMEDIES[reason]


@pytest.mark.parametrize(
    ("setup", "expected", "behind"),
    [
        (
            causes.with_(storage="RootNotMounted"),
            [("Node", "RootNotMounted")],
            ["RootNotMounted", "Warming", "PodsPending"],
        ),
        (causes.with_(broken="BuildFailed"), [("Node", "BuildFailed")], ["BuildFailed", "PodsPending"]),
        (causes.lost, [("Node", "NodeLost")], ["NodeLost"]),
        (causes.other_bytes, [("Node", "SourceMismatch")], ["SourceMismatch", "Warming", "PodsPending"]),
        (causes.pods(unschedulable=True), [("Pod", "Unschedulable")], ["PodsPending", "RollingOut"]),
        (
            causes.pods(crash="PortInUse: port 8000 is taken — choose another serving.port"),
            [("Pod", "PortInUse")],
            ["PodsCrashing", "RollingOut"],
        ),
        (causes.suspended, [("DiffusionDeployment", "Suspended")], []),
        (causes.uneven_heads, [("DiffusionDeployment", "InvalidTopology")], []),
        (
            causes.with_({"spec.placement.nodeSelector": {"gen": "h200"}}),
            [("Node", "NotEligible")],
            ["AgentNotReady", "NoEligibleNodes", "Warming", "PodsPending"],
        ),
    ],
)
def test_the_chain_begins_at_the_root(setup: Any, expected: list[tuple[str, str]], behind: list[str]) -> None:
    """Node or pod first; conditions after it, with nothing to do."""
    found = explained(settled(setup))
    assert roots(found) == expected
    assert follows(found) == behind
    assert found.causes[0].reason == expected[0][1]


def test_the_engines_own_remedy_is_taken() -> None:
    """What a container says after the dash is what to do."""
    found = explained(
        settled(causes.pods(crash="PortInUse: port 8000 is taken — choose another serving.port"))
    )
    assert found.causes[0].remedy == "choose another serving.port"
    assert found.causes[0].names == ("digits-1", "digits-2")
    assert "3 restarts: PortInUse: port 8000 is taken" in found.causes[0].message


def test_an_operator_that_never_ran_is_said_first() -> None:
    """Nothing acted, nothing is wrong with the object: the operator is what lacks."""
    world = World()
    world.create()
    found = explained(world)
    assert roots(found)[0] == ("Operator", "OperatorNotRunning")
    assert "install the chart" in found.causes[0].remedy
    assert follows(found)[0] == "NotObserved"
    assert "nothing has acted on it yet" in text(found)


def test_an_operator_that_stopped_is_said_before_a_ready_that_is_old() -> None:
    """Its Lease stands still: what the status says is told as it was."""
    world = settled()
    world.time.seconds += 3600
    for agent in world.agents.values():
        world.cluster.edit(
            LEASE, agent.node, lambda o: o["spec"].update(renewTime=world.time.now().isoformat()), SYSTEM
        )
    found = explained(world)
    assert roots(found) == [("Operator", "OperatorNotRunning")]
    assert "has not moved for 60 minutes" in found.causes[0].message
    edit(world, lambda obj: obj["spec"].update(replicas=3))
    found = explained(world)
    assert not found.ready
    assert [cause.reason for cause in found.causes[:2]] == ["OperatorNotRunning", "NotObserved"]
    assert "generation 2 is the newest, the operator has looked at 1" in text(found)


def test_an_operator_that_gave_its_lease_up() -> None:
    """Stopped in order: nobody holds the Lease."""
    world = settled()
    world.cluster.edit(LEASE, "dlo-operator-leader", lambda o: o["spec"].update(holderIdentity=""), SYSTEM)
    assert roots(explained(world)) == [("Operator", "OperatorNotRunning")]


def test_a_clock_that_is_off_makes_nothing_late() -> None:
    """With kubelets' heartbeats in sight the cluster's own clock counts, not this machine's."""
    world = settled()
    world.cluster.put(
        {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": "node-1", "namespace": "kube-node-lease"},
            "spec": {"renewTime": world.time.now().isoformat()},
        }
    )
    for ahead in (-7200.0, 7200.0):
        found = explained(world, ahead=ahead)
        assert found.ready
        assert found.causes == ()
        assert {row.agent for row in found.nodes} == {"Alive"}
    world.cluster.remove(LEASE, "node-1", "kube-node-lease")
    assert roots(explained(world, ahead=-7200.0)) == []
    assert roots(explained(world, ahead=7200.0))[0] == ("Operator", "OperatorNotRunning")


def test_agents_that_were_never_installed() -> None:
    """No agent anywhere is one cause, not one a node."""
    found = explained(settled(causes.with_(alive=False)))
    assert roots(found)[0] == ("Agent", "AgentNotInstalled")
    assert len(roots(found)) == 1


def test_a_node_that_is_gone_or_not_ready() -> None:
    """The machine itself comes before its agent."""
    world = settled(causes.with_(broken="BuildFailed"))
    ready = {"type": "Ready", "status": "Unknown", "message": "Kubelet stopped posting node status."}
    world.cluster.edit(NODE, "node-1", lambda o: o["status"].update(conditions=[ready]))
    found = explained(world)
    assert [(cause.names, cause.reason) for cause in found.causes if cause.subject == "Node"] == [
        (("node-1",), "NodeLost"),
        (("node-2",), "BuildFailed"),
    ]
    world.cluster.remove(NODE, "node-2")
    assert ("node-2",) in [c.names for c in explained(world).causes if c.reason == "NodeLost"]


@pytest.mark.parametrize(
    ("status", "reason", "words"),
    [
        (
            {"initContainerStatuses": [{"name": "cache-gate", "state": {"running": {}}}]},
            "GateWaits",
            "held: the gate waits",
        ),
        (
            {
                "initContainerStatuses": [
                    {
                        "name": "cache-gate",
                        "restartCount": 1,
                        "state": {"running": {}},
                        "lastState": {
                            "terminated": {
                                "exitCode": 75,
                                "message": "DeadlinePassed: not ready after 3600 s: transformer 0/2: waiting\n",
                            }
                        },
                    }
                ]
            },
            "GateDeadline",
            "the gate's deadline passed: not ready after 3600 s",
        ),
        (
            {
                "containerStatuses": [
                    {
                        "name": "engine",
                        "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such"}},
                    }
                ]
            },
            "ImagePullBackOff",
            "container engine waits: ImagePullBackOff: no such",
        ),
        (
            {
                "containerStatuses": [
                    {
                        "name": "engine",
                        "restartCount": 2,
                        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
                        "lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}},
                    }
                ]
            },
            "OOMKilled",
            "ended for want of memory (exit status 137, 2 restarts)",
        ),
        (
            {"phase": "Failed", "reason": "Evicted", "message": "The node was low on memory."},
            "Evicted",
            "low on memory",
        ),
    ],
)
def test_containers_states(status: dict[str, Any], reason: str, words: str) -> None:
    """Gate and engine container: waiting, held, past the deadline, killed."""
    world = settled()
    pod_status(world, ("digits-1",), {"phase": "Pending", **status})
    found = explained(world)
    (cause,) = [each for each in found.causes if each.subject == "Pod"]
    assert (cause.names, cause.reason) == (("digits-1",), reason)
    assert words in cause.message
    assert cause.follows == (reason == "GateWaits")


def test_a_pod_on_its_way_out_is_no_cause() -> None:
    """It is listed as ending, and nobody has anything to do about it."""
    world = settled()

    def end(pod: dict[str, Any]) -> None:
        pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        ended = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
        pod["status"] = {"containerStatuses": [{"name": "engine", "state": ended}]}

    world.cluster.edit(POD, "digits-1", end, NAMESPACE)
    found = explained(world)
    assert [row.state for row in found.engines] == ["Ending", "Ready"]
    assert roots(found) == []


def test_two_revisions_are_told_apart() -> None:
    """While a new model is warmed: which revision serves, and whose entries lack."""
    world = settled()
    for agent in world.agents.values():
        agent.idle = True
    world.change("spec.parallelism.tensor", 4)
    world.settle()
    beat(world)
    found = explained(world)
    assert found.current
    assert found.updating not in ("", found.current)
    by_revision = {
        revision: {e.phase for row in found.nodes for e in row.entries if e.revision == revision}
        for revision in ("Running", "Updating", "Both")
    }
    assert by_revision == {"Running": {"Ready"}, "Updating": {"Pending"}, "Both": {"Ready"}}
    assert f"Revision {found.current} serves, {found.updating} is being warmed" in " ".join(
        text(found).split()
    )
    assert "transformer 3/4 (updating)" in text(found)
    assert "transformer 1/2 (running)" in text(found)


def test_pods_that_cannot_be_made_are_told_before_the_operator_looks() -> None:
    """The Deployment's own word counts, as when a quota came between."""
    world = settled()
    failure = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: compute"}
    world.cluster.edit(DEPLOYMENT, "digits", lambda o: o["status"]["conditions"].append(failure), NAMESPACE)
    (cause,) = explained(world).causes
    assert (cause.subject, cause.reason, cause.message) == (
        "Deployment",
        "ReplicaFailure",
        failure["message"],
    )


def test_many_nodes_are_counted_and_the_bad_ones_shown() -> None:
    """The text has the nodes with trouble and the number of the others; the document has all."""
    world = World(nodes=20)
    world.agents["node-7"].broken = "BuildFailed"
    world.create(changes={"spec.cache.prewarm": {"scope": "All", "maxParallelNodes": 20}})
    world.settle()
    beat(world)
    found = explained(world)
    assert len(found.nodes) == len(found.to_json()["nodes"]) == 20
    said = text(found)
    assert next(line.split()[1] for line in said.splitlines() if line.startswith("Node ")) == "node-7:"
    assert "… and 8 more nodes" in said


def test_deleting_is_said() -> None:
    """An object that waits for somebody's finalizer."""
    world = settled()
    edit(
        world,
        lambda o: o["metadata"].update(deletionTimestamp="2026-01-01T00:00:00Z", finalizers=["a.example/b"]),
    )
    found = explained(world)
    assert text(found).startswith("digits in namespace team is being deleted\n")
    assert "a.example/b" in found.causes[0].remedy


def test_progress_is_a_share_of_what_there_is_to_build() -> None:
    """Done of all, and nothing where a number is not known."""
    world = settled(causes.with_(idle=True))
    world.cluster.edit(
        NODE_WEIGHT_CACHE,
        "node-1",
        lambda o: o["status"]["entries"][0].update(phase="Building", bytes=8 * 2**20, doneBytes=2 * 2**20),
    )
    (row,) = [row for row in explained(world).nodes if row.name == "node-1"]
    assert sum(entry.phase == "Building" for entry in row.entries) == 1
    assert "Building  25 % of 8.0 MiB" in text(explained(world))
    assert [entry.bytes for entry in row.entries if entry.phase == "Pending"] == [None, None]

"""The operator's settings, parsed once from its command line. Must not read the environment or files."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from dlo_operator.reconcile.inputs import Images, PlanSettings


@dataclass(frozen=True)
class Settings:
    """All of them.

    Attributes:
        plan: what decisions depend on.
        identity: of this process, for the leader's Lease.
        workers: reconciles at the same time.
        resync_seconds: pause between full listings.
        heartbeat_seconds: pause between looks at the heartbeats.
        metrics_port, health_port: 0 for none.
        kubeconfig: path; empty inside a cluster.
    """

    plan: PlanSettings
    identity: str
    workers: int = 12
    resync_seconds: float = 300.0
    heartbeat_seconds: float = 15.0
    metrics_port: int = 9090
    health_port: int = 8080
    kubeconfig: str = ""


def parse(argv: Sequence[str]) -> Settings:
    """The settings that a command line gives; a wrong one exits with 2, as argparse does."""
    parser = argparse.ArgumentParser(
        prog="dlo-operator",
        description="Turn DiffusionDeployments into cache specs and engine pods.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--namespace", required=True, help="namespace of the operator and of the nodes' heartbeats")
    add("--agent-namespace", required=True, help="namespace of the agents and of copied credentials")
    add("--engine-image", required=True, help="image of the Native engine")
    add("--agent-image", required=True, help="image of the agent, which also is the pods' gate")
    add("--image-pull-policy", default="IfNotPresent", choices=("Always", "IfNotPresent", "Never"))
    add("--image-pull-secret", action="append", default=[], metavar="NAME", help="may be repeated")
    add("--hub-endpoint", action="append", default=[], metavar="NAME", help="a hub that sources may name")
    add(
        "--s3-endpoint",
        action="append",
        default=[],
        metavar="NAME",
        help="an S3 endpoint that sources may name",
    )
    add(
        "--gate-deadline-seconds",
        type=int,
        default=3600,
        metavar="N",
        help="longest wait of a pod for its entries",
    )
    add(
        "--identity", required=True, help="name of this process among the operator's replicas: its pod's name"
    )
    add(
        "--workers",
        type=int,
        default=12,
        metavar="N",
        help="reconciles at the same time; each waits for the API server most of the time",
    )
    add("--resync-seconds", type=float, default=300.0, metavar="S")
    add("--heartbeat-seconds", type=float, default=15.0, metavar="S")
    add("--metrics-port", type=int, default=9090, metavar="N")
    add("--health-port", type=int, default=8080, metavar="N")
    add("--kubeconfig", default="", metavar="FILE", help="outside a cluster")
    given = parser.parse_args(list(argv))
    if given.workers < 1:
        parser.error("--workers must be at least 1")
    return Settings(
        plan=PlanSettings(
            namespace=given.namespace,
            agent_namespace=given.agent_namespace,
            images=Images(
                given.engine_image, given.agent_image, given.image_pull_policy, tuple(given.image_pull_secret)
            ),
            hub_endpoints=frozenset(given.hub_endpoint),
            s3_endpoints=frozenset(given.s3_endpoint),
            gate_deadline_seconds=given.gate_deadline_seconds,
        ),
        identity=given.identity,
        workers=given.workers,
        resync_seconds=given.resync_seconds,
        heartbeat_seconds=given.heartbeat_seconds,
        metrics_port=given.metrics_port,
        health_port=given.health_port,
        kubeconfig=given.kubeconfig,
    )

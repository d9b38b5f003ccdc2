"""`dlo explain` against a real API server, under a person's own rights, of what the real operator wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from api.life import CONTROLLERS
from api.test_operator import Stage, stage
from dlo_api.names import GROUP
from unit.api.manifests import manifest

__all__ = ["stage"]  # the fixture of the operator's test

VIEWER = "viewer"


def dlo(stage: Stage, config: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command, as a person's own process."""
    return subprocess.run(
        [sys.executable, "-m", "dlo_cli", "explain", *words, "--kubeconfig", str(config)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "HOME": str(stage.folder)},
    )


def document(stage: Stage, config: Path) -> dict[str, Any]:
    """The one document that is printed of `digits`."""
    said = dlo(stage, config, "digits", "-n", stage.namespace, "-o", "json")
    assert (said.returncode, said.stderr) == (0, ""), said
    value: dict[str, Any] = json.loads(said.stdout)
    return value


def as_viewer(stage: Stage) -> Path:
    """A kubeconfig of an account that may read DiffusionDeployments of one namespace and nothing else."""
    place = {"name": VIEWER, "namespace": stage.namespace}
    rule = {"apiGroups": [GROUP], "resources": ["diffusiondeployments"], "verbs": ["get", "list"]}
    role = "rbac.authorization.k8s.io"
    objects = [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": place},
        {"apiVersion": f"{role}/v1", "kind": "Role", "metadata": place, "rules": [rule]},
        {
            "apiVersion": f"{role}/v1",
            "kind": "RoleBinding",
            "metadata": place,
            "subjects": [{"kind": "ServiceAccount", **place}],
            "roleRef": {"kind": "Role", "name": VIEWER, "apiGroup": role},
        },
    ]
    stage.server.kubectl("apply", "-f", "-", text="\n---\n".join(json.dumps(each) for each in objects))
    return with_token(stage, stage.server.kubectl("create", "token", VIEWER, "-n", stage.namespace).strip())


def with_token(stage: Stage, token: str) -> Path:
    """The server's kubeconfig with another token."""
    file = stage.folder / f"kubeconfig-{abs(hash(token))}"
    file.write_text(stage.server.kubeconfig.read_text().replace(stage.server.token, token))
    return file


def test_from_nothing_to_ready_and_to_an_operator_that_is_gone(stage: Stage) -> None:
    """Every read is one that the server serves; what is denied is told; the chain follows the cluster's life."""
    admin, viewer = stage.server.kubeconfig, as_viewer(stage)
    for agent in stage.agents:
        # The simulated heartbeat counts from here; an agent's own is the time of day.
        agent.beats = int(time.time())
    stage.gateway.create(
        manifest(
            {
                "metadata.namespace": stage.namespace,
                "spec.engine.device": "Cpu",
                "spec.parallelism.tensor": 2,
                "spec.replicas": 2,
                "spec.placement.nodeSelector": {"stage": stage.namespace},
                "spec.placement.tolerations": [{"operator": "Exists"}],
            }
        )
    )
    before = document(stage, admin)
    assert before["causes"][0]["reason"] == "OperatorNotRunning"
    assert before["unread"] == []

    with stage.server.controllers(*CONTROLLERS), stage.operator(1):
        stage.until("ready", stage.ready, 1)
        found = document(stage, admin)
        assert found["ready"] is True
        assert [cause["reason"] for cause in found["causes"]] in ([], ["Unreported"])
        assert {node["name"] for node in found["nodes"]} == {agent.node for agent in stage.agents}
        assert {entry["phase"] for node in found["nodes"] for entry in node["entries"]} == {"Ready"}
        assert {node["agent"] for node in found["nodes"]} == {"Alive"}
        assert len(found["engines"]) == 2
        # No kubelet runs here, so the server finds nobody to pass the question to.
        assert [each["what"].startswith("the engine in digits-") for each in found["unread"]] == [True, True]

        least = document(stage, viewer)
        assert least["ready"] is True
        denied = {each["what"]: each["why"] for each in least["unread"]}
        assert set(denied) == {
            "its Deployment",
            "its pods",
            "nodes",
            "node weight caches",
            "heartbeats (Leases)",
        }
        assert all("cannot" in why for why in denied.values())

        other = dlo(stage, admin, "digit", "-n", stage.namespace)
        assert other.returncode == 1
        assert "did you mean digits?" in other.stderr
        wrong = dlo(stage, with_token(stage, "expired"), "digits", "-n", stage.namespace)
        assert wrong.returncode == 1
        assert wrong.stderr.startswith("error: Unauthorized: ")
        assert len(wrong.stderr.splitlines()) == 1

    after = document(stage, admin)
    assert after["causes"][0]["reason"] == "OperatorNotRunning"
    assert "nobody holds its Lease" in after["causes"][0]["message"]

"""What of a status is ours, by the real server's record of owners: others' fields are no reason to write."""

from __future__ import annotations

import copy

from contract.gateway import condition, deployment, with_status
from dlo_kube.client import ClusterGateway
from dlo_kube.gateway import Object
from dlo_kube.kinds import DIFFUSION_DEPLOYMENT
from dlo_operator.executor import Executor
from dlo_operator.lean import lean


def test_a_foreign_status_field_is_no_reason_to_write(gateway: ClusterGateway, namespace: str) -> None:
    """Read whole or as the mirror keeps it; what we owned and mean no more still is a reason."""
    obj = deployment(namespace)
    gateway.create(obj)
    executor, name = Executor(gateway), obj["metadata"]["name"]

    def live() -> Object:
        found = gateway.get(DIFFUSION_DEPLOYMENT, name, namespace)
        assert found is not None
        return found

    meant: Object = {
        "phase": "Ready",
        "replicas": 0,
        "cache": {"summary": "1/1", "entries": [{"kind": "Files"}]},
        "conditions": [condition("Ready"), condition("Accepted")],
    }
    assert executor.apply_status(live(), meant)
    assert not executor.apply_status(live(), meant)
    theirs = with_status(obj, offload={"mode": "Foreign"}, conditions=[condition("Foreign")])
    gateway.apply_status(theirs, manager="somebody-else")
    before = live()["metadata"]["resourceVersion"]
    for read in (live(), lean(live())):
        assert not executor.apply_status(read, meant)
    assert live()["metadata"]["resourceVersion"] == before
    gateway.apply_status(with_status(obj, phase="Foreign"), manager="a-third", force=True)
    assert executor.apply_status(lean(live()), meant)
    assert live()["status"]["phase"] == "Ready"
    less = copy.deepcopy(meant)
    del less["cache"]["summary"]
    less["conditions"].pop()
    assert executor.apply_status(lean(live()), less)
    assert not executor.apply_status(lean(live()), less)
    found = live()["status"]
    assert "summary" not in found["cache"]
    assert {c["type"] for c in found["conditions"]} == {"Ready", "Foreign"}
    assert found["offload"] == {"mode": "Foreign"}

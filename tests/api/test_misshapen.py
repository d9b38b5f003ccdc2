"""Fields that the CRD passes through: what the API server says of wrong ones is told, and tried no more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from api.apiserver import ApiServer
from dlo_kube.client import ClusterGateway
from dlo_kube.errors import Invalid
from dlo_operator.reconcile.workload import deployment
from unit.operator.test_render import digits, record
from unit.operator.world import SETTINGS


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterGateway]:
    """Of a server of its own."""
    with ApiServer(tmp_path_factory.mktemp("misshapen")) as server:
        found = server.gateway()
        yield found
        found.close()


@pytest.mark.parametrize(
    ("part", "value", "words"),
    [
        ("engine", {"extra_env": ({"name": "A"}, {"name": "A"})}, "duplicate entries for key"),
        ("engine", {"extra_env": ({"name": 5},)}, "name: expected string"),
        ("engine", {"extra_env": ({"name": "A", "value": 5},)}, "value: expected string"),
        ("engine", {"extra_env": ({"name": "A", "valueFrom": "x"},)}, "valueFrom: expected map"),
        ("engine", {"extra_env": ({"name": "A", "unknown": "x"},)}, "unknown: field not declared"),
        ("engine", {"extra_env": ({},)}, "name"),
        ("engine", {"resources": {"limits": {"memory": "many"}}}, "quantities must match"),
        ("engine", {"resources": {"limits": {"memory": ["1Gi"]}}}, "memory: expected any scalar"),
        ("engine", {"resources": {"limit": {}}}, "limit: field not declared"),
        ("placement", {"affinity": {"podAffinity": "x"}}, "podAffinity: expected map"),
        ("placement", {"affinity": {"unknown": {}}}, "unknown: field not declared"),
        (
            "placement",
            {"tolerations": ({"tolerationSeconds": "soon"},)},
            "tolerationSeconds: expected numeric",
        ),
        ("engine", {"pod_labels": {"a b": "c"}}, "spec.template.labels"),
        ("engine", {"service_account_name": "9..9"}, "serviceAccountName"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_refusal_is_final(gateway: ClusterGateway, part: str, value: dict[str, Any], words: str) -> None:
    """Invalid, so that the operator says `PodTemplateInvalid`; any other error is tried again for ever, silently."""
    spec = digits()
    spec = spec.model_copy(update={part: getattr(spec, part).model_copy(update=value)})
    intent = deployment("digits", "default", "1", spec, "0123456789", record(digits()), SETTINGS.plan)
    with pytest.raises(Invalid, match=words):
        gateway.apply(intent, manager="x", dry_run=True)


def test_a_home_of_ones_own_is_taken(gateway: ClusterGateway) -> None:
    """A name that the operator sets too: the user's counts, and stands there once."""
    spec = digits()
    home = ({"name": "HOME", "value": "/tmp/mine"},)
    spec = spec.model_copy(update={"engine": spec.engine.model_copy(update={"extra_env": home})})
    intent = deployment("digits", "default", "1", spec, "0123456789", record(digits()), SETTINGS.plan)
    made = gateway.apply(intent, manager="x", dry_run=True)
    assert made["spec"]["template"]["spec"]["containers"][0]["env"] == list(home)

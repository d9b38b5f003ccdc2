"""Every kind of trouble by its real cause, told by its reason, and gone when the cause is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cluster.clusters import Cluster, until
from cluster.conftest import MODELS
from cluster.nodeshell import NodeShell
from cluster.product import CACHE, Deployed, Release, digit_in
from cluster.standins import KEY_ID, TOKEN, StandIns, hub, s3, secret

Deploy = Callable[..., Deployed]

_COPY = f"""
import pathlib, shutil, sys
target = pathlib.Path("/host{MODELS}") / sys.argv[1]
shutil.rmtree(target, ignore_errors=True)
shutil.copytree("/opt/dlo/samples/digits", target)
"""
_FLIP = f"""
import pathlib, sys
for key in sys.argv[1:]:
    folder = pathlib.Path("/host{CACHE}/v1/entries") / key
    file = max(folder.rglob("*.safetensors"), key=lambda each: each.stat().st_size)
    with open(file, "r+b") as opened:
        opened.seek(-100, 2)
        byte = opened.read(1)
        opened.seek(-100, 2)
        opened.write(bytes([byte[0] ^ 1]))
"""


def models(path: str) -> dict[str, Any]:
    return {"source": {"directory": {"root": "models", "path": path}}}


@pytest.fixture
def permitted(cluster: Cluster, release: Release, namespace: str) -> Callable[[], None]:
    """Lets the operator read the namespace's Secrets, as the chart's notes say."""

    def bind() -> None:
        account = release.pods("operator")[0]["spec"]["serviceAccountName"]
        cluster.kubectl(
            *("-n", namespace, "create", "rolebinding", "dlo-secret-reader"),
            *("--clusterrole=dlo-secret-reader", f"--serviceaccount={release.namespace}:{account}"),
        )

    return bind


def test_a_missing_folder_is_named_and_taken_when_it_comes(
    deploy: Deploy, shells: dict[str, NodeShell]
) -> None:
    digits = deploy(replicas=0, model=models("later"))
    assert "later" in digits.wait("SourceResolved", "SourceNotFound")["message"]
    assert digits.wait("Stalled")["reason"] == "SourceNotFound"
    for shell in shells.values():
        shell.python(_COPY, "later")
    digits.wait("CacheReady")


def test_a_private_repository_needs_secret_permission_and_right_token(
    cluster: Cluster, stores: StandIns, deploy: Deploy, namespace: str, permitted: Callable[[], None]
) -> None:
    """From the hub stand-in, through the real client library, to a picture."""
    assert stores
    digits = deploy(replicas=1, model=hub(token=False))
    digits.wait("SourceResolved", "SourceUnauthorized")
    digits.patch({"model": hub()})
    digits.wait("Accepted", "SecretNotPermitted")
    permitted()
    digits.wait("SourceResolved", "SourceUnauthorized")
    cluster.apply(secret(namespace, "hub", token="wrong"))
    digits.wait("SourceResolved", "SourceUnauthorized")
    cluster.apply(secret(namespace, "hub", token=TOKEN))
    # The copy is looked at again within minutes; a change of the spec looks at once.
    digits.patch({"serving": {"serviceAnnotations": {"looked": "again"}}})
    digits.wait("SourceResolved", seconds=400)
    digits.wait()
    assert digit_in(digits.draw("a handwritten eight")) == 8
    kinds = "ddep,nwcache,events,pods,leases,configmaps"
    places = (namespace, "dlo-system", "default")
    shown = "".join(cluster.kubectl("get", kinds, "-n", place, "-o", "json") for place in places)
    logs = cluster.kubectl(
        *("logs", "-n", "dlo-system", "-l", "app.kubernetes.io/component in (agent,operator)"),
        *("--tail=-1", "--all-containers"),
    )
    assert TOKEN not in shown + logs


def test_a_repository_that_is_not_there_and_an_endpoint_that_is_not_listed(
    cluster: Cluster, stores: StandIns, deploy: Deploy, namespace: str, permitted: Callable[[], None]
) -> None:
    assert stores
    permitted()
    cluster.apply(secret(namespace, "hub", token=TOKEN))
    nowhere = deploy("nowhere", replicas=0, model=hub(repo="dlo/nothing"))
    elsewhere = deploy("elsewhere", replicas=0, model=hub(endpoint="unlisted"))
    nowhere.wait("SourceResolved", "SourceNotFound")
    assert "unlisted" in elsewhere.wait("Accepted", "EndpointNotAllowed")["message"]


def test_a_hub_that_does_not_answer_is_asked_again(
    cluster: Cluster, stores: StandIns, deploy: Deploy, namespace: str, permitted: Callable[[], None]
) -> None:
    permitted()
    cluster.apply(secret(namespace, "hub", token=TOKEN))
    stores.fault("hub", "unavailable")
    try:
        # A credential of its own is a source of its own: nothing of an earlier test is known of it.
        digits = deploy(replicas=0, model=hub())
        digits.wait("SourceResolved", "SourceUnreachable")
    finally:
        stores.fault("hub")
    digits.wait("SourceResolved", seconds=400)


def test_a_bucket_serves_the_same_model(
    cluster: Cluster, stores: StandIns, deploy: Deploy, namespace: str, permitted: Callable[[], None]
) -> None:
    assert stores
    permitted()
    cluster.apply(secret(namespace, "s3", accessKeyId=KEY_ID, secretAccessKey="any"))
    digits = deploy(replicas=0, model=s3())
    digits.wait("CacheReady")
    sample = deploy("sample", replicas=0)
    sample.wait("CacheReady")
    keys = [
        {entry["inputKey"] for entry in each.get()["status"]["cache"]["entries"]} for each in (digits, sample)
    ]
    assert keys[0] == keys[1]


def test_other_bytes_on_another_node_are_never_built(
    deploy: Deploy, shells: dict[str, NodeShell], cluster: Cluster
) -> None:
    nodes = cluster.nodes()
    for number, node in enumerate(nodes):
        shells[node].python(_COPY, "differs")
        shells[node].python(
            f"open('/host{MODELS}/differs/scheduler/more.json', 'w').write('{{\"node\": {number}}}')"
        )
    digits = deploy(
        replicas=0,
        model=models("differs"),
        placement={"tolerations": [{"operator": "Exists"}]},
        cache={"prewarm": {"scope": "All", "minReadyNodes": len(nodes)}},
    )
    told = digits.wait("SourceResolved", "SourceMismatch")["message"]
    assert any(node in told for node in nodes)


@pytest.mark.parametrize(
    ("name", "damage", "condition", "reason"),
    [
        (
            "torn",
            "file = next(folder.glob('transformer/*.safetensors'))\n"
            "file.write_bytes(file.read_bytes()[:-1000])",
            "SourceResolved",
            "SourceIncomplete",
        ),
        (
            "foreign",
            "for name in ('model_index.json', 'transformer/config.json'):\n"
            "    file = folder / name\n"
            "    file.write_text(file.read_text().replace('FluxTransformer2DModel', 'MyTransformer'))",
            "Accepted",
            "UnknownArchitecture",
        ),
    ],
)
def test_a_bad_checkpoint_is_refused_with_its_reason(
    deploy: Deploy, shells: dict[str, NodeShell], name: str, damage: str, condition: str, reason: str
) -> None:
    for shell in shells.values():
        shell.python(f"{_COPY}\nfolder = target\n{damage}", name)
    bad = deploy(name, replicas=1, model=models(name))
    bad.wait(condition, reason)
    # A bad one beside it changes nothing for a good one.
    good = deploy("good", replicas=0)
    good.wait()
    assert bad.pods() == []


def test_an_entry_damaged_on_disk_is_built_again_when_an_engine_meets_it(
    cluster: Cluster, deploy: Deploy, shells: dict[str, NodeShell], worker: str, namespace: str
) -> None:
    """Once while an engine has it mapped and is killed, once while nobody uses it."""
    # A model of its own, so that no other engine has these entries.
    for shell in shells.values():
        shell.python(_COPY, "damaged")
    digits = deploy(replicas=1, model=models("damaged"), parallelism={"tensor": 1})
    digits.wait()
    keys = sorted(e["inputKey"] for e in digits.get()["status"]["cache"]["entries"] if e["kind"] == "Layout")
    for in_use in (True, False):
        if in_use:
            pod = digits.pods()[0]["metadata"]["name"]
            shells[worker].python(_FLIP, *keys)
            kill = "import os, signal; os.kill(1, signal.SIGTERM)"
            cluster.kubectl("exec", "-n", namespace, pod, "-c", "engine", "--", "python", "-c", kill)
        else:
            digits.patch({"replicas": 0})
            until("without pods", lambda: not digits.pods(), 120, digits.story)
            shells[worker].python(_FLIP, *keys)
            digits.patch({"replicas": 1})
        quarantine = f"import os; print(len(os.listdir('/host{CACHE}/v1/quarantine')))"
        before = int(shells[worker].python(quarantine))
        until("set aside", lambda: int(shells[worker].python(quarantine)) > before, 180, digits.story)  # noqa: B023
        digits.wait("Ready", seconds=300)
    assert digit_in(digits.draw("a handwritten two")) == 2


def test_engines_that_end_are_quoted(deploy: Deploy) -> None:
    digits = deploy(replicas=1)
    digits.wait("CacheReady")
    digits.patch({"engine": {"extraArgs": ["--default-size=1x1"]}})
    told = digits.wait("EngineAvailable", "PodsCrashing")["message"]
    assert "1x1" in told or "16" in told


def test_a_template_that_the_server_refuses(deploy: Deploy) -> None:
    digits = deploy(replicas=1, engine={"device": "Cpu", "extraEnv": [{"name": "not a name="}]})
    assert "env" in digits.wait("Accepted", "PodTemplateInvalid")["message"]


def test_no_eligible_node_until_one_is_labelled(cluster: Cluster, deploy: Deploy, worker: str) -> None:
    digits = deploy(replicas=1, placement={"nodeSelector": {"test/group": "late"}})
    assert "test/group" in digits.wait("CapacitySufficient", "NoEligibleNodes")["message"]
    cluster.kubectl("label", "node", worker, "test/group=late")
    try:
        digits.wait(seconds=300)
    finally:
        cluster.kubectl("label", "node", worker, "test/group-")


@pytest.fixture
def no_operator(cluster: Cluster, release: Release) -> Iterator[Callable[[], None]]:
    """The operator is away until it is called back."""
    name = release.objects("deployments", "operator")[0]["metadata"]["name"]

    def scale(replicas: int) -> None:
        cluster.kubectl("-n", release.namespace, "scale", "deployment", name, f"--replicas={replicas}")

    scale(0)
    until("away", lambda: not release.pods("operator"), 60)
    yield lambda: scale(1)
    scale(1)


def test_a_deployment_made_before_the_operator_is_taken_up(
    no_operator: Callable[[], None], deploy: Deploy
) -> None:
    digits = deploy(replicas=1)
    assert digits.get().get("status") is None
    no_operator()
    digits.wait()


def test_an_agent_deleted_in_mid_build_leaves_nothing_torn(
    cluster: Cluster,
    release: Release,
    stores: StandIns,
    deploy: Deploy,
    namespace: str,
    permitted: Callable[[], None],
    worker: str,
) -> None:
    permitted()
    cluster.apply(secret(namespace, "hub", token=TOKEN))
    stores.fault("hub", "slow")
    try:
        digits = deploy(replicas=1, model=hub())
        until("under way", lambda: _under_way(cluster, worker), 90, digits.story)
        name = next(p["metadata"]["name"] for p in release.pods("agent") if p["spec"]["nodeName"] == worker)
        cluster.kubectl("-n", release.namespace, "delete", "pod", name, "--grace-period=0", "--force")
    finally:
        stores.fault("hub")
    digits.wait(seconds=400)
    assert digit_in(digits.draw("a handwritten six")) == 6


def _under_way(cluster: Cluster, node: str) -> bool:
    status = (cluster.get("nwcache", node) or {}).get("status", {})
    hashing = any(source.get("reason") == "Hashing" for source in status.get("sources", []))
    phases = {entry.get("phase") for entry in status.get("entries", [])}
    return hashing or bool(phases & {"Fetching", "Building", "Reserved"})

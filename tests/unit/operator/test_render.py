"""The children as they are rendered: the digits example whole, and what no pod may lack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from dlo_agent.gate import parse_wants
from dlo_api.load import load_manifest
from dlo_api.v1alpha1 import DiffusionDeploymentSpec
from dlo_api.v1alpha1.node_weight_cache import ComponentFacts, NodeSource, Pin
from dlo_api.wanted import entries_for, id_of_source
from dlo_engine.__main__ import split_extra
from dlo_engine.config import EngineConfig
from dlo_engine.flags import add_flags, config_from, make_parser
from dlo_operator.reconcile import workload
from dlo_operator.reconcile.memory import pod_memory
from dlo_operator.reconcile.pod import PREFERS
from dlo_operator.reconcile.record import (
    RECORD_ANNOTATION,
    Claim,
    ModelSizes,
    Record,
    WantedEntry,
    read_record,
)
from unit.api.manifests import deployment as parsed
from unit.operator.world import SETTINGS

EXAMPLE = Path(__file__).parents[3] / "examples" / "digits.yaml"
GOLDEN = Path(__file__).parent / "golden" / "digits.yaml"
PLACE = ("digits", "team", "11111111-2222-4333-8444-555555555555")


def digits() -> DiffusionDeploymentSpec:
    """The example, with two engines."""
    spec = load_manifest(EXAMPLE.read_text(), EXAMPLE.name).spec
    return spec.model_copy(update={"replicas": 2})


def record(spec: DiffusionDeploymentSpec) -> Record:
    """What a revision of it stands on: keys of plain digits, made-up sizes."""
    identity = id_of_source(spec, "team")
    entries = entries_for(spec, identity)
    wanted = tuple(
        WantedEntry(
            id=entry.id,
            kind=entry.kind,
            component=entry.component,
            rank=entry.tensor_rank if entry.kind == "Layout" else None,
            coordinate=f"{entry.tensor_rank}/{entry.tensor_size}" if entry.kind == "Layout" else None,
            input_key=str(number) * 64,
            manifest_sha256=str(number + 4) * 64,
            content_digest=str(number + 6) * 64,
            bytes=(number + 1) * 2**20,
        )
        for number, entry in enumerate(entries)
    )
    source = NodeSource(id=identity, source=spec.model.source, pin=Pin(revision="main", digest="ab" * 32))
    sizes = ModelSizes(
        (
            ComponentFacts(
                name="transformer", bytes=2**21, blocks=4, largest_block_bytes=2**18, resident_bytes=2**19
            ),
        ),
        2**20,
    )
    return Record(Claim((source,), entries), wanted, sizes, root="/var/cache/dlo", gid=4242)


def rendered(spec: DiffusionDeploymentSpec) -> list[dict[str, Any]]:
    """The three children."""
    return [
        workload.service(*PLACE, spec),
        workload.deployment(*PLACE, spec, "0123456789", record(spec), SETTINGS.plan),
        workload.budget(*PLACE, spec),
    ]


def pod(spec: DiffusionDeploymentSpec) -> dict[str, Any]:
    """The pod of an engine."""
    found: dict[str, Any] = rendered(spec)[1]["spec"]["template"]["spec"]
    return found


def test_the_digits_example_renders_as_agreed() -> None:
    """Deployment, Service and PodDisruptionBudget, word for word; after a wanted change, write the file anew."""
    text = yaml.safe_dump_all(rendered(digits()), sort_keys=False, width=110)
    assert text == GOLDEN.read_text(), f"{GOLDEN.name} differs"


def test_the_engine_understands_its_arguments() -> None:
    """The rendered flags give the configuration that the manifest means."""
    engine = pod(digits())["containers"][0]
    assert engine["command"] == ["python", "-P", "-m", "dlo_engine", "serve"]
    arguments, extra = split_extra(engine["args"])
    parser = make_parser("engine", "")
    add_flags(parser)
    config = config_from(vars(parser.parse_args(arguments)), extra)
    assert config == EngineConfig(
        handover=Path("/run/dlo/handover.json"),
        model_name="digits",
        device="cpu",
        tensor=2,
        host="0.0.0.0",  # noqa: S104
        default_width=32,
        default_height=32,
        default_steps=10,
        max_sequence_length=32,
        termination_message_path=Path("/dev/termination-log"),
    )


def test_the_gate_understands_its_list() -> None:
    """The gate's own parser reads what is rendered, and finds the folders that the engine mounts."""
    spec = pod(digits())
    arguments = spec["initContainers"][0]["args"]
    wants = parse_wants(arguments[arguments.index("--want-json") + 1])
    mounts = {m["subPath"] for m in spec["containers"][0]["volumeMounts"] if m["name"] == "cache"}
    assert {want.entry.dir for want in wants} == mounts
    assert [want.entry.coordinate for want in wants] == ["0/2", "1/2", None]


@pytest.mark.parametrize(
    "changes", [{}, {"spec.engine.device": "Cpu"}, {"spec.parallelism.tensor": 4}], ids=str
)
def test_no_pod_is_privileged(changes: dict[str, Any]) -> None:
    """No token, no capability, no writable root file system, read-only mounts of the cache, limits on memory."""
    spec = pod(parsed(changes).spec)
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["securityContext"]["supplementalGroups"] == [4242]
    for container in (*spec["initContainers"], *spec["containers"]):
        context = container["securityContext"]
        assert context["runAsNonRoot"]
        assert context["readOnlyRootFilesystem"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert "memory" in container["resources"]["limits"]
        assert all(m.get("readOnly") for m in container["volumeMounts"] if m["name"] == "cache")
    assert all("subPath" in m for m in spec["containers"][0]["volumeMounts"] if m["name"] == "cache")


def test_the_grace_period_outlasts_the_drain() -> None:
    """Also after the pause before the drain begins."""
    spec = parsed({"spec.rollout": {"drainTimeoutSeconds": 700}}).spec
    found = pod(spec)
    pause = found["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert found["terminationGracePeriodSeconds"] > 700 + pause


def test_gpus_follow_from_the_topology() -> None:
    """Tensor × data GPUs by the deployment's own resource name, requested and limited."""
    spec = parsed(
        {"spec.parallelism": {"tensor": 2, "data": 2}, "spec.placement.gpuResource": "example.com/gpu"}
    ).spec
    resources = pod(spec)["containers"][0]["resources"]
    assert resources["limits"]["example.com/gpu"] == resources["requests"]["example.com/gpu"] == "4"


def test_a_users_words_are_merged() -> None:
    """Resources over ours, labels and annotations beside ours, affinity with our wish added, never instead."""
    spec = parsed(
        {
            "spec.engine.resources": {"limits": {"memory": "9Gi"}},
            "spec.engine.podLabels": {"team": "a", "dlo.dev/revision": "mine"},
            "spec.engine.extraEnv": [{"name": "A", "value": "b"}],
            "spec.placement.affinity": {"podAntiAffinity": {"x": 1}},
            "spec.placement.tolerations": [{"operator": "Exists"}],
            "spec.placement.priorityClassName": "high",
        }
    ).spec
    found = rendered(spec)[1]["spec"]["template"]
    engine = found["spec"]["containers"][0]
    assert engine["resources"]["limits"]["memory"] == "9Gi"
    assert "memory" in engine["resources"]["requests"]
    assert found["metadata"]["labels"]["team"] == "a"
    assert found["metadata"]["labels"]["dlo.dev/revision"] == "0123456789"
    assert {"name": "A", "value": "b"} in engine["env"]
    assert found["spec"]["affinity"]["podAntiAffinity"] == {"x": 1}
    assert len(found["spec"]["affinity"]["nodeAffinity"][PREFERS]) == 1
    assert "requiredDuringSchedulingIgnoredDuringExecution" not in found["spec"]["affinity"]["nodeAffinity"]
    assert found["spec"]["tolerations"] == [{"operator": "Exists"}]
    assert found["spec"]["priorityClassName"] == "high"


def test_a_record_is_read_as_it_was_written() -> None:
    """And whatever is no record is None, not a failure."""
    written = record(digits())
    assert read_record({RECORD_ANNOTATION: written.to_text()}) == written
    for broken in ("", "{}", "[]", "null", '{"sources": 1}'):
        assert read_record({RECORD_ANNOTATION: broken}) is None
    assert read_record({}) is None


def test_the_memory_limit_has_room_for_all_entries() -> None:
    """Private bytes, shared memory and every distinct entry once."""
    spec = digits()
    made = record(spec)
    memory = pod_memory(spec, made.sizes)
    resources = pod(spec)["containers"][0]["resources"]
    assert made.entry_bytes == 6 * 2**20
    total = (memory.private + memory.shared + made.entry_bytes) // 2**20
    assert resources["limits"]["memory"] == f"{total}Mi"
    # Two slots of half a block, the residents, on each rank; the rest of the pipeline once.
    assert memory.private == (256 + 2 * 1024) * 2**20 + _up(2 * (2 * 2**17 + 2**19) + 2**20)


def _up(size: int) -> int:
    return -(-size // 2**20) * 2**20

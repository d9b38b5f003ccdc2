"""Names of revisions: what changes them and what does not; ids of sources and entries."""

from __future__ import annotations

from typing import Any

import pytest
from dlo_api.identity import entry_id, source_id
from dlo_api.wanted import entries_for, id_of_source
from dlo_operator.reconcile.inputs import Images, PodFacts, WorkloadFacts
from dlo_operator.reconcile.revision import revision_of, serving_revision
from unit.api.manifests import deployment

IMAGES = Images("engine:1", "agent:1")


def name_of(changes: dict[str, Any], pin: str = "aa", images: Images = IMAGES) -> str:
    """The revision of a manifest with these changes."""
    spec = deployment(changes).spec
    entries = entries_for(spec, id_of_source(spec, "team"))
    return revision_of(spec, pin, (entry.id for entry in entries), images)


@pytest.mark.parametrize(
    "changes",
    [
        {"spec.replicas": 7},
        {"spec.suspend": True},
        {"spec.cache.retentionSeconds": 1},
        {"spec.cache.prewarm": {"scope": "All"}},
        {"spec.rollout": {"maxSurge": 1}},
        {"spec.serving.serviceAnnotations": {"a": "b"}},
    ],
    ids=str,
)
def test_pace_and_number_do_not_make_a_revision(changes: dict[str, Any]) -> None:
    """Engines are not restarted for them."""
    assert name_of(changes) == name_of({})


@pytest.mark.parametrize(
    "changes",
    [
        {"spec.model.source.directory.path": "other"},
        {"spec.model.dtype": "float16"},
        {"spec.model.variant": "fp16"},
        {"spec.parallelism.tensor": 2},
        {"spec.parallelism.data": 2},
        {"spec.offload.residentLayers": 3},
        {"spec.engine.image": "mine:1"},
        {"spec.engine.extraArgs": ["--slots=3"]},
        {"spec.engine.podLabels": {"a": "b"}},
        {"spec.cache.verify": "OnPublish"},
        {"spec.placement.nodeSelector": {"a": "b"}},
        {"spec.serving.port": 9000},
        {"spec.rollout": {"drainTimeoutSeconds": 1}},
    ],
    ids=str,
)
def test_bytes_and_template_make_a_revision(changes: dict[str, Any]) -> None:
    """So do other pinned bytes, and other images of the chart."""
    assert name_of(changes) != name_of({})
    assert name_of({}, pin="bb") != name_of({})
    assert name_of({}, images=Images("engine:2", "agent:1")) != name_of({})


@pytest.mark.parametrize(
    ("target", "previous", "workload", "pods", "expected"),
    [
        ("b", None, None, "", (None, "b")),
        ("b", "a", ("a", True), "aa", ("a", "b")),
        ("b", "a", ("b", False), "ab", ("a", "b")),
        ("b", "a", ("b", True), "bb", ("b", None)),
        ("b", "b", ("b", False), "bb", ("b", None)),
        ("b", None, ("b", False), "bb", (None, "b")),
        (None, "a", ("a", True), "aa", ("a", None)),
    ],
    ids=["first", "warming", "rolling", "done", "a pod less", "first rollout", "not pinned"],
)
def test_which_revision_serves(
    target: str | None,
    previous: str | None,
    workload: tuple[str, bool] | None,
    pods: str,
    expected: tuple[str | None, str | None],
) -> None:
    """From the Deployment and its pods; what served before only where both leave it open."""
    facts = None
    if workload is not None:
        facts = WorkloadFacts(workload[0], None, 2, 2, len(pods), 2, settled=True, rolled_out=workload[1])
    found = [PodFacts(f"p{number}", "n", revision, ready=True) for number, revision in enumerate(pods)]
    assert serving_revision(target, previous, facts, found) == expected


def test_ids_of_entries_tell_bytes_apart_and_nothing_else() -> None:
    """Retention and an earlier id do not count; order of the streamed components neither."""
    first, second, rest = entries_for(deployment({"spec.parallelism.tensor": 2}).spec, "5" * 16)
    assert len({first.id, second.id, rest.id}) == 3
    assert entry_id(first.model_copy(update={"id": "0", "retention_seconds": 1})) == first.id
    for change in ({"dtype": "float16"}, {"tensor_size": 4}, {"source_id": "6" * 16}, {"layout": "mine"}):
        assert entry_id(first.model_copy(update=change)) != first.id
    streamed = {"streamed": ("b", "a")}
    assert entry_id(rest.model_copy(update=streamed)) == entry_id(
        rest.model_copy(update={"streamed": ("a", "b")})
    )


def test_ids_of_sources_keep_tenants_apart() -> None:
    """The same repository with another namespace's credential is another source; without one it is the same."""
    hub = {"repo": "org/name", "tokenSecretRef": {"name": "hub"}}
    gated = deployment({"spec.model.source": {"huggingFace": hub}}).spec
    open_ = deployment({}).spec
    assert id_of_source(gated, "a") != id_of_source(gated, "b")
    assert id_of_source(open_, "a") == id_of_source(open_, "b")
    assert source_id(open_.model.source, variant="fp16") != source_id(open_.model.source)
    assert source_id(open_.model.source) == "9a548176fb524d74"

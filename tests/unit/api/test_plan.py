"""The plan's arithmetic on numbers small enough to check by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from dlo_api.errors import ApiError
from dlo_api.plan import compute_plan, expected_backing
from dlo_api.planned import FilesFacts, LayoutFacts, ModelFacts, Plan, Residency
from dlo_api.topology import ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.api.manifests import deployment


def _facts(tensor: int) -> ModelFacts:
    """Four blocks of 100, 100, 120 and 80 bytes per rank, 30 outside them."""
    return ModelFacts(
        architecture="FluxTransformer2DModel",
        source_bytes=1000,
        largest_file_bytes=300,
        layouts=tuple(
            LayoutFacts("transformer", rank, f"key{rank}", (100, 100, 120, 80), 30, 450)
            for rank in range(tensor)
        ),
        rest=FilesFacts("rest", 70, 50),
    )


def _plan(changes: dict[str, Any], *, resident: tuple[int, ...] = (), slot: int = 120, **words: Any) -> Plan:
    spec = deployment(changes).spec
    tensor = spec.parallelism.tensor
    residency = [Residency(2, slot, {"transformer": resident}) for _ in range(tensor)]
    return compute_plan(spec, _facts(tensor), residency, **words)


def test_cpu_two_tensor_ranks() -> None:
    """Slots, residents and the rest of the pipeline are host memory; entries are mapped once."""
    plan = _plan({"spec.engine.device": "Cpu", "spec.parallelism.tensor": 2}, resident=(1,))
    first, second = plan.ranks
    assert (first.coordinate, second.coordinate) == ("0/2", "1/2")
    assert first.private_host_bytes == 2 * 120 + 100 + 30 + 50
    assert second.private_host_bytes == 2 * 120 + 100 + 30
    assert (plan.backing, plan.device_bytes, plan.locked_bytes) == ("MappedCache", 0, 0)
    assert plan.shared_host_bytes == 2 * 450
    assert plan.host_bytes == 2 * 450 + 420 + 370
    assert plan.disk_bytes == 2 * 450 + 70
    assert plan.build_bytes == 0


def test_cuda_staged_pins_two_slots_a_rank() -> None:
    """Replicas share the entry, each pins its own staging slots."""
    plan = _plan({"spec.parallelism.data": 2})
    assert plan.backing == "StagedCache"
    assert plan.shared_host_bytes == 450
    assert plan.locked_bytes == plan.private_host_bytes == 2 * 2 * 120
    assert plan.device_bytes == 2 * 120 + 30 + 50


def test_cuda_registered_pins_each_coordinate_once() -> None:
    """Whatever the number of replicas."""
    plan = _plan(
        {"spec.parallelism": {"tensor": 2, "data": 2}}, resident=(2,), cuda_backing="RegisteredCache"
    )
    assert plan.locked_bytes == 2 * (100 + 100 + 80)
    assert plan.private_host_bytes == 0


def test_all_gather_shares_the_copy() -> None:
    """Each member stages and copies its part; the slot arrives rounded for the group."""
    changes = {"spec.parallelism.data": 2, "spec.offload.transfer": "AllGather"}
    plan = _plan(changes, slot=8192, bus_bytes_per_second=100.0)
    assert (plan.group_kind, plan.group_size) == ("Data", 2)
    assert plan.ranks[0].locked_bytes == 2 * 4096
    assert plan.device_bytes == 2 * 8192 + 30 + 50
    (step,) = plan.steps
    assert (step.streamed_bytes, step.seconds) == (200, 2.0)


def test_step_bound_is_streamed_bytes_over_the_bus() -> None:
    """Residents do not cross it; without a rate there is no bound."""
    (step,) = _plan({}, resident=(0, 2), bus_bytes_per_second=90.0).steps
    assert (step.component, step.streamed_bytes, step.seconds) == ("transformer", 180, 2.0)
    assert _plan({}).steps[0].seconds is None


def test_mode_none_streams_nothing() -> None:
    """All blocks are resident and nothing is pinned."""
    plan = _plan({"spec.offload.mode": "None"})
    assert (plan.backing, plan.steps, plan.locked_bytes) == ("Resident", (), 0)
    assert plan.device_bytes == 400 + 30 + 50


def test_ranks_carry_their_places() -> None:
    """The table of ranks is the topology's."""
    spec = {"spec.parallelism": {"tensor": 2, "data": 2, "ulysses": 2, "cfg": 2}}
    planned = _plan(spec).ranks
    for rank, place in zip(planned, ranks(deployment(spec).spec.parallelism), strict=True):
        for name in ("global_rank", "coordinate", "tensor_rank", "data_rank", "ulysses_rank", "ring_rank"):
            assert getattr(rank, name) == getattr(place, name)
        assert (rank.cfg_rank, rank.pipeline_rank) == (place.cfg_rank, place.pipeline_rank)


def test_remote_sources_need_head_room() -> None:
    """A shard lies in the root until its last block is cut."""
    assert _plan({"spec.model.source": {"huggingFace": {"repo": "org/name"}}}).build_bytes == 300


def test_entries_are_listed_with_coordinates() -> None:
    """One for each component and tensor rank, and the rest of the pipeline."""
    entries = _plan({"spec.parallelism.tensor": 2}).entries
    assert [(e.kind, e.component, e.coordinate, e.key, e.bytes) for e in entries] == [
        ("Layout", "transformer", "0/2", "key0", 450),
        ("Layout", "transformer", "1/2", "key1", 450),
        ("Files", None, None, "rest", 70),
    ]


def test_json_is_camel_case_and_leaves_out_what_is_unknown() -> None:
    """What `dlo plan -o json` prints."""
    written = _plan({}).to_json()
    assert json.loads(json.dumps(written)) == written
    assert written["hostBytes"] == written["sharedHostBytes"] + written["privateHostBytes"]
    assert written["entries"][1] == {"kind": "Files", "key": "rest", "bytes": 70}
    assert written["steps"] == [{"component": "transformer", "streamedBytes": 400}]


@pytest.mark.parametrize(
    ("changes", "backing"),
    [
        ({}, "StagedCache"),
        ({"spec.engine.device": "Cpu"}, "MappedCache"),
        ({"spec.offload.mode": "None"}, "Resident"),
        ({"spec.offload.hostRegistration.policy": "Required"}, "RegisteredCache"),
        ({"spec.cache.policy": "Disabled"}, "MappedCheckpoint"),
        ({"spec.cache.policy": "Disabled", "spec.parallelism.tensor": 2}, "PrivateLoad"),
    ],
)
def test_expected_backing(changes: dict[str, Any], backing: str) -> None:
    """What each combination asks for."""
    assert expected_backing(deployment(changes).spec) == backing


def test_off_always_stages() -> None:
    """Even where Auto would register."""
    spec = deployment({"spec.offload.hostRegistration.policy": "Off"}).spec
    assert expected_backing(spec, cuda_backing="RegisteredCache") == "StagedCache"
    assert expected_backing(deployment().spec, cuda_backing="RegisteredCache") == "RegisteredCache"


def test_facts_must_cover_every_tensor_rank() -> None:
    """A plan of half the ranks would be a lie."""
    spec = deployment({"spec.parallelism.tensor": 2}).spec
    residency = [Residency(2, 120, {})] * 2
    with pytest.raises(ApiError, match="transformer") as caught:
        compute_plan(spec, _facts(1), residency)
    assert caught.value.code == "InvalidTopology"
    with pytest.raises(ApiError):
        compute_plan(spec, _facts(2), residency[:1])


@settings(max_examples=100, derandomize=True, deadline=None, database=None)
@given(st.integers(1, 4), st.integers(1, 4), st.sets(st.integers(0, 3)), st.sampled_from(["Cuda", "Cpu"]))
def test_shared_memory_does_not_grow_with_replicas(
    tensor: int, data: int, resident: set[int], device: str
) -> None:
    """Entries count once; a rank's own memory once a rank; every step copies what is not resident."""
    changes = {"spec.parallelism": {"tensor": tensor, "data": data}, "spec.engine.device": device}
    one = _plan({**changes, "spec.parallelism": {"tensor": tensor}}, resident=tuple(resident))
    many = _plan(changes, resident=tuple(resident))
    assert many.shared_host_bytes == one.shared_host_bytes
    assert many.private_host_bytes == data * one.private_host_bytes
    assert many.device_bytes == one.device_bytes
    streamed = sum(size for i, size in enumerate((100, 100, 120, 80)) if i not in resident)
    assert many.steps[0].streamed_bytes == streamed

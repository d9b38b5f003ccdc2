"""Ranks, coordinates and weight groups."""

from __future__ import annotations

from typing import Literal

import pytest
from dlo_api.topology import WeightGroup, coordinate, ranks, weight_group, weight_groups, world_size
from dlo_api.v1alpha1 import Parallelism
from hypothesis import given, settings
from hypothesis import strategies as st

_DEGREE = st.integers(min_value=1, max_value=3)
_PARALLELISM = st.builds(
    Parallelism, tensor=_DEGREE, data=_DEGREE, ulysses=_DEGREE, ring=_DEGREE, cfg=_DEGREE, pipeline=_DEGREE
)
_TRANSFER: st.SearchStrategy[Literal["RankLocal", "AllGather"]] = st.sampled_from(["RankLocal", "AllGather"])
_quick = settings(max_examples=100, derandomize=True, deadline=None, database=None)


@_quick
@given(_PARALLELISM)
def test_every_place_is_taken_once(parallelism: Parallelism) -> None:
    """World size ranks, all different, numbered from 0, tensor fastest."""
    places = ranks(parallelism)
    assert len(places) == world_size(parallelism)
    assert [place.global_rank for place in places] == list(range(len(places)))
    seen = {
        (p.tensor_rank, p.ulysses_rank, p.ring_rank, p.pipeline_rank, p.cfg_rank, p.data_rank) for p in places
    }
    assert len(seen) == len(places)
    for place in places:
        assert place.tensor_rank == place.global_rank % parallelism.tensor
        assert place.data_rank == place.global_rank // (len(places) // parallelism.data)
        assert place.coordinate == coordinate(place.tensor_rank, parallelism.tensor)


@_quick
@given(_PARALLELISM, _TRANSFER)
def test_groups_partition_the_ranks_of_one_coordinate(
    parallelism: Parallelism, transfer: Literal["RankLocal", "AllGather"]
) -> None:
    """Each rank is in one group of the stated size, and a group never spans tensor ranks."""
    group, groups = weight_group(parallelism, transfer), weight_groups(parallelism, transfer)
    places = ranks(parallelism)
    assert sorted(rank for members in groups for rank in members) == list(range(len(places)))
    assert {len(members) for members in groups} == {group.size}
    for members in groups:
        assert list(members) == sorted(members)
        assert len({places[rank].coordinate for rank in members}) == 1
        if group.kind == "Data":
            assert len({places[rank].data_rank for rank in members}) == parallelism.data
        if group.kind == "Sequence":
            assert len({places[rank].data_rank for rank in members}) == 1


@pytest.mark.parametrize(
    ("parallelism", "expected"),
    [
        (Parallelism(), WeightGroup("None", 1)),
        (Parallelism(tensor=4), WeightGroup("None", 1)),
        (Parallelism(data=2, ulysses=2), WeightGroup("Data", 2)),
        (Parallelism(ulysses=2, ring=3), WeightGroup("Sequence", 6)),
        (Parallelism(cfg=2, pipeline=2), WeightGroup("None", 1)),
    ],
)
def test_group_order_is_data_then_sequence_then_none(parallelism: Parallelism, expected: WeightGroup) -> None:
    """Never the tensor group."""
    assert weight_group(parallelism, "AllGather") == expected
    assert weight_group(parallelism, "RankLocal") == WeightGroup("None", 1)


def test_two_by_two_as_the_engine_numbers_it() -> None:
    """Global rank = data * tensor size + tensor rank; one group for each coordinate."""
    parallelism = Parallelism(tensor=2, data=2)
    assert [(p.data_rank, p.tensor_rank, p.coordinate) for p in ranks(parallelism)] == [
        (0, 0, "0/2"),
        (0, 1, "1/2"),
        (1, 0, "0/2"),
        (1, 1, "1/2"),
    ]
    assert weight_groups(parallelism, "AllGather") == ((0, 2), (1, 3))
    assert weight_groups(parallelism, "RankLocal") == ((0,), (1,), (2,), (3,))


def test_expert_adds_no_ranks() -> None:
    """Expert parallelism re-uses the ranks there are."""
    assert world_size(Parallelism(tensor=2, expert=2)) == 2

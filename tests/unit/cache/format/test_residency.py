"""Which blocks stay on the device, and how blocks are shared among ranks: plain arithmetic."""

from __future__ import annotations

from itertools import pairwise
from math import ceil

import pytest
from dlo_cache.errors import Invalid
from dlo_cache.residency import PAGE, byte_range, fit, share, slot_bytes, spread
from hypothesis import given, settings
from hypothesis import strategies as st

SIZES = st.lists(st.integers(0, 10**6), max_size=40)


def test_even_blocks_are_spread_evenly() -> None:
    """Eight of twenty: a streamed block or two between any two residents, never three."""
    assert spread([7] * 20, 8) == (1, 3, 6, 8, 11, 13, 16, 18)
    assert spread([7] * 20, 5) == (1, 5, 9, 13, 17)
    assert spread([7] * 20, 10) == (0, 2, 4, 6, 8, 10, 12, 14, 16, 18)
    assert spread([7] * 4, 1) == (1,)


def test_uneven_blocks_are_spread_by_bytes_not_by_number() -> None:
    """FLUX's double blocks are larger than its single blocks, so more of the residents are double blocks."""
    sizes = [340] * 19 + [141] * 38
    chosen = spread(sizes, 12)
    assert len([index for index in chosen if index < 19]) == 7
    runs, streamed = [], 0
    for index, size in enumerate(sizes):
        if index in chosen:
            runs.append(streamed)
            streamed = 0
        else:
            streamed += size
    inner = runs[1:]
    assert max(inner) - min(inner) <= 2 * 340  # no finer than the blocks themselves


def test_all_and_none() -> None:
    """The two ends."""
    assert spread([3, 1, 2], 3) == (0, 1, 2)
    assert spread([3, 1, 2], 0) == ()
    assert spread([], 0) == ()


@pytest.mark.parametrize("count", [-1, 4])
def test_more_residents_than_blocks_are_refused(count: int) -> None:
    """Neither a negative number nor more than there are."""
    with pytest.raises(Invalid, match="of 3"):
        spread([1, 2, 3], count)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(SIZES, st.integers(0, 40))
def test_spread_gives_distinct_sorted_places(sizes: list[int], wanted: int) -> None:
    """Always exactly as many as asked for, in order, for any sizes, zeros among them; twice the same."""
    count = min(wanted, len(sizes))
    chosen = spread(sizes, count)
    assert len(chosen) == count
    assert list(chosen) == sorted(set(chosen))
    assert all(0 <= index < len(sizes) for index in chosen)
    assert chosen == spread(list(sizes), count)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40))
def test_even_blocks_leave_even_runs(blocks: int, wanted: int) -> None:
    """With equal blocks the streamed runs between residents differ by one block at most."""
    chosen = spread([5] * blocks, min(wanted, blocks))
    runs = [after - before - 1 for before, after in pairwise(chosen)]
    assert not runs or max(runs) - min(runs) <= 1


def test_fit_takes_what_the_budget_allows() -> None:
    """Slots first, then residents; with room for all there are no slots."""
    sizes = [10 * PAGE] * 6
    assert fit(sizes, 20 * PAGE, 2) == ()
    assert fit(sizes, 49 * PAGE, 2) == spread(sizes, 2)
    assert fit(sizes, 60 * PAGE, 2) == (0, 1, 2, 3, 4, 5)
    with pytest.raises(Invalid, match=r"too small: 2 slots alone need 81920") as caught:
        fit(sizes, 20 * PAGE - 1, 2)
    assert caught.value.subject["needed"] == 20 * PAGE


def test_fit_counts_smaller_slots_when_the_large_blocks_stay() -> None:
    """Keeping the one large block resident shrinks the slots."""
    sizes = [PAGE, 50 * PAGE, PAGE, PAGE, PAGE]
    assert slot_bytes(sizes, (1,)) == PAGE
    assert fit(sizes, 52 * PAGE, 2) == (1,)
    with pytest.raises(Invalid):
        fit(sizes, 51 * PAGE, 2)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(SIZES, st.integers(0, 3 * 10**7), st.integers(2, 4), st.integers(1, 4))
def test_fit_never_exceeds_the_budget(sizes: list[int], budget: int, slots: int, group: int) -> None:
    """What fits, fits; what is refused would not have fitted without residents."""
    try:
        chosen = fit(sizes, budget, slots, group)
    except Invalid:
        assert slots * slot_bytes(sizes, (), group) > budget
        return
    assert sum(sizes[index] for index in chosen) + slots * slot_bytes(sizes, chosen, group) <= budget


def test_slots_hold_the_largest_streamed_block() -> None:
    """Rounded up to a page for each rank of a group; nothing streamed needs nothing."""
    assert slot_bytes([1, PAGE + 1, 3 * PAGE], (2,)) == 2 * PAGE
    assert slot_bytes([3 * PAGE], (), 2) == 4 * PAGE
    assert slot_bytes([5], (0,)) == 0


@settings(derandomize=True, max_examples=300, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 16))
def test_ranges_of_a_group_tile_the_block(nbytes: int, group: int) -> None:
    """Ranges meet, start at pages, end at the block's end, and fit the slot: share = ceil(n / g / P) * P."""
    step = share(nbytes, group)
    assert step % PAGE == 0
    assert step == ceil(ceil(nbytes / group) / PAGE) * PAGE
    ranges = [byte_range(nbytes, group, rank) for rank in range(group)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == nbytes
    for (_, stop), (start, _) in pairwise(ranges):
        assert stop == start
    assert all(start % PAGE == 0 or start == nbytes for start, _ in ranges)
    assert group * step >= nbytes


def test_a_small_block_leaves_some_ranks_nothing() -> None:
    """Less than a page a rank: the first has it all, the others have empty ranges, nothing past the end."""
    assert [byte_range(100, 4, rank) for rank in range(4)] == [(0, 100), (100, 100), (100, 100), (100, 100)]


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_group_is_refused(rank: int) -> None:
    """There is no rank 2 of 2."""
    with pytest.raises(Invalid, match="group"):
        byte_range(100, 2, rank)

"""The work queue: one key once, one worker a key, pauses that grow, nobody starves. No test waits."""

from __future__ import annotations

import random
import threading

import pytest
from dlo_operator.keys import Key, deployment_key, node_key
from dlo_operator.queue import LONGEST_SECONDS, Queue, Schedule, pause

A, B = deployment_key("team", "a"), deployment_key("team", "b")


def taken(schedule: Schedule, now: float) -> Key | None:
    """The next key that is due."""
    found = schedule.pop(now)
    return found.key if found is not None else None


def test_a_key_is_in_it_once() -> None:
    """However often it is added; the earliest wish counts."""
    schedule = Schedule()
    schedule.add(A, 5)
    schedule.add(A, 1)
    schedule.add(A, 9)
    assert taken(schedule, 0.5) is None
    assert taken(schedule, 1) == A
    schedule.finish(A, 2)
    assert taken(schedule, 100) is None


def test_a_key_is_worked_on_by_one_worker() -> None:
    """What is added while it runs makes it run once more, afterwards."""
    schedule = Schedule()
    schedule.add(A, 0)
    assert taken(schedule, 0) == A
    schedule.add(A, 0)
    schedule.add(A, 0)
    assert taken(schedule, 10) is None
    schedule.finish(A, 10)
    assert taken(schedule, 10) == A
    schedule.finish(A, 11)
    assert taken(schedule, 100) is None


def test_a_busy_key_does_not_starve_others() -> None:
    """Added again and again, it still takes turns."""
    schedule = Schedule()
    schedule.add(A, 0)
    schedule.add(B, 0)
    order = []
    for now in range(6):
        key = taken(schedule, now)
        assert key is not None
        order.append(key)
        schedule.add(key, now)
        schedule.finish(key, now)
    assert order == [A, B, A, B, A, B]


def test_a_failed_key_keeps_its_pause() -> None:
    """News about it, such as its own writes, does not make it hot."""
    schedule = Schedule()
    schedule.add(A, 0)
    assert taken(schedule, 0) == A
    schedule.add(A, 0)
    schedule.finish(A, 0, again_in=30, failed=True)
    assert taken(schedule, 29) is None
    assert taken(schedule, 30) == A
    assert schedule.failures(A) == 1
    schedule.finish(A, 31)
    assert schedule.failures(A) == 0


@pytest.mark.parametrize("failures", [1, 2, 5, 50, 5000])
def test_pauses_grow_to_a_cap_with_jitter(failures: int) -> None:
    """Doubling from half a second; at most half of it is taken off."""
    whole = min(0.5 * 2.0 ** min(failures - 1, 30), LONGEST_SECONDS)
    assert pause(failures, 0.0) == whole
    assert pause(failures, 1.0) == whole / 2


def test_depth_and_age_are_told() -> None:
    """By kind; the age is that of the most overdue key."""
    now = [0.0]
    queue = Queue(lambda: now[0], random.Random(1))
    queue.add(A)
    queue.add(node_key("n"), delay=5)
    now[0] = 3
    assert queue.depth() == {"Deployment": 1, "Node": 1}
    assert queue.oldest() == 3
    first = queue.take(timeout=0)
    assert first is not None
    assert first == (A, 3)
    assert queue.oldest() == 0
    assert queue.take(timeout=0) is None


def test_a_server_that_asks_to_wait_is_obeyed() -> None:
    """Its time is the least pause."""
    queue = Queue(lambda: 0.0, random.Random(1))
    queue.add(A)
    assert queue.take(timeout=0) is not None
    assert queue.failed(A, at_least=77) == 77


def test_closing_lets_waiting_workers_go() -> None:
    """A worker that waits for ever ends at once."""
    queue = Queue(lambda: 0.0, random.Random(1))
    worker = threading.Thread(target=queue.take)
    worker.start()
    queue.close()
    worker.join(5)
    assert not worker.is_alive()


def test_many_schedules_agree_with_a_model() -> None:
    """Random adds, takes and ends: nothing is lost, nothing runs twice at once."""
    rng = random.Random(7)
    keys = [deployment_key("team", str(number)) for number in range(5)]
    schedule, running, wanted = Schedule(), set[Key](), set[Key]()
    for now in range(4000):
        action = rng.random()
        if action < 0.5:
            key = rng.choice(keys)
            schedule.add(key, now)
            wanted.add(key)
        elif action < 0.8:
            key_or_none = taken(schedule, now)
            assert (key_or_none is None) == (not wanted - running)
            if key_or_none is not None:
                assert key_or_none not in running
                running.add(key_or_none)
                wanted.discard(key_or_none)
        elif running:
            key = rng.choice(sorted(running))
            schedule.finish(key, now)
            running.discard(key)


def test_nodes_give_way_for_a_while() -> None:
    """Deployments that come up to three seconds later go first, and none later: no node waits for ever."""
    schedule, node = Schedule(), node_key("n")
    schedule.add(node, 0)
    schedule.add(A, 2.9)
    schedule.add(B, 3.1)
    assert schedule.next_due() == 0
    assert [taken(schedule, 4) for _ in range(4)] == [A, node, B, None]
    schedule.finish(node, 5)
    schedule.add(node, 6)
    assert taken(schedule, 6) == node

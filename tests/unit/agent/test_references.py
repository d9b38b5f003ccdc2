"""Who keeps an entry, and who stops doing so: the rules of the ledger as values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dlo_agent import ledger as on_disk
from dlo_agent.references import Release, bind, expiry, forget, observe, use
from dlo_cache.root import Root, init_root
from unit.agent.worlds import DIGEST, NOW, binding, key, layout, ledger, wanted

BOOK = ledger({"a02": binding("a"), "a12": binding("b")})


def released(*args: dict[str, Any], **more: Any) -> set[str]:
    """Letters of the keys that a spec releases."""
    found = observe(BOOK, wanted(*args, **more), NOW)
    return {each[0] for each in found.released}


def test_a_later_generation_releases_what_it_lists_no_more() -> None:
    """Also when it lists nothing at all."""
    assert released(layout(0), generation=2) == {"b"}
    assert released(generation=2) == {"a", "b"}


def test_absent_stale_or_new_objects_release_nothing() -> None:
    """Three ways of knowing too little."""
    assert observe(BOOK, None, NOW) == BOOK
    late = ledger({"a02": binding("a")}, generation=5)
    assert observe(late, wanted(generation=4), NOW) == late
    assert released(uid="u2") == set()
    later = observe(observe(BOOK, wanted(uid="u2"), NOW), wanted(uid="u2", generation=9), NOW)
    assert later.released == {}, "a new object drops only what it listed itself"


def test_a_new_object_takes_over_what_it_lists() -> None:
    """From then on its later generations may drop it."""
    taken = observe(BOOK, wanted(layout(0), uid="u2"), NOW)
    dropped = observe(taken, wanted(uid="u2", generation=2), NOW)
    assert set(dropped.released) == {key("a")}


def test_an_entry_that_is_not_understood_keeps_its_reference() -> None:
    """Listed is listed."""
    odd = layout(0) | {"quantization": "Fp4"}
    assert released(odd, generation=2) == {"b"}


def test_the_longest_retention_counts() -> None:
    """Two ids for one key: it is released with the last of them, for the longer time."""
    book = ledger({"a02": binding("a", retention=10), "a04": binding("a", retention=500)})
    one = observe(book, wanted(layout(0, retentionSeconds=10), generation=2), NOW)
    assert one.released == {}
    both = observe(book, wanted(generation=2), NOW)
    assert both.released == {key("a"): Release(NOW, 500)}


def test_another_key_for_an_id_releases_the_first() -> None:
    """A new revision; and back to the old one takes the release back."""
    new = bind(BOOK, "a02", binding("c"), NOW)
    assert set(new.released) == {key("a")}
    assert set(bind(new, "a02", binding("a"), NOW).released) == {key("c")}


def test_expiry_counts_from_the_last_reference() -> None:
    """A reader is one; what is bound has none."""
    book = ledger(released={"a": Release(NOW, 100)}, used={"a": NOW + 50})
    assert expiry(book, key("a")) == NOW + 150
    assert expiry(BOOK, key("a")) is None


def test_use_is_remembered_by_the_hour() -> None:
    """So that readers do not make the file be written all the time."""
    once = use(BOOK, frozenset({key("a")}), 7300.0)
    assert once.used == {key("a"): 7200.0}
    assert use(once, frozenset({key("a")}), 9000.0) is once


def test_what_is_gone_is_forgotten_and_what_is_bound_is_not() -> None:
    """An unmounted or evicted entry's times go; a bound one's stay."""
    book = ledger({"a02": binding("a")}, released={"b": Release(0, 0)}, verified="abc")
    kept = forget(book, frozenset({key("c")}))
    assert set(kept.verified) == {key("a"), key("c")}
    assert kept.released == {}


def test_the_pin_decides_whether_a_resolution_still_answers() -> None:
    """Pinned to what was found here: kept. Pinned to something else, or set free again: looked at anew."""
    pinned = observe(BOOK, wanted(pin=DIGEST, generation=2), NOW)
    assert pinned.resolutions["5e"].digest == DIGEST
    assert observe(BOOK, wanted(pin="ff", generation=2), NOW).resolutions == {}
    assert observe(pinned, wanted(generation=3), NOW).resolutions == {}


def test_the_file_gives_the_ledger_back(tmp_path: Path) -> None:
    """Written whole, read whole; damage or another version is an empty ledger, not an error."""
    root: Root = init_root(tmp_path / "cache")
    book = ledger({"a02": binding("a")}, released={"b": Release(NOW, 7)}, verified="a", used={"a": 3600.0})
    on_disk.save(root, book)
    assert on_disk.load(root) == book
    path = root.path / "v1/agent" / on_disk.FILE
    path.write_text(json.dumps(on_disk.to_json(book) | {"version": 2}))
    assert on_disk.load(root).bindings == {}
    path.write_bytes(b"\0" * 40)
    assert on_disk.load(root).bindings == {}

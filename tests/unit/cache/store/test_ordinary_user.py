"""The store under an ordinary user: the superuser may do what others may not, and so hides mistakes with
modes."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from dlo_cache import store
from dlo_cache.build import build_layout_entries
from dlo_cache.entry import open_entry
from dlo_cache.errors import Denied
from dlo_cache.files_entry import build_files_entry
from dlo_cache.recovery import recover
from dlo_cache.root import init_root, open_root
from dlo_cache.verify import verify_entry
from unit.cache.store import checkpoints
from unit.cache.store.processes import NOBODY, in_child, killed_before

needs_superuser = pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser may become somebody else")


@pytest.fixture
def home() -> Iterator[Path]:
    """A directory that belongs to the ordinary user, below no private one."""
    path = Path(tempfile.mkdtemp(prefix="dlo-store-"))
    os.chown(path, NOBODY, NOBODY)
    yield path
    shutil.rmtree(path)


def life_of_entries(home: Path) -> None:
    """Build, reuse, read, link, evict, quarantine, collect: every move of a read-only directory."""
    root = init_root(home / "cache")
    arguments = {"tensor_size": 2, "producer": {}}
    built = build_layout_entries(root, checkpoints.component(), checkpoints.layout(), **arguments)  # type: ignore[arg-type]
    assert os.geteuid() != 0
    assert stat.S_IMODE(built[0].path.stat().st_mode) == 0o555
    with pytest.raises(PermissionError):
        (built[0].path / "more").touch()
    with open_entry(built[0].path) as entry:
        assert verify_entry(entry) > 0
    files = [
        checkpoints.MemoryFile("vae/config.json", b"{}"),
        checkpoints.MemoryFile("model_index.json", b"[]"),
    ]
    whole = build_files_entry(root, files, select="All", producer={})
    part = build_files_entry(root, files[:1], select="PipelineRest", producer={})
    assert (whole.path / "vae/config.json").stat().st_nlink == 2
    store.remove(root, whole.key)
    store.quarantine(root, built[1].key, "for the test")
    assert store.gc(root, [built[0].key]).removed == (part.key,)
    assert os.listdir(root.trash_dir) == os.listdir(root.ingest_dir) == []
    again = build_layout_entries(root, checkpoints.component(), checkpoints.layout(), **arguments)  # type: ignore[arg-type]
    assert [each.reused for each in again] == [True, False]


@needs_superuser
def test_life_of_entries(home: Path) -> None:
    """Everything the agent does works for an owner without powers."""
    assert in_child(lambda: life_of_entries(home), uid=NOBODY) == 0


@needs_superuser
def test_death_between_rename_and_mode(home: Path) -> None:
    """Killed before each call of a publish and eviction, the ordinary owner can still finish, evict and
    sweep."""

    def work(home: Path = home) -> None:
        root = init_root(home / "cache")
        key = build_files_entry(root, [checkpoints.MemoryFile("a/b", b"c")], select="All", producer={}).key
        store.remove(root, key)

    def settle() -> None:
        if (home / "cache/dlo-cache-root.json").exists():
            root = open_root(home / "cache")
            recover(root)
            assert all(not info.problem for info in store.list_entries(root))
            stages = [name for name in os.listdir(root.ingest_dir) if not name.startswith("probe.")]
            assert os.listdir(root.trash_dir) == stages == []

    survived = False
    for call in range(0, 400, 2):
        status = in_child(killed_before(call, work), uid=NOBODY)
        assert in_child(settle, uid=NOBODY) == 0
        survived = status == 0
        if survived:
            break
    assert survived


@needs_superuser
def test_root_of_somebody_else_is_denied_with_the_facts(home: Path) -> None:
    """Case 27: uid, gid and mode of the path, and who we are, in one error; nothing is written."""
    init_root(home / "cache")
    (home / "empty").mkdir()

    def refused(attempt: Callable[[Path], object], path: Path, *words: str) -> None:
        with pytest.raises(Denied) as caught:
            attempt(path)
        for word in words:
            assert word in caught.value.message

    def work() -> None:
        refused(open_root, home / "cache", "")
        refused(init_root, home / "empty", "uid 0", "gid 0", "mode 0755", f"uid {NOBODY}")

    assert in_child(work, uid=NOBODY) == 0
    assert os.listdir(home / "empty") == []


@needs_superuser
def test_init_for_another_user(home: Path) -> None:
    """The superuser makes the root for the agent's uid and gid, which can then work in it."""
    init_root(home / "cache", uid=NOBODY, gid=NOBODY)
    init_root(home / "cache", uid=NOBODY, gid=NOBODY)
    assert stat.S_IMODE((home / "cache").stat().st_mode) == 0o750
    assert in_child(lambda: life_of_entries(home), uid=NOBODY) == 0


@needs_superuser
@pytest.mark.parametrize("place", ["v1", "v1/entries", "v1/locks", "v1/source-digests"])
def test_a_part_of_the_root_that_belongs_to_another_user_is_refused(home: Path, place: str) -> None:
    """He could put entries, locks or digests of his own there."""
    root = init_root(home / "cache")
    os.chown(root.path / place, NOBODY, -1)
    with pytest.raises(Denied, match=f"{place} belongs to uid {NOBODY}") as caught:
        open_root(root.path)
    assert caught.value.code == "UnsafeOwner"
    init_root(root.path, uid=os.geteuid())
    open_root(root.path)

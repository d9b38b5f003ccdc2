"""How much of a remote checkpoint lies on the disk at once, from the plan of a build alone."""

from __future__ import annotations

from dlo_agent.reads import reads_of
from dlo_cache.image_plan import plan_images
from dlo_cache.layout import Layout
from dlo_cache.source import SourceTensor

MIB = 1 << 20
ROWS = Layout.from_json(
    '{"id": "case", "architecture": "Case", "groups": ["blocks"],'
    ' "rules": [{"pattern": "**", "role": "replicated"}]}'
)


class File:
    """A source file that is only planned with."""

    sha256 = None

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size

    def readinto(self, buffer: memoryview | bytearray, offset: int) -> int:
        """Never."""
        raise AssertionError("a plan reads nothing")


def tensors(placed: dict[str, File]) -> dict[str, SourceTensor]:
    """Tensors of 40 MiB, three pieces each, in the files given."""
    return {name: SourceTensor(name, file, "U8", (40, MIB), 0, 40 * MIB) for name, file in placed.items()}


def peak(placed: dict[str, File], passes: int = 1) -> int:
    """The peak of that many passes over the tensors."""
    plans = plan_images(tensors(placed), ROWS, dtype="Source", tensor_size=1, tensor_ranks=[0], config={})
    found = reads_of([plans] * passes)
    assert found.nbytes == {
        file.name: passes * 40 * MIB * list(placed.values()).count(file) for file in placed.values()
    }
    assert {file.name for file in found.files} == {file.name for file in placed.values()}
    return found.peak


def test_shards_in_the_order_of_execution() -> None:
    """Each goes before the one after the next comes; the next is asked for while the last is still read."""
    shards = [File(f"shard-{at}", 100 + at) for at in range(4)]
    assert peak({f"blocks.{at}.w": shard for at, shard in enumerate(shards)}) == 102 + 103


def test_a_shard_that_the_resident_part_needs() -> None:
    """It stays to the end."""
    shards = [File(f"shard-{at}", 100) for at in range(4)]
    placed = {f"blocks.{at}.w": shard for at, shard in enumerate(shards)}
    assert peak(placed | {"embedder": shards[0]}) == 300


def test_a_second_pass_needs_all_again() -> None:
    """More coordinates than one pass takes: nothing goes before the last pass has read it."""
    shards = [File(f"shard-{at}", 100) for at in range(4)]
    assert peak({f"blocks.{at}.w": shard for at, shard in enumerate(shards)}, passes=2) == 400

"""Without a layout entry: the checkpoint's own files, mapped in place or cut privately, and said so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from dlo_cache.files_entry import build_files_entry
from dlo_cache.handover import Handover, HandoverEntry, write_handover
from dlo_cache.root import init_root
from dlo_engine.errors import BadEntry
from dlo_engine.protocol import GenerateRequest
from dlo_engine.runtime import Runtime
from dlo_engine.specs import BlockImage, Segment
from dlo_sources.digests import DigestCache, hash_files
from dlo_sources.pipeline import open_directory
from fakes.engine_model import Model
from fakes.rank_work import serve
from fakes.ranks import run_ranks

MakeRequest = Callable[..., GenerateRequest]


def prepare_files(folder: Path, work: Path, *, leave_out: str = "", variant: str = "") -> Path:
    """Only the Files entry of a whole pipeline, as the gate hands over when no layout entry came in time."""
    root = init_root(work / "cache")
    files = hash_files(open_directory(folder, variant=variant).all_files(), DigestCache(None))
    kept = [file for file in files if not leave_out or leave_out not in file.name]
    built = build_files_entry(root, kept, select="All", producer={"name": "tests"})
    record = HandoverEntry(None, None, None, "Files", built.key, str(built.path), built.manifest_sha256)
    write_handover(work / "handover.json", Handover(str(root.path), (record,)))
    return work / "handover.json"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("policy", ["Opportunistic", "Disabled"])
def test_a_mapped_checkpoint_gives_the_same_bits(
    dtype: str, policy: str, request: pytest.FixtureRequest, request_of: MakeRequest, tmp_path: Path
) -> None:
    """One file or shards with an index, streamed; a fallback has its code, what was asked for has none."""
    model: Model = request.getfixturevalue(dtype)
    handover = prepare_files(model.folder, tmp_path)
    config = model.config(handover=handover, cache_policy=policy, resident_layers=1, slots=3)
    runtime = Runtime.start(config, 0, "", lambda *_: None)
    asked = request_of(n=2)
    assert runtime.generate(asked, lambda: False).images == model.png(asked)
    code = "NoLayoutEntry" if policy == "Opportunistic" else None
    assert runtime.status()["backing"] == {
        "kind": "MappedCheckpoint",
        "fallbackCode": code,
        "verified": True,
    }
    assert runtime.status()["lastRequest"]["copiedBytes"] > 0
    runtime.close()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_required_refuses_to_run_without_an_entry(float32: Model, tmp_path: Path) -> None:
    """Never a silent step down."""
    config = float32.config(handover=prepare_files(float32.folder, tmp_path))
    with pytest.raises(BadEntry, match="no entry of transformer for tensor rank 0"):
        Runtime.start(config, 0, "", lambda *_: None)


def test_tensor_parallel_ranks_cut_privately(
    bfloat16: Model, request_of: MakeRequest, tmp_path: Path
) -> None:
    """Two ranks cut their parts as the builder would: the same bits as with entries, backing PrivateLoad."""
    asked = [request_of()]
    handover = prepare_files(bfloat16.folder, tmp_path)
    config = bfloat16.config(handover=handover, tensor=2, cache_policy="Opportunistic")
    private = run_ranks(2, serve, tmp_path, config, [asked])
    cached = run_ranks(2, serve, tmp_path, bfloat16.config(tensor=2), [asked])
    for mine, theirs in zip(private, cached, strict=True):
        assert mine["sharedMemory"] == theirs["sharedMemory"], "private memory is charged as such"
        assert mine["status"]["backing"]["kind"] == "PrivateLoad"
        assert theirs["status"]["backing"]["kind"] == "MappedCache"
        assert np.array_equal(mine["latents"][0], theirs["latents"][0])


def test_broken_weight_sets_are_refused(float32: Model, bfloat16: Model, tmp_path: Path) -> None:
    """No weights, or a shard that is gone: by name, before anything is built."""
    for number, (model, left_out, message) in enumerate(
        (
            (float32, "transformer/diffusion", "holds 0 weight files and 0 indexes of transformer"),
            (bfloat16, "-00002-of-", "transformer/diffusion_pytorch_model-00002-of-"),
        )
    ):
        work = tmp_path / str(number)
        work.mkdir()
        handover = prepare_files(model.folder, work, leave_out=left_out)
        config = model.config(handover=handover, cache_policy="Opportunistic")
        with pytest.raises(BadEntry, match=message):
            Runtime.start(config, 0, "", lambda *_: None)


def test_segments_are_read_over_any_range() -> None:
    """Ranges that begin, end or lie in gaps and across segments; gaps keep what was there."""
    parts = [(0, b"abcdef"), (8, b"ghij"), (16, b"k")]
    image = BlockImage("b", tuple(Segment(at, memoryview(data)) for at, data in parts), (), 20)
    expected = np.full(20, 45, np.uint8)
    for at, data in parts:
        expected[at : at + len(data)] = np.frombuffer(data, np.uint8)
    for start in range(20):
        for stop in range(start, 21):
            target = np.full(stop - start, 45, np.uint8)
            image.read(start, stop, target)
            assert np.array_equal(target, expected[start:stop])

"""Several ranks over gloo: tensor parallelism, AllGather, shared pages, and what the ranks agree on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dlo_engine.protocol import GenerateRequest
from fakes.engine_entries import prepare
from fakes.engine_model import Model
from fakes.rank_work import (
    break_in_a_step,
    cancel,
    fail_to_encode,
    gather_blocks,
    serve,
    share_pages,
    start_only,
)
from fakes.ranks import run_ranks

MakeRequest = Callable[..., GenerateRequest]


def agree(mine: np.ndarray[Any, Any], reference: torch.Tensor) -> bool:
    """The design's figure for tensor parallelism in float32: max|a-b| <= 1e-4 max|b|."""
    expected = reference.float().numpy()
    return bool(np.abs(mine - expected).max() <= 1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("tensor", [2, 4])
def test_tensor_parallel_latents_agree_with_the_reference(
    tensor: int, float32: Model, request_of: MakeRequest, tmp_path: Path
) -> None:
    """Within 1e-4 in float32, the same bits on all ranks and with every choice of residents and slots."""
    asked = [request_of(), request_of(n=2, seed=9, width=64)]
    runs = [{"resident_layers": 0}, {"resident_layers": 2, "slots": 3}] if tensor == 2 else [{"slots": 2}]
    first: list[np.ndarray[Any, Any]] | None = None
    for options in runs:
        config = float32.config(tensor=tensor, **options)
        answers = run_ranks(tensor, serve, tmp_path, config, [asked])
        for index, request in enumerate(asked):
            assert agree(answers[0]["latents"][index], float32.latents(request))
            for other in answers[1:]:
                assert np.array_equal(other["latents"][index], answers[0]["latents"][index])
        first = first or answers[0]["latents"]
        assert all(np.array_equal(a, b) for a, b in zip(first, answers[0]["latents"], strict=True))
        whole = float32.handover(1).parent / "cache"
        assert answers[0]["memory"]["slots"] < _slots_of(whole, config.slots) / tensor * 1.5


def _slots_of(_root: Path, slots: int) -> int:
    """Bytes of the slots of the uncut tiny model: its largest block is a double block of 150,528 floats."""
    return slots * 4 * 150_528


@pytest.mark.parametrize("data", [2, 3])
def test_all_gather_is_bit_identical_and_copies_each_byte_once(
    data: int, bfloat16: Model, request_of: MakeRequest, tmp_path: Path
) -> None:
    """A wave of different prompts and seeds: each member's bits are those of a single rank-local engine."""
    asked = [
        [request_of(seed=index, prompt=f"cat {index}"), request_of(seed=index + 50, steps=2)]
        for index in range(data)
    ]
    config = bfloat16.config(data=data, transfer="AllGather", resident_layers=1)
    answers = run_ranks(data, serve, tmp_path, config, asked)
    for index, answer in enumerate(answers):
        for number, request in enumerate(asked[index]):
            expected = bfloat16.latents(request).float().numpy()
            assert np.array_equal(answer["latents"][number], expected)
        assert answer["memory"]["slots"] % (2 * data * 4096) == 0
    alone = run_ranks(1, serve, tmp_path, bfloat16.config(resident_layers=1), [asked[0]])[0]
    for number in range(2):
        copied = [answer["timings"][number]["copiedBytes"] for answer in answers]
        assert sum(copied) == alone["timings"][number]["copiedBytes"]
        assert max(copied) < sum(copied)


@pytest.mark.parametrize("size", [2, 3])
def test_all_gather_of_blocks_below_a_page_a_rank(size: int, tmp_path: Path) -> None:
    """Ranks past the end copy nothing; odd lengths and lengths of exactly whole shares rebuild rightly."""
    lengths = [100, 5000, 4096 * size, 3 * 4096 * size + 1, 4096]
    answers = run_ranks(size, gather_blocks, tmp_path, size, lengths)
    assert [answer[0] for answer in answers] == [[]] * size
    assert answers[0][2] == 4 * 4096 * size
    assert answers[-1][1] < answers[0][1]


def test_all_gather_with_tensor_parallelism(float32: Model, request_of: MakeRequest, tmp_path: Path) -> None:
    """Data 2 by tensor 2: weights are gathered across replicas, sums run within them."""
    asked = [[request_of(seed=1)], [request_of(seed=2, prompt="a house")]]
    config = float32.config(tensor=2, data=2, transfer="AllGather")
    answers = run_ranks(4, serve, tmp_path, config, asked)
    local = run_ranks(4, serve, tmp_path, float32.config(tensor=2, data=2), asked)
    for rank in range(4):
        assert np.array_equal(answers[rank]["latents"][0], local[rank]["latents"][0])
        assert agree(answers[rank]["latents"][0], float32.latents(asked[rank // 2][0]))


def test_two_workers_of_a_coordinate_share_one_copy(float32: Model, tmp_path: Path) -> None:
    """Summed PSS of the entry's mappings is at most 1.05 of one copy; device and inode are the same."""
    answers = run_ranks(2, share_pages, tmp_path, float32.config(data=2))
    assert answers[0]["places"] == answers[1]["places"]
    assert len(answers[0]["places"]) == 6
    assert answers[0]["writable"] == answers[1]["writable"] == []
    total = sum(answer["pss"] for answer in answers)
    assert 0.9 * answers[0]["bytes"] <= total <= 1.05 * answers[0]["bytes"]
    assert [answer["status"] for answer in answers] == [answer["pss"] for answer in answers]


def test_a_replica_cancels_together(float32: Model, request_of: MakeRequest, tmp_path: Path) -> None:
    """Only tensor rank 0 is asked; both ranks stop after the same step, the next request is whole."""
    config = float32.config(tensor=2)
    first, second = run_ranks(2, cancel, tmp_path, config, [0], [request_of(steps=6)])
    assert first[:2] == second[:2] == [(True, ()), 1]
    assert second[2] == (False, ())
    cancelled, images = first[2]
    assert not cancelled
    assert len(images) == 1


def test_a_wave_stops_only_when_all_members_gave_up(
    float32: Model, request_of: MakeRequest, tmp_path: Path
) -> None:
    """One of two cancels: the other's picture is right. All cancelled or discarded: the wave ends at once."""
    config = float32.config(data=2, transfer="AllGather")
    asked = [request_of(steps=4), request_of(steps=4, seed=77)]
    gone, stayed = run_ranks(2, cancel, tmp_path, config, [0], asked)
    assert (gone[0], gone[1], stayed[1]) == ((True, ()), 4, 4)
    assert stayed[0] == (False, float32.png(asked[1]))
    assert gone[2] == (False, float32.png(asked[0]))
    copy = [request_of(steps=4), request_of(steps=4, discard=True)]
    for answer in run_ranks(2, cancel, tmp_path, config, [0], copy):
        assert answer[:2] == [(True, ()), 1]


def test_a_prompt_that_cannot_be_encoded_leaves_the_ranks_in_step(
    float32: Model, request_of: MakeRequest, tmp_path: Path
) -> None:
    """All ranks of the wave hear of it before a step is run; the next wave works."""
    asked = [request_of(), request_of(seed=3)]
    config = float32.config(data=2, transfer="AllGather")
    zero, one = run_ranks(2, fail_to_encode, tmp_path, config, asked)
    assert zero == [("EngineError", "WaveFailed"), float32.png(asked[0])]
    assert one == [("ValueError", None), float32.png(asked[1])]


def test_a_failed_step_of_several_ranks_ends_them_all(
    float32: Model, request_of: MakeRequest, tmp_path: Path
) -> None:
    """One rank fails between collectives: nobody can know how far the others are, so no rank goes on."""
    answers = run_ranks(2, break_in_a_step, tmp_path, float32.config(tensor=2), request_of())
    assert answers == ["RankDied", "RankDied"]


def test_a_bad_byte_stops_every_rank(
    make_model: Callable[..., Model], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Each of two ranks hashes half; one finds the byte, both refuse to start, naming entry and rank."""
    model = make_model(dtype="float32", double_blocks=2, single_blocks=3)
    handover = prepare(model.folder, tmp_path_factory.mktemp("bad") / "cache")
    file = next(handover.parent.glob("cache/v1/entries/*/000-*.safetensors"))
    file.chmod(0o644)
    data = bytearray(file.read_bytes())
    data[-5000] ^= 1
    file.write_bytes(data)
    config = model.config(handover=handover, data=2)
    outcomes = run_ranks(2, start_only, tmp_path, config)
    assert [code for code, _ in outcomes] == ["Corrupt", "Corrupt"]
    texts = [text for _, text in outcomes]
    assert sum("transformer_blocks.0" in text for text in texts) >= 1
    assert sum(text.startswith("rank ") for text in texts) == 1
    trusting = model.config(handover=handover, data=2, verify="OnPublish")
    assert [code for code, _ in run_ranks(2, start_only, tmp_path, trusting)] == ["ok", "ok"]

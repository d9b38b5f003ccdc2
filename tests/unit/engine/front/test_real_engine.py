"""The front with real ranks: a tiny FLUX pipeline streamed from cache entries over HTTP, on the CPU."""

from __future__ import annotations

import base64
import json
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import torch
from fakes.engine_entries import prepare
from fakes.reference import reference_pipeline, reference_png
from fakes.tiny_flux import make_tiny_flux
from unit.engine.front.harness import Front, alive, kill, wait_until

RUNTIME = "dlo_engine.runtime:Runtime"
FLAGS = ("--threads", "1", "--default-size", "32x32", "--default-steps", "2")


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny pipeline."""
    return make_tiny_flux(tmp_path_factory.mktemp("tiny") / "flux")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """The reference computes with as many threads as the ranks."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_waves_of_real_ranks_give_the_reference_picture_cancel_and_drain(
    tmp_path: Path, pipeline: Path
) -> None:
    """Official client, one client that leaves, and SIGTERM in mid-request, over one AllGather engine."""
    prepare(pipeline, tmp_path / "root")
    with Front(tmp_path, *FLAGS, "--data", "2", "--transfer", "AllGather", runtime=RUNTIME) as front:
        front.ready()
        status = front.get("/v1/engine/status")[2]
        assert status["backing"] == {"kind": "MappedCache", "fallbackCode": None, "verified": True}
        assert {entry["coordinate"] for entry in status["entries"]} == {"0/1", None}
        base = f"http://127.0.0.1:{front.port}/v1"
        with openai.OpenAI(base_url=base, api_key="none", max_retries=0) as client:
            answer = client.images.generate(model="fake", prompt="a red digit", n=2, extra_body={"seed": 11})
        assert answer.data is not None
        pictures = tuple(base64.b64decode(item.b64_json or "") for item in answer.data)
        options = {"n": 2, "width": 32, "height": 32, "steps": 2, "seed": 11}
        assert pictures == reference_png(
            reference_pipeline(pipeline), prompt="a red digit", guidance_scale=3.5, **options
        )
        body = json.dumps({"prompt": "left alone", "num_inference_steps": 1000}).encode()
        with socket.create_connection(("127.0.0.1", front.port)) as connection:
            head = f"POST /v1/images/generations HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            wait_until(lambda: "dlo_engine_running_requests 1.0" in front.get("/metrics")[2])
        started = time.monotonic()
        assert front.generate(prompt="next")[0] == 200
        assert time.monotonic() - started < 10
        running = front.generate_later(prompt="the last", num_inference_steps=60)
        wait_until(lambda: "dlo_engine_running_requests 1.0" in front.get("/metrics")[2])
        pids = front.ranks()
        kill(front.process.pid, signal.SIGTERM)
        assert running()[0] == 200
        assert front.exit_status() == 0
        assert not any(alive(pid) for pid in pids.values())
        assert list(front.scratch.iterdir()) == []


def test_a_killed_real_rank_fails_what_the_other_waits_for_in_a_collective(
    tmp_path: Path, pipeline: Path
) -> None:
    """Tensor rank 1 of 2 dies while rank 0 sits in all-reduce."""
    prepare(pipeline, tmp_path / "root", tensor=2)
    with Front(tmp_path, *FLAGS, "--tensor", "2", runtime=RUNTIME) as front:
        front.ready()
        assert front.generate(prompt="before", response_format="url")[0] == 200
        assert front.get("/v1/engine/status")[2]["lastRequest"]["copiedBytes"] > 0
        running = front.generate_later(prompt="a digit", num_inference_steps=1000)
        wait_until(lambda: "dlo_engine_running_requests 1.0" in front.get("/metrics")[2])
        time.sleep(0.3)
        started = time.monotonic()
        kill(front.ranks()[1])
        status, _, body = running()
        assert (status, body["error"]["code"]) == (503, "RankDied")
        assert time.monotonic() - started < 5
        assert front.exit_status() == 1
        assert not any(alive(pid) for pid in front.ranks().values())

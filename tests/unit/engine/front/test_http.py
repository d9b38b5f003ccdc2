"""The HTTP surface of an engine with fake ranks: pictures, errors, cancelling, the official client."""

from __future__ import annotations

import base64
import io
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from PIL import Image
from unit.engine.front.harness import Front, wait_until


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """One engine for all tests of this file; it queues two requests at most."""
    with Front(tmp_path_factory.mktemp("http"), "--max-queued-requests", "2") as found:
        yield found.ready()


def picture(data: str) -> Image.Image:
    """The decoded PNG."""
    image = Image.open(io.BytesIO(base64.b64decode(data, validate=True)))
    image.load()
    return image


def test_a_picture_comes_back_with_the_defaults_of_the_model(front: Front) -> None:
    status, headers, body = front.generate(prompt="a cat", seed=5)
    assert status == 200
    assert abs(body["created"] - time.time()) < 60
    image = picture(body["data"][0]["b64_json"])
    assert (image.size, image.getpixel((0, 0))) == ((32, 48), (5, 0, 0))
    assert headers["x-request-id"]
    assert front.calls(0)[-1]["guidance"] == 3.5


def test_n_pictures_and_data_urls(front: Front) -> None:
    _, _, body = front.generate(prompt="a cat", seed=7, n=2, size="64x16", response_format="url")
    urls = [item["url"] for item in body["data"]]
    images = [picture(url.removeprefix("data:image/png;base64,")) for url in urls]
    assert [image.getpixel((0, 0)) for image in images] == [(7, 0, 0), (8, 0, 0)]
    assert images[0].size == (64, 16)


def test_requests_without_a_seed_get_different_ones(front: Front) -> None:
    for _ in range(2):
        front.generate(prompt="unseeded")
    seeds = [call["seed"] for call in front.calls(0) if call["prompt"] == "unseeded"]
    assert len(set(seeds)) == 2
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_official_client_gets_a_picture(front: Front) -> None:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{front.port}/v1", api_key="none", max_retries=0) as client:
        answer = client.images.generate(
            model="fake", prompt="a dog", n=1, size="1024x1024", extra_body={"seed": 3, "size": "64x64"}
        )
        assert answer.data is not None
        assert picture(answer.data[0].b64_json or "").size == (64, 64)
        assert [model.id for model in client.models.list()] == ["fake"]
        with pytest.raises(openai.BadRequestError, match="multiples of 16") as refused:
            client.images.generate(model="fake", prompt="a dog", extra_body={"size": "65x64"})
        assert refused.value.param == "size"
        assert refused.value.code == "InvalidRequest"
        assert refused.value.request_id
        with pytest.raises(openai.NotFoundError, match="this engine serves 'fake'"):
            client.images.generate(model="dall-e-3", prompt="a dog")


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", "/v1/images/generations", b"{", 400, "InvalidJson"),
        ("POST", "/v1/images/generations", b'{"prompt": ""}', 400, "InvalidRequest"),
        ("POST", "/v1/images/generations", b'{"prompt": "x", "colour": 1}', 400, "UnknownField"),
        ("POST", "/v1/images/generations", b" " * (1 << 20) + b"x", 413, "BodyTooLarge"),
        ("GET", "/v1/images/generations", None, 405, "MethodNotAllowed"),
        ("DELETE", "/health", None, 405, "MethodNotAllowed"),
        ("GET", "/v1/nothing", None, 404, "NotFound"),
        ("GET", "/docs", None, 404, "NotFound"),
        ("GET", "/openapi.json", None, 404, "NotFound"),
    ],
)
def test_errors_have_the_openai_shape_and_a_request_id(
    front: Front, method: str, path: str, body: bytes | None, status: int, code: str
) -> None:
    found, headers, answer = front.request(method, path, body, {"x-request-id": "mine-1"})
    assert found == status
    assert set(answer) == {"error", "request_id"}
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["code"] == code
    assert answer["request_id"] == headers["x-request-id"] == "mine-1"
    if status == 405:
        assert headers["allow"]


def test_a_request_id_that_is_not_plain_is_replaced(front: Front) -> None:
    _, headers, _ = front.request("GET", "/livez", headers={"x-request-id": "a b<script>"})
    assert headers["x-request-id"].startswith("req-")


def test_a_body_of_unknown_length_is_cut_off_at_the_limit(front: Front) -> None:
    with socket.create_connection(("127.0.0.1", front.port), timeout=20) as connection:
        head = "POST /v1/images/generations HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        connection.sendall(head.encode() + b"100001\r\n" + b"x" * 0x100001 + b"\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_a_failed_request_is_a_500_with_its_reason_and_the_next_one_works(front: Front) -> None:
    status, _, body = front.generate(prompt="fail")
    assert (status, body["error"]["code"]) == (500, "BadPicture")
    assert body["error"]["message"] == "the picture did not come out — ask for another"
    assert body["error"]["type"] == "server_error"
    assert front.generate(prompt="again")[0] == 200
    assert front.get("/health")[0] == 200


def test_a_client_that_disconnects_frees_the_engine_between_steps(front: Front) -> None:
    before = len(front.calls(0))
    body = json.dumps({"prompt": "slow and long", "num_inference_steps": 1000}).encode()
    with socket.create_connection(("127.0.0.1", front.port)) as connection:
        head = f"POST /v1/images/generations HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        wait_until(lambda: len(front.calls(0)) > before)
    started = time.monotonic()
    assert front.generate(prompt="next", seed=1)[0] == 200
    assert time.monotonic() - started < 5
    assert front.calls(0)[before + 1] == {**front.calls(0)[before], "cancelled": True}
    assert 'dlo_engine_requests_total{outcome="cancelled"} 1.0' in front.get("/metrics")[2]


def test_one_request_too_many_is_a_429_and_a_waiting_client_may_leave(front: Front) -> None:
    before = len(front.calls(0))
    running = front.generate_later(prompt="slow", num_inference_steps=15)
    wait_until(lambda: len(front.calls(0)) > before)
    body = json.dumps({"prompt": "left the queue"}).encode()
    head = f"POST /v1/images/generations HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    waiting = front.generate_later(prompt="waited")

    def queued() -> float:
        lines = front.get("/metrics")[2].splitlines()
        return float(next(line.split()[1] for line in lines if line.startswith("dlo_engine_queue_length")))

    with socket.create_connection(("127.0.0.1", front.port)) as connection:
        connection.sendall(head.encode() + body)
        wait_until(lambda: queued() == 2)
        status, headers, answer = front.generate(prompt="too many")
        assert (status, answer["error"]["code"]) == (429, "QueueFull")
        assert answer["error"]["type"] == "rate_limit_error"
        assert int(headers["retry-after"]) > 0
    assert running()[0] == 200
    assert waiting()[0] == 200
    assert "left the queue" not in [call["prompt"] for call in front.calls(0)]


def test_status_metrics_and_models(front: Front) -> None:
    assert front.generate(prompt="one")[0] == 200
    status, _, body = front.get("/v1/engine/status")
    assert status == 200
    assert body["backing"] == {"kind": "MappedCache", "fallbackCode": None, "verified": True}
    assert body["entries"][0]["coordinate"] == "0/1"
    assert body["lastRequest"]["steps"] == 4
    expected = {"model", "topology", "device", "offload", "backing", "entries", "start", "lastRequest"}
    assert set(body) == expected
    assert front.get("/livez")[2] == {"status": "alive"}
    assert front.get("/health")[::2] == (200, {"status": "ready"})
    assert front.get("/v1/models")[2]["data"][0]["id"] == "fake"
    _, headers, text = front.get("/metrics")
    assert headers["content-type"].startswith("text/plain")
    assert 'dlo_engine_backing_info{fallback_code="",kind="MappedCache",verified="true"} 1.0' in text
    assert "dlo_engine_ready 1.0" in text


def test_events_tell_the_start_in_order(front: Front) -> None:
    names = [event["event"] for event in front.events]
    assert names == ["listening", "phase", "phase", "ready"]
    phase: dict[str, Any] = front.events[1]
    assert phase == {"event": "phase", "rank": 0, "phase": "verify", "details": {"done": 1, "total": 2}}
    ready = front.events[-1]
    assert ready["url"] == f"http://127.0.0.1:{front.port}"
    assert ready["status"]["model"] == "fake"


def test_stray_output_of_a_rank_goes_to_stderr_behind_its_rank(front: Front) -> None:
    assert front.generate(prompt="stray-output")[0] == 200
    wait_until(lambda: "rank 0: a library wrote this\n" in front.stderr)
    assert all("library" not in json.dumps(event) for event in front.events)


def test_the_log_is_json_and_names_the_request(front: Front) -> None:
    _, headers, _ = front.generate(prompt="logged")
    name = headers["x-request-id"]
    wait_until(lambda: name in front.stderr)
    line = next(line for line in front.stderr.splitlines() if name in line)
    record = json.loads(line)
    assert (record["event"], record["request_id"], record["level"]) == ("Request was served", name, "info")
    assert "Traceback" not in front.stderr


def test_all_gather_requests_share_waves_and_missing_members_run_copies(tmp_path: Path) -> None:
    with Front(tmp_path, "--data", "2", "--transfer", "AllGather") as front:
        front.ready()
        first = front.generate_later(prompt="slow one", num_inference_steps=5)
        front.wait_running()
        others = [front.generate_later(prompt=f"like {index}") for index in range(2)]
        assert front.generate(prompt="", size="64x64")[0] == 400
        assert front.generate(prompt="different", num_inference_steps=7)[0] == 200
        assert first()[0] == 200
        assert [other()[0] for other in others] == [200, 200]
        calls = [(call["prompt"], call["discard"]) for rank in (0, 1) for call in front.calls(rank)]
        assert sorted(calls) == [
            ("different", False),
            ("different", True),
            ("like 0", False),
            ("like 1", False),
            ("slow one", False),
            ("slow one", True),
        ]


def test_a_wave_stops_when_all_its_clients_are_gone_and_not_before(tmp_path: Path) -> None:
    with Front(tmp_path, "--data", "2", "--transfer", "AllGather") as front:
        front.ready()
        body = json.dumps({"prompt": "slow and long", "num_inference_steps": 600}).encode()
        head = f"POST /v1/images/generations HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", front.port)) as connection:
            connection.sendall(head.encode() + body)
            front.wait_running(rank=1)
        assert front.generate(prompt="next")[0] == 200
        cancelled = [call.get("cancelled") for call in front.calls(0)]
        assert cancelled == [None, True, None]


def raw(front: Front, data: bytes, seconds: float = 10) -> bytes:
    """What comes back for these bytes until the connection ends."""
    with socket.create_connection(("127.0.0.1", front.port), timeout=seconds) as connection:
        connection.sendall(data)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
        return answer


@pytest.mark.parametrize(
    "data",
    [
        b"GARBAGE\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
        b"POST /v1/images/generations HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n",
    ],
)
def test_what_is_no_http_gets_the_error_document_too(front: Front, data: bytes) -> None:
    head, _, body = raw(front, data).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    document = json.loads(body)
    assert document["error"]["code"] == "InvalidHttp"
    assert document["error"]["type"] == "invalid_request_error"
    assert document["request_id"].encode() in head
    assert front.get("/health")[0] == 200


@pytest.mark.parametrize("path", ["/livez", "/health", "/metrics", "/v1/models", "/v1/engine/status"])
def test_head_is_get_without_a_body(front: Front, path: str) -> None:
    got, asked = front.get(path), front.request("HEAD", path)
    assert (asked[0], got[0]) == (200, 200)
    assert asked[1]["content-type"] == got[1]["content-type"]


@pytest.mark.parametrize(("method", "path"), [("GET", "/health/"), ("POST", "/v1/images/generations/")])
def test_a_slash_too_many_is_no_redirect(front: Front, method: str, path: str) -> None:
    status, headers, body = front.request(method, path, headers={"host": "elsewhere.example"})
    assert (status, body["error"]["code"]) == (404, "NotFound")
    assert "location" not in headers


@pytest.mark.parametrize(
    ("body", "param"),
    [(b'{"prompt": "x", "\\ud800": 1}', "?"), (b'{"prompt": "x", "a\\udc00b": 1}', "a?b")],
)
def test_half_characters_in_names_are_answered(front: Front, body: bytes, param: str) -> None:
    status, _, answer = front.request("POST", "/v1/images/generations", body)
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "UnknownField", param)


def test_a_number_of_too_many_digits_is_said(front: Front) -> None:
    body = b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}"
    status, _, answer = front.request("POST", "/v1/images/generations", body)
    assert status == 400
    assert "too many digits" in answer["error"]["message"]


def test_clients_that_never_finish_are_let_go(tmp_path: Path) -> None:
    """No head, half a head, a second head that stops: closed. Half a body: 408. A running request is not cut."""
    with Front(tmp_path, client_seconds=0.5) as front:
        front.ready()
        running = front.generate_later(prompt="a cat", num_inference_steps=150)
        assert raw(front, b"") == b""
        assert raw(front, b"GET /health HT") == b""
        assert raw(front, b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\nGET /h").startswith(b"HTTP/1.1 200")
        head = b"POST /v1/images/generations HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{"
        answer = raw(front, head)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "BodyTooSlow"
        assert running()[0] == 200

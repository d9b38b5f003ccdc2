"""What a real engine's metrics say after real pictures, and how long requests waited."""

from __future__ import annotations

import math
import resource
from pathlib import Path

import pytest
from dlo_engine.front.metrics import memlock_limit
from prometheus_client.parser import text_string_to_metric_families
from unit.engine.front.harness import Front, wait_until
from unit.monitoring.living import Parts

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(text: str) -> Samples:
    """Every sample by name and labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def summed(found: Samples, name: str) -> float:
    """The sum over all labels."""
    values = [value for (sample, _), value in found.items() if sample == name]
    assert values, name
    return sum(values)


def test_three_pictures_and_a_refusal(parts: Parts) -> None:
    """Outcomes, times, copied bytes, entries and the start, of one engine that streams from the cache."""
    found = samples(parts.engine.exposition())
    assert found["dlo_engine_requests_total", (("outcome", "ok"),)] == 3
    assert found["dlo_engine_requests_total", (("outcome", "refused"),)] == 1
    for name in ("request", "request_queue", "request_compute", "request_copy", "request_wait", "step"):
        assert found[f"dlo_engine_{name}_seconds_count", ()] == 3, name
    assert (
        found["dlo_engine_request_seconds_sum", ()] > found["dlo_engine_request_compute_seconds_sum", ()] > 0
    )
    assert found["dlo_engine_copied_bytes_total", ()] > 0
    backing = [key for key in found if key[0] == "dlo_engine_backing_info"]
    labels = (("fallback_code", ""), ("kind", "MappedCache"), ("verified", "true"))
    assert backing == [("dlo_engine_backing_info", labels)]
    layout = (("component", "transformer"), ("coordinate", "0/1"))
    rest = (("component", ""), ("coordinate", ""))
    for place in (layout, rest):
        assert found["dlo_engine_entry_bytes", place] > 0
    assert (
        0 < found["dlo_engine_entry_pss_bytes", layout] <= found["dlo_engine_entry_bytes", layout] + 4096 * 64
    )
    phases = {dict(key[1])["phase"] for key in found if key[0] == "dlo_engine_start_duration_seconds"}
    assert {"map", "verify", "import", "warmup"} <= phases
    assert summed(found, "dlo_engine_start_duration_seconds") > 0
    assert found["dlo_engine_ready", ()] == 1


def test_a_request_that_waits_is_timed(tmp_path: Path) -> None:
    """One replica, two requests: the second one's wait is the time until the first has ended."""
    with Front(tmp_path) as front:
        front.ready()
        first = front.generate_later(prompt="slow", num_inference_steps=20)
        front.wait_running()
        second = front.generate_later(prompt="next", num_inference_steps=1)
        wait_until(lambda: "dlo_engine_queue_length 1.0" in front.get("/metrics")[2])
        assert samples(front.get("/metrics")[2])["dlo_engine_request_queue_seconds_count", ()] == 1
        assert (first()[0], second()[0]) == (200, 200)
        found = samples(front.get("/metrics")[2])
        assert found["dlo_engine_request_queue_seconds_count", ()] == 2
        assert found["dlo_engine_request_queue_seconds_sum", ()] > 0.01


def test_the_limit_of_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernel has it; no limit is infinite, never -1."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 20, resource.RLIM_INFINITY))
    assert memlock_limit() == 8 << 20
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert math.isinf(memlock_limit())

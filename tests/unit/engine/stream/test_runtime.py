"""The seam to the rank's main loop: start, status, close; and entries as they are opened and counted."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dlo_cache.errors import CacheError, NotFound
from dlo_cache.handover import Handover, read_handover, write_handover
from dlo_engine.errors import BadEntry, Unsupported
from dlo_engine.mapping import Verification, open_entries, pss_bytes
from dlo_engine.protocol import GenerateRequest
from dlo_engine.runtime import Runtime
from fakes.engine_model import Model

MakeRequest = Callable[..., GenerateRequest]


def mapped(folder: Path) -> bool:
    """Whether this process maps any file below a folder."""
    return str(folder) in Path("/proc/self/maps").read_text()


def test_start_serves_tells_and_closes(float32: Model, request_of: MakeRequest) -> None:
    """The whole seam on one rank; afterwards nothing is mapped, and closing again does nothing."""
    phases: list[tuple[str, dict[str, Any]]] = []
    runtime = Runtime.start(float32.config(), 0, "", lambda *phase: phases.append(phase))
    assert [phase for phase, _ in phases] == ["map", "import", "build", "warmup", "verify"]
    total = dict(phases)["map"]["bytes"]
    assert dict(phases)["verify"]["bytes"] >= total
    assert runtime.limits.pixel_multiple == 4
    asked = request_of(n=2)
    result = runtime.generate(asked, lambda: False)
    assert result.id == "r1"
    assert result.images == float32.png(asked)
    status = runtime.status()
    assert status["backing"] == {"kind": "MappedCache", "fallbackCode": None, "verified": True}
    assert set(status["start"]) >= {"mapMs", "verifyMs", "registerMs", "importMs", "warmupMs"}
    assert set(status["lastRequest"]) == {"steps", "computeMs", "copyMs", "waitMs", "copiedBytes"}
    layout, rest = status["entries"]
    assert (layout["component"], layout["coordinate"], layout["registeredBytes"]) == ("transformer", "0/1", 0)
    assert (rest["component"], rest["coordinate"]) == (None, None)
    assert layout["bytes"] + rest["bytes"] == total
    assert layout["pssBytes"] >= 0.9 * layout["bytes"]
    assert mapped(float32.work)
    runtime.close()
    runtime.close()
    assert not mapped(float32.work)
    with pytest.raises(Unsupported, match="closed"):
        runtime.generate(asked, lambda: False)


def test_nothing_heavy_is_imported_with_the_seam() -> None:
    """Mapping and hashing start before torch: neither runtime nor mapping imports it."""
    code = (
        "import sys, dlo_engine.runtime, dlo_engine.mapping, dlo_engine.families\n"
        "heavy = {'torch', 'diffusers', 'transformers', 'safetensors', 'PIL'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_on_publish_trusts_and_says_so(float32: Model) -> None:
    """Without hashing, status does not claim it."""
    runtime = Runtime.start(float32.config(verify="OnPublish"), 0, "", lambda *_: None)
    assert runtime.status()["backing"]["verified"] is False
    runtime.close()


def test_the_kernel_is_not_asked_for_pages_at_every_request(
    float32: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It walks all pages of all mappings for the answer: asked once for all entries, and not again so soon."""
    runtime = Runtime.start(float32.config(), 0, "", lambda *_: None)
    asked: list[Path] = []
    real = Path.read_text

    def read_text(path: Path) -> str:
        asked.append(path)
        return real(path)

    monkeypatch.setattr(Path, "read_text", read_text)
    states = [runtime.status()["entries"] for _ in range(5)]
    assert asked == [Path("/proc/self/smaps")]
    assert states == [states[0]] * 5
    monkeypatch.setattr("dlo_engine.runtime.PSS_MAX_AGE_SECONDS", 0.0)
    runtime.status()
    assert len(asked) == 2
    runtime.close()


def test_a_failed_start_leaves_nothing_mapped(float32: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fails after the entries are open: unmapped, leases given back."""
    monkeypatch.setattr("dlo_engine.pipeline.StreamedPipeline.warm_up", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Runtime.start(float32.config(), 0, "", lambda *_: None)
    assert not mapped(float32.work)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_missing_gpu_is_said(float32: Model) -> None:
    """The message counts the GPUs there are."""
    with pytest.raises(Unsupported, match="Rank 0 has no GPU: 0 visible"):
        Runtime.start(float32.config(device="cuda"), 0, "", lambda *_: None)
    assert not mapped(float32.work)


def test_entries_must_be_what_the_hand_over_file_says(float32: Model, tmp_path: Path) -> None:
    """Another manifest, an entry that is gone, no Files entry, a swapped folder: each refused by name."""
    good = read_handover(float32.handover())
    layout, rest = good.entries

    def opening(*entries: Any) -> Any:
        write_handover(tmp_path / "h.json", Handover(good.root, entries))
        return open_entries(tmp_path / "h.json", ("transformer",), 0, 1)

    def refused(kind: type[Exception], words: str, *entries: Any) -> None:
        with pytest.raises(kind, match=words) as caught:
            opening(*entries)
        # The error is still there, and its frames with it: nothing may hang on their being forgotten.
        assert caught.value.__traceback__ is not None
        assert not mapped(float32.work)

    refused(CacheError, "0" * 64, dataclasses.replace(layout, manifest_sha256="0" * 64), rest)
    refused(NotFound, "gone", dataclasses.replace(layout, dir=str(tmp_path / "gone")), rest)
    refused(BadEntry, "names 0 Files entries", layout)
    for record, other in ((layout, rest), (rest, layout)):
        swapped = dataclasses.replace(record, dir=other.dir, manifest_sha256=other.manifest_sha256)
        refused(BadEntry, "not as handed over", *(swapped if one is record else one for one in good.entries))
    entries = opening(layout, rest)
    with pytest.raises(BadEntry, match=r"no readable vae_2/config\.json"):
        entries.config("vae_2")
    entries.close()


def test_verification_can_be_given_up(float32: Model) -> None:
    """A start that failed does not hash to the end."""
    entries = open_entries(float32.handover(), ("transformer",), 0, 1)
    many = [(entries.all()[0].entry, (0, 1))] * 2000
    begin = time.monotonic()
    verification = Verification(many, threads=1)
    verification.stop()
    assert time.monotonic() - begin < 10
    assert verification.checked_bytes < 2000 * entries.all()[0].nbytes
    entries.close()


SMAPS = """\
7f0000000000-7f0000001000 r--s 00000000 08:01 77                 /cache/v1/entries/ab/000-b.0.safetensors
Size:                  4 kB
Pss:                   2 kB
Pss_Dirty:             1 kB
VmFlags: rd mr mw me ms sd
7f0000001000-7f0000002000 r--s 00000000 08:01 78                 /cache/v1/entries/ab/odd name.safetensors
Pss:                   4 kB
7f0000002000-7f0000003000 rw-p 00000000 00:00 0
Pss:                 100 kB
7f0000003000-7f0000004000 r--s 00000000 08:01 79                 /cache/v1/entries/cd/000-b.0.safetensors
Pss:                 100 kB
"""


def test_pss_is_that_of_the_named_files() -> None:
    """Only the mappings asked for count; names with spaces and anonymous memory are told apart."""
    folder = "/cache/v1/entries/ab"
    both = [f"{folder}/000-b.0.safetensors", f"{folder}/odd name.safetensors"]
    assert pss_bytes(SMAPS, both) == 6 * 1024
    assert pss_bytes(SMAPS, both[:1]) == 2 * 1024
    assert pss_bytes(SMAPS, []) == 0

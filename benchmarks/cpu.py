"""`make bench`: what this machine does without a GPU, each figure beside what a user would pick instead.

A synthetic FLUX pipeline of about 1.3 GiB is made in a temporary folder, then: build against an overlapped copy
with fsync of the same bytes; verify against single-thread sha256; warm start (imports done, weights usable)
against diffusers' `from_pretrained`; a streamed step against a resident one. Fresh processes where it matters.
"""

import argparse
import contextlib
import hashlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from dlo_cache.build import build_layout_entries
from dlo_cache.entry import open_entry
from dlo_cache.files_entry import build_files_entry
from dlo_cache.handover import Handover, HandoverEntry, write_handover
from dlo_cache.layouts import builtin_layout
from dlo_cache.root import init_root
from dlo_cache.store import remove
from dlo_cache.verify import verify_entry
from dlo_sources.digests import DigestCache, hash_files
from dlo_sources.pipeline import open_directory
from fakes.tiny_flux import make_tiny_flux
from report import duration, rate, write

PIECE = 16 << 20
PRETRAINED = "diffusers from_pretrained, weights touched"
GB = 1e9


def seconds(work: Callable[[], Any]) -> float:
    """Wall time of one call."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def overlapped_copy(sources: list[Path], target: Path) -> None:
    """Read and write in 16 MiB pieces at the same time, then fsync: what a plain cache fill would do."""
    pieces: queue.Queue[bytes | None] = queue.Queue(maxsize=4)

    def read() -> None:
        for source in sources:
            with source.open("rb", buffering=0) as stream:
                while piece := stream.read(PIECE):
                    pieces.put(piece)
        pieces.put(None)

    reader = threading.Thread(target=read)
    reader.start()
    with target.open("wb", buffering=0) as stream:
        while (piece := pieces.get()) is not None:
            stream.write(piece)
        os.fsync(stream.fileno())
    reader.join()
    target.unlink()


def sha256_of(paths: list[Path]) -> None:
    """Single-thread sha256 over warm files."""
    for path in paths:
        with path.open("rb") as stream:
            hashlib.file_digest(stream, "sha256")


def prepare(folder: Path) -> tuple[Any, Any, list[Path]]:
    """The synthetic pipeline, opened and hashed, and its transformer's weight files."""
    source = make_tiny_flux(
        folder / "model", dtype="bfloat16", double_blocks=4, single_blocks=10, heads=12, head_dim=128
    )
    root = init_root(folder / "root")
    pipeline = open_directory(source)
    pipeline = pipeline.with_files(hash_files(pipeline.all_files(), DigestCache(root.digests_dir)))
    return root, pipeline, sorted((source / "transformer").glob("*.safetensors"))


def measure_build(
    root: Any, pipeline: Any, files: list[Path], tensor: int, runs: int
) -> tuple[list[float], list[float]]:
    """GB/s of a build of all coordinates and of the copy, alternating, on the same disk."""
    component = pipeline.component("transformer")
    layout = builtin_layout(component.class_name)
    assert layout is not None
    total = sum(file.stat().st_size for file in files) / GB
    ours, theirs = [], []
    for _ in range(runs):
        theirs.append(total / seconds(lambda: overlapped_copy(files, root.path / "copy")))
        begin = time.perf_counter()
        built = build_layout_entries(
            root, component, layout, tensor_size=tensor, producer={"program": "bench"}
        )
        ours.append(total / (time.perf_counter() - begin))
        for entry in built:
            remove(root, entry.key)
    return ours, theirs


def make_entries(root: Any, pipeline: Any, folder: Path) -> Path:
    """Entries at tensor size 1 and the hand-over file of an engine."""
    component = pipeline.component("transformer")
    layout = builtin_layout(component.class_name)
    assert layout is not None
    producer = {"program": "bench"}
    (built,) = build_layout_entries(root, component, layout, tensor_size=1, producer=producer)
    rest = build_files_entry(
        root,
        pipeline.rest_files(("transformer",)),
        select="PipelineRest",
        streamed=("transformer",),
        producer=producer,
    )
    entries = (
        HandoverEntry(0, "transformer", "0/1", "Layout", built.key, str(built.path), built.manifest_sha256),
        HandoverEntry(None, None, None, "Files", rest.key, str(rest.path), rest.manifest_sha256),
    )
    file = folder / "handover.json"
    write_handover(file, Handover(str(root.path), entries))
    return file


def child(role: str, folder: Path, *words: str) -> dict[str, float]:
    """Run this file in a fresh process in another role; its figures."""
    command = [sys.executable, __file__, "--role", role, "--folder", str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def engine_role(folder: Path, words: list[str]) -> dict[str, float]:
    """Start the engine's runtime in this process, draw twice, report."""
    from dlo_engine.config import EngineConfig
    from dlo_engine.protocol import GenerateRequest
    from dlo_engine.runtime import Runtime

    config = EngineConfig(
        handover=folder / "handover.json", model_name="bench", device="cpu", mode=words[0], verify=words[1],  # type: ignore[arg-type]
        max_sequence_length=64,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as meeting:
        runtime = Runtime.start(config, 0, f"file://{meeting}/rendezvous", lambda _phase, _details: None)
        status = runtime.status()["start"]
        steps = 3
        side = 64
        request = GenerateRequest("bench", "seven", 1, side, side, steps, None, 0)
        runtime.generate(request, lambda: False)
        step = seconds(lambda: runtime.generate(request, lambda: False)) / steps
        runtime.close()
    usable = (status["buildMs"] + status["mapMs"]) / 1000
    waited = max(0.0, status["verifyMs"] - status["importMs"]) / 1000
    return {"usable": usable + waited, "verify": status["verifyMs"] / 1000, "step": step}


def diffusers_role(folder: Path) -> dict[str, float]:
    """Imports first, then the clock: `from_pretrained`, and every weight read once, as the first step does."""
    import torch
    from diffusers import FluxPipeline

    begin = time.perf_counter()
    pipe = FluxPipeline.from_pretrained(folder / "model", torch_dtype=torch.bfloat16)
    loaded = time.perf_counter() - begin
    for parameter in pipe.transformer.parameters():
        parameter.view(torch.int16).flatten()[::2048].sum().item()
    return {"loaded": loaded, "touched": time.perf_counter() - begin}


def bench(runs: int) -> Path:
    """Everything, one page."""
    with tempfile.TemporaryDirectory(prefix="dlo-bench-", dir=os.environ.get("DLO_BENCH_DIR")) as name:
        folder = Path(name)
        print("making the model", flush=True)
        root, pipeline, files = prepare(folder)
        total = sum(file.stat().st_size for file in files)
        sha256_of(files)
        print("build", flush=True)
        build1 = measure_build(root, pipeline, files, 1, runs)
        build2 = measure_build(root, pipeline, files, 2, runs)
        make_entries(root, pipeline, folder)
        entry_path = next(p for p in root.entries_dir.iterdir() if (p / "resident.safetensors").exists())
        print("verify", flush=True)
        with open_entry(entry_path) as entry:
            verify = [entry.nbytes / GB / seconds(lambda: verify_entry(entry)) for _ in range(runs + 1)][1:]
        sha = [total / GB / seconds(lambda: sha256_of(files)) for _ in range(runs)]
        print("start", flush=True)
        streamed = [child("engine", folder, "DistributedLayerwise", "Always") for _ in range(runs)]
        trusted = [child("engine", folder, "DistributedLayerwise", "OnPublish") for _ in range(runs)]
        resident = [child("engine", folder, "None", "OnPublish") for _ in range(runs)]
        peer = [child("diffusers", folder) for _ in range(runs)]
    rows = [
        rate("build, tensor 1", *build1, "overlapped copy + fsync"),
        rate("build, tensor 2, both coordinates", *build2, "overlapped copy + fsync"),
        rate("verify (BLAKE3, every byte)", verify, sha, "sha256, one thread"),
        duration(
            "warm start: imports done → weights usable, verified",
            [run["usable"] for run in streamed], [run["touched"] for run in peer], PRETRAINED,
        ),
        duration(
            "the same, verify OnPublish",
            [run["usable"] for run in trusted], [run["touched"] for run in peer], PRETRAINED,
        ),
        duration(
            "one step, streamed", [run["step"] for run in streamed], [run["step"] for run in resident],
            "all blocks resident",
        ),
    ]  # fmt: skip
    notes = [
        f"from_pretrained returns after {1000 * min(run['loaded'] for run in peer):.0f} ms, before it has read "
        "the weights; it checks no digest.",
        "The verified start hides behind imports where cores are free; what is left is counted.",
    ]
    subject = {
        "model": f"synthetic FLUX, 4 double + 10 single blocks, hidden 1536, bf16, {total / 2**30:.2f} GiB"
    }
    return write("cpu", "CPU: build, verify, start, step", "make bench", subject, rows, notes)


def main() -> None:
    """Parse the role and run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--role", choices=["all", "engine", "diffusers"], default="all")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("words", nargs="*")
    arguments = parser.parse_args()
    if arguments.role == "all":
        print(bench(arguments.runs).read_text())
        return
    with contextlib.redirect_stdout(sys.stderr):
        if arguments.role == "engine":
            figures = engine_role(arguments.folder, arguments.words)
        else:
            figures = diffusers_role(arguments.folder)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

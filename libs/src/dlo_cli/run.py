"""``dlo run``: a manifest on this machine, without a cluster."""

import threading
from dataclasses import dataclass
from pathlib import Path

import urllib3
from dlo_api.v1alpha1 import DiffusionDeployment
from dlo_cache.handover import Handover

from dlo_cli.checks import check_address
from dlo_cli.console import Console, human_bytes
from dlo_cli.engine import Engine, Event, failure
from dlo_cli.entries import ensure_entries, relative
from dlo_cli.errors import CliError, UsageError
from dlo_cli.manifest import open_manifest_model, read_manifest
from dlo_cli.pictures import draw, picture_path, request_body, save, writable_folder
from dlo_cli.roots import cache_root

LOCALHOST = "127.0.0.1"
SAY_WHY_SECONDS = 3.0
PHASES = 5
"""What a rank reports on its way to ready: map, import, build, warmup, verify."""


@dataclass(frozen=True)
class RunOptions:
    """What the command line says beside the manifest."""

    file: Path
    prompts: tuple[str, ...] = ()
    seed: int = 0
    steps: int | None = None
    size: str | None = None
    out: Path = Path("out")
    host: str = LOCALHOST
    port: int | None = None
    cache_root: Path | None = None
    layout: Path | None = None
    verbose: bool = False


def run(options: RunOptions, roots: dict[str, Path], console: Console, stopping: threading.Event) -> None:
    """Build what lacks, start the engine, then draw the prompts or serve until interrupted."""
    manifest = read_manifest(options.file)
    model = open_manifest_model(manifest, options.file, roots, options.layout)
    port = port_of(manifest, options)
    check_address(options.host, port)
    if options.prompts:
        writable_folder(options.out)
    root = cache_root(options.cache_root)
    console.step("Model", f"{model.pipeline.name} ({model.pipeline.class_name})")
    console.step("Cache", str(root.path))
    handover = ensure_entries(
        root,
        model,
        dtype=manifest.spec.model.dtype,
        quantization=manifest.spec.model.quantization,
        tensor_size=manifest.spec.parallelism.tensor,
        console=console,
        cancel=stopping.is_set,
    )
    console.settle()
    if stopping.is_set():
        raise KeyboardInterrupt
    serve(manifest, handover, options, port, console)


def port_of(manifest: DiffusionDeployment, options: RunOptions) -> int:
    """The port that was asked for; any free one where only pictures are wanted."""
    if options.port is not None:
        return options.port
    return 0 if options.prompts else manifest.spec.serving.port


def serve(
    manifest: DiffusionDeployment, handover: Handover, options: RunOptions, port: int, console: Console
) -> None:
    """The engine's life: start, ready, pictures or requests of others, end."""
    parallelism = manifest.spec.parallelism
    ranks = parallelism.tensor * parallelism.data
    console.step(
        "Engine", f"starting {ranks} rank{'s' if ranks > 1 else ''} on {manifest.spec.engine.device}"
    )
    with Engine(manifest, handover, host=options.host, port=port, verbose=options.verbose) as engine:
        ready = wait_ready(engine, ranks, console)
        url = str(ready["url"])
        if options.prompts:
            draw_all(engine, url, options, console)
        else:
            console.step("Serving", f"{url}/v1/images/generations — Ctrl-C ends it")
            try:
                wait_end(engine, console)
            except KeyboardInterrupt:
                # Serving until interrupted is what was asked for: an ordered end is a good one.
                console.step("Engine", "finishing what runs; a second Ctrl-C ends it at once")
                if engine.stop() != 0:
                    raise engine.failure(SAY_WHY_SECONDS) or _unexplained(engine, console) from None


def draw_all(engine: Engine, url: str, options: RunOptions, console: Console) -> None:
    """One PNG a prompt; the path of each is a line on standard output as soon as it is there."""
    http = urllib3.PoolManager(retries=False)
    for index, prompt in enumerate(options.prompts):
        body = request_body(prompt, seed=options.seed, steps=options.steps, size=options.size)
        console.counted("Drawing", "pictures", index, len(options.prompts))
        try:
            content = draw(http, url, body)
        except UsageError:
            raise
        except CliError as error:
            # The engine knows better why a request of ours failed.
            said = engine.failure(SAY_WHY_SECONDS)
            gone = error.code == "EngineGone" and said is None
            raise (_unexplained(engine, console) if gone else said or error) from error
        path = picture_path(options.out, index, prompt)
        save(path, content)
        console.settle()
        console.result(relative(path))


def wait_ready(engine: Engine, ranks: int, console: Console) -> Event:
    """The ready event. Raises what the engine says of its failure."""
    begun = 0
    for event in engine.events():
        kind = event.get("event")
        if kind == "failed":
            raise failure(event)
        if kind == "phase":
            begun += 1
            console.counted("Starting", "the engine", begun, ranks * PHASES)
        if kind == "ready":
            console.settle()
            console.step("Engine", _ready_words(event.get("status", {})))
            return event
    raise _unexplained(engine, console)


def wait_end(engine: Engine, console: Console) -> None:
    """Serve until the engine ends. After a fault it still answers 503 for a while, then its failure is ours."""
    failed: CliError | None = None
    for event in engine.events():
        if event.get("event") == "failed":
            failed = failure(event)
            console.step("Engine", f"failed: {failed.message}; it answers 503 for a while, then ends")
    if failed is not None:
        raise failed
    if engine.wait() != 0:
        raise _unexplained(engine, console)
    console.step("Engine", "ended in order: somebody asked it to")


def _unexplained(engine: Engine, console: Console) -> CliError:
    engine.wait()
    console.settle()
    for line in engine.log_tail().splitlines():
        console.step("Log", line)
    if number := engine.ended_by():
        memory = "look for the kernel's out-of-memory killer; "
        return CliError(
            f"the engine's front process was ended by {number}",
            hint=f"{memory if number == 'SIGKILL' else ''}its last lines stand above",
            code="EngineKilled",
        )
    return CliError("the engine ended without a word", hint="its last lines stand above", code="EngineFailed")


def _ready_words(status: Event) -> str:
    backing = status.get("backing", {})
    entries = status.get("entries", [])
    start = status.get("start", {})
    size = human_bytes(sum(int(entry.get("bytes", 0)) for entry in entries))
    verified = "verified" if backing.get("verified") else "not verified"
    phases = [(name[:-2], value) for name, value in start.items() if name.endswith("Ms") and value >= 1]
    milliseconds = ", ".join(f"{name} {value:.0f} ms" for name, value in phases)
    return f"ready: {backing.get('kind')}, {size} in {len(entries)} entries, {verified} ({milliseconds})"

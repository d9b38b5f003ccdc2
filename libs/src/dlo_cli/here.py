"""``dlo explain -f FILE``: whether this machine can run a manifest, and if not why; what would back it.

The steps of `dlo run` in their order, by the same functions, up to the first byte that would be written. A check
that fails does not end the rest, as far as they can be told without it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlo_api.errors import ApiError
from dlo_api.planned import Plan
from dlo_api.v1alpha1 import DiffusionDeployment
from dlo_cache.entry import open_entry
from dlo_cache.errors import CacheError
from dlo_cache.keys import files_key
from dlo_cache.layout_manifest import layout_keys
from dlo_cache.reserve import reserve
from dlo_cache.root import Root, open_root
from dlo_sources.digests import DigestCache
from dlo_sources.errors import SourceError
from dlo_sources.files import LocalFile
from rich.text import Text

from dlo_cli import machine
from dlo_cli.checks import check_address
from dlo_cli.console import Console, human_bytes
from dlo_cli.errors import CliError, Explained, UsageError, printable
from dlo_cli.explain import Form
from dlo_cli.explain_text import wrapped
from dlo_cli.manifest import open_manifest_model, read_manifest
from dlo_cli.model import Model
from dlo_cli.plan import plan_of
from dlo_cli.roots import user_root

SCHEMA = "dlo.dev/explain-file/v1"
LOCALHOST = "127.0.0.1"
#: Files that an entry has beside its data.
_FILES = 64


@dataclass(frozen=True)
class HereOptions:
    """What the command line says beside the manifest."""

    file: Path
    cache_root: Path | None = None
    layout: Path | None = None
    output: Form = Form.TEXT


@dataclass(frozen=True)
class Check:
    """One step and how it went.

    Attributes:
        name: the step.
        holds: True, False, or None where it cannot be told.
        message: what was found, or what is wrong.
        remedy: what to do where it does not hold.
        error: the error that `dlo run` would end with.
    """

    name: str
    holds: bool | None
    message: str
    remedy: str = ""
    error: Exception | None = None


def explain_here(options: HereOptions, roots: dict[str, Path], console: Console) -> None:
    """Print what was found. Raises the first error that `dlo run` would end with, after everything was said."""
    manifest = read_manifest(options.file)
    model, source = _source(manifest, options, roots)
    plan = plan_of(manifest, model) if model is not None else None
    checks = [
        Check("Manifest", True, f"{manifest.metadata.name}: every field and rule holds"),
        source,
        *(_root_checks(options, manifest, model, plan) if model is not None and plan is not None else ()),
        *(_memory(plan) if plan is not None else ()),
        _device(manifest, plan),
        _packages(),
        _tried("Port", lambda: _port(manifest)),
    ]
    failed = [check for check in checks if check.holds is False]
    if options.output is Form.JSON:
        console.result(json.dumps(_document(manifest, checks, plan), indent=2))
    else:
        console.styled(_lines(manifest, checks, plan, console.width()))
    if failed:
        raise failed[0].error or CliError(failed[0].message, hint=failed[0].remedy, code="CannotRunHere")


def _source(
    manifest: DiffusionDeployment, options: HereOptions, roots: dict[str, Path]
) -> tuple[Model | None, Check]:
    """The model with its layouts, checked against the head counts and dimensions that tensor must divide."""
    try:
        model = open_manifest_model(manifest, options.file, roots, options.layout)
    except (CacheError, SourceError, CliError, ApiError) as error:
        return None, _failed("Source", error)
    files = model.pipeline.all_files()
    size = human_bytes(sum(file.size for file in files))
    tensor = manifest.spec.parallelism.tensor
    words = (
        f"{model.pipeline.class_name}, {len(files)} files, {size}; its layout divides by tensor size {tensor}"
    )
    return model, Check("Source", True, words)


def _root_checks(
    options: HereOptions, manifest: DiffusionDeployment, model: Model, plan: Plan
) -> Iterator[Check]:
    """The cache root, and room in it for the entries that lack."""
    path = options.cache_root or user_root()
    if options.cache_root is None and not path.exists():
        place = next(parent for parent in (path, *path.parents) if parent.exists())
        yield Check("Cache root", True, f"{path} will be made")
        yield _free(place, plan)
        return
    try:
        root = open_root(path)
    except CacheError as error:
        yield _failed("Cache root", error)
        return
    there = entries_there(root, manifest, model)
    count = len(plan.entries)
    if there is None:
        yield Check("Cache root", True, f"{path}; which entries are there shows once the files are hashed")
    else:
        yield Check("Cache root", True, f"{path}; {there} of {count} entries are there")
    if there == count:
        yield Check("Disk", True, "nothing more is needed")
        return
    try:
        reserve(root, plan.disk_bytes, count * _FILES, subject=f"building {count} entries")
    except CacheError as error:
        # Of entries that may be there already, or are there in part, less is needed.
        yield (
            _failed("Disk", error)
            if there == 0
            else Check("Disk", None, f"{error.message}, if all lack", error.hint)
        )
        return
    yield Check("Disk", True, f"{human_bytes(plan.disk_bytes)} fit")


def entries_there(root: Root, manifest: DiffusionDeployment, model: Model) -> int | None:
    """How many of the entries can be used as they are; None where a source file was not hashed yet."""
    cache = DigestCache(root.digests_dir)
    files = []
    for file in model.pipeline.all_files():
        known = cache.get(file.identity) if isinstance(file, LocalFile) else None
        if known is None or not isinstance(file, LocalFile):
            return None
        files.append(file.with_sha256(known))
    hashed, size = model.pipeline.with_files(files), manifest.spec.parallelism.tensor
    names = tuple(streamed.component.name for streamed in model.streamed)
    keys = [files_key(sorted(hashed.rest_files(names), key=lambda file: file.name))[0]]
    for streamed in model.streamed:
        keys += [
            each.key
            for each in layout_keys(
                hashed.component(streamed.component.name),
                streamed.layout,
                dtype=manifest.spec.model.dtype,
                quantization=manifest.spec.model.quantization,
                tensor_size=size,
                tensor_ranks=range(size),
            )
        ]
    return sum(_usable(root, key) for key in keys)


def _usable(root: Root, key: str) -> bool:
    try:
        with open_entry(root.entries_dir / key):
            return True
    except CacheError:
        return False


def _free(place: Path, plan: Plan) -> Check:
    """Room where there is no root yet, by the file system alone."""
    found = os.statvfs(place)
    free = found.f_frsize * found.f_bavail
    words = f"{human_bytes(plan.disk_bytes)} are needed, {human_bytes(free)} are free at {place}"
    if free >= plan.disk_bytes:
        return Check("Disk", True, words)
    error = CliError(
        words, hint="free space, or name a root on a larger disk with --cache-root", code="InsufficientDisk"
    )
    return _failed("Disk", error)


def _memory(plan: Plan) -> Iterator[Check]:
    """What the ranks allocate must fit; shared entries are page cache, which the kernel takes back."""
    have = machine.memory()
    private, shared = human_bytes(plan.private_host_bytes), human_bytes(plan.shared_host_bytes)
    if have.available is None or have.total is None:
        yield Check(
            "Host memory",
            None,
            f"{private} private and {shared} shared are needed; this machine does not tell",
        )
        return
    words = f"{private} private and {shared} shared are needed, {human_bytes(have.available)} are available"
    if plan.private_host_bytes > have.available:
        hint = "end other programs, lower parallelism or residentLayers, or use a larger machine"
        yield _failed("Host memory", CliError(words, hint=hint, code="InsufficientHostMemory"))
    elif plan.host_bytes > have.total:
        yield Check("Host memory", None, f"{words}: entries will be read from the disk again and again")
    else:
        yield Check("Host memory", True, f"{words}; activations and libraries come on top")


def _device(manifest: DiffusionDeployment, plan: Plan | None) -> Check:
    if manifest.spec.engine.device == "Cpu":
        return Check("Device", True, "the CPU")
    found = machine.gpus()
    if isinstance(found, str) or not found:
        why = found if isinstance(found, str) else "the driver shows no GPU"
        return _failed(
            "Device",
            CliError(why, hint="set engine.device to Cpu, or use a machine with one", code="NoDevice"),
        )
    if plan is None:
        return Check("Device", None, f"{len(found)} × {found[0].name}; what is needed is not known")
    if len(plan.ranks) > len(found):
        words = f"{len(plan.ranks)} ranks need a GPU each, there are {len(found)}"
        return _failed(
            "Device", CliError(words, hint="lower the degrees of spec.parallelism", code="TooFewGpus")
        )
    least = min(gpu.free_bytes for gpu in found[: len(plan.ranks)])
    words = f"{human_bytes(plan.device_bytes)} a rank are needed, {human_bytes(least)} are free on {found[0].name}"
    if plan.device_bytes > least:
        hint = "raise parallelism.tensor, lower offload.residentLayers, or free the device"
        return _failed("Device", CliError(words, hint=hint, code="InsufficientDeviceMemory"))
    return Check("Device", True, f"{words}; activations come on top")


def _packages() -> Check:
    lacking = machine.lacking_packages()
    if not lacking:
        return Check("Engine", True, "its packages are installed")
    error = CliError(
        f"the engine's packages are not installed: {', '.join(lacking)}",
        hint="pip install 'dlo-operator[engine]'",
        code="NotInstalled",
    )
    return _failed("Engine", error)


def _port(manifest: DiffusionDeployment) -> str:
    port = manifest.spec.serving.port
    check_address(LOCALHOST, port)
    return f"{port} is free"


def _tried(name: str, step: Callable[[], str]) -> Check:
    try:
        return Check(name, True, step())
    except (CliError, UsageError) as error:
        return _failed(name, error)


def _failed(name: str, error: Exception) -> Check:
    if isinstance(error, Explained):
        return Check(name, False, error.message, error.hint, error)
    return Check(name, False, str(error), "", error)


def backing_words(manifest: DiffusionDeployment, plan: Plan) -> tuple[str, str]:
    """Why blocks will be copied from there, and what happens where that cannot be had."""
    spec = manifest.spec
    why = {
        "Resident": "offload.mode is None: every block stays on the device",
        "MappedCache": "on the CPU blocks are copied straight out of the mapped entries",
        "RegisteredCache": "the mapped entries are registered with the driver and copied from directly",
        "StagedCache": "blocks pass through pinned staging buffers"
        + (
            ""
            if spec.offload.host_registration.policy == "Off"
            else ": registered mappings are not used on this device"
        ),
        "MappedCheckpoint": "cache.policy is Disabled: blocks are copied out of the mapped checkpoint",
        "PrivateLoad": "cache.policy is Disabled: every rank holds a private copy",
    }.get(plan.backing, "")
    if spec.cache.policy == "Required":
        fallback = "none: an engine that cannot use an entry does not serve (cache.policy is Required)"
    elif spec.cache.on_fallback == "Fail":
        fallback = "none: an engine that gets less ends with its code (cache.onFallback is Fail)"
    else:
        fallback = "MappedCheckpoint or PrivateLoad, and it says so (cache.onFallback is Continue)"
    return why, fallback


def _document(manifest: DiffusionDeployment, checks: list[Check], plan: Plan | None) -> dict[str, Any]:
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "name": manifest.metadata.name,
        "canRun": not any(check.holds is False for check in checks),
        "checks": [
            {
                "name": check.name,
                "message": check.message,
                **({"holds": check.holds} if check.holds is not None else {}),
                **({"remedy": check.remedy} if check.remedy else {}),
                **({"code": code} if (code := getattr(check.error, "code", "")) else {}),
            }
            for check in checks
        ],
    }
    if plan is not None:
        why, fallback = backing_words(manifest, plan)
        document["backing"] = {"kind": plan.backing, "why": why, "fallback": fallback}
    return document


def _lines(
    manifest: DiffusionDeployment, checks: list[Check], plan: Plan | None, width: int
) -> Iterator[Text]:
    failed = sum(check.holds is False for check in checks)
    name = printable(manifest.metadata.name)
    head = f"{name} cannot run on this machine" if failed else f"{name} can run on this machine"
    yield Text(head, style=f"bold {'red' if failed else 'green'}")
    yield Text()
    for check in checks:
        word, style = {True: ("yes", "green"), False: ("no", "red"), None: ("?", "yellow")}[check.holds]
        first, *more = wrapped(f"{check.name:<12} {word:<4} {check.message}", width, "", " " * 18)
        yield Text.assemble(first[:13], (first[13:17], style), first[17:])
        yield from (Text(line) for line in more)
        if check.remedy:
            yield from (
                Text(line, style="cyan") for line in wrapped(f"→ {check.remedy}", width, " " * 18, " " * 20)
            )
    if plan is not None:
        why, fallback = backing_words(manifest, plan)
        yield Text()
        yield from (Text(line) for line in wrapped(f"Backing: {plan.backing} – {why}.", width, "", "  "))
        yield from (Text(line) for line in wrapped(f"Fallback: {fallback}.", width, "", "  "))

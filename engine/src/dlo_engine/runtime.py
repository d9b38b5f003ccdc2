"""The seam between a rank's main loop and everything that computes: start, run requests, tell, close.

Entries are mapped and verification begins before torch is imported: this module and `mapping.py` import
nothing heavy, the rest comes inside `start`. Must not serve, queue or supervise.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlo_engine.config import EngineConfig
from dlo_engine.errors import BadEntry, Unsupported
from dlo_engine.mapping import Entries, OpenEntry, Verification, open_entries, pss_bytes
from dlo_engine.protocol import GenerateRequest, GenerateResult, Limits, Report

if TYPE_CHECKING:
    import torch

    from dlo_engine.groups import Groups
    from dlo_engine.pipeline import StreamedPipeline

PSS_MAX_AGE_SECONDS = 30.0
"""The kernel walks every page of the mappings to tell their PSS: too much for the status of each request."""


class Runtime:
    """One rank, ready. Made by `start`; not thread-safe but for `status`."""

    def __init__(
        self,
        config: EngineConfig,
        entries: Entries,
        groups: Groups,
        pipeline: StreamedPipeline,
        start: dict[str, float],
    ) -> None:
        self._config = config
        self._entries = entries
        self._groups = groups
        self.pipeline: StreamedPipeline | None = pipeline
        self._backing = pipeline.backing
        self._fallback_code = pipeline.fallback_code
        self._limits = pipeline.limits
        self._start = start
        self._last: dict[str, float] = {}
        self._pss: tuple[float, list[int]] | None = None

    @classmethod
    def start(cls, config: EngineConfig, rank: int, rendezvous: str, report: Report) -> Runtime:
        """Open, verify, import, build, warm up; returns when this rank's weights are usable.

        Every rank of the engine must start; `rendezvous` is a `file://` URL they share. Raises EngineError or
        CacheError, on all ranks when an entry turns out bad on one.
        """
        start: dict[str, float] = {}
        clock = _Clock(start, report)
        entries = open_entries(
            config.handover,
            config.components,
            config.tensor_rank(rank),
            config.tensor,
            required=config.cache_policy == "Required",
        )
        clock.lap("map", bytes=sum(opened.nbytes for opened in entries.all()))
        verification = Verification(_parts(config, entries, rank), config.threads)
        groups: Groups | None = None
        pipeline: StreamedPipeline | None = None
        try:
            import torch

            from dlo_engine.assembly import import_families
            from dlo_engine.groups import Groups
            from dlo_engine.pipeline import StreamedPipeline

            import_families(entries)
            clock.lap("import", rssAnonBytes=anonymous_bytes())
            if config.threads is not None:
                torch.set_num_threads(config.threads)
            device = _device(torch, config, rank)
            gather = config.transfer == "AllGather" and config.mode != "None"
            groups = Groups(
                rank, config.tensor, config.data, rendezvous=rendezvous, device=device, gather=gather
            )
            pipeline = StreamedPipeline(config, groups, entries, device)
            clock.lap("build", backing=pipeline.backing)
            pipeline.warm_up()
            clock.lap("warmup")
            _all_verified(verification, groups)
            start["verifyMs"] = verification.seconds * 1000
            start["registerMs"] = 0.0
            report("verify", {"ms": start["verifyMs"], "bytes": verification.checked_bytes})
        except BaseException:
            verification.stop()
            if groups is not None and config.world > 1:
                # Other ranks go on without this one: a copy of theirs or ours may wait for ever, and so may
                # leaving a group with such a copy in it. This process ends soon; its end gives all back.
                if pipeline is not None:
                    pipeline.abandon()
            else:
                _release(pipeline, groups, entries)
            raise
        return cls(config, entries, groups, pipeline, start)

    @property
    def limits(self) -> Limits:
        """Size limits and defaults of the loaded model; the same on every rank."""
        return self._limits

    def generate(self, request: GenerateRequest, cancelled: Callable[[], bool]) -> GenerateResult:
        """Run one request on this rank, as the others of its replica (with AllGather: of its wave) do."""
        if self.pipeline is None:
            raise Unsupported("The runtime is closed")
        result = self.pipeline.generate(request, cancelled)
        self._last = result.timings
        return result

    def status(self) -> dict[str, Any]:
        """This rank's share of `/v1/engine/status`."""
        return {
            "backing": {
                "kind": self._backing,
                "fallbackCode": self._fallback_code,
                "verified": self._config.verify == "Always",
            },
            "entries": self._entry_states(),
            "start": dict(self._start),
            "lastRequest": dict(self._last),
        }

    def _entry_states(self) -> list[dict[str, Any]]:
        opened = self._entries.all()
        now = time.monotonic()
        if self._pss is None or now - self._pss[0] >= PSS_MAX_AGE_SECONDS:
            smaps = Path("/proc/self/smaps").read_text()
            self._pss = (now, [_pss(smaps, one) for one in opened])
        return [_entry_status(one, pss) for one, pss in zip(opened, self._pss[1], strict=True)]

    def close(self) -> None:
        """Synchronize, take hooks off, unmap, release leases, leave groups. Idempotent."""
        pipeline, self.pipeline = self.pipeline, None
        if pipeline is not None:
            _release(pipeline, self._groups, self._entries)


class _Clock:
    """Times the phases of a start and reports each when it ends."""

    def __init__(self, start: dict[str, float], report: Report) -> None:
        self._start = start
        self._report = report
        self._from = time.perf_counter()

    def lap(self, phase: str, **details: Any) -> None:
        """The phase that began at the last lap is over."""
        now = time.perf_counter()
        self._start[f"{phase}Ms"] = (now - self._from) * 1000
        self._report(phase, {"ms": self._start[f"{phase}Ms"], **details})
        self._from = now


def _parts(config: EngineConfig, entries: Entries, rank: int) -> list[tuple[Any, tuple[int, int]]]:
    """Which part of which entry this rank hashes: ranks that map the same entry divide it."""
    if config.verify != "Always":
        return []
    mine = (config.data_index(rank), config.data)
    return [
        *((opened.entry, mine) for opened in entries.components.values() if opened is not None),
        (entries.rest.entry, (rank, config.world)),
    ]


def _all_verified(verification: Verification, groups: Groups) -> None:
    """The barrier before ready. Raises on every rank if any rank found an entry bad."""
    failure = verification.failure()
    found = groups.messages("" if failure is None else f"{failure.code}: {failure.message}")
    if failure is not None:
        raise failure
    elsewhere = [f"rank {rank} found {text}" for rank, text in enumerate(found) if text]
    if elsewhere:
        raise BadEntry("; ".join(elsewhere), hint="the entry is rebuilt once it is reported", code="Corrupt")


def _device(torch_: Any, config: EngineConfig, rank: int) -> torch.device:
    device: torch.device = torch_.device("cpu")
    if config.device == "cuda":
        count = torch_.cuda.device_count()
        if rank >= count:
            raise Unsupported(
                f"Rank {rank} has no GPU: {count} visible", hint="ask for one GPU a rank, or use --device cpu"
            )
        device = torch_.device("cuda", rank)
        torch_.cuda.set_device(device)
    return device


def _release(
    pipeline: StreamedPipeline | None,
    groups: Groups | None,
    entries: Entries,
) -> None:
    """The drain order: copies and hooks, then mappings and leases, then groups. Nothing is hashed any more."""
    if pipeline is not None:
        pipeline.close()
    entries.close()
    if groups is not None:
        groups.close()


def _entry_status(opened: OpenEntry, pss: int) -> dict[str, Any]:
    record = opened.record
    return {
        "component": record.component,
        "coordinate": record.coordinate,
        "kind": record.kind,
        "inputKey": record.input_key,
        "manifestSha256": record.manifest_sha256,
        "bytes": opened.nbytes,
        "registeredBytes": 0,
        "pssBytes": pss,
    }


def anonymous_bytes() -> int:
    """Private memory of this process now (RssAnon): what a plan's private bytes come on top of."""
    status = Path("/proc/self/status").read_text()
    kilobytes = next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon:"))
    return int(kilobytes) * 1024


def _pss(smaps: str, opened: OpenEntry) -> int:
    directory = opened.entry.directory.resolve()
    paths = (str(directory / file.name) for file in opened.entry.files)
    return pss_bytes(smaps, paths)

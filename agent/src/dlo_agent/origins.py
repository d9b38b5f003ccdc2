"""Opens a source wherever it lies: a folder below a named root, a repository of a hub, a prefix in S3.

What a spec may name is what the agent was told: roots and endpoints by name, never a path of its own or a
URL. Credentials are read here, handed to the store that needs them, and kept by nobody else.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dlo_api.v1alpha1.node_weight_cache import NodeSource
from dlo_api.v1alpha1.source import DirectorySource
from dlo_cache.canonical import canonical_json
from dlo_cache.progress import Cancel, Progress
from dlo_cache.source import SourceFile
from dlo_sources.digests import DigestCache, hash_files
from dlo_sources.fetch import Fetcher
from dlo_sources.pipeline import Pipeline, open_directory, open_remote
from dlo_sources.remote import PATIENCE, Patience, Store
from dlo_sources.stage import Stage

from dlo_agent.credentials import Credentials
from dlo_agent.errors import SourceProblem

DEFAULT_ENDPOINT: Final = "default"
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_SHORT: Final = 12


@dataclass(frozen=True)
class Opened:
    """A source whose files all have their digests; ``revision`` is the commit, or what stands for one."""

    pipeline: Pipeline
    digest: str
    revision: str
    fetcher: Fetcher | None = None

    def close(self, *, done: bool = False) -> None:
        """Lets go of what was fetched; with ``done`` it is no longer needed."""
        if self.fetcher is not None:
            self.fetcher.close(done=done)


@dataclass(frozen=True)
class Origins:
    """What this agent may read from: folders and endpoints by name, and Secrets of one namespace."""

    roots: Mapping[str, Path]
    credentials: Credentials
    hub_endpoints: Mapping[str, str] = field(default_factory=dict)
    s3_endpoints: Mapping[str, str] = field(default_factory=dict)
    patience: Patience = PATIENCE

    def open(
        self,
        source: NodeSource,
        digests: DigestCache,
        stage: Stage,
        *,
        revision: str = "",
        progress: Progress | None = None,
        cancel: Cancel | None = None,
    ) -> Opened:
        """The source as it is now, or at the commit that it is pinned to or was resolved to (``revision``).

        Raises SourceProblem, the errors of ``dlo_sources``, Cancelled. Whoever gets it closes it.
        """
        if source.source.directory is not None:
            folder, within = self._locate(source.source.directory)
            pipeline = open_directory(folder, variant=source.variant, within=within)
            return _hashed(pipeline, digests, progress, cancel)
        store = self._store(source, source.pin.revision or revision, cancel)
        fetcher = Fetcher(store, stage, progress=progress, cancel=cancel, patience=self.patience)
        try:
            pipeline = open_remote(fetcher, variant=source.variant)
            unknown = sum(
                file.size
                for file in pipeline.all_files()
                if file.sha256 is None and digests.recall(fetcher.files[file.name].tag) is None
            )
            # What is hashed is kept for the build, unless the entries would then have no room.
            fetcher.straight = stage.room() < 2 * unknown
            opened = _hashed(pipeline, digests, progress, cancel, fetcher)
            fetcher.straight = False
        except BaseException:
            fetcher.close()
            raise
        return opened

    def _locate(self, directory: DirectorySource) -> tuple[Path, Path]:
        """The folder of a directory source and the root that it must lie in."""
        root = self.roots.get(directory.root)
        if root is None:
            raise SourceProblem(
                f"this node has no source root named {directory.root!r} (known: {_names(self.roots)})",
                hint="add it to the agent's Helm values, or correct model.source.directory.root",
                code="UnknownRoot",
            )
        return root / directory.path, root

    def _store(self, source: NodeSource, revision: str, cancel: Cancel | None) -> Store:
        # Late, since an agent whose sources are folders needs neither client library.
        found, secret = source.source, source.secret_name
        if found.hugging_face is not None:
            from dlo_sources.hub import PUBLIC_HUB, open_hub

            hub = found.hugging_face
            (token,) = self.credentials.read(secret, "token") if secret else (None,)
            return open_hub(
                hub.repo,
                revision if _COMMIT.fullmatch(revision) else hub.revision,
                endpoint=_endpoint("hub", hub.endpoint, self.hub_endpoints) or PUBLIC_HUB,
                token=token,
            )
        if found.s3 is not None:
            from dlo_sources.s3 import Credential, open_s3

            keys = self.credentials.read(secret, "accessKeyId", "secretAccessKey") if secret else ()
            return open_s3(
                found.s3.bucket,
                found.s3.prefix,
                endpoint=_endpoint("S3", found.s3.endpoint, self.s3_endpoints),
                credential=Credential(*keys) if keys else None,
                cancel=cancel,
            )
        raise SourceProblem(
            f"source {source.id}: it names no place that this agent knows",
            hint="bring operator and agent to one version",
            code="SourceUnsupported",
        )


def digest_of(files: Sequence[SourceFile]) -> str:
    """The digest of a file list: sha256 of the canonical JSON of its names, sizes and digests, by name."""
    listed = [
        {"name": file.name, "size": file.size, "sha256": file.sha256}
        for file in sorted(files, key=lambda file: file.name)
    ]
    return hashlib.sha256(canonical_json(listed)).hexdigest()


def _hashed(
    pipeline: Pipeline,
    digests: DigestCache,
    progress: Progress | None,
    cancel: Cancel | None,
    fetcher: Fetcher | None = None,
) -> Opened:
    files = hash_files(pipeline.all_files(), digests, progress, cancel)
    digest = digest_of(files)
    revision = fetcher.store.revision if fetcher is not None else ""
    return Opened(pipeline.with_files(files), digest, revision or digest[:_SHORT], fetcher)


def _endpoint(kind: str, name: str, known: Mapping[str, str]) -> str | None:
    """The URL of a named endpoint; of the one named ``default``, if there is one, where no name is given."""
    if not name:
        return known.get(DEFAULT_ENDPOINT)
    if name not in known:
        raise SourceProblem(
            f"this node has no {kind} endpoint named {name!r} (known: {_names(known)})",
            hint="add it to the Helm values, or correct the endpoint of model.source",
            code="UnknownEndpoint",
        )
    return known[name]


def _names(known: Mapping[str, object]) -> str:
    return ", ".join(sorted(known)) or "none"

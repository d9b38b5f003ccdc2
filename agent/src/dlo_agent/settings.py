"""The agent's settings: parsed once, by ``__main__``, from flags whose defaults the environment may give.

Nothing else reads the environment. Frozen; a value that cannot be right is refused here with its name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from dlo_cache.errors import CacheError
from dlo_cache.layout import Layout

from dlo_agent.errors import UsageError

_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_WORD: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_SIZE: Final = re.compile(r"([0-9]+)(Ki|Mi|Gi|Ti|K|M|G|T)?")
_FORMS: Final = {
    "DIR": "a name of lower-case letters, digits and dashes, and an absolute path",
    "FILE": "a name of letters, digits, dots and dashes, and an absolute path",
    "URL": "a name of lower-case letters, digits and dashes, and an http or https address with no credential",
}
_UNITS: Final = {
    None: 1,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
}


@dataclass(frozen=True)
class Settings:
    """Everything that ``dlo-agent run`` is told.

    ``host_root`` is the root's path on the host, as engine pods mount it; ``gid`` the group that may read it.
    ``secrets_namespace`` is where credentials are read, "" for ``namespace``. Endpoints are URLs by name; one
    named ``default`` serves sources that name none. Zero for ``warm_budget_bytes`` warms nothing;
    ``headroom_bytes`` is kept free at least.
    """

    node: str
    root: Path
    namespace: str
    source_roots: Mapping[str, Path] = field(default_factory=dict)
    hub_endpoints: Mapping[str, str] = field(default_factory=dict)
    s3_endpoints: Mapping[str, str] = field(default_factory=dict)
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    secrets_namespace: str = ""
    host_root: Path | None = None
    gid: int | None = None
    warm_budget_bytes: int = 0
    headroom_bytes: int = 0
    port: int = 8080
    kubeconfig: Path | None = None
    scrub_seconds: float = 7 * 86_400.0
    verify_threads: int = 2
    lock_timeout_seconds: float = 30.0

    def __post_init__(self) -> None:
        if not self.node:
            raise UsageError("the node's name is empty", hint="give --node, or set DLO_NODE_NAME")
        if not self.root.is_absolute():
            raise UsageError(f"--root {self.root} is not an absolute path")
        if self.verify_threads < 1:
            raise UsageError("--verify-threads is at least 1")


def parse_source_roots(pairs: Sequence[str]) -> dict[str, Path]:
    """``NAME=DIR`` words as a mapping; raises UsageError for one of another form or a name given twice."""
    return {
        name: Path(folder)
        for name, folder in _pairs(
            "--source-root", "DIR", pairs, _NAME, lambda text: Path(text).is_absolute()
        )
    }


def parse_endpoints(flag: str, pairs: Sequence[str]) -> dict[str, str]:
    """``NAME=URL`` words as a mapping; raises UsageError, also for a URL that carries a credential."""
    return {name: url.rstrip("/") for name, url in _pairs(flag, "URL", pairs, _NAME, _is_endpoint)}


def parse_layouts(pairs: Sequence[str]) -> dict[str, Layout]:
    """``NAME=FILE`` words with the layouts in the files; raises UsageError naming flag, file and fault."""
    layouts = {}
    for name, file in _pairs("--layout", "FILE", pairs, _WORD, lambda text: Path(text).is_absolute()):
        try:
            layouts[name] = Layout.from_json(Path(file).read_bytes())
        except (OSError, CacheError) as error:
            raise UsageError(
                f"--layout {name}={file}: {error}", hint="correct the layout in the Helm values"
            ) from error
    return layouts


def _pairs(
    flag: str, form: str, pairs: Sequence[str], names: re.Pattern[str], fits: Callable[[str], bool]
) -> list[tuple[str, str]]:
    found: dict[str, str] = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or not names.fullmatch(name) or not fits(value):
            # An address may carry a credential by mistake, so it is not repeated.
            shown = pair if form != "URL" else f"{name if separator else ''}=…"
            raise UsageError(f"{flag} {shown}: not of the form NAME={form}", hint=_FORMS[form])
        if name in found:
            raise UsageError(f"{flag} {pair}: the name {name} is given twice")
        found[name] = value
    return list(found.items())


def _is_endpoint(url: str) -> bool:
    try:
        parts = urlsplit(url)
        right = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        return False
    return right and "@" not in parts.netloc and not parts.query and not parts.fragment


def parse_size(text: str) -> int:
    """Bytes of a size like ``20Gi``; raises UsageError."""
    found = _SIZE.fullmatch(text)
    if found is None:
        raise UsageError(f"{text!r} is no size", hint="write it like 20Gi or 500M, or in bytes")
    return int(found[1]) * _UNITS[found[2]]

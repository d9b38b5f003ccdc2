"""A stand-in for a Hugging Face hub: its HTTP API over folders on the disk, for the real client library.

Model info with files, trees, files with ranges, tokens, gates, and large files behind a redirect to a second
port that, like a CDN, must never see the token. ``python tests/fakes/hub.py --folder DIR --port N`` serves one
repository.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from fakes.serving import Fault, Handler, Log, Stored, parser_of, serve_until_told, serving

LFS = (".safetensors", ".bin", ".model")


@dataclass
class Repository:
    """One repository: commits by their id, and where branches are."""

    commits: dict[str, dict[str, Stored]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    private: bool = False
    gated: bool = False


@dataclass
class Hub:
    """The hub, which keeps its files in ``blobs``. ``token`` opens private and gated repositories, ``readers``
    are tokens that open private ones; a request that carries another one gets 401."""

    blobs: Path
    token: str = ""
    readers: set[str] = field(default_factory=set)
    repositories: dict[str, Repository] = field(default_factory=dict)
    elsewhere: str = ""  # an address that the API redirects to
    states_lfs: bool = True  # False: files behind the redirect, and no digest of them
    serves: str = ""  # the commit that files claim to be of
    log: Log = field(default_factory=Log)
    cdn_log: Log = field(default_factory=Log)
    url: str = ""
    cdn_url: str = ""
    host: str = ""

    def push(self, repo: str, folder: Path, branch: str = "main") -> str:
        """A commit of what the folder holds now; returns its id."""
        files = {
            str(path.relative_to(folder)): Stored.of(path, self.blobs)
            for path in sorted(folder.rglob("*"))
            if path.is_file() and "__pycache__" not in path.parts
        }
        text = json.dumps([[name, each.sha256] for name, each in files.items()])
        commit = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        found = self.repositories.setdefault(repo, Repository())
        found.commits[commit] = files
        found.branches[branch] = commit
        return commit

    def break_down(self, kind: str, match: str = "", times: int = -1) -> None:
        """Requests to hub and CDN misbehave from now on."""
        for log in (self.log, self.cdn_log):
            log.faults.append(Fault(kind, match, times))

    def mend(self) -> None:
        """All is well again."""
        self.log.faults.clear()
        self.cdn_log.faults.clear()


class _HubHandler(Handler):
    hub: Hub

    def answer(self) -> None:
        parts = urlsplit(self.path)
        words = [unquote(word) for word in parts.path.strip("/").split("/")]
        if self.hub.elsewhere and words[0] == "api":
            self.plain(302, b"", {"Location": f"{self.hub.elsewhere}{self.path}"})
        elif words[:2] == ["api", "models"]:
            self._model("/".join(words[2:4]), words[4:], "blobs" in parts.query)
        elif len(words) > 4 and words[2] == "resolve":
            self._resolve("/".join(words[:2]), words[3], "/".join(words[4:]))
        else:
            self._refuse(404, "EntryNotFound", "Not found")

    def _repository(self, repo: str) -> Repository | None:
        """The repository if this caller may see it; else it was answered."""
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if given and given != self.hub.token and given not in self.hub.readers:
            self._refuse(401, "", f"Invalid credentials in Authorization header: {given}")
            return None
        found = self.hub.repositories.get(repo)
        if found is None or (found.private and not given):
            self._refuse(404 if given else 401, "RepoNotFound", "Repository not found")
            return None
        if found.gated and given != self.hub.token:
            words = f"Access to model {repo} is restricted; you sent {given or 'nothing'}"
            self._refuse(403 if given else 401, "GatedRepo", words)
            return None
        return found

    def _model(self, repo: str, rest: list[str], blobs: bool) -> None:
        found = self._repository(repo)
        if found is None:
            return
        revision = rest[1] if len(rest) > 1 else "main"
        commit = found.branches.get(revision, revision)
        if commit not in found.commits:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        elif rest[:1] == ["tree"]:
            below = "/".join(rest[2:])
            listed = [
                {
                    "type": "file",
                    "path": name,
                    **_facts(name, each, True, self.hub.states_lfs),
                    "oid": each.sha1,
                }
                for name, each in found.commits[commit].items()
                if name.startswith(below)
            ]
            self._json(listed)
        else:
            siblings = [
                {"rfilename": name, **_facts(name, each, blobs, self.hub.states_lfs)}
                for name, each in found.commits[commit].items()
            ]
            self._json(
                {
                    "_id": commit[:24],
                    "id": repo,
                    "modelId": repo,
                    "sha": commit,
                    "private": found.private,
                    "gated": "auto" if found.gated else False,
                    "tags": [],
                    "downloads": 0,
                    "likes": 0,
                    "siblings": siblings,
                }
            )

    def _resolve(self, repo: str, revision: str, name: str) -> None:
        found = self._repository(repo)
        if found is None:
            return
        commit = found.branches.get(revision, revision)
        stored = found.commits.get(commit, {}).get(name)
        if stored is None:
            self._refuse(404, "EntryNotFound", "Entry not found")
            return
        large = name.endswith(LFS)
        headers = {
            "X-Repo-Commit": self.hub.serves or commit,
            "ETag": f'"{stored.sha256 if large else stored.sha1}"',
        }
        if not large:
            self.file(stored, headers)
            return
        headers |= {"X-Linked-Size": str(stored.size), "X-Linked-Etag": f'"{stored.sha256}"'}
        # The client's own name for this host, as from inside a container.
        host = (self.headers.get("Host") or "").rpartition(":")[0]
        cdn = urlsplit(self.hub.cdn_url)
        location = f"http://{host or cdn.hostname}:{cdn.port}/cdn/{repo}/{commit}/{name}?signature=s3cr3t"
        self.plain(302, b"", headers | {"Location": location})

    def _json(self, value: Any) -> None:
        self.plain(200, json.dumps(value).encode(), kind="application/json")

    def _refuse(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self.plain(status, json.dumps({"error": message}).encode(), headers, "application/json")


class _CdnHandler(Handler):
    hub: Hub

    def answer(self) -> None:
        _, _, owner, name, commit, *rest = urlsplit(self.path).path.split("/")
        if "Authorization" in self.headers:
            self.plain(400, b"a token has no business here")
            return
        self.file(self.hub.repositories[f"{owner}/{name}"].commits[commit][unquote("/".join(rest))], {})


def _facts(name: str, stored: Stored, blobs: bool, lfs: bool) -> dict[str, Any]:
    if not blobs:
        return {}
    facts: dict[str, Any] = {"size": stored.size, "blobId": stored.sha1}
    if lfs and name.endswith(LFS):
        facts["lfs"] = {
            "sha256": stored.sha256,
            "oid": stored.sha256,
            "size": stored.size,
            "pointerSize": 134,
        }
    return facts


@contextmanager
def running_hub(*, host: str = "127.0.0.1", port: int = 0, cdn_port: int = 0) -> Iterator[Hub]:
    """A hub and its CDN for the block."""
    with tempfile.TemporaryDirectory() as blobs:
        hub = Hub(Path(blobs))
        of_hub = type("HubHandler", (_HubHandler,), {"hub": hub, "log": hub.log})
        of_cdn = type("CdnHandler", (_CdnHandler,), {"hub": hub, "log": hub.cdn_log})
        with (
            serving(of_hub, host=host, port=port) as server,
            serving(of_cdn, host=host, port=cdn_port) as cdn,
        ):
            hub.url = f"http://{host}:{server.server_port}"
            hub.cdn_url = f"http://{host}:{cdn.server_port}"
            yield hub


def main() -> None:
    """Serves one repository until it is told to end; prints its address."""
    parser = parser_of(__doc__)
    parser.add_argument("--cdn-port", type=int, default=0, help="default: the next port")
    parser.add_argument("--repo", default="dlo/digits")
    parser.add_argument("--token", default="", help="needed for a gated or private repository")
    parser.add_argument("--gated", action="store_true")
    parser.add_argument("--private", action="store_true")
    given = parser.parse_args()
    cdn_port = given.cdn_port or given.port + 1
    with running_hub(host=given.host, port=given.port, cdn_port=cdn_port) as hub:
        commit = hub.push(given.repo, given.folder)
        hub.token = given.token
        hub.repositories[given.repo].gated = given.gated
        hub.repositories[given.repo].private = given.private
        serve_until_told(f"{given.repo}@{commit} at {hub.url}, large files at port {cdn_port}")


if __name__ == "__main__":
    main()

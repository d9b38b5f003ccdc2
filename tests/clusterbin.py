"""The programs of a cluster, built from Go modules into a cache folder: what there is, and how it is made.

    python tests/clusterbin.py NAME ...         those named (default: what `make test` needs)
    python tests/clusterbin.py --all            everything that a whole cluster needs
    python tests/clusterbin.py --if-possible    say so and succeed where there is no Go

One version of everything, so that every machine tests against the same server. The folder is
`$XDG_CACHE_HOME/dlo-cluster` (or `~/.cache/dlo-cluster`); what is there is not built again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

#: The last minor version whose kubelet runs on cgroup v1 without being told to.
KUBERNETES = "v1.34.4"
ETCD = "v3.6.5"
COREDNS = "v1.12.1"

#: What tests against an API server need.
API = ("etcd", "kube-apiserver", "kube-controller-manager", "kubectl", "helm")
#: What tests of rules and dashboards need.
MONITORING = ("prometheus", "promtool")
#: What `make test` needs.
TESTED = (*API, *MONITORING)
_KUBERNETES = (
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kube-proxy",
    "kubelet",
    "kubectl",
    "kubeadm",
)
_COREDNS_PLUGINS = (
    "cache",
    "errors",
    "forward",
    "health",
    "hosts",
    "kubernetes",
    "loadbalance",
    "log",
    "loop",
)
_COREDNS_MORE = ("metrics", "ready", "reload")
_COMMANDS = {
    "kind": "sigs.k8s.io/kind@v0.33.0",
    "helm": "helm.sh/helm/v4/cmd/helm@v4.3.1",
    "kwok": "sigs.k8s.io/kwok/cmd/kwok@v0.8.0",
    "crictl": "sigs.k8s.io/cri-tools/cmd/crictl@v1.34.0",
    # Prometheus 3.16, without its web pages.
    "prometheus": "github.com/prometheus/prometheus/cmd/prometheus@v0.316.0",
    "promtool": "github.com/prometheus/prometheus/cmd/promtool@v0.316.0",
}
#: Prometheus without the clients of every cloud: targets are written in its configuration.
_TAGS = dict.fromkeys(MONITORING, "remove_all_sd")
#: Everything that a whole cluster needs.
ALL = (*_KUBERNETES, "etcd", "coredns", *(name for name in _COMMANDS if name not in MONITORING))


@dataclass(frozen=True)
class Module:
    """A Go module of our own that exists to build other people's commands."""

    name: str
    go_mod: str
    main: str
    packages: Mapping[str, str]  # binary -> package
    ldflags: str = "-s -w"
    environment: Mapping[str, str] | None = None


def cache_folder() -> Path:
    """Where binaries and their modules lie."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "dlo-cluster"


def binary(name: str) -> Path:
    """Where a program lies, whether it is there or not."""
    return cache_folder() / "bin" / name


def missing(names: Collection[str] = API) -> tuple[str, ...]:
    """Those of `names` that are not built."""
    return tuple(name for name in names if not os.access(binary(name), os.X_OK))


def build(names: Collection[str]) -> None:
    """Builds what is missing of `names`: cold about 15 minutes on two cores, then nothing.

    Raises:
        RuntimeError: there is no Go, or a build failed; the message ends with the last lines it wrote.
    """
    wanted = missing(names)
    if wanted and shutil.which("go") is None:
        raise RuntimeError("go is not installed: it is needed to build " + ", ".join(wanted))
    (cache_folder() / "bin").mkdir(parents=True, exist_ok=True)
    own = [name for name in wanted if name in _KUBERNETES]
    if own:
        _build(_kubernetes(), own)
    if "etcd" in wanted:
        _build(_etcd(), ["etcd"])
    if "coredns" in wanted:
        _build(_coredns(), ["coredns"])
    for name in wanted:
        if name in _COMMANDS:
            print(f"building {name}", flush=True)  # noqa: T201 - a build of minutes says where it is
            place = {"GOBIN": str(binary(name).parent), "CGO_ENABLED": "0"}
            tags = ["-tags", _TAGS[name]] if name in _TAGS else []
            _go(["install", *tags, _COMMANDS[name]], cache_folder(), place)


def _build(module: Module, names: Collection[str]) -> None:
    folder = cache_folder() / "src" / module.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "go.mod").write_text(module.go_mod)
    (folder / "main.go").write_text(module.main)
    # `-e`: tests of distant dependencies need modules that nobody builds here.
    _go(["mod", "tidy", "-e"], folder, module.environment)
    for name in names:
        print(f"building {name}", flush=True)  # noqa: T201 - as above
        partial = binary(name).with_name(f".{name}.{os.getpid()}")
        package = module.packages[name]
        _go(["build", "-o", str(partial), "-ldflags", module.ldflags, package], folder, module.environment)
        partial.replace(binary(name))


def _go(arguments: list[str], folder: Path, environment: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        ["go", *arguments],
        cwd=folder,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        tail = "\n".join(done.stderr.splitlines()[-15:])
        raise RuntimeError(f"go {' '.join(arguments)} failed in {folder}:\n{tail}")
    return done.stdout


def _tools(packages: Collection[str]) -> str:
    lines = "".join(f'\t_ "{package}"\n' for package in packages)
    return f"//go:build tools\n\npackage tools\n\nimport (\n{lines})\n"


def _kubernetes() -> Module:
    version = KUBERNETES.removeprefix("v")
    # Its own go.mod has the libraries beside it in one tree; published, they are modules of the same version.
    described = json.loads(
        _go(["mod", "download", "-json", f"k8s.io/kubernetes@{KUBERNETES}"], cache_folder())
    )
    libraries = re.findall(
        r"^\s+(k8s\.io/\S+) v0\.0\.0(?!-)", Path(described["GoMod"]).read_text(), re.MULTILINE
    )
    replaced = "".join(f"\t{name} => {name} v0{version[1:]}\n" for name in libraries)
    major, minor, _ = version.split(".")
    base = "k8s.io/component-base/version"
    packages = {name: f"k8s.io/kubernetes/cmd/{name}" for name in _KUBERNETES}
    return Module(
        name="kubernetes",
        go_mod=f"module cluster\n\ngo 1.24.0\n\nrequire k8s.io/kubernetes {KUBERNETES}\n\nreplace (\n{replaced})\n",
        main=_tools(packages.values()),
        packages=packages,
        ldflags=f"-s -w -X {base}.gitVersion={KUBERNETES} -X {base}.gitMajor={major} -X {base}.gitMinor={minor}",
    )


def _etcd() -> Module:
    package = "go.etcd.io/etcd/server/v3"
    return Module(
        name="etcd",
        go_mod=f"module etcdbuild\n\ngo 1.24.0\n\nrequire {package} {ETCD}\n",
        main=_tools([package]),
        packages={"etcd": package},
        environment={"CGO_ENABLED": "0"},
    )


def _coredns() -> Module:
    plugins = "".join(
        f'\t_ "github.com/coredns/coredns/plugin/{name}"\n' for name in (*_COREDNS_PLUGINS, *_COREDNS_MORE)
    )
    return Module(
        name="coredns",
        go_mod=f"module corednsbuild\n\ngo 1.24.0\n\nrequire github.com/coredns/coredns {COREDNS}\n",
        main="package main\n\nimport (\n"
        f'\t"github.com/coredns/coredns/coremain"\n{plugins})\n\nfunc main() {{ coremain.Run() }}\n',
        packages={"coredns": "."},
        environment={"CGO_ENABLED": "0"},
    )


def main() -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="clusterbin", description="Build the programs of a cluster.")
    parser.add_argument("names", metavar="NAME", nargs="*", help=f"one of {', '.join((*ALL, *MONITORING))}")
    parser.add_argument("--all", action="store_true", help="build all of them")
    parser.add_argument("--if-possible", action="store_true", help="succeed where there is no Go")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - {*ALL, *MONITORING})
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}")
    names = ALL if options.all else tuple(options.names) or TESTED
    wanted = missing(names)
    if wanted and options.if_possible and shutil.which("go") is None:
        sys.stderr.write(f"not built, as there is no Go here: {', '.join(wanted)}\n")
        return 0
    try:
        build(names)
    except RuntimeError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write(f"{cache_folder() / 'bin'}: {', '.join(names)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

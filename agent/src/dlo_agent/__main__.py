"""The process entry of ``dlo-agent``: settings, threads, signals, and the one edge where an error is a line."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from dlo_agent.errors import DeadlinePassed, UsageError

DONE: Final = 0
FAILED: Final = 1
WRONG_INPUT: Final = 2
DEADLINE: Final = 75  # EX_TEMPFAIL: the gate's deadline has passed
_TERMINATION_BYTES: Final = 4096


def main() -> None:
    """Run the command line and exit: 0 done, 1 it failed, 2 wrong input, 75 the gate's deadline has passed."""
    # The first process of a container has no default action for it: a gate that waits would outlast its pod's
    # whole grace period.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    sys.exit(run_command(sys.argv[1:], os.environ))


def run_command(words: Sequence[str], environment: Mapping[str, str]) -> int:
    """The exit status of one command; its error, if any, is on standard error as one line."""
    arguments = _parser(environment).parse_args(words)
    command: Callable[[argparse.Namespace], None] = arguments.run
    termination: Path | None = getattr(arguments, "termination_message", None)
    try:
        command(arguments)
    except UsageError as error:
        return _fail(error, WRONG_INPUT, termination)
    except DeadlinePassed as error:
        return _fail(error, DEADLINE, termination)
    except KeyboardInterrupt:
        return _fail(InterruptedError("interrupted"), 130, None)
    except Exception as error:  # the edge: no traceback reaches a user
        return _fail(error, FAILED, termination)
    return DONE


def _fail(error: BaseException, status: int, termination: Path | None) -> int:
    code = getattr(error, "code", type(error).__name__)
    line = " ".join(f"error: {code}: {error}".split())
    sys.stderr.write(line + "\n")
    if termination is not None:
        with suppress(OSError):  # it is there only in a pod
            termination.write_bytes(line.encode()[:_TERMINATION_BYTES])
    return status


def _parser(environment: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dlo-agent", description="The node agent of DLO Operator.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run(
        commands.add_parser("run", help="keep this node's entries as its NodeWeightCache lists them"),
        environment,
    )
    _add_gate(commands.add_parser("gate", help="wait for an engine's entries and write the hand-over file"))
    init = commands.add_parser("init-root", help="make a cache root, or repair its owner and modes")
    init.add_argument("--root", type=Path, required=True)
    init.add_argument("--uid", type=int, default=None, help="owner of what is made")
    init.add_argument("--gid", type=int, default=None, help="group that may read it")
    init.set_defaults(run=_init_root)
    return parser


def _add_run(run: argparse.ArgumentParser, environment: Mapping[str, str]) -> None:
    default = environment.get
    run.add_argument("--node", default=default("DLO_NODE_NAME", ""), help="name of this node (DLO_NODE_NAME)")
    run.add_argument(
        "--root", type=Path, default=Path(default("DLO_ROOT", "/var/cache/dlo")), help="(DLO_ROOT)"
    )
    run.add_argument("--host-root", type=Path, default=None, help="the root's path on the host, if another")
    run.add_argument("--gid", type=int, default=None, help="group that may read the root")
    run.add_argument(
        "--namespace", default=default("DLO_NAMESPACE", "dlo-system"), help="of the Leases (DLO_NAMESPACE)"
    )
    run.add_argument("--source-root", action="append", default=[], metavar="NAME=DIR", dest="source_roots")
    for kind in ("hub", "s3"):
        run.add_argument(
            f"--{kind}-endpoint",
            action="append",
            default=[],
            metavar="NAME=URL",
            dest=f"{kind}_endpoints",
            help="an address that sources may name; `default` is for those that name none",
        )
    run.add_argument(
        "--layout", action="append", default=[], metavar="NAME=FILE", dest="layouts", help="a layout by name"
    )
    run.add_argument(
        "--secrets-namespace",
        default=default("DLO_SECRETS_NAMESPACE", ""),
        help="of the copied credentials, if another (DLO_SECRETS_NAMESPACE)",
    )
    run.add_argument("--warm-budget", default="0", help="page cache to keep warm, like 200Gi; 0 for none")
    run.add_argument("--headroom", default="0", help="disk to keep free, like 20Gi")
    run.add_argument("--port", type=int, default=8080, help="of /healthz, /readyz and /metrics")
    run.add_argument("--scrub-days", type=float, default=7.0, help="every byte is checked this often")
    run.add_argument("--verify-threads", type=int, default=2)
    run.add_argument("--kubeconfig", type=Path, default=None, help="outside a cluster")
    run.set_defaults(run=_run)


def _add_gate(gate: argparse.ArgumentParser) -> None:
    gate.add_argument("--root", type=Path, required=True)
    gate.add_argument("--out", type=Path, required=True, help="the hand-over file to write")
    gate.add_argument("--want-json", required=True, help="the wanted entries")
    gate.add_argument("--deadline", type=float, default=3600.0, help="seconds to wait at most")
    gate.add_argument("--poll", type=float, default=2.0, help="seconds between two looks")
    gate.add_argument("--optional-layout", action="store_true", help="wait for Files entries only")
    gate.add_argument("--termination-message", type=Path, default=Path("/dev/termination-log"))
    gate.set_defaults(run=_gate)


def _init_root(arguments: argparse.Namespace) -> None:
    from dlo_cache.root import init_root

    root = init_root(arguments.root, uid=arguments.uid, gid=arguments.gid)
    sys.stdout.write(f"{root.path} is a cache root ({root.id})\n")


def _gate(arguments: argparse.Namespace) -> None:
    from dlo_agent.gate import parse_wants, pass_gate

    pass_gate(
        arguments.root,
        parse_wants(arguments.want_json),
        arguments.out,
        deadline_seconds=arguments.deadline,
        poll_seconds=max(arguments.poll, 0.05),
        optional_layout=arguments.optional_layout,
        say=_say,
    )


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


def _run(arguments: argparse.Namespace) -> None:
    from dlo_kube.client import ClusterGateway
    from dlo_kube.connection import from_kubeconfig, in_cluster
    from dlo_obs.logs import configure

    from dlo_agent.settings import Settings, parse_endpoints, parse_layouts, parse_size, parse_source_roots

    settings = Settings(
        node=arguments.node,
        root=arguments.root,
        namespace=arguments.namespace,
        source_roots=parse_source_roots(arguments.source_roots),
        hub_endpoints=parse_endpoints("--hub-endpoint", arguments.hub_endpoints),
        s3_endpoints=parse_endpoints("--s3-endpoint", arguments.s3_endpoints),
        layouts=parse_layouts(arguments.layouts),
        secrets_namespace=arguments.secrets_namespace,
        host_root=arguments.host_root,
        gid=arguments.gid,
        warm_budget_bytes=parse_size(arguments.warm_budget),
        headroom_bytes=parse_size(arguments.headroom),
        port=arguments.port,
        kubeconfig=arguments.kubeconfig,
        scrub_seconds=arguments.scrub_days * 86_400.0,
        verify_threads=arguments.verify_threads,
    )
    configure(node=settings.node)
    access = from_kubeconfig(settings.kubeconfig) if settings.kubeconfig is not None else in_cluster()
    gateway = ClusterGateway(access, user_agent="dlo-agent")
    try:
        from dlo_agent.service import Service

        service = Service(settings, gateway)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda _number, _frame: service.stop())
        service.run()
    finally:
        gateway.close()


if __name__ == "__main__":
    main()

"""`python -m dlo_engine serve …`: one engine, its ranks and its HTTP port.

Parses the command line and nothing else; this process never imports torch.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dlo_engine.errors import EngineError, InvalidConfiguration
from dlo_engine.flags import add_flags, config_from, make_parser
from dlo_engine.front.events import Events

if TYPE_CHECKING:
    from dlo_engine.front.settings import FrontSettings


def main(argv: Sequence[str], settings: FrontSettings | None = None) -> int:
    """Run the command line `argv` (without the program); returns the exit status. Tests pass settings."""
    parent = os.getppid()
    arguments, extra = split_extra(argv)
    parser = make_parser(
        "python -m dlo_engine", "Serve a diffusion pipeline whose blocks stream to the device."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="serve")
    command = commands.add_parser("serve", help="serve one engine until SIGTERM", allow_abbrev=False)
    add_flags(command)
    command.add_argument(
        "--events", action="store_true", help="write progress as JSON lines on stdout, for a parent process"
    )
    command.add_argument(
        "--exit-with-parent", action="store_true", help="shut down in order when the parent process ends"
    )
    try:
        values = vars(parser.parse_args(arguments))
        config = config_from(values, extra)
    except InvalidConfiguration as error:
        return _refuse(arguments, error)
    try:
        # The web framework is only needed now: a wrong command line is answered without it.
        from dlo_obs.logs import configure

        from dlo_engine.front.serve import serve
        from dlo_engine.lifeline import end_with
    except ImportError as error:
        missing = EngineError(
            f"a library of the engine cannot be loaded: {error}",
            hint="install dlo-operator[engine] in this environment",
            code="EngineNotInstalled",
        )
        return _refuse(arguments, missing)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    try:
        configure()
        if values["exit_with_parent"] and not end_with(parent, signal.SIGTERM):
            return 128 + signal.SIGTERM
        return serve(config, events=bool(values["events"]), settings=settings)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _refuse(arguments: Sequence[str], error: EngineError) -> int:
    """Say why there will be no engine, to a parent process too; returns the exit status."""
    channel = Events(enabled="--events" in arguments)
    channel.emit({"event": "failed", "code": error.code, "message": error.message, "hint": error.hint})
    channel.close()
    sys.stderr.write(f"error: {error.line}\n")
    return error.exit_status


def split_extra(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments before and behind the first lone `--`."""
    arguments = list(argv)
    if "--" not in arguments:
        return arguments, []
    index = arguments.index("--")
    return arguments[:index], arguments[index + 1 :]


if __name__ == "__main__":
    # The first process of a container has no default action for it, and would outlast its pod's grace period.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    sys.exit(main(sys.argv[1:]))

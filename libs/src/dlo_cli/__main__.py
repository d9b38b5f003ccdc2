"""The process entry of ``dlo``: signals, exit status, and the one edge where an error becomes a line.

The commands are imported late, so that an interrupt while they load is one like any other.
"""

import contextlib
import sys

from dlo_cli import interrupts, streams
from dlo_cli.errors import (
    DONE,
    FAILED,
    INTERRUPTED,
    WRONG_INPUT,
    OutputLost,
    UsageError,
    error_line,
    exit_status,
)


def main() -> None:
    """Run the command line and exit: 0 done, 1 it failed, 2 wrong input, 130 interrupted."""
    interrupts.watch()
    streams.prepare()
    sys.exit(run_app())


def run_app() -> int:
    """The exit status of one command; its error, if any, is on standard error as one line."""
    try:
        from dlo_cli.app import app

        status = app(standalone_mode=False)
        _flush()
    except KeyboardInterrupt:
        return _interrupted()
    except BrokenPipeError:
        # Whoever read our output is gone; nothing more can be said there.
        streams.drop_output()
        return FAILED
    except Exception as error:  # the edge: no traceback reaches a user
        return _failed(error)
    if status == INTERRUPTED:  # what typer makes of a KeyboardInterrupt
        return _interrupted()
    return status if isinstance(status, int) else DONE


def _flush() -> None:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputLost(error) from error


def _failed(error: Exception) -> int:
    from dlo_cache.errors import Cancelled
    from typer.exceptions import Abort, TyperException

    if isinstance(error, Abort | Cancelled):
        return _interrupted()
    if isinstance(error, OutputLost):
        streams.drop_output()
    if isinstance(error, TyperException):
        return _say(_usage_line(error), WRONG_INPUT)
    return _say(error_line(error), exit_status(error))


def _usage_line(error: Exception) -> str:
    """What is wrong with the command line; the help itself where a command was called without words."""
    message = str(getattr(error, "format_message", lambda: error)())
    if type(error).__name__ == "NoArgsIsHelpError":
        return message
    context = getattr(error, "ctx", None)
    remedy = f"see {context.command_path} --help" if context is not None else ""
    return error_line(UsageError(message, hint=remedy))


def _interrupted() -> int:
    return _say("interrupted: nothing is half-written", INTERRUPTED)


def _say(line: str, status: int) -> int:
    # Where nobody listens the exit status still tells.
    with contextlib.suppress(OSError):
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
    return status


if __name__ == "__main__":
    main()

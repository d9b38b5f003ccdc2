"""The process entry of ``dlo``: signals, exit status, and the one edge where an error becomes a line."""

import os
import signal
import sys
from types import FrameType

from dlo_cache.errors import Cancelled
from typer.exceptions import Abort, TyperException

from dlo_cli.app import app, stopping
from dlo_cli.errors import DONE, FAILED, INTERRUPTED, WRONG_INPUT, error_line, exit_status


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    """Ask the running job to stop; waiting calls are left at once."""
    stopping.set()
    raise KeyboardInterrupt


def main() -> None:
    """Run the command line and exit: 0 done, 1 it failed, 2 wrong input, 130 interrupted."""
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _interrupt)
    sys.exit(run_app())


def run_app() -> int:
    """The exit status of one command; its error, if any, is on standard error as one line."""
    try:
        status = app(standalone_mode=False)
    except (KeyboardInterrupt, Abort, Cancelled):
        return _interrupted()
    except BrokenPipeError:
        # Whoever read our output is gone; nothing more can be said there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except TyperException as error:
        return _say(_usage_line(error), WRONG_INPUT)
    except Exception as error:  # the edge: no traceback reaches a user
        return _say(error_line(error), exit_status(error))
    if status == INTERRUPTED:  # what typer makes of a KeyboardInterrupt
        return _interrupted()
    return status if isinstance(status, int) else DONE


def _usage_line(error: TyperException) -> str:
    """What is wrong with the command line; the help itself where a command was called without words."""
    if type(error).__name__ == "NoArgsIsHelpError":
        return error.format_message()
    context = getattr(error, "ctx", None)
    remedy = f" — see {context.command_path} --help" if context is not None else ""
    return f"error: Usage: {error.format_message()}{remedy}"


def _interrupted() -> int:
    return _say("interrupted: nothing is half-written", INTERRUPTED)


def _say(line: str, status: int) -> int:
    sys.stderr.write(line + "\n")
    return status


if __name__ == "__main__":
    main()

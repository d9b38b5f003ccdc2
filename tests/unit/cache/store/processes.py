"""Runs a piece of a test in a child process: as another user, or until it is killed before one of its system
calls.

The child is forked, so that it needs no start-up and a hundred of them fit into a test.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, Final

KILLED: Final = 137
NOBODY: Final = 65534
DURABLE_CALLS: Final = ("mkdir", "open", "write", "fchmod", "fsync", "rename", "link", "unlink", "rmdir")
"""The calls that change the disk; of ``open`` only those that make a file."""


def in_child(work: Callable[[], None], *, uid: int | None = None) -> int:
    """The exit status of a child that does ``work``, as user and group ``uid`` if given; 1 with a traceback
    for errors."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            if uid is not None:
                os.setgroups([])
                os.setgid(uid)
                os.setuid(uid)
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed_before(call: int, work: Callable[[], None]) -> Callable[[], None]:
    """``work``, in a process that dies at once, as by SIGKILL, before its durable system call number
    ``call``."""

    def run() -> None:
        left = [call]

        def dying(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(*arguments: Any, **named: Any) -> Any:
                if name != "open" or arguments[1] & os.O_CREAT:
                    left[0] -= 1
                if left[0] < 0:
                    os._exit(KILLED)
                return real(*arguments, **named)

            return wrapped

        for name in DURABLE_CALLS:
            setattr(os, name, dying(name, getattr(os, name)))
        work()

    return run

"""Ties the life of this process to its parent's, in the kernel: no orphan survives a killed parent."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def end_with(parent: int, number: signal.Signals) -> bool:
    """Have the kernel send this signal to us when the parent (its spawning thread) ends.

    False when it cannot, or when that parent has ended already.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    armed = libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) == 0
    return bool(armed and os.getppid() == parent)

"""One data file of an entry, mapped read-only and shared, and the tensors in it.

The only module that makes mappings. A mapping keeps the reader's lease alive, so that nobody evicts bytes
that are still mapped, whoever holds them. Must not be given a file whose size was not checked: a read past
the end of a file is a signal that nothing can catch.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from dlo_cache import locks
from dlo_cache.errors import Invalid
from dlo_cache.oserrors import os_errors


class TensorView(NamedTuple):
    """Where a tensor lies: ``offset`` counts bytes from the start of its file's data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Lease:
    """The reader's lease on one entry: a lock that goes with the last reference to this object."""

    def __init__(self, fd: int) -> None:
        """Takes over the lease file ``fd``, also on failure; raises Busy while someone removes the entry."""
        self._fd: int | None = fd
        try:
            locks.acquire_read(fd)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Drops the lock now; doing it again is harmless."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __del__(self) -> None:
        self.release()


class _LeasedMap(mmap.mmap):
    """A mapping that holds on to the lease for as long as it exists."""

    lease: Lease | None = None


class MappedFile:
    """One data file; ``data`` is its data section as a read-only view, to be let go before the entry is
    closed.

    ``group`` is the block's name, None for the resident file and in an entry of kind Files. The latter's
    files have no tensors here and are mapped when ``data`` is first asked for.
    """

    def __init__(
        self,
        fd: int,
        *,
        name: str,
        group: str | None,
        nbytes: int,
        data_offset: int,
        tensors: Mapping[str, TensorView],
        lease: Lease,
    ) -> None:
        """Takes over the open file ``fd`` of exactly ``data_offset + nbytes`` bytes."""
        self.name = name
        self.group = group
        self.nbytes = nbytes
        self.data_offset = data_offset
        self.tensors = tensors
        self._fd: int | None = fd
        self._lease: Lease | None = lease
        self._map: _LeasedMap | None = None
        self._mapping = threading.Lock()
        self.closed = False

    def __del__(self) -> None:
        self.close()

    @property
    def data(self) -> memoryview:
        """The data section; empty, and nothing is mapped, if it has no bytes. Raises Invalid once closed."""
        self.map()
        return memoryview(b"" if self._map is None else self._map)[self.data_offset :]

    @property
    def address(self) -> int:
        """Address of the first byte of the data section in this process, 0 if it has no bytes."""
        data = self.data
        return int(np.frombuffer(data, np.uint8).ctypes.data) if len(data) else 0

    def map(self) -> None:
        """Makes the mapping, if there is none yet and the data section has any bytes. Threads may meet
        here."""
        if self.closed:
            raise Invalid(f"{self.name} was used after its entry was closed")
        if self._map is not None or self.nbytes == 0:
            return
        # Without the lock the second thread would map a descriptor that the first has just closed, which may
        # be that of another file by then.
        with self._mapping:
            if self._map is not None or self._fd is None:
                return
            with os_errors(f"mapping {self.name}"):
                # From the file's start: the data section is page-aligned on 4 KiB pages, not on larger ones.
                length = self.data_offset + self.nbytes
                mapped = _LeasedMap(self._fd, length, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
            mapped.lease = self._lease
            self._map = mapped
            self._close_fd()  # the mapping has a descriptor of its own

    def header(self) -> bytes:
        """The bytes in front of the data section."""
        if self._map is not None:
            return self._map[: self.data_offset]
        if self._fd is None:
            raise Invalid(f"{self.name} was used after its entry was closed")
        with os_errors(f"reading {self.name}"):
            return os.pread(self._fd, self.data_offset, 0)

    def view(self, name: str) -> memoryview:
        """The bytes of one tensor."""
        tensor = self.tensors[name]
        return self.data[tensor.offset : tensor.offset + tensor.nbytes]

    def close(self) -> bool:
        """Lets go of the mapping; returns whether it is gone, which it is not while anyone holds a view."""
        mapped, self._map, self._lease, self.closed = self._map, None, None, True
        self._close_fd()
        if mapped is None:
            return True
        try:
            mapped.close()
        except BufferError:
            return False  # the mapping, and the lease with it, goes with the last view
        mapped.lease = None
        return True

    def _close_fd(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

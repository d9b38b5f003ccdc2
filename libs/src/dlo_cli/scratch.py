"""The private folder of one `dlo run`: hand-over file, log, and whatever the engine keeps for itself.

It goes with the run. What a run that was killed has left, the next run takes away: a folder is in use exactly as
long as somebody holds its lock.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from dlo_cli.errors import CliError

PREFIX = "dlo-run-"


class Scratch:
    """A locked temporary folder. A context manager: it is gone afterwards."""

    path: Path
    lock: int
    """Descriptor of the lock; a child that inherits it keeps the folder in use for as long as it lives."""

    def __enter__(self) -> Self:
        try:
            sweep(Path(tempfile.gettempdir()))
            self._make()
        except OSError as error:
            raise CliError(
                f"no folder for temporary files can be written: {error.strerror}",
                hint="free space in /tmp, or set TMPDIR to a folder that you can write",
                code="NoTemporaryFolder",
            ) from error
        return self

    def _make(self) -> None:
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
            self.lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(self.lock, fcntl.LOCK_EX)
            if self.path.exists():
                return
            os.close(self.lock)  # a sweep came between

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)


def sweep(parent: Path) -> None:
    """Remove the folders of ours whose lock nobody holds."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)
            finally:
                os.close(lock)

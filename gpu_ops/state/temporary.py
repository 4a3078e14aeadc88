"""Temporary folders of this pack: each belongs to a process, and is removed with it, or by the next one that makes one.

A folder's owner holds a lock on a file in it. `atexit` does not run in a process that a signal ends, so whoever makes
a folder removes those beside it whose lock is free.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO, Final

PREFIX: Final = "gpu-join-"

_LOCK: Final = ".owner"
_locks: Final[dict[Path, IO[bytes]]] = {}


def folder() -> Path:
    """A new folder of this process, below the system's temporary one; `remove` or the process's end removes it."""
    _sweep(Path(tempfile.gettempdir()))
    made = Path(tempfile.mkdtemp(prefix=PREFIX))
    lock = (made / _LOCK).open("wb")
    fcntl.flock(lock, fcntl.LOCK_EX)
    _locks[made] = lock
    atexit.register(_at_exit, made, os.getpid())
    return made


def _at_exit(made: Path, owner: int) -> None:
    if os.getpid() == owner:
        remove(made)


def remove(made: Path) -> None:
    """Removes a folder that `folder` made."""
    lock = _locks.pop(made, None)
    if lock is not None:
        shutil.rmtree(made, ignore_errors=True)
        lock.close()


def _sweep(parent: Path) -> None:
    """Removes what processes have left that are gone."""
    for left in parent.glob(f"{PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError), left.open("rb") as lock:  # somebody else's, or gone meanwhile
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock.fileno()).st_uid == os.getuid():
                shutil.rmtree(left.parent, ignore_errors=True)

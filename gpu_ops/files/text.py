"""Text files in blocks: the rows of some blocks are read beside one another, and come out in the order of the file."""

from __future__ import annotations

import collections
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

from gpu_ops.files.columns import WrongError

_COMPRESSED: Final = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"PK\x03\x04": "zip"}
_SHOWN: Final = 100
"""Bytes of a line that an error shows."""
_MOST_THREADS: Final = 4

_Unread = TypeVar("_Unread")
_RowsOf = TypeVar("_RowsOf")


def shown(line: bytes) -> str:
    """The beginning of a line, for an error."""
    return line[:_SHOWN].decode(errors="replace").strip()


def line_at(text: bytes, begin: int) -> bytes:
    """The line that begins at a place of a text, as far as errors show lines."""
    return re.split(rb"[\r\n]", text[begin : begin + 2 * _SHOWN], maxsplit=1)[0]


def refuse_compressed(begin: bytes) -> None:
    """Looks at the first bytes of a text.

    Raises:
        WrongError: none begins like this.
    """
    kind = next((kind for magic, kind in _COMPRESSED.items() if begin.startswith(magic)), None)
    if kind is not None:
        raise WrongError(f"it is compressed ({kind}), and its name does not say so: it has to end in .gz, .bz2 or .zst")


def side_by_side(read: Callable[[_Unread], _RowsOf], blocks: Iterable[_Unread]) -> Iterator[_RowsOf]:
    """Reads blocks in threads, as a task often has one large file while other cores have nothing to do.

    Args:
        read: reads one block; Arrow's readers let other threads run.
        blocks: as many as there are threads are in memory at once, and one more.

    Yields:
        What ``read`` gives of each block, in their order.
    """
    threads = min(len(os.sched_getaffinity(0)), _MOST_THREADS)
    waiting: collections.deque[Future[_RowsOf]] = collections.deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="read") as pool:
        try:
            for block in blocks:
                waiting.append(pool.submit(read, block))
                if len(waiting) > threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)

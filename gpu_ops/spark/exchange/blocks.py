"""Where tasks on one machine leave rows for those of the next stage: files, of which Spark shuffles only the names.

Spark copies what a task gives to its Python worker and back some ten times, compresses it and adds it up. Where all
tasks run on one machine a file does, which the next task maps into its memory. So it lives as long as Spark's own
shuffle files have to: the next micro-batch of its query removes it. Little is not worth a file.
"""

from __future__ import annotations

import contextlib
import shutil
import uuid
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa

LEAST_BYTES: Final = 1 << 16
"""Of a message in a file: to make one takes as long as Spark takes for that many."""


class Block(NamedTuple):
    """Where an Arrow message is.

    Attributes:
        file: its path; empty where the message is with Spark's rows.
        start: of the message in it, in bytes.
        size: in bytes.
    """

    file: str
    start: int
    size: int


INLINE: Final = Block("", 0, 0)


class Blocks(NamedTuple):
    """The files of an application on one machine.

    Attributes:
        folder: where they are; a folder of each run of a query, and in it one of each micro-batch.
        least_bytes: of a message in a file; smaller ones go with Spark's rows.
    """

    folder: str
    least_bytes: int

    def written(self, run_id: str, batch_id: int) -> contextlib.AbstractContextManager[BlockFile]:
        """The file of one task of a micro-batch, made when something is put into it."""
        return contextlib.closing(BlockFile(Path(self.folder, run_id, str(batch_id)), self.least_bytes))

    def forget(self, run_id: str) -> None:
        """Removes what there is of a run that is over."""
        if run_id:
            shutil.rmtree(Path(self.folder, run_id), ignore_errors=True)


class BlockFile:
    """A file of Arrow messages.

    Args:
        folder: of its micro-batch.
        least_bytes: of a message that is put into it.
    """

    def __init__(self, folder: Path, least_bytes: int) -> None:
        self._folder, self._least_bytes, self._path = folder, least_bytes, ""
        self._sink: pa.NativeFile | None = None
        self._at = 0

    def put(self, message: pa.Buffer) -> Block:
        """Appends a message; `INLINE` where it is too small."""
        if message.size < self._least_bytes:
            return INLINE
        if self._sink is None:
            for folder in (*reversed(self._folder.parents[:2]), self._folder):
                folder.mkdir(mode=0o700, exist_ok=True)
            for other in self._folder.parent.iterdir():  # micro-batches of a run come one after another
                if int(other.name) < int(self._folder.name):
                    shutil.rmtree(other, ignore_errors=True)
            self._path = str(self._folder / uuid.uuid4().hex)
            self._sink = pa.OSFile(self._path, "wb")
        self._sink.write(message)
        start, self._at = self._at, self._at + message.size
        return Block(self._path, start, message.size)

    def close(self) -> None:
        """Nothing more is put into it."""
        if self._sink is not None:
            self._sink.close()


def local_blocks(context: Any) -> Blocks:
    """Of an application in local mode: in the folder that Spark has for its Python side and removes at its end.

    Args:
        context: the SparkContext.
    """
    return Blocks(str(Path(context._temp_dir, "blocks")), LEAST_BYTES)


class Mapped:
    """Files mapped into memory, each once."""

    def __init__(self) -> None:
        self._files: dict[str, pa.Buffer] = {}

    def message(self, block: Block) -> pa.Buffer:
        """What was put there."""
        if block.file not in self._files:
            with pa.memory_map(block.file) as file:
                self._files[block.file] = file.read_buffer()
        return self._files[block.file].slice(block.start, block.size)

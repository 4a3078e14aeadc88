"""Tasks that read state folders: the present result of an operator, and states made of those of operators elsewhere.

What a change takes of a folder is taken in one go, so that each partition's state is brought to memory once: rows, as
files of Arrow's for the query that fills other states with them, and the states of operators that stay.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, Final

import pyarrow as pa

from gpu_ops.errors import StateError
from gpu_ops.files.formats import FileFormat
from gpu_ops.spark.server.present import AssembledState, StateRows, StoredOperator
from gpu_ops.spark.tasks.arrow import together
from gpu_ops.spark.tasks.engine import ROWS_PER_BATCH
from gpu_ops.state.address import StateAddress
from gpu_ops.state.files import Files

_FILE_BYTES: Final = 1 << 26
"""The size of a file of rows, about."""


@dataclasses.dataclass(frozen=True)
class TakenState:
    """Rows and states that a change takes out of one state folder.

    Attributes:
        of: an operator of the folder.
        rows: by the folder that they are written to, rows of some of its operators.
        states: states that go on with those of its operators.
    """

    of: StoredOperator
    rows: dict[StateAddress, StateRows]
    states: list[AssembledState]

    def take(self, partition: int) -> None:
        """Writes the rows and states of a partition; again, it writes the same."""
        with contextlib.ExitStack() as stack:
            held = functools.cache(lambda: stack.enter_context(self.of.held(partition)))
            for state in self.states:
                state.write(partition, lambda: {self.of.state.identity: held()})
            for folder, rows in self.rows.items():
                _write_rows(Files.at(folder), partition, rows.schema, rows.of(partition, held))


def _write_rows(files: Files, partition: int, schema: pa.Schema, rows: Iterable[pa.Table]) -> None:
    """Writes rows into files, in their order; one at least."""
    options = pa.ipc.IpcWriteOptions(compression=None if files.local else "lz4")

    def produce(some: Sequence[pa.RecordBatch], file: IO[bytes]) -> None:
        with pa.ipc.new_stream(pa.PythonFile(file, mode="w"), schema, options=options) as writer:
            for batch in some:
                writer.write_batch(batch)

    batches = (batch for part in rows for batch in part.cast(schema).to_batches(ROWS_PER_BATCH))
    first = pa.RecordBatch.from_pylist([], schema)
    some = together((batch for group in ([first], batches) for batch in group), lambda x: x.nbytes, _FILE_BYTES)
    for number, group in enumerate(some):
        files.write(f"{partition:08d}-{number:08d}.arrow", functools.partial(produce, group))


def take(taken: Sequence[tuple[TakenState, int]], number: int) -> None:
    """Takes what a number stands for: of a folder, a partition."""
    of, partition = taken[number]
    of.take(partition)


@dataclasses.dataclass(frozen=True)
class TakenFiles(FileFormat):
    """The files of rows that `TakenState` writes into a folder.

    Attributes:
        folder: the folder.
    """

    folder: StateAddress = dataclasses.field(kw_only=True)

    def _read(
        self, uri: str, columns: Sequence[str], input_name: str, look: Callable[[Mapping[str, Any]], None]
    ) -> Iterator[pa.RecordBatch]:
        del input_name, look
        files, name = Files.at(self.folder), uri.rpartition("/")[2]
        content = files.read(name)
        if content is None:
            raise StateError(f"{files.name(name)} is missing, and the change is not done: begin it anew in new folders")
        with contextlib.closing(pa.ipc.open_stream(content)) as reader:
            for batch in reader:
                yield batch.select(list(columns) or batch.schema.names[:1])

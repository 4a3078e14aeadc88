"""Rows of a micro-batch that lie in Parquet files: read into the card's memory, where none passes the host, or here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gpu_ops.descriptions.changelog import kinds_as_text
from gpu_ops.descriptions.description import Description
from gpu_ops.descriptions.inputs import Input
from gpu_ops.errors import BadInputError, StateError
from gpu_ops.kernels import DeviceRows, Frame, FrameFiles, Kernels
from gpu_ops.spark.wire.command import SideRows, Wire
from gpu_ops.state.blocks import FilePart, mapped, together
from gpu_ops.values import wrong_text


class CardReader:
    """Reads the Parquet files of a micro-batch into the backend's memory.

    Args:
        kernels: the backend.
        files: reads files of that backend.
        wire: the layout of the micro-batch's rows.
        schema: of these on the wire.
    """

    def __init__(self, kernels: Kernels, files: FrameFiles, wire: Wire, schema: pa.Schema) -> None:
        self._kernels, self._files, self._wire, self._schema = kernels, files, wire, schema

    def with_files(self, description: Description, rows: SideRows, parts: Sequence[FilePart]) -> SideRows:
        """The rows of all inputs, some of them in the backend's memory.

        Args:
            description: with the inputs.
            rows: those that do not lie in these files, by their sequence.
            parts: the files, likewise.

        Raises:
            RuntimeError, OSError, ValueError: a file cannot be read so.
        """
        tables, sequences = list(rows.tables), list(rows.sequences)
        for number, source in enumerate(description.inputs):
            own = [part for part in parts if part.number == number]
            if own:
                tables[number], sequences[number] = self._of_input(source, rows.tables[number], sequences[number], own)
        return SideRows(tuple(tables), tuple(sequences))

    def _of_input(
        self, source: Input, table: pa.Table | DeviceRows, sequence: npt.NDArray[np.int64], parts: Sequence[FilePart]
    ) -> tuple[DeviceRows, npt.NDArray[np.int64]]:
        assert self._kernels.dataframes is not None
        assert isinstance(table, pa.Table)
        beside = source.row_kind
        if beside is not None and table.num_rows:  # files have texts
            at = table.schema.get_field_index(beside)
            table = table.set_column(at, beside, kinds_as_text(table[beside]))
        schema = source.schema if beside is None else source.schema.append(pa.field(beside, pa.string()))
        places = np.searchsorted(sequence, [part.sequence for part in parts]).tolist()
        pieces, numbers = list[pa.Table | Frame](), list[npt.NDArray[np.int64]]()
        for part, begin, end in zip(parts, [0, *places], places, strict=False):
            pieces += [table.slice(begin, end - begin)] if end > begin else []
            pieces.append(self._read(part, schema))
            numbers += [sequence[begin:end], np.arange(part.sequence, part.end)]
        pieces += [table.slice(places[-1])] if places[-1] < table.num_rows else []
        numbers.append(sequence[places[-1] :])
        rows = self._kernels.dataframes.together(pieces, schema)
        return self._kernels.dataframes.as_rows(rows, source.schema, beside), np.concatenate(numbers)

    def _read(self, part: FilePart, schema: pa.Schema) -> Frame:
        """The rows of a file under an input's names."""
        there, shown = part.schema(self._schema), self._shown(part)
        if there.types != [schema.field(name).type for name in shown]:
            raise ValueError(f"{part.source} has {there.types}, which input {part.number} has in other types")
        frame = self._files.read_parquet(part.block.file, there)
        found = self._kernels.num_rows(frame)
        if found != part.block.rows:
            raise ValueError(f"{part.source} has {part.block.rows} rows, and {found} were read")
        names = dict(zip(shown, part.columns, strict=True))
        return self._kernels.combine([(name, frame, names[name]) for name in schema.names])

    def _shown(self, part: FilePart) -> list[str]:
        """The input's names of a part's columns."""
        carried = {union_column[-1]: union_column[part.number] for union_column in self._wire.union_columns}
        return [str(carried[name]) for name in part.wire_names(self._schema)]


@contextlib.contextmanager
def read_anew(file: str) -> Iterator[None]:
    """Context manager that says what helps where a file with rows of a micro-batch, which it names, is not read."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise StateError(
            f"rows of this micro-batch lie in {file}, and cannot be read there: {error}. Start the query "
            "again: it reads its sources anew"
        ) from error


def with_rows(table: pa.Table, parts: Sequence[FilePart]) -> pa.Table:
    """All rows of a micro-batch, those of Parquet files read by Arrow.

    Args:
        table: the others, on the wire, by their sequence.
        parts: the files, likewise.

    Raises:
        StateError: one is gone, or is something else.
    """
    found = []
    for part in parts:
        with read_anew(f"{part.block.file}, a copy of {part.source}"):
            found.append((part, part.rows(mapped(part.block.file), table.schema)))
    return together(table, found)


def in_file(
    error: BadInputError, description: Description, parts: Sequence[FilePart], schema: pa.Schema
) -> BadInputError:
    """The error about rows of a micro-batch, with the name of the file where it is one about the text in one.

    Args:
        error: as it was raised.
        description: with the inputs.
        parts: the Parquet files.
        schema: of the rows on the wire.
    """
    own = [part for part in parts if description.inputs[part.number].name == error.input_name]
    for part in own if error.sample is not None else ():
        for batch in part.rows(mapped(part.block.file), schema):
            texts = (wrong_text(pa.chunked_array([batch[name]])) for name in part.wire_names(schema))
            if any(wrong is not None and wrong[1] == error.sample for wrong in texts):
                problem = f"{error.problem}, in {part.source}"
                return BadInputError(error.input_name, error.column, problem, error.sample)
    return error

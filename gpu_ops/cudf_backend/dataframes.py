"""DataFrames of cuDF's, taken and given on the card.

cuDF calls a column by libcudf's own types, the backend by the plainest one with the same bits
(`gpu_ops.cudf_backend.storage`): between the two a column gets another name, and is copied only where its memory would
be somebody else's too, as both sides may write to what is theirs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import cupy as cp
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pylibcudf as plc

from gpu_ops.arrays import Array, Mask
from gpu_ops.cudf_backend.device import launch
from gpu_ops.cudf_backend.frame import DeviceColumn, Frame, from_values, to_arrow_pieces, valid_mask, values
from gpu_ops.cudf_backend.hashing import convert
from gpu_ops.cudf_backend.storage import decoded, storage_type
from gpu_ops.kernels import Kernels

_UNITS = {"s": "SECONDS", "ms": "MILLISECONDS", "us": "MICROSECONDS", "ns": "NANOSECONDS"}
_OTHERS = {pa.bool_(): "BOOL8", pa.float32(): "FLOAT32", pa.float64(): "FLOAT64"}
_BEYOND_ASCII = 0x80
"""The first byte that is no character of its own."""
_WORDS_AT_ONCE = 4
"""Words looked for before the host looks whether any are left: as many as there are row kinds."""


def libcudf_type(kind: pa.DataType) -> plc.DataType | None:
    """The libcudf type of an Arrow type that cuDF has as such, too; None for others, nested ones among them."""
    t = pa.types
    if t.is_decimal128(kind):
        return plc.DataType(plc.TypeId.DECIMAL128, -kind.scale)
    if t.is_string(kind) or t.is_large_string(kind):
        name = "STRING"
    elif t.is_timestamp(kind) or t.is_duration(kind):
        name = f"{'TIMESTAMP' if t.is_timestamp(kind) else 'DURATION'}_{_UNITS[kind.unit]}"
    elif t.is_integer(kind):
        name = str(kind).upper()
    elif kind in _OTHERS:
        name = _OTHERS[kind]
    else:
        return None
    return plc.DataType(plc.TypeId[name])


def called_as(column: DeviceColumn, kind: plc.DataType) -> DeviceColumn:
    """The column under another type of the same width."""
    if column.type() == kind:
        return column
    missing = column.null_count()
    mask = column.null_mask() if missing else None
    return plc.Column(kind, column.size(), column.data(), mask, missing, 0, [])


class CudfRows:
    """Rows that came in a DataFrame; see `gpu_ops.kernels.DeviceRows`.

    Args:
        frame: their columns.
        schema: of all of them.
        kernels: the backend.
        beside: a further column of text, or None.
    """

    def __init__(self, frame: Frame, schema: pa.Schema, kernels: Kernels, beside: Frame | None) -> None:
        self.frame = frame
        self._schema, self._kernels, self._beside = schema, kernels, beside

    def __len__(self) -> int:
        return self.frame.length

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        table = self.table()
        if self._beside is not None:
            beside = pa.schema([(name, pa.string()) for name in self._beside.columns])
            for name, column in zip(beside.names, self._kernels.to_arrow(self._beside, beside).columns, strict=True):
                table = table.append_column(name, column)
        return table.__arrow_c_stream__(requested_schema)

    def take(self, order: npt.NDArray[np.int64]) -> CudfRows:
        """The rows at n positions."""
        taken = self.frame.take(cp.asarray(order), self._schema.names, present=True)
        return CudfRows(taken, self._schema, self._kernels, None)

    def table(self) -> pa.Table:
        """All columns, copied out."""
        return self._kernels.to_arrow(self.frame, self._schema)

    def column(self, name: str) -> pa.ChunkedArray:
        """One column, copied out."""
        return pa.chunked_array(to_arrow_pieces(self.frame.columns[name], self.frame.types[name]))

    def columns(self, names: Collection[str]) -> Frame:
        """Gives all columns, as they are there."""
        del names
        return self.frame

    def called(self, shown: Mapping[str, str], schema: pa.Schema) -> CudfRows:
        """Renames the columns, given by their new names, and leaves out the others."""
        named = [(new, self.frame, name) for new, name in shown.items()]
        return CudfFrames(self._kernels).as_rows(self._kernels.combine(named), schema)

    def nulls(self, name: str) -> Mask | None:
        """Flags the null values of a column; None if there is none."""
        valid = valid_mask(self.frame.columns[name])
        return None if valid is None else ~cp.asnumpy(valid)

    def beyond(self, name: str, limit: int) -> Mask | None:
        """Flags integers that are not between ``-limit`` and ``limit``; None if there is none."""
        column = self.frame.columns[name]
        numbers, valid = values(column, np.int64), valid_mask(column)
        far = (numbers > limit) | (numbers < -limit)
        if valid is not None:
            far &= valid
        return cp.asnumpy(far) if bool(far.any()) else None

    def invalid_text(self, name: str) -> Mask | None:
        """Flags text that is not valid UTF-8; None if there is none."""
        column = self.frame.columns[name]
        text = column.data() if column.type().id() == plc.TypeId.STRING and column.size() else None
        if text is None or not text.size:
            return None
        memory = cp.cuda.MemoryPointer(cp.cuda.UnownedMemory(text.ptr, text.size, column), 0)
        letters = cp.ndarray(text.size, np.uint8, memory)
        if int(letters.max()) < _BEYOND_ASCII:
            return None
        offsets = column.child(0)
        width = np.int64 if offsets.type().id() == plc.TypeId.INT64 else np.int32
        wrong, valid = cp.empty(column.size(), np.bool_), valid_mask(column)
        launch(
            "find_invalid_text",
            wrong.size,
            letters,
            values(offsets, width).astype(np.int64),
            np.int64(wrong.size),
            wrong,
        )
        if valid is not None:
            wrong &= valid
        return cp.asnumpy(wrong) if bool(wrong.any()) else None

    def words(self, known: Sequence[str]) -> npt.NDArray[np.int8]:
        """Gives the number of the known word that stands in the column beside each row; -1 for none."""
        assert self._beside is not None
        (column,) = self._beside.columns.values()
        found, valid = cp.full(column.size(), -1, np.int8), valid_mask(column)
        same, truth = plc.binaryop.BinaryOperator.EQUAL, plc.DataType(plc.TypeId.BOOL8)
        for number, word in enumerate(known):
            scalar = plc.Column.from_arrow(pa.array([word], pa.string())).to_scalar()
            equal = values(plc.binaryop.binary_operation(column, scalar, same, truth), np.bool_)
            if valid is not None:
                equal = equal & valid
            found = cp.where(equal, np.int8(number), found)
            if number % _WORDS_AT_ONCE == _WORDS_AT_ONCE - 1 and int(found.min()) >= 0:
                break
        host: npt.NDArray[np.int8] = cp.asnumpy(found)
        return host


class CudfFrames:
    """DataFrames of cuDF's; see `gpu_ops.kernels.DataFrames`.

    Args:
        kernels: the backend.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def lacks(self, schema: pa.Schema) -> str | None:
        """Why DataFrames of this schema cannot be given; None where they can."""
        if importlib.util.find_spec("cudf") is None:
            return "the package cudf is not installed"
        for field in schema:
            kind = field.type
            if libcudf_type(kind) is None or (pa.types.is_timestamp(kind) and kind.tz is not None):
                return f"column {field.name!r} is {kind}, which cuDF takes from the host only; take output='arrow'"
        return None

    def rows(self, given: Any, schema: pa.Schema, beside: str | None) -> CudfRows | None:
        """A DataFrame's rows, in memory of their own; None for what does not go without the host."""
        if not hasattr(given, "to_pylibcudf") or not hasattr(given, "columns") or not len(given):
            return None
        try:  # libcudf knows neither zones nor categories nor precision: cuDF says them of no rows, and copies none
            told = given.head(0).to_arrow(preserve_index=False).schema
        except (TypeError, ValueError, NotImplementedError, pa.ArrowException):
            return None
        table, _ = given.to_pylibcudf()
        wanted = schema if beside is None else schema.append(pa.field(beside, pa.string()))
        if sorted(told.names) != sorted(wanted.names) or len(told) != len(table.columns()):
            return None
        found = dict(zip(told.names, table.columns(), strict=True))
        if not all(_fits(found[field.name], told.field(field.name).type, field.type) for field in wanted):
            return None
        columns = {}
        for field in schema:
            stored = libcudf_type(storage_type(field.type))
            columns[field.name] = called_as(found[field.name].copy(), stored)
        kinds = None
        if beside is not None:
            column = found[beside].copy() if found[beside].offset() else found[beside]
            kinds = Frame(len(given), {beside: column}, {beside: pa.string()})
        types = {field.name: decoded(field.type) for field in schema}
        return CudfRows(Frame(len(given), columns, types), schema, self._kernels, kinds)

    def numbers(self, name: str, values: Array, kind: pa.DataType) -> Frame:
        """A frame of one column over an array's memory."""
        return Frame(int(values.size), {name: from_values(values)}, {name: kind})

    def together(self, parts: Sequence[pa.Table | Frame], schema: pa.Schema) -> Frame:
        """Rows one after the other, by position and in the schema's types."""
        frames = [part if isinstance(part, Frame) else self._kernels.frame(part) for part in parts]
        filled = [frame for frame in frames if frame.length] or frames[:1]
        types = dict(zip(schema.names, map(decoded, schema.types), strict=True))
        columns = [in_types(frame, schema) for frame in filled]
        if len(filled) > 1:
            columns = [list(plc.concatenate.concatenate([plc.Table(own) for own in columns]).columns())]
        return Frame(sum(f.length for f in filled), dict(zip(types, columns[0], strict=True)), types)

    def as_rows(self, frame: Frame, schema: pa.Schema, beside: str | None = None) -> CudfRows:
        """A frame's columns as rows that an operator takes in."""
        if beside is None:
            return CudfRows(self.together([frame], schema), schema, self._kernels, None)
        whole = self.together([frame], schema.append(pa.field(beside, pa.string())))
        own, kinds = (self._kernels.combine([(x, whole, x) for x in names]) for names in (schema.names, [beside]))
        return CudfRows(own, schema, self._kernels, kinds)

    def as_dataframe(self, frame: Frame, schema: pa.Schema) -> Any:
        """A DataFrame of a frame's columns."""
        import cudf  # noqa: PLC0415 - seconds, and of no use to who asks for Arrow

        columns: list[DeviceColumn] = []
        seen: set[int] = set()
        for column, field in zip(in_types(frame, schema), schema, strict=True):
            spans = [span for span in (column.data(), column.null_mask()) if span is not None and span.size]
            own = column if seen.isdisjoint(span.ptr for span in spans) else column.copy()
            seen.update(span.ptr for span in spans)
            columns.append(called_as(own, libcudf_type(field.type)))
        found = cudf.DataFrame.from_pylibcudf(plc.Table(columns), {"columns": list(schema.names)})
        decimals = {
            field.name: cudf.Decimal128Dtype(field.type.precision, field.type.scale)
            for field in schema
            if pa.types.is_decimal128(field.type)
        }
        return found.astype(decimals) if decimals else found


def _fits(column: DeviceColumn, told: pa.DataType, declared: pa.DataType) -> bool:
    """Tells whether the type that cuDF says of a column is the declared one, under another name at most."""
    text = pa.types.is_string, pa.types.is_large_string
    same = told == declared or all(any(is_one(kind) for is_one in text) for kind in (told, declared))
    known = libcudf_type(declared)
    return same and known is not None and bool(column.type() == known)


def in_types(frame: Frame, schema: pa.Schema) -> list[DeviceColumn]:
    """A frame's columns in a schema's types, by position; a frame may hold narrower ones."""
    pairs = zip(frame.columns.items(), schema.types, strict=True)
    return [convert(column, frame.types[name], kind) for (name, column), kind in pairs]

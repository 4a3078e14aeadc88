"""A stand-in for pylibcudf on pyarrow, for machines without a card.

It has only the calls the GPU backend makes, with the arguments they have in pylibcudf 26.10, and does what libcudf's
documentation and sources say: positions below zero count from the end, join results come in any order, what lies under
a null is anything. `test_stubs` holds the calls against the real signatures.
"""

from __future__ import annotations

import enum
import io
import itertools
import os
import types
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kernels.emulated_arrow import booleans, copied, has_offsets, holds, owned, told, valid
from kernels.emulated_cupy import ndarray, plain

_RANDOM = np.random.default_rng(20)


_UNITS = {"s": "SECONDS", "ms": "MILLISECONDS", "us": "MICROSECONDS", "ns": "NANOSECONDS"}
_KINDS: dict[str, pa.DataType] = {
    "BOOL8": pa.bool_(),
    **{
        f"DECIMAL{bits}": made(digits, 0)
        for bits, made, digits in ((32, pa.decimal32, 9), (64, pa.decimal64, 18), (128, pa.decimal128, 38))
    },
    **{f"INT{bits}": getattr(pa, f"int{bits}")() for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}": getattr(pa, f"uint{bits}")() for bits in (8, 16, 32, 64)},
    "FLOAT32": pa.float32(),
    "FLOAT64": pa.float64(),
    "STRING": pa.string(),
    "TIMESTAMP_DAYS": pa.date32(),
    **{f"TIMESTAMP_{name}": pa.timestamp(unit) for unit, name in _UNITS.items()},
    **{f"DURATION_{name}": pa.duration(unit) for unit, name in _UNITS.items()},
}
TypeId = enum.IntEnum("TypeId", [*_KINDS, "LIST", "STRUCT"])  # type: ignore[misc]
_IDS = {kind: TypeId[name] for name, kind in _KINDS.items()}


class DataType:
    def __init__(self, type_id: TypeId, scale: int = 0) -> None:
        self.type_id, self.scale = type_id, scale

    def id(self) -> TypeId:
        return self.type_id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DataType) and (self.type_id, self.scale) == (other.type_id, other.scale)

    def __hash__(self) -> int:
        return hash((self.type_id, self.scale))

    @classmethod
    def of(cls, kind: pa.DataType) -> DataType:
        """As libcudf calls it."""
        if pa.types.is_nested(kind):
            return cls(TypeId.STRUCT if pa.types.is_struct(kind) else TypeId.LIST)
        if pa.types.is_decimal(kind):
            return cls(TypeId[f"DECIMAL{kind.bit_width}"], -kind.scale)
        return cls(_IDS[pa.string() if pa.types.is_large_string(kind) else kind])

    def kind(self) -> pa.DataType:
        """The type of Arrow's."""
        kind = _KINDS[self.type_id.name]
        if not pa.types.is_decimal(kind):
            return kind
        return getattr(pa, f"decimal{kind.bit_width}")(kind.precision, -self.scale)


class NullEquality(enum.IntEnum):
    EQUAL = 0
    UNEQUAL = 1


class OutOfBoundsPolicy(enum.IntEnum):
    NULLIFY = 0
    DONT_CHECK = 1


class BinaryOperator(enum.IntEnum):
    EQUAL = 0
    LESS = 1


class NullPolicy(enum.IntEnum):
    EXCLUDE = 0
    INCLUDE = 1


class Order(enum.IntEnum):
    ASCENDING = 0
    DESCENDING = 1


class NullOrder(enum.IntEnum):
    AFTER = 0
    BEFORE = 1


class Aggregation(NamedTuple):
    name: str
    policy: NullPolicy | None = None


class ScanType(enum.IntEnum):
    INCLUSIVE = 0
    EXCLUSIVE = 1


class Span:
    """Bytes at an address; the owner keeps them there."""

    def __init__(self, data: np.ndarray) -> None:
        self._owner = data
        self.ptr, self.size = (data.ctypes.data if data.nbytes else 0), data.nbytes

    def bytes(self) -> np.ndarray:
        """The memory itself."""
        return self._owner.reshape(-1).view(np.uint8)


def gpumemoryview(array: ndarray) -> Span:
    assert isinstance(array, ndarray), "pylibcudf takes device memory only"
    return Span(plain(array))


class Column:
    """A column: values that begin at their buffers' start, or a slice of them.

    What shares memory on the card shares it here: a column made of a device array, one with another mask, a child, a
    slice, and the views of a column's buffers.
    """

    _kind: pa.DataType
    _size: int
    _nulls: int
    _offset = 0
    _mask: np.ndarray | None = None
    _values: np.ndarray | None = None
    """Bytes of fixed-width values; a byte each of booleans."""
    _array: pa.Array | None = None
    """Text and nested values."""

    def __init__(
        self,
        data_type: DataType,
        size: int,
        data: Span,
        mask: Span | None,
        null_count: int,
        offset: int,
        children: Iterable[Column],
    ) -> None:
        kind = data_type.kind()
        assert pa.types.is_primitive(kind) or pa.types.is_decimal128(kind), "the backend makes no others this way"
        assert data.size == kind.bit_width // 8 * size
        assert (offset, list(children)) == (0, [])
        assert (mask is None) == (null_count == 0)
        self._set(kind, size, data.bytes(), null_count)
        self._mask = None if mask is None else mask.bytes()

    def _set(self, kind: pa.DataType, size: int, values: np.ndarray | None, nulls: int = 0) -> None:
        self._kind, self._size, self._values, self._nulls = kind, size, values, nulls

    @classmethod
    def of(cls, array: pa.Array) -> Column:
        """A column of its own memory."""
        return cls.over(owned(copied(array)))

    @classmethod
    def over(cls, array: pa.Array) -> Column:
        """A column over an array's memory, but for booleans."""
        made = cls.__new__(cls)
        made._set(array.type, len(array), None, array.null_count)
        mask, *rest = array.buffers()
        made._mask = None if mask is None or not made._nulls else np.frombuffer(mask, np.uint8)
        if pa.types.is_boolean(array.type):
            made._values = booleans(array)
        elif pa.types.is_primitive(array.type) or pa.types.is_decimal(array.type):
            width = array.type.bit_width // 8
            data = np.empty(0, np.uint8) if rest[0] is None else np.frombuffer(rest[0], np.uint8)
            made._values = data[array.offset * width : (array.offset + len(array)) * width]
        else:
            made._array = array
        if array.offset and made._mask is not None:
            made._mask = np.packbits(valid(array), bitorder="little")
        return made

    @property
    def array(self) -> pa.Array:
        """What it holds now."""
        if self._array is not None:
            return self._array
        assert self._values is not None
        mask = None if self._mask is None else pa.py_buffer(self._mask)
        data = (
            self._values if not pa.types.is_boolean(self._kind) else np.packbits(self._values != 0, bitorder="little")
        )
        return pa.Array.from_buffers(self._kind, self._size, [mask, pa.py_buffer(data)], self._nulls)

    @staticmethod
    def from_arrow(obj: pa.Array) -> Column:
        assert isinstance(obj, pa.Array)
        if not holds(obj.type):
            raise TypeError(f"Unsupported type_id conversion to cudf: {obj.type}")
        assert has_offsets(obj), "a segmentation fault: libcudf reads the first offset of lists, if there is none too"
        return Column.of(obj)

    @classmethod
    def from_cuda_array_interface(cls, obj: ndarray) -> Column:
        assert isinstance(obj, ndarray), "not an array on the device"
        assert obj.ndim == 1
        assert obj.flags.c_contiguous
        made = cls.__new__(cls)
        made._set(pa.from_numpy_dtype(obj.dtype), obj.size, plain(obj).view(np.uint8))
        return made

    def to_arrow(self) -> pa.Array:
        return told(copied(self.array))

    def size(self) -> int:
        return self._size

    def null_count(self) -> int:
        return self._nulls

    def offset(self) -> int:
        return self._offset

    def copy(self) -> Column:
        return Column.of(self.array)

    def data(self) -> Span:
        assert self._offset == 0, "a slice was not copied"
        if self._values is not None:
            return Span(self._values)
        text = self.array.buffers()[2]
        return Span(np.frombuffer(text or b"", np.uint8))

    def type(self) -> DataType:
        return DataType.of(self._kind)

    def null_mask(self) -> Span | None:
        return None if self._mask is None else Span(self._mask)

    def with_mask(self, mask: Span | None, null_count: int) -> Column:
        if mask is None:
            assert null_count == 0
        else:
            bits = np.unpackbits(mask.bytes(), count=self._size, bitorder="little")
            assert null_count == self._size - int(bits.sum())
        made = Column.__new__(Column)
        made._set(self._kind, self._size, self._values, null_count)
        made._mask = None if mask is None else mask.bytes()
        if self._array is not None:
            assert not pa.types.is_nested(self._kind)
            buffers = [None if made._mask is None else pa.py_buffer(made._mask), *self._array.buffers()[1:]]
            made._array = pa.Array.from_buffers(self._kind, self._size, buffers, null_count)
        return made

    def device_buffer_size(self) -> int:
        return self.array.nbytes

    def child(self, index: int) -> Column:
        if not pa.types.is_nested(self._kind):
            assert index == 0
            assert self._size, "text of no rows may have no offsets"
            width = pa.int64() if pa.types.is_large_string(self._kind) else pa.int32()
            offsets = self.array.buffers()[1]
            return Column.over(pa.Array.from_buffers(width, self._size + 1, [None, offsets]))
        assert pa.types.is_struct(self._kind)
        return Column.over(self.array.field(index))

    def list_view(self) -> Any:
        lists = self.array
        return types.SimpleNamespace(
            offsets=lambda: Column.over(lists.offsets), child=lambda: Column.over(lists.values)
        )

    def to_scalar(self) -> Scalar:
        assert self._size == 1
        return Scalar(self.array)


class Scalar:
    def __init__(self, array: pa.Array) -> None:
        self.array = array


class Table:
    def __init__(self, columns: Sequence[Column]) -> None:
        assert all(isinstance(column, Column) for column in columns)
        assert len({column.size() for column in columns}) <= 1
        self._columns = tuple(columns)

    def columns(self) -> tuple[Column, ...]:
        return self._columns

    def num_rows(self) -> int:
        return self._columns[0].size() if self._columns else 0

    def copy(self) -> Table:
        return Table([column.copy() for column in self._columns])


def _integers(column: Column, kind: pa.DataType) -> np.ndarray:
    assert column.array.type == kind
    assert column.null_count() == 0
    return column.array.to_numpy()


def gather(source_table: Table, gather_map: Column, bounds_policy: OutOfBoundsPolicy) -> Table:
    rows, length = _integers(gather_map, pa.int32()).astype(np.int64), source_table.num_rows()
    assert length or not rows.size, "gathering from nothing is left to the caller"
    rows = np.where(rows < 0, rows + length, rows)
    outside = (rows < 0) | (rows >= length)
    assert bounds_policy is OutOfBoundsPolicy.NULLIFY or not outside.any(), "undefined behaviour"
    places = pa.array(np.where(outside, 0, rows), mask=outside)
    return Table([Column.of(column.array.take(places)) for column in source_table.columns()])


def slice_(input: Table, indices: list[int]) -> list[Table]:  # noqa: A002 - pylibcudf's name
    start, stop = indices
    columns = []
    for column in input.columns():
        part = Column.over(column.array.slice(start, stop - start))
        part._offset = start or -1  # also of one that begins where the whole does: the backend is to copy it
        columns.append(part)
    return [Table(columns)]


def concatenate(objects: Sequence[Any]) -> Any:
    if isinstance(objects[0], Column):
        arrays = [column.array for column in objects]
        if pa.large_string() in {array.type for array in arrays}:
            arrays = [array.cast(pa.large_string()) for array in arrays]
        return Column.of(pa.concat_arrays(arrays))
    return Table([concatenate(columns) for columns in zip(*(table.columns() for table in objects), strict=True)])


def _bytes(side: Column | Scalar) -> Any:
    array = side.array
    assert pa.types.is_string(array.type) or pa.types.is_large_string(array.type), "text only, here"
    wide = pa.types.is_large_string(array.type)
    data = pa.Array.from_buffers(
        pa.large_binary() if wide else pa.binary(), len(array), array.buffers(), -1, array.offset
    ).cast(pa.large_binary())
    return data[0] if isinstance(side, Scalar) else data


def binary_operation(lhs: Any, rhs: Any, op: BinaryOperator, output_type: DataType) -> Column:
    assert output_type.type_id is TypeId.BOOL8
    assert not isinstance(lhs, Scalar) or not isinstance(rhs, Scalar), "libcudf takes no two scalars"
    sizes = {side.size() for side in (lhs, rhs) if isinstance(side, Column)}
    assert len(sizes) == 1, "columns of one length"
    return Column.of((pc.equal if op is BinaryOperator.EQUAL else pc.less)(_bytes(lhs), _bytes(rhs)))


def xxhash_64(input: Table) -> Column:  # noqa: A002 - pylibcudf's name
    """Column by column, each begun with the hash of those before; a null forgets them."""
    total = np.zeros(input.num_rows(), np.uint64)
    for column in input.columns():
        if pa.types.is_string(column.array.type) or pa.types.is_large_string(column.array.type):
            data = pc.fill_null(_bytes(column), b"").to_numpy(zero_copy_only=False)
        else:
            data = _integers(column, pa.uint64())
        hashes = pd.util.hash_array(data, categorize=False)
        total = np.where(valid(column.array), pd.util.hash_array(total * np.uint64(31) + hashes), ~np.uint64(0))
    return Column.of(pa.array(total))


def inner_join(left_keys: Table, right_keys: Table, nulls_equal: NullEquality) -> tuple[Column, Column]:
    assert nulls_equal is NullEquality.UNEQUAL
    left, right = (_integers(table.columns()[0], pa.uint32()) for table in (left_keys, right_keys))
    order = np.argsort(right, kind="stable")
    low, high = (np.searchsorted(right[order], left, side) for side in ("left", "right"))
    ours = np.repeat(np.arange(left.size), high - low)
    steps = itertools.chain.from_iterable(range(a, b) for a, b in zip(low, high, strict=True))
    theirs = order[np.fromiter(steps, np.int64, count=ours.size)]
    mixed = _RANDOM.permutation(ours.size)
    return tuple(Column.of(pa.array(side[mixed].astype(np.int32))) for side in (ours, theirs))  # type: ignore[return-value]


class HashJoin:
    """A table that is built once (NVIDIA/cudf#24241, not in 26.10): libcudf's has a view of the rows, no more."""

    def __init__(
        self, right: Table, compare_nulls: NullEquality = NullEquality.EQUAL, load_factor: float = 0.5
    ) -> None:
        assert compare_nulls is NullEquality.UNEQUAL
        assert 0 < load_factor <= 1
        assert right.num_rows(), "what libcudf does with an empty table is left open"
        self._right = weakref.ref(right)

    def inner_join(self, left: Table) -> tuple[Column, Column]:
        right = self._right()
        assert right is not None, "the rows that it has a view of are gone"
        return inner_join(left, right, NullEquality.UNEQUAL)


def bools_to_mask(input: Column) -> tuple[Span, int]:  # noqa: A002 - pylibcudf's name
    assert input.null_count() == 0
    bits = input.array.to_numpy(zero_copy_only=False)
    return Span(np.packbits(bits, bitorder="little")), int((~bits).sum())


def scan(col: Column, agg: Aggregation, inclusive: ScanType) -> Column:
    assert (agg, inclusive) == (Aggregation("min"), ScanType.INCLUSIVE), "the only one that the backend makes"
    return Column.of(pa.array(np.minimum.accumulate(_integers(col, pa.int64()))))


class GroupByRequest:
    def __init__(self, values: Column, aggregations: list[Aggregation]) -> None:
        assert isinstance(values, Column)
        self.values, self.aggregations = values, aggregations


class GroupBy:
    def __init__(self, keys: Table, null_handling: NullPolicy = NullPolicy.EXCLUDE) -> None:
        assert keys.num_rows(), "groups of nothing are left to the caller"
        self.keys, self.null_handling = keys, null_handling

    def aggregate(self, requests: list[GroupByRequest]) -> tuple[Table, list[Table]]:
        """Groups come in any order; NaN is one value, and so is zero."""
        assert self.null_handling is NullPolicy.INCLUDE, "libcudf leaves rows with null keys out otherwise"
        names = [f"k{n}" for n in range(len(self.keys.columns()))]
        keys = []
        for column in self.keys.columns():
            array = column.array
            if pa.types.is_floating(array.type):
                array = pc.if_else(pc.equal(array, 0.0), pa.scalar(0.0, array.type), array)
            keys.append(array)
        results = []
        mixed = None
        for request in requests:
            assert request.values.size() == self.keys.num_rows()
            columns = []
            for name, policy in request.aggregations:
                assert not pa.types.is_floating(request.values.array.type) or name != "sum", (
                    "sums differ in their last bits"
                )
                options = (
                    pc.CountOptions("only_valid" if policy is NullPolicy.EXCLUDE else "all")
                    if name == "count"
                    else None
                )
                grouped = pa.TableGroupBy(
                    pa.table([*keys, request.values.array], [*names, "v"]), names, use_threads=False
                )
                found = grouped.aggregate([("v", name, options)])
                mixed = _RANDOM.permutation(found.num_rows) if mixed is None else mixed
                kind = {"count": pa.int32(), "sum": pa.int64()}.get(name, request.values.array.type)
                columns.append(Column.of(found[f"v_{name}"].combine_chunks().cast(kind).take(pa.array(mixed))))
            results.append(Table(columns))
        return Table([Column.of(found[name].combine_chunks().take(pa.array(mixed))) for name in names]), results


def stable_sorted_order(source_table: Table, column_order: list[Order], null_precedence: list[NullOrder]) -> Column:
    columns = source_table.columns()
    assert set(column_order) == {Order.ASCENDING}
    assert set(null_precedence) == {NullOrder.AFTER}
    assert len(columns) == len(column_order) == len(null_precedence)
    table = pa.table([column.array for column in columns], [f"k{n}" for n in range(len(columns))])
    order = pc.sort_indices(table, sort_keys=[(name, "ascending") for name in table.column_names])
    return Column.of(order.cast(pa.int32()))


def is_valid(input: Column) -> Column:  # noqa: A002 - pylibcudf's name
    return Column.of(input.array.is_valid())


def cast(input: Column, data_type: DataType) -> Column:  # noqa: A002 - pylibcudf's name
    assert data_type.id() in (TypeId.FLOAT32, TypeId.FLOAT64) or pa.types.is_decimal(input.array.type)
    kind = data_type.kind()
    return Column.of(input.array.cast(kind, safe=False))


class CompressionType(enum.IntEnum):
    NONE = 0
    SNAPPY = 2
    LZ4 = 9
    ZSTD = 11


class SourceInfo:
    def __init__(self, sources: list[Any]) -> None:
        (self.source,) = sources
        assert isinstance(self.source, str)
        if not os.path.isfile(self.source):
            raise FileNotFoundError(self.source)


class ParquetReaderOptions:
    """Options, and the builder of them; what libcudf does without being told stands here."""

    def __init__(self, source: SourceInfo) -> None:
        self.source, self.names = source.source, list[str]()
        self.pandas, self.arrow, self.ignore = True, True, True

    @staticmethod
    def builder(source: SourceInfo) -> ParquetReaderOptions:
        return ParquetReaderOptions(source)

    def use_pandas_metadata(self, val: bool) -> ParquetReaderOptions:
        self.pandas = val
        return self

    def use_arrow_schema(self, val: bool) -> ParquetReaderOptions:
        self.arrow = val
        return self

    def ignore_missing_columns(self, val: bool) -> ParquetReaderOptions:
        self.ignore = val
        return self

    def build(self) -> ParquetReaderOptions:
        return self

    def set_column_names(self, col_names: list[str]) -> None:
        self.names = col_names


def _found_as(array: pa.Array, column: Any) -> pa.Array:
    """What libcudf makes of a column of a file (``to_type_id`` in ``reader_impl_helpers.cpp``), and pyarrow of it."""
    kind = array.type
    if pa.types.is_decimal(kind):
        bits = {"INT32": 32, "INT64": 64}.get(column.physical_type) or next(
            x for x in (32, 64, 128) if column.length <= x // 8
        )
        return array.cast(
            getattr(pa, f"decimal{bits}")(min(kind.precision, _KINDS[f"DECIMAL{bits}"].precision), kind.scale)
        )
    if pa.types.is_timestamp(kind) and column.physical_type == "INT96":
        return array.cast(pa.timestamp("ns"))
    other = pa.timestamp(kind.unit) if pa.types.is_timestamp(kind) else kind
    other = pa.int64() if pa.types.is_duration(kind) else other
    other = pa.string() if pa.types.is_binary(kind) else other
    return pa.Array.from_buffers(other, len(array), array.buffers(), array.null_count, array.offset)


def read_parquet(options: ParquetReaderOptions) -> Any:
    """Some columns of a file by pyarrow, in any order, as libcudf has them."""
    told = options.pandas, options.arrow, options.ignore
    assert told == (False, False, False), "what pandas and Arrow have written is not asked for, and all columns are"
    assert options.names, "all of them, otherwise"
    assert not any("." in name for name in options.names), "a way into a struct"
    file = pq.ParquetFile(options.source)
    there = {file.schema.column(n).path: file.schema.column(n) for n in range(len(file.schema))}
    if missing := [name for name in options.names if name not in there]:
        raise RuntimeError(f"CUDF failure: column {missing[0]} is not in the file")
    names = list(_RANDOM.permutation(options.names))
    table = file.read(columns=names).select(names)
    columns = [
        Column.of(_found_as(column.combine_chunks(), there[name]))
        for name, column in zip(names, table.columns, strict=True)
    ]
    return types.SimpleNamespace(columns=columns, column_names=lambda: list(map(str, names)))


class StatisticsFreq(enum.IntEnum):
    STATISTICS_NONE = 0
    STATISTICS_ROWGROUP = 1


class SinkInfo:
    def __init__(self, sinks: list[Any]) -> None:
        (self.sink,) = sinks
        assert isinstance(self.sink, str | io.IOBase)


class ColumnInMetadata:
    """What libcudf writes of a column; where nothing is said, nulls are possible if there are some."""

    def __init__(self, column: Column) -> None:
        self.name, self.nullable, self.binary = "", column.null_count() > 0, False
        self.precision = 38
        self._column = column

    def set_name(self, name: str) -> ColumnInMetadata:
        self.name = name
        return self

    def set_nullability(self, nullable: bool) -> ColumnInMetadata:
        assert nullable or not self._column.null_count(), "Metadata for input column with nulls cannot prescribe that"
        self.nullable = nullable
        return self

    def set_decimal_precision(self, precision: int) -> ColumnInMetadata:
        assert -self._column.type().scale <= precision <= 38
        self.precision = precision
        return self

    def set_output_as_binary(self, binary: bool) -> ColumnInMetadata:
        self.binary = binary
        return self


class TableInputMetadata:
    def __init__(self, table: Table) -> None:
        self.column_metadata = [ColumnInMetadata(column) for column in table.columns()]


_FRAGMENT = 5000
"""``default_max_page_fragment_size``: of so many rows, or fewer behind the last one, are what row groups are made of."""


class ParquetWriterOptions:
    """Options, and the builder of them; what libcudf does without being told stands here."""

    def __init__(self, sink: SinkInfo, table: Table) -> None:
        self.sink, self.table = sink.sink, table
        self.told, self.footer = TableInputMetadata(table), dict[str, str]()
        self.codec, self.statistics = CompressionType.SNAPPY, StatisticsFreq.STATISTICS_ROWGROUP
        self.utc, self.rows = True, 1_000_000

    @staticmethod
    def builder(sink: SinkInfo, table: Table) -> ParquetWriterOptions:
        return ParquetWriterOptions(sink, table)

    def metadata(self, metadata: TableInputMetadata) -> ParquetWriterOptions:
        self.told = metadata
        return self

    def key_value_metadata(self, metadata: list[dict[str, str]]) -> ParquetWriterOptions:
        (self.footer,) = metadata
        return self

    def compression(self, compression: CompressionType) -> ParquetWriterOptions:
        self.codec = compression
        return self

    def stats_level(self, sf: StatisticsFreq) -> ParquetWriterOptions:
        self.statistics = sf
        return self

    def utc_timestamps(self, enabled: bool) -> ParquetWriterOptions:
        self.utc = enabled
        return self

    def row_group_size_rows(self, val: int) -> ParquetWriterOptions:
        self.rows = val
        return self

    def build(self) -> ParquetWriterOptions:
        return self


def _parquet_type(column: Column, told: ColumnInMetadata, *, utc: bool) -> pa.DataType:
    """The type of pyarrow's that is written as libcudf writes a column (``leaf_schema_fn`` in ``writer_impl.cu``)."""
    kind = column.type().kind()
    if pa.types.is_timestamp(kind):
        return pa.timestamp(kind.unit, "UTC" if utc else None)
    if pa.types.is_decimal(kind):
        return pa.decimal128(told.precision, kind.scale)
    assert not pa.types.is_duration(kind), "libcudf makes times of day of them"
    return pa.binary() if told.binary else kind


def write_parquet(options: ParquetWriterOptions) -> memoryview:
    """A file by pyarrow that says what libcudf's would; of floats with a NaN it has no bounds, as PARQUET-1246 says.

    Who wrote it stands beside, as pyarrow names itself.
    """
    fields, arrays = [], []
    for column, its in zip(options.table.columns(), options.told.column_metadata, strict=True):
        kind, array = _parquet_type(column, its, utc=options.utc), column.array
        array = array.cast(pa.string()) if pa.types.is_large_string(array.type) else array
        assert not its.binary or column.type().type_id is TypeId.STRING
        arrays.append(pa.Array.from_buffers(kind, len(array), array.buffers(), -1, array.offset))
        fields.append(pa.field(its.name, kind, its.nullable))
    table = pa.Table.from_arrays(arrays, schema=pa.schema(fields))
    bounded = [
        field.name
        for field in fields
        if not pa.types.is_floating(field.type) or not pc.any(pc.is_nan(table[field.name])).as_py()
    ]
    with pq.ParquetWriter(
        options.sink, table.schema, compression=options.codec.name, store_schema=False,
        write_statistics=bounded if options.statistics else False,
    ) as writer:  # fmt: skip
        writer.write_table(table, row_group_size=max(1, options.rows // _FRAGMENT) * _FRAGMENT)
        writer.add_key_value_metadata({**options.footer, "created_by": "cudf version 26.10.2"})
    return memoryview(b"")


def modules() -> dict[str, types.ModuleType]:
    """The modules by name."""
    space = types.SimpleNamespace
    pylibcudf = types.ModuleType("pylibcudf")
    pylibcudf.__dict__.update(
        Column=Column,
        Table=Table,
        DataType=DataType,
        TypeId=TypeId,
        gpumemoryview=gpumemoryview,
        types=space(NullEquality=NullEquality, NullOrder=NullOrder, NullPolicy=NullPolicy, Order=Order),
        copying=space(gather=gather, slice=slice_, OutOfBoundsPolicy=OutOfBoundsPolicy),
        concatenate=space(concatenate=concatenate),
        binaryop=space(binary_operation=binary_operation, BinaryOperator=BinaryOperator),
        hashing=space(xxhash_64=xxhash_64),
        aggregation=space(
            min=lambda: Aggregation("min"),
            max=lambda: Aggregation("max"),
            sum=lambda: Aggregation("sum"),
            count=lambda null_handling=NullPolicy.INCLUDE: Aggregation("count", null_handling),
        ),
        groupby=space(GroupBy=GroupBy, GroupByRequest=GroupByRequest),
        sorting=space(stable_sorted_order=stable_sorted_order),
        reduce=space(scan=scan, ScanType=ScanType),
        io=space(
            parquet=space(
                ParquetReaderOptions=ParquetReaderOptions,
                ParquetWriterOptions=ParquetWriterOptions,
                read_parquet=read_parquet,
                write_parquet=write_parquet,
            ),
            types=space(
                CompressionType=CompressionType,
                SinkInfo=SinkInfo,
                SourceInfo=SourceInfo,
                StatisticsFreq=StatisticsFreq,
                TableInputMetadata=TableInputMetadata,
            ),
        ),
        join=space(inner_join=inner_join),
        transform=space(bools_to_mask=bools_to_mask),
        unary=space(is_valid=is_valid, cast=cast),
    )
    return {"pylibcudf": pylibcudf}

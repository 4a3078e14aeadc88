"""A stand-in for the few calls of cuDF that its DataFrames are taken and given by, as cuDF 26.10 has them.

As there, a column is one of libcudf's with a type of its own beside it: libcudf knows no zone, no category and no
precision. What is copied to the host is counted.
"""

from __future__ import annotations

import importlib.machinery
import types
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from kernels.emulated_libcudf import Column, DataType, Table


class Decimal128Dtype:
    MAX_PRECISION = 38

    def __init__(self, precision: int, scale: int) -> None:
        self.kind = pa.decimal128(precision, scale)


class DataFrame:
    """A DataFrame; ``copied`` counts the rows times columns that it has given to the host."""

    copied = 0

    def __init__(self, columns: Mapping[str, Column], kinds: Mapping[str, pa.DataType]) -> None:
        self._columns, self._kinds = dict(columns), dict(kinds)
        self.index: Any = None
        for name, column in self._columns.items():
            kind = self._kinds[name]
            stored = kind.index_type if pa.types.is_dictionary(kind) else kind
            stored = pa.timestamp(kind.unit) if pa.types.is_timestamp(kind) else stored
            assert column.type() == DataType.of(stored), f"dtype {kind} does not match the type of the plc_column"

    @classmethod
    def from_arrow(cls, table: pa.Table) -> DataFrame:
        columns = {}
        for name, column in zip(table.column_names, table.columns, strict=True):
            array = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
            if pa.types.is_dictionary(array.type):
                array = array.indices
            if pa.types.is_timestamp(array.type):
                array = array.cast(pa.timestamp(array.type.unit))
            columns[name] = Column.of(array)
        made = cls(columns, dict(zip(table.column_names, table.schema.types, strict=True)))
        made._whole = table
        return made

    @property
    def columns(self) -> list[str]:
        return list(self._columns)

    def __len__(self) -> int:
        return next(iter(self._columns.values())).size() if self._columns else 0

    def head(self, n: int = 5) -> DataFrame:
        return DataFrame({k: Column.of(c.array.slice(0, n)) for k, c in self._columns.items()}, self._kinds)

    def __getitem__(self, names: list[str]) -> DataFrame:
        return DataFrame({name: self._columns[name] for name in names}, self._kinds)

    @property
    def iloc(self) -> _Slices:
        return _Slices(self)

    def to_pylibcudf(self) -> tuple[Table, dict[str, Any]]:
        return Table(list(self._columns.values())), {"index": None, "columns": self.columns}

    @classmethod
    def from_pylibcudf(cls, table: Table, metadata: dict[str, Any]) -> DataFrame:
        assert set(metadata) <= {"columns", "child_names", "index"}
        named = dict(zip(metadata["columns"], table.columns(), strict=True))
        return cls(named, {name: column.type().kind() for name, column in named.items()})

    def astype(self, dtypes: Mapping[str, Decimal128Dtype]) -> DataFrame:
        assert all(dtype.kind.scale == self._kinds[name].scale for name, dtype in dtypes.items())
        kinds = {name: dtype.kind for name, dtype in dtypes.items()}
        return DataFrame({k: c.copy() if k in kinds else c for k, c in self._columns.items()}, {**self._kinds, **kinds})

    def to_arrow(self, *, preserve_index: bool | None = None) -> pa.Table:
        DataFrame.copied += len(self) * len(self._columns)
        arrays = []
        for name, column in self._columns.items():
            kind = self._kinds[name]
            if pa.types.is_dictionary(kind):
                whole = self._whole[name].slice(0, len(self)) if len(self) else pa.chunked_array([], kind)
                arrays.append(whole)
            elif pa.types.is_decimal(kind):
                arrays.append(pa.Array.from_buffers(kind, len(self), column.to_arrow().buffers()[:2]))
            else:
                arrays.append(column.to_arrow().cast(kind))
        table = pa.table(arrays, names=self.columns)
        if self.index is not None and preserve_index is not False:
            table = table.append_column("index", pa.array(self.index))
        return table

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        return self.to_arrow().__arrow_c_stream__(requested_schema)


class _Slices:
    def __init__(self, of: DataFrame) -> None:
        self._of = of

    def __getitem__(self, at: slice) -> DataFrame:
        """A slice: its columns begin within another's memory."""
        start, stop, _ = at.indices(len(self._of))
        columns = {}
        for name, column in self._of._columns.items():
            columns[name] = Column.over(column.array.slice(start, stop - start))
            columns[name]._offset = start or -1
        return DataFrame(columns, self._of._kinds)


def modules() -> dict[str, types.ModuleType]:
    """The modules by name."""
    cudf = types.ModuleType("cudf")
    cudf.__spec__ = importlib.machinery.ModuleSpec("cudf", None)
    cudf.__dict__.update(DataFrame=DataFrame, Decimal128Dtype=Decimal128Dtype)
    return {"cudf": cudf}

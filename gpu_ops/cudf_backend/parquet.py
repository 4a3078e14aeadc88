"""Parquet files read by libcudf into GPU memory, and written from it, which say of themselves what pyarrow's do.

A column lies there as the plainest type with the same bits (`gpu_ops.cudf_backend.storage`); for the writer it gets the
name that Parquet's types follow from, and precision, text or bytes, and nulls are told beside it. Zones are told of a
file as a whole. What Arrow alone knows (the name of a zone, durations) stands in the footer, as in pyarrow's files.
"""

from __future__ import annotations

import base64
from typing import IO, Final

import pyarrow as pa
import pylibcudf as plc

from gpu_ops.cudf_backend.dataframes import called_as, in_types, libcudf_type
from gpu_ops.cudf_backend.frame import DeviceColumn, Frame
from gpu_ops.cudf_backend.storage import decoded, storage_type

_ARROW_SCHEMA: Final = "ARROW:schema"
"""The entry of a footer in which Arrow's readers find the types that a file was made of."""

_COMPRESSIONS: Final = {None: "NONE", "snappy": "SNAPPY", "zstd": "ZSTD", "lz4": "LZ4"}


class CudfFiles:
    """Files of rows in GPU memory; see `gpu_ops.kernels.FrameFiles`."""

    def nbytes(self, frame: Frame) -> int:
        """The bytes of a frame's columns."""
        return sum(column.device_buffer_size() for column in frame.columns.values())

    def read_parquet(self, path: str, schema: pa.Schema) -> Frame:
        """Reads columns of a local Parquet file."""
        builder = plc.io.parquet.ParquetReaderOptions.builder(plc.io.types.SourceInfo([path]))
        options = builder.use_pandas_metadata(False).use_arrow_schema(False).ignore_missing_columns(False).build()
        options.set_column_names(schema.names)
        found = plc.io.parquet.read_parquet(options)
        there = dict(zip(found.column_names(), found.columns, strict=True))
        columns = {field.name: _as_stored(there[field.name], field) for field in schema}
        (rows,) = {column.size() for column in columns.values()}
        return Frame(rows, columns, {field.name: decoded(field.type) for field in schema})

    def write_parquet(
        self,
        frame: Frame,
        schema: pa.Schema,
        rows: range,
        sink: str | IO[bytes],
        *,
        compression: str | None,
        rows_per_group: int,
    ) -> None:
        """Writes rows as a Parquet file."""
        columns = zip(in_types(frame, schema), schema.types, strict=True)
        table = plc.Table([called_as(column, _written_type(kind)) for column, kind in columns])
        if len(rows) < frame.length:
            (table,) = plc.copying.slice(table, [rows.start, rows.stop])
        told = plc.io.types.TableInputMetadata(table)
        for column, field in zip(told.column_metadata, schema, strict=True):
            column.set_name(field.name).set_nullability(field.nullable)
            if pa.types.is_decimal(field.type):
                column.set_decimal_precision(field.type.precision)
            elif pa.types.is_binary(field.type):
                column.set_output_as_binary(True)
        zoned = any(pa.types.is_timestamp(kind) and kind.tz is not None for kind in schema.types)
        arrow_schema = base64.b64encode(schema.serialize().to_pybytes()).decode()
        builder = plc.io.parquet.ParquetWriterOptions.builder(plc.io.types.SinkInfo([sink]), table)
        options = (
            builder.metadata(told)
            .key_value_metadata([{_ARROW_SCHEMA: arrow_schema}])
            .compression(plc.io.types.CompressionType[_COMPRESSIONS[compression]])
            .stats_level(plc.io.types.StatisticsFreq.STATISTICS_ROWGROUP)
            .utc_timestamps(zoned)
            .row_group_size_rows(rows_per_group)
            .build()
        )
        plc.io.parquet.write_parquet(options)


def _as_stored(column: DeviceColumn, field: pa.Field) -> DeviceColumn:
    """A column as the backend has it, of what libcudf has read."""
    kind, stored = field.type, libcudf_type(storage_type(field.type))
    if pa.types.is_decimal(kind):  # of few digits libcudf makes narrower ones
        read = plc.DataType(plc.TypeId.DECIMAL128, -kind.scale)
        narrow = (plc.TypeId.DECIMAL32, plc.TypeId.DECIMAL64)
        column = plc.unary.cast(column, read) if column.type().id() in narrow else column
    else:
        read = _written_type(kind)
    if column.type() != read:
        raise ValueError(f"column {field.name} of a Parquet file is {column.type().id().name} to libcudf, not {kind}")
    return called_as(column, stored)


def _written_type(kind: pa.DataType) -> plc.DataType:
    """The libcudf type of which a column of an Arrow type is written, and as which it is read."""
    if pa.types.is_date32(kind):
        return plc.DataType(plc.TypeId.TIMESTAMP_DAYS)
    if pa.types.is_duration(kind):
        return plc.DataType(plc.TypeId.INT64)
    return plc.DataType(plc.TypeId.STRING) if pa.types.is_binary(kind) else libcudf_type(kind)

"""What a task asks of a state server with a card: to write the changes of a micro-batch into files itself."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa

ATTEMPT: Final = "{attempt}"
"""In the path of a file: stands for a name that is new each time files are written."""

NUMBER: Final = "{i}"
"""Likewise: the file's number."""

_COMPRESSIONS: Final = (None, "snappy", "zstd", "lz4")
_UNITS: Final = ("ms", "us", "ns")


class PlacedFile(NamedTuple):
    """A file that a state server has written.

    Attributes:
        lies: its path below the output folder.
        size: in bytes.
    """

    lies: str
    size: int


@dataclasses.dataclass(frozen=True)
class FilesRequest:
    """Request to write the changes of a micro-batch as Parquet files.

    Attributes:
        folder: the output folder, a path or a URI with its credentials.
        path: of each file below it, with `ATTEMPT` and `NUMBER`.
        schema: of the files, an Arrow schema in base64.
        projection: the filter and projection of the changes, see `Projection.to_dict`.
        file_bytes: the size of a file's rows in memory, about.
        rows_per_group: the rows of a row group, at most.
        compression: the compression as pyarrow calls it.
    """

    folder: str
    path: str
    schema: str
    projection: Mapping[str, Any]
    file_bytes: int
    rows_per_group: int
    compression: str | None

    @property
    def arrow_schema(self) -> pa.Schema:
        """The schema of the files."""
        return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(self.schema)))

    @staticmethod
    def encoded(schema: pa.Schema) -> str:
        """A schema as a request has it."""
        return base64.b64encode(schema.serialize().to_pybytes()).decode()


def why_not_by_card(
    schema: pa.Schema,
    format: str,  # noqa: A002
    partition_by: Sequence[str],
    compression: str | None,
) -> str | None:
    """The reason why libcudf would not write files as pyarrow does; None if it would.

    ``docs/decisions/0016-parquet-by-the-card.md`` has what follows from which of libcudf's sources.

    Args:
        schema: of the rows.
        format: of the files.
        partition_by: the columns that become folders.
        compression: the compression as pyarrow calls it.
    """
    if format != "parquet":
        return f"the card writes Parquet, not {format}"
    if partition_by:
        return f"partition_by has rows cut by {', '.join(partition_by)}"
    if compression not in _COMPRESSIONS:
        return f"the card has no compression {compression}"
    for field in schema:
        if not in_both(field.type):
            return f"column {field.name} is {field.type}"
    zoned = {kind.tz is not None for kind in schema.types if pa.types.is_timestamp(kind)}
    if len(zoned) > 1:
        return "some timestamps have a zone and others none, which the card says of a file as a whole"
    return None


def in_both(kind: pa.DataType) -> bool:
    """True for types whose values libcudf and pyarrow find in each other's Parquet files."""
    t = pa.types
    if t.is_timestamp(kind) or t.is_duration(kind):
        return kind.unit in _UNITS
    simple = t.is_boolean(kind) or t.is_signed_integer(kind) or t.is_float32(kind) or t.is_float64(kind)
    return bool(simple or t.is_decimal128(kind) or t.is_string(kind) or t.is_binary(kind) or t.is_date32(kind))

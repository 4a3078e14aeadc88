"""The change feed of a Delta table as Arrow rows, a commit at a time, by the package ``deltalake``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from gpu_ops.errors import NotBuiltError
from gpu_ops.values import rebuilt

LOG: Final = "_delta_log"
_MAPPED: Final = (
    "the table has column mapping, which the package deltalake does not read: read it with spark.readStream"
)
_CHANGE: Final = "_change_type"


def changes_of(commit: str, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """What a commit changed: its rows, and ``_change_type``, ``_commit_version`` and ``_commit_timestamp``.

    Rows that it takes come before those that it brings. Either are sorted by all columns: deltalake gives them in any
    order, and a micro-batch that is repeated has to have its rows in the same one.

    Args:
        commit: a file of the table's log; Hadoop's spelling of a path will do.
        columns: the ones that are wanted.

    Raises:
        ValueError: it cannot be read, or it lacks a column.
        NotBuiltError: the package is not installed.
    """
    try:
        import deltalake  # noqa: PLC0415 - not installed by default
    except ImportError as error:
        raise NotBuiltError(
            "the change feed of a Delta table needs deltalake: pip install 'gpu-join[delta]'"
        ) from error
    named = re.fullmatch(rf"(.*)/{LOG}/(\d+)\.json", commit, re.DOTALL)
    if named is None:
        raise ValueError(f"it is no commit of a Delta table's log, {LOG}/*.json")
    table, version = re.sub("^file:/*", "/", named.group(1)), int(named.group(2))
    try:
        opened = deltalake.DeltaTable(table)
        mapping = opened.metadata().configuration.get("delta.columnMapping.mode", "none")
        if mapping != "none":
            raise ValueError(f"{_MAPPED} (delta.columnMapping.mode is {mapping!r})")
        feed = opened.load_cdf(starting_version=version, ending_version=version)
        views = pa.table(feed)
    except deltalake.exceptions.DeltaError as error:
        if "column mapping" in str(error).lower():
            raise ValueError(f"{_MAPPED}: {error}") from error
        feedless = "change data" in str(error).lower()
        hint = " (delta.enableChangeDataFeed has to be set, and startingVersion after that)" if feedless else ""
        raise ValueError(f"{error}{hint}") from error
    changes = views.cast(pa.schema([field.with_type(rebuilt(field.type, _plain)) for field in views.schema]))
    missing = [name for name in columns if name not in changes.schema.names]
    if missing:
        raise ValueError(f"{missing[0]!r} is not among its columns {', '.join(changes.schema.names)}")
    taken = pc.is_in(changes[_CHANGE], pa.array(["delete", "update_preimage"]))
    for mask in (taken, pc.invert(taken)):
        part = changes.filter(mask)
        keys = [
            (x.name, "ascending") for x in part.schema if not (pa.types.is_nested(x.type) or pa.types.is_null(x.type))
        ]
        yield from (part.sort_by(keys) if keys else part).select(list(columns)).to_batches()


def _plain(kind: pa.DataType) -> pa.DataType:
    """A type for a view, which deltalake gives and Arrow cannot filter."""
    return {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}.get(kind, kind)

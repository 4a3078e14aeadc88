"""A view in an Iceberg table, by ``pyiceberg``: each micro-batch is a snapshot with new files in place of old ones.

A micro-batch's rows are compared with the files that may hold their keys, by the table's statistics. A file that holds
one is written anew without it (copy on write, as ``pyiceberg`` has no writer of deletes), and new rows are in a file
of their own. All of it is one commit, which also sets a property of the table, the number of the micro-batch by the
query's id; the snapshot's summary has both as well. A micro-batch that the table names already is skipped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as st

from gpu_ops.errors import DatabaseError, DescriptionError, GpuJoinError
from gpu_ops.files.iceberg import cast_columns, catalog_of, check_nulls, in_iceberg, plain_schema
from gpu_ops.spark.sinks.changes import COUNT, NetChanges, View, view
from gpu_ops.spark.sinks.delta import repeated
from gpu_ops.spark.sinks.delta_tables import TYPES, InterferenceError
from gpu_ops.spark_types import arrow_rows, arrow_schema, is_binary_collated, spark_types_within

_BATCH_OF: Final = "gpu_ops.batch."
"""The table's property with the last micro-batch of a query, before the query's id."""

_FEW: Final = 100
"""Keys up to which files are chosen by each of them, and not by the least and the greatest."""

_CAME_BETWEEN: Final = ("CommitFailedException", "CommitStateUnknownException", "ValidationException")
"""Errors of ``pyiceberg`` where another writer may have been faster, or the answer was lost."""

_NEWEST: Final = 2
"""The newest version of Iceberg's format that ``pyiceberg`` writes."""

_SURVIVORS: Final = 64 << 20
"""Bytes of rows of several files that are written to one."""


def iceberg_view(
    table: str, key: str | Sequence[str] | None = None, *, catalog: str | Mapping[str, str] = "default"
) -> View:
    """Makes a function for ``foreachBatch`` that keeps an Iceberg table equal to the folded changelog.

    Each micro-batch is one snapshot, written by ``pyiceberg`` in the driver, whose summary names the query and the
    micro-batch: one that is there already is skipped. Files that hold changed rows are written anew. Where another
    writer was faster, the micro-batch is repeated upon what is there then, up to ten times within half a minute. The
    micro-batch's changed rows, and one file of the table, have to fit into the driver's memory.

    Args:
        table: the table's name in the catalog, such as ``"shop.live"``. It is created if it is not there, and so is
            its namespace; columns of it that the changelog lacks are left alone, its partitions are kept to.
        key: columns that identify a row; by default those that are known of the changelog. Without any the table gets
            a column `gpu_ops_count`: the number of times that a row is there.
        catalog: the properties of the catalog, as ``pyiceberg.catalog.load_catalog`` takes them: ``{"type": "rest",
            "uri": ...}``, ``{"type": "sql", "uri": "sqlite:///...", "warehouse": ...}`` and so on, with its ``name``,
            which catalogs in a database tell tables apart by (``"default"``); or its name alone, in ``pyiceberg``'s own
            configuration.

    Raises:
        NotBuiltError: there is no ``pyiceberg``; the message says what to install.
        DescriptionError: there is no such catalog; (from ``foreachBatch``) the table has other columns, or Iceberg has
            no such types.
        DatabaseError: (from ``foreachBatch``) the catalog or the table does not take the rows.

    Example:
        >>> catalog = {"type": "rest", "uri": "http://localhost:8181"}
        >>> view = gpu_ops.sinks.iceberg_view("shop.live", key="id", catalog=catalog)  # doctest: +SKIP
        >>> changes.writeStream.foreachBatch(view).start()  # doctest: +SKIP
    """
    target = _IcebergTable(table, catalog)
    ready: set[str] = set()

    def write(changes: NetChanges) -> None:
        if changes.query_id not in ready:
            repeated(lambda: target.create(changes.stored()))
        rows = arrow_rows(changes.signed())
        repeated(lambda: target.merge(changes, rows))
        ready.add(changes.query_id)

    return view(write, key)


class _IcebergTable:
    """A view's table in a catalog.

    Args:
        name: as its user calls it.
        catalog: as of `iceberg_view`.

    Raises:
        NotBuiltError: ``pyiceberg`` is not installed.
        DescriptionError: there is no such catalog.
    """

    def __init__(self, name: str, catalog: str | Mapping[str, str]) -> None:
        if "." not in name:
            raise DescriptionError(f"view {name}: an Iceberg table's name begins with its namespace: shop.{name}")
        self._name = name
        with self._errors():
            self._catalog = catalog_of(catalog, "iceberg_view()")

    def create(self, schema: st.StructType) -> None:
        """Creates the table, and its namespace, unless it is there.

        Raises:
            DescriptionError: a column that Iceberg does not hold.
        """
        for field in schema:
            if not _holds(field.dataType):
                problem = f"Iceberg tables do not hold {field.dataType.simpleString()}: CAST it"
                raise DescriptionError(f"view {self._name} cannot be made: column {field.name!r}: {problem}")
        fields = [pa.field(x.name, in_iceberg(x.type)) for x in arrow_schema(schema, self._name)]
        check_nulls(f"view {self._name}", pa.schema(fields))
        with self._errors():
            if not self._catalog.table_exists(self._name):
                self._catalog.create_namespace_if_not_exists(self._name.rpartition(".")[0])
                self._catalog.create_table_if_not_exists(self._name, pa.schema(fields))

    def merge(self, changes: NetChanges, rows: pa.Table) -> None:
        """Merges a micro-batch, unless the table names it already.

        Args:
            changes: what the rows are of.
            rows: those of `NetChanges.signed`.

        Raises:
            DescriptionError: the table is gone, or has other columns.
            InterferenceError: another writer was faster.
            DatabaseError: the table does not take the rows.
        """
        with self._errors():
            table = self._catalog.load_table(self._name)
            mark = f"{_BATCH_OF}{changes.query_id}"
            if int(table.properties.get(mark, "-1")) >= changes.batch_id:
                return
            schema = plain_schema(table.schema().as_arrow())
            names = self._columns(changes, table, schema)
            source = _ChangedRows.of(changes, rows, names, schema)
            replaced, survivors = self._survivors(table, source, schema)
            summary = {"gpu_ops.query": changes.query_id, "gpu_ops.batch": str(changes.batch_id)}
            transaction = table.transaction()
            with transaction.update_snapshot(snapshot_properties=summary).overwrite() as snapshot:
                snapshot._build_manifest_evaluator = _one_at_a_time(snapshot._build_manifest_evaluator)
                for file in replaced:
                    snapshot.delete_data_file(file)
                for part in (*survivors, source.inserted(schema)):
                    for file in self._written(table, part):
                        snapshot.append_data_file(file)
            transaction.set_properties({mark: str(changes.batch_id)})
            # repeated by itself pyiceberg would put these files beside another writer's rows of the same keys
            transaction._snapshot_producers.clear()
            transaction.commit_transaction()

    def _columns(self, changes: NetChanges, table: Any, schema: pa.Schema) -> Mapping[str, str]:
        """The columns of the changelog, as the table spells them.

        Raises:
            DescriptionError: it has other columns.
        """
        if table.format_version > _NEWEST:
            raise DescriptionError(
                f"view {self._name}: its table is of Iceberg's format version {table.format_version}, and pyiceberg "
                f"writes up to {_NEWEST}: create it with 'format-version' = '{_NEWEST}'"
            )
        names = changes.check(self._name, schema.names)
        check_nulls(f"view {self._name}", schema)
        for field in table.schema().fields:
            if field.required and field.name not in names.values():
                raise DescriptionError(
                    f"view {self._name}: its column {field.name!r} is required, and the changelog has no such column"
                )
        stored = arrow_schema(changes.stored(), self._name)
        for field in stored:
            expected, existing = in_iceberg(field.type), schema.field(names[field.name]).type
            if expected != existing:
                raise DescriptionError(
                    f"view {self._name}: its column {names[field.name]!r} is {existing}, the changelog's is "
                    f"{expected}: cast it"
                )
        for name in changes.key or changes.schema.names:
            kind = changes.schema[name].dataType
            if isinstance(kind, st.StructType | st.ArrayType | st.MapType) or not is_binary_collated(kind):
                raise DescriptionError(
                    f"view {self._name}: rows are found by column {name!r}, which is {kind.simpleString()}, and such "
                    "values are not compared here: declare another key="
                )
        return names

    def _survivors(self, table: Any, source: _ChangedRows, schema: pa.Schema) -> tuple[list[Any], list[pa.Table]]:
        """The files that hold a changed row, and what is left of their rows, in tables of a file each."""
        from pyiceberg.expressions import AlwaysTrue  # noqa: PLC0415 - optional
        from pyiceberg.io.pyarrow import ArrowScan  # noqa: PLC0415

        if not len(source.rows):
            return [], []
        reader = ArrowScan(table.metadata, table.io, table.schema(), AlwaysTrue())
        replaced, survivors, waiting = [], [], list[pa.Table]()
        for task in table.scan(row_filter=source.filter()).plan_files():
            rows = reader.to_table([task]).select(schema.names)
            merged = source.merged(cast_columns(rows, schema))
            if merged is None:
                continue
            replaced.append(task.file)
            waiting.append(merged)
            if sum(part.nbytes for part in waiting) >= _SURVIVORS:
                survivors.append(pa.concat_tables(waiting))
                waiting = []
        return replaced, [*survivors, *([pa.concat_tables(waiting)] if waiting else [])]

    def _written(self, table: Any, rows: pa.Table) -> Iterator[Any]:
        """Writes rows, in files by the table's partitions."""
        from pyiceberg.io.pyarrow import _dataframe_to_data_files  # noqa: PLC0415 - optional

        if len(rows):
            yield from _dataframe_to_data_files(table.metadata, cast_columns(rows, table.schema().as_arrow()), table.io)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Errors of ``pyiceberg``, with the view's name."""
        try:
            yield
        except Exception as error:
            of_library = type(error).__module__.split(".")[0] in ("pyiceberg", "sqlalchemy", "requests")
            if not of_library and not isinstance(error, ValueError | NotImplementedError | OSError | RuntimeError):
                raise
            if isinstance(error, GpuJoinError):
                raise
            kind, said = type(error).__name__, " ".join(str(error).split())
            if kind in _CAME_BETWEEN:
                raise InterferenceError(f"view {self._name}: {said}") from error
            if kind == "NoSuchTableError":
                raise DescriptionError(f"view {self._name}: its table is gone: {said}") from error
            raise DatabaseError(f"view {self._name}: {said} ({kind})") from error


@dataclasses.dataclass
class _ChangedRows:
    """The changed rows of a micro-batch, as the table's columns are called and typed.

    Attributes:
        rows: the columns of the changelog, and `COUNT` last.
        key: the columns by which rows are found.
        keyed: whether the view has a key; else the table has `COUNT`.
        seen: mask of the rows that a row of the table has been found for.
    """

    rows: pa.Table
    key: list[str]
    keyed: bool
    seen: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, changes: NetChanges, rows: pa.Table, names: Mapping[str, str], schema: pa.Schema) -> _ChangedRows:
        """The rows of `NetChanges.signed` in a table's types."""
        named = [names[x] for x in changes.schema.names]
        kinds = [*(schema.field(name) for name in named), pa.field(COUNT, pa.int64())]
        table = cast_columns(rows.rename_columns([*named, COUNT]), pa.schema(kinds))
        key = [names[x] for x in changes.key or changes.schema.names]
        return cls(table, key, changes.key is not None, np.zeros(len(table), bool))

    @property
    def _count(self) -> npt.NDArray[np.int64]:
        counts: npt.NDArray[np.int64] = self.rows[COUNT].to_numpy()
        return counts

    def filter(self) -> Any:
        """An expression that is true for all rows of the table whose keys are among these, and for others perhaps."""
        from pyiceberg import expressions as e  # noqa: PLC0415 - optional

        chosen: Any = e.AlwaysTrue()
        for name in self.key:
            column = self.rows[name]
            if "." in name or not (pa.types.is_integer(column.type) or pa.types.is_string(column.type)):
                continue
            values = pc.unique(column.drop_null()).to_pylist()
            ends = (e.GreaterThanOrEqual(name, min(values)), e.LessThanOrEqual(name, max(values))) if values else ()
            these = e.AlwaysFalse() if not values else e.In(name, values) if len(values) <= _FEW else e.And(*ends)
            chosen = e.And(chosen, e.Or(these, e.IsNull(name)) if column.null_count else these)
        return chosen

    def merged(self, rows: pa.Table) -> pa.Table | None:
        """The rows of a file after the micro-batch; None where none has changed."""
        numbers = _numbers([pa.chunked_array([*rows[x].chunks, *self.rows[x].chunks], rows[x].type) for x in self.key])
        of_rows, of_changes = numbers[: len(rows)], numbers[len(rows) :]
        change_of = np.full(int(numbers.max(initial=-1)) + 1, -1)
        change_of[of_changes] = np.arange(len(of_changes))
        change = change_of[of_rows]
        at = np.flatnonzero(change >= 0)
        if not at.size:
            return None
        change = change[at]
        self.seen[change] = True
        if self.keyed:
            stays = self._count[change] > 0
            columns = {x: self.rows[x] for x in self.rows.column_names if x != COUNT}
            new = {name: column.take(pa.array(change[stays])) for name, column in columns.items()}
        else:
            total = rows[COUNT].to_numpy()[at] + self._count[change]
            stays = total != 0
            new = {COUNT: pa.chunked_array([pa.array(total[stays])])}
        keep = np.ones(len(rows), bool)
        keep[at] = False
        changed = rows.take(pa.array(at[stays]))
        for name, column in new.items():
            changed = changed.set_column(changed.schema.get_field_index(name), changed.schema.field(name), column)
        return pa.concat_tables([rows.filter(pa.array(keep)), changed])

    def inserted(self, schema: pa.Schema) -> pa.Table:
        """The rows that the table does not have yet; columns that the changelog lacks are null."""
        new = ~self.seen & (self._count > 0) if self.keyed else ~self.seen
        rows = self.rows.filter(pa.array(new))
        columns = [rows[x.name] if x.name in rows.column_names else pa.nulls(len(rows), x.type) for x in schema]
        return pa.Table.from_arrays(columns, schema=schema)


def _one_at_a_time(build: Callable[[int], Callable[[Any], bool]]) -> Callable[[int], Callable[[Any], bool]]:
    """Makes what chooses manifests by their partitions work for one thread after another.

    ``pyiceberg`` shares it among threads, and it keeps the manifest it looks at: at times it missed files that are to
    go, and the commit was refused.
    """

    def built(spec_id: int) -> Callable[[Any], bool]:
        chosen, lock = build(spec_id), threading.Lock()

        def alone(manifest: Any) -> bool:
            with lock:
                return chosen(manifest)

        return alone

    return built


def _numbers(columns: Sequence[pa.ChunkedArray]) -> npt.NDArray[np.int64]:
    """Numbers each combination of values: nulls are equal, NaNs are, and so are 0.0 and -0.0."""
    numbers = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        values = pc.add(column, pa.scalar(0, column.type)) if pa.types.is_floating(column.type) else column
        encoded = values.combine_chunks().dictionary_encode(null_encoding="encode")
        codes = encoded.indices.to_numpy().astype(np.int64)
        numbers = np.unique(numbers * (len(encoded.dictionary) + 1) + codes, return_inverse=True)[1]
    return numbers


def _holds(kind: st.DataType) -> bool:
    """True if an Iceberg table holds a type."""
    known = (*TYPES, st.StructType, st.ArrayType, st.MapType)
    return all(isinstance(part, known) and is_binary_collated(part) for part in spark_types_within(kind))

"""A view in a database, by Spark's JDBC: rows into a staging table, then one transaction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql import functions as f
from pyspark.sql import types as st

from gpu_ops.spark.datatypes import named_column
from gpu_ops.spark.sinks.changes import COUNT, Changes, View, view


def jdbc_view(
    url: str, table: str, key: str | Sequence[str] | None = None, *, options: Mapping[str, str] | None = None
) -> View:
    """A function for ``foreachBatch`` that keeps a database's table equal to the folded changelog.

    Executors write the micro-batch into the table ``<table>_changes``; one transaction then brings it into the view
    and its number into ``<table>_batches``, so that a repeated micro-batch is skipped. All three are created if they
    are not there, the view with an index over its key. SQL is that which all databases have: changed rows are deleted
    and inserted.

    Args:
        url: Spark's JDBC address.
        table: the table's name, as SQL spells it.
        key: columns that identify a row; by default those that are known of the changelog. Without any the table gets
            a column `gpu_ops_count`, how often a row is there, and each micro-batch reads the whole view.
        options: of Spark's JDBC writer: ``user``, ``password``, ``driver``, ``createTableColumnTypes``...
    """
    given = dict(options or {})
    ready: set[str] = set()

    def write(changes: Changes) -> None:
        database = _Database(changes.rows.sparkSession, url, given)
        try:
            if changes.query_id not in ready:
                database.create(table, changes)
                ready.add(changes.query_id)
            writer = changes.signed().write.format("jdbc").options(**given).option("truncate", "true")
            writer.option("url", url).option("dbtable", _beside(table, "_changes")).mode("overwrite").save()
            database.merge(table, changes)
        finally:
            database.close()

    return view(write, key)


def postgres_view(
    url: str, table: str, key: str | Sequence[str] | None = None, *, options: Mapping[str, str] | None = None
) -> View:
    """`jdbc_view` for Postgres, with its driver (``org.postgresql:postgresql``).

    Args:
        url: ``postgresql://host:port/database``, with or without ``jdbc:``.
        table: see `jdbc_view`.
        key: see `jdbc_view`.
        options: see `jdbc_view`.
    """
    return jdbc_view(
        "jdbc:" + url.removeprefix("jdbc:"), table, key, options={"driver": "org.postgresql.Driver", **(options or {})}
    )


def _beside(table: str, suffix: str) -> str:
    """The name of a table beside another, quoted as that one is."""
    end = table[-1] if table[-1] in '"`]' else ""
    return table.removesuffix(end) + suffix + end


class _Database:
    """A connection of the driver's, by Spark's own connection factory."""

    def __init__(self, spark: SparkSession, url: str, options: Mapping[str, str]) -> None:
        self._spark, self._url, self._options = spark, url, options
        jvm: Any = spark.sparkContext._jvm
        jdbc = jvm.org.apache.spark.sql.execution.datasources.jdbc
        self._tools: Any = jdbc.JdbcUtils
        self._of: Callable[[str], Any] = lambda table: jdbc.JdbcOptionsInWrite(
            url, table, jvm.PythonUtils.toScalaMap(dict(options))
        )
        self._dialect: Any = jvm.org.apache.spark.sql.jdbc.JdbcDialects.get(url)
        self.connection: Any = self._dialect.createConnectionFactory(self._of("none")).apply(-1)

    def close(self) -> None:
        """Ends the connection; what was not committed is undone."""
        if not self.connection.getAutoCommit():
            self.connection.rollback()  # to close is to commit for some databases
        self.connection.close()

    def _names(self, columns: Sequence[str]) -> list[str]:
        return [self._dialect.quoteIdentifier(x) for x in columns]

    def create(self, table: str, changes: Changes) -> None:
        """Creates the view and the table of numbers, where they are not there.

        Raises:
            DescriptionError: the view is there with other columns.
        """
        batches = _beside(table, "_batches")
        if not self._tools.tableExists(self.connection, self._of(batches)):
            schema = st.StructType(
                [st.StructField("query_id", st.StringType()), st.StructField("batch_id", st.LongType())]
            )
            self._new(batches, schema, createTableColumnTypes="query_id VARCHAR(64)")
        if self._tools.tableExists(self.connection, self._of(table)):
            found = self._spark.read.format("jdbc").options(**self._options).options(url=self._url, dbtable=table)
            changes.check(table, found.load().columns)
            return
        self._new(table, changes.stored())
        if changes.key is not None:
            index = _beside(table.rpartition(".")[2], "_key")
            self.execute(f"CREATE UNIQUE INDEX {index} ON {table} ({', '.join(self._names(changes.key))})")

    def _new(self, table: str, schema: st.StructType, **options: str) -> None:
        writer = self._spark.createDataFrame([], schema).write.format("jdbc").options(**{**self._options, **options})
        writer.options(url=self._url, dbtable=table).save()

    def execute(self, *statements: str) -> None:
        """Runs statements on the connection."""
        statement = self.connection.createStatement()
        for sql in statements:
            statement.execute(sql)
        statement.close()

    def merge(self, table: str, changes: Changes) -> None:
        """Brings the staged rows into the view, unless a transaction has done so."""
        batches, stage = _beside(table, "_batches"), _beside(table, "_changes")
        query, batch = self._names(["query_id", "batch_id"])
        own = f"{query} = '{changes.query_id}'"
        self.connection.setAutoCommit(False)
        found = self.connection.createStatement().executeQuery(
            f"SELECT COUNT(*) FROM {batches} WHERE {own} AND {batch} >= {changes.batch_id}"
        )
        found.next()
        if found.getInt(1):
            return
        names, count = ", ".join(self._names(changes.schema.names)), self._names([COUNT])[0]
        match = f"EXISTS (SELECT 1 FROM {stage} s WHERE {self._match(table, changes)})"
        if changes.key is None:
            before = [f"INSERT INTO {stage} ({names}, {count}) SELECT {names}, {count} FROM {table} WHERE {match}"]
            total = f"SELECT {names}, SUM({count}) FROM {stage} GROUP BY {names} HAVING SUM({count}) <> 0"
            after = f"INSERT INTO {table} ({names}, {count}) {total}"
        else:
            before = []
            after = f"INSERT INTO {table} ({names}) SELECT {names} FROM {stage} WHERE {count} > 0"
        self.execute(
            *before,
            f"DELETE FROM {table} WHERE {match}",
            after,
            f"DELETE FROM {batches} WHERE {own}",
            f"INSERT INTO {batches} ({query}, {batch}) VALUES ('{changes.query_id}', {changes.batch_id})",
        )
        self.connection.commit()

    def _match(self, table: str, changes: Changes) -> str:
        """That a row of the view is one of ``s``. Nulls equal nulls: columns without any go by ``=``, for an index."""
        columns = changes.key or changes.schema.names
        signed = changes.signed()
        nulls = signed.agg(*(f.max(named_column(x).isNull()).alias(f"n{n}") for n, x in enumerate(columns))).first()
        terms = []
        for name, null in zip(self._names(columns), nulls, strict=True):
            equal = f"{table}.{name} = s.{name}"
            terms.append(f"({equal} OR ({table}.{name} IS NULL AND s.{name} IS NULL))" if null else equal)
        return " AND ".join(terms)

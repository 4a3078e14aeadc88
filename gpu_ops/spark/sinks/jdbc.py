"""A view in a database, by Spark's JDBC: rows into a staging table, then one transaction."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from py4j.protocol import Py4JJavaError
from pyspark.sql import functions as f
from pyspark.sql import types as st

from gpu_ops.errors import BadInputError, DescriptionError
from gpu_ops.spark.datatypes import named_column
from gpu_ops.spark.sinks.changes import COUNT, Changes, View, view

_STAGED: Final = "gpu_ops_staged"
"""How often a staged row comes or goes. A table that has this column was made by a view: no other is emptied."""

_BATCHES: Final = ("query_id", "batch_id")

_QUOTES: Final = {'"': '"', "`": "`", "[": "]"}
_PART: Final = r"""(?:"(?:[^"]|"")+"|`(?:[^`]|``)+`|\[(?:[^\]]|\]\])+\]|[^."`\[\]\s]+)"""
_NAME: Final = re.compile(rf"\s*((?:{_PART}\.)*)({_PART})\s*")


def jdbc_view(
    url: str, table: str, key: str | Sequence[str] | None = None, *, options: Mapping[str, str] | None = None
) -> View:
    """A function for ``foreachBatch`` that keeps a database's table equal to the folded changelog.

    Executors write the micro-batch into the table ``<table>_staged``; one transaction then brings it into the view
    and its number into ``<table>_batches``, so that a repeated micro-batch is skipped. All three are created if they
    are not there, the view with an index over its key; names longer than the database keeps are shortened and end in a
    hash. SQL is that which all databases have: changed rows are deleted and inserted. In Postgres values are cast to
    the types of a table that is there.

    Args:
        url: Spark's JDBC address.
        table: the table's name, as SQL spells it.
        key: columns that identify a row; by default those that are known of the changelog. Without any the table gets
            a column `gpu_ops_count`, how often a row is there, and each micro-batch reads the whole view.
        options: of Spark's JDBC writer: ``user``, ``password``, ``driver``, ``createTableColumnTypes``...

    Raises:
        DescriptionError: (from ``foreachBatch``, before anything is made) a table beside it was not made by a view, the
            view has other columns, or there is one that the database does not take.
        BadInputError: (likewise, before anything is written) a value that it does not take, or a key twice.
    """
    given = dict(options or {})
    ready: set[str] = set()

    def write(changes: Changes) -> None:
        database = _Database(changes, url, table, given)
        try:
            database.prepare(first=changes.query_id not in ready)
            ready.add(changes.query_id)
            nulls = database.nulls()
            staged = changes.signed().withColumnRenamed(COUNT, _STAGED).write.format("jdbc").options(**given)
            staged.options(url=url, dbtable=database.stage).mode("append").save()
            database.merge(nulls)
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


def _beside(table: str, suffix: str, limit: int, *, cut: bool = False) -> tuple[str, str]:
    """The name of what belongs to a table, quoted as that is: with the schema, and without.

    Of names longer than ``limit`` bytes there is the beginning, and a hash: at the end, so that it is no other table's
    name with a suffix. With ``cut`` there is only the beginning, as Postgres cuts names.
    """
    schema, name = _parts(table)
    quotes, plain = _QUOTES.get(name[0]), _plain(name)
    whole = plain + suffix
    if len(whole.encode()) > limit:
        own = plain.encode() if quotes else plain.encode().lower()
        mark = "" if cut else f"{suffix}_{hashlib.sha256(own).hexdigest()[:12]}"
        whole = whole.encode()[: limit - len(mark)].decode(errors="ignore") + mark
    if quotes is not None:
        whole = name[0] + whole.replace(quotes, quotes * 2) + quotes
    return schema + whole, whole


def _parts(table: str) -> tuple[str, str]:
    """A name as SQL spells it: that of the schema, with its dot, and the table's own."""
    found = _NAME.fullmatch(table)
    if found is None:
        raise DescriptionError(f"{table!r} is no name of a table; names with other characters are quoted")
    return found[1], found[2]


def _plain(name: str) -> str:
    """A name without its quotes."""
    quotes = _QUOTES.get(name[0])
    return name if quotes is None else name[1:-1].replace(quotes * 2, quotes)


class _Database:
    """The view of a micro-batch, on a connection of the driver's, by Spark's own connection factory.

    Args:
        changes: the micro-batch.
        url: of the database.
        table: the view.
        options: see `jdbc_view`.
    """

    def __init__(self, changes: Changes, url: str, table: str, options: Mapping[str, str]) -> None:
        self._changes, self._table, self._options = changes, table, options
        self._spark = changes.rows.sparkSession
        self._postgres = url.startswith("jdbc:postgresql:")
        jvm: Any = self._spark.sparkContext._jvm
        jdbc = jvm.org.apache.spark.sql.execution.datasources.jdbc
        self._tools: Any = jdbc.JdbcUtils
        self._of: Callable[[str, Mapping[str, str]], Any] = lambda name, more: jdbc.JdbcOptionsInWrite(
            url, name, jvm.PythonUtils.toScalaMap({**options, **more})
        )
        self._dialect: Any = jvm.org.apache.spark.sql.jdbc.JdbcDialects.get(url)
        self.connection: Any = self._dialect.createConnectionFactory(self._of("none", {})).apply(-1)
        # of those that say nothing the names stay as they are
        self._limit = self.connection.getMetaData().getMaxTableNameLength() or 2**31
        self.stage, _ = _beside(table, "_staged", self._limit)
        self._batches = self._batches_of()
        self._spelled: dict[str, str] = {}
        self._casts: dict[str, str] = {}

    def close(self) -> None:
        """Ends the connection; what was not committed is undone."""
        if not self.connection.getAutoCommit():
            self.connection.rollback()  # to close is to commit for some databases
        self.connection.close()

    def _names(self, columns: Iterable[str]) -> list[str]:
        return [self._dialect.quoteIdentifier(x) for x in columns]

    def _batches_of(self) -> str:
        """The table of numbers; one whose name an older version left to the database to cut is kept."""
        before, _ = _beside(self._table, "_batches", self._limit, cut=True)
        is_own = before != self._table and set(self._columns(before) or ()) == set(_BATCHES)
        return before if is_own else _beside(self._table, "_batches", self._limit)[0]

    def _columns(self, table: str) -> list[str] | None:
        """The columns of a table, None if it is not there."""
        if not self._tools.tableExists(self.connection, self._of(table, {})):
            return None
        return self._read(f"SELECT * FROM {table} WHERE 1 = 0")[0]

    def prepare(self, *, first: bool) -> None:
        """Makes what is not there, once everything has been looked at, and empties the staging table.

        Args:
            first: of this query: the staging table is made anew, and the statements are tried without rows.

        Raises:
            DescriptionError: a table that is there is not the view's, or has other columns; or there is a column that
                the database does not take.
        """
        if first:
            self._check()
        batches, stage, there = map(self._columns, (self._batches, self.stage, self._table))
        for name, found, own in ((self._batches, batches, _BATCHES), (self.stage, stage, (_STAGED,))):
            if found is not None and not set(own) <= {x.lower() for x in found}:
                raise DescriptionError(
                    f"view {self._table} keeps a table {name} beside it, and one of that name is there that no view "
                    f"has made: it has {', '.join(found)}. Rename one of them"
                )
        stored = self._changes.stored()
        self._spelled = self._changes.check(self._table, stored.names if there is None else there)
        if there is not None:
            self._check_equal()
        self.connection.setAutoCommit(False)
        if batches is None:
            types = {"createTableColumnTypes": "query_id VARCHAR(64)"}
            self._new(self._batches, st.StructType.fromDDL("query_id STRING, batch_id BIGINT"), types)
        if first or stage is None:
            if stage is not None:
                self.execute(f"DROP TABLE {self.stage}")
            self._new(self.stage, st.StructType([*self._changes.schema, st.StructField(_STAGED, st.LongType())]))
        else:
            self.execute(self._dialect.getTruncateQuery(self.stage))
        if there is None:
            self._new(self._table, stored)
            if self._changes.key is not None:
                index = _beside(self._table, "_key", self._limit)[1]
                key = ", ".join(self._names(self._changes.key))
                self.execute(f"CREATE UNIQUE INDEX {index} ON {self._table} ({key})")
        if self._postgres:
            staged, kept = self._types(self.stage), self._types(self._table)
            self._casts = {
                name: kept[x][1] if staged[name][0].startswith(("text", "character")) else ""
                for name, x in self._spelled.items()
                if name in staged and staged[name][0] != kept[x][0]
            }
        if first:
            self._try()
        self.connection.commit()

    def _try(self) -> None:
        """Brings no row into the view, so that what cannot be is said before there are any."""
        try:
            self._bring([True] * len(self._changes.schema))
        except (Py4JJavaError, BadInputError) as error:
            reason = str(error) if isinstance(error, BadInputError) else _message(error)
            raise DescriptionError(f"view {self._table} cannot be kept: {reason}") from error

    def _check(self) -> None:
        """That the database takes the names and columns."""
        columns = self.connection.getMetaData().getMaxColumnNameLength() or 2**31
        table = _plain(_parts(self._table)[1])
        names = [("view", table, self._limit), *(("column", x.name, columns) for x in self._changes.schema)]
        for what, name, limit in names:
            if len(name.encode()) > limit:
                size = len(name.encode())
                raise DescriptionError(f"{what} {name!r} has a name of {size} bytes; the database keeps {limit}")
        for field in self._changes.schema:
            if _STAGED in (field.name.lower(), table.lower()):
                raise DescriptionError(f"{_STAGED!r} is a view's own name: rename that table or column")
            try:
                self._tools.getJdbcType(self._java(field.dataType), self._dialect)
            except Exception as error:  # pyspark's and py4j's, by version
                raise DescriptionError(
                    f"column {field.name!r} is {field.dataType.simpleString()}, which Spark has no type for in view "
                    f"{self._table}: make columns of its parts, or text of it, as to_json() does"
                ) from error

    def _check_equal(self) -> None:
        """That the database compares the values by which rows are found."""
        for name in self._names(self._spelled[x] for x in self._changes.key or self._changes.schema.names):
            try:
                self.execute(f"SELECT {name} FROM {self._table} WHERE 1 = 0 AND {name} = {name} GROUP BY {name}")
            except Py4JJavaError as error:
                raise DescriptionError(
                    f"rows of view {self._table} are found by column {name}, which cannot be: {_message(error)}"
                ) from error

    def _java(self, kind: st.DataType) -> Any:
        return self._spark._jsparkSession.parseDataType(kind.json())

    def _new(self, table: str, schema: st.StructType, more: Mapping[str, str] | None = None) -> None:
        options = self._of(table, more or {})
        self._tools.createTable(self.connection, table, self._java(schema), True, options)

    def _types(self, table: str) -> dict[str, tuple[str, str]]:
        """Postgres's types of a table's columns, with and without their lengths."""
        name = table.replace("'", "''")
        _, found = self._read(
            "SELECT attname, format_type(atttypid, atttypmod), format_type(atttypid, -1) FROM pg_attribute "
            f"WHERE attrelid = '{name}'::regclass AND attnum > 0 AND NOT attisdropped"
        )
        return {column: (whole, bare) for column, whole, bare in found}

    def _read(self, sql: str) -> tuple[list[str], list[list[str]]]:
        """The columns of a query and its rows, as text."""
        statement = self.connection.createStatement()
        found = statement.executeQuery(sql)
        of = found.getMetaData()
        numbers = range(1, of.getColumnCount() + 1)
        names, rows = [str(of.getColumnName(n)) for n in numbers], []
        while found.next():
            rows.append([str(found.getString(n)) for n in numbers])
        statement.close()
        return names, rows

    def execute(self, *statements: str) -> None:
        """Runs statements on the connection."""
        statement = self.connection.createStatement()
        for sql in statements:
            statement.execute(sql)
        statement.close()

    def nulls(self) -> list[bool]:
        """For each column by which rows are found, whether it has nulls.

        Raises:
            BadInputError: Postgres has no text with the character NUL.
        """
        columns = self._changes.key or self._changes.schema.names
        nulls = [f.max(named_column(x).isNull()).alias(f"n{n}") for n, x in enumerate(columns)]
        texts = [x.name for x in self._changes.schema if self._postgres and "string" in x.dataType.simpleString()]
        shown = [named_column(x).cast("string") for x in texts]
        ends = [f.max(f.when(x.contains("\0"), x)).alias(f"t{n}") for n, x in enumerate(shown)]
        found = self._changes.signed().agg(*nulls, *ends).first()
        for name, sample in zip(texts, found[len(columns) :], strict=True):
            if sample is not None:
                raise BadInputError(
                    self._changes.changelog, name, f"view {self._table} keeps no text with the character NUL", sample
                )
        return [bool(x) for x in found[: len(columns)]]

    def merge(self, nulls: Sequence[bool]) -> None:
        """Brings the staged rows into the view, unless a transaction has done so."""
        query, batch = self._names(_BATCHES)
        own = f"{query} = '{self._changes.query_id}'"
        done = f"SELECT COUNT(*) FROM {self._batches} WHERE {own} AND {batch} >= {self._changes.batch_id}"
        if self._read(done)[1] != [["0"]]:
            return
        self._bring(nulls)
        number = f"VALUES ('{self._changes.query_id}', {self._changes.batch_id})"
        self.execute(
            f"DELETE FROM {self._batches} WHERE {own}", f"INSERT INTO {self._batches} ({query}, {batch}) {number}"
        )
        self.connection.commit()

    def _bring(self, nulls: Sequence[bool]) -> None:
        changes, table = self._changes, self._table
        own = dict(zip(changes.schema.names, self._names(changes.schema.names), strict=True))
        kept = {x: self._names([self._spelled[x]])[0] for x in own}
        stage, staged, key = self.stage, self._names([_STAGED])[0], changes.key or changes.schema.names
        if self._casts:
            stage, own = self._cast(own, kept, staged), kept
        terms = []
        for name, null in zip(key, nulls, strict=False):
            equal = f"{table}.{kept[name]} = {_STAGED}.{own[name]}"
            # nulls equal nulls; columns without any go by =, for an index
            terms.append(
                f"({equal} OR ({table}.{kept[name]} IS NULL AND {_STAGED}.{own[name]} IS NULL))" if null else equal
            )
        match = " AND ".join(terms)
        if self._casts.keys() & {*key} and changes.key is not None:
            self._check_keys(stage, staged, [own[x] for x in key], match)
        names, there = ", ".join(own.values()), ", ".join(kept.values())
        match = f"EXISTS (SELECT 1 FROM {stage} {_STAGED} WHERE {match})"
        if changes.key is None:
            count = self._names([self._spelled[COUNT]])[0]
            before = [f"INSERT INTO {stage} ({names}, {staged}) SELECT {there}, {count} FROM {table} WHERE {match}"]
            total = f"SELECT {names}, SUM({staged}) FROM {stage} GROUP BY {names} HAVING SUM({staged}) <> 0"
            after = f"INSERT INTO {table} ({there}, {count}) {total}"
        else:
            before = []
            after = f"INSERT INTO {table} ({there}) SELECT {names} FROM {stage} WHERE {staged} > 0"
        self.execute(*before, f"DELETE FROM {table} WHERE {match}", after)

    def _cast(self, own: Mapping[str, str], kept: Mapping[str, str], staged: str) -> str:
        """The staged rows in the types of an existing table of Postgres: a table of this transaction.

        Raises:
            BadInputError: a value that its column cannot have.
        """
        temporary = "pg_temp.gpu_ops_staged"
        made = f"CREATE TEMPORARY TABLE gpu_ops_staged ON COMMIT DROP AS SELECT {', '.join(kept.values())}, "
        made += f"CAST(0 AS BIGINT) AS {staged} FROM {self._table} WHERE 1 = 0"
        values = {x: f"CAST({own[x]} AS {self._casts[x]})" if self._casts.get(x) else own[x] for x in own}
        rows = f"SELECT {', '.join(values.values())}, {staged} FROM {self.stage}"
        self.execute("SAVEPOINT gpu_ops")
        try:
            self.execute(made, f"INSERT INTO {temporary} {rows}")
        except Py4JJavaError:
            for name in self._casts:
                self.execute("ROLLBACK TO SAVEPOINT gpu_ops")
                one = f"INSERT INTO {temporary} ({kept[name]}) SELECT {values[name]} FROM {self.stage}"
                try:
                    self.execute(made, one)
                except Py4JJavaError as error:
                    raise BadInputError(
                        self._changes.changelog, name, f"view {self._table}: {_message(error)}"
                    ) from error
            raise
        return temporary

    def _check_keys(self, stage: str, staged: str, key: Sequence[str], match: str) -> None:
        """That keys that differ do so in the table's types as well: of ``ab`` and ``AB`` there is one UUID."""
        keys = ", ".join(f"{_STAGED}.{x}" for x in key)
        there = f"EXISTS (SELECT 1 FROM {self._table} WHERE {match})"
        twice = f"SUM(CASE WHEN {staged} > 0 THEN 1 ELSE 0 END) > 1"
        new = f"MIN({staged}) = 1 AND MAX({staged}) = 1"
        shown = " || ', ' || ".join(f"COALESCE(CAST({_STAGED}.{x} AS TEXT), 'NULL')" for x in key)
        _, samples = self._read(
            f"SELECT {shown} FROM {stage} {_STAGED} GROUP BY {keys} HAVING {twice} OR ({new} AND {there})"
        )
        if samples:
            problem = f"two keys of the changelog are one in the types of view {self._table}"
            raise BadInputError(self._changes.changelog, ", ".join(self._changes.key or ()), problem, samples[0][0])


def _message(error: Py4JJavaError) -> str:
    return str(error.java_exception.getMessage())

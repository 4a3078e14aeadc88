"""A view in a database, by Spark's JDBC: rows into a staging table, then one transaction."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from pyspark.sql import functions as f
from pyspark.sql import types as st

from gpu_ops.errors import BadInputError, DatabaseError, DescriptionError
from gpu_ops.spark.database import Connection, with_driver
from gpu_ops.spark.failures import message_in
from gpu_ops.spark.sinks import postgres
from gpu_ops.spark.sinks.changes import COUNT, NetChanges, View, view
from gpu_ops.spark.sinks.merging import STAGED, Merge, bring
from gpu_ops.spark.tasks.marks import Marks
from gpu_ops.spark_types import named_column

_ATTEMPT: Final = "gpu_ops_attempt"
"""The column of the task attempt that staged a row; the column `STAGED` says how many times the row comes or goes. Only
a table with that column was made by a view, and is ever emptied."""

_IN_LIST: Final = 900
"""Number of values in an IN list that every database takes."""

_LOCK_WAIT: Final = 60
"""Seconds to wait for a lock that others hold on an earlier run's staging table."""

_BATCHES: Final = ("query_id", "batch_id")

_QUOTES: Final = {'"': '"', "`": "`", "[": "]"}
_PART: Final = r"""(?:"(?:[^"]|"")+"|`(?:[^`]|``)+`|\[(?:[^\]]|\]\])+\]|[^."`\[\]\s]+)"""
_NAME: Final = re.compile(rf"\s*((?:{_PART}\.)*)({_PART})\s*")


def jdbc_view(
    url: str, table: str, key: str | Sequence[str] | None = None, *, options: Mapping[str, str] | None = None
) -> View:
    """Makes a function for ``foreachBatch`` that keeps a database's table equal to the folded changelog.

    Executors write the micro-batch into the table ``<table>_staged``, each row with the attempt of the task that wrote
    it, as Spark may run a task twice; one transaction then brings the rows of the attempts that Spark took into the
    view, and the micro-batch's number into ``<table>_batches``, so that a repeated one is skipped. It ends without a
    change where the database does not change as many rows as there are. All three tables are created if they are not
    there, the view with an index over its key; names longer than the database keeps are shortened and end in a hash.
    In Postgres values are cast to the types of a table that is there.

    Args:
        url: Spark's JDBC address.
        table: the table's name, as SQL spells it.
        key: columns that identify a row; by default those that are known of the changelog. Without any the table gets
            a column `gpu_ops_count`, how often a row is there, and each micro-batch reads the whole view.
        options: options of Spark's JDBC writer: ``user``, ``password``, ``driver``, ``createTableColumnTypes``...

    Raises:
        DescriptionError: (from ``foreachBatch``, before anything is made) a table with the name of the staging table
            was not made by a view, the view has other columns, or the database does not take a column's type.
        BadInputError: (from ``foreachBatch``; nothing of the micro-batch is written) the database does not take a
            value, or a key occurs twice.
        DatabaseError: (from ``foreachBatch``; nothing is written) the database cannot be reached, refuses a statement,
            or has other rows than it should.

    Example:
        >>> view = gpu_ops.sinks.jdbc_view("jdbc:postgresql://localhost/shop", "live", "id", options={"user": "ann"})
        >>> changes.writeStream.foreachBatch(view).start()  # doctest: +SKIP
    """
    settings = dict(options or {})
    ready: set[str] = set()
    marks = Marks()

    def write(changes: NetChanges) -> None:
        with contextlib.closing(_Database(changes, url, table, settings)) as database:
            database.prepare(first=changes.query_id not in ready)
            ready.add(changes.query_id)
            if not database.has_micro_batch():
                nulls = database.look()
                database.stage(marks)
                database.merge(nulls, marks.counted())

    return view(write, key)


def postgres_view(
    url: str, table: str, key: str | Sequence[str] | None = None, *, options: Mapping[str, str] | None = None
) -> View:
    """Makes a `jdbc_view` for Postgres, with its driver (``org.postgresql:postgresql``).

    Args:
        url: ``postgresql://host:port/database``, with or without ``jdbc:``.
        table: the table's name, as SQL spells it.
        key: columns that identify a row, see `jdbc_view`.
        options: options of Spark's JDBC writer, see `jdbc_view`.

    Example:
        >>> view = gpu_ops.sinks.postgres_view("postgresql://localhost/shop", "live", key="id", options={"user": "ann"})
        >>> changes.writeStream.foreachBatch(view).start()  # doctest: +SKIP
    """
    return jdbc_view(
        "jdbc:" + url.removeprefix("jdbc:"), table, key, options={"driver": "org.postgresql.Driver", **(options or {})}
    )


def _beside(table: str, suffix: str, limit: int, *, cut: bool = False) -> tuple[str, str]:
    """Names a table or index that belongs to a table, quoted likewise: with the schema, and without.

    A name longer than ``limit`` bytes is cut and ends in a hash, so that it is no other table's name with a suffix.
    With ``cut`` it is only cut, as Postgres cuts names.
    """
    schema, name = _parts(table)
    quotes, plain = _QUOTES.get(name[0]), _plain(name)
    whole = plain + suffix
    if len(whole.encode()) > limit:
        named = plain.encode() if quotes else plain.encode().lower()
        mark = "" if cut else f"{suffix}_{hashlib.sha256(named).hexdigest()[:12]}"
        whole = whole.encode()[: limit - len(mark)].decode(errors="ignore") + mark
    if quotes is not None:
        whole = name[0] + whole.replace(quotes, quotes * 2) + quotes
    return schema + whole, whole


def _parts(table: str) -> tuple[str, str]:
    """Splits a name as SQL spells it into the schema, with its dot, and the table."""
    parts = _NAME.fullmatch(table)
    if parts is None:
        raise DescriptionError(f"{table!r} is no name of a table; names with other characters are quoted")
    return parts[1], parts[2]


def _plain(name: str) -> str:
    """A table's name without its quotes."""
    quotes = _QUOTES.get(name[0])
    return name if quotes is None else name[1:-1].replace(quotes * 2, quotes)


class _Database:
    """A view in a database while one micro-batch is written, over a connection of the driver's.

    Args:
        changes: the micro-batch.
        url: the database's JDBC address.
        table: the view's table.
        options: see `jdbc_view`.
    """

    def __init__(self, changes: NetChanges, url: str, table: str, options: Mapping[str, str]) -> None:
        self._changes, self._url, self._table = changes, url, table
        self._spark = changes.rows.sparkSession
        self._options = with_driver(self._spark, url, options)
        self._connection = Connection(self._spark, url, self._options, f"view {table}")
        self._postgres = self._connection.postgres
        self.staging, _ = _beside(table, "_staged", self._connection.longest_table)
        self._batches = self._batches_of()
        self._spelled: dict[str, str] = {}
        self._columns: list[str] = []
        self._casts: dict[str, postgres.Cast] = {}

    def close(self) -> None:
        """Closes the connection, which undoes what was not committed."""
        self._connection.close()

    def execute(self, *statements: str) -> None:
        """Runs SQL statements on the connection."""
        self._connection.execute(*statements)

    def _names(self, columns: Iterable[str]) -> list[str]:
        return [self._connection.quoted(x) for x in columns]

    def _batches_of(self) -> str:
        """The name of the table of micro-batch numbers, also where an older version let the database cut it."""
        longest = self._connection.longest_table
        before, _ = _beside(self._table, "_batches", longest, cut=True)
        is_own = before != self._table and set(self._columns_of(before) or ()) == set(_BATCHES)
        return before if is_own else _beside(self._table, "_batches", longest)[0]

    def _columns_of(self, table: str) -> list[str] | None:
        """The columns of a table; None if it does not exist."""
        return self._connection.columns(table) if self._connection.exists(table) else None

    def prepare(self, *, first: bool) -> None:
        """Checks all tables, then creates the missing ones and empties the staging table.

        Args:
            first: whether it is the query's first micro-batch: the staging table is made anew, and the statements are
                tried without rows.

        Raises:
            DescriptionError: an existing table is not the view's, or has other columns; or the database does not take a
                column's type.
        """
        if first:
            self._check()
        batches, staging, view_columns = map(self._columns_of, (self._batches, self.staging, self._table))
        for name, columns, required in ((self._batches, batches, _BATCHES), (self.staging, staging, (STAGED,))):
            if columns is not None and not set(required) <= {x.lower() for x in columns}:
                raise DescriptionError(
                    f"view {self._table} keeps a table {name} beside it, and one of that name is there that no view "
                    f"has made: it has {', '.join(columns)}. Rename one of them"
                )
        stored = self._changes.stored()
        self._columns = stored.names if view_columns is None else view_columns
        self._spelled = self._changes.check(self._table, self._columns)
        if view_columns is not None:
            self._check_equal()
        self._connection.begin()
        if batches is None:
            types = {"createTableColumnTypes": "query_id VARCHAR(64)"}
            self._create(self._batches, st.StructType.fromDDL("query_id STRING, batch_id BIGINT"), types)
        if first or staging is None:
            if staging is not None:
                self._drop_staging()
            self._create_staging()
        else:
            self._empty()
        if view_columns is None:
            self._create(self._table, stored)
            if self._changes.key is not None:
                index = _beside(self._table, "_key", self._connection.longest_table)[1]
                key = ", ".join(self._names(self._changes.key))
                self.execute(f"CREATE UNIQUE INDEX {index} ON {self._table} ({key})")
        if self._postgres:
            staged, kept = (postgres.types(self._connection, x) for x in (self.staging, self._table))
            self._casts = {
                x.name: postgres.Cast(
                    x.name, self._names([x.name])[0], x.dataType, staged[x.name].whole, kept[self._spelled[x.name]]
                )
                for x in self._changes.schema
            }
        if first:
            self._try()
        self._connection.commit()

    def _try(self) -> None:
        """Runs the statements without any rows, so that a refusal comes before any row does."""
        size = len(self._changes.key or self._changes.schema.names)
        try:
            if self._casts:
                names = ", ".join(self._names(self._spelled[x] for x in self._casts))
                nothing = ", ".join(x.described for x in self._casts.values())
                self.execute(f"INSERT INTO {self._table} ({names}) SELECT {nothing} WHERE 1 = 0")
            self._bring(self._merge(["0" * size, "1" * size], {}), {})
        except (DatabaseError, BadInputError) as error:
            reason = str(error).removeprefix(f"view {self._table}: ")
            raise DescriptionError(f"view {self._table} cannot be kept: {reason}") from error

    def _check(self) -> None:
        """Checks that the database takes the names and types of the columns."""
        table = _plain(_parts(self._table)[1])
        longest = self._connection.longest_column
        names = [
            ("view", table, self._connection.longest_table),
            *(("column", x.name, longest) for x in self._changes.schema),
        ]
        for what, name, limit in names:
            if len(name.encode()) > limit:
                size = len(name.encode())
                raise DescriptionError(f"{what} {name!r} has a name of {size} bytes; the database keeps {limit}")
        for field in self._changes.schema:
            for reserved in (STAGED, _ATTEMPT):
                if reserved in (field.name.lower(), table.lower()):
                    raise DescriptionError(f"{reserved!r} is a view's own name: rename that table or column")
            if not self._connection.has_type(self._java(field.dataType)):
                raise DescriptionError(
                    f"column {field.name!r} is {field.dataType.simpleString()}, which Spark has no type for in view "
                    f"{self._table}: make columns of its parts, or text of it, as to_json() does"
                )

    def _check_equal(self) -> None:
        """Checks that the database can compare the columns by which rows are found."""
        for name in self._names(self._spelled[x] for x in self._changes.key or self._changes.schema.names):
            try:
                self._connection.rows(
                    f"SELECT {name} FROM {self._table} WHERE 1 = 0 AND {name} = {name} GROUP BY {name}"
                )
            except DatabaseError as error:
                reason = str(error).removeprefix(f"view {self._table}: ")
                raise DescriptionError(
                    f"rows of view {self._table} are found by column {name}, which cannot be: {reason}"
                ) from error

    def _java(self, kind: st.DataType) -> Any:
        return self._spark._jsparkSession.parseDataType(kind.json())

    def _create(self, table: str, schema: st.StructType, more: Mapping[str, str] | None = None) -> None:
        self._connection.create(table, self._java(schema), more)

    def _drop_staging(self) -> None:
        """Drops the staging table, waiting a minute at most for whoever has it locked.

        Raises:
            DatabaseError: it cannot be dropped, or not in that time.
        """
        try:
            self._connection.changed(f"DROP TABLE {self.staging}", _LOCK_WAIT)
        except DatabaseError as error:
            reason = str(error).removeprefix(f"view {self._table}: ")
            raise DatabaseError(
                f"view {self._table}: {self.staging} of an earlier run could not be dropped: {reason}. Another session "
                f"may have it locked, such as a backup or a task of that run; it is waited for {_LOCK_WAIT} s: end it",
                error.state,
            ) from error

    def _create_staging(self) -> None:
        marks = [st.StructField(STAGED, st.LongType()), st.StructField(_ATTEMPT, st.LongType())]
        fields = list(self._changes.schema)
        more = {}
        if self._postgres:
            fields = [st.StructField(x.name, postgres.staged_type(x.dataType)) for x in fields]
            more = {"createTableColumnTypes": f"{_ATTEMPT} BIGINT"}  # not the view's
        self._create(self.staging, st.StructType([*fields, *marks]), more)

    def _empty(self) -> None:
        """Empties the staging table of rows that earlier micro-batches and attempts left."""
        if self._postgres:
            # truncating waits for whoever reads it, a backup perhaps, and for an attempt whose executor is lost
            self.execute("SAVEPOINT gpu_ops")
            try:
                self.execute(f"LOCK TABLE {self.staging} IN ACCESS EXCLUSIVE MODE NOWAIT")
            except DatabaseError:
                self.execute("ROLLBACK TO SAVEPOINT gpu_ops", f"DELETE FROM {self.staging}")
                return
        self.execute(self._connection.truncation(self.staging))

    def has_micro_batch(self) -> bool:
        """True if a transaction has brought this micro-batch or a later one into the view."""
        query, batch = self._names(_BATCHES)
        taken = f"{query} = '{self._changes.query_id}' AND {batch} >= {self._changes.batch_id}"
        return self._connection.rows(f"SELECT COUNT(*) FROM {self._batches} WHERE {taken}") != [("0",)]

    def look(self) -> list[str]:
        """Checks the values for Postgres, and returns the patterns of nulls in the key, see `Merge.nulls`.

        Raises:
            BadInputError: text with the character NUL, which Postgres does not take; or a day before the year 1, which
                most of its readers do not.
        """
        key, schema = self._changes.key, self._changes.schema
        flags = [f.when(named_column(x).isNull(), "1").otherwise("0") for x in key or schema.names]
        patterns = f.collect_set(f.concat(*flags)) if key is not None else f.array(f.concat(*map(f.max, flags)))
        samples = []
        for x in schema if self._postgres else ():
            value = named_column(x.name)
            if "string" in x.dataType.simpleString():
                text = value.cast("string")
                samples.append((x.name, "keeps no text with the character NUL", f.when(text.contains("\0"), text)))
            early = postgres.before_year_one(value, x.dataType)
            if early is not None:
                samples.append((x.name, "keeps no day before the year 1", f.when(early, value.cast("string"))))
        row = self._changes.signed().agg(patterns, *(f.max(x).alias(f"x{n}") for n, (*_, x) in enumerate(samples)))
        nulls, *values = row.first()
        for (name, problem, _), sample in zip(samples, values, strict=True):
            if sample is not None:
                raise BadInputError(self._changes.changelog, name, f"view {self._table} {problem}", sample)
        return sorted(x for x in nulls if x is not None)

    def stage(self, marks: Marks) -> None:
        """Has the executors write the micro-batch into the staging table.

        Raises:
            DatabaseError: the rows could not be written.
        """
        rows = self._changes.signed().withColumnRenamed(COUNT, STAGED)
        if self._postgres:
            casts = self._casts.values()
            values = [postgres.staged_value(named_column(x.name), x.kind, x.type).alias(x.name) for x in casts]
            rows = rows.select(*values, STAGED)
        writer = marks.marked(rows, _ATTEMPT).write.format("jdbc").options(**self._options)
        try:
            writer.options(url=self._url, dbtable=self.staging).mode("append").save()
        except Exception as error:  # pyspark's and py4j's, by version
            raise DatabaseError(f"view {self._table}: rows were not staged: {message_in(str(error))}") from error

    def merge(self, nulls: Sequence[str], attempts: Mapping[int, int]) -> None:
        """Brings the staged rows into the view, unless a transaction has done so.

        Args:
            nulls: see `Merge.nulls`.
            attempts: the number of rows that each valid task attempt has staged.

        Raises:
            BadInputError: the view's column cannot hold a value, or two keys are equal in its types.
            DatabaseError: see `jdbc_view`.
        """
        query, batch = self._names(_BATCHES)
        of_query, number = f"{query} = '{self._changes.query_id}'", self._changes.batch_id
        # the row is locked: another driver of the query that is still there does not do the same beside this one
        if not self._connection.changed(
            f"UPDATE {self._batches} SET {batch} = {number} WHERE {of_query} AND {batch} < {number}"
        ):
            if self._connection.rows(f"SELECT COUNT(*) FROM {self._batches} WHERE {of_query}") != [("0",)]:
                return
            values = f"'{self._changes.query_id}', {number}"
            self.execute(f"INSERT INTO {self._batches} ({query}, {batch}) VALUES ({values})")
        self._check_staged(attempts)
        if self._postgres:
            self.execute(f"ANALYZE {self.staging}")  # else one row is expected of it, which is looked up in a loop
        try:
            if attempts:  # there may be no row
                self._bring(self._merge(nulls, attempts), attempts)
            self._connection.commit()
        except DatabaseError as error:
            if error.state[:2] not in ("22", "23"):
                raise
            raise BadInputError(self._changes.changelog, None, str(error)) from error

    def _check_staged(self, attempts: Mapping[int, int]) -> None:
        """Checks that the rows of the valid attempts are staged, each once, and are all changes of the micro-batch."""
        mark = self._names([_ATTEMPT])[0]
        staged = f"SELECT {mark}, COUNT(*) FROM {self.staging} WHERE {self._counts(attempts)} GROUP BY {mark}"
        rows = {int(x): int(count) for x, count in self._connection.rows(staged)}
        if rows != attempts:
            raise DatabaseError(
                f"view {self._table}: {sum(attempts.values())} rows were written into {self.staging}, and "
                f"{sum(rows.values())} are there: another writer, or a database without transactions"
            )
        if sum(rows.values()) != self._changes.count:  # Spark only logs an accumulator's update that fails
            raise DatabaseError(
                f"view {self._table}: {self._changes.count} rows change, and the driver was told of "
                f"{sum(rows.values())} that tasks have written into {self.staging}: an update of Spark's accumulators "
                "was lost (see the driver's log), or the changelog's query gave other rows when it was run again"
            )

    def _counts(self, attempts: Mapping[int, int]) -> str:
        """SQL condition that staged rows are of the given attempts."""
        mark, marks = self._names([_ATTEMPT])[0], sorted(attempts)
        parts = [marks[n : n + _IN_LIST] for n in range(0, len(marks), _IN_LIST)] or [[-1]]
        return "(" + " OR ".join(f"{mark} IN ({', '.join(map(str, part))})" for part in parts) + ")"

    def _merge(self, nulls: Sequence[str], attempts: Mapping[int, int]) -> Merge:
        changes, names = self._changes, self._changes.schema.names
        staged = dict(zip(names, self._names(names), strict=True))
        kept = {x: self._names([self._spelled[x]])[0] for x in names}
        count = self._names([STAGED])[0]
        values = {x: self._casts[x].value if x in self._casts else staged[x] for x in names}
        shown = ", ".join(staged[x] if values[x] == staged[x] else f"{values[x]} AS {staged[x]}" for x in names)
        rows = f"SELECT {shown}, {count} FROM {self.staging} WHERE {self._counts(attempts)}"
        if changes.key is None and any(x.folds for x in self._casts.values()):
            # rows that differ may be equal in the view's types
            grouped = ", ".join(staged.values())
            rows = (
                f"SELECT {grouped}, SUM({count}) AS {count} FROM ({rows}) each_row "
                f"GROUP BY {grouped} HAVING SUM({count}) <> 0"
            )
        return Merge(
            table=self._table, rows=f"({rows})", staged=staged, kept=kept, key=changes.key, count=count,
            total=self._names([self._spelled[COUNT]])[0] if changes.key is None else "", postgres=self._postgres,
            others=len(self._columns) > len(self._spelled), nulls=nulls,
            texts=[x for x in changes.key or names if isinstance(changes.schema[x].dataType, st.StringType)],
        )  # fmt: skip

    def _bring(self, merge: Merge, attempts: Mapping[int, int]) -> None:
        self._check_values(attempts)
        key = self._changes.key
        if key is not None and any(self._casts[x].folds for x in key if x in self._casts):
            samples = self._connection.rows(merge.twice(), most=1)
            if samples:
                problem = f"two keys of the changelog are one in the types of view {self._table}"
                raise BadInputError(self._changes.changelog, ", ".join(key), problem, samples[0][0])
        bring(self._connection, merge, f"view {self._table}", self._changes.changelog)

    def _check_values(self, attempts: Mapping[int, int]) -> None:
        """Checks that the columns of a Postgres table can hold the staged values.

        Raises:
            BadInputError: one cannot.
        """
        casts = [x for x in self._casts.values() if x.needed]
        if not casts:
            return
        where = f"FROM {self.staging} WHERE {self._counts(attempts)}"
        self.execute("SAVEPOINT gpu_ops")
        try:
            samples = self._connection.rows(f"SELECT {', '.join(x.sample for x in casts)} {where}")[0]
        except DatabaseError:
            for cast in casts:
                self.execute("ROLLBACK TO SAVEPOINT gpu_ops")
                try:
                    self._connection.rows(f"SELECT {cast.sample} {where}")
                except DatabaseError as error:
                    raise BadInputError(self._changes.changelog, cast.name, str(error)) from error
            raise
        for cast, sample in zip(casts, samples, strict=True):
            if sample != "None":
                raise BadInputError(self._changes.changelog, cast.name, f"view {self._table}: {cast.problem}", sample)

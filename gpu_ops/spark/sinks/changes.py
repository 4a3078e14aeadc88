"""The net change of a micro-batch, and the views that need no more: in memory and in Kafka topics.

A changelog's net change is a difference of multisets: per row, the number of times it is added less the number it is
removed. So neither the order within a micro-batch nor ``emit=`` matters, and per key at most one row goes and one
comes.

Topics of Kafka get upserts with tombstones, Debezium's envelopes, or the changelog's own messages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql import types as st
from pyspark.sql.streaming import DataStreamWriter, StreamingQuery

from gpu_ops.conditions import backquoted
from gpu_ops.descriptions.changelog import ROW_KIND_COLUMN
from gpu_ops.errors import BadInputError, DescriptionError, StateError
from gpu_ops.messages.json_texts import writes
from gpu_ops.spark.driver.executors import make_importable
from gpu_ops.spark.failures import data_frame, message_in, refuse_connect
from gpu_ops.spark.plan.changes import encoded_in_tasks
from gpu_ops.spark.plan.column_metadata import CHANGELOG, known_key
from gpu_ops.spark.tasks.messages import JsonTexts, MessageWriter
from gpu_ops.spark.tasks.rows import EncodeRows
from gpu_ops.spark_types import arrow_schema, ignores_case, named_column, spark_type, spark_types_within, spelling

COUNT: Final = "gpu_ops_count"
"""The column of a view without a key that says how many times the row is there."""

View = Callable[[DataFrame, int], None]


@dataclasses.dataclass(frozen=True)
class NetChanges:
    """The net change of a micro-batch.

    Attributes:
        rows: cached; ``before`` and ``after``, structs of the view's columns, and ``copies``. With a key there is one
            row per changed key, and ``copies`` is 1; without one either ``before`` or ``after`` is null.
        schema: the schema of the view's columns.
        key: the view's key; None if it has none.
        query_id: the id of the streaming query; "none" where the function is called without one.
        batch_id: the number of the micro-batch.
        changelog: the changelog's name, for errors.
        count: the number of ``rows``.
    """

    rows: DataFrame
    schema: st.StructType
    key: tuple[str, ...] | None
    query_id: str
    batch_id: int
    changelog: str
    count: int

    def signed(self) -> DataFrame:
        """The view's columns and `COUNT`: negative for rows to remove, 2 where a key has another row before."""
        row = f.coalesce("after", "before")
        count = f.when(f.col("after").isNull(), -f.col("copies")).when(f.col("before").isNull(), f.col("copies"))
        count = count.otherwise(2)
        return self.rows.select(*(row[x].alias(x) for x in self.schema.names), count.alias(COUNT))

    def stored(self) -> st.StructType:
        """The schema of a table that keeps the view."""
        count = [] if self.key is not None else [st.StructField(COUNT, st.LongType())]
        return st.StructType([st.StructField(x.name, x.dataType) for x in self.schema] + count)

    def check(self, view: str, columns: Sequence[str]) -> dict[str, str]:
        """Compares the columns of an existing table with those it should have.

        Returns:
            How the table spells each of them: as the changelog does, or else but for upper and lower case.

        Raises:
            DescriptionError: one is missing, or the table was written with a key and is to be without, or vice versa.
        """
        stored, lower_names = self.stored().names, {x.lower() for x in columns}
        if (COUNT in lower_names) != (COUNT in stored) and {x.lower() for x in self.schema.names} <= lower_names:
            now = "has no key" if self.key is None else f"has the key {', '.join(self.key)}"
            before = "with" if self.key is None else "without"
            raise DescriptionError(f"view {view} was made {before} a key, and the changelog {now}: declare key=")
        spelled: dict[str, str] = {}
        for name in stored:
            alike = [x for x in columns if x.lower() == name.lower() and x not in stored]
            if name not in columns and len(alike) != 1:
                has = f"has {' and '.join(alike)} for" if alike else "has no"
                raise DescriptionError(f"view {view} {has} column {name!r}; it has {', '.join(columns)}")
            spelled[name] = name if name in columns else alike[0]
        if len(set(spelled.values())) < len(stored):
            raise DescriptionError(f"view {view} has {', '.join(columns)}; the changelog has {', '.join(stored)}")
        return spelled


def net(batch: DataFrame, *, exact: bool = False) -> DataFrame:
    """The rows that a micro-batch adds or removes, each once, with `COUNT`: the number of times, negative if removed.

    Rows whose row kind is none of ``+I``, ``-U``, ``+U``, ``-D`` (``bad`` and ``late`` ones) are left out.

    Args:
        batch: a changelog.
        exact: whether 0.0 and -0.0, which Spark groups as one, are different.

    Raises:
        DescriptionError: no changelog, or columns that cannot be grouped.
    """
    names = [x for x in batch.columns if x != ROW_KIND_COLUMN]
    if len(names) == len(batch.columns):
        raise DescriptionError(f"a view takes a changelog with its column {ROW_KIND_COLUMN!r}; got {', '.join(names)}")
    if COUNT in {x.lower() for x in names}:
        raise DescriptionError(f"a view has a column {COUNT!r} of its own: rename the changelog's")
    spelled: dict[str, str] = {}
    for name in names:
        alike = spelled.setdefault(name.lower() if ignores_case(batch.sparkSession) else name, name)
        if alike != name or names.count(name) > 1:
            raise DescriptionError(f"a view has one column of a name; the changelog has {alike!r} and {name!r}")
    kind = f.col(ROW_KIND_COLUMN)
    sign = f.when(kind.isin("+I", "+U"), 1).when(kind.isin("-U", "-D"), -1)
    floats = {x: n for n, x in enumerate(names) if exact and _has_floats(batch.schema[x].dataType)}
    signs = [_signs(named_column(x), batch.schema[x].dataType).alias(f"{COUNT}_sign_{n}") for x, n in floats.items()]
    firsts = [f.first(named_column(x)).alias(f"{COUNT}_first_{n}") for x, n in floats.items()]
    try:
        grouped = batch.where(sign.isNotNull()).groupBy(*map(named_column, names), *signs)
        counted = grouped.agg(f.sum(sign).alias(COUNT), *firsts).where(f.col(COUNT) != 0)
        values = [f.col(f"{COUNT}_first_{floats[x]}").alias(x) if x in floats else named_column(x) for x in names]
        return counted.select(*values, COUNT) if floats else counted
    except AnalysisException as error:
        raise DescriptionError(
            "the columns of a view are grouped, and Spark cannot group "
            f"{_ungrouped(batch, names) or 'these'}: {message_in(str(error))}"
        ) from error


def _has_floats(kind: st.DataType) -> bool:
    return any(isinstance(part, st.FloatType | st.DoubleType) for part in spark_types_within(kind))


def _signs(value: Column, kind: st.DataType) -> Column:
    """A column that differs for 0.0 and -0.0 where the values are equal."""
    text = value.cast("string")
    return text if isinstance(kind, st.StructType | st.ArrayType | st.MapType) else f.when(value == 0, text)


def _ungrouped(batch: DataFrame, names: Sequence[str]) -> str | None:
    """The first column that cannot be grouped, and its type."""
    for name in names:
        try:
            batch.groupBy(named_column(name)).count()
        except AnalysisException:
            return f"column {name!r}, which is {batch.schema[name].dataType.simpleString()}"
    return None


def by_key(rows: DataFrame, key: Sequence[str]) -> DataFrame:
    """Groups the rows of `net` by key: ``before``, ``after``, and ``copies``, more than 1 if the key is not unique."""
    row, count = f.struct(*map(named_column, rows.columns[:-1])), f.col(COUNT)
    grouped = rows.groupBy(*(named_column(name).alias(f"key_{n}") for n, name in enumerate(key)))
    return grouped.agg(
        f.first(f.when(count < 0, row), ignorenulls=True).alias("before"),
        f.first(f.when(count > 0, row), ignorenulls=True).alias("after"),
        f.greatest(f.sum(f.greatest(count, f.lit(0))), f.sum(f.greatest(-count, f.lit(0)))).alias("copies"),
    ).select("before", "after", "copies")


def without_key(rows: DataFrame) -> DataFrame:
    """Puts the rows of `net` into the columns of `by_key`, for a view without a key."""
    row, count = f.struct(*map(named_column, rows.columns[:-1])), f.col(COUNT)
    before, after = f.when(count < 0, row), f.when(count > 0, row)
    return rows.select(before.alias("before"), after.alias("after"), f.abs(count).alias("copies"))


def key_of(batch: DataFrame, key: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """Returns the declared key, or else the one that is known of the changelog.

    Raises:
        DescriptionError: a declared column does not exist.
    """
    if key is None:
        return known_key(batch)
    return _spelled(batch, key, "no column of the changelog")


def _spelled(df: DataFrame, key: str | Sequence[str], what: str) -> tuple[str, ...]:
    """The columns of a key in their own spelling."""
    columns = []
    for name in (key,) if isinstance(key, str) else key:
        column = spelling(df, name)
        if column is None:
            raise DescriptionError(f"key={name!r} is {what}; there are {', '.join(df.columns)}")
        columns.append(column)
    return tuple(columns)


def query_of(batch: DataFrame) -> str:
    """The id of the streaming query that a micro-batch belongs to."""
    return (
        data_frame(batch, "what a view takes").sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
        or "none"
    )


def started(
    writer: DataStreamWriter, checkpoint: str | None, name: str | None, trigger: Mapping[str, Any]
) -> StreamingQuery:
    """Starts a query with the checkpoint, the name and the trigger that its user gave."""
    if checkpoint is not None:
        writer = writer.option("checkpointLocation", checkpoint)
    if name is not None:
        writer = writer.queryName(name)
    return (writer.trigger(**trigger) if trigger else writer).start()


def view(
    write: Callable[[NetChanges], None], key: str | Sequence[str] | None, *, needs_key: str = "", exact: bool = False
) -> View:
    """Makes a function for ``foreachBatch`` that computes the net change of each micro-batch and writes it.

    Args:
        write: called with each net change.
        key: columns that identify a row of the changelog; None for those that are known of it.
        needs_key: why the view needs a key; empty if it does not.
        exact: whether 0.0 and -0.0 are different rows to it; with a key they always are.
    """

    def apply(batch: DataFrame, batch_id: int) -> None:
        query = query_of(batch)
        columns = key_of(batch, key)
        if columns is None and needs_key:
            raise DescriptionError(f"{needs_key}; none is known of this changelog: declare key=")
        rows = net(batch, exact=exact or columns is not None)
        mark = batch.schema[ROW_KIND_COLUMN].metadata.get(CHANGELOG, "changelog")
        schema = st.StructType([x for x in batch.schema if x.name != ROW_KIND_COLUMN])
        changed = (without_key(rows) if columns is None else by_key(rows, columns)).persist()
        try:
            repeated = f.max(f.when(f.col("copies") > 1, f.coalesce("after", "before").cast("string")))
            counts = changed.agg(f.count("*"), repeated).first()
            if columns is not None and counts[1] is not None:
                raise BadInputError(mark, ", ".join(columns), "the view's key is not unique", counts[1])
            if counts[0] or batch_id == 0:  # the first one makes the table, be it empty
                write(NetChanges(changed, schema, columns, query, batch_id, mark, counts[0]))
        finally:
            changed.unpersist()

    return apply


class MemoryView:
    """A view that is kept in memory; see `memory_view`."""

    def __init__(self, name: str) -> None:
        self.name, self._quoted = name, backquoted(name)
        self._spark = SparkSession.active()
        refuse_connect(self._spark)
        self._rows: DataFrame | None = None
        self._last = ("", -1)
        """The query and its last micro-batch."""

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        """Applies one micro-batch to the view; called by Spark."""
        query, last = self._last
        if query_of(batch) != query:
            query, last, self._rows = query_of(batch), -1, None
        if batch_id <= last:
            batch.write.format("noop").mode("append").save()  # a micro-batch has to be read
            return
        if batch_id > 0 and last < 0:
            raise StateError(
                f"the view {self.name!r} in memory would begin at micro-batch {batch_id}, without what came before: "
                "begin the query anew (checkpoint and state), or keep the view in a table"
            )
        rows = net(batch)
        names = [x for x in rows.columns if x != COUNT]
        if self._rows is not None:
            both = self._rows.unionByName(rows)
            rows = both.groupBy(*map(named_column, names)).agg(f.sum(COUNT).alias(COUNT)).where(f.col(COUNT) != 0)
        self._rows = rows.localCheckpoint()
        copies = f.explode(f.sequence(f.lit(1), f.col(COUNT))).alias(COUNT)
        self._rows.select(*map(named_column, names), copies).drop(COUNT).createOrReplaceGlobalTempView(self._quoted)
        # a micro-batch has a session of its own, whose temporary views no other sees
        self._spark.sql(f"CREATE OR REPLACE TEMP VIEW {self._quoted} AS SELECT * FROM global_temp.{self._quoted}")
        self._last = (query, batch_id)

    @property
    def table(self) -> DataFrame:
        """The current rows of the view."""
        return self._spark.table(f"global_temp.{self._quoted}")


def memory_view(name: str) -> MemoryView:
    """Makes a function for ``foreachBatch`` that keeps the folded changelog as the temporary view ``name``.

    The view belongs to the session that is active now, and lives as long as the application. A row that is there
    several times is shown as often; no key is needed.

    Raises:
        StateError: (from ``foreachBatch``) the query has run before, so that its beginning is missing.

    Example:
        >>> arrive(folder + "/in", {"row_kind": "+I", "id": 1}, {"row_kind": "+I", "id": 2})
        >>> arrive(folder + "/in", {"row_kind": "-D", "id": 1})
        >>> changes = spark.readStream.schema("row_kind STRING, id INT").json(folder + "/in")
        >>> view = gpu_ops.sinks.memory_view("live")
        >>> writer = changes.writeStream.foreachBatch(view).option("checkpointLocation", folder + "/checkpoint")
        >>> writer.trigger(availableNow=True).start().awaitTermination()
        >>> view.table.show()
        +---+
        | id|
        +---+
        |  2|
        +---+
    """
    return MemoryView(name)


def json_messages(changes: DataFrame, key: str | Sequence[str] = (), *, headers: bool = True) -> DataFrame:
    """Makes a message of each row for Spark's Kafka writer: columns ``value``, with ``key=`` ``key``, and ``headers``.

    A value is a JSON object of all columns, row kinds included, null where a column is. Times are in ISO 8601 with
    microseconds, instants in UTC; bytes are base64, NaN and the infinities texts. Texts are made by the tasks that make
    the rows, by Arrow, where `gpu_ops.write_files` would write files in them; else they are made of Spark's rows.

    Spark's Kafka sink is at-least-once: a repeated micro-batch sends its messages again. So each has a header
    ``sequence``, ``[micro-batch,task,number]``, which rises within a task's messages in each partition of the topic: a
    consumer that keeps the last one can drop those that are not above it. A repetition has the same ones where rows
    have an order, which `gpu_ops.read_files`, `gpu_ops.read_kafka` and ``sequence_by`` give them; and lies in the same
    partitions where messages have keys.

    Args:
        changes: a DataFrame, streaming or not.
        key: columns that make a message's key: the bare text of one column, a JSON object of several.
        headers: whether messages have it; those of a static DataFrame outside of a streaming query have none.

    Raises:
        DescriptionError: there is no such column, or one has a type without a JSON text (an interval).

    Example:
        >>> changes = spark.createDataFrame([("+I", 1, 10)], "row_kind STRING, id INT, amount INT")
        >>> gpu_ops.sinks.json_messages(changes, key="id").show(truncate=False)
        +---+------------------------------------+
        |key|value                               |
        +---+------------------------------------+
        |1  |{"row_kind":"+I","id":1,"amount":10}|
        +---+------------------------------------+
    """
    names = _spelled(data_frame(changes, "what json_messages() takes"), key, "no column")
    schema = _written_schema(changes.schema)
    headers = headers and (changes.isStreaming or query_of(changes) != "none")
    writer = MessageWriter(schema, names, headers)
    return encoded_in_tasks(changes, writer, "gpu_join_messages", spark_type(pa.struct(list(writer.output_schema))))


def _written_schema(schema: st.StructType) -> pa.Schema:
    """Returns the Arrow types of columns that become JSON texts.

    Raises:
        DescriptionError: one that has none.
    """
    written = arrow_schema(schema, "changes")
    for field, spark_field in zip(written, schema, strict=True):
        if not writes(field.type):
            kind = spark_field.dataType.simpleString()
            raise DescriptionError(f"column {field.name!r} is {kind}, which has no JSON text: cast it")
    return written


def kafka_upsert(
    servers: str, topic: str, key: str | Sequence[str] | None = None, *, options: Mapping[str, str] | None = None
) -> View:
    """Makes a function for ``foreachBatch`` that keeps a topic whose last message per key is the row, as JSON.

    A message's key is the JSON object of the key's columns, its value that of all columns, or none (a tombstone) where
    the row is gone. A repeated micro-batch sends the same messages again, which changes nothing.

    Args:
        servers: ``kafka.bootstrap.servers``.
        topic: the topic, compacted or not.
        key: columns that identify a row; by default those that are known of the changelog.
        options: options of Spark's Kafka writer, such as ``kafka.security.protocol``.

    Example:
        >>> view = gpu_ops.sinks.kafka_upsert("localhost:9092", "live", key="id")
        >>> changes.writeStream.foreachBatch(view).start()  # doctest: +SKIP
    """

    def write(changes: NetChanges) -> None:
        rows = changes.rows.select(_key(changes).alias("key"), f.col("after").alias("value"))
        _send(_json(rows, changes.schema), servers, topic, options)

    return view(write, key, needs_key="an upsert topic needs a key", exact=True)


def kafka_debezium(
    servers: str, topic: str, key: str | Sequence[str] | None = None, *, options: Mapping[str, str] | None = None
) -> View:
    """Makes a function for ``foreachBatch`` that sends each changed row as an envelope of Debezium's, as JSON.

    ``op`` is ``c``, ``u`` or ``d``, with ``before`` and ``after``. ``source.sequence`` is the number of the micro-batch
    and that of the message among those of its key: it rises within a key, and a repeated micro-batch sends the same
    messages with the same ones, so that a consumer can drop them. Without a key updates are ``d`` and ``c``, and a
    message's key is the whole row.

    Args:
        servers: ``kafka.bootstrap.servers``.
        topic: the topic.
        key: columns that identify a row; by default those that are known of the changelog.
        options: options of Spark's Kafka writer, such as ``kafka.security.protocol``.

    Example:
        >>> view = gpu_ops.sinks.kafka_debezium("localhost:9092", "changes", key="id")
        >>> changes.writeStream.foreachBatch(view).start()  # doctest: +SKIP
    """

    def write(changes: NetChanges) -> None:
        op = f.when(f.col("before").isNull(), "c").when(f.col("after").isNull(), "d").otherwise("u")
        number = f.posexplode(f.sequence(f.lit(1), f.col("copies"))).alias("number", "copy")
        rows = changes.rows.select("before", "after", op.alias("op"), _key(changes).alias("key"), number)
        sequence = f.format_string(f'["{changes.batch_id}","%d"]', f.col("number"))
        source = f.struct(f.lit("gpu_ops").alias("connector"), sequence.alias("sequence"))
        envelope = f.struct("before", "after", "op", source.alias("source"))
        _send(_json(rows.select("key", envelope.alias("value")), changes.schema), servers, topic, options)

    return view(write, key, exact=True)


def _key(changes: NetChanges) -> Column:
    """The key of a message; rows that Spark treats as equal, as with 0.0 and -0.0, have the same key."""
    row = f.coalesce("after", "before")
    columns = []
    for name in changes.key or changes.schema.names:
        column, kind = row[name], changes.schema[name].dataType
        columns.append((_without_signs(column, kind, name) if changes.key else column).alias(name))
    return f.struct(*columns)


def _without_signs(value: Column, kind: st.DataType, name: str) -> Column:
    """A key's value with -0.0 replaced by 0.0 at any depth.

    Raises:
        DescriptionError: there are floating-point numbers in a map.
    """
    if not _has_floats(kind):
        return value
    if isinstance(kind, st.StructType):
        fields = [_without_signs(value.getField(x.name), x.dataType, name).alias(x.name) for x in kind]
        return f.when(value.isNotNull(), f.struct(*fields))
    if isinstance(kind, st.ArrayType):
        of = kind.elementType
        return f.transform(value, lambda element: _without_signs(element, of, name))
    if isinstance(kind, st.MapType):
        raise DescriptionError(
            f"a message's key has no maps of floating-point numbers; in key {name!r} there is {kind.simpleString()}"
        )
    return f.when(value == 0, f.lit(0.0).cast(kind)).otherwise(value)


def _json(rows: DataFrame, columns: st.StructType) -> DataFrame:
    """Rows of structs as JSON texts; null for null.

    Raises:
        DescriptionError: one of the columns in them has no JSON text.
    """
    _written_schema(columns)
    writer = JsonTexts(arrow_schema(rows.schema, "changes"))
    make_importable(rows.sparkSession)
    return rows.mapInArrow(EncodeRows("gpu_join_json", writer), spark_type(pa.struct(list(writer.output_schema))))


def _send(rows: DataFrame, servers: str, topic: str, options: Mapping[str, str] | None) -> None:
    writer = rows.write.format("kafka").options(**(options or {}))
    writer.option("kafka.bootstrap.servers", servers).option("topic", topic).save()

"""Streams of messages as rows: Spark reads messages and remembers which are done, tasks parse them with Arrow."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql import types as st

from gpu_ops.descriptions.changelog import ROW_KIND_COLUMN
from gpu_ops.descriptions.inputs import BadRows
from gpu_ops.errors import DescriptionError
from gpu_ops.messages.avro import SchemaRegistry
from gpu_ops.messages.encodings import PLACEHOLDER
from gpu_ops.messages.rows import MessageFormat, MessageFormatName
from gpu_ops.spark.driver.executors import make_importable
from gpu_ops.spark.driver.starts import check_starts
from gpu_ops.spark.failures import data_frame, refuse_connect, refuse_gone
from gpu_ops.spark.metrics.metrics import free_name
from gpu_ops.spark.settings import metrics_reported
from gpu_ops.spark.sources import ARROW
from gpu_ops.spark.sources.topics import MARK, check_topics
from gpu_ops.spark.tasks.functions import applied_schema
from gpu_ops.spark.tasks.messages import KEY, POSITION, VALUE, ReadMessages
from gpu_ops.spark_types import arrow_schema, named_column, nullable, spelling
from gpu_ops.values import arrow_zone

BAD_MESSAGE: Final = "bad_message"
"""The column of ``bad_rows="tag"``: the message's position, why it cannot be read, and its content."""

_METRIC: Final = "bad_messages"
_COUNT: Final = "__bad_messages"
_BAD_ROWS: Final = ("fail", "drop", "tag")
_TOPICS: Final = ("subscribePattern", "assign")


def read_kafka(
    spark: SparkSession,
    servers: str,
    topic: str | None,
    format: MessageFormatName,  # noqa: A002 - Spark's word
    schema: st.StructType | str,
    *,
    key: str | Sequence[str] | None = None,
    row_kind: str = ROW_KIND_COLUMN,
    encoded: Mapping[str, str] | None = None,
    schema_registry: str | Mapping[str, str] | None = None,
    avro_schema: str | None = None,
    unavailable: str | None = None,
    unavailable_value: str = PLACEHOLDER,
    include: Sequence[str] = (),
    bad_rows: BadRows = "fail",
    name: str | None = None,
    options: Mapping[str, str] | None = None,
) -> DataFrame:
    """Streams the rows of a Kafka topic's messages, which tasks parse with Arrow, a batch at a time.

    Spark's own reader fetches the messages, and a query's checkpoint holds the offsets. Rows come in the order of the
    messages of each partition of the topic, and a join keeps it.

    Args:
        spark: the session, with Spark's Kafka package.
        servers: ``kafka.bootstrap.servers``.
        topic: one topic, or several separated by commas; None where ``options`` has ``subscribePattern`` or ``assign``.
        format: ``"json"`` or ``"avro"``: each value is a row. ``"debezium-json"`` or ``"debezium-avro"``: each is an
            envelope of Debezium's, see `debezium`.
        schema: the rows' schema, or its DDL text. Other members of messages are left out, columns that they lack are
            null; ``NOT NULL`` holds for new rows, not for the old rows of updates and deletes.
        key: for rows, columns that the messages' keys are objects of, too: the topic is a table then, a value replaces
            the row of its key and a message without a value deletes it. `gpu_ops.stream` needs the same
            ``unique_key``. Without ``key`` messages without a value are left out.
        row_kind: the name of the first column, of row kinds, which there is with Debezium's envelopes or a ``key``.
        encoded: for each column that is not written as ISO 8601, number or text its encoding. ``ms``, ``us``, ``ns``: a
            time as a number since 1970. ``days``: a date as a number. ``base64``: a decimal as base64 of its unscaled
            bytes, or bytes. ``base64-url-safe``, ``hex``: bytes. Without an entry bytes are base64 where that is
            certain. The schema that a message brings comes first.
        schema_registry: for Avro, the address of a schema registry with Confluent's interface, as the tasks reach it;
            for a registry with authentication a mapping of ``url`` and properties of Confluent's clients, such as
            ``basic.auth.user.info``, ``bearer.auth.token`` and ``ssl.ca.location``. Needs fastavro (``pip install
            fastavro``), which reads messages one by one.
        avro_schema: for Avro without a registry, whose messages begin with no header: their schema, as JSON text.
        unavailable: the name of a further column, of lists of names: Debezium leaves out a large value that did not
            change (Postgres without ``REPLICA IDENTITY FULL``); its column is null then and named here. `latest` takes
            such a column, and keeps the value from before. Without it such a message cannot be read.
        unavailable_value: the text in place of these values, Debezium's ``unavailable.value.placeholder``.
        include: columns of Spark's reader to add to the rows: ``timestamp``, ``offset`` and so on. They are the
            message's: a retracted row has other ones than when it was inserted, so changes with them need a
            ``unique_key``.
        bad_rows: the treatment of a message that cannot be read. ``"fail"``: an error that names topic, partition and
            offset. ``"drop"``: the message is left out and counted, in ``observedMetrics`` of Spark's progress under
            ``name``. ``"tag"``: a row with the row kind ``bad`` and a text in the last column, ``bad_message``; give
            `stream` a ``bad_rows``, too.
        name: the stream's name in errors and in Spark's progress; by default the topic.
        options: options of Spark's Kafka reader, such as ``startingOffsets``, ``maxOffsetsPerTrigger``,
            ``kafka.security.protocol``.

    Returns:
        A streaming DataFrame.

    Raises:
        DescriptionError: there is no such format, option or column, or messages cannot have the column.

    Example:
        >>> orders = gpu_ops.read_kafka(  # doctest: +SKIP
        ...     spark, "localhost:9092", "orders", "debezium-json", "id INT, amount INT"
        ... )
        >>> orders = gpu_ops.stream(orders, unique_key="id", row_kind="row_kind")  # doctest: +SKIP
    """
    refuse_connect(spark)
    refuse_gone(spark.sparkContext)
    given = dict(options or {})
    if (topic is None) == all(option not in given for option in _TOPICS):
        raise DescriptionError("read_kafka() takes a topic, or options with subscribePattern or assign")
    stream = spark.readStream.format("kafka").options(**given).option("kafka.bootstrap.servers", servers)
    stream = stream.option(MARK, "true")
    check_starts(check_topics)
    try:
        messages = (stream if topic is None else stream.option("subscribe", topic)).load()
    except AnalysisException as error:
        if "find data source" not in str(error):
            raise
        package = f"org.apache.spark:spark-sql-kafka-0-10_2.13:{spark.version}"
        raise DescriptionError(
            "Spark's Kafka package is not in this session: start it with gpu_ops.spark.session(config="
            f"{{'spark.jars.packages': {package!r}}}), or spark-submit --packages {package}"
        ) from error
    label = name or topic or next(given[option] for option in _TOPICS if option in given)
    source = MessageSource(
        label, format, schema, key=key, row_kind=row_kind, encoded=encoded, include=include, bad_rows=bad_rows,
        schema_registry=schema_registry, avro_schema=avro_schema, unavailable=unavailable,
        unavailable_value=unavailable_value,
    )  # fmt: skip
    return source.rows(messages)


def debezium(
    df: DataFrame,
    schema: st.StructType | str,
    *,
    value: str = "value",
    row_kind: str = ROW_KIND_COLUMN,
    encoded: Mapping[str, str] | None = None,
    unavailable: str | None = None,
    unavailable_value: str = PLACEHOLDER,
    include: Sequence[str] = (),
    bad_rows: BadRows = "fail",
    name: str = "messages",
) -> DataFrame:
    """Turns Debezium's envelopes (JSON) into rows with row kinds, for `gpu_ops.stream` and joins.

    ``op`` ``c`` and ``r`` are ``+I``; ``u`` is ``-U`` and ``+U``, or, where there is no ``before``, the row kind ``u``,
    an update that needs ``unique_key`` in `gpu_ops.stream`; ``d`` is ``-D``. Messages without a value and those of
    ``op`` ``m`` say nothing. A truncate (``t``) cannot be read. Envelopes may come with their schema (``{"schema":
    ..., "payload": ...}``), which then says how times and decimals are written.

    Args:
        df: messages, a stream or not: what Spark's Kafka reader gives, or anything with a column of bytes or text.
        schema: as in `read_kafka`, as are all that follow.
        value: the column with the envelopes.
        row_kind: the name of the column of row kinds.
        encoded: the encoding of values, by column.
        unavailable: the name of a column for values that are not in the message.
        unavailable_value: the text in place of such values.
        include: columns of ``df`` to add to the rows.
        bad_rows: the treatment of a message that cannot be read: ``"fail"``, ``"drop"`` or ``"tag"``.
        name: the stream's name in errors and in Spark's progress.

    Raises:
        DescriptionError: there is no such column, or messages cannot have it.

    Example:
        >>> text = '{"op": "u", "before": {"id": 1, "amount": 10}, "after": {"id": 1, "amount": 12}}'
        >>> messages = spark.createDataFrame([(text,)], "value STRING")
        >>> gpu_ops.debezium(messages, "id INT, amount INT").show()
        +--------+---+------+
        |row_kind| id|amount|
        +--------+---+------+
        |      -U|  1|    10|
        |      +U|  1|    12|
        +--------+---+------+
    """
    source = MessageSource(
        name, "debezium-json", schema, value=value, row_kind=row_kind, encoded=encoded, include=include,
        bad_rows=bad_rows, unavailable=unavailable, unavailable_value=unavailable_value,
    )  # fmt: skip
    return source.rows(df)


@dataclasses.dataclass(frozen=True)
class MessageSource:
    """The settings by which messages become rows; `read_kafka` and `debezium` explain each.

    Attributes:
        name: the name of the messages in errors and in Spark's progress.
        format: one of `gpu_ops.messages.rows.MESSAGE_FORMATS`.
        schema: the schema of the rows.
        value: the column of the messages with their values.
    """

    name: str
    format: str
    schema: st.StructType | str
    _: dataclasses.KW_ONLY
    key: str | Sequence[str] | None = None
    value: str = "value"
    row_kind: str = ROW_KIND_COLUMN
    encoded: Mapping[str, str] | None = None
    include: Sequence[str] = ()
    bad_rows: BadRows = "fail"
    schema_registry: str | Mapping[str, str] | None = dataclasses.field(default=None, repr=False)
    avro_schema: str | None = None
    unavailable: str | None = None
    unavailable_value: str = PLACEHOLDER

    def rows(self, messages: DataFrame) -> DataFrame:
        """Makes a DataFrame of the rows of some messages.

        Raises:
            DescriptionError: as `read_kafka` and `debezium`.
        """
        session = data_frame(messages, "what debezium() takes").sparkSession
        declared = applied_schema(self.schema, "schema")
        read = self._format(session, declared)
        if self.bad_rows not in _BAD_ROWS:
            raise DescriptionError(f"bad_rows={self.bad_rows!r}; it is one of {', '.join(_BAD_ROWS)}")
        if self.bad_rows == "tag" and not read.with_kinds:
            raise DescriptionError(
                "bad_rows='tag' marks messages by their row kind, and plain rows have none; use 'drop', or key="
            )
        beside = [_column(messages, column, "include") for column in self.include]
        fields = self._columns(read, declared, [messages.schema[column] for column in beside])
        bad = {"tag": BAD_MESSAGE, "drop": None if metrics_reported(session) else _COUNT}.get(self.bad_rows)
        if self.bad_rows == "drop" and bad is not None:
            bad = free_name(bad, [field.name for field in fields])
        if bad is not None:
            fields.append(st.StructField(bad, st.StringType() if self.bad_rows == "tag" else st.LongType()))
        _refuse_twice(fields)
        taken = {VALUE: _column(messages, self.value, "value")}
        taken |= {KEY: _column(messages, "key", "key")} if read.key else {}
        taken |= {column: column for column in (*POSITION, *beside) if column in messages.columns}
        sent = messages.select(
            *(
                # a join that takes the rows as they are looks this up
                named_column(column).alias(shown, **({"metadata": {ARROW: self.name}} if shown == VALUE else {}))
                for shown, column in taken.items()
            )
        )
        output = st.StructType([st.StructField(field.name, nullable(field.dataType)) for field in fields])
        make_importable(session)
        task = ReadMessages(read, self.name, arrow_schema(output, self.name), self.bad_rows, bad)
        rows = sent.mapInArrow(task, output)
        if bad is None or self.bad_rows == "tag":
            return rows
        counted = rows.observe(self.name, f.coalesce(f.sum(named_column(bad)), f.lit(0)).alias(_METRIC))
        return counted.where(named_column(bad).isNull()).drop(bad)

    def _format(self, session: SparkSession, declared: st.StructType) -> MessageFormat:
        keys = (self.key,) if isinstance(self.key, str) else tuple(self.key or ())
        registry = self.schema_registry
        return MessageFormat(
            self.format,
            arrow_schema(declared, self.name),
            tuple(field.name for field in declared.fields if not field.nullable),
            self.row_kind if self.format not in ("json", "avro") or keys else None,
            keys,
            tuple((self.encoded or {}).items()),
            arrow_zone(str(session.conf.get("spark.sql.session.timeZone"))),
            None if registry is None else SchemaRegistry.of(registry),
            self.avro_schema,
            self.unavailable_value,
            self.unavailable,
        )

    def _columns(
        self, read: MessageFormat, declared: st.StructType, beside: Sequence[st.StructField]
    ) -> list[st.StructField]:
        """The columns of the rows: row kinds, declared columns, names of missing values, columns of messages."""
        kinds = [st.StructField(self.row_kind, st.StringType())] if read.with_kinds else []
        missing = [self.unavailable] if self.unavailable is not None else []
        lists = [st.StructField(name, st.ArrayType(st.StringType())) for name in missing]
        return [*kinds, *declared.fields, *lists, *beside]


def _column(messages: DataFrame, name: str, what: str) -> str:
    column = spelling(messages, name)
    if column is None:
        raise DescriptionError(f"{what} names {name!r}; there are {', '.join(messages.columns)}")
    return column


def _refuse_twice(fields: Sequence[st.StructField]) -> None:
    names = [field.name.lower() for field in fields]
    twice = next((field.name for field in fields if names.count(field.name.lower()) > 1), None)
    if twice is not None:
        raise DescriptionError(f"there would be two columns {twice!r}; name another")

"""A stream of a log's messages as rows: Spark reads them and remembers which are done, tasks parse them with Arrow."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql import types as st

from gpu_ops.descriptions.changelog import ROW_KIND_COLUMN
from gpu_ops.descriptions.inputs import BadRows
from gpu_ops.errors import DescriptionError, NotBuiltError
from gpu_ops.files.casts import arrow_zone
from gpu_ops.messages.client import Client, configured
from gpu_ops.messages.rows import MessageFormat, MessageFormatName
from gpu_ops.messages.unavailable import PLACEHOLDER
from gpu_ops.query.catalyst import frame_of
from gpu_ops.spark.datatypes import arrow_schema, named_column, nullable, spelling
from gpu_ops.spark.driver.queries import metadata_of
from gpu_ops.spark.driver.workers import make_importable
from gpu_ops.spark.given import data_frame, refuse_connect
from gpu_ops.spark.metrics.metrics import free_name
from gpu_ops.spark.rapids import metrics_reported
from gpu_ops.spark.sources.messages import KEY, POSITION, VALUE, PackMessages, ReadMessages
from gpu_ops.spark.tasks.fetch import MESSAGE, Fetch
from gpu_ops.spark.tasks.functions import applied_schema
from gpu_ops.spark.tasks.packing import Packer
from gpu_ops.spark.tasks.rows import Taken

BAD_MESSAGE: Final = "bad_message"
"""The column of ``bad_rows="tag"``: where a message stands, why it cannot be read, and what it is."""

MESSAGES: Final = "gpu_ops.messages"
"""In the metadata of messages: how they are read. Only the function above them sees that column."""

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
    schema_registry: str | None = None,
    avro_schema: str | None = None,
    unavailable: str | None = None,
    unavailable_value: str = PLACEHOLDER,
    include: Sequence[str] = (),
    bad_rows: BadRows = "fail",
    name: str | None = None,
    options: Mapping[str, str] | None = None,
    client: Client = "spark",
) -> DataFrame:
    """A stream of the rows of a Kafka topic's messages, which tasks parse by Arrow, a batch at a time.

    Spark's own reader fetches the messages, or tasks do it themselves (``client="librdkafka"``). Either way a query's
    checkpoint holds the offsets. Rows come in the order of the messages of each partition of the topic, and a join
    keeps it.

    Args:
        spark: the session, with Spark's Kafka package.
        servers: ``kafka.bootstrap.servers``.
        topic: one, or several with commas between; None where ``options`` has ``subscribePattern`` or ``assign``.
        format: ``"json"`` or ``"avro"``: each value is a row. ``"debezium-json"`` or ``"debezium-avro"``: each is an
            envelope of Debezium's, see `debezium`.
        schema: of the rows: a schema or its DDL text. Other members of messages are left out, columns that they lack
            are null; ``NOT NULL`` holds for rows that are new, not for the old rows of updates and deletes.
        key: for rows, columns that the messages' keys are objects of, too: the topic is a table then, a value replaces
            the row of its key and a message without a value deletes it. `gpu_ops.stream` needs the same
            ``unique_key``. Without ``key`` messages without a value are left out.
        row_kind: what the first column, of row kinds, is called: there is one with Debezium's envelopes or a ``key``.
        encoded: how values are written where it is not as ISO 8601, numbers and text: by column ``ms``, ``us`` or
            ``ns`` (times as numbers since 1970), ``days`` (dates), ``base64`` (decimals as base64 of their unscaled
            bytes); bytes are ``base64``, ``base64-url-safe`` or ``hex``, and without a word base64 where that is sure.
            A schema that a message brings says it itself.
        schema_registry: for Avro, the address of a schema registry with Confluent's interface, as the tasks reach it.
            Needs fastavro (``pip install fastavro``), which reads messages one by one.
        avro_schema: for Avro without a registry, whose messages begin with no header: their schema, as JSON text.
        unavailable: the name of a column more, of lists: a large value that did not change is not in Debezium's message
            (Postgres without ``REPLICA IDENTITY FULL``), its column is null then and named here. `latest` takes such a
            column, and keeps the value from before. Without it such a message cannot be read.
        unavailable_value: what is in place of these values, Debezium's ``unavailable.value.placeholder``.
        include: columns of Spark's reader behind the rows: ``timestamp``, ``offset`` and so on. They are the message's:
            a row that is taken back has other ones than when it came, so changes with them need a ``unique_key``.
        bad_rows: what becomes of a message that cannot be read: ``"fail"`` (an error that names topic, partition and
            offset), ``"drop"`` (left out and counted, in ``observedMetrics`` of Spark's progress under ``name``) or
            ``"tag"`` (a row with the row kind ``bad`` and a text in the last column, ``bad_message``: give `stream` a
            ``bad_rows``, too).
        name: what errors and Spark's progress call it; by default the topic.
        options: of Spark's Kafka reader, such as ``startingOffsets``, ``maxOffsetsPerTrigger``,
            ``kafka.security.protocol``.
        client: ``"spark"``, or ``"librdkafka"``: messages never come to the JVM. Needs Spark 4.2, the package
            ``confluent-kafka`` here and where tasks run, and no package of Spark's. Of Spark's options there are
            ``startingOffsets``, ``maxOffsetsPerTrigger``, ``minPartitions``, ``failOnDataLoss`` and
            ``subscribePattern``, and what has ``kafka.`` before it is a property of librdkafka's. ``include`` can be
            ``key``, ``topic``, ``partition``, ``offset`` and ``timestamp``.

    Returns:
        A streaming DataFrame.

    Raises:
        DescriptionError: no such format, option or column, or a column that messages do not have.
        NotBuiltError: librdkafka is not installed, or Spark is older than 4.2.
    """
    refuse_connect(spark)
    given = dict(options or {})
    if client == "librdkafka":
        return _fetched(
            spark, servers, topic, given, format, schema, name=name, key=key, row_kind=row_kind, encoded=encoded,
            include=include, bad_rows=bad_rows, schema_registry=schema_registry, avro_schema=avro_schema,
            unavailable=unavailable, unavailable_value=unavailable_value,
        )  # fmt: skip
    if client != "spark":
        raise DescriptionError(f"client={client!r}; there are 'spark' and 'librdkafka'")
    if (topic is None) == all(option not in given for option in _TOPICS):
        raise DescriptionError("read_kafka() takes a topic, or options with subscribePattern or assign")
    stream = spark.readStream.format("kafka").options(**given).option("kafka.bootstrap.servers", servers)
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
    return rows_of(
        messages, format, schema, name=label, key=key, row_kind=row_kind, encoded=encoded, include=include,
        bad_rows=bad_rows, schema_registry=schema_registry, avro_schema=avro_schema, unavailable=unavailable,
        unavailable_value=unavailable_value,
    )  # fmt: skip


def _fetched(
    spark: SparkSession, servers: str, topic: str | None, options: Mapping[str, str], *args: Any, **how: Any
) -> DataFrame:
    """`read_kafka` with librdkafka; the other arguments are those of `rows_of`."""
    try:
        from gpu_ops.spark.sources import ranges  # noqa: PLC0415 - it has what older ones of Spark do not
    except ImportError:
        raise NotBuiltError(f"client='librdkafka' needs Spark 4.2, and this is {spark.version}") from None
    if (topic is None) == ("subscribePattern" not in options):
        raise DescriptionError("read_kafka() takes a topic, or options with subscribePattern")
    config = configured(servers, options, sends=False, besides=ranges.OPTIONS)
    lost = options.get("failOnDataLoss", "true").lower() == "false"
    how["name"] = how["name"] or topic or options["subscribePattern"]
    make_importable(spark)
    found = ranges.ranges(spark, topic, config, options, lost=lost)
    return rows_of(found, *args, **how, fetch=Fetch(config, (), lost))


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
    """The changes that Debezium's envelopes (JSON) say, as rows with row kinds, for `gpu_ops.stream` and joins.

    ``op`` ``c`` and ``r`` are ``+I``; ``u`` is ``-U`` and ``+U``, or, where there is no ``before``, the row kind ``u``,
    an update that needs ``unique_key`` in `gpu_ops.stream`; ``d`` is ``-D``. Messages without a value and those of
    ``op`` ``m`` say nothing. A truncate (``t``) cannot be read. Envelopes may come with their schema (``{"schema":
    ..., "payload": ...}``), which then says how times and decimals are written.

    Args:
        df: messages, a stream or not: what Spark's Kafka reader gives, or anything with a column of bytes or text.
        schema: as in `read_kafka`, as are all that follow.
        value: the column with the envelopes.
        row_kind: what the column of row kinds is called.
        encoded: how values are written.
        unavailable: a column for values that are not in the message.
        unavailable_value: what stands for them.
        include: columns of ``df`` behind the rows.
        bad_rows: what becomes of a message that cannot be read.
        name: what errors and Spark's progress call it.

    Raises:
        DescriptionError: no such column, or one that messages do not have.
    """
    return rows_of(
        df, "debezium-json", schema, name=name, value=value, row_kind=row_kind, encoded=encoded, include=include,
        bad_rows=bad_rows, unavailable=unavailable, unavailable_value=unavailable_value,
    )  # fmt: skip


def rows_of(
    messages: DataFrame,
    format: str,  # noqa: A002
    schema: st.StructType | str,
    *,
    name: str,
    key: str | Sequence[str] | None = None,
    value: str = "value",
    row_kind: str = ROW_KIND_COLUMN,
    encoded: Mapping[str, str] | None = None,
    include: Sequence[str] = (),
    bad_rows: BadRows = "fail",
    schema_registry: str | None = None,
    avro_schema: str | None = None,
    unavailable: str | None = None,
    unavailable_value: str = PLACEHOLDER,
    fetch: Fetch | None = None,
) -> DataFrame:
    """The rows of messages, or of ranges of them, which tasks ``fetch``; as in `read_kafka` and `debezium`."""
    session = data_frame(messages, "what debezium() takes").sparkSession
    declared = applied_schema(schema, "schema")
    keys = (key,) if isinstance(key, str) else tuple(key or ())
    kinds = row_kind if format not in ("json", "avro") or keys else None
    read = MessageFormat(
        format,
        arrow_schema(declared, name),
        tuple(field.name for field in declared.fields if not field.nullable),
        kinds,
        keys,
        tuple((encoded or {}).items()),
        arrow_zone(str(session.conf.get("spark.sql.session.timeZone"))),
        schema_registry,
        avro_schema,
        unavailable_value,
        unavailable,
    )
    if bad_rows not in _BAD_ROWS:
        raise DescriptionError(f"bad_rows={bad_rows!r}; it is one of {', '.join(_BAD_ROWS)}")
    if bad_rows == "tag" and kinds is None:
        raise DescriptionError(
            "bad_rows='tag' marks messages by their row kind, and plain rows have none; use 'drop', or key="
        )
    fields = [*([st.StructField(row_kind, st.StringType())] if kinds else []), *declared.fields]
    if unavailable is not None:
        fields.append(st.StructField(unavailable, st.ArrayType(st.StringType())))
    columns = messages if fetch is None else session.createDataFrame([], MESSAGE)
    beside = [_column(columns, column, "include") for column in include]
    fields += [columns.schema[column] for column in beside]
    bad = {"tag": BAD_MESSAGE, "drop": None if metrics_reported(session) else _COUNT}.get(bad_rows)
    if bad_rows == "drop" and bad is not None:
        bad = free_name(bad, [field.name for field in fields])
    if bad is not None:
        fields.append(st.StructField(bad, st.StringType() if bad_rows == "tag" else st.LongType()))
    names = [field.name.lower() for field in fields]
    twice = next((field.name for field in fields if names.count(field.name.lower()) > 1), None)
    if twice is not None:
        raise DescriptionError(f"there would be two columns {twice!r}; name another")
    taken = {VALUE: _column(columns, value, "value")}
    taken |= {KEY: _column(columns, "key", "key")} if keys else {}
    taken |= {column: column for column in (*POSITION, *beside) if column in columns.columns}
    if fetch is not None:
        fetch = fetch._replace(columns=tuple((column, shown) for shown, column in taken.items()))
        taken = dict(zip(messages.columns, messages.columns, strict=True))
    # a join that takes the rows as they are looks this up
    how = {name: value for name, value in vars(read).items() if name != "schema"}
    how |= {"location": name, "bad_rows": bad_rows, "bad": bad, "columns": len(declared.fields), "fetch": fetch}
    (shown, first), *others = taken.items()
    sent = messages.select(
        named_column(first).alias(shown, metadata={MESSAGES: json.dumps(how)}),
        *(named_column(column).alias(shown) for shown, column in others),
    )
    output = st.StructType([st.StructField(field.name, nullable(field.dataType)) for field in fields])
    make_importable(session)
    rows = sent.mapInArrow(ReadMessages(read, name, arrow_schema(output, name), bad_rows, bad, fetch=fetch), output)
    if bad is None or bad_rows == "tag":
        return rows
    counted = rows.observe(name, f.coalesce(f.sum(named_column(bad)), f.lit(0)).alias(_METRIC))
    return counted.where(named_column(bad).isNull()).drop(bad)


@dataclasses.dataclass(frozen=True)
class Messages:
    """Messages whose rows a DataFrame is.

    Attributes:
        messages: as the function that reads them is given them.
        read: that function.
        name: as in `read_kafka`.
        format: likewise.
    """

    messages: DataFrame
    read: ReadMessages
    name: str
    format: str

    def __str__(self) -> str:
        return f"messages of {self.name} ({self.format})"

    @property
    def schema(self) -> pa.Schema:
        """Of the rows."""
        return self.read.output

    def packed(self, packer: Packer, taken: Taken, packed_type: st.StructType) -> DataFrame:
        """The rows as they travel; see `gpu_ops.spark.plan.union_layout`."""
        return self.messages.mapInArrow(PackMessages(packer, self.read, taken), packed_type)


def source(node: Any, session: SparkSession) -> Messages | None:
    """The messages that a node of a plan reads, or None."""
    below = node.children().head()
    how = metadata_of(below, MESSAGES)
    if how is None:
        return None
    given: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in json.loads(how).items()}
    location, bad_rows, bad, columns = (given.pop(name) for name in ("location", "bad_rows", "bad", "columns"))
    fetch = given.pop("fetch")
    if fetch is not None:
        config, wanted, lost = fetch
        fetch = Fetch(tuple(map(tuple, config)), tuple(map(tuple, wanted)), lost)
    output = arrow_schema(st._parse_datatype_json_string(node.schema().json()), location)
    first = 0 if given["row_kind"] is None else 1
    given["encoded"] = tuple(map(tuple, given["encoded"]))
    read = MessageFormat(schema=pa.schema(list(output)[first : first + columns]), **given)
    read_messages = ReadMessages(read, location, output, bad_rows, bad, fetch=fetch)
    return Messages(frame_of(session, below), read_messages, location, read.name)


def _column(messages: DataFrame, name: str, what: str) -> str:
    found = spelling(messages, name)
    if found is None:
        raise DescriptionError(f"{what} names {name!r}; there are {', '.join(messages.columns)}")
    return found

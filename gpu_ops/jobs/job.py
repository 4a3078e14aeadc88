"""A job as it will be run: checked, complete, without its text. `load` reads one from a file."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import pyarrow as pa

from gpu_ops.backends import Backend
from gpu_ops.descriptions.description import Emit
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.times import parse_duration
from gpu_ops.errors import DescriptionError
from gpu_ops.jobs import datagen
from gpu_ops.jobs.datagen import Generated
from gpu_ops.jobs.flink_options import own_options, own_settings
from gpu_ops.jobs.settings import DURATION, JOB, OF_SOURCE, of_job, of_table, value_of
from gpu_ops.jobs.sql_file import JobQuery, JobText, read_sql
from gpu_ops.jobs.sql_tables import DerivedColumn, Setting, TableText
from gpu_ops.jobs.sql_text import Note, Text, Word
from gpu_ops.messages.encodings import PLACEHOLDER
from gpu_ops.messages.rows import MessageFormatName
from gpu_ops.state.address import StateAddress

_SECOND: Final = 1000


@dataclasses.dataclass(frozen=True)
class JobSource(Input):
    """An input of the query; its schema is known when it is opened.

    Attributes:
        name: how the query calls it.
        connector: see `gpu_ops.jobs.settings.SOURCES`.
        columns: names and Spark types; None takes them from the data.
        options: for Spark's reader, by Spark's names.
        at: where it is written down, an offset in the file.
        format: of the values in a Kafka topic: one of `gpu_ops.messages.rows.MESSAGE_FORMATS`.
        encoded: how values of those messages are written, ``column=encoding`` each, see `gpu_ops.read_kafka`.
        schema_registry: where the schemas of messages in Avro are, or None.
        unavailable: what becomes of Debezium's changes without a large value that did not change: fail, or keep for the
            value from before.
        unavailable_value: what Debezium has in its place.
        reader: of files: spark, or arrow for `gpu_ops.read_files`.
        scan: continuous, or once for a table as it is before the first micro-batch.
        refresh_ms: milliseconds after which such a table is read again, or None.
        generated: what its rows are where nothing is read, or None.
        by_key: of a Kafka topic: whether messages are rows by their keys.
        key_format: of such keys: json for objects, raw for the text of a single column.
        derived: columns that are not in the data.
    """

    schema: pa.Schema = dataclasses.field(init=False, repr=False, compare=False)
    _: dataclasses.KW_ONLY
    connector: str
    columns: tuple[tuple[str, str], ...] | None
    options: Mapping[str, str]
    at: int
    format: MessageFormatName = "json"
    encoded: tuple[str, ...] = ()
    schema_registry: str | None = None
    unavailable: str = "fail"
    unavailable_value: str = PLACEHOLDER
    reader: str = "spark"
    scan: str = "continuous"
    refresh_ms: int | None = None
    generated: Generated | None = None
    by_key: bool = False
    key_format: str = "json"
    derived: tuple[DerivedColumn, ...] = ()

    def __post_init__(self) -> None:
        """Checks what is said of columns once they are known."""

    @property
    def ends(self) -> bool:
        """True if the source has an end."""
        if self.generated is not None:
            return self.generated.number_of_rows is not None
        return self.is_table

    @property
    def comes_in_any_order(self) -> bool:
        """True if changes are read whose order Spark's reader of files may change, and nothing else says it."""
        changes = self.row_kind is not None or self.unique_key is not None
        by_spark = self.connector in ("parquet", "json", "csv") and self.reader == "spark" and not self.is_table
        return changes and by_spark and self.sequence_by is None and self.options.get("maxFilesPerTrigger") != "1"

    @property
    def is_table(self) -> bool:
        """True if the source is read once, and never again."""
        return self.scan == "once" and self.refresh_ms is None


@dataclasses.dataclass(frozen=True)
class Sink:
    """The sink of a job, which its changelog goes to.

    Attributes:
        connector: see `gpu_ops.jobs.settings.SINKS`.
        columns: names and Spark types, in the order of the query's; None takes the query's.
        options: for Spark's writer, by Spark's names.
        at: where it is written down, an offset in the file.
        row_kind: what the column of row kinds is called.
        key: columns that make a Kafka message's key.
        table: of the memory sink: the table's name.
        format: of a Kafka message.
        primary_key: of a view; None for the one that is known of the changelog.
        writer: of files: spark, or arrow for `gpu_ops.write_files`.
        partition_by: columns that become folders, like what follows for `gpu_ops.write_files` alone.
        file_bytes: of rows in memory that a file has about, or None for what it takes by itself.
    """

    connector: str
    columns: tuple[tuple[str, str], ...] | None
    options: Mapping[str, str]
    at: int
    row_kind: str = "row_kind"
    key: tuple[str, ...] = ()
    table: str = ""
    format: str = "json"
    primary_key: tuple[str, ...] | None = None
    writer: str = "spark"
    partition_by: tuple[str, ...] = ()
    file_bytes: int | None = None

    @property
    def by_tasks(self) -> bool:
        """True if the tasks that make the rows write the files, see `gpu_ops.write_files`."""
        return self.connector == "arrow" or self.writer == "arrow"

    @property
    def is_view(self) -> bool:
        """True if the sink is given the table that the changelog makes, see `gpu_ops.sinks`."""
        if self.connector == "delta":
            return self.primary_key is not None
        return self.connector in ("iceberg", "jdbc", "upsert-kafka") or self.format == "debezium-json"


class NamedQuery(NamedTuple):
    """A view, or a query whose changelog goes to a sink.

    Attributes:
        name: the name of the view or sink.
        query: one SELECT.
        sink: where the changelog goes; None for a view that is only read.
    """

    name: str
    query: JobQuery
    sink: Sink | None = None


@dataclasses.dataclass(frozen=True)
class Job:
    """A job: sources, queries, sinks and settings.

    Attributes:
        file: its text, for errors.
        sources: its inputs.
        views: queries that those behind them read.
        inserts: queries whose changelogs go to sinks; of a materialized view the query is the view's.
        name: of the query and its metrics.
        spark: settings for the Spark session.
        state: the folder of the join's state, or None.
        checkpoint: Spark's checkpoint folder, or None.
        emit: as in `gpu_ops.sql`, like those that follow.
        partitions: how many, or None.
        backend: auto, cpu or gpu.
        multi_way: auto or never.
        backlog: whether runs that end by themselves (``--once``) take a history in silently, until another run.
        trigger: milliseconds between the beginnings of micro-batches, or None for as soon as there is data (of
            generated rows, a second).
        master: Spark's, or None for the one that the session has.
        notes: what its file says that has no effect here.
    """

    file: Text
    sources: tuple[JobSource, ...]
    views: tuple[NamedQuery, ...]
    inserts: tuple[NamedQuery, ...]
    name: str
    spark: Mapping[str, str]
    state: StateAddress | None = None
    checkpoint: str | None = None
    emit: Emit = "per_batch"
    partitions: int | None = None
    backend: Backend = "auto"
    multi_way: Literal["auto", "never"] = "auto"
    backlog: bool = False
    trigger: int | None = None
    master: str | None = None
    notes: tuple[Note, ...] = ()

    @property
    def sink(self) -> Sink:
        """The sink of the first query that has one."""
        sink = self.inserts[0].sink
        assert sink is not None
        return sink

    @property
    def query(self) -> JobQuery:
        """The first query that has a sink."""
        return self.inserts[0].query

    @property
    def sinks(self) -> tuple[Sink, ...]:
        """The sinks of all queries that have one."""
        return tuple(one.sink for one in self.inserts if one.sink is not None)

    def into(self, sink: Sink) -> Job:
        """The job with another sink, of one that has a single one."""
        return dataclasses.replace(self, inserts=(self.inserts[0]._replace(sink=sink),))

    @property
    def every_ms(self) -> int | None:
        """Milliseconds between the beginnings of micro-batches, or None for as soon as there is data."""
        generated = any(source.generated is not None for source in self.sources)
        return _SECOND if self.trigger is None and generated else self.trigger

    @property
    def ends(self) -> bool:
        """True if all inputs have an end, as generated ones may and tables that are read once."""
        return all(source.ends for source in self.sources)

    @property
    def is_bounded(self) -> bool:
        """True if all sources are tables that are read once: the job is done without a stream."""
        return all(source.is_table for source in self.sources)


def load(path: str | Path) -> Job:
    """Reads and checks a job.

    Args:
        path: of a file, ``.sql``.

    Raises:
        DescriptionError: there is no such file, or it is no job; a `JobError` names the position.
    """
    path = Path(path)
    if path.suffix in (".yaml", ".yml"):
        raise DescriptionError(f"{path}: a job is written in SQL now, in a file called .sql; docs/jobs.md shows one")
    if path.suffix != ".sql":
        raise DescriptionError(f"{path}: a job is a file called .sql")
    try:
        file = Text(path, path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise DescriptionError(f"{path}: cannot be read: {error}") from error
    return build(read_sql(file))


def build(written: JobText) -> Job:
    """Checks and makes a job of what its file says.

    Raises:
        JobError: something in it cannot be; names the position.
    """
    file, notes = written.file, list(written.notes)
    own, of_sources = own_settings(file, written.settings, notes)
    settings = of_job(file, own)
    sources = [own_options(file, _with(table, of_sources), "source", notes) for table in written.sources]
    sinks = [own_options(file, sink, "sink", notes) for sink, _ in written.inserts]
    for table in sources:
        _check_fresh(file, table, [query.text for _, query in (*written.views, *written.inserts)])
    return Job(
        file=file,
        sources=tuple(_source(file, table) for table in sources),
        views=tuple(NamedQuery(name.text, query) for name, query in written.views),
        inserts=tuple(
            NamedQuery(sink.name.text, query, _sink(file, sink))
            for sink, (_, query) in zip(sinks, written.inserts, strict=True)
        ),
        spark=settings.spark,
        notes=tuple(notes),
        **{"name": file.path.stem, **settings.values},
    )


def _with(table: TableText, settings: Mapping[str, Setting]) -> TableText:
    """A source with what the job says for all of them, as far as it says nothing itself."""
    names = {setting.name.text.lower().replace("-", "_") for setting in table.settings}
    connector = next((x.value.text for x in table.settings if x.name.text.lower() == "connector"), "")
    added = [
        setting
        for name, setting in settings.items()
        if name not in names
        and not (name == "idle_timeout" and table.watermark is None)
        and not (connector == "jdbc" or "scan" in names)  # a table that is read once stays
    ]
    return dataclasses.replace(table, settings=(*table.settings, *added))


def _check_fresh(file: Text, table: TableText, queries: Sequence[str]) -> None:
    """Refuses a database's table that is looked up and would never be read again, as Flink's is each time."""
    given = {setting.name.text: setting for setting in table.settings}
    if "connector" not in given or given["connector"].value.text.lower() != "jdbc" or "refresh" in given:
        return
    looked_up = rf"(?is)\bJOIN\s+`?{re.escape(table.name.text)}`?\s+FOR\s+SYSTEM_TIME"
    by_flink = "scan" in given and given["scan"].value.at == given["connector"].value.at
    if by_flink and any(re.search(looked_up, query) for query in queries):
        raise file.error(
            f"{table.name.text} is looked up: say how often it is read again, 'refresh' = '10 seconds', or "
            "'scan' = 'once' for never",
            table.name.at,
        )


def _source(file: Text, table: TableText) -> JobSource:
    connector, settings = of_table(file, table, "source")
    columns, values, at = _columns(file, table), settings.values, settings.at
    if connector == "rate" and table.columns is not None:
        raise file.error("rate has its own columns, timestamp and value", table.columns[0][0].at)
    if "kafka" in connector and columns is None:
        raise file.error("a Kafka topic has no columns of its own: name those of its values", table.name.at)
    key, watermark = table.primary_key, table.watermark
    named = [*(key or ()), *(watermark or ())[:1]]
    if "sequence_by" in values:
        named.append(Word(values["sequence_by"], at["sequence_by"]))
    derived = _derived(file, table, connector, values)
    for column in named:
        both = (*(columns or ()), *((one.name.text, one.kind) for one in derived)) if columns is not None else None
        _check_known(file, column, connector, columns if column in (key or ()) else both)
    row_kind = values.get("row_kind")
    if row_kind is not None and row_kind.lower() in {name.text.lower() for name in key or ()}:
        raise file.error(f"the column of row kinds, {row_kind!r}, is no part of the primary key", at["row_kind"])
    if "idle_timeout" in values and watermark is None:
        raise file.error("idle_timeout needs a watermark", at["idle_timeout"])
    if values.get("unavailable") == "keep" and key is None:
        problem = "the value from before is that of the row of the same key: give the PRIMARY KEY"
        raise file.error(problem, at["unavailable"])
    once, at_table = values.get("scan") == "once", table.name.at
    if "refresh" in values and not once:
        raise file.error("refresh is for a table that is read before the stream begins: 'scan' = 'once'", at["refresh"])
    if once and connector in ("iceberg", "kafka", "upsert-kafka", "rate"):
        raise file.error(f"'scan' = 'once' is for tables of a database and files, {connector} has no end", at["scan"])
    if connector == "jdbc" and not once:
        raise file.error(
            "a table of a database is no stream: set 'scan' = 'once', and 'refresh' to see changes", at_table
        )
    by_key = connector == "upsert-kafka"
    if by_key and key is None:
        raise file.error("upsert-kafka has a PRIMARY KEY: the columns of its messages' keys", at_table)
    if values.get("key_format") == "raw" and [dict(columns or ()).get(name.text) for name in key or ()] != ["STRING"]:
        raise file.error("a raw key is the text of one column, a STRING", at["key_format"])
    if connector == "datagen":
        values["generated"] = datagen.read(file, table, values, at)
    if watermark is not None:
        values["event_time"], values["delay_ms"] = watermark[0].text, _delay(file, watermark[1])
    return JobSource(
        name=table.name.text,
        connector="kafka" if by_key else connector,
        by_key=by_key,
        derived=derived,
        columns=columns,
        options={} if connector == "datagen" else settings.spark,
        at=table.name.at,
        unique_key=None if key is None else tuple(name.text for name in key),
        **{f"{name}_ms" if OF_SOURCE.get(name) == DURATION else name: value for name, value in values.items()},
    )


METADATA: Final[Mapping[str, str]] = {
    "topic": "topic",
    "partition": "partition",
    "offset": "offset",
    "timestamp": "timestamp",
    "timestamp-type": (
        "CASE timestampType WHEN 0 THEN 'CreateTime' WHEN 1 THEN 'LogAppendTime' ELSE 'NoTimestampType' END"
    ),
    "headers": (  # of several of one name the last
        "map_from_entries(filter(headers, (h, i) -> NOT exists("
        "slice(headers, i + 2, size(headers)), later -> later.key = h.key)))"
    ),
}
"""What a Kafka message has beside its key and value, by Flink's names, of the columns of Spark's reader."""


def _derived(file: Text, table: TableText, connector: str, values: Mapping[str, Any]) -> tuple[DerivedColumn, ...]:
    """The columns of a source that are not in its data; ``PROCTIME()`` is none.

    Raises:
        JobError: metadata that there are none of, or that a row that is taken back does not have.
    """
    changes = "row_kind" in values or str(values.get("format", "json")).startswith("debezium")
    for column in table.derived:
        if column.metadata is None:
            continue
        if "kafka" not in connector:
            raise file.error(
                f"{connector} has no metadata; Kafka's messages have {', '.join(METADATA)}", column.name.at
            )
        if column.metadata.text.lower() not in METADATA:
            problem = f"there is no metadata {column.metadata.text!r}; there are {', '.join(METADATA)}"
            raise file.error(problem, column.metadata.at)
        if changes and table.primary_key is None:
            problem = "a row that is taken back came in another message: metadata of changes need a PRIMARY KEY"
            raise file.error(problem, column.name.at)
    derived = tuple(column for column in table.derived if not column.is_clock)
    if derived and connector == "rate":
        raise file.error("rate has its own columns, timestamp and value", derived[0].name.at)
    return derived


_OF_WRITE_FILES: Final = ("path", "compression", "writer", "partition_by", "file_bytes", "row_kind")


def _sink(file: Text, table: TableText) -> Sink:
    connector, settings = of_table(file, table, "sink")
    if table.watermark is not None:
        raise file.error("a sink has no watermark", table.watermark[0].at)
    for derived in table.derived:
        if derived.metadata is not None and not derived.virtual:
            problem = "a sink has no metadata: declare the column METADATA VIRTUAL, or leave METADATA out"
            raise file.error(problem, derived.name.at)
    if table.partitioned:
        if connector not in ("parquet", "arrow", "delta", "json", "csv") or table.primary_key is not None:
            problem = f"{connector} has no PARTITIONED BY here: leave it out, or write a changelog in files"
            raise file.error(problem, table.partitioned[0].at)
        settings.values.setdefault("partition_by", tuple(column.text for column in table.partitioned))
    columns, key = _columns(file, table), table.primary_key
    sink = Sink(
        connector=connector,
        columns=columns,
        options=settings.spark,
        at=table.name.at,
        primary_key=None if key is None else tuple(name.text for name in key),
        **settings.values,
    )
    if key is not None and not sink.is_view:
        problem = f"{connector} takes the changelog as it is: leave the PRIMARY KEY out. With one there are "
        problem += "delta, iceberg, jdbc, upsert-kafka, and kafka with 'format' = 'debezium-json'"
        raise file.error(problem, key[0].at)
    for name, at in settings.at.items() if sink.is_view else ():
        if name in ("row_kind", "key", "client") or (connector == "delta" and name != "path"):
            raise file.error(f"a view has no option {name!r}", at)
    for name, at in settings.at.items() if not sink.is_view else ():
        if sink.by_tasks and name not in _OF_WRITE_FILES:
            raise file.error(f"files written by Arrow have no option {name!r}", at)
        if not sink.by_tasks and name in ("partition_by", "file_bytes"):
            raise file.error(f"{name} is for files that Arrow writes: set 'writer' = 'arrow'", at)
    for column in key or ():
        _check_known(file, column, "", columns)
    return sink


def _columns(file: Text, table: TableText) -> tuple[tuple[str, str], ...] | None:
    """The declared columns; a name may be there once."""
    seen: set[str] = set()
    for name in (*(name for name, _ in table.columns or ()), *(column.name for column in table.derived)):
        if name.text.lower() in seen:
            raise file.error(f"a second column {name.text!r}", name.at)
        seen.add(name.text.lower())
    return None if table.columns is None else tuple((name.text, kind) for name, kind in table.columns)


def _check_known(file: Text, column: Word, connector: str, columns: tuple[tuple[str, str], ...] | None) -> None:
    """Refuses a column that is not there; where only the data knows its columns, anything passes."""
    names = ["timestamp", "value"] if connector == "rate" else [name for name, _ in columns or ()]
    if not names:
        return
    if connector == "delta":
        names += ["_change_type", "_commit_version", "_commit_timestamp"]
    if column.text.lower() not in {name.lower() for name in names}:
        raise file.error(f"there is no column {column.text!r}; there are {', '.join(names)}", column.at)


def _delay(file: Text, delay: Word) -> int:
    """Reads a duration that may be zero."""
    if delay.text.split()[:1] == ["0"]:
        return 0
    with file.errors_at(delay.at):
        return parse_duration(delay.text)


def amended(job: Job, values: Mapping[str, str], packages: str | None, conf: Sequence[str]) -> Job:
    """A job with the settings of the command line.

    Args:
        job: as its file has it.
        values: settings that replace its own; folders as seen from the working folder.
        packages: Maven packages for Spark, comma-separated, besides its own.
        conf: Spark settings, ``name=value``.

    Raises:
        DescriptionError: one of them cannot be.
    """
    spark = dict(job.spark)
    for setting in conf:
        name, equals, value = setting.partition("=")
        if not equals or not name.startswith("spark."):
            raise DescriptionError(f"--conf {setting}: a Spark setting is written spark.name=value")
        spark[name] = value
    if packages is not None:
        before = spark.get("spark.jars.packages")
        spark["spark.jars.packages"] = packages if before is None else f"{before},{packages}"
    settings = {name: value_of(name, JOB[name], text, Path.cwd()) for name, text in values.items()}
    return dataclasses.replace(job, spark=spark, **settings)

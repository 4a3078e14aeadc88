"""A job as it will be run: checked, complete, without its text. `load` reads one from a file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal, get_args

from gpu_ops.backends import Backend
from gpu_ops.descriptions.description import Emit
from gpu_ops.descriptions.inputs import BadRows, Updates, parse_duration
from gpu_ops.errors import DescriptionError
from gpu_ops.jobs.settings import Settings, located
from gpu_ops.jobs.text import JobText, QueryText, TableText, Text, Word
from gpu_ops.state.address import StateAddress


@dataclasses.dataclass(frozen=True)
class Watermark:
    """An event-time column, and by how many milliseconds its rows may come late."""

    column: str
    delay_ms: int


@dataclasses.dataclass(frozen=True)
class Source:
    """An input of the query.

    Attributes:
        name: how the query calls it.
        connector: see `gpu_ops.jobs.connectors.SOURCES`.
        columns: names and Spark types; None takes them from the data.
        options: for Spark's reader, by Spark's names.
        format: of the values in a Kafka topic: json or debezium-json.
        reader: of files: spark, or arrow for `gpu_ops.read_files`.
        at: where it is written down, an offset in the file.
        unique_key: as in `gpu_ops.stream`, like those that follow.
        row_kind: the column of row kinds, or None.
        updates: upsert or retract.
        ttl_ms: how long after its last write a row is kept, or None.
        sequence_by: the column that orders changes, or None.
        bad_rows: fail or drop.
        watermark: its event time, or None.
        idle_timeout_ms: after this long without rows it holds the watermark back no longer, or None.
    """

    name: str
    connector: str
    columns: tuple[tuple[str, str], ...] | None
    options: Mapping[str, str]
    format: str
    at: int
    unique_key: tuple[str, ...] | None = None
    row_kind: str | None = None
    updates: Updates = "upsert"
    ttl_ms: int | None = None
    sequence_by: str | None = None
    bad_rows: BadRows = "fail"
    watermark: Watermark | None = None
    idle_timeout_ms: int | None = None
    reader: str = "spark"


@dataclasses.dataclass(frozen=True)
class Sink:
    """Where the changelog goes.

    Attributes:
        connector: see `gpu_ops.jobs.connectors.SINKS`.
        columns: names and Spark types, in the order of the query's; None takes the query's.
        options: for Spark's writer, by Spark's names.
        row_kind: what the column of row kinds is called.
        key: columns that make a Kafka message's key.
        table: of the memory sink: the table's name.
        at: where it is written down, an offset in the file.
    """

    connector: str
    columns: tuple[tuple[str, str], ...] | None
    options: Mapping[str, str]
    row_kind: str
    key: tuple[str, ...]
    table: str
    at: int


@dataclasses.dataclass(frozen=True)
class Job:
    """A job.

    Attributes:
        file: its text, for errors.
        sources: its inputs.
        sink: where the changelog goes.
        query: one SELECT.
        state: the folder of the join's state, or None.
        checkpoint: Spark's checkpoint folder, or None.
        emit: as in `gpu_ops.sql`, like those that follow.
        partitions: how many, or None.
        backend: auto, cpu or gpu.
        name: of the query and its metrics.
        multi_way: auto or never.
        trigger: how often a micro-batch begins, such as ``1 second``, or None for as soon as there is data.
        master: Spark's, or None for the one that the session has.
        spark: settings for the Spark session.
    """

    file: Text
    sources: tuple[Source, ...]
    sink: Sink
    query: QueryText
    state: StateAddress | None
    checkpoint: str | None
    emit: Emit
    partitions: int | None
    backend: Backend
    name: str
    multi_way: Literal["auto", "never"]
    trigger: str | None
    master: str | None
    spark: Mapping[str, str]


def load(path: str | Path) -> Job:
    """Reads and checks a job.

    Args:
        path: of a file, ``.sql``.

    Raises:
        DescriptionError: there is no such file, or it is no job; a `JobError` says where.
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
    from gpu_ops.jobs.sql_file import read_sql  # noqa: PLC0415 - it makes what is here

    return build(read_sql(file))


def build(said: JobText) -> Job:
    """Checks a job.

    Raises:
        JobError: something in it cannot be; says where.
    """
    settings = Settings.of_job(said.file, said.settings)
    folder = said.file.path.resolve().parent
    state, checkpoint = settings.take("state"), settings.take("checkpoint")
    trigger = settings.take("trigger")
    if trigger is not None:
        _duration(said.file, trigger)
    job = Job(
        file=said.file,
        sources=tuple(_source(said.file, table) for table in said.sources),
        sink=_sink(said.file, said.sink),
        query=said.query,
        state=None if state is None else StateAddress.of(state.text, seen_from=folder),
        checkpoint=None if checkpoint is None else located(checkpoint.text, folder),
        emit=settings.one_of("emit", get_args(Emit), "per_batch"),
        partitions=settings.count("partitions"),
        backend=settings.one_of("backend", get_args(Backend), "auto"),
        name=settings.text("name") or said.file.path.stem,
        multi_way=settings.one_of("multi_way", ("auto", "never"), "auto"),
        trigger=None if trigger is None else trigger.text,
        master=settings.text("master"),
        spark=settings.spark(),
    )
    settings.end()
    return job


def _source(file: Text, table: TableText) -> Source:
    settings = Settings.of_source(file, table)
    names = None if table.columns is None else [column.name.text for column in table.columns]
    row_kind = settings.take("row_kind")
    sequence_by = settings.take("sequence_by")
    if table.columns is not None:
        _no_twin(file, table)
        if settings.connector == "rate":
            file.fail("rate has its own columns, timestamp and value", table.columns[0].name.at)
    known = _with_own_columns(settings.connector, names)
    for column in (*(table.primary_key or ()), *(table.watermark or ())[:1], *([sequence_by] if sequence_by else ())):
        _in(file, column, known)
    if row_kind is not None and row_kind.text.lower() in {k.text.lower() for k in table.primary_key or ()}:
        file.fail(f"the column of row kinds, {row_kind.text!r}, is no part of the primary key", row_kind.at)
    watermark, idle = table.watermark, settings.take("idle_timeout")
    if idle is not None and watermark is None:
        file.fail("idle_timeout needs a watermark", idle.at)
    ttl = settings.take("ttl")
    source = Source(
        name=table.name.text,
        connector=settings.connector,
        columns=_columns(table),
        options=settings.options(),
        format=settings.text("format") or "json",
        at=table.name.at,
        unique_key=None if table.primary_key is None else tuple(k.text for k in table.primary_key),
        row_kind=None if row_kind is None else row_kind.text,
        updates=settings.one_of("updates", get_args(Updates), "upsert"),
        ttl_ms=None if ttl is None else _duration(file, ttl),
        sequence_by=None if sequence_by is None else sequence_by.text,
        bad_rows=settings.one_of("bad_rows", ("fail", "drop"), "fail"),
        watermark=None if watermark is None else Watermark(watermark[0].text, _delay(file, watermark[1])),
        idle_timeout_ms=None if idle is None else _duration(file, idle),
        reader=settings.text("reader") or "spark",
    )
    settings.end()
    if source.connector == "kafka" and source.columns is None:
        file.fail("a Kafka topic does not say what columns its values have: name them", table.name.at)
    return source


def _sink(file: Text, table: TableText) -> Sink:
    settings = Settings.of_sink(file, table)
    if table.primary_key is not None:
        file.fail(
            "a sink takes the changelog as it is; what its PRIMARY KEY would do, a MERGE does: leave it out",
            table.primary_key[0].at,
        )
    if table.watermark is not None:
        file.fail("a sink has no watermark", table.watermark[0].at)
    if table.columns is not None:
        _no_twin(file, table)
    key = settings.text("key")
    sink = Sink(
        connector=settings.connector,
        columns=_columns(table),
        options=settings.options(),
        row_kind=settings.text("row_kind") or "row_kind",
        key=tuple(name.strip() for name in key.split(",")) if key else (),
        table=settings.text("table") or "",
        at=table.name.at,
    )
    settings.end()
    return sink


def _columns(table: TableText) -> tuple[tuple[str, str], ...] | None:
    return None if table.columns is None else tuple((c.name.text, c.type) for c in table.columns)


_OF_DELTA: Final = ("_change_type", "_commit_version", "_commit_timestamp")


def _with_own_columns(connector: str, names: list[str] | None) -> list[str] | None:
    """The columns that there are; None where only the data knows."""
    if connector == "rate":
        return ["timestamp", "value"]
    return [*names, *_OF_DELTA] if names is not None and connector == "delta" else names


def _in(file: Text, column: Word, names: list[str] | None) -> None:
    if names is not None and column.text.lower() not in {name.lower() for name in names}:
        file.fail(f"there is no column {column.text!r}; there are {', '.join(names)}", column.at)


def _no_twin(file: Text, table: TableText) -> None:
    seen: set[str] = set()
    for column in table.columns or ():
        if column.name.text.lower() in seen:
            file.fail(f"a second column {column.name.text!r}", column.name.at)
        seen.add(column.name.text.lower())


def _duration(file: Text, said: Word) -> int:
    try:
        return parse_duration(said.text)
    except DescriptionError as error:
        raise file.error(str(error), said.at) from None


def _delay(file: Text, said: Word) -> int:
    """As a duration, but it may be zero."""
    return 0 if said.text.split()[:1] == ["0"] else _duration(file, said)

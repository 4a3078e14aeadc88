"""Runs a job: session, sources, query, sink; reports each micro-batch; stops when asked."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from types import FrameType
from typing import Any, Final

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery
from rich.console import Console

import gpu_ops
from gpu_ops.descriptions.changelog import ROW_KIND_COLUMN
from gpu_ops.errors import DescriptionError, GpuJoinError
from gpu_ops.jobs.datagen import have_ended
from gpu_ops.jobs.job import Job, Sink
from gpu_ops.jobs.screen import Batch, Screen, screen
from gpu_ops.jobs.settings import UNRESUMED
from gpu_ops.jobs.sql_file import JobQuery
from gpu_ops.jobs.tables import kept, open_source, output_names, shaped, start
from gpu_ops.query.errors import SqlError
from gpu_ops.spark import prepare_environment, session
from gpu_ops.spark.api.query import check_not_changed
from gpu_ops.spark.api.session import FIRST_COMPILER_AT_FIRST, allow_second_compiler
from gpu_ops.spark.api.sql import run_query
from gpu_ops.spark.api.statements import Statement, StatementSet
from gpu_ops.spark.api.static import beside_streams
from gpu_ops.spark.api.streams import Stream
from gpu_ops.spark.driver.queries import plans_of, takes_rows_of_spark
from gpu_ops.spark.failures import DELTA_CATALOG, DELTA_SETTINGS, message_in
from gpu_ops.spark.metrics.progress import followed
from gpu_ops.spark.plan.changes import of_changes
from gpu_ops.spark.plan.column_metadata import join_written
from gpu_ops.spark.plan.selection import selection_of_join
from gpu_ops.spark.plan.stored_query import QUERY, of_last, query_in
from gpu_ops.spark.plan.stored_statements import folder_at
from gpu_ops.spark.sinks.changes import View
from gpu_ops.spark.sinks.delta import has_delta
from gpu_ops.state.address import StateAddress
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import FINISHED, LATEST, Manifest
from gpu_ops.values import arrow_zone
from gpu_ops.zones import seconds_from_utc


class JobFailedError(GpuJoinError, RuntimeError):
    """A job that began and then failed."""


@dataclasses.dataclass
class Outcome:
    """A record of a job that has ended: its micro-batches, rows and time.

    Attributes:
        batches: micro-batches with rows.
        rows_in: of all of them.
        rows_out: changes that went to the sink; None where Spark cannot count them.
        interrupted: whether it was stopped before its end.
    """

    batches: int = 0
    rows_in: int = 0
    rows_out: int | None = 0
    interrupted: bool = False

    def add(self, batch: Batch) -> None:
        """Counts one micro-batch more."""
        self.batches += 1
        self.rows_in += batch.rows_in
        if self.rows_out is not None:
            self.rows_out = None if batch.rows_out is None else self.rows_out + batch.rows_out


@dataclasses.dataclass(frozen=True)
class _Watch:
    """An observer of a job while it runs: counts what it does, stops it in time, and shows its result."""

    outcome: Outcome
    stop: threading.Event
    ends: bool
    shown: Screen | None


def run(job: Job, console: Console, *, once: bool = False, show: bool = False, views: Sequence[str] = ()) -> Outcome:
    """Runs a job to its end: of what there is, of its inputs, or until it is interrupted.

    Args:
        job: the job.
        console: where to report.
        once: take what there is and end.
        show: show the results while they change, in place of their sinks; nothing is kept, and the job begins anew.
        views: the views or sinks whose results are shown; none for all sinks.

    Raises:
        JobError: something in the job cannot be; names the position.
        JobFailedError: it failed on the way; nothing is lost, and the same job goes on from its checkpoint.
    """
    with hidden(job):
        return _ran(job, console, once=once, show=show, views=views)


def _ran(job: Job, console: Console, *, once: bool, show: bool, views: Sequence[str]) -> Outcome:
    if show:
        job = _shown(job, views)
    check_folders(job)
    ends = job.emit == "at_end" or job.is_bounded
    if ends and (len(job.inserts) > 1 or job.views):
        raise job.file.error(
            "a job whose result comes at the end has one INSERT INTO and no views: write a file for each of several",
            (job.inserts[1].query if len(job.inserts) > 1 else job.views[0].query).at,
        )
    if ends and not once and not job.ends:
        raise job.file.error(
            "emit = 'at_end' gives its result when the input has ended: run the job with --once", job.query.at
        )
    began, found = time.perf_counter(), Outcome()
    titles = [one.name for one in job.inserts] if len(job.inserts) > 1 else [str(job.file.path)]
    shown = screen(console, *titles) if show else contextlib.nullcontext()
    at_first = not (show or ends)
    with session_of(job, console, first_compiler=at_first) as spark, _interrupts() as stop, shown as there:
        watch = _Watch(found, stop, job.ends, there)
        if ends:
            ends = _run_to_the_end(spark, job, console, watch)
        else:
            _run(changelog(spark, job, console, once=once, show=show), job, console, watch, once=once)
    ended = "stopped after" if found.interrupted else "done:"
    changes_out = "" if found.rows_out is None else f", {found.rows_out:,} changes out"
    batches = f"{found.batches} micro-batch{'' if found.batches == 1 else 'es'}"
    seconds = time.perf_counter() - began
    console.print(f"{ended} {batches}, {found.rows_in:,} rows in{changes_out}, {seconds:.1f} s in all", markup=False)
    if job.state is not None:
        more = "the input has ended" if ends else "the same command goes on from here"
        console.print(f"state in {job.state}; {more}", markup=False, soft_wrap=True)
    return found


def _shown(job: Job, views: Sequence[str]) -> Job:
    """A job whose results are looked at: it has no sink that would miss them, and so no state that would go on."""
    if job.emit == "at_end" and not job.is_bounded:
        raise job.file.error("emit = 'at_end' has no result while it runs, so --show has nothing to show", job.query.at)
    known = {one.name.lower(): one for one in (*job.views, *job.inserts)}  # a materialized view is both
    for name in views:
        if name.lower() not in known:
            raise DescriptionError(
                f"--show {name}: there is no view or sink of this name; there are {', '.join(known)}"
            )
    chosen = [known[name] for name in dict.fromkeys(map(str.lower, views))] or job.inserts
    inserts = []
    for one in chosen:
        sink = one.sink or Sink("", None, {}, one.query.at)
        inserts.append(one._replace(sink=Sink("blackhole", sink.columns, {}, sink.at, sink.row_kind)))
    return dataclasses.replace(job, inserts=tuple(inserts), state=None, checkpoint=None)


def _run(changes: DataFrame, job: Job, console: Console, watch: _Watch, *, once: bool) -> None:
    """Runs a job's query; reports each micro-batch, and adds it up."""
    last_join, shown = join_written(changes), watch.shown
    if _makes_rows_of_spark(changes, job):
        allow_second_compiler(changes.sparkSession)
    screens = None if shown is None else dict(zip((one.name for one in job.inserts), shown.views, strict=True))
    query = start(changes, job, once=once, last_join=last_join, screens=screens)
    printed = functools.partial(console.print, markup=False, soft_wrap=True)
    outside = {
        plan.name: [
            side
            for side, read in zip(plan.description.sides, plan.read or itertools.repeat(None), strict=False)
            if not of_changes(read)
        ]
        for plan in plans_of(changes)
    }
    report = functools.partial(_report, watch.outcome, printed if shown is None else shown.report)
    _follow(query, watch, lambda progress: report(Batch.of(progress, last_join, outside)))


def _makes_rows_of_spark(changes: DataFrame, job: Job) -> bool:
    """True if rows of a job become Spark's own on their way from its sources to its sinks."""
    by_tasks = all(sink.by_tasks or sink.connector == "blackhole" for sink in job.sinks)
    return not by_tasks or isinstance(selection_of_join(changes), str) or takes_rows_of_spark(changes)


def _run_to_the_end(spark: SparkSession, job: Job, console: Console, watch: _Watch) -> bool:
    """Takes the inputs in, then brings the result into the sink; what was done before a restart is left out.

    Returns:
        Whether it is there.
    """
    rows: DataFrame | None
    found = watch.outcome
    if has_ended(job):
        rows = result(spark, job)
    else:
        rows = changelog(spark, job, console, once=True)
        shaped(rows, job.sink, job.file)
        if rows.isStreaming:
            nowhere = job.into(Sink("blackhole", None, {}, job.sink.at))  # while inputs last
            _run(rows, nowhere, console, watch, once=True)
            rows = None if found.interrupted else result(spark, job)
    if rows is None:
        if not found.interrupted:
            console.print("there has been no input yet, so there is no result", markup=False)
        return False
    written = Outcome()
    query = write(rows, job, None if watch.shown is None else watch.shown.views[0])
    _follow(
        query, dataclasses.replace(watch, outcome=written), lambda progress: _report(written, None, Batch.of(progress))
    )
    found.rows_out, found.interrupted = written.rows_out, written.interrupted
    return not found.interrupted


def _report(outcome: Outcome, line: Callable[[str], None] | None, batch: Batch | None) -> None:
    """Adds up a micro-batch, and says a line of it."""
    if batch is not None:
        outcome.add(batch)
        if line is not None:
            line(batch.line)


def _follow(query: StreamingQuery, watch: _Watch, report: Callable[[Mapping[str, Any]], None]) -> None:
    """Reports the micro-batches of a query until it ends, by itself or with its inputs."""
    try:
        for progress in followed(query, watch.stop):
            report(progress)
            if watch.ends and have_ended(progress):
                break
    except StreamingQueryException as error:
        # where the result is shown, stopping tears a micro-batch in Python, and nothing is lost by that
        if watch.shown is None or not watch.stop.is_set():
            raise JobFailedError(message_in(str(error))) from error
    watch.outcome.interrupted = watch.stop.is_set()


def explain(job: Job, console: Console) -> str:
    """Describes the plan of a job in words, and runs nothing."""
    with hidden(job), session_of(job, console) as spark:
        return job.file.secrets.hidden(gpu_ops.explain(changelog(spark, job, console)))


def check_folders(job: Job) -> None:
    """Refuses a job that could not go on where it stopped.

    Raises:
        JobError: a state folder without a checkpoint or the reverse, or neither where the sink keeps what it is given.
    """
    if (job.state is None) != (job.checkpoint is None):
        there, missing = ("state", "checkpoint") if job.checkpoint is None else ("checkpoint", "state")
        raise job.file.error(
            f"there is a folder for the {there}, but none for the {missing}: set {missing} as well, in the job or as "
            f"--{missing}; they belong together",
            job.sink.at,
        )
    if job.state is None:
        advice = "set state and checkpoint, a folder each, in the job or as --state and --checkpoint"
        if job.emit == "at_end" and not job.is_bounded:
            raise job.file.error(f"emit = 'at_end' keeps the input until it ends: {advice}", job.query.at)
        for sink in job.sinks:
            if sink.connector not in UNRESUMED:
                why = f"{sink.connector} keeps what it is given, so the job has to remember where it stopped"
                raise job.file.error(f"{why}: {advice}", sink.at)


def changelog(spark: SparkSession, job: Job, console: Console, *, once: bool = False, show: bool = False) -> DataFrame:
    """The changelog of a job's query; of several queries their changelogs as outputs of one, see `gpu_ops.outputs`.

    Args:
        spark: a session.
        job: the job.
        console: for what is worth a warning.
        once: whether the job takes what there is and ends.
        show: whether its result is shown and nothing is kept, so that no state in memory is worth a warning.

    Raises:
        JobError: a source or a query cannot be.
    """
    made = statements_of(spark, job, console, once=once, show=show)
    if made.state is not None and job.emit != "at_end":
        with job.file.errors_at(job.query.at):
            check_not_changed(made.state)
        made.remember()
    return made.changes


def statements_of(
    spark: SparkSession,
    job: Job,
    console: Console,
    *,
    once: bool = False,
    show: bool = False,
    changing: bool = False,
) -> StatementSet:
    """The queries of a job. Each view is computed once, whatever reads it.

    Args:
        spark: as of `changelog`, like those that follow.
        job: likewise.
        console: likewise.
        once: likewise.
        show: likewise.
        changing: see `run_query`.
    """
    emit = "per_event" if job.emit == "per_event" else "per_batch"
    common = {"emit": emit, "backend": job.backend, "partitions": job.partitions}
    read = _sources_read(job)
    tables: dict[str, Stream | DataFrame] = {**tables_of(spark, job, console, once=once, show=show)}
    alone = not job.views and len(job.inserts) == 1
    state = None if job.is_bounded or job.state is None else StateAddress.of(job.state)
    sinks = {one.query: one for one in job.inserts}
    made: dict[JobQuery, Statement] = {}
    views: dict[str, tuple[object, ...]] = {}
    for one in (*job.views, *job.inserts):
        if one.query in made:  # of a materialized view
            continue
        names = read[one.query]
        inputs = {name: table for name, table in tables.items() if alone or name.lower() in names}
        folder = "" if alone else f"{_QUERIES}/{one.name.lower()}"
        check_zone(spark, job, one.query)
        own_name = job.name if alone else f"{job.name}_{one.name}"
        with said(job, one.query.at, console, show=show):
            try:
                options: dict[str, Any] = {name: getattr(job, name) for name in ("multi_way", "backlog")}
                options |= common | {"emit": job.emit, "name": own_name}
                options["state"] = None if state is None else folder_at(state, folder)
                changes = run_query(
                    one.query.translated.sql, inputs, options, statement=(one.name, folder), views=views,
                    changing=changing,
                )  # fmt: skip
            except SqlError as error:
                raise one.query.error(job.file, error) from error
        as_view = functools.partial(_as_named, query=one.query, job=job)
        made[one.query] = dataclasses.replace(changes, is_output=one.query in sinks, as_view=as_view)
        if one.sink is None:
            tables[one.name], views[one.name] = as_view(changes.changes), changes.roots
    if len(job.inserts) == 1:
        return StatementSet(tuple(made.values()), made[job.query].changes, state)
    shown = {
        name: shaped(made[one.query].changes, one.sink, job.file)
        for name, one in zip(output_names(job), job.inserts, strict=True)
        if one.sink is not None
    }
    return StatementSet(tuple(made.values()), gpu_ops.outputs(**shown), state)


def tables_of(
    spark: SparkSession, job: Job, console: Console, *, once: bool = False, show: bool = False
) -> dict[str, Stream]:
    """The sources of a job, as its queries read them; arguments as of `changelog`."""
    tables: dict[str, Stream] = {}
    below = None if job.state is None else StateAddress.of(job.state).below(LATEST)
    emit = "per_event" if job.emit == "per_event" else "per_batch"
    common = {"emit": emit, "backend": job.backend, "partitions": job.partitions}
    for note in job.notes:
        text = f"note: {':'.join(map(str, job.file.position(note.at)))}: {note.text}"
        console.print(job.file.secrets.hidden(text), style="yellow", markup=False, soft_wrap=True)
    for number, source in enumerate(job.sources):
        stream = open_source(spark, source, job.file, every_ms=job.every_ms, once=once)
        state = None if below is None else below.below(f"source_{number}")
        with said(job, source.at, console, show=show):
            if source.comes_in_any_order:
                warnings.warn(
                    f"table {source.name!r}: Spark reads the larger of several files of a micro-batch first, so its "
                    "changes come in another order than they were written in: set 'reader' = 'arrow', or "
                    "'sequence_by', or 'max_files_per_trigger' = '1'",
                    stacklevel=1,
                )
            if once and source.refresh_ms is not None:
                warnings.warn(
                    f"table {source.name!r} is read again only while a job runs on: each run with --once joins the "
                    "rows that it had when the state folder was new",
                    stacklevel=1,
                )
            tables[source.name] = kept(stream, source, state=state, name=f"{job.name}_{source.name}", **common)
    return tables


def check_zone(spark: SparkSession, job: Job, query: JobQuery) -> None:
    """Refuses windows that begin at other instants by the clock of the session's zone than by that of UTC.

    Raises:
        JobError: windows of a day, or of an hour in India; without instants there are no zones.
    """
    zone = str(spark.conf.get("spark.sql.session.timeZone"))
    instants = any(
        source.columns is None
        or any(kind == "TIMESTAMP" for _, kind in source.columns)
        or any(column.expression is not None or column.kind == "TIMESTAMP" for column in source.derived)
        for source in job.sources
    )
    if not query.translated.slides or not instants:
        return
    offsets = [second * 1000 for second in seconds_from_utc(arrow_zone(zone))]
    for slide, at in query.translated.slides:
        if any(offset % slide for offset in offsets):
            raise job.file.error(
                f"these windows begin by the clock of UTC here, in Flink by that of the session's zone, {zone}: SET "
                "'table.local-time-zone' = 'UTC', or declare the time TIMESTAMP_NTZ",
                query.at + at,
            )


def _as_named(changes: DataFrame, query: JobQuery, job: Job) -> DataFrame:
    """The changelog of a view as others read it: the columns of a materialized one are called as its sink's."""
    sink = next((one.sink for one in job.inserts if one.query is query), None)
    if sink is None or sink.columns is None:
        return changes
    return shaped(changes, dataclasses.replace(sink, row_kind=ROW_KIND_COLUMN), job.file)


_QUERIES: Final = "queries"
"""The folder of the states of several queries."""


def _sources_read(job: Job) -> Mapping[JobQuery, Set[str]]:
    """The tables and views that each query names, in lower case.

    Raises:
        JobError: a view is read that stands behind.
    """
    read = {one.query: one.query.tables for one in (*job.views, *job.inserts)}
    for place, view in enumerate(job.views):
        later = {one.name.lower() for one in job.views[place:]}
        for name in sorted(later & read[view.query]):
            problem = f"view {view.name!r} reads {name!r}, which stands behind it: write that one first"
            raise job.file.error(problem, view.query.at)
    return read


@contextlib.contextmanager
def said(job: Job, at: int, console: Console, *, show: bool) -> Iterator[None]:
    """Errors of a part of a job are at its position, and warnings go to the console."""
    with warnings.catch_warnings(record=True) as raised, job.file.errors_at(at):
        warnings.simplefilter("always")
        yield
    ignored = (DeprecationWarning, *([gpu_ops.MemoryOnlyStateWarning] if show else []))
    for warning in raised:
        if not issubclass(warning.category, ignored):
            text = job.file.secrets.hidden(f"warning: {warning.message}")
            console.print(text, style="yellow", markup=False, soft_wrap=True)


@contextlib.contextmanager
def session_of(job: Job, console: Console, *, first_compiler: bool = False) -> Iterator[SparkSession]:
    """A session for the job; one that there is already is used, and left running.

    Args:
        job: the job.
        console: where to report.
        first_compiler: whether its JVM begins without the second compiler, which takes a third of all processor time
            while a query is young, and is of use only where rows become Spark's own.
    """
    prepare_environment()
    if SparkSession.getActiveSession() is not None:
        # Not the active one: PySpark takes that from whoever made a DataFrame last, a micro-batch's own session too.
        there = SparkSession.builder.getOrCreate()
        for name, value in _redaction(job).items():
            there.conf.set(name, value)
        yield there
        return
    by_spark = [sink.connector for sink in job.sinks if not sink.by_tasks]
    by_spark += [source.connector for source in job.sources]
    settings = DELTA_SETTINGS if "delta" in by_spark else {}
    options = {"spark.driver.extraJavaOptions": FIRST_COMPILER_AT_FIRST} if first_compiler else {}
    with console.status("Spark starts"):
        spark = session(
            f"gpu-join {job.name}",
            master=job.master or "local[*]",
            config={**options, **settings, **_redaction(job), **job.spark},
        )
    if settings and not has_delta(spark):
        spark.conf.unset(DELTA_CATALOG)  # a class that is not there
    try:
        yield spark
    finally:
        spark.stop()


def _redaction(job: Job) -> dict[str, str]:
    """Settings by which Spark's plans and UI hide options whose values stand elsewhere."""
    names = "|".join(map(re.escape, sorted(job.file.secrets.options)))
    return {"spark.sql.redaction.options.regex": f"(?i)url|^({names})$"} if names else {}


@contextlib.contextmanager
def hidden(job: Job) -> Iterator[None]:
    """Errors without the values that the job takes from elsewhere."""
    try:
        yield
    except GpuJoinError as error:
        text = job.file.secrets.hidden(str(error))
        if text == str(error):
            raise
        raise JobFailedError(text) from None


@contextlib.contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Ctrl-C sets the event, and does nothing else: a micro-batch is not torn."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(_signal: int, _frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_RESULT: Final = "result"


def has_ended(job: Job) -> bool:
    """True if a run before saw the end of a job's inputs; its result may not have come to the sink.

    Raises:
        JobError: the state folder has another query, or a result and then more input.
    """
    if job.state is None:
        return False
    files = Files.at(job.state)
    if query_in(files) not in (None, job.query.text):
        raise job.file.error(
            f"state folder {job.state} belongs to another query: set another state and checkpoint", job.query.at
        )
    ended = query_in(files) is not None and of_last(files).stamp(FINISHED) is not None
    if not ended and not job.is_bounded and _RESULT in files.folders(""):
        raise job.file.error(
            f"state folder {job.state} was opened again, and its result has been handed to the sink: for a result of "
            "more input set another state and checkpoint, and insert into another table",
            job.query.at,
        )
    return ended


def result(spark: SparkSession, job: Job) -> DataFrame | None:
    """The result of a query whose inputs have ended; None where there never was a micro-batch."""
    assert job.state is not None
    if Manifest.read(of_last(Files.at(job.state))) is None:
        return None
    return gpu_ops.finish(spark, state=job.state)


def write(rows: DataFrame, job: Job, screen: View | None = None) -> StreamingQuery:
    """Starts the query that brings a result into the job's sink, unless one has done so.

    Args:
        rows: a static DataFrame, row kinds first.
        job: the job. A sink that keeps nothing is given the result each time.
        screen: takes it in place of the sink.

    Raises:
        JobError: the sink cannot take it.
    """
    if job.state is not None and job.is_bounded:
        Files.at(job.state).create(QUERY, json.dumps({"query": job.query.text}).encode())
    state = None if job.state is None else job.state.below(_RESULT)
    [ended] = beside_streams([Stream(_RESULT, row_kind=ROW_KIND_COLUMN, df=rows)], state)
    assert ended.load is not None
    ended.load()
    checkpoint = None
    if job.checkpoint is not None and job.sink.connector not in UNRESUMED:
        checkpoint = f"{job.checkpoint.rstrip('/')}/{_RESULT}"
    screens = None if screen is None else {job.inserts[0].name: screen}
    return start(ended.df, dataclasses.replace(job, checkpoint=checkpoint), once=True, last_join=None, screens=screens)

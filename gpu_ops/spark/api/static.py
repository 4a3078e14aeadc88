"""Static DataFrames beside streams, and results at the end of input, as inputs that ended before the first micro-batch.

The rows are written once, into the join's state folder, and read from there as a stream of files: in the first
micro-batch, and in no other, as Spark's checkpoint knows. With ``refresh=`` the table is read again from time to time,
and the difference is written as further changes: by unique key where there is one, else row by row.

In the folder ``static/<input>`` are ``changes/0`` with the rows, ``changes/1`` and so on with later changes, and
``rows/<n>`` with the table as it was last read, to compare with. Files in ``_next`` are not complete yet.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import functools
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final
from urllib.parse import quote

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql import types as st

from gpu_ops.conditions import backquoted
from gpu_ops.descriptions.changelog import ROW_KIND_COLUMN
from gpu_ops.errors import DescriptionError, StateError
from gpu_ops.query.catalyst import items
from gpu_ops.spark.api.streams import Stream
from gpu_ops.spark.driver.directory import Directory
from gpu_ops.spark.driver.executors import as_hadoop_has_it, one_machine
from gpu_ops.spark.driver.hadoop_files import HadoopFiles
from gpu_ops.spark.driver.queries import takes_what_is_there
from gpu_ops.spark.failures import message_in
from gpu_ops.spark.plan.column_metadata import is_changelog
from gpu_ops.spark_types import named_column
from gpu_ops.state import files
from gpu_ops.state.address import StateAddress

_log = logging.getLogger(__name__)

FOLDER: Final = "static"
_LOOK_S: Final = 0.2
"""Seconds between two looks of the refreshing thread at the clock and the application."""

_refreshing: dict[str, _Refresh] = {}
"""The thread that reads a table again, by folder."""

_RESULT: Final = "_gpu_ops_result"
"""Attribute of a stream that is exactly an operator's result at the end of input: its state folder."""


def beside_streams(sides: Sequence[Stream], state: StateAddress | None) -> list[Stream]:
    """Turns static inputs beside streams into streams; calling ``load`` of each writes its rows.

    Args:
        sides: the inputs.
        state: the join's state folder; None for a temporary folder.

    Raises:
        DescriptionError: a static input has options of a stream, or there is no state folder on a cluster.
        StateError: the folder has other columns.
    """
    return [side if is_stream(side) else _loaded(side, side.label, state) for side in sides]


def as_streams(frames: Sequence[DataFrame], state: StateAddress | None) -> list[DataFrame]:
    """Turns static parts of a union beside streams into streams whose rows come in the first micro-batch.

    Args:
        frames: the parts.
        state: the state folder; None for none.

    Raises:
        DescriptionError, StateError: as `beside_streams` does.
    """
    if len({df.isStreaming for df in frames}) < 2:
        return list(frames)
    sides = beside_streams([Stream(f"part {number}", df=df) for number, df in enumerate(frames, 1)], state)
    for side in sides:
        if side.load is not None:
            side.load()
    return [side.df for side in sides]


def is_stream(side: Stream) -> bool:
    """True if an input goes on while the operator runs."""
    return side.df.isStreaming and _RESULT not in vars(side.df)


def has_result(df: DataFrame, state: StateAddress | None) -> DataFrame:
    """Marks a streaming DataFrame as exactly an operator's result at the end of its input."""
    if df.isStreaming and state is not None:
        vars(df)[_RESULT] = state
    return df


def _loaded(side: Stream, name: str, state: StateAddress | None) -> Stream:
    if side.refresh_ms is not None and side.row_kind is not None:
        raise DescriptionError(f"input '{name}': refresh= compares a table's rows; one with row kinds is none")
    if side.refresh_ms is not None and ROW_KIND_COLUMN in side.df.columns:
        raise DescriptionError(
            f"input '{name}': with refresh= its changes have a column {ROW_KIND_COLUMN!r}: rename it"
        )
    without_kinds = side.row_kind is None and is_changelog(side.df)
    df = side.df.drop(ROW_KIND_COLUMN) if without_kinds else side.df
    location = _location(side.df.sparkSession, name, state)
    folder = _Folder(side.df.sparkSession, location)
    df = folder.without_new_columns(name, df)
    schema = df.schema if side.refresh_ms is None else st.StructType([_KIND, *df.schema.fields])
    if side.df.isStreaming:  # what its columns are said to be is said of the stream
        schema = st.StructType([st.StructField(x.name, x.dataType) for x in schema.fields])
    changes = side.df.sparkSession.readStream.schema(schema).parquet(f"{location}/changes/*")

    def load() -> None:
        before = _refreshing.pop(location, None)
        if before is not None:
            before.end()
        folder.settle()
        if not folder.complete("changes/0"):
            _log.info("input '%s': its rows are written to %s, once", name, location)
            rows = side.df
            if side.df.isStreaming:
                from gpu_ops.spark.api.finish import result_of  # noqa: PLC0415 - 0.2 s of SQL, which few joins use

                rows = result_of(side.df, vars(side.df)[_RESULT])
            rows = rows.drop(ROW_KIND_COLUMN) if without_kinds else rows
            with _described(side.df.sparkSession, f"input '{name}' of gpu_ops: a static table is loaded, once"):
                folder.begin(rows, refreshed=side.refresh_ms is not None)
        folder.check(name, schema)
        if side.refresh_ms is not None:
            _refreshing[location] = _Refresh(dataclasses.replace(side, df=df), name, folder, state)

    plain = side.refresh_ms is None and side.row_kind is None
    return dataclasses.replace(
        side,
        df=changes,
        load=load,
        row_kind=ROW_KIND_COLUMN if side.refresh_ms is not None else side.row_kind,
        updates="retract" if plain else side.updates,  # what never changes has no old row that could be missing
    )


_KIND: Final = st.StructField(ROW_KIND_COLUMN, st.StringType())


@contextlib.contextmanager
def _described(session: SparkSession, what: str) -> Iterator[None]:
    """Context manager that sets the description of jobs in Spark's UI."""
    context = session.sparkContext
    before = context.getLocalProperty("spark.job.description")
    context.setJobDescription(what)
    try:
        yield
    finally:
        context.setLocalProperty("spark.job.description", before)


def _location(session: SparkSession, name: str, state: StateAddress | None) -> str:
    """The folder of a static input's rows, as Hadoop writes it."""
    if state is None:
        if not one_machine(session.sparkContext):
            raise DescriptionError(
                f"input '{name}' is static: its rows are kept in the state folder, which all machines see; give state="
            )
        return f"file://{files.temporary_folder()}/{_folder_name(name)}"
    return as_hadoop_has_it(state.below(FOLDER).below(_folder_name(name)))


def _folder_name(name: str) -> str:
    """The name of an input's folder, which is valid and unique whatever the input's name has in it."""
    return hashlib.sha256(name.encode()).hexdigest() if name in (".", "..") else quote(name, safe="")


class _Folder:
    """The folder with the rows of a static input.

    Args:
        session: the session.
        location: the folder, as Hadoop writes it.
    """

    def __init__(self, session: SparkSession, location: str) -> None:
        self.session, self.location = session, location
        self._files = HadoopFiles(session, location)

    def complete(self, part: str) -> bool:
        """True if a part is complete."""
        return self._files.exists(f"{part}/_SUCCESS")

    def settle(self) -> None:
        """Completes or removes the files that a killed run had begun."""
        last, rows = (self._files.latest(part) for part in ("changes", "rows"))
        if last is not None and (rows is None or last > rows) and self.complete("_next/rows"):
            self._put("_next/rows", f"rows/{last}")
        self._files.delete("_next")

    def begin(self, df: DataFrame, *, refreshed: bool) -> None:
        """Writes the rows for the first time."""
        self._write(df, "_next/rows" if refreshed else "_next/changes")
        if refreshed:
            rows = self._read("_next/rows", df.schema)
            self._write(rows.select(f.lit("+I").alias(ROW_KIND_COLUMN), *_all(rows)), "_next/changes")
        self._put("_next/changes", "changes/0")
        if refreshed:
            self._put("_next/rows", "rows/0")

    def _read(self, part: str, schema: st.StructType) -> DataFrame:
        return self.session.read.schema(schema).parquet(f"{self.location}/{part}")

    @functools.cached_property
    def written(self) -> st.StructType:
        """The schema of the rows that were written."""
        return self.session.read.parquet(f"{self.location}/changes/0").schema

    def without_new_columns(self, name: str, table: DataFrame) -> DataFrame:
        """The table with the columns that were written, in their order; it may have got others since.

        Args:
            name: the input's name.
            table: the table as it is now, without row kinds.
        """
        if not self.complete("changes/0"):
            return table
        written = [x for x in self.written.names if x != ROW_KIND_COLUMN or x in table.columns]
        if written == table.columns or not set(written) <= set(table.columns):
            return table  # `check` refuses what lacks some
        new = [x for x in table.columns if x not in written]
        if new:
            _log.warning(
                "input '%s' is static, and was loaded when it did not have the columns %s: they are left out. A new "
                "state folder takes them up",
                name,
                ", ".join(new),
            )
        return table.select(*map(named_column, written))

    def check(self, name: str, schema: st.StructType) -> None:
        """Refuses columns other than those that were written.

        Raises:
            StateError: the columns are others; names them.
        """
        written, present = ([f"{x.name} {x.dataType.simpleString()}" for x in s.fields] for s in (self.written, schema))
        if written != present:
            raise StateError(
                f"input '{name}' is static and was loaded with the columns {', '.join(written)}; now it has "
                f"{', '.join(present)}: give another state folder"
            )

    def read_again(self, table: DataFrame, key: Sequence[str] | None) -> bool:
        """Writes the difference between a table and its last version; False if there is none.

        Args:
            table: the table as it is now.
            key: columns that identify a row; None for none.
        """
        number, schema = self._files.numbers("rows")[-1], table.schema
        self._write(table, "_next/rows")
        changes = _difference(self._read(f"rows/{number}", schema), self._read("_next/rows", schema), key)
        if changes.isEmpty():
            self._files.delete("_next")
            return False
        self._write(changes, "_next/changes")
        self._put("_next/changes", f"changes/{number + 1}")
        self._put("_next/rows", f"rows/{number + 1}")
        self._files.delete(f"rows/{number}")
        return True

    def _write(self, df: DataFrame, part: str) -> None:
        df.write.mode("overwrite").parquet(f"{self.location}/{part}")

    def _put(self, part: str, to: str) -> None:
        self._files.move(part, to)


def _all(df: DataFrame) -> list[Any]:
    return [named_column(name) for name in df.columns]


def _difference(before: DataFrame, after: DataFrame, key: Sequence[str] | None) -> DataFrame:
    """The changes from one version of a table to another, at most one for each row, so that order is irrelevant."""
    if key is None:
        gone, new = before.exceptAll(after), after.exceptAll(before)
        return gone.select(f.lit("-D").alias(ROW_KIND_COLUMN), *_all(gone)).unionAll(
            new.select(f.lit("+I").alias(ROW_KIND_COLUMN), *_all(new))
        )
    old, new = (df.select(f.struct(*_all(df)).alias("row")) for df in (before, after))
    same = [f.col(f"old.row.{backquoted(c)}").eqNullSafe(f.col(f"new.row.{backquoted(c)}")) for c in key]
    both = old.alias("old").join(new.alias("new"), functools.reduce(lambda a, b: a & b, same), "full")
    gone = f.col("new.row").isNull()
    changed = both.where(~f.col("old.row").eqNullSafe(f.col("new.row")))
    kind = f.when(gone, "-D").when(f.col("old.row").isNull(), "+I").otherwise("+U")
    row = f.coalesce(f.col("new.row"), f.col("old.row"))
    return changed.select(kind.alias(ROW_KIND_COLUMN), row.alias("row")).select(ROW_KIND_COLUMN, "row.*")


# --- reading again ---------------------------------------------------------------------------


class _Refresh:
    """A thread that reads a table again, each time its period is over while a query uses it.

    Args:
        side: the input as it was given.
        name: the input's name.
        folder: the folder with its rows.
        state: the join's state folder.
    """

    def __init__(self, side: Stream, name: str, folder: _Folder, state: StateAddress | None) -> None:
        assert side.refresh_ms is not None
        self._side, self._name, self._folder, self._state = side, name, folder, state
        self._session, self._period = side.df.sparkSession, side.refresh_ms / 1e3
        self._again: Callable[[], DataFrame] = side.table or functools.partial(_as_it_is_now, side.df)
        self._written = time.time()
        self._new = set[str]()
        self._runs_then = set[str]()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"gpu_ops refresh of {name}", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Ends the thread, after a write that it has begun."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        due = time.monotonic() + self._period
        while not self._stop.wait(min(_LOOK_S, self._period)) and self._session.sparkContext._jsc is not None:
            try:
                if time.monotonic() < due or not self._was_read():
                    continue
                due = time.monotonic() + self._period
                self._read()
            except Exception as error:
                if self._session.sparkContext._jsc is None:
                    return
                why = message_in(str(error))
                _log.error(
                    "input '%s' could not be read again; its rows stay, and it is tried again: %s", self._name, why
                )

    def _was_read(self) -> bool:
        """True if a running query has taken the changes that were written last.

        Two sets of changes in one micro-batch could come in any order. A micro-batch that began after they were
        written,
        and is done, had them: Spark's file source takes all files that exist. Not so with ``availableNow``: such a run
        takes the files that existed when it began.
        """
        queries = self._queries()
        done = [query.lastProgress for query in queries]
        if not done or any(
            last is None or dt.datetime.fromisoformat(last["timestamp"]).timestamp() <= self._written for last in done
        ):
            return False
        running = self._runs_then & {str(query.runId) for query in queries}
        try:
            return not any(takes_what_is_there(queries, run) for run in running)
        except StateError:  # this moment it ended
            return False

    def _queries(self) -> list[Any]:
        """The running queries that use the table."""
        queries = list(self._session.streams.active)
        if self._state is None:
            return queries
        user = Directory.of(self._session).state_in_use(self._state)
        return [query for query in queries if query.id == user]

    def _read(self) -> None:
        table = self._again()
        now, before = ({x.name: x.dataType.simpleString() for x in df.schema.fields} for df in (table, self._side.df))
        wrong = next((name for name, kind in before.items() if now.get(name) != kind), None)
        if wrong is not None:
            is_now = f"is {now[wrong]} now" if wrong in now else "is not there any more"
            _log.error(
                "input '%s' is not read again: its column %r was %s and %s", self._name, wrong, before[wrong], is_now
            )
            return
        new = now.keys() - before.keys() - self._new
        if new:
            self._new |= new
            _log.warning("input '%s' has new columns, which are left out: %s", self._name, ", ".join(sorted(new)))
        table = table.select(*map(named_column, before))
        with _described(self._session, f"input '{self._name}' of gpu_ops: a static table is read again"):
            changed = self._folder.read_again(table, self._side.unique_key)
        if changed:
            self._written = time.time()
            self._runs_then = {str(query.runId) for query in self._queries()}


def _as_it_is_now(df: DataFrame) -> DataFrame:
    """A DataFrame over the present files of a table, which Spark lists when a DataFrame is made."""
    for leaf in items(df._jdf.queryExecution().analyzed().collectLeaves()):
        with contextlib.suppress(Exception):  # not of files
            leaf.relation().location().refresh()
    return df.select("*")

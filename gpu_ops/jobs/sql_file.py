"""Jobs as SQL, in Flink's form: CREATE TABLE for each source and for the sink, SET, and one INSERT INTO.

::

    CREATE TABLE orders (
        id BIGINT, item STRING, at TIMESTAMP(3),
        PRIMARY KEY (id) NOT ENFORCED,
        WATERMARK FOR at AS at - INTERVAL '5' SECOND
    ) WITH ('connector' = 'parquet', 'path' = 'orders');
    SET 'state' = 'state';
    INSERT INTO changes SELECT ... FROM orders ...;
"""

from __future__ import annotations

from typing import Final, TypeVar

from gpu_ops.jobs.text import ColumnText, JobText, QueryText, Setting, TableText, Text, Word
from gpu_ops.jobs.tokens import Cursor, tokenize
from gpu_ops.jobs.types import read_type

_Said = TypeVar("_Said")

_STATEMENTS: Final = "a job has CREATE TABLE, SET and one INSERT INTO ... SELECT"

_REFUSED: Final = {
    "GENERATED": "generated columns are not understood",
    "METADATA": "metadata columns are not understood: declare only what is in the data",
    "AS": "computed columns are not understood: compute them in the query",
    "LIKE": "LIKE is not understood: name the columns",
    "PARTITIONED": "PARTITIONED BY is not understood",
    "DISTRIBUTED": "DISTRIBUTED BY is not understood",
}


def read_sql(file: Text) -> JobText:
    """Reads a job.

    Raises:
        JobError: it is none; says where.
    """
    cursor = Cursor(file, tokenize(file))
    tables: list[TableText] = []
    settings: list[Setting] = []
    inserted: tuple[Word, QueryText] | None = None
    while cursor.token.kind != "end":
        if cursor.accepts(";"):
            continue
        if cursor.accepts("SET"):
            settings.append(_set(cursor))
        elif cursor.accepts("CREATE", "TABLE") or cursor.accepts("CREATE", "TEMPORARY", "TABLE"):
            tables.append(_create_table(cursor))
        elif cursor.sees("INSERT"):
            if inserted is not None:
                cursor.fail("a job has one INSERT INTO; write a second file for a second one")
            inserted = _insert(cursor)
        else:
            cursor.fail(f"{cursor.token.shown} begins no statement that is understood: {_STATEMENTS}")
        if cursor.token.kind != "end":
            cursor.expect(";", after="behind the statement")
    if inserted is None:
        cursor.fail(f"there is no INSERT INTO: {_STATEMENTS}")
    return _assemble(file, tables, settings, *inserted)


def _assemble(file: Text, tables: list[TableText], settings: list[Setting], target: Word, query: QueryText) -> JobText:
    seen: set[str] = set()
    for table in tables:
        if table.name.text.lower() in seen:
            file.fail(f"there are two tables {table.name.text!r}", table.name.at)
        seen.add(table.name.text.lower())
    sinks = [table for table in tables if table.name.text.lower() == target.text.lower()]
    if not sinks:
        known = ", ".join(table.name.text for table in tables) or "none"
        file.fail(f"there is no table {target.text!r} to insert into: CREATE TABLE it; there are {known}", target.at)
    sources = tuple(table for table in tables if table is not sinks[0])
    if not sources:
        file.fail("there is no source: CREATE TABLE each table that the query reads", query.at)
    return JobText(file, sources, sinks[0], query, tuple(settings))


def _set(cursor: Cursor) -> Setting:
    """``SET 'name' = 'value'``; the quotes may be left out."""
    if cursor.token.kind == "string":
        name = cursor.string("a setting's name")
    else:
        name = cursor.name("a setting's name")
        while cursor.accepts(".") or cursor.accepts("-"):
            end = cursor.name("the rest of the setting's name")
            name = Word(cursor.file.text[name.at : end.at + len(end.text)], name.at)
    cursor.expect("=")
    if cursor.token.kind in ("word", "number"):
        token = cursor.take()
        return Setting(name, Word(token.text, token.start))
    return Setting(name, cursor.string("the setting's value"))


def _create_table(cursor: Cursor) -> TableText:
    cursor.accepts("IF", "NOT", "EXISTS")
    name = cursor.name("a table's name")
    if cursor.sees("."):
        cursor.fail("catalogs and databases are not understood: a table has a plain name")
    columns: list[ColumnText] | None = None
    key: tuple[Word, ...] | None = None
    watermark: tuple[Word, Word] | None = None
    if cursor.accepts("("):
        columns = []
        while True:
            at = cursor.token
            if cursor.sees("PRIMARY", "KEY") or cursor.sees("CONSTRAINT"):
                if cursor.accepts("CONSTRAINT"):
                    cursor.name("the constraint's name")
                cursor.expect("PRIMARY", "KEY")
                key = _once(cursor, key, cursor.names("a column"), "primary key", at.start)
                cursor.accepts("NOT", "ENFORCED")
            elif cursor.accepts("WATERMARK", "FOR"):
                watermark = _once(cursor, watermark, _watermark(cursor), "watermark", at.start)
            else:
                column, is_key = _column(cursor)
                columns.append(column)
                if is_key:
                    key = _once(cursor, key, (column.name,), "primary key", at.start)
            if not cursor.accepts(","):
                break
        cursor.expect(")", after="or a comma")
    if cursor.accepts("COMMENT"):
        cursor.string("a comment")
    for word, why in _REFUSED.items():
        if cursor.sees(word):
            cursor.fail(why)
    cursor.expect("WITH", after="and the table's options")
    settings = _options(cursor)
    # WITH (...) alone: the columns are those of the data
    return TableText(name, tuple(columns) if columns else None, key, watermark, settings)


def _once(cursor: Cursor, before: _Said | None, now: _Said, what: str, at: int) -> _Said:
    if before is not None:
        cursor.file.fail(f"a second {what}", at)
    return now


def _column(cursor: Cursor) -> tuple[ColumnText, bool]:
    """A column, and whether it is said to be the primary key."""
    name = cursor.name("a column's name")
    if cursor.sees("AS"):
        cursor.fail(_REFUSED["AS"])
    kind = read_type(cursor)
    is_key = False
    while True:
        if cursor.accepts("PRIMARY", "KEY"):
            if is_key:
                cursor.fail("a second primary key")
            is_key = True
            cursor.accepts("NOT", "ENFORCED")
        elif cursor.accepts("COMMENT"):
            cursor.string("a comment")
        elif not (cursor.accepts("NOT", "NULL") or cursor.accepts("NULL")):
            break
    for word in ("METADATA", "GENERATED"):
        if cursor.sees(word):
            cursor.fail(_REFUSED[word])
    return ColumnText(name, kind), is_key


def _watermark(cursor: Cursor) -> tuple[Word, Word]:
    """``column AS column [- INTERVAL 'n' UNIT]``."""
    column = cursor.name("the column of the watermark")
    cursor.expect("AS")
    again = cursor.name("the same column")
    if again.text.lower() != column.text.lower():
        cursor.file.fail(f"a watermark is {column.text} - INTERVAL '...' ..., nothing else is understood", again.at)
    if not cursor.accepts("-"):
        return column, Word("0 SECOND", again.at)
    cursor.expect("INTERVAL")
    amount = cursor.string("an amount")
    unit = cursor.name("a unit, such as SECOND")
    return column, Word(f"{amount.text} {unit.text}", amount.at)


def _options(cursor: Cursor) -> tuple[Setting, ...]:
    """``('name' = 'value', ...)``."""
    cursor.expect("(")
    found: list[Setting] = []
    while True:
        name = cursor.string("an option's name")
        cursor.expect("=")
        found.append(Setting(name, cursor.string("the option's value")))
        if not cursor.accepts(","):
            break
    cursor.expect(")", after="or a comma")
    return tuple(found)


def _insert(cursor: Cursor) -> tuple[Word, QueryText]:
    cursor.take()
    if cursor.sees("OVERWRITE"):
        cursor.fail("INSERT OVERWRITE is not understood: a changelog is appended")
    cursor.expect("INTO")
    cursor.accepts("TABLE")
    target = cursor.name("the sink's name")
    begin = end = cursor.token
    if not any(cursor.sees(word) for word in ("SELECT", "WITH")):
        cursor.fail(f"expected SELECT or WITH, found {begin.shown}")
    while not cursor.sees(";") and cursor.token.kind != "end":
        end = cursor.take()
    return target, QueryText(cursor.file.text[begin.start : end.end], begin.start)

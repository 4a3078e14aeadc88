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

import difflib
from typing import Final, TypeVar

from sqlglot import TokenType as T

from gpu_ops.conditions import backquoted
from gpu_ops.jobs.text import Cursor, JobText, QueryText, Setting, TableText, Text, Word

Part = TypeVar("Part")

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
        JobError: it is none; names the position.
    """
    cursor = Cursor(file)
    tables: list[TableText] = []
    settings: list[Setting] = []
    inserted: tuple[Word, QueryText] | None = None
    while not cursor.at_end:
        if cursor.accepts(";"):
            continue
        if cursor.accepts("SET"):
            settings.append(_set(cursor))
        elif cursor.accepts("CREATE", "TABLE") or cursor.accepts("CREATE", "TEMPORARY", "TABLE"):
            tables.append(_create_table(cursor))
        elif not cursor.sees("INSERT"):
            raise cursor.error(f"{cursor.shown} begins no statement that is understood: {_STATEMENTS}")
        elif inserted is not None:
            raise cursor.error("a job has one INSERT INTO; write a second file for a second one")
        else:
            inserted = _insert(cursor)
        if not cursor.at_end:
            cursor.expect(";", after="behind the statement")
    if inserted is None:
        raise cursor.error(f"there is no INSERT INTO: {_STATEMENTS}")
    return _assemble(file, tables, settings, *inserted)


def _assemble(file: Text, tables: list[TableText], settings: list[Setting], target: Word, query: QueryText) -> JobText:
    by_name: dict[str, TableText] = {}
    for table in tables:
        if by_name.setdefault(table.name.text.lower(), table) is not table:
            raise file.error(f"there are two tables {table.name.text!r}", table.name.at)
    sink = by_name.pop(target.text.lower(), None)
    if sink is None:
        known = ", ".join(table.name.text for table in tables) or "none"
        problem = f"there is no table {target.text!r} to insert into: CREATE TABLE it; there are {known}"
        raise file.error(problem, target.at)
    if not by_name:
        raise file.error("there is no source: CREATE TABLE each table that the query reads", query.at)
    return JobText(file, tuple(by_name.values()), sink, query, tuple(settings))


def _set(cursor: Cursor) -> Setting:
    """``SET 'name' = 'value'``; the quotes may be left out."""
    if cursor.token.token_type == T.STRING:
        name = cursor.take()
    else:
        name = end = cursor.name("a setting's name")
        while cursor.accepts(".") or cursor.accepts("-"):
            end = cursor.name("the rest of the setting's name")
        if end is not name:
            name = Word(cursor.file.text[name.at : end.at + len(end.text)], name.at)
    cursor.expect("=")
    plain = cursor.is_word or cursor.token.token_type == T.NUMBER
    return Setting(name, cursor.take() if plain else cursor.string("the setting's value"))


def _create_table(cursor: Cursor) -> TableText:
    cursor.accepts("IF", "NOT", "EXISTS")
    name = cursor.name("a table's name")
    if cursor.sees("."):
        raise cursor.error("catalogs and databases are not understood: a table has a plain name")
    columns: list[tuple[Word, str]] = []
    key: tuple[Word, ...] | None = None
    watermark: tuple[Word, Word] | None = None

    def declaration(cursor: Cursor) -> None:
        nonlocal key, watermark
        at = cursor.token.start
        if cursor.sees("PRIMARY", "KEY") or cursor.sees("CONSTRAINT"):
            if cursor.accepts("CONSTRAINT"):
                cursor.name("the constraint's name")
            cursor.expect("PRIMARY", "KEY", "(")
            key = _once(cursor, key, cursor.listed(lambda each: each.name("a column")), "primary key", at)
            cursor.expect(")")
            cursor.accepts("NOT", "ENFORCED")
        elif cursor.accepts("WATERMARK", "FOR"):
            watermark = _once(cursor, watermark, _watermark(cursor), "watermark", at)
        else:
            column, is_key = _column(cursor)
            columns.append(column)
            if is_key:
                key = _once(cursor, key, column[:1], "primary key", at)

    if cursor.accepts("("):
        cursor.listed(declaration)
        cursor.expect(")", after="or a comma")
    if cursor.accepts("COMMENT"):
        cursor.string("a comment")
    _refuse(cursor, *_REFUSED)
    cursor.expect("WITH", after="and the table's options")
    cursor.expect("(")
    settings = cursor.listed(_option)
    cursor.expect(")", after="or a comma")
    # WITH (...) alone: the columns are those of the data
    return TableText(name, tuple(columns) or None, key, watermark, settings)


def _once(cursor: Cursor, before: Part | None, now: Part, what: str, at: int) -> Part:
    if before is not None:
        raise cursor.file.error(f"a second {what}", at)
    return now


def _refuse(cursor: Cursor, *words: str) -> None:
    for word in words:
        if cursor.sees(word):
            raise cursor.error(_REFUSED[word])


def _column(cursor: Cursor) -> tuple[tuple[Word, str], bool]:
    """A column with its type, and whether it is declared the primary key."""
    name = cursor.name("a column's name")
    _refuse(cursor, "AS")
    kind = _type(cursor)
    is_key = False
    while True:
        if cursor.sees("PRIMARY", "KEY"):
            if is_key:
                raise cursor.error("a second primary key")
            is_key = cursor.accepts("PRIMARY", "KEY")
            cursor.accepts("NOT", "ENFORCED")
        elif cursor.accepts("COMMENT"):
            cursor.string("a comment")
        elif not (cursor.accepts("NOT", "NULL") or cursor.accepts("NULL")):
            break
    _refuse(cursor, "METADATA", "GENERATED")
    return (name, kind), is_key


def _watermark(cursor: Cursor) -> tuple[Word, Word]:
    """``column AS column [- INTERVAL 'n' UNIT]``."""
    column = cursor.name("the column of the watermark")
    cursor.expect("AS")
    again = cursor.name("the same column")
    if again.text.lower() != column.text.lower():
        problem = f"a watermark is {column.text} - INTERVAL '...' ..., nothing else is understood"
        raise cursor.file.error(problem, again.at)
    if not cursor.accepts("-"):
        return column, Word("0 SECOND", again.at)
    cursor.expect("INTERVAL")
    amount = cursor.string("an amount")
    unit = cursor.name("a unit, such as SECOND")
    return column, Word(f"{amount.text} {unit.text}", amount.at)


def _option(cursor: Cursor) -> Setting:
    """``'name' = 'value'``."""
    name = cursor.string("an option's name")
    cursor.expect("=")
    return Setting(name, cursor.string("the option's value"))


def _insert(cursor: Cursor) -> tuple[Word, QueryText]:
    cursor.expect("INSERT")
    if cursor.sees("OVERWRITE"):
        raise cursor.error("INSERT OVERWRITE is not understood: a changelog is appended")
    cursor.expect("INTO")
    cursor.accepts("TABLE")
    target = cursor.name("the sink's name")
    begin = end = cursor.token
    if not (cursor.sees("SELECT") or cursor.sees("WITH")):
        raise cursor.expected("SELECT or WITH")
    while not cursor.sees(";") and not cursor.at_end:
        end = cursor.token
        cursor.take()
    return target, QueryText(cursor.file.text[begin.start : end.end + 1], begin.start)


# --- types: Flink's names and Spark's, as Spark writes them ---------------------------------------

_PLAIN: Final = (T.BOOLEAN, T.TINYINT, T.SMALLINT, T.INT, T.BIGINT, T.FLOAT, T.DOUBLE, T.DATE)
_NESTED: Final = (T.ARRAY, T.MAP, T.ROW, T.STRUCT)

# Spark's strings and bytes are of any length, its times have microseconds: a length or precision is left out.
_SIZED: Final = {
    **dict.fromkeys((T.TEXT, T.VARCHAR, T.CHAR), "STRING"),
    **dict.fromkeys((T.BINARY, T.VARBINARY), "BINARY"),
    **dict.fromkeys((T.TIMESTAMPTZ, T.TIMESTAMPLTZ), "TIMESTAMP"),
    T.TIMESTAMPNTZ: "TIMESTAMP_NTZ",
}


def _type(cursor: Cursor) -> str:
    """Reads a type; ``TIMESTAMP`` is Spark's, an instant, ``TIMESTAMP_NTZ`` the one without a time zone.

    Args:
        cursor: stands before it, and then after it.

    Returns:
        The type as Spark writes it.

    Raises:
        JobError: there is no such type.
    """
    kind, word = cursor.token.token_type, cursor.token.text
    if not cursor.is_word:
        raise cursor.expected("a type")
    if kind in _NESTED:
        return _nested(cursor)
    if kind not in (*_PLAIN, *_SIZED, T.DECIMAL):
        names = [known.name for known in (*_PLAIN, T.DECIMAL, *_NESTED)]
        near = ", ".join(difflib.get_close_matches(word.upper(), [*names, *sorted(set(_SIZED.values()))]))
        raise cursor.error(f"there is no type {word}{near and f'; the nearest are {near}'}")
    cursor.take()
    if kind == T.DECIMAL:
        return f"DECIMAL({', '.join(_sizes(cursor, 2) or ('10', '0'))})"
    if kind in _PLAIN:
        if kind == T.DOUBLE:
            cursor.accepts("PRECISION")
        return kind.name
    _sizes(cursor, 1)
    if kind == T.TIMESTAMPTZ:
        if cursor.accepts("WITHOUT", "TIME", "ZONE"):
            return "TIMESTAMP_NTZ"
        _ = cursor.accepts("WITH", "LOCAL", "TIME", "ZONE") or cursor.accepts("WITH", "TIME", "ZONE")
    return _SIZED[kind]


def _nested(cursor: Cursor) -> str:
    word = cursor.take().text.upper()
    cursor.expect("<", after=f"behind {word}")
    if word == "ARRAY":
        inner = _type(cursor)
    elif word == "MAP":
        key = _type(cursor)
        cursor.expect(",")
        inner = f"{key}, {_type(cursor)}"
    else:
        word, inner = "STRUCT", ", ".join(cursor.listed(_field))
    cursor.expect(">")
    return f"{word}<{inner}>"


def _field(cursor: Cursor) -> str:
    name = cursor.name("a field's name")
    cursor.accepts(":")
    return f"{backquoted(name.text)}: {_type(cursor)}"


def _sizes(cursor: Cursor, most: int) -> tuple[str, ...]:
    """Whole numbers in parentheses; none where there are no parentheses."""
    found: list[str] = []
    if not cursor.accepts("("):
        return ()
    while not found or (len(found) < most and cursor.accepts(",")):
        if cursor.token.token_type != T.NUMBER:
            raise cursor.expected("a number")
        found.append(cursor.take().text)
    cursor.expect(")")
    return tuple(found)

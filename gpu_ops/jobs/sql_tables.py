"""``CREATE TABLE`` in a job: columns, keys, watermarks and options."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final, TypeVar

from gpu_ops.jobs.sql_text import Cursor, Word
from gpu_ops.jobs.sql_types import read_type


@dataclasses.dataclass(frozen=True)
class Setting:
    """A name and its value."""

    name: Word
    value: Word


@dataclasses.dataclass(frozen=True)
class DerivedColumn:
    """A column that is not in the data: computed of others, or of what surrounds a message.

    Attributes:
        name: the column's.
        place: how many columns of the data stand before it.
        expression: what it is computed by, as a query has it; None for metadata.
        metadata: what of a message it is, such as ``timestamp``; None for a computed one.
        kind: the declared type of metadata, as Spark writes it.
        virtual: whether a sink leaves the metadata out.
    """

    name: Word
    place: int
    expression: Word | None = None
    metadata: Word | None = None
    kind: str = ""
    virtual: bool = True

    @property
    def is_clock(self) -> bool:
        """True if the column is ``PROCTIME()``."""
        return self.expression is not None and "".join(self.expression.text.upper().split()) == "PROCTIME()"


@dataclasses.dataclass(frozen=True)
class TableText:
    """A source or the sink, as it is written down.

    Attributes:
        name: what the query calls it.
        columns: of the data: names, and types as Spark writes them; None where none are given.
        primary_key: names of columns, or None.
        watermark: a column, and how late its rows may come, such as ``5 SECOND``; or None.
        settings: all the rest.
        derived: columns that are not in the data.
        partitioned: columns by which files lie in folders.
    """

    name: Word
    columns: tuple[tuple[Word, str], ...] | None
    primary_key: tuple[Word, ...] | None
    watermark: tuple[Word, Word] | None
    settings: tuple[Setting, ...]
    derived: tuple[DerivedColumn, ...] = ()
    partitioned: tuple[Word, ...] = ()


Part = TypeVar("Part")

_REFUSED: Final = {
    "GENERATED": "GENERATED is not understood: a computed column is written name AS expression",
    "DISTRIBUTED": "DISTRIBUTED BY is not understood: leave it out, as the sink's key says where rows go",
}


def create_table(cursor: Cursor, known: Mapping[str, TableText], *, materialized: bool = False) -> TableText:
    """Reads a table, with its options.

    Args:
        cursor: stands before its name.
        known: the tables before it by their names in lower case, for ``LIKE``.
        materialized: a view that is kept in a table, whose query follows.

    Raises:
        JobError: it is none; names the position.
    """
    cursor.accepts("IF", "NOT", "EXISTS")
    name = table_name(cursor, "a table's name")
    declared = _Declared()
    if cursor.accepts("("):
        if not cursor.sees(")"):  # () is nothing, as with LIKE
            cursor.listed(declared.read)
        cursor.expect(")", after="or a comma")
    if cursor.accepts("COMMENT"):
        cursor.string("a comment")
    partitioned: tuple[Word, ...] = ()
    if cursor.accepts("PARTITIONED", "BY"):
        cursor.expect("(")
        partitioned = cursor.listed(lambda each: each.name("a column"))
        cursor.expect(")", after="or a comma")
    if materialized and cursor.sees("AS"):
        raise cursor.error(
            "a materialized view is kept in a sink: WITH ('connector' = ...) before AS; without one it is a CREATE VIEW"
        )
    _refuse(cursor, *_REFUSED)
    settings: tuple[Setting, ...] = ()
    if not cursor.sees("LIKE"):
        cursor.expect("WITH", after="and the table's options")
        cursor.expect("(")
        settings = cursor.listed(read_option)
        cursor.expect(")", after="or a comma")
    elif materialized:
        raise cursor.error("a materialized view has the columns of its query")
    # WITH (...) alone: the columns are those of the data
    columns, derived = tuple(declared.columns) or None, tuple(declared.derived)
    table = TableText(name, columns, declared.key, declared.watermark, settings, derived, partitioned)
    return _like(cursor, table, known) if not materialized and cursor.accepts("LIKE") else table


def table_name(cursor: Cursor, what: str) -> Word:
    """The name of a table, without Flink's own catalog and database before it.

    Raises:
        JobError: another catalog or database.
    """
    name = cursor.name(what)
    for default in ("default_catalog", "default_database"):
        if name.text.lower() == default and cursor.accepts("."):
            name = cursor.name(what)
    if cursor.sees("."):
        raise cursor.error("catalogs and databases are not understood: a table has a plain name")
    return name


class _Declared:
    """The columns, key and watermark in the parentheses of a table."""

    def __init__(self) -> None:
        self.columns: list[tuple[Word, str]] = []
        self.derived: list[DerivedColumn] = []
        self.key: tuple[Word, ...] | None = None
        self.watermark: tuple[Word, Word] | None = None

    def read(self, cursor: Cursor) -> None:
        """Reads one column, key or watermark."""
        at = cursor.token.start
        if cursor.sees("PRIMARY", "KEY") or cursor.sees("CONSTRAINT"):
            if cursor.accepts("CONSTRAINT"):
                cursor.name("the constraint's name")
            cursor.expect("PRIMARY", "KEY", "(")
            self.key = _once(cursor, self.key, cursor.listed(lambda each: each.name("a column")), "primary key", at)
            cursor.expect(")")
            cursor.accepts("NOT", "ENFORCED")
        elif cursor.accepts("WATERMARK", "FOR"):
            self.watermark = _once(cursor, self.watermark, _watermark(cursor), "watermark", at)
        else:
            self._column(cursor, at)

    def _column(self, cursor: Cursor, at: int) -> None:
        """A column with its type, or what it is computed by."""
        name = cursor.name("a column's name")
        if cursor.accepts("AS"):
            self.derived.append(DerivedColumn(name, len(self.columns), expression=_expression(cursor)))
            if cursor.accepts("COMMENT"):
                cursor.string("a comment")
            return
        kind = read_type(cursor)
        is_key, metadata, virtual = False, None, False
        while True:
            if cursor.sees("PRIMARY", "KEY"):
                if is_key:
                    raise cursor.error("a second primary key")
                is_key = cursor.accepts("PRIMARY", "KEY")
                cursor.accepts("NOT", "ENFORCED")
            elif cursor.accepts("COMMENT"):
                cursor.string("a comment")
            elif metadata is None and cursor.accepts("METADATA"):
                metadata = cursor.string("what it is of a message") if cursor.accepts("FROM") else name
                virtual = cursor.accepts("VIRTUAL")
            elif not (cursor.accepts("NOT", "NULL") or cursor.accepts("NULL")):
                break
        _refuse(cursor, "GENERATED")
        if metadata is not None:
            self.derived.append(DerivedColumn(name, len(self.columns), metadata=metadata, kind=kind, virtual=virtual))
        else:
            self.columns.append((name, kind))
        if is_key:
            self.key = _once(cursor, self.key, (name,), "primary key", at)


def _expression(cursor: Cursor) -> Word:
    """An expression, up to the comma or parenthesis behind it."""
    begin, end, depth = cursor.token.start, None, 0
    while depth or not (cursor.sees(",") or cursor.sees(")") or cursor.sees("COMMENT")):
        if cursor.at_end or cursor.sees(";"):
            raise cursor.expected(", or ) behind the expression")
        depth += cursor.sees("(") - cursor.sees(")")
        cursor.take()
        end = cursor.before
    if end is None:
        raise cursor.expected("an expression")
    return Word(cursor.text[begin:end], begin)


_LIKE: Final = ("ALL", "CONSTRAINTS", "DISTRIBUTION", "GENERATED", "METADATA", "OPTIONS", "PARTITIONS", "WATERMARKS")


def _like(cursor: Cursor, table: TableText, known: Mapping[str, TableText]) -> TableText:
    """A table with what it has of another one: ``LIKE other (EXCLUDING OPTIONS)``."""
    name = table_name(cursor, "the other table's name")
    other = known.get(name.text.lower())
    if other is None:
        raise cursor.file.error(f"there is no table {name.text!r} before this one", name.at)
    how = dict.fromkeys(_LIKE, "INCLUDING")
    if cursor.accepts("("):
        while not cursor.accepts(")"):
            word = cursor.name("INCLUDING, EXCLUDING or OVERWRITING").text.upper()
            part = cursor.name("what of the table").text.upper()
            if word not in ("INCLUDING", "EXCLUDING", "OVERWRITING") or part not in _LIKE:
                raise cursor.error(f"{word} {part} is not understood: EXCLUDING or INCLUDING of {', '.join(_LIKE)}")
            how |= dict.fromkeys(_LIKE, word) if part == "ALL" else {part: word}
    taken = {part for part, word in how.items() if word != "EXCLUDING"}
    before = len(other.columns or ())
    derived = [
        column
        for column in other.derived
        if ("GENERATED" if column.expression is not None else "METADATA") in taken
    ]  # fmt: skip
    derived += [dataclasses.replace(column, place=column.place + before) for column in table.derived]
    own = {setting.name.text.lower() for setting in table.settings}
    options = [option for option in other.settings if "OPTIONS" in taken and option.name.text.lower() not in own]
    return TableText(
        table.name,
        (*(other.columns or ()), *(table.columns or ())) or None,
        table.primary_key or (other.primary_key if "CONSTRAINTS" in taken else None),
        table.watermark or (other.watermark if "WATERMARKS" in taken else None),
        (*options, *table.settings),
        tuple(derived),
        table.partitioned or (other.partitioned if "PARTITIONS" in taken else ()),
    )


def _once(cursor: Cursor, before: Part | None, now: Part, what: str, at: int) -> Part:
    if before is not None:
        raise cursor.file.error(f"a second {what}", at)
    return now


def _refuse(cursor: Cursor, *words: str) -> None:
    for word in words:
        if cursor.sees(word):
            raise cursor.error(_REFUSED[word])


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


def read_option(cursor: Cursor) -> Setting:
    """Reads one option, ``'name' = 'value'``."""
    name = cursor.string("an option's name")
    cursor.expect("=")
    return Setting(name, cursor.value("the option's value"))

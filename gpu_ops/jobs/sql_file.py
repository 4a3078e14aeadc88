"""Jobs as SQL, in Flink's form: CREATE TABLE for each source and sink, CREATE VIEW, SET, and INSERT INTO.

::

    CREATE TABLE orders (
        id BIGINT, item STRING, at TIMESTAMP(3),
        PRIMARY KEY (id) NOT ENFORCED,
        WATERMARK FOR at AS at - INTERVAL '5' SECOND
    ) WITH ('connector' = 'parquet', 'path' = 'orders');
    SET 'state' = 'state';
    INSERT INTO changes SELECT ... FROM orders ...;

Tokens are sqlglot's; an error shows its position.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar, Final, TypeVar

import sqlglot
from sqlglot import Token
from sqlglot import TokenType as T
from sqlglot.dialects.spark import Spark
from sqlglot.errors import SqlglotError, TokenError

from gpu_ops.conditions import backquoted
from gpu_ops.errors import DatabaseError, DescriptionError, NotBuiltError, with_caret
from gpu_ops.jobs.secrets import Secrets


class JobError(DescriptionError):
    """A job that cannot be.

    Args:
        message: what is wrong, and what to do instead.
        path: the file.
        line: 1-based line in it.
        column: 1-based column in that line.
        shown: the line.
    """

    def __init__(self, message: str, path: Path, line: int, column: int, shown: str) -> None:
        self.message, self.path, self.line, self.column = message, path, line, column
        super().__init__(f"{path}:{line}:{column}: {message}\n{with_caret(shown, column)}")


@dataclasses.dataclass(frozen=True)
class Text:
    """The text of a job file, what its positions are, and what is hidden in errors."""

    path: Path
    text: str
    secrets: Secrets = dataclasses.field(default_factory=Secrets, compare=False, repr=False)

    def position(self, offset: int) -> tuple[int, int]:
        """Line and column of an offset, both from 1."""
        before = self.text[:offset]
        return before.count("\n") + 1, offset - (before.rfind("\n") + 1) + 1

    def error(self, message: str, offset: int) -> JobError:
        """An error at an offset."""
        return self.error_at(message, *self.position(offset))

    @contextlib.contextmanager
    def errors_at(self, offset: int) -> Iterator[None]:
        """Errors of what is described there, as errors at an offset."""
        try:
            yield
        except (DatabaseError, DescriptionError, NotBuiltError) as error:
            if isinstance(error, JobError):
                raise
            raise self.error(str(error), offset) from error

    def error_at(self, message: str, line: int, column: int) -> JobError:
        """An error at a line and column."""
        lines = self.text.split("\n")
        shown = lines[line - 1].rstrip("\r") if line <= len(lines) else ""
        shown = re.sub(r"(?<=://)[^\s'\"]*(?=@)", lambda match: "*" * len(match[0]), shown)  # a URI's credentials
        return JobError(self.secrets.hidden(message), self.path, line, column, shown)


@dataclasses.dataclass(frozen=True)
class Word:
    """A name or value, and its offset in the file.

    Attributes:
        text: as written; of a value that stands elsewhere, that value.
        at: the offset.
        secret: whether it stands elsewhere.
    """

    text: str
    at: int
    secret: bool = False


@dataclasses.dataclass(frozen=True)
class Setting:
    """A name and its value."""

    name: Word
    value: Word


@dataclasses.dataclass(frozen=True)
class TableText:
    """A source or the sink, as it is written down.

    Attributes:
        name: what the query calls it.
        columns: names, and types as Spark writes them; None where none are given.
        primary_key: names of columns, or None.
        watermark: a column, and how late its rows may come, such as ``5 SECOND``; or None.
        settings: all the rest.
    """

    name: Word
    columns: tuple[tuple[Word, str], ...] | None
    primary_key: tuple[Word, ...] | None
    watermark: tuple[Word, Word] | None
    settings: tuple[Setting, ...]


@dataclasses.dataclass(frozen=True)
class JobQuery:
    """The query of a job file, and where it stands in it.

    Attributes:
        text: without what is around it in the file.
        at: where it begins.
    """

    text: str
    at: int

    def position(self, file: Text, line: int, column: int) -> tuple[int, int]:
        """Line and column in the file of a line and column of the query."""
        first_line, first_column = file.position(self.at)
        return first_line + line - 1, column + (first_column - 1 if line == 1 else 0)


@dataclasses.dataclass(frozen=True)
class JobText:
    """A job as it is written down.

    Attributes:
        file: its text.
        sources: the tables that it reads.
        views: names of queries, and the queries; a query may name those before it.
        inserts: the tables that it writes, each with the query that it takes the rows of.
        settings: the rest.
    """

    file: Text
    sources: tuple[TableText, ...]
    views: tuple[tuple[Word, JobQuery], ...]
    inserts: tuple[tuple[TableText, JobQuery], ...]
    settings: tuple[Setting, ...]


def tables_named(query: str) -> frozenset[str]:
    """The tables and views that a query reads, in lower case.

    Args:
        query: in Spark's dialect.
    """
    try:
        read = sqlglot.parse_one(query, dialect="spark")
    except SqlglotError:  # a clause that is ours, or a mistake, which whoever plans the query tells
        return frozenset(re.findall(r"\w+", query.lower()))
    named = {table.name.lower() for table in read.find_all(sqlglot.exp.Table)}
    return frozenset(named - {one.alias.lower() for one in read.find_all(sqlglot.exp.CTE)})


# --- tokens ---------------------------------------------------------------------------------------

Item = TypeVar("Item")

_BLANK: Final = re.compile(r"(?:\s|--[^\n]*|/\*(?!\+).*?\*/)*", re.DOTALL)
"""Space and comments; a hint is none."""

_QUOTED: Final = (T.STRING, T.IDENTIFIER)
_END: Final = T.BREAK
_UNCLOSED: Final = "a quote or comment is opened here and not closed"


class JobSql(Spark):
    """Spark's tokens, but names in double quotes and doubled quotes in strings as Flink has them."""

    class Tokenizer(Spark.Tokenizer):
        """Keywords are single words, so that each word of a statement is a token."""

        QUOTES: ClassVar = ["'"]
        IDENTIFIERS: ClassVar = ["`", '"']
        STRING_ESCAPES: ClassVar = ["\\", "'"]
        HEX_STRINGS: ClassVar = []
        NUMERIC_LITERALS: ClassVar = {}
        COMMANDS: ClassVar = set()
        NESTED_COMMENTS = False
        KEYWORDS: ClassVar = {
            **{word: kind for word, kind in Spark.Tokenizer.KEYWORDS.items() if word.isidentifier()},
            "BYTES": T.BINARY,
        }


def tokenize(file: Text) -> list[Token]:
    """The tokens of a file, and one for its end.

    Raises:
        JobError: a quote or comment that is not closed, or a hint.
    """
    try:
        tokens = JobSql().tokenize(file.text)
    except TokenError as error:
        quote = re.search(r":(\d+)$", str(error.__cause__))
        comment = max(0, file.text.find("/*", file.text.rfind("*/") + 1))
        raise file.error(_UNCLOSED, int(quote[1]) if quote else comment) from error
    length, before = len(file.text), 0
    tokens.append(Token(_END, "", start=length, end=length))
    for token in tokens:
        # sqlglot takes a hint for a comment, and what follows an unclosed comment for a part of it
        blank = _BLANK.match(file.text, before)
        if blank is not None and blank.end() < token.start:
            hint = file.text.startswith("/*+", blank.end())
            problem = "hints are not understood: an option stands in WITH (...) or in SET" if hint else _UNCLOSED
            raise file.error(problem, blank.end())
        before = token.end + 1
    return tokens


class Cursor:
    """Reads the tokens of a file one after the other.

    Raises:
        JobError: a quote or comment that is not closed, or a hint.
    """

    def __init__(self, file: Text) -> None:
        self.file, self._tokens, self._next = file, tokenize(file), 0

    @property
    def token(self) -> Token:
        """The token that comes next."""
        return self._tokens[self._next]

    @property
    def at_end(self) -> bool:
        """True if no token is left."""
        return self.token.token_type == _END

    @property
    def is_word(self) -> bool:
        """True if the next token is a word without quotes."""
        return self.token.token_type not in _QUOTED and self.token.text.isidentifier()

    @property
    def shown(self) -> str:
        """The next one as an error names it."""
        if self.at_end:
            return "the end of the text"
        return f"{'the string ' if self.token.token_type == T.STRING else ''}{self.token.text!r}"

    def take(self) -> Word:
        """The next one, and goes on; a string's backslashes stay for Spark."""
        token = self.token
        self._next = min(self._next + 1, len(self._tokens) - 1)
        is_string = token.token_type == T.STRING
        text = self.file.text[token.start + 1 : token.end].replace("''", "'") if is_string else token.text
        return Word(text, token.start)

    def sees(self, *texts: str) -> bool:
        """True if these words or symbols come next; case does not matter."""
        coming = self._tokens[self._next : self._next + len(texts)]
        return [None if token.token_type in _QUOTED else token.text.upper() for token in coming] == list(texts)

    def accepts(self, *texts: str) -> bool:
        """Goes past these words or symbols if they come next."""
        if not self.sees(*texts):
            return False
        self._next += len(texts)
        return True

    def expect(self, *texts: str, after: str = "") -> None:
        """Goes past these words or symbols.

        Raises:
            JobError: something else comes.
        """
        for text in texts:
            if not self.accepts(text):
                raise self.expected(f"{text} {after}".rstrip())

    def name(self, what: str) -> Word:
        """A name, quoted or not.

        Raises:
            JobError: something else comes.
        """
        if not self.is_word and self.token.token_type != T.IDENTIFIER:
            raise self.expected(what)
        return self.take()

    def string(self, what: str) -> Word:
        """A string in single quotes.

        Raises:
            JobError: something else comes.
        """
        if self.token.token_type != T.STRING:
            raise self.expected(f"{what} in single quotes")
        return self.take()

    def value(self, what: str) -> Word:
        """A string in single quotes, with what stands elsewhere in its place.

        Raises:
            JobError: something else comes, or a value is nowhere.
        """
        written = self.string(what)
        with self.file.errors_at(written.at):
            text = self.file.secrets.resolved(written.text)
        return Word(text, written.at, secret=text != written.text)

    def listed(self, read: Callable[[Cursor], Item]) -> tuple[Item, ...]:
        """Reads a list of one item or more, separated by commas."""
        entries = [read(self)]
        while self.accepts(","):
            entries.append(read(self))
        return tuple(entries)

    def expected(self, what: str) -> JobError:
        """The error that something else comes next."""
        return self.error(f"expected {what}, found {self.shown}")

    def error(self, message: str) -> JobError:
        """An error at the next token."""
        return self.file.error(message, self.token.start)


# --- statements -----------------------------------------------------------------------------------

Part = TypeVar("Part")

_STATEMENTS: Final = "a job has CREATE TABLE, CREATE VIEW, CREATE MATERIALIZED VIEW, SET and INSERT INTO ... SELECT"

_REFUSED: Final = {
    "GENERATED": "generated columns are not understood",
    "METADATA": "metadata columns are not understood: declare only what is in the data",
    "AS": "computed columns are not understood: compute them in the query",
    "LIKE": "LIKE is not understood: name the columns",
    "PARTITIONED": "PARTITIONED BY is not understood",
    "DISTRIBUTED": "DISTRIBUTED BY is not understood",
}


def read_sql(file: Text) -> JobText:
    """Reads a job from a file in SQL.

    Raises:
        JobError: it is none; names the position.
    """
    cursor = Cursor(file)
    tables: list[TableText] = []
    views: list[tuple[Word, JobQuery]] = []
    inserts: list[tuple[TableText | Word, JobQuery]] = []
    settings: list[Setting] = []
    in_set: Word | None = None
    while not cursor.at_end:
        if cursor.accepts(";"):
            continue
        begin = Word("", cursor.token.start)
        if cursor.accepts("SET"):
            settings.append(_set(cursor))
        elif _create(cursor, "VIEW"):
            views.append(_create_view(cursor))
        elif _create(cursor, "TABLE"):
            tables.append(_create_table(cursor))
        elif _create(cursor, "MATERIALIZED", "VIEW"):
            table = _create_table(cursor, materialized=True)
            views.append((table.name, _query(cursor)))
            inserts.append((table, views[-1][1]))
        elif in_set is None and (
            cursor.accepts("EXECUTE", "STATEMENT", "SET", "BEGIN") or cursor.accepts("BEGIN", "STATEMENT", "SET")
        ):
            in_set = begin
            cursor.accepts(";")
            continue
        elif in_set is not None and cursor.accepts("END"):
            in_set = None
        elif cursor.sees("INSERT"):
            inserts.append(_insert(cursor))
        else:
            raise cursor.error(f"{cursor.shown} begins no statement that is understood: {_STATEMENTS}")
        if not cursor.at_end:
            cursor.expect(";", after="behind the statement")
    if in_set is not None:
        raise file.error("this statement set has no END", in_set.at)
    if not inserts:
        raise cursor.error(f"there is no INSERT INTO and no CREATE MATERIALIZED VIEW: {_STATEMENTS}")
    return _assemble(file, tables, views, inserts, settings)


def _create(cursor: Cursor, *what: str) -> bool:
    """Goes past the words that create something of a kind."""
    return cursor.accepts("CREATE", *what) or cursor.accepts("CREATE", "TEMPORARY", *what)


def _assemble(
    file: Text,
    tables: list[TableText],
    views: list[tuple[Word, JobQuery]],
    inserts: list[tuple[TableText | Word, JobQuery]],
    settings: list[Setting],
) -> JobText:
    by_name: dict[str, TableText | None] = {}
    named = [(table.name, table) for table in tables] + [(name, None) for name, _ in views]
    for name, table in sorted(named, key=lambda each: each[0].at):
        if name.text.lower() in by_name:
            raise file.error(f"there are two tables or views {name.text!r}", name.at)
        by_name[name.text.lower()] = table
    into: dict[str, tuple[TableText, JobQuery]] = {}
    for target, query in inserts:
        word = target if isinstance(target, Word) else target.name
        sink = by_name.get(word.text.lower()) if isinstance(target, Word) else target
        if sink is None:
            known = ", ".join(table.name.text for table in tables) or "none"
            problem = f"there is no table {word.text!r} to insert into: CREATE TABLE it; there are {known}"
            raise file.error(problem, word.at)
        if word.text.lower() in into:
            problem = f"a second INSERT INTO {word.text}: put both queries into one, with UNION ALL between"
            raise file.error(problem, word.at)
        into[word.text.lower()] = sink, query
    sources = tuple(table for table in tables if table.name.text.lower() not in into)
    if not sources:
        first = next(iter(into.values()))[1]
        raise file.error("there is no source: CREATE TABLE each table that the query reads", first.at)
    return JobText(file, sources, tuple(views), tuple(into.values()), tuple(settings))


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
    return Setting(name, cursor.take() if plain else cursor.value("the setting's value"))


def _create_view(cursor: Cursor) -> tuple[Word, JobQuery]:
    """A view: a name for a query, which those behind it read."""
    cursor.accepts("IF", "NOT", "EXISTS")
    name = cursor.name("a view's name")
    if cursor.sees("("):
        raise cursor.error("a view's columns are named in its SELECT, with AS")
    if cursor.accepts("COMMENT"):
        cursor.string("a comment")
    return name, _query(cursor)


def _query(cursor: Cursor) -> JobQuery:
    """The query of a view."""
    cursor.expect("AS", after="and the view's SELECT")
    return _select(cursor)


def _create_table(cursor: Cursor, *, materialized: bool = False) -> TableText:
    """A table, with its options; ``materialized``: a view that is kept in one, whose query follows."""
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
    if materialized and cursor.sees("AS"):
        raise cursor.error(
            "a materialized view is kept in a sink: WITH ('connector' = ...) before AS; without one it is a CREATE VIEW"
        )
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
    """Reads one option, ``'name' = 'value'``."""
    name = cursor.string("an option's name")
    cursor.expect("=")
    return Setting(name, cursor.value("the option's value"))


def _insert(cursor: Cursor) -> tuple[Word, JobQuery]:
    cursor.expect("INSERT")
    if cursor.sees("OVERWRITE"):
        raise cursor.error("INSERT OVERWRITE is not understood: a changelog is appended")
    cursor.expect("INTO")
    cursor.accepts("TABLE")
    return cursor.name("the sink's name"), _select(cursor)


def _select(cursor: Cursor) -> JobQuery:
    """A query, up to the end of its statement."""
    begin = end = cursor.token
    if not (cursor.sees("SELECT") or cursor.sees("WITH")):
        raise cursor.expected("SELECT or WITH")
    while not cursor.sees(";") and not cursor.at_end:
        end = cursor.token
        cursor.take()
    return JobQuery(cursor.file.text[begin.start : end.end + 1], begin.start)


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
    sizes: list[str] = []
    if not cursor.accepts("("):
        return ()
    while not sizes or (len(sizes) < most and cursor.accepts(",")):
        if cursor.token.token_type != T.NUMBER:
            raise cursor.expected("a number")
        sizes.append(cursor.take().text)
    cursor.expect(")")
    return tuple(sizes)

"""Jobs as SQL, in Flink's form: CREATE TABLE for each source and sink, CREATE VIEW, SET, and INSERT INTO.

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

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Final

import sqlglot
from sqlglot import TokenType as T
from sqlglot.errors import SqlglotError

from gpu_ops.conditions import backquoted
from gpu_ops.jobs.flink_query import DIFFERENT, FlinkQuery, ProcessingTimes, translated
from gpu_ops.jobs.sql_tables import Setting, TableText, create_table, table_name
from gpu_ops.jobs.sql_text import Cursor, Hint, JobError, Note, Text, Word, hints_apart, milliseconds
from gpu_ops.query.errors import SqlError


@dataclasses.dataclass(frozen=True)
class JobQuery:
    """The query of a job file, and where it stands in it.

    Attributes:
        text: without what is around it in the file, and without hints.
        at: where it begins.
        translated: in Spark's words.
        hints: those in it, each with the word before it.
    """

    text: str
    at: int
    translated: FlinkQuery = dataclasses.field(default=FlinkQuery("", ""), repr=False, compare=False)
    hints: tuple[tuple[Hint, Word], ...] = dataclasses.field(default=(), repr=False, compare=False)

    def position(self, file: Text, line: int, column: int) -> tuple[int, int]:
        """Line and column in the file of a line and column of the query."""
        first_line, first_column = file.position(self.at)
        return first_line + line - 1, column + (first_column - 1 if line == 1 else 0)

    def named_by(self, columns: Sequence[str]) -> JobQuery:
        """The query; where two of its columns have one name, with the names of a sink that it goes to by position."""
        try:
            read = sqlglot.parse_one(self.translated.sql, dialect="spark")
        except SqlglotError:
            return self
        names = [name.lower() for name in read.named_selects] if isinstance(read, sqlglot.exp.Query) else []
        if len(set(names)) == len(names) or len(names) != len(columns) or "*" in names:
            return self
        end = len(self.text)
        pieces = self.translated.pieces or ((self.text, 0, True),)
        after = f") AS __named ({', '.join(map(backquoted, columns))})"
        around = (("SELECT * FROM (", 0, False), *pieces, (after, end, False))
        sql = "".join(text for text, _, _ in around)
        named = dataclasses.replace(self.translated, sql=sql, pieces=around)
        return dataclasses.replace(self, translated=named)

    def error(self, file: Text, error: SqlError) -> JobError:
        """An error in what Spark is given as one in the file."""
        place = (error.line, error.column)
        if error.sql != self.text:
            place = self.translated.place(*place)
        return file.error_at(error.message, *self.position(file, *place))

    @property
    def tables(self) -> frozenset[str]:
        """The tables and views that it reads, in lower case."""
        return tables_named(self.translated.sql)


@dataclasses.dataclass(frozen=True)
class JobText:
    """A job as it is written down.

    Attributes:
        file: its text.
        sources: the tables that it reads.
        views: names of queries, and the queries; a query may name those before it.
        inserts: the tables that it writes, each with the query that it takes the rows of.
        settings: the rest.
        notes: what it says that has no effect here.
    """

    file: Text
    sources: tuple[TableText, ...]
    views: tuple[tuple[Word, JobQuery], ...]
    inserts: tuple[tuple[TableText, JobQuery], ...]
    settings: tuple[Setting, ...]
    notes: tuple[Note, ...] = ()


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


# --- statements -----------------------------------------------------------------------------------

_STATEMENTS: Final = (
    "a job has CREATE TABLE, CREATE VIEW, CREATE MATERIALIZED VIEW, SET, SELECT and INSERT INTO ... SELECT"
)
_IN_PYTHON: Final = "register the function with Spark, spark.udf.register(...), and call gpu_ops.sql"
_NO_CATALOG: Final = "a job's tables have plain names, and WITH says where each is: leave the statement out"
_REFUSED: Final[dict[tuple[str, ...], str]] = {
    ("CREATE", "CATALOG"): _NO_CATALOG,
    ("CREATE", "DATABASE"): _NO_CATALOG,
    ("USE",): _NO_CATALOG,
    ("CREATE", "FUNCTION"): _IN_PYTHON,
    ("CREATE", "TEMPORARY", "FUNCTION"): _IN_PYTHON,
    ("CREATE", "TEMPORARY", "SYSTEM", "FUNCTION"): _IN_PYTHON,
    ("ADD", "JAR"): "jars come with --packages, or SET 'spark.packages'",
    ("LOAD",): "functions are Spark's: leave the statement out",
    ("ALTER",): "write it in the CREATE TABLE",
    ("DROP",): "only DROP ... IF EXISTS before a CREATE is understood, where there is nothing to drop",
    ("RESET",): "leave it and the SET before it out",
    ("DELETE",): "rows leave a table when a change feed deletes them",
    ("UPDATE",): "rows change when a change feed updates them",
    ("INSERT", "OVERWRITE"): "INSERT OVERWRITE is not understood: a changelog is appended",
}
"""What other statements of Flink's are here."""
_SHOWS: Final = ("SHOW", "DESCRIBE", "DESC", "EXPLAIN")
_HINTS: Final = (
    "BROADCAST",
    "SHUFFLE_HASH",
    "SHUFFLE_MERGE",
    "NEST_LOOP",
    "LOOKUP",
    "MULTI_JOIN",
    "JSON_AGGREGATE_WRAPPED",
)
"""Hints of Flink's about how a query runs, not what it gives."""
_DEFAULTS: Final = ("default_catalog", "default_database")


def read_sql(file: Text) -> JobText:
    """Reads a job from a file in SQL.

    Raises:
        JobError: it is none; names the position.
    """
    return _Script(file).read()


class _Script:
    """The statements of a file."""

    def __init__(self, file: Text) -> None:
        text, self.hints = hints_apart(file)
        self.file, self.cursor = file, Cursor(file, text)
        self.tables: list[TableText] = []
        self.views: list[tuple[Word, JobQuery]] = []
        self.inserts: list[tuple[TableText | Word, JobQuery]] = []
        self.settings: list[Setting] = []
        self.notes: list[Note] = []
        self.options: dict[str, tuple[Setting, ...]] = {}
        self.selects = 0
        self.in_set: Word | None = None

    def read(self) -> JobText:
        """Reads all of them."""
        while not self.cursor.at_end:
            if self.cursor.accepts(";"):
                continue
            begins_set = self._statement()
            if not self.cursor.at_end and not begins_set:
                self.cursor.expect(";", after="behind the statement")
        if self.in_set is not None:
            raise self.file.error("this statement set has no END", self.in_set.at)
        used = {hint for _, query in (*self.views, *self.inserts) for hint, _ in query.hints}
        for hint in self.hints:
            if hint not in used:
                raise self.file.error("a hint stands behind SELECT, or behind the name of a table in a query", hint.at)
        if not self.inserts:
            problem = f"there is no INSERT INTO, no CREATE MATERIALIZED VIEW and no SELECT: {_STATEMENTS}"
            raise self.cursor.error(problem)
        return self._assembled()

    def _statement(self) -> bool:
        """Reads one statement; true for the beginning of a statement set, which needs no semicolon."""
        cursor, begin = self.cursor, Word("", self.cursor.token.start)
        if cursor.accepts("SET"):
            self.settings.append(_set(cursor))
        elif self._create("VIEW"):
            self.views.append(self._view())
        elif self._create("TABLE"):
            self._table()
        elif self._create("MATERIALIZED", "VIEW"):
            table = create_table(cursor, {}, materialized=True)
            cursor.expect("AS", after="and the view's SELECT")
            self._kept(table, self._select())
        elif self.in_set is None and (
            cursor.accepts("EXECUTE", "STATEMENT", "SET", "BEGIN") or cursor.accepts("BEGIN", "STATEMENT", "SET")
        ):
            self.in_set = begin
            return True
        elif self.in_set is not None and cursor.accepts("END"):
            self.in_set = None
        elif cursor.sees("INSERT", "INTO"):
            self._insert()
        elif cursor.sees("SELECT") or cursor.sees("WITH"):
            self.selects += 1
            name = Word("result" if self.selects == 1 else f"result_{self.selects}", begin.at)
            console = Setting(Word("connector", begin.at), Word("console", begin.at))
            self.inserts.append((TableText(name, None, None, None, (console,)), self._select()))
        elif any(cursor.sees(word) for word in _SHOWS):
            self.notes.append(Note(f"{cursor.rest().text.split()[0]} has no effect here: see --explain", begin.at))
        elif not self._nothing_to_do():
            words = next((words for words in _REFUSED if cursor.sees(*words)), None)
            if words is not None:
                raise cursor.error(f"{' '.join(words)} is not understood: {_REFUSED[words]}")
            raise cursor.error(f"{cursor.shown} begins no statement that is understood: {_STATEMENTS}")
        return False

    def _nothing_to_do(self) -> bool:
        """Goes past a statement that asks for what is so already."""
        cursor = self.cursor
        for default in _DEFAULTS:
            if cursor.accepts("USE", "CATALOG", default.upper()) or cursor.accepts("USE", default.upper()):
                return True
        for kind in ("TABLE", "VIEW"):
            if cursor.sees("DROP", kind, "IF", "EXISTS") or cursor.sees("DROP", "TEMPORARY", kind, "IF", "EXISTS"):
                at = cursor.token.start
                while not cursor.accepts("EXISTS"):
                    cursor.take()
                name = table_name(cursor, "a name")
                if name.text.lower() in self._known() | {view.text.lower(): None for view, _ in self.views}:
                    raise self.file.error(f"{name.text} is created above: leave that out, and DROP, too", at)
                return True
        return False

    def _create(self, *what: str) -> bool:
        """Goes past the words that create something of a kind."""
        befores = ((), ("TEMPORARY",), ("OR", "REPLACE"), ("OR", "REPLACE", "TEMPORARY"))
        return any(self.cursor.accepts("CREATE", *before, *what) for before in befores)

    def _known(self) -> dict[str, TableText]:
        return {table.name.text.lower(): table for table in self.tables}

    def _table(self) -> None:
        table = create_table(self.cursor, self._known())
        if self.cursor.accepts("AS"):
            if table.columns is not None or table.derived:
                raise self.file.error("the columns are those of the SELECT: name none", table.name.at)
            self._kept(table, self._select())
        else:
            self.tables.append(table)

    def _kept(self, table: TableText, query: JobQuery) -> None:
        """A view that is kept in a table."""
        self.views.append((table.name, query))
        self.inserts.append((table, query))

    def _view(self) -> tuple[Word, JobQuery]:
        """A view: a name for a query, which those behind it read."""
        cursor = self.cursor
        cursor.accepts("IF", "NOT", "EXISTS")
        name = table_name(cursor, "a view's name")
        if cursor.sees("("):
            raise cursor.error("a view's columns are named in its SELECT, with AS")
        if cursor.accepts("COMMENT"):
            cursor.string("a comment")
        cursor.expect("AS", after="and the view's SELECT")
        return name, self._select()

    def _insert(self) -> None:
        self.cursor.expect("INSERT", "INTO")
        self.cursor.accepts("TABLE")
        name = table_name(self.cursor, "the sink's name")
        self._in_order(name)
        self.inserts.append((name, self._select(after=name)))

    def _in_order(self, name: Word) -> None:
        """The columns of an INSERT, which are the table's."""
        at = self.cursor.token.start
        if not self.cursor.accepts("("):
            return
        columns = self.cursor.listed(lambda each: each.name("a column"))
        self.cursor.expect(")", after="or a comma")
        table = self._known().get(name.text.lower())
        known = [column.text.lower() for column, _ in (table.columns or () if table is not None else ())]
        if [column.text.lower() for column in columns] != known:
            problem = "the columns of INSERT INTO are those of the table, all of them and in its order, or left out"
            raise self.file.error(problem, at)

    def _select(self, after: Word | None = None) -> JobQuery:
        """A query, up to the end of its statement; hints ``after`` a table stand in it, too."""
        cursor = self.cursor
        if not (cursor.sees("SELECT") or cursor.sees("WITH")):
            raise cursor.expected("SELECT or WITH")
        begin, words = cursor.token.start, [] if after is None else [after]
        while not cursor.sees(";") and not cursor.at_end:
            words.append(cursor.take())
        inside = [hint for hint in self.hints if words[0].at < hint.at < cursor.token.start]
        placed = tuple((hint, next(word for word in reversed(words) if word.at < hint.at)) for hint in inside)
        text = cursor.text[begin : cursor.before]
        return JobQuery(text, begin, hints=placed)

    # --- all of them ----------------------------------------------------------------------------

    def _assembled(self) -> JobText:
        self._read_queries()
        by_name: dict[str, TableText | None] = {}
        named = [(table.name, table) for table in self.tables] + [(name, None) for name, _ in self.views]
        for name, table in sorted(named, key=lambda each: each[0].at):
            if name.text.lower() in by_name:
                raise self.file.error(f"there are two tables or views {name.text!r}", name.at)
            by_name[name.text.lower()] = table
        self._take_hints(by_name)
        into: dict[str, tuple[TableText, JobQuery]] = {}
        for target, query in self.inserts:
            word = target if isinstance(target, Word) else target.name
            sink = by_name.get(word.text.lower()) if isinstance(target, Word) else target
            if sink is None:
                known = ", ".join(table.name.text for table in self.tables) or "none"
                problem = f"there is no table {word.text!r} to insert into: CREATE TABLE it; there are {known}"
                raise self.file.error(problem, word.at)
            if word.text.lower() in into:
                problem = f"a second INSERT INTO {word.text}: put both queries into one, with UNION ALL between"
                raise self.file.error(problem, word.at)
            into[word.text.lower()] = self._with_options(sink), query
        sources = self._sources(into)
        views, inserts = tuple(self.views), tuple(into.values())
        return JobText(self.file, sources, views, inserts, tuple(self.settings), tuple(self.notes))

    def _read_queries(self) -> None:
        """The queries in Spark's words."""
        clocks = [column.name.text for table in self.tables for column in table.derived if column.is_clock]
        queries = list(dict.fromkeys(query for _, query in (*self.views, *self.inserts)))
        times = ProcessingTimes.of(clocks, [query.text for query in queries])
        read = dict[JobQuery, JobQuery]()
        for query in queries:
            try:
                read[query] = dataclasses.replace(query, translated=translated(query.text, times))
            except SqlError as error:
                raise query.error(self.file, error) from error
            for function, difference in DIFFERENT.items():
                match = re.search(rf"(?i)\b{function}\s*\(", query.text)
                if match is not None:
                    self.notes.append(Note(f"{function} is Spark's: {difference}", query.at + match.start()))
        self.views = [(name, read[query]) for name, query in self.views]
        self.inserts = [(target, read[query]) for target, query in self.inserts]
        known = self._known()
        for place, (target, query) in enumerate(self.inserts):
            table = known.get(target.text.lower()) if isinstance(target, Word) else None
            columns = [] if table is None else [name.text for name, _ in table.columns or ()]
            self.inserts[place] = target, query.named_by(columns)

    def _sources(self, into: Mapping[str, tuple[TableText, JobQuery]]) -> tuple[TableText, ...]:
        """The tables that queries read."""
        queries = list(dict.fromkeys(query for _, query in (*self.views, *self.inserts)))
        views = {name.text.lower() for name, _ in self.views}
        for query in queries:
            for name in sorted(query.tables & into.keys() - views):
                if re.search(rf"(?i)\b(from|join)\s+`?{re.escape(name)}\b", query.text):
                    problem = f"{name} is written by an INSERT of this job: read it in a job of its own"
                    raise self.file.error(f"{problem}, or make it a CREATE MATERIALIZED VIEW", query.at)
        left = [table for table in self.tables if table.name.text.lower() not in into]
        if not left:
            first = next(iter(into.values()))[1]
            raise self.file.error("there is no source: CREATE TABLE each table that the query reads", first.at)
        read = frozenset().union(*(query.tables for query in queries))
        sources = [table for table in left if table.name.text.lower() in read]
        for table in left if sources else ():
            if table not in sources:
                self.notes.append(Note(f"no query names the table {table.name.text!r}", table.name.at))
        return tuple(map(self._with_options, sources or left))

    # --- hints ----------------------------------------------------------------------------------

    def _with_options(self, table: TableText) -> TableText:
        """A table with the options that hints give it."""
        options = self.options.get(table.name.text.lower(), ())
        names = {option.name.text.lower() for option in options}
        kept = [setting for setting in table.settings if setting.name.text.lower() not in names]
        return dataclasses.replace(table, settings=(*kept, *options))

    def _take_hints(self, by_name: Mapping[str, TableText | None]) -> None:
        """Options and times to live of the tables that hints name."""
        queries = dict.fromkeys(query for _, query in (*self.views, *self.inserts))
        for query in queries:
            for hint, before in query.hints:
                if hint.name == "OPTIONS":
                    options = tuple(Setting(name, value or Word("", name.at)) for name, value in hint.values)
                    self._give(by_name, before, options, hint)
                elif hint.name == "STATE_TTL" and before.text.upper() == "SELECT":
                    self._take_ttl(by_name, query, hint)
                elif hint.name in _HINTS and before.text.upper() == "SELECT":
                    self.notes.append(
                        Note(f"{hint.name} has no effect here: there is one way to run each join", hint.at)
                    )
                else:
                    problem = f"the hint {hint.name} is not understood"
                    where = (
                        "OPTIONS behind a table's name; STATE_TTL behind SELECT; an option stands in WITH or SET, too"
                    )
                    raise self.file.error(f"{problem}: there are {where}", hint.at)
        for name in self.options:
            readers = [query for query in queries if name in query.tables]
            hinted = [query for query in readers if any(before.text.lower() == name for _, before in query.hints)]
            ttl_alone = all(option.name.text == "ttl" for option in self.options[name])
            if len(hinted) < len(readers) and not ttl_alone:
                other = next(query for query in readers if query not in hinted)
                problem = f"{name} is read with OPTIONS elsewhere and without here: write a CREATE TABLE for each"
                raise self.file.error(problem, other.at)

    def _give(
        self, by_name: Mapping[str, TableText | None], name: Word, options: tuple[Setting, ...], hint: Hint
    ) -> None:
        table = by_name.get(name.text.lower())
        if table is None:
            raise self.file.error(f"{hint.name} belongs to a table, and {name.text!r} is none", hint.at)
        before = self.options.get(name.text.lower(), ())
        given = {option.name.text: option.value.text for option in before}
        if any(given.get(option.name.text, option.value.text) != option.value.text for option in options):
            problem = f"{name.text} has other {hint.name} elsewhere: write a CREATE TABLE for each"
            raise self.file.error(problem, hint.at)
        added = tuple(option for option in options if option.name.text not in given)
        self.options[name.text.lower()] = (*before, *added)

    def _take_ttl(self, by_name: Mapping[str, TableText | None], query: JobQuery, hint: Hint) -> None:
        aliases = aliases_in(query.translated.sql)
        for name, value in hint.values:
            if value is None:
                raise self.file.error("STATE_TTL('table' = '1 d') says how long a table's rows are kept", hint.at)
            table = Word(aliases.get(name.text.lower(), name.text), name.at)
            with self.file.errors_at(value.at):
                kept = f"{milliseconds(value.text)} milliseconds"
            self._give(by_name, table, (Setting(Word("ttl", name.at), Word(kept, value.at)),), hint)


def aliases_in(query: str) -> dict[str, str]:
    """The tables of a query by the names that it gives them, in lower case; none where it cannot be read."""
    try:
        read = sqlglot.parse_one(query, dialect="spark")
    except SqlglotError:
        return {}
    return {(table.alias or table.name).lower(): table.name.lower() for table in read.find_all(sqlglot.exp.Table)}


def _set(cursor: Cursor) -> Setting:
    """``SET 'name' = 'value'``; the quotes may be left out."""
    if cursor.token.token_type == T.STRING:
        name = cursor.take()
    else:
        name = cursor.name("a setting's name")
        while cursor.accepts(".") or cursor.accepts("-"):
            cursor.name("the rest of the setting's name")
        name = Word(cursor.text[name.at : cursor.before], name.at)
    cursor.expect("=")
    if cursor.token.token_type == T.STRING:
        return Setting(name, cursor.value("the setting's value"))
    if not cursor.is_plain:
        raise cursor.expected("the setting's value in single quotes")
    begin = cursor.take()
    while cursor.is_plain or cursor.sees("-") or cursor.sees("."):
        cursor.take()  # 36 h
    return Setting(name, Word(cursor.text[begin.at : cursor.before], begin.at))

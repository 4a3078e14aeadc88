"""Flink's words in a query of a job, in Spark's: windows of time, types in casts, a few functions.

``FROM TABLE(TUMBLE(TABLE t, DESCRIPTOR(at), INTERVAL '10' MINUTES))`` becomes a sub-query with Spark's ``window``::

    (SELECT * EXCEPT (__window), __window.start AS window_start, __window.end AS window_end, ...
     FROM (SELECT *, window(at, '10 MINUTES') AS __window FROM t))

Of ``CUMULATE`` the windows are those of ``HOP`` that end within their tumbling window. What has no equal in Spark is an
error that says what to write instead. Nothing else of the text is touched; functions are Spark's.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Final, NamedTuple

from sqlglot import TokenType

from gpu_ops.descriptions.times import UNITS_MS
from gpu_ops.query.by_time import QueryText, Rewriting
from gpu_ops.sql_tokens import UnclosedError, tokenize

_FUNCTIONS: Final = {"TUMBLE": ("SIZE",), "HOP": ("SLIDE", "SIZE"), "CUMULATE": ("STEP", "SIZE"), "SESSION": ("GAP",)}
"""Functions of windows, and the names of their intervals in order."""
_PARTS: Final = ("", "_START", "_END", "_ROWTIME", "_PROCTIME")
"""What of a window a function gives, by the end of its name."""
_PROCESSING: Final = (
    "windows of processing time are not understood, as a row that comes again would be in another one: give the table "
    "a WATERMARK FOR a column of event time, and take the windows of that"
)
_CLOCK: Final = (
    "PROCTIME() is the clock, another value each time: it is understood in FOR SYSTEM_TIME AS OF, and windows take a "
    "column of event time"
)
_AS_OF: Final = ("FOR", "SYSTEM_TIME", "AS", "OF")
_NOW: Final = ("PROCTIME", "(", ")")
_MILLISECOND: Final = "INTERVAL '0.001' SECOND"

_REFUSED: Final[Mapping[str, str]] = {
    "MATCH_RECOGNIZE": "MATCH_RECOGNIZE is not understood: a pattern of two rows is an interval join of the table",
    "UNNEST": "UNNEST is not understood: explode the array in Spark first, and make a table of what that gives",
    "CURRENT_WATERMARK": (
        "CURRENT_WATERMARK is another value each time: late rows are counted, and with late='tag' interval_join and "
        "aggregate hand them out"
    ),
    "SOURCE_WATERMARK": "SOURCE_WATERMARK is not understood: write WATERMARK FOR at AS at - INTERVAL '5' SECOND",
}
DIFFERENT: Final[Mapping[str, str]] = {
    "REGEXP_EXTRACT": "where nothing matches it gives '', and NULL in Flink; write NULLIF(REGEXP_EXTRACT(...), '')",
}
"""Functions that Spark and Flink both have and that give another value here."""
_UNSIZED: Final = {"VARCHAR": "STRING", "CHAR": "STRING", "BYTES": "BINARY", "VARBINARY": "BINARY"}
_SIZED: Final = ("TIMESTAMP", "TIMESTAMP_LTZ", "TIMESTAMP_NTZ", "VARBINARY")
_CLASSES: Final = re.compile(r"\[[\w ,-]+\]")
"""Characters of a pattern in brackets."""
_EPOCHS: Final = {"0": "timestamp_seconds", "3": "timestamp_millis"}


class _Interval(NamedTuple):
    """A constant length of time: as Spark's ``window`` takes it, and in milliseconds."""

    text: str
    ms: int


class _Window(NamedTuple):
    """The windows that a function of Flink's makes.

    Attributes:
        function: its name.
        time: the text of the time, and where it begins.
        size: of a window.
        slide: from a window's begin to the next one's.
        offset: of the first window from 1970.
    """

    function: str
    time: tuple[str, int]
    size: _Interval
    slide: _Interval | None = None
    offset: _Interval | None = None

    def call(self, *, whole: bool = False) -> str:
        """Spark's call, behind the time; ``whole``: of windows that do not overlap."""
        lengths = [self.size] if whole or self.slide is None else [self.size, self.slide]
        if self.offset is not None:
            lengths = [self.size, lengths[-1], self.offset]
        return "".join(f", '{length.text}'" for length in lengths) + ")"


class ProcessingTimes(NamedTuple):
    """The columns of a job that are ``PROCTIME()``.

    Attributes:
        names: in lower case.
        looked_up: those of them that a query has in ``FOR SYSTEM_TIME AS OF``.
    """

    names: frozenset[str] = frozenset()
    looked_up: frozenset[str] = frozenset()

    @classmethod
    def of(cls, columns: Collection[str], queries: Collection[str]) -> ProcessingTimes:
        """Finds the columns of processing time in some queries; ``columns`` are those of tables."""
        names, looked_up = {name.lower() for name in columns}, set[str]()
        for query in queries:
            names |= {name.lower() for name in re.findall(r"(?i)\bPROCTIME\s*\(\s*\)\s+AS\s+`?(\w+)", query)}
            as_of = r"(?i)\bFOR\s+SYSTEM_TIME\s+AS\s+OF\s+(?:`?\w+`?\s*\.\s*)*`?(\w+)"
            looked_up |= {name.lower() for name in re.findall(as_of, query)}
        return cls(frozenset(names), frozenset(names & looked_up))


@dataclasses.dataclass(frozen=True)
class FlinkQuery(QueryText):
    """A query as the user wrote it and in Spark's words.

    Attributes:
        slides: of its windows, milliseconds from one's begin to the next one's, and the position in ``written``.
    """

    slides: tuple[tuple[int, int], ...] = ()


def translated(text: str, times: ProcessingTimes = ProcessingTimes()) -> FlinkQuery:  # noqa: B008 - it has no state
    """A query with Flink's words in Spark's.

    Args:
        text: of the query.
        times: the columns of processing time.

    Raises:
        SqlError: what is not understood, with line and column in the text.
    """
    try:
        tokens = tokenize(text)[:-1]
    except UnclosedError:  # Spark says where
        return FlinkQuery(text, text)
    return _Translation(text, tokens).done(times)


class _Translation(Rewriting):
    """Collects what is to be changed in one query."""

    def done(self, times: ProcessingTimes) -> FlinkQuery:
        """The query in Spark's words."""
        self._times, self._slides = times, list[tuple[int, int]]()
        self._processing_times(times)
        for number in range(len(self.tokens)):
            word, is_call = self.word(number), self.word(number + 1) == "("
            if word in _REFUSED and is_call and self.word(number - 1) != ".":
                self.fail(_REFUSED[word], number)
            if word in ("CAST", "TRY_CAST") and is_call:
                self._cast(number + 1)
            elif word == "ROW" and is_call:
                self.replace(number, number, "struct")
            elif word == "LATERAL" and self.word(number + 1) == "TABLE":
                self.fail("LATERAL TABLE is not understood: call the function in Spark first", number)
            elif word == "TO_TIMESTAMP_LTZ" and is_call:
                self._epoch(number)
            elif word == "SPLIT_INDEX" and is_call:
                self._split(number)
            elif word == "SIMILAR" and self.word(number + 1) == "TO":
                self._similar(number)
            elif word in ("FLOOR", "CEIL") and is_call:
                self._refuse_unit(number)
            elif is_call:
                self._windows(number)
        text = self.text()
        return FlinkQuery(text.written, text.sql, (), text.pieces, tuple(self._slides))

    # --- windows --------------------------------------------------------------------------------

    def _windows(self, number: int) -> None:
        word = self.word(number)
        function = next((name for name in _FUNCTIONS if word.startswith(name)), None)
        part = word.removeprefix(function or "")
        if function is None or part not in _PARTS or self.word(number - 1) == ".":
            return
        if not part and self.word(number + 2) in ("TABLE", "DATA"):
            self._from(number, function)
            return
        if function == "CUMULATE":
            return
        if part == "_PROCTIME":
            self.fail(_PROCESSING, number)
        (_, last), *lengths = self._arguments(number + 1)
        intervals = [self._interval(first, last) for first, last in lengths]
        names = _FUNCTIONS[function]
        if len(intervals) != len(names):
            self.fail(f"{word} takes a time and {len(names)} interval{'s' if len(names) > 1 else ''}", number)
        by_name = dict(zip(names, intervals, strict=True))
        size = by_name.get("SIZE") or by_name["GAP"]
        window = _Window(function, ("", 0), size, by_name.get("SLIDE"))
        if function != "SESSION":
            self._slides.append(((window.slide or size).ms, self.tokens[number].start))
        field = {"_START": ".start", "_END": ".end", "_ROWTIME": f".end - {_MILLISECOND}"}.get(part, "")
        around = ("(", ")") if part == "_ROWTIME" else ("", "")
        spark = "session_window" if function == "SESSION" else "window"
        close = lengths[-1][1] + 1
        self.replace(number, number, around[0] + spark)
        start = self.end(last)
        self.edits.append((start, self.end(close), [(window.call() + field + around[1], start, False)]))

    def _from(self, number: int, function: str) -> None:
        """A function of windows in FROM, with ``TABLE`` around it or without."""
        arguments = self._arguments(number + 1)
        close = arguments[-1][1] + 1
        first, last = number, close
        if self.word(number - 1) == "(" and self.word(number - 2) == "TABLE" and self.word(close + 1) == ")":
            first, last = number - 2, close + 1
        named = dict[str, tuple[int, int]]()
        names = ("DATA", "TIMECOL", *_FUNCTIONS[function], "OFFSET")
        for place, (begin, end) in enumerate(arguments):
            arrow = self.word(begin + 1) == "=>" or (self.word(begin + 1), self.word(begin + 2)) == ("=", ">")
            if place >= len(names):
                self.fail(f"{function} takes {', '.join(names[:-1])} and, or not, OFFSET", begin)
            name = self.word(begin) if arrow else names[place]
            named[name] = (begin + (2 if self.word(begin + 1) == "=>" else 3), end) if arrow else (begin, end)
        for name in names[:-1]:
            if name not in named:
                self.fail(f"{function} takes {', '.join(names[:-1])}; {name} is missing", number)
        if function == "SESSION":
            self.fail(
                "SESSION in FROM is not understood: GROUP BY the key and SESSION(at, INTERVAL ...), with "
                "SESSION_START and SESSION_END of the same",
                number,
            )
        begin, end = named["DATA"]
        table = self._between(begin + 1, end)
        begin, end = named["TIMECOL"]
        if self.word(begin) != "DESCRIPTOR" or self.word(begin + 1) != "(" or self.word(end) != ")":
            self.fail("the column of the time is written DESCRIPTOR(at)", begin)
        time = self._between(begin + 2, end - 1)
        if time[0].strip("`").lower() in self._times.names:
            self.fail(_PROCESSING, begin + 2)
        lengths = {name: self._interval(*named[name]) for name in names[2:] if name in named}
        size, slide = lengths["SIZE"], lengths.get("SLIDE") or lengths.get("STEP")
        if slide is not None and size.ms % slide.ms:
            self.fail(f"the size of {function} is a multiple of {' '.join(names[2:3]).lower()}", named["SIZE"][0])
        window = _Window(function, time, size, slide, lengths.get("OFFSET"))
        begins = size if function == "CUMULATE" or slide is None else slide
        self._slides.append((begins.ms, self.tokens[number].start))
        start = self.tokens[first].start
        self.edits.append((start, self.end(last), _subquery(window, table, start)))

    def _arguments(self, opening: int) -> list[tuple[int, int]]:
        """The first and last tokens of the arguments in parentheses."""
        arguments, begin = list[tuple[int, int]](), opening + 1
        for number, depth in self.levels(opening):
            if (depth == 1 and self.word(number) == ",") or depth == 0:
                if number == begin:
                    self.fail("an argument is missing", number)
                arguments.append((begin, number - 1))
                begin = number + 1
            if depth == 0:
                return arguments
        return self.fail("this parenthesis is not closed", opening)

    def _interval(self, first: int, last: int) -> _Interval:
        """``INTERVAL '10' MINUTES``, of units from milliseconds to days."""
        token = self.tokens[first + 1] if first + 1 < len(self.tokens) else self.tokens[first]
        amount, unit = token.text.strip(), self.word(first + 2).removesuffix("S").lower()
        is_number = token.token_type in (TokenType.STRING, TokenType.NUMBER) and re.fullmatch(r"\d+", amount)
        if self.word(first) != "INTERVAL" or last != first + 2 or not is_number or unit not in UNITS_MS:
            self.fail("a window's lengths are constants like INTERVAL '10' MINUTES, from seconds to days", first)
        if int(amount) == 0:
            self.fail("this interval is empty", first)
        return _Interval(f"{amount} {unit}", int(amount) * UNITS_MS[unit])

    def _between(self, first: int, last: int) -> tuple[str, int]:
        start = self.tokens[first].start
        return self.sql[start : self.end(last)], start

    # --- processing time ------------------------------------------------------------------------

    def _processing_times(self, times: ProcessingTimes) -> None:
        """Columns of processing time: in ``FOR SYSTEM_TIME AS OF`` they are ``PROCTIME()``, and stand nowhere else."""
        for number in range(len(self.tokens)):
            if self.sees(number, *_AS_OF) and not self.sees(number + 4, "PROCTIME", "("):
                first = last = number + 4
                while self.is_name(last) and self.word(last + 1) == ".":
                    last += 2
                if self.is_name(last) and self.tokens[last].text.lower() in times.looked_up:
                    self.replace(first, last, "PROCTIME()")
            elif self.sees(number, *_NOW) and not self.sees(number - 4, *_AS_OF):
                name = self.tokens[number + 4].text.lower() if self.sees(number + 3, "AS") else ""
                if name not in times.looked_up or self.word(number - 1) != ",":
                    self.fail(_CLOCK, number)
                self.replace(number - 1, number + 4, "")

    # --- types and functions --------------------------------------------------------------------

    def _cast(self, opening: int) -> None:
        """Types without precision and length, where Spark has none."""
        close = next((number for number, depth in self.levels(opening) if depth == 0), None)
        inside = self.levels(opening)
        at = next((number for number, depth in inside if depth == 1 and self.word(number) == "AS"), None)
        if close is None or at is None:
            return
        for number in range(at + 1, close):
            word, sized = self.word(number), self.word(number + 1) == "("
            if word in _SIZED and sized and self.word(number + 3) == ")":
                self.replace(number + 1, number + 3, "")
            if word in _UNSIZED and (not sized or word == "VARBINARY"):
                self.replace(number, number, _UNSIZED[word])
            if word == "ROW" and self.word(number + 1) == "<":
                self.replace(number, number, "STRUCT")
            if word == "WITH" and self.sees(number, "WITH", "LOCAL", "TIME", "ZONE"):
                self.replace(number, number + 3, "")

    def _epoch(self, number: int) -> None:
        """``TO_TIMESTAMP_LTZ(n, 3)``, of a number since 1970; of a text it is Spark's own function."""
        arguments = self._arguments(number + 1)
        if len(arguments) != 2 or arguments[1][0] != arguments[1][1]:
            return
        function = _EPOCHS.get(self.word(arguments[1][0]))
        if function is not None:
            self.replace(number, number, function)
            (_, last), (_, close) = arguments
            start = self.end(last)
            self.edits.append((start, self.end(close), [("", start, False)]))

    def _split(self, number: int) -> None:
        """``SPLIT_INDEX(text, '/', 3)``: the parts of an empty text are none, and beyond the last one is null."""
        arguments = self._arguments(number + 1)
        if len(arguments) != 3:
            self.fail("SPLIT_INDEX takes a text, a separator and a number from 0", number)
        (_, text), (first, last), _ = arguments
        separator = self.tokens[first]
        known = first == last and separator.token_type == TokenType.STRING and separator.text
        if not known or set(separator.text) & set("'\\"):
            self.fail("SPLIT_INDEX takes a constant text as separator, without quotes and backslashes", first)
        self.replace(number, number, "get(split(NULLIF")
        self.insert(text, [(", '')", self.end(text), False)])
        self.replace(first, last, rf"'\\Q{separator.text}\\E')")

    def _similar(self, number: int) -> None:
        """``SIMILAR TO '4[0-9]%'``, as a regular expression; of patterns that both read alike."""
        pattern = self.tokens[number + 2] if number + 2 < len(self.tokens) else self.tokens[number]
        known = pattern.token_type == TokenType.STRING and re.fullmatch(
            r"[\w %|(),:;/@=<>!~&-]*", _CLASSES.sub("", pattern.text)
        )
        if not known or self.word(number + 3) == "ESCAPE":
            self.fail(
                "SIMILAR TO takes a constant pattern of letters, %, _, |, [a-z] and parentheses; see RLIKE", number
            )
        parts = re.split(f"({_CLASSES.pattern})", pattern.text)
        plain = (part.replace("%", "(?s:.*)").replace("_", ".") for part in parts[::2])
        regex = "".join(part for pair in zip(plain, [*parts[1::2], ""], strict=True) for part in pair)
        self.replace(number, number + 2, rf"RLIKE '^(?:{regex})\\z'")

    def _refuse_unit(self, number: int) -> None:
        for first, last in self._arguments(number + 1):
            if last - first > 1 and self.word(last - 1) == "TO":
                what, unit = self._between(first, last - 2)[0], self.word(last)
                self.fail(f"{self.word(number)} to a unit of time is date_trunc('{unit}', {what}) here", number)


def _subquery(window: _Window, table: tuple[str, int], at: int) -> list[tuple[str, int, bool]]:
    """The rows of a table, each with its windows."""
    time = (*window.time, True)
    begin, hidden = "__window.start", "__window"
    read: list[tuple[str, int, bool]] = [(*table, True)]
    where = ""
    if window.function == "CUMULATE":
        begin, hidden, where = "__whole.start", "__window, __whole", " WHERE __window.end <= __whole.end"
        read = [
            ("(SELECT *, window(", at, False), time, (f"{window.call(whole=True)} AS __whole FROM ", at, False), *read,
            (")", at, False),
        ]  # fmt: skip
    shown = f"{begin} AS window_start, __window.end AS window_end, __window.end - {_MILLISECOND} AS window_time"
    return [
        (f"(SELECT * EXCEPT ({hidden}), {shown} FROM (SELECT *, window(", at, False), time,  # noqa: S608
        (f"{window.call()} AS __window FROM ", at, False), *read, (f"){where})", at, False),
    ]  # fmt: skip

"""The text of a job file: its tokens and hints, positions in it, and errors there. Tokens are sqlglot's."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from sqlglot import Token
from sqlglot import TokenType as T

from gpu_ops.descriptions.times import UNITS_MS
from gpu_ops.errors import DatabaseError, DescriptionError, NotBuiltError, with_caret
from gpu_ops.jobs.secrets import Secrets
from gpu_ops.sql_tokens import END, QUOTED, JobSql, UnclosedError, tokenize


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


class Note(NamedTuple):
    """A remark about a part of a job that has no effect, or another one than in Flink."""

    text: str
    at: int


_UNITS: Final = {
    "d": "day", "h": "hour", "m": "minute", "min": "minute", "s": "second", "sec": "second", "ms": "millisecond",
    "milli": "millisecond", "": "millisecond",
}  # fmt: skip


def milliseconds(text: str) -> int:
    """A duration as Flink's settings have it, ``36 h``, ``500ms`` or a number of milliseconds.

    Raises:
        DescriptionError: it is none.
    """
    match = re.fullmatch(r"\s*(\d+)\s*([a-z]*)\s*", text, re.IGNORECASE)
    word = "" if match is None else match[2].lower()
    unit = _UNITS.get(word) or word.removesuffix("s")
    if match is None or unit not in UNITS_MS:
        raise DescriptionError(f"{text!r} is no duration: write one like '36 h' or '500 ms'")
    return int(match[1]) * UNITS_MS[unit]


Item = TypeVar("Item")


_HINT: Final = re.compile(r"(?s)'(?:[^'\\]|''|\\.)*'|`[^`]*`|\"[^\"]*\"|--[^\n]*|/\*\+(?P<hint>.*?)\*/|/\*.*?\*/")
"""What a hint may stand in, and a hint."""


@dataclasses.dataclass(frozen=True)
class Hint:
    """A hint, such as ``OPTIONS('a' = 'b')``.

    Attributes:
        name: in capitals.
        values: what stands in its parentheses, each with a value or None.
        at: where the comment begins that it stands in.
    """

    name: str
    values: tuple[tuple[Word, Word | None], ...]
    at: int


def _blanked(text: str) -> str:
    """Blanks in place of a text; lines stay."""
    return re.sub(r"[^\n]", " ", text)


def hints_apart(file: Text) -> tuple[str, tuple[Hint, ...]]:
    """A file's text with blanks in place of its hints, and the hints.

    Raises:
        JobError: a hint that is none.
    """
    text, hints = file.text, list[Hint]()
    for match in _HINT.finditer(file.text):
        if match["hint"] is None:
            continue
        start, end = match.span("hint")
        inside = Cursor(file, _blanked(text[:start]) + text[start:end] + _blanked(text[end:]))
        while not inside.at_end:
            hints.append(_hint(inside, match.start()))
            inside.accepts(",")
        text = text[: match.start()] + _blanked(match[0]) + text[match.end() :]
    return text, tuple(hints)


def _hint(cursor: Cursor, at: int) -> Hint:
    name = cursor.name("a hint")
    values = list[tuple[Word, Word | None]]()
    if cursor.accepts("("):
        while not cursor.accepts(")"):
            key = cursor.string("a name") if cursor.token.token_type == T.STRING else cursor.name("a name")
            values.append((key, cursor.value("a value") if cursor.accepts("=") else None))
            if not cursor.sees(")"):
                cursor.expect(",")
    return Hint(name.text.upper(), tuple(values), at)


class Cursor:
    """Reads the tokens of a file one after the other.

    Raises:
        JobError: a quote or comment that is not closed.
    """

    def __init__(self, file: Text, text: str | None = None) -> None:
        """Begins at the start of a text.

        Args:
            file: for positions and errors.
            text: what is read, of the same length; by default all that stands in the file.
        """
        self.file, self.text, self._next = file, file.text if text is None else text, 0
        try:
            self._tokens = tokenize(self.text, JobSql)
        except UnclosedError as error:
            raise file.error(str(error), error.start) from error

    @property
    def token(self) -> Token:
        """The token that comes next."""
        return self._tokens[self._next]

    @property
    def at_end(self) -> bool:
        """True if no token is left."""
        return self.token.token_type == END

    @property
    def is_word(self) -> bool:
        """True if the next token is a word without quotes."""
        return self.token.token_type not in QUOTED and self.token.text.isidentifier()

    @property
    def is_plain(self) -> bool:
        """True if the next token is a word or number without quotes, or both, such as ``60sec``."""
        return self.token.token_type not in QUOTED and re.fullmatch(r"[\w.]+", self.token.text) is not None

    @property
    def before(self) -> int:
        """The position behind the token that was read last."""
        return int(self._tokens[self._next - 1].end) + 1 if self._next else 0

    def rest(self) -> Word:
        """Takes the rest of a statement, up to its semicolon."""
        begin = end = self.token
        while not self.sees(";") and not self.at_end:
            end = self.token
            self.take()
        return Word(self.text[begin.start : end.end + 1], begin.start)

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
        text = self.text[token.start + 1 : token.end].replace("''", "'") if is_string else token.text
        return Word(text, token.start)

    def sees(self, *texts: str) -> bool:
        """True if these words or symbols come next; case does not matter."""
        coming = self._tokens[self._next : self._next + len(texts)]
        return [None if token.token_type in QUOTED else token.text.upper() for token in coming] == list(texts)

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

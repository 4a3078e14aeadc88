"""The text of a job: positions in it, its tokens by sqlglot, what is written there, the error that shows a position."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar, Final, TypeVar

from sqlglot import Token, TokenType
from sqlglot.dialects.spark import Spark
from sqlglot.errors import TokenError

from gpu_ops.errors import DescriptionError, NotBuiltError


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
        caret = "".join("\t" if c == "\t" else " " for c in shown[: column - 1].ljust(column - 1)) + "^"
        super().__init__(f"{path}:{line}:{column}: {message}\n  {shown}\n  {caret}")


@dataclasses.dataclass(frozen=True)
class Text:
    """A file's text."""

    path: Path
    text: str

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
        except (DescriptionError, NotBuiltError) as error:
            if isinstance(error, JobError):
                raise
            raise self.error(str(error), offset) from error

    def error_at(self, message: str, line: int, column: int) -> JobError:
        """An error at a line and column."""
        lines = self.text.split("\n")
        shown = lines[line - 1].rstrip("\r") if line <= len(lines) else ""
        shown = re.sub(r"(?<=://)[^\s'\"]*(?=@)", lambda found: "*" * len(found[0]), shown)  # a URI's credentials
        return JobError(message, self.path, line, column, shown)


@dataclasses.dataclass(frozen=True)
class Word:
    """A name or value as written, and its offset in the file."""

    text: str
    at: int


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
class QueryText:
    """The query.

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
    """A job as it is written down."""

    file: Text
    sources: tuple[TableText, ...]
    sink: TableText
    query: QueryText
    settings: tuple[Setting, ...]


# --- tokens ---------------------------------------------------------------------------------------

Item = TypeVar("Item")

_BLANK: Final = re.compile(r"(?:\s|--[^\n]*|/\*(?!\+).*?\*/)*", re.DOTALL)
"""Space and comments; a hint is none."""

_QUOTED: Final = (TokenType.STRING, TokenType.IDENTIFIER)
_END: Final = TokenType.BREAK
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
            "BYTES": TokenType.BINARY,
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
        """The next one."""
        return self._tokens[self._next]

    @property
    def at_end(self) -> bool:
        """Whether there is none left."""
        return self.token.token_type == _END

    @property
    def is_word(self) -> bool:
        """Whether it is a word without quotes."""
        return self.token.token_type not in _QUOTED and self.token.text.isidentifier()

    @property
    def shown(self) -> str:
        """The next one as an error names it."""
        if self.at_end:
            return "the end of the text"
        return f"{'the string ' if self.token.token_type == TokenType.STRING else ''}{self.token.text!r}"

    def take(self) -> Word:
        """The next one, and goes on; a string's backslashes stay for Spark."""
        token = self.token
        self._next = min(self._next + 1, len(self._tokens) - 1)
        is_string = token.token_type == TokenType.STRING
        text = self.file.text[token.start + 1 : token.end].replace("''", "'") if is_string else token.text
        return Word(text, token.start)

    def sees(self, *texts: str) -> bool:
        """Whether these words or symbols come next; case does not matter."""
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
        if not self.is_word and self.token.token_type != TokenType.IDENTIFIER:
            raise self.expected(what)
        return self.take()

    def string(self, what: str) -> Word:
        """A string in single quotes.

        Raises:
            JobError: something else comes.
        """
        if self.token.token_type != TokenType.STRING:
            raise self.expected(f"{what} in single quotes")
        return self.take()

    def listed(self, read: Callable[[Cursor], Item]) -> tuple[Item, ...]:
        """What is separated by commas, one or more of it."""
        found = [read(self)]
        while self.accepts(","):
            found.append(read(self))
        return tuple(found)

    def expected(self, what: str) -> JobError:
        """The error that something else comes next."""
        return self.error(f"expected {what}, found {self.shown}")

    def error(self, message: str) -> JobError:
        """An error at the next token."""
        return self.file.error(message, self.token.start)

"""Tokens of a job's SQL, by sqlglot, and a cursor that reads them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import ClassVar, Final, TypeVar

from sqlglot import Token, TokenType
from sqlglot.dialects.spark import Spark
from sqlglot.errors import TokenError

from gpu_ops.jobs.text import JobError, Text, Word

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

"""Tokens of a job's SQL, and a cursor that reads them."""

from __future__ import annotations

import re
from typing import Final, NamedTuple, NoReturn

from gpu_ops.jobs.text import Text, Word


class Token(NamedTuple):
    """A token."""

    kind: str
    """word, quoted, string, number, symbol or end."""
    text: str
    """As written; of a quoted name the name, of a string what is in it."""
    start: int
    end: int

    @property
    def shown(self) -> str:
        """As an error names it."""
        return {"end": "the end of the text", "string": f"the string {self.text!r}"}.get(self.kind, repr(self.text))


# A backslash hides a quote in Spark's strings, doubling it does in Flink's; both do here, as queries are Spark's.
_TOKEN: Final = re.compile(
    r"""(?P<space>\s+|--[^\n]*|/\*.*?\*/)
    |(?P<string>'(?:[^'\\]|\\.|'')*')
    |(?P<quoted>`[^`]*`|"(?:[^"\\]|\\.)*")
    |(?P<number>\d+(?:\.\d+)?)
    |(?P<word>\w+)
    |(?P<unclosed>['"`]|/\*)
    |(?P<symbol>.)""",
    re.DOTALL | re.VERBOSE,
)


def tokenize(file: Text, start: int = 0, stop: int | None = None) -> list[Token]:
    """The tokens of a part of a file, and one for its end.

    Raises:
        JobError: a quote or comment that is not closed.
    """
    stop = len(file.text) if stop is None else stop
    tokens = []
    for match in _TOKEN.finditer(file.text, start, stop):
        kind, text = str(match.lastgroup), match[0]
        if kind == "space" and text.startswith("/*+"):
            file.fail("hints are not understood: an option stands in WITH (...) or in SET", match.start())
        if kind == "unclosed":
            file.fail("a quote or comment is opened here and not closed", match.start())
        if kind == "string":
            text = text[1:-1].replace("''", "'")
        elif kind == "quoted":
            text = text[1:-1]
        if kind != "space":
            tokens.append(Token(kind, text, match.start(), match.end()))
    return [*tokens, Token("end", "", stop, stop)]


class Cursor:
    """Reads tokens one after the other.

    Args:
        file: their file.
        tokens: the last one is an end.
    """

    def __init__(self, file: Text, tokens: list[Token]) -> None:
        self.file, self._tokens, self._next = file, tokens, 0

    @property
    def token(self) -> Token:
        """The next one."""
        return self._tokens[self._next]

    def take(self) -> Token:
        """The next one, and goes on."""
        token = self.token
        self._next = min(self._next + 1, len(self._tokens) - 1)
        return token

    def sees(self, *texts: str) -> bool:
        """Whether these words or symbols come next; case does not matter."""
        coming = self._tokens[self._next : self._next + len(texts)]
        return len(coming) == len(texts) and all(
            token.kind in ("word", "symbol") and token.text.upper() == text
            for token, text in zip(coming, texts, strict=True)
        )

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
                self.fail(f"expected {text}{after and f' {after}'}, found {self.token.shown}")

    def name(self, what: str) -> Word:
        """A name, quoted or not.

        Raises:
            JobError: something else comes.
        """
        if self.token.kind not in ("word", "quoted"):
            self.fail(f"expected {what}, found {self.token.shown}")
        token = self.take()
        return Word(token.text, token.start)

    def string(self, what: str) -> Word:
        """A string in single quotes.

        Raises:
            JobError: something else comes.
        """
        if self.token.kind != "string":
            self.fail(f"expected {what} in single quotes, found {self.token.shown}")
        token = self.take()
        return Word(token.text, token.start)

    def names(self, what: str) -> tuple[Word, ...]:
        """Names in parentheses.

        Raises:
            JobError: something else comes.
        """
        self.expect("(")
        found = [self.name(what)]
        while self.accepts(","):
            found.append(self.name(what))
        self.expect(")")
        return tuple(found)

    def fail(self, message: str) -> NoReturn:
        """Raises an error at the next token."""
        self.file.fail(message, self.token.start)

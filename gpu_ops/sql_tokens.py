"""SQL text becomes tokens: sqlglot's of Spark's dialect, each word one, for queries, conditions and job files."""

from __future__ import annotations

import re
from typing import ClassVar, Final

from sqlglot import Token
from sqlglot import TokenType as T
from sqlglot.dialects.spark import Spark
from sqlglot.errors import TokenError

QUOTED: Final = (T.STRING, T.IDENTIFIER)
END: Final = T.BREAK
"""The token behind the last one."""

_BLANK: Final = re.compile(r"(?:\s|--[^\n]*|/\*.*?\*/)*", re.DOTALL)
"""Space and comments."""


class QuerySql(Spark):
    """Spark's tokens, each word one."""

    class Tokenizer(Spark.Tokenizer):
        """Without keywords of several words, and commands, whose text sqlglot does not look into."""

        STRING_ESCAPES: ClassVar = ["\\", "'", '"']
        NUMERIC_LITERALS: ClassVar = {}
        COMMANDS: ClassVar = set()
        NESTED_COMMENTS = False
        KEYWORDS: ClassVar = {
            word: kind for word, kind in Spark.Tokenizer.KEYWORDS.items() if " " not in word and "{" not in word
        }


class JobSql(QuerySql):
    """Flink's tokens, whose names may stand in double quotes, each word one."""

    class Tokenizer(QuerySql.Tokenizer):
        """Keywords are words, so that each word of a statement is a token."""

        QUOTES: ClassVar = ["'"]
        IDENTIFIERS: ClassVar = ["`", '"']
        STRING_ESCAPES: ClassVar = ["\\", "'"]
        HEX_STRINGS: ClassVar = []
        KEYWORDS: ClassVar = {
            **{word: kind for word, kind in Spark.Tokenizer.KEYWORDS.items() if word.isidentifier()},
            "BYTES": T.BINARY,
        }


class UnclosedError(ValueError):
    """A quote or comment is opened and not closed.

    Args:
        start: where, counted from 0.
    """

    def __init__(self, start: int) -> None:
        self.start = start
        super().__init__("a quote or comment is opened here and not closed")


def tokenize(sql: str, dialect: type[Spark] = QuerySql) -> list[Token]:
    """The tokens of a text, and one of type `END` behind them.

    Raises:
        UnclosedError: a quote or comment that is not closed.
    """
    try:
        tokens = dialect().tokenize(
            f"{sql}\n"
        )  # of a quote that is the last character sqlglot does not say where it is
    except TokenError as error:
        quote = re.search(r":(\d+)$", str(error.__cause__))
        raise UnclosedError(int(quote[1]) if quote else max(0, sql.find("/*", sql.rfind("*/") + 1))) from error
    length, before = len(sql), 0
    tokens.append(Token(END, "", start=length, end=length))
    for token in tokens:
        # sqlglot takes what follows an unclosed comment for a part of it
        blank = _BLANK.match(sql, before)
        if blank is not None and blank.end() < token.start:
            raise UnclosedError(blank.end())
        before = token.end + 1
    return tokens

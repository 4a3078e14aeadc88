"""Tokens of a condition, from sqlglot, with their positions; and the error that shows one."""

from __future__ import annotations

import re
from typing import NamedTuple, NoReturn

import sqlglot
from sqlglot.errors import TokenError

from gpu_ops.errors import ConditionError


class Token(NamedTuple):
    """A token of the text."""

    kind: str
    """word, quoted, string, hex, number, symbol or end."""
    text: str
    """As written; of a quoted name the name."""
    start: int
    end: int

    @property
    def shown(self) -> str:
        """As an error message names it."""
        return "the end of the text" if self.kind == "end" else repr(self.text)


_UNCLOSED = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|`[^`]*`|--[^\n]*|/\*.*?\*/|(['"`]|/\*)|.""", re.DOTALL)
_WORD = re.compile(r"\w+$")
_STRING = re.compile(r"[rR]?(['\"])")


def fail(sql: str, message: str, start: int) -> NoReturn:
    """Raise ConditionError at this offset of the text."""
    before = sql[:start].splitlines(keepends=True) or [""]
    if before[-1].endswith(("\n", "\r")):
        before.append("")
    raise ConditionError(message, sql, len(before), len(before[-1]) + 1)


def tokenize(sql: str) -> list[Token]:
    """The tokens of a text, and one for its end."""
    prefix = "(\n"  # so that no word of the text is first in a statement, where some mean a command
    try:
        raw = sqlglot.tokenize(prefix + sql, read="spark")[1:]
    except TokenError:
        lone = next((match for match in _UNCLOSED.finditer(sql) if match[1]), None)
        fail(sql, "a quote or comment is opened here and not closed", lone.start() if lone else 0)
    tokens: list[Token] = []
    for token in raw:
        start, end = token.start - len(prefix), token.end + 1 - len(prefix)
        if tokens and start < tokens[-1].end:
            continue  # sqlglot makes three tokens of 10L
        text, name = sql[start:end], token.token_type.name
        if name == "IDENTIFIER":
            tokens.append(Token("quoted", token.text, start, end))
        elif name in ("STRING", "RAW_STRING") and _STRING.match(text):
            tokens.append(Token("string", text, start, end))
        elif name == "HEX_STRING" and text[0] in "xX":
            tokens.append(Token("hex", text, start, end))
        elif name == "NUMBER":
            tokens.append(Token("number", text, start, end))
        else:
            tokens.append(Token("word" if _WORD.match(text) else "symbol", text, start, end))
    return [*tokens, Token("end", "", len(sql), len(sql))]

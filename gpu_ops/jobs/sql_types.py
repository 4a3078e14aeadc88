"""Types in a job file: Flink's names and Spark's, as Spark writes them."""

from __future__ import annotations

import difflib
from typing import Final

from sqlglot import TokenType as T

from gpu_ops.conditions import backquoted
from gpu_ops.jobs.sql_text import Cursor

_PLAIN: Final = (T.BOOLEAN, T.TINYINT, T.SMALLINT, T.INT, T.BIGINT, T.FLOAT, T.DOUBLE, T.DATE)
_NESTED: Final = (T.ARRAY, T.MAP, T.ROW, T.STRUCT)

# Spark's strings and bytes are of any length, its times have microseconds: a length or precision is left out.
_SIZED: Final = {
    **dict.fromkeys((T.TEXT, T.VARCHAR, T.CHAR), "STRING"),
    **dict.fromkeys((T.BINARY, T.VARBINARY), "BINARY"),
    **dict.fromkeys((T.TIMESTAMPTZ, T.TIMESTAMPLTZ), "TIMESTAMP"),
    T.TIMESTAMPNTZ: "TIMESTAMP_NTZ",
}


def read_type(cursor: Cursor) -> str:
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
        inner = read_type(cursor)
    elif word == "MAP":
        key = read_type(cursor)
        cursor.expect(",")
        inner = f"{key}, {read_type(cursor)}"
    else:
        word, inner = "STRUCT", ", ".join(cursor.listed(_field))
    cursor.expect(">")
    return f"{word}<{inner}>"


def _field(cursor: Cursor) -> str:
    name = cursor.name("a field's name")
    cursor.accepts(":")
    return f"{backquoted(name.text)}: {read_type(cursor)}"


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

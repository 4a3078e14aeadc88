"""Types of columns: Flink's names and Spark's, as Spark writes them."""

from __future__ import annotations

import difflib
from typing import Final

from gpu_ops.jobs.tokens import Cursor

_PLAIN: Final = {
    "BOOLEAN": "BOOLEAN",
    "TINYINT": "TINYINT", "BYTE": "TINYINT",
    "SMALLINT": "SMALLINT", "SHORT": "SMALLINT",
    "INT": "INT", "INTEGER": "INT",
    "BIGINT": "BIGINT", "LONG": "BIGINT",
    "FLOAT": "FLOAT", "REAL": "FLOAT",
    "DOUBLE": "DOUBLE",
    "STRING": "STRING",
    "BYTES": "BINARY",
    "DATE": "DATE",
}  # fmt: skip

#: With a length or precision that Spark has no use for: its strings are of any length, its times have microseconds.
_SIZED: Final = {
    "VARCHAR": "STRING",
    "CHAR": "STRING",
    "BINARY": "BINARY",
    "VARBINARY": "BINARY",
    "TIMESTAMP": "TIMESTAMP",
    "TIMESTAMP_LTZ": "TIMESTAMP",
    "TIMESTAMP_NTZ": "TIMESTAMP_NTZ",
}

_DECIMAL: Final = ("DECIMAL", "DEC", "NUMERIC")
_NESTED: Final = ("ARRAY", "MAP", "ROW", "STRUCT")


def read_type(cursor: Cursor) -> str:
    """Reads a type; ``TIMESTAMP`` is Spark's, an instant, ``TIMESTAMP_NTZ`` the one without a time zone.

    Args:
        cursor: stands before it, and then after it.

    Returns:
        The type as Spark writes it.

    Raises:
        JobError: there is no such type.
    """
    if cursor.token.kind != "word":
        cursor.fail(f"expected a type, found {cursor.token.shown}")
    word = cursor.token.text.upper()
    if word not in (*_PLAIN, *_SIZED, *_DECIMAL, *_NESTED):
        near = difflib.get_close_matches(word, [*_PLAIN, *_SIZED, *_DECIMAL, *_NESTED])
        cursor.fail(f"there is no type {cursor.token.text}{'; the nearest are ' if near else ''}{', '.join(near)}")
    cursor.take()
    if word in _NESTED:
        return _nested(cursor, word)
    if word in _DECIMAL:
        sizes = _sizes(cursor, 2)
        return f"DECIMAL({', '.join(sizes or ('10', '0'))})"
    if word in _PLAIN:
        if word == "DOUBLE":
            cursor.accepts("PRECISION")
        return _PLAIN[word]
    _sizes(cursor, 1)
    if word != "TIMESTAMP":
        return _SIZED[word]
    if cursor.accepts("WITHOUT", "TIME", "ZONE"):
        return "TIMESTAMP_NTZ"
    if not cursor.accepts("WITH", "LOCAL", "TIME", "ZONE"):
        cursor.accepts("WITH", "TIME", "ZONE")
    return "TIMESTAMP"


def _nested(cursor: Cursor, word: str) -> str:
    cursor.expect("<", after=f"behind {word}")
    if word == "ARRAY":
        inner = read_type(cursor)
    elif word == "MAP":
        key = read_type(cursor)
        cursor.expect(",")
        inner = f"{key}, {read_type(cursor)}"
    else:
        fields = [_field(cursor)]
        while cursor.accepts(","):
            fields.append(_field(cursor))
        word, inner = "STRUCT", ", ".join(fields)
    cursor.expect(">")
    return f"{word}<{inner}>"


def _field(cursor: Cursor) -> str:
    name = cursor.name("a field's name")
    cursor.accepts(":")
    return f"{quoted(name.text)}: {read_type(cursor)}"


def _sizes(cursor: Cursor, most: int) -> tuple[str, ...]:
    """Whole numbers in parentheses; none where there are no parentheses."""
    found: list[str] = []
    if not cursor.accepts("("):
        return ()
    while not found or (len(found) < most and cursor.accepts(",")):
        if cursor.token.kind != "number":
            cursor.fail(f"expected a number, found {cursor.token.shown}")
        found.append(cursor.take().text)
    cursor.expect(")")
    return tuple(found)


def quoted(name: str) -> str:
    """A name as Spark's schema text has it."""
    return f"`{name.replace('`', '``')}`"

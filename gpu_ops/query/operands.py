"""Where an expression in a SELECT list goes on, and where a name after it is its alias."""

from __future__ import annotations

from typing import Final

from gpu_ops.query.syntax import Source

CONTINUES: Final = {
    "AND", "OR", "NOT", "IS", "IN", "BETWEEN", "LIKE", "ILIKE", "RLIKE", "REGEXP", "ESCAPE", "NULL", "TRUE", "FALSE",
    "DISTINCT", "FROM", "THEN", "ELSE", "WHEN", "END", "CASE", "OVER", "FILTER", "WITHIN", "DIV", "COLLATE", "AT",
    "IGNORE", "RESPECT", "TO", "YEAR", "YEARS", "MONTH", "MONTHS", "WEEK", "WEEKS", "DAY", "DAYS", "HOUR", "HOURS",
    "MINUTE", "MINUTES", "SECOND", "SECONDS", "MILLISECOND", "MILLISECONDS", "MICROSECOND", "MICROSECONDS",
}  # fmt: skip
"""Words after which, or before which, an expression in a SELECT list goes on."""


def ends_operand(source: Source, at: int) -> bool:
    """Whether an operand ends with this token, so that a name after it is an alias."""
    token, word = source.tokens[at], source.word(at)
    if token.kind in ("quoted", "string", "number", "hex"):
        return True
    if token.kind == "symbol":
        return word in (")", "]", "}", "*") and not (word == "*" and at and ends_operand(source, at - 1))
    return word not in _OPERATORS


_OPERATORS: Final = {
    "AND", "OR", "NOT", "IS", "IN", "BETWEEN", "LIKE", "ILIKE", "RLIKE", "REGEXP", "ESCAPE", "DISTINCT", "DIV",
    "FROM", "THEN", "ELSE", "WHEN", "CASE", "OVER", "FILTER", "INTERVAL", "DATE", "TIMESTAMP", "TIMESTAMP_NTZ",
    "TIMESTAMP_LTZ", "COLLATE", "TO",
}  # fmt: skip

"""What a query may not contain and what to do instead; its error, with line and column in the text."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Final

from gpu_ops.errors import DescriptionError, GpuJoinError, TextError, with_caret


class SqlError(TextError):
    """A query that cannot be planned."""


class PlacedError(DescriptionError):
    """An error in a part of a query, whose text the layer that finds it does not know.

    Args:
        message: what is wrong.
        place: line and column, both from 1.
    """

    def __init__(self, message: str, place: tuple[int, int]) -> None:
        super().__init__(message)
        self.place = place


@dataclasses.dataclass(frozen=True)
class Origin:
    """The place of an operator or input in a query, and the user's words for its columns and inputs.

    Attributes:
        sql: the query.
        line: from 1.
        column: from 1.
        in_words: a message with the user's words for the names that the plan gave.
    """

    sql: str
    line: int = 1
    column: int = 1
    in_words: Callable[[str], str] = str

    def error(self, error: GpuJoinError) -> GpuJoinError:
        """An error of a layer below, which knows no query, as one in the text and in the words of the query.

        What is wrong with a description is a `SqlError`; of any other error the class stays.
        """
        message = error.message if isinstance(error, TextError) else str(error)
        message = said_in_sql(self.in_words(message))
        if isinstance(error, DescriptionError):
            return SqlError(message, self.sql, self.line, self.column)
        shown = "".join(self.sql.splitlines()[self.line - 1 : self.line])
        caret = with_caret(shown, self.column)
        return type(error)(f"{message} (line {self.line}, column {self.column})\n{caret}")


def place_of(text: str, start: int) -> tuple[int, int]:
    """Line and column, both from 1, of a position in a text, counted from 0."""
    before = text[:start]
    return before.count("\n") + 1, start - before.rfind("\n")


_PLACED: Final = "_gpu_ops_placed"
"""The attribute of an error that has its place in the text."""


@contextlib.contextmanager
def errors_at(origin: Origin) -> Iterator[None]:
    """Raises the errors of the layers below as errors at a place of the query; those that have one stay as they are.

    Args:
        origin: the place, and the user's words.
    """
    try:
        yield
    except GpuJoinError as error:
        if isinstance(error, SqlError | PlacedError) or _PLACED in vars(error):
            raise
        placed = origin.error(error)
        vars(placed)[_PLACED] = True
        raise placed from error


_HIDDEN_NAMES: Final = re.compile(r"`?__auto_generated_subquery_name`?\.")
_ATTRIBUTE_ID: Final = re.compile(r"(?<=[\w`)])#\d+L?\b")


def without_generated_names(text: str) -> str:
    """A text of Spark's without the name that it gives a sub-query that has none, and without ids of attributes."""
    text = _ATTRIBUTE_ID.sub("", _HIDDEN_NAMES.sub("", text))
    return text.replace("__auto_generated_subquery_name", "the sub-query")


_CALLS: Final = re.compile(r"(\b[\w.]+\([^()]*\))")
_ARGUMENT: Final = r"(?<![\w.])([a-z_]+|ON)="
"""No setting of Spark's, whose name has dots."""


def said_in_sql(text: str) -> str:
    """A message of a description with its arguments in Python as plain words; in the call of a function they stay."""
    parts = _CALLS.split(re.sub(r"\b\w+\(\): ", "", text))
    return "".join(part if number % 2 else _without_arguments(part) for number, part in enumerate(parts))


def _without_arguments(text: str) -> str:
    text = re.sub(r"\bon(?==[^=])", "ON", text)
    text = re.sub(rf"{_ARGUMENT}(?=['\w\[(])", r"\1 ", text)
    return re.sub(rf"{_ARGUMENT}(?!=)", r"\1", text)


_AFTER: Final = (
    "the changelog that sql() returns can be aggregated in foreachBatch, where it is a plain DataFrame, or by the "
    "table it is merged into"
)
LIMIT: Final = "which rows? A stream has no order of its own: write ORDER BY before LIMIT"
NODES: Final[dict[str, str]] = {
    "Sort": "ORDER BY is understood with LIMIT only: a changelog has its own order; sort the table it is merged into",
    "RepartitionByExpression": "rows are distributed by the join's key; see the option partitions",
    "LocalLimit": LIMIT,
    "LimitAll": LIMIT,
    "Offset": "OFFSET is not understood: take the rows before it, too, and leave them out of the table they go to",
    "Sample": "TABLESAMPLE is not understood: sample the DataFrame, df.sample(...)",
    "Pivot": f"PIVOT is not understood: {_AFTER}",
    "Generate": "what makes many rows of one is not understood: explode in Spark first, and join what that gives",
    "LateralJoin": "LATERAL is not understood: explode in Spark first, and join what that gives",
    "ResolvedHint": "hints are not understood: there is one way to run each join; see the option multi_way",
    "OneRowRelation": "no FROM: it joins nothing",
    "UnionLoop": "WITH RECURSIVE is not understood",
    "CTERelationRef": "WITH RECURSIVE is not understood",
    "Command": "sql() takes a SELECT: it gives the changelog as a DataFrame, to be written with writeStream",
}
"""By the name of a node of Catalyst's plan."""

RELATION: Final = "this is not among the inputs: each is given to sql() by the name that the query calls it"
NO_INPUT: Final = "{} is not among the inputs, which are {}: each is given to sql() by the name that the query calls it"
JOINS_NOTHING: Final = "the query joins and groups nothing, so nothing of it waits for the end of the input"
SUBQUERY: Final = (
    "a sub-query can stand in FROM, as a value in SELECT, WHERE, HAVING and GROUP BY, and in WHERE as [NOT] EXISTS or "
    "[NOT] IN that is joined to the rest by AND"
)
CHANGING: Final = (
    "{} gives another value each time, so a row could not be taken back: compute it in Spark before the join, as a "
    "column of an input that is stored with the row, or in foreachBatch"
)
SUBQUERIES: Final = {"ScalarSubquery", "ListQuery", "Exists", "InSubquery", "LateralSubquery"}
NOW: Final = {"CurrentTimestamp", "CurrentDate", "CurrentTime", "Now", "LocalTimestamp", "CurrentBatchTimestamp"}
"""Constant within a micro-batch, and another one in the next."""
RANDOM: Final = {"AesEncrypt", "KllSketchMergeBigint", "KllSketchMergeDouble", "KllSketchMergeFloat"}
"""What draws random numbers below, though Catalyst has it for deterministic: an initialisation vector, what to drop."""
VECTOR: Final = "; with a constant initialisation vector, or in mode 'ECB', it has the same one each time"
TODAY: Final = r"\s*(?:now|today|tomorrow|yesterday)\b"
"""What Spark takes in texts for the time at which a plan is made (``SpecialDatetimeValues``)."""


def one(noun: str) -> str:
    """A noun with its article."""
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"

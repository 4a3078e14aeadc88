"""UNION ALL of changelogs: a row is there as often as in all of them together, so the result has no unique key."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame
from pyspark.sql import functions as f
from sqlglot import Token, TokenType
from sqlglot.dialects import Spark
from sqlglot.errors import TokenError

from gpu_ops.descriptions.changelog import ROW_KIND_COLUMN
from gpu_ops.errors import DescriptionError
from gpu_ops.query.by_time.text import error_at
from gpu_ops.spark.datatypes import named_column
from gpu_ops.spark.driver.queries import plans_of
from gpu_ops.spark.failures import data_frame, message_in
from gpu_ops.spark.plan.changes import observed_once
from gpu_ops.spark.plan.column_metadata import CHANGELOG

_UNION: Final = "gpu_ops.union"
"""Of every column: in the place of what is known of the first changelog's."""


def union(*changelogs: DataFrame, name: str = "union") -> DataFrame:
    """The changelog of all rows of several changelogs, as UNION ALL has them.

    Args:
        changelogs: what joins of this pack give, perhaps filtered or projected; a DataFrame without ``row_kind`` is
            insert-only. Columns go by their position and have the first one's names.
        name: of the result, for errors of what takes it.

    Returns:
        A DataFrame; first column ``row_kind``. It has no unique key, so a view of it keeps how often a row is there.

    Raises:
        DescriptionError: fewer than two, columns that do not fit, or two joins of one name.
    """
    if len(changelogs) < 2:
        raise DescriptionError("union() takes two changelogs or more")
    frames = [data_frame(df, f"changelog {number}") for number, df in enumerate(changelogs, 1)]
    _check_names(frames)
    names = [column for column in frames[0].columns if column != ROW_KIND_COLUMN]
    parts = [_part(df, names, name, number) for number, df in enumerate(frames, 1)]
    first, *others = observed_once(parts)
    try:
        for other in others:
            first = first.unionAll(other)
    except AnalysisException as error:
        raise DescriptionError(f"union(): the columns do not fit: {message_in(str(error))}") from error
    return first


def _part(df: DataFrame, names: list[str], name: str, number: int) -> DataFrame:
    own = [column for column in df.columns if column != ROW_KIND_COLUMN]
    if len(own) != len(names):
        raise DescriptionError(
            f"union(): the first changelog has {len(names)} columns, number {number} {len(own)}: {', '.join(own)}"
        )
    kind = named_column(ROW_KIND_COLUMN) if ROW_KIND_COLUMN in df.columns else f.lit("+I")
    columns = [named_column(column).alias(new, metadata={_UNION: True}) for column, new in zip(own, names, strict=True)]
    return df.select(kind.alias(ROW_KIND_COLUMN, metadata={CHANGELOG: name}), *columns)


def _check_names(frames: list[DataFrame]) -> None:
    """Refuses two joins of one name: Spark's progress has the metrics of each under its name."""
    joins: dict[str, str] = {}
    for df in frames:
        for plan in plans_of(df):
            if joins.setdefault(plan.name, plan.plan_id) != plan.plan_id:
                raise DescriptionError(
                    f"union(): two joins are called {plan.name!r}, and Spark's progress has the metrics of each under "
                    "its name: give them other name= arguments, or none"
                )


class Part(NamedTuple):
    """A SELECT of a UNION ALL.

    Attributes:
        sql: its text with the rest of the query blank, so that positions in it are those in the query; WITH stays.
        inputs: those of the query that it names.
    """

    sql: str
    inputs: tuple[str, ...]


def parts_of(query: str, inputs: Mapping[str, Any]) -> list[Part]:
    """The parts of a query that is a UNION ALL; none for any other.

    Args:
        query: its text.
        inputs: by name.

    Raises:
        SqlError: UNION without ALL among them, or what would be of the whole: ORDER BY, LIMIT.
    """
    try:
        tokens = Spark().tokenize(query)
    except TokenError:
        return []  # Spark says what is wrong
    depth, top = 0, list[Token]()
    for token in tokens:
        depth += (token.token_type == TokenType.L_PAREN) - (token.token_type == TokenType.R_PAREN)
        if depth == 0:
            top.append(token)
    cuts = [n for n, token in enumerate(top) if token.token_type == TokenType.UNION]
    if not cuts:
        return []
    for n in cuts:
        if n + 1 == len(top) or top[n + 1].token_type != TokenType.ALL:
            raise error_at(
                "UNION takes equal rows for one, which nothing here does: write UNION ALL", query, top[n].start
            )
    for token in top:
        if token.token_type in (TokenType.ORDER_BY, TokenType.LIMIT, TokenType.SORT_BY):
            problem = f"{token.text.upper()} would be of the whole UNION ALL: put it into a sub-query of one SELECT"
            raise error_at(problem, query, token.start)
    begins = _after_with(top)
    ends = [*(top[n].start for n in cuts), len(query)]
    starts = [begins, *(top[n + 1].end + 1 for n in cuts)]
    parts = []
    for start, end in zip(starts, ends, strict=True):
        text = query[:begins] + _blank(query[begins:start]) + query[start:end]
        words = {token.text.lower() for token in tokens if token.start < begins or start <= token.start < end}
        parts.append(Part(text, tuple(name for name in inputs if name.lower() in words)))
    return parts


def _after_with(top: list[Token]) -> int:
    """Where the first SELECT begins, behind WITH and its sub-queries."""
    if top[0].token_type != TokenType.WITH:
        return 0
    return next((token.start for token in top if token.token_type == TokenType.SELECT), 0)


def _blank(text: str) -> str:
    return re.sub(r"[^\n]", " ", text)

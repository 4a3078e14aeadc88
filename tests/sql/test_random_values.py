"""Random queries with sub-queries as values: in every micro-batch what Spark's own SQL says."""

from __future__ import annotations

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import gpu_ops
from sql.test_random import COLUMNS, HOWS, RANDOM, TABLES, against_spark, asked, share_taken, terms

pytestmark = [pytest.mark.thorough, pytest.mark.spark]


@st.composite
def values(draw: st.DrawFn, scope: dict[str, list[str]], number: int) -> str:
    """A sub-query of one row at most: an aggregate, a first row, a row by its unique key; correlated or not."""
    name, own = draw(st.sampled_from(sorted(TABLES))), f"s{number}"
    alias = draw(st.sampled_from(sorted(scope)))
    outer, inner = f"{alias}.{draw(st.sampled_from(scope[alias]))}", f"{own}.{draw(st.sampled_from(COLUMNS[name]))}"
    operator = draw(st.sampled_from(["=", "=", "=", "<=>"]))
    where = (
        [f"{own}.{draw(st.sampled_from(['k', 'k', *COLUMNS[name]]))} {operator} {outer}"]
        if draw(st.integers(0, 2))
        else []
    )
    if draw(st.integers(0, 2)) == 0:
        where.append(draw(terms({own: COLUMNS[name]})))
    if number < 20 and draw(st.integers(0, 4)) == 0:
        where.append(f"{inner} >= {draw(values({own: COLUMNS[name]}, number + 10))}")
    text = f"FROM {name} {own}" + (f" WHERE {' AND '.join(where)}" if where else "")
    having = draw(st.sampled_from(["", "", " HAVING count(*) > 1"]))
    return draw(
        st.sampled_from(
            [
                f"(SELECT max({inner}) {text}{having})",
                f"(SELECT count({inner}) {text}{having})",
                f"(SELECT coalesce(sum({inner}), 7) + 1 {text})",
                f"(SELECT {inner} {text} ORDER BY {inner}, {own}.k LIMIT 1)",
                f"(SELECT {own}.v FROM b {own} WHERE {own}.k = {outer})",
            ]
        )
    )


@st.composite
def valuing(draw: st.DrawFn) -> str:
    """A SELECT with sub-queries as values: shown, compared, below OR, in CASE, of groups."""
    names = [draw(st.sampled_from(sorted(TABLES))) for _ in range(draw(st.sampled_from([1, 1, 2])))]
    scope = {f"t{number}": COLUMNS[name] for number, name in enumerate(names)}
    text = f"{names[0]} t0" + (f" {draw(st.sampled_from(HOWS[:2]))} {names[1]} t1 ON t0.k = t1.k" if names[1:] else "")
    one, other = (draw(values(scope, number)) for number in range(2))
    left = draw(st.sampled_from(["t0.k", f"t0.{COLUMNS[names[0]][-1]}", "1"]))
    compared = f"{left} {draw(st.sampled_from(['=', '<', '>=', '<>', '<=>']))} {one}"
    where = draw(
        st.sampled_from([f" WHERE {compared}", f" WHERE {compared} OR t0.k > {other}", f" WHERE {one} IS NULL"])
    )
    if draw(st.integers(0, 4)) == 0:
        exists = draw(asked(scope, 5))
        where += f" AND {exists}" if " OR " not in where else ""
    shown = ", ".join(f"{alias}.{c} AS {alias}_{c}" for alias, columns in scope.items() for c in columns)
    of_group = draw(values({"t0": ["k"]}, 3))
    return draw(
        st.sampled_from(
            [
                f"SELECT {shown} FROM {text}{where}",
                f"SELECT {shown}, {one} AS one FROM {text}",
                f"SELECT {shown}, CASE WHEN {one} > 1 THEN {other} ELSE 0 END AS one FROM {text}",
                f"SELECT t0.k, count(*) AS n FROM {text}{where} GROUP BY t0.k",
                f"SELECT t0.k, count(*) AS n FROM {text} GROUP BY t0.k HAVING count(*) > {of_group}",
                f"SELECT g, count(*) AS n FROM (SELECT {one} AS g FROM {text}) GROUP BY g",
            ]
        )
    )


VALUING = valuing(), *RANDOM[1:]


@given(*VALUING)
@settings(max_examples=4, phases=[Phase.generate])
def test_sub_queries_as_values_are_sparks_own(spark, sql, history, emit, multi_way):
    against_spark(spark, sql, history, emit, multi_way)


@pytest.mark.slow
def test_many_sub_queries_as_values_are_sparks_own(spark):
    assert share_taken(spark, VALUING, examples=600) > 0.8


def test_a_value_of_several_rows_is_sparks_error(spark):
    """It comes where such a row is met, and only then."""
    orders = spark.createDataFrame([(1,), (2,)], "id int")
    prices = spark.createDataFrame([(1, 10), (2, 20), (2, 21)], "id int, v int")
    text = "SELECT o.id, (SELECT v FROM p WHERE p.id = o.id) AS v FROM o"
    with pytest.raises(Exception, match=r"\[SCALAR_SUBQUERY_TOO_MANY_ROWS\] More than one row"):
        gpu_ops.sql(text, o=orders, p=prices).collect()
    found = gpu_ops.sql(f"{text} WHERE o.id < 2", o=orders, p=prices).collect()
    assert [tuple(row) for row in found] == [("+I", 1, 10)]

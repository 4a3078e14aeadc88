"""Random queries with any aggregate, by any grouping sets: in every micro-batch what Spark's own SQL says."""

from __future__ import annotations

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from sql.test_random import COLUMNS, RANDOM, TABLES, against_spark, share_taken

pytestmark = [pytest.mark.thorough, pytest.mark.spark]


@pytest.fixture(autouse=True)
def no_ansi(spark):
    """In ANSI mode Spark's ``corr`` of values that all are the same is an error."""
    spark.conf.set("spark.sql.ansi.enabled", "false")
    yield
    spark.conf.unset("spark.sql.ansi.enabled")


@st.composite
def calls(draw: st.DrawFn, columns: list[str]) -> str:
    """A call of an aggregate function; what Spark rounds as it goes is rounded."""
    one, other = (draw(st.sampled_from(columns)) for _ in range(2))
    kind = draw(
        st.sampled_from(
            ["stddev", "stddev_pop", "variance", "var_pop", "covar_samp", "covar_pop", "corr", "collect_list",
             "collect_set", "array_agg", "string_agg", "approx_count_distinct", "count", "sum"]
        )
    )  # fmt: skip
    where = draw(st.sampled_from(["", "", f" FILTER (WHERE {other} > 0)"]))
    text = f"CAST({one} AS STRING)"
    return {
        "corr": f"round(corr({one}, {other}){where}, 6)",
        "covar_samp": f"round(covar_samp({one}, {other}){where}, 6)",
        "covar_pop": f"round(covar_pop({one}, {other} + {one}){where}, 6)",
        "collect_list": f"collect_list({text}){where}",
        "collect_set": f"collect_set({text}){where}",
        "array_agg": f"array_agg(DISTINCT {text}){where}",
        "string_agg": f"string_agg({text}, '-') WITHIN GROUP (ORDER BY {text}){where}",
        "count": f"count(*){where}",
        "sum": f"sum({one}){where}",
        "approx_count_distinct": f"approx_count_distinct({one}){where}",
    }.get(kind) or f"round({kind}({one}){where}, 6)"  # fmt: skip


@st.composite
def grouping(draw: st.DrawFn) -> str:
    """A SELECT with groups, of an input or a join: by columns, ROLLUP, CUBE, GROUPING SETS or nothing."""
    name, other = (draw(st.sampled_from(sorted(TABLES))) for _ in range(2))
    alias = [f"p.{column}" for column in COLUMNS[name]]
    source = f"{name} p"
    if draw(st.integers(0, 2)) == 0:
        source += f" {draw(st.sampled_from(['JOIN', 'LEFT JOIN', 'FULL JOIN']))} {other} q ON p.k = q.k"
        alias += [f"q.{column}" for column in COLUMNS[other]]
    where = draw(st.sampled_from(["", "", f" WHERE {alias[-1]} > 0"]))
    keys = draw(st.lists(st.sampled_from(alias), min_size=1, max_size=2, unique=True))
    listed = ", ".join(keys)
    sets = ", ".join(f"({x})" for x in draw(st.lists(st.sampled_from([*keys, listed, ""]), min_size=1, max_size=3)))
    by = draw(
        st.sampled_from(
            ["", f" GROUP BY {listed}", f" GROUP BY ROLLUP ({listed})", f" GROUP BY CUBE ({listed})",
             f" GROUP BY GROUPING SETS ({sets})", f" GROUP BY {keys[0]}, ROLLUP ({keys[-1]})"]
        )
    )  # fmt: skip
    shown = [f"{key} AS g{number}" for number, key in enumerate(keys) if by and (key in sets or "SETS" not in by)]
    if "(" in by and "SETS" not in by:
        shown.append(f"grouping({keys[-1]}) AS grouped")
    shown += [f"{draw(calls(alias))} AS m{number}" for number in range(draw(st.integers(1, 3)))]
    having = draw(st.sampled_from(["", "", " HAVING count(*) > 1"])) if by else ""
    return f"SELECT {', '.join(shown)} FROM {source}{where}{by}{having}"


GROUPING = grouping(), *RANDOM[1:]


@given(*GROUPING)
@settings(max_examples=5, phases=[Phase.generate])
def test_groups_are_sparks_own(spark, sql, history, emit, multi_way):
    against_spark(spark, sql, history, emit, multi_way)


@pytest.mark.slow
def test_many_groups_are_sparks_own(spark):
    assert share_taken(spark, GROUPING, examples=600) > 0.95

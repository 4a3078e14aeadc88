"""Conditions as Spark evaluates them: random ones, in five time zones, with ANSI mode on and off."""

from __future__ import annotations

import contextlib
import datetime as dt
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import gpu_ops
from cpu_fallback.conditions import evaluate
from gpu_ops.conditions import Condition, parse
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.join import Join
from gpu_ops.descriptions.kinds import from_json
from gpu_ops.errors import ConditionError
from gpu_ops.join_engine import JoinEngine
from spark.support import Sink, Source, drain, in_memory, settings

pytestmark = [pytest.mark.spark, pytest.mark.thorough]

UTC = dt.UTC
ZONES = ["UTC", "America/New_York", "Australia/Lord_Howe", "Asia/Kolkata", "GMT-03:30"]
SCHEMA = pa.schema(
    [
        ("i", pa.int32()), ("l", pa.int64()), ("y", pa.int8()), ("f", pa.float64()), ("g", pa.float32()),
        ("c", pa.decimal128(10, 2)), ("s", pa.string()), ("b", pa.bool_()), ("d", pa.date32()),
        ("t", pa.timestamp("us", "UTC")), ("n", pa.timestamp("us")),
    ]
)  # fmt: skip
DDL = "i int, l long, y byte, f double, g float, c decimal(10,2), s string, b boolean, d date, t timestamp"
DDL += ", n timestamp_ntz"

# Clocks change: New York on 8 March 2026 at 2:00 (7:00Z) and on 1 November at 2:00 (6:00Z), Lord Howe by half an hour
# on 5 April at 2:00 (4 April, 15:00Z) and on 4 October at 2:00 (3 October, 15:30Z).
DAYS = [dt.date(2026, 3, 8), dt.date(2026, 11, 1), dt.date(2026, 4, 5), dt.date(2026, 10, 4), dt.date(1969, 12, 31)]
CLOCKS = [
    dt.time(0),
    dt.time(1, 30),
    dt.time(2),
    dt.time(2, 15),
    dt.time(2, 45, 0, 500),
    dt.time(6, 30),
    dt.time(15, 40),
]
TEXTS = ["", "a", "A%", "a_b", "a\\b", " 12 ", "-7", "1.9", "1e3", "true", "N", "straße", "a\nb", "2026-03-08", "日本"]


def table(seed: int, rows: int) -> pa.Table:
    """Rows of every type, nulls among them."""
    rng = random.Random(seed)
    moments = [dt.datetime.combine(day, clock) for day in DAYS for clock in CLOCKS]
    values: Mapping[str, list[Any]] = {
        "i": [0, 1, -1, 2, 5, 100, 2**31 - 1, -(2**31)],
        "l": [0, 1, -3, 5, 2**40, 2**63 - 1, -(2**63)],
        "y": [0, 1, -1, 7, 127, -128],
        "f": [0.0, -0.0, 1.5, -2.0, 5.0, 1e20, math.inf, -math.inf, math.nan],
        "g": [0.0, 1.5, -2.0, 16777216.0, math.nan],
        "c": [Decimal("0.00"), Decimal("1.50"), Decimal("-2.00"), Decimal("5.00"), Decimal("99999999.99")],
        "s": TEXTS,
        "b": [True, False],
        "d": DAYS,
        "t": [moment.replace(tzinfo=UTC) for moment in moments],
        "n": moments,
    }
    return pa.table(
        {
            field.name: pa.array([rng.choice([*values[field.name], None]) for _ in range(rows)], field.type)
            for field in SCHEMA
        },
        schema=SCHEMA,
    )


LEFT, RIGHT = table(1, 14), table(2, 12)
PAIRS = np.indices((LEFT.num_rows, RIGHT.num_rows)).reshape(2, -1)
ROWS = {"l": LEFT.take(PAIRS[0]), "r": RIGHT.take(PAIRS[1])}
SCHEMAS = {"l": SCHEMA, "r": SCHEMA}


class Conditions:
    """Random conditions, typed as SQL is."""

    def __init__(self, seed: int, *, ansi: bool) -> None:
        self.rng, self.ansi = random.Random(seed), ansi

    def condition(self) -> str:
        return self.boolean(self.rng.choice([1, 2, 2, 3]))

    def one_of(self, *makers: Callable[[], str] | str) -> str:
        made = self.rng.choice(makers)
        return made if isinstance(made, str) else made()

    def column(self, name: str) -> str:
        return f"{self.rng.choice('lr')}.{name}"

    def boolean(self, depth: int) -> str:
        if depth <= 0:
            return self.one_of(self.simple, self.simple, lambda: self.column("b"))
        a, b = (self.boolean(depth - 1) for _ in range(2))
        return self.one_of(
            self.simple, self.simple, f"({a} AND {b})", f"({a} OR {b})", f"NOT ({a})", f"({a}) IS NULL",
            f"CASE WHEN {a} THEN {b} ELSE {self.column('b')} END", f"COALESCE({a}, {b})", f"({a}) <=> ({b})",
        )  # fmt: skip

    def simple(self) -> str:
        rng = self.rng
        operator = rng.choice(["=", "<>", "<", "<=", ">", ">=", "<=>"])
        family = rng.choice(["exact", "float", "text", "date", "instant", "wall clock", "null"])
        if family == "null":
            return f"{self.column(rng.choice(SCHEMA.names))} IS {rng.choice(['', 'NOT '])}NULL"
        maker = {"exact": self.exact, "float": self.float, "text": self.text}.get(family) or self.times(family)
        a, b, c = maker(2), maker(1), maker(1)
        shape = rng.random()
        if shape < 0.6:
            return f"{a} {operator} {b}" if rng.random() < 0.8 else f"{b} {operator} {a}"
        if shape < 0.75:
            if self.ansi:  # Spark computes what is between beforehand, though AND or OR would not look at it
                a = maker(0)
            return f"{a} {rng.choice(['', 'NOT '])}BETWEEN {b} AND {c}"
        if shape < 0.9:
            return f"{a} {rng.choice(['', 'NOT '])}IN ({b}, {c}{rng.choice(['', ', NULL'])})"
        return f"CASE WHEN {a} = {b} THEN true WHEN {a} = {c} THEN false END"

    def exact(self, depth: int) -> str:
        """An integer or a decimal."""
        return self.number(depth, "ilyc", ["5", "-1", "1.5", "100", "5000000000"])

    def float(self, depth: int) -> str:
        """A float or an integer."""
        return self.number(depth, "ilyfg", ["5", "-1", "1.5", "2e0"])

    def number(self, depth: int, names: str, constants: list[str]) -> str:
        if depth <= 0:
            return self.one_of(*[lambda name=name: self.column(name) for name in names], *constants)  # type: ignore[misc]
        a, b = (self.number(depth - 1, names, constants) for _ in range(2))
        whole, other = (self.column(self.rng.choice("ily")) for _ in range(2))
        quotient = [f"({whole} / {other})", f"({a} / CASE WHEN {other} <> 0 THEN {other} END)"] if "f" in names else []
        return self.one_of(
            lambda: self.number(0, names, constants), lambda: self.number(0, names, constants),
            f"({whole} {self.rng.choice('+-*%')} {other})", f"({a} {self.rng.choice('+-')} {b})", f"(-{whole})",
            f"COALESCE({a}, {b})", f"CAST({self.column('i')} AS bigint)", f"CAST({self.column('y')} AS int)",
            f"CASE WHEN {other} <> 0 THEN {whole} % {other} END", *quotient,
        )  # fmt: skip

    def text(self, depth: int) -> str:
        a = self.column("s")
        if depth <= 0:
            return self.one_of(a, "'a'", "''", "'A%'", "'日'")
        return self.one_of(a, a, f"COALESCE({a}, 'a')", f"CASE WHEN {self.column('b')} THEN {a} ELSE 'b' END", "'a'")

    def times(self, family: str) -> Callable[[int], str]:
        """Makes dates, timestamps or timestamps without a zone."""
        name = {"date": "d", "instant": "t", "wall clock": "n"}[family]

        def made(depth: int) -> str:
            rng = self.rng
            at = dt.datetime.combine(rng.choice(DAYS), rng.choice(CLOCKS))
            whole = at.strftime("%Y-%m-%d %H:%M:%S") + (f".{at.microsecond:06}".rstrip("0") if at.microsecond else "")
            zoned = whole + rng.choice(["Z", "+05:30", "-08:00"])
            literal = {"d": f"DATE '{whole[:10]}'", "t": f"TIMESTAMP '{zoned}'", "n": f"TIMESTAMP_NTZ '{whole}'"}[name]
            a, b = self.column(name), self.column(name)
            more = [] if depth <= 0 else [f"COALESCE({a}, {b})", f"CASE WHEN {self.column('b')} THEN {a} ELSE {b} END"]
            return self.one_of(a, literal, *more)

        return made


def understood(seed: int, count: int, *, ansi: bool) -> list[Condition]:
    """As many random conditions that a join takes, and not too many that it does not."""
    made, found, tried = Conditions(seed, ansi=ansi), [], 0
    while len(found) < count:
        tried += 1
        with contextlib.suppress(ConditionError):
            found.append(parse(made.condition(), SCHEMAS, ansi=ansi))
    assert tried < 2 * count, "most conditions are refused: the test says little"
    return found


@pytest.fixture(scope="module")
def pairs(spark: Any) -> Any:
    """Every pair of rows, numbered, as structs l and r."""
    fields = ", ".join(part.replace(" ", ":", 1) for part in DDL.split(", "))
    sides = [[tuple(row.values()) for row in ROWS[side].to_pylist()] for side in "lr"]
    values = [(row, *both) for row, both in enumerate(zip(*sides, strict=True))]
    made = spark.createDataFrame(values, f"row int, l struct<{fields}>, r struct<{fields}>").coalesce(1).cache()
    assert made.count() == len(values)
    yield made
    made.unpersist()


def in_spark(pairs: Any, texts: list[str]) -> list[list[bool | None] | None]:
    """What Spark makes of texts, row by row; None for a text that it does not take."""
    from pyspark.errors import AnalysisException

    try:
        found = pairs.selectExpr("row", *(f"({text}) AS c{n}" for n, text in enumerate(texts)))
    except AnalysisException:
        if len(texts) == 1:
            return [None]
        half = len(texts) // 2
        return [*in_spark(pairs, texts[:half]), *in_spark(pairs, texts[half:])]
    values = [tuple(row)[1:] for row in sorted(found.collect())]
    return [list(column) for column in zip(*values, strict=True)]


def answered(rows: Any, text: str) -> bool:
    """Whether Spark has an answer for all rows, and no error."""
    from pyspark.errors import PySparkException

    try:
        rows.selectExpr(f"({text}) AS c").collect()
    except PySparkException as error:
        if re.search(r"(?i)overflow|by.zero|cast|out_of_range", str(error)):
            return False
        raise
    return True


def spared(condition: Condition) -> tuple[str, str, pa.Table | None]:
    """A condition's text for Spark, without the rows where it fails here, and the test of just these."""
    if condition.fails is None:
        return condition.sql, "", None
    failing = evaluate(Condition(condition.sql, condition.fails, condition.columns), ROWS, length=len(PAIRS[0]))
    numbers = ", ".join(map(str, np.flatnonzero(failing)))
    if not numbers:
        return condition.sql, "", None
    return f"CASE WHEN row NOT IN ({numbers}) THEN ({condition.sql}) END", f"row IN ({numbers})", failing


@pytest.mark.parametrize("ansi", [False, True], ids=["lenient", "ansi"])
@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("count", [40, pytest.param(1500, marks=pytest.mark.slow)])
def test_random_conditions(spark: Any, pairs: Any, zone: str, ansi: bool, count: int) -> None:
    seed = count * 100 + ZONES.index(zone) * 2 + ansi
    conditions = understood(seed, count, ansi=ansi)
    asked = [spared(condition) for condition in conditions]
    with settings(spark, zone=zone, ansi=str(ansi).lower(), codegen="false"):
        answers = in_spark(pairs, [text for text, _, _ in asked])
        taken = [n for n, answer in enumerate(answers) if answer is not None]
        assert len(taken) > 0.9 * count, "Spark refuses most conditions: the test says little"
        for n in taken:
            condition, failing = conditions[n], asked[n][2]
            lenient = Condition(condition.sql, condition.root, condition.columns)
            mask = evaluate(lenient, ROWS, length=len(PAIRS[0]))
            if failing is not None:
                mask &= ~failing
            wrong = np.flatnonzero(mask != [value is True for value in answers[n] or ()])
            shown = {side: ROWS[side].slice(int(wrong[0]), 1).to_pylist() for side in "lr"} if wrong.size else {}
            assert not wrong.size, f"{condition.sql}\n{zone} ansi={ansi}: {mask[wrong[0]]} for {shown}"
        fail = [n for n in taken if asked[n][2] is not None][: 3 + count // 50]
        assert bool(fail) == ansi
        # What fails here does so in Spark, but where it folds a constant first or leaves out what meets a null.
        fails = sum(not answered(pairs.where(f"row = {np.argmax(asked[n][2])}"), conditions[n].sql) for n in fail)
        assert fails >= len(fail) / 2


@pytest.mark.parametrize("how", ["inner", "left", "anti"])
def test_random_conditions_in_a_join(how: str) -> None:
    """What the evaluation above says is what a join goes by."""
    for condition in understood(7, 20, ansi=False):
        described = Join(
            how,
            Input("l", SCHEMA),
            Input("r", SCHEMA),
            where=condition.sql,
            suffixes=("", "_r"),
        )
        engine = JoinEngine(from_json(described.to_json()), backend="cpu")
        said = engine.process(left=LEFT, right=RIGHT)
        mask = evaluate(condition, ROWS, length=len(PAIRS[0]))
        met = set(PAIRS[0][mask].tolist())
        alone = LEFT.num_rows - len(met)
        expected = {"inner": int(mask.sum()), "left": int(mask.sum()) + alone, "anti": alone}[how]
        assert set(said["row_kind"].to_pylist()) <= {"+I"}
        assert said.num_rows == expected, condition.sql
        engine.close()


# --- whole queries, in a session in New York -------------------------------------------------------

WHERE = """left.at >= '2026-03-08 03:30:00' AND right.at NOT BETWEEN '2026-11-01' AND TIMESTAMP '2026-11-01 01:30:00'
    AND (CAST(left.at AS DATE) IN ('2026-03-08', '2026-03-09') OR right.at + INTERVAL 1 DAY > '2026-11-02 00:30')"""
HOURS = [f"2026-03-08T{hour:02}:{minute}:00Z" for hour in (6, 7, 8) for minute in (29, 30, 31)]
HOURS += [f"2026-03-09T0{hour}:59:59Z" for hour in (3, 4)]
HOURS += [f"2026-11-01T0{hour}:{minute}:00Z" for hour in (3, 4, 5, 6) for minute in (29, 31)]
HOURS += [f"2026-11-02T0{hour}:30:00Z" for hour in (4, 5, 6)]


def feeds(spark: Any, folder: Path) -> tuple[Source, Source]:
    left, right = (Source(spark, folder / name, "k long, at timestamp") for name in ("left", "right"))
    for n, side in enumerate((left, right)):
        for part in (HOURS[: 9 + n], HOURS[9 + n :]):
            side.add(*({"k": number % 2, "at": at} for number, at in enumerate(part)))
    return left, right


def by_spark(spark: Any, folder: Path, query: str) -> Counter[Any]:
    """A query over all files at once."""
    for name in ("left", "right"):
        df = spark.read.schema("k long, at timestamp").json(str(folder / name))
        df.createOrReplaceTempView(f"all_{name}")
    return Counter(tuple(row) for row in spark.sql(query).collect())


@pytest.mark.parametrize("how", ["inner", "left", "anti"])
def test_where_is_read_in_the_sessions_time_zone(spark: Any, tmp_path: Path, how: str) -> None:
    assert spark.conf.get("spark.sql.session.timeZone") == "America/New_York"
    left, right = feeds(spark, tmp_path)
    suffixes = {} if how == "anti" else {"suffixes": ("", "_r")}
    changes = in_memory(gpu_ops.join, left.df, right.df, on="k", how=how, where=WHERE, **suffixes)
    sink = Sink()
    drain(changes, sink, tmp_path / "checkpoint")
    columns = "left.k, left.at" + ("" if how == "anti" else ", right.at")
    condition = f"left.k = right.k AND {WHERE}"
    query = f"SELECT {columns} FROM all_left AS `left` {how} JOIN all_right AS `right` ON {condition}"
    expected = by_spark(spark, tmp_path, query)
    assert Counter(sink.table) == expected
    assert expected


def test_sql_reads_times_in_the_sessions_time_zone(spark: Any, tmp_path: Path) -> None:
    left, right = feeds(spark, tmp_path)
    query = """SELECT l.k, l.at, r.at AS other FROM {0}left l LEFT JOIN {0}right r
        ON l.k = r.k AND (l.at >= '2026-03-08 03:30' OR r.at NOT IN ('2026-11-01 01:31:00', '2026-03-08 03:31:00'))
        WHERE NOT EXISTS (SELECT 1 FROM {0}right x WHERE x.k = l.k AND CAST(x.at AS DATE) > '2026-11-01'
            AND CASE WHEN l.at < TIMESTAMP '2026-03-08 03:30:00' THEN x.at > l.at ELSE false END)"""
    for ansi in ("true", "false"):
        with settings(spark, ansi=ansi):
            changes = in_memory(gpu_ops.sql, query.format(""), left=left.df, right=right.df)
            sink = Sink()
            drain(changes, sink, tmp_path / f"checkpoint_{ansi}")
            expected = by_spark(spark, tmp_path, query.format("all_"))
        assert Counter(sink.table) == expected
        assert expected


def test_a_changed_time_zone_is_a_changed_join(spark: Any, tmp_path: Path) -> None:
    left, right = feeds(spark, tmp_path)

    def run(where: str, name: str) -> None:
        changes = gpu_ops.join(left.df, right.df, on="k", where=where, suffixes=("", "_r"), state=str(tmp_path / name))
        drain(changes, Sink(), tmp_path / f"{name}_checkpoint")
        left.add({"k": 0, "at": HOURS[0]})

    for name, where in (("dated", "left.at > '2026-03-08 03:30'"), ("plain", "left.at > right.at")):
        run(where, name)
        with settings(spark, zone="UTC"):
            if name == "plain":
                run(where, name)
            else:
                with pytest.raises(Exception, match="another join"):
                    run(where, name)


def as_spark(spark: Any, where: str, left: Any, right: Any) -> None:
    """A left join's rows are those of Spark's own."""
    from pyspark.sql import functions as f

    found = gpu_ops.join(left, right.withColumnRenamed("k", "other"), on=[("k", "other")], how="left", where=where)
    sides = left.alias("left"), right.withColumnRenamed("k", "other").alias("right")
    wanted = sides[0].join(sides[1], f.expr(f"left.k = right.other AND ({where})"), "left")
    rows = Counter(tuple(row)[1:] for row in found.collect())
    assert rows == Counter(map(tuple, wanted.collect()))
    every = sides[0].join(sides[1], f.expr("left.k = right.other"), "left")
    assert rows != Counter(map(tuple, every.collect())), "a condition that decides nothing tests nothing"


@pytest.mark.parametrize("collation", ["UTF8_LCASE", "UNICODE_CI", "UTF8_BINARY_RTRIM"])
def test_a_condition_over_a_collation_is_sparks(spark: Any, collation: str) -> None:
    """Text is compared as its collation says, not by its bytes."""
    rows = [(n % 2, a) for n, a in enumerate(["x", "X ", "xa", "B", "b ", "Äx", "äX", None])]
    left = spark.createDataFrame(rows, "k long, a string").selectExpr("k", f"a COLLATE {collation} AS a")
    right = left.selectExpr("k", "a AS b")
    as_spark(spark, "(left.a = right.b OR left.k = 1 AND left.a < right.b) AND right.b > 'b'", left, right)


def test_a_condition_over_a_padded_type(spark: Any) -> None:
    """Spark pads what a CHAR is compared with; a join does not compare it with another input's text."""
    from pyspark.sql import functions as f

    left = spark.createDataFrame([(1, "x"), (1, "y")], "k long, a string")
    padded = left.select("k", f.rpad("a", 5, " ").alias("b", metadata={"__CHAR_VARCHAR_TYPE_STRING": "char(5)"}))
    as_spark(spark, "right.b = 'x'", left, padded)
    with pytest.raises(gpu_ops.NotBuiltError, match=r"column 'b' has the type char\(5\), which Spark pads"):
        gpu_ops.join(padded, left, on="k", where="left.b < right.a")


@pytest.mark.parametrize(
    ("name", "value", "where"),
    [
        ("spark.sql.timestampType", "TIMESTAMP_NTZ", "left.at < TIMESTAMP '2026-03-08 03:00:00'"),
        ("spark.sql.parser.escapedStringLiterals", "true", r"right.s RLIKE '^\w$'"),
        ("spark.sql.ansi.doubleQuotedIdentifiers", "true", '"right"."s" = \'a\''),
    ],
)
def test_a_setting_that_changes_what_conditions_mean_is_heeded(spark: Any, name: str, value: str, where: str) -> None:
    times = [dt.datetime(2026, 3, 8, hour, tzinfo=UTC) for hour in (6, 8)]
    left = spark.createDataFrame([(1, at) for at in times], "k long, at timestamp")
    right = spark.createDataFrame([(1, "a"), (1, "bb")], "k long, s string")
    before = spark.conf.get("spark.sql.ansi.enabled")
    spark.conf.set("spark.sql.ansi.enabled", "true")
    spark.conf.set(name, value)
    try:
        as_spark(spark, where, left, right)
    finally:
        spark.conf.unset(name)
        spark.conf.set("spark.sql.ansi.enabled", before)

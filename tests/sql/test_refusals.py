"""Every refusal of ``sql()``: a place in the text, and no name that is not the user's; each `raise` of the planner met.

Which refusals there are, the source says: each `raise` and each call of `fail` in ``gpu_ops/query`` and in
``sql.py`` and ``query_frames.py`` of ``gpu_ops/spark/api``. A query of the tables here, or of `sql.test_errors`, has to
come by each of them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gpu_ops
from gpu_ops.errors import GpuJoinError
from gpu_ops.query.relations import Table
from sql import test_errors
from sql.tables import TABLES, check_names, planned

pytestmark = [pytest.mark.spark, pytest.mark.slow]

PACKAGE = Path(gpu_ops.__file__).parent
API = PACKAGE / "spark" / "api"
FILES = [*sorted((PACKAGE / "query").glob("*.py")), API / "sql.py", API / "query_frames.py"]

WHERE_TEXT = "a condition in Python, where=, is no query"
TAKEN_BACK = "another operator, or Spark, evaluates the condition then"
ALONE = "of gpu_ops.union(); the parts of a query fit"
NEVER = {
    "no rule {name} in its optimizer": "of other versions of Spark",
    "refused.message, f": WHERE_TEXT,
    "no part of a condition over both inputs": WHERE_TEXT,
    "raise NotOursError(expr, f": TAKEN_BACK,
    "it is one of {', '.join(get_args(values))}": "an option that there is not is no matter of the query",
    "sql() takes the text of a query": "there is no text",
    "union() takes two": ALONE,
    "some of them are static": ALONE,
    "raise PlacedError(_NO_VALUE": "Spark's own optimizer fails then",
    "scope.fail(_AGAIN": "all three mean the same: what is no session any more",
    "the gap of session_window is null": "Spark takes no such gap as it is written",
    "an hour longer or shorter": "of a zone whose clocks are set: tests/spark/test_sessions.py",
    "the first changelog has": ALONE,
    "the columns do not fit": ALONE,
}
"""Refusals that no query comes by, by a piece of their lines, and why."""

FINAL: dict[str, Any] = {"emit": "at_watermark"}
END: dict[str, Any] = {"emit": "at_end"}
ASOF = "SELECT c.x FROM clicks c ASOF JOIN views v MATCH_CONDITION (c.ts > v.ts"
AS_OF = "SELECT c.x FROM clicks c JOIN views FOR SYSTEM_TIME AS OF"
BOUNDED = "clicks c JOIN views v ON c.uid = v.uid AND c.ts BETWEEN v.ts - INTERVAL 1 HOUR AND v.ts"
TWO = "FROM clicks c JOIN users q ON q.uid = c.uid"
GROUPED = "(SELECT max(name) AS m, uid FROM users GROUP BY uid) u"
UNITED = "(SELECT ts FROM clicks UNION ALL SELECT at FROM payments) q"
KEPT = Table("kept", TABLES["users"].schema, ttl_ms=1000)
CARDS = Table("cards", TABLES["edits"].schema, row_kind="op", unique_key=("uid",), event_times=("ts",))
FILTERED = FINAL | {"tables": {"cards": CARDS}}
MORE: list[tuple[str, dict[str, Any]]] = [
    (ASOF, {}),
    (f"{ASOF}) USING (uid)", {}),
    (f"{AS_OF} c.ts v MATCH_CONDITION (c.ts > v.ts)", {}),
    (f"{AS_OF} 5 v ON c.uid = v.uid", {}),
    (f"{AS_OF} c.ts v ON c.uid = v.uid", END),
    ("SELECT uid FROM users WHERE uid > 1", END),
    ("SELECT name FROM kept WHERE uid > 1", {"tables": {"kept": KEPT}}),
    (f"SELECT c.x, v.y, u.name FROM {BOUNDED}\nJOIN users u ON u.uid = c.uid", END),
    ("SELECT x FROM clicks c JOIN users u USING (uid) UNION ALL SELECT y FROM views v JOIN users u USING (uid)", END),
    ("SELECT c.x FROM clicks c JOIN views v ON c.uid = v.uid", FINAL),
    ("SELECT c.uid FROM edits c ASOF JOIN views v ON c.uid = v.uid AND c.ts >= v.ts", FINAL),
    ("SELECT y.uid FROM payments y ASOF JOIN views v ON y.uid = v.uid AND y.at >= v.ts", FINAL),
    ("SELECT count(*) AS n FROM clicks GROUP BY uid", FINAL),
    (f"SELECT count(*) AS n FROM {UNITED} GROUP BY window(ts, '10 minutes')", FINAL),
    (f"SELECT count(*) AS n FROM {UNITED} GROUP BY session_window(ts, '10 minutes')", FINAL),
    ("SELECT count(*) AS n FROM payments GROUP BY uid", FINAL),
    ("SELECT count(*) AS n FROM payments GROUP BY session_window(at, '5 minutes')", FINAL),
    ("SELECT count(*) AS n FROM clicks GROUP BY session_window(ts, IF(x > 1, '1 hour', '2 hours'))", {}),
    ("SELECT count(*) AS n FROM clicks GROUP BY session_window(ts, '1 microsecond')", {}),
    ("SELECT count(*) AS n FROM cards WHERE uid > 1 GROUP BY window(ts, '1 minute')", FILTERED),
    ("SELECT u.uid FROM users u LEFT JOIN users q ON u.uid = q.uid AND u.tags < q.tags", {}),
    ("SELECT max(name COLLATE UTF8_LCASE) AS m FROM users", {}),
    ("SELECT count(DISTINCT 1) AS n FROM users", {}),
    ("SELECT collect_set(name COLLATE UTF8_LCASE) AS m FROM users", {}),
    ("SELECT string_agg(name, ',') WITHIN GROUP (ORDER BY name DESC) AS m FROM users", {}),
    ("SELECT string_agg(encode(name, 'utf-8')) AS m FROM users", {}),
    ("SELECT string_agg(DISTINCT name) AS m FROM users", {}),
    ("SELECT collect_list(tags) AS m FROM users", {}),
    ("SELECT count(*) AS n FROM users GROUP BY (SELECT x FROM clicks)", {}),
    ("SELECT name FROM kept UNION ALL SELECT name FROM users", {"tables": {**TABLES, "kept": KEPT}}),
    # what descriptions refuse, of columns and inputs that have no name
    ("SELECT count(DISTINCT array(o.uid)) AS n FROM users u JOIN orders o ON o.uid = u.uid", {}),
    ("SELECT max(array(u.uid, o.id)) AS n FROM users u JOIN orders o ON o.uid = u.uid", {}),
    ("SELECT uid, n FROM (SELECT uid, max(array(x)) AS n FROM clicks GROUP BY uid)", {}),
    ("SELECT sum(i) AS s FROM (SELECT INTERVAL 1 MONTH AS i, o.uid FROM orders o JOIN users u USING (uid))", {}),
    ("SELECT o.id FROM orders o JOIN users u ON o.uid = u.uid ORDER BY array(o.id, u.uid) LIMIT 3", {}),
    (f"SELECT * FROM (SELECT ROW_NUMBER() OVER (PARTITION BY q.uid ORDER BY array(tags)) AS n\n{TWO}) WHERE n < 3", {}),
    (f"SELECT * FROM (SELECT ROW_NUMBER() OVER (PARTITION BY array(q.uid) ORDER BY x) AS n\n{TWO}) WHERE n < 3", {}),
    ("SELECT uid, b FROM (SELECT uid FROM users)", {}),
    ("SELECT x FROM (SELECT uid FROM (SELECT uid, ts FROM clicks)) JOIN orders o ON true", {}),
    (f"SELECT x {TWO} UNION ALL SELECT y, ts FROM views v JOIN users u USING (uid)", {}),
    (f"SELECT x {TWO} UNION ALL SELECT tags FROM views v JOIN users u USING (uid)", {}),
    (f"SELECT o.id, u.m FROM orders o LEFT JOIN {GROUPED} ON o.uid = u.uid AND concat(o.note, u.m) LIKE 'a%'", {}),
]  # fmt: skip


def of_streams(spark: Any, folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """Queries over streams that are refused after they are planned."""
    rate = spark.readStream.format("rate").load().selectExpr("value AS k", "timestamp AS at", "CAST(value AS STRING) s")
    timed = rate.withWatermark("at", "1 second")
    a, b = gpu_ops.stream(rate, name="a"), gpu_ops.stream(rate, name="b")
    joined = "SELECT a.k FROM a JOIN\nb ON a.k = b.k"
    named = [gpu_ops.join(a, b, on="k", suffixes=("_a", "_b"), name="twice", state=f"{folder}/{n}") for n in "ab"]
    both = {"a": rate, "b": rate}
    interval = "SELECT a.k FROM a JOIN b ON a.k = b.k AND a.at BETWEEN b.at AND b.at + INTERVAL 1 HOUR"
    summed = rate.groupBy("k").count()
    other = timed.selectExpr("k", "at AS later")
    pairs = gpu_ops.interval_join(timed, other, on="k", lower=0, upper=5, state=f"{folder}/c")
    united = "SELECT count(*) AS n FROM (SELECT at FROM a UNION ALL\nSELECT at FROM b) GROUP BY window(at, '1 minute')"
    counted = summed.selectExpr("k", "CAST(count AS STRING) AS s")
    return [
        ("SELECT 1", {}),
        (joined, {"tables": {"a": rate, "A": rate}, "b": rate}),
        (joined, both | {"c": rate}),
        (joined, both | {"b": gpu_ops.stream(rate, bad_rows="tag")}),
        (interval, {"a": timed, "b": timed, "backlog": True}),
        ("SELECT c.k FROM c JOIN (SELECT a.k, b.s FROM a JOIN b USING (k)) q USING (k)", both | {"c": summed}),
        (joined, both | {"backend": "tpu"}),
        (joined, both | {"partitions": 0}),
        (joined, both | {"emit": "at_end"}),
        (joined, {"a": "a table", "b": rate}),
        (united, {"a": timed, "b": gpu_ops.stream(rate, event_time="at"), **FINAL}),
        (united, {"a": timed, "b": gpu_ops.stream(timed, event_time="at", idle_timeout="1 second"), **FINAL}),
        (united, {"a": timed.union(timed), "b": timed, **FINAL}),
        (united, {"a": timed, "b": pairs, **FINAL}),
        ("SELECT a.k FROM a JOIN b ON a.k = b.k", {"a": named[0], "b": rate, "name": "twice"}),
        ("SELECT s_a FROM a UNION ALL SELECT s_a FROM b", {"a": named[0], "b": named[1]}),
        (
            "SELECT c.k FROM a JOIN b USING (k) JOIN c ON a.s || b.s = c.s",
            both | {"c": counted},
        ),
    ]


def sites() -> dict[tuple[str, int, int], str]:
    """Where an error is raised: file, first and last line; and the first line."""
    found = {}
    for file in FILES:
        text = file.read_text()
        for node in ast.walk(ast.parse(text)):
            call = node.func if isinstance(node, ast.Call) else None
            raised = isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
            if raised or (isinstance(call, ast.Attribute) and call.attr in ("fail", "_fail")):
                lines = " ".join(text.splitlines()[node.lineno - 1 : node.end_lineno])
                found[file.name, node.lineno, node.end_lineno] = " ".join(lines.split())
    return found


def lines_of(error: BaseException | None) -> Iterator[tuple[str, int]]:
    """The files and lines that an error, and those it was made of, came by."""
    seen: list[BaseException] = []
    waiting = [error]
    while waiting:
        one = waiting.pop()
        if one is None or one in seen:
            continue
        seen.append(one)
        at = one.__traceback__
        while at is not None:
            yield Path(at.tb_frame.f_code.co_filename).name, at.tb_lineno
            at = at.tb_next
        waiting += [one.__cause__, one.__context__]


def check(error: GpuJoinError, query: str) -> None:
    """It has a place in the query, and shows the line."""
    text = str(error)
    check_names(text.split("\n", maxsplit=1)[0])
    message, _, place = text.split("\n", maxsplit=1)[0].rpartition(" (line ")
    assert message, text
    line, column = (int(x) for x in place.rstrip(")").replace("column ", "").split(", "))
    shown = query.split("\n")[line - 1]
    assert 1 <= column <= len(shown) + 1, text
    assert text.split("\n")[1] == f"  {shown}", text


@pytest.mark.filterwarnings("ignore::gpu_ops.MemoryOnlyStateWarning")
def test_each_refusal_has_a_place_and_no_name_of_ours(spark: Any, tmp_path: Path) -> None:
    met = set()
    planned_only = [(query.replace("§", ""), dict[str, Any]()) for query, _ in test_errors.TABLE] + MORE
    for run, queries in ((planned, planned_only), (gpu_ops.sql, of_streams(spark, tmp_path))):
        for query, options in queries:
            try:
                run(query, **options)
            except GpuJoinError as error:
                check(error, query)
                met |= set(lines_of(error))
            else:
                pytest.fail(f"{query} with {options} is taken")
    missing = {
        site: text
        for site, text in sites().items()
        if not any((site[0], n) in met for n in range(site[1], site[2] + 1))
    }
    unmet = [
        f"{file}:{first}: {text}" for (file, first, _), text in missing.items() if not any(x in text for x in NEVER)
    ]
    assert not unmet, "\n" + "\n".join(unmet)

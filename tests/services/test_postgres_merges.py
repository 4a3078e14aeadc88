"""What a view's transaction does to a table of Postgres that others use, too: their columns, rules, locks and keys."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_ops import sinks
from gpu_ops.errors import BadInputError, DatabaseError, DescriptionError
from gpu_ops.spark.database import Connection
from services.postgres import OPTIONS, Postgres, changelog, view_of

pytestmark = [pytest.mark.spark, pytest.mark.services]

SCHEMA = "id LONG, item STRING"


@pytest.mark.parametrize("key", ["id", None])
def test_columns_that_a_view_lacks_stay_as_they_are(spark: Any, postgres: Postgres, key: Any) -> None:
    """An update is one: triggers see it as such, rows that refer to it stay, a value of theirs is not made anew."""
    count = "" if key else ", gpu_ops_count BIGINT"
    postgres.run(
        f"CREATE TABLE t (id BIGINT UNIQUE, item TEXT{count}, note TEXT DEFAULT 'new', made BIGINT GENERATED ALWAYS AS "
        "IDENTITY, double BIGINT GENERATED ALWAYS AS (id * 2) STORED)",
        "CREATE TABLE child (id BIGINT REFERENCES t (id) ON DELETE CASCADE)", "CREATE TABLE log (what TEXT)",
        "CREATE FUNCTION noted() RETURNS trigger LANGUAGE plpgsql AS "
        "$$BEGIN INSERT INTO log VALUES (TG_OP); RETURN NULL; END$$",
        "CREATE TRIGGER noted AFTER INSERT OR UPDATE OR DELETE ON t FOR EACH ROW EXECUTE FUNCTION noted()",
    )  # fmt: skip
    view = view_of(postgres, "t", key)
    view(changelog(spark, SCHEMA, *(("+I", n, "a") for n in (1, 2, 3))), 0)
    postgres.run("UPDATE t SET note = 'by hand' WHERE id < 3", "INSERT INTO child VALUES (1)", "DELETE FROM log")
    made = dict(postgres.rows("SELECT id, made FROM t"))
    if key:
        view(changelog(spark, SCHEMA, ("-U", 1, "a"), ("+U", 1, "b"), ("-D", 2, "a"), ("+I", 4, "c")), 1)
        assert postgres.rows("SELECT id, item, note, made, double FROM t") == [
            ("1", "b", "by hand", made["1"], "2"), ("3", "a", "new", made["3"], "6"), ("4", "c", "new", "4", "8")
        ]  # fmt: skip
    else:
        view(changelog(spark, SCHEMA, ("+I", 1, "a"), ("-D", 2, "a"), ("+I", 4, "c")), 1)
        assert postgres.rows("SELECT id, item, gpu_ops_count, note FROM t") == [
            ("1", "a", "2", "by hand"), ("3", "a", "1", "new"), ("4", "c", "1", "new")
        ]  # fmt: skip
    assert postgres.rows("SELECT * FROM log") == [("DELETE",), ("INSERT",), ("UPDATE",)]
    assert postgres.rows("SELECT * FROM child") == [("1",)]


@pytest.mark.parametrize(
    ("kept_by", "changes"),
    [
        ("CREATE TRIGGER no BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION no()", [("+I", 3, "c")]),
        ("CREATE TRIGGER no BEFORE UPDATE ON t FOR EACH ROW EXECUTE FUNCTION no()", [("-U", 1, "a"), ("+U", 1, "b")]),
        ("CREATE TRIGGER no BEFORE DELETE ON t FOR EACH ROW EXECUTE FUNCTION no()", [("-D", 1, "a")]),
        ("CREATE RULE no AS ON DELETE TO t DO INSTEAD NOTHING", [("-D", 1, "a")]),
        ("CREATE POLICY no ON t FOR UPDATE USING (id > 1)", [("-U", 1, "a"), ("+U", 1, "b")]),
        ("CREATE POLICY no ON t FOR DELETE USING (id > 1)", [("-D", 1, "a")]),
        ("DELETE FROM t WHERE id = 1", [("-D", 1, "a")]),
        ("DELETE FROM t WHERE id = 1", [("-U", 1, "a"), ("+U", 1, "b")]),
    ],
)
@pytest.mark.parametrize("key", ["id", None])
def test_rows_that_are_kept_away_are_noticed(
    spark: Any,
    postgres: Postgres,
    kept_by: str,
    changes: list[Any],
    key: Any,
) -> None:
    if key is None and "UPDATE" in kept_by:
        changes = [("+I", 1, "a")]  # whose count rises
    (schema,) = postgres.rows("SELECT current_schema()")[0]
    role = f"r{schema}"
    postgres.run(f"CREATE ROLE {role} LOGIN", f"GRANT ALL ON SCHEMA {schema} TO {role}")
    try:
        first = view_of(postgres, "t", key)
        first(changelog(spark, SCHEMA, ("+I", 1, "a"), ("+I", 2, "b")), 0)
        postgres.run(
            "CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RETURN NULL; END$$",
            f"GRANT ALL ON ALL TABLES IN SCHEMA {schema} TO {role}", f"ALTER TABLE t_staged OWNER TO {role}", kept_by,
        )  # fmt: skip
        if "POLICY" in kept_by:
            postgres.run("ALTER TABLE t ENABLE ROW LEVEL SECURITY", "CREATE POLICY seen ON t FOR SELECT USING (true)")
            postgres.run(*(f"CREATE POLICY a{x} ON t FOR {x} USING (id > 1)" for x in ("UPDATE", "DELETE")))
            postgres.run("CREATE POLICY new ON t FOR INSERT WITH CHECK (true)")
        before = postgres.rows("SELECT * FROM t")
        view = sinks.postgres_view(postgres.url, "t", key, options={**OPTIONS, "user": role})
        with pytest.raises(DatabaseError, match=r"view t: .*row level security, a trigger or a rule keeps them away"):
            view(changelog(spark, SCHEMA, *changes, ("+I", 9, "z")), 1)
        assert postgres.rows("SELECT * FROM t") == before
    finally:
        postgres.run(f"DROP OWNED BY {role} CASCADE", f"DROP ROLE {role}")


def test_unique_values_that_rows_exchange(spark: Any, postgres: Postgres) -> None:
    """An UPDATE cannot do it; columns that the view lacks stay, and rows that would go with a delete do not."""
    postgres.run(
        "CREATE TABLE t (id BIGINT PRIMARY KEY, item TEXT UNIQUE, note TEXT, made BIGINT GENERATED ALWAYS AS IDENTITY, "
        "double BIGINT GENERATED ALWAYS AS (id * 2) STORED)"
    )
    view = view_of(postgres, "t")
    view(changelog(spark, SCHEMA, ("+I", 1, "a"), ("+I", 2, "b"), ("+I", 3, "c")), 0)
    postgres.run("UPDATE t SET note = 'of ' || id")
    made = dict(postgres.rows("SELECT id, made FROM t"))
    shown = [(x, item, f"of {x}", made[x], str(2 * int(x))) for x, item in (("1", "b"), ("2", "c"), ("3", "a"))]
    turned = [("-U", 1, "a"), ("+U", 1, "b"), ("-U", 2, "b"), ("+U", 2, "c"), ("-U", 3, "c"), ("+U", 3, "a")]
    view(changelog(spark, SCHEMA, *turned, ("+I", 4, "d")), 1)
    assert postgres.rows("SELECT id, item, note, made, double FROM t WHERE id < 4") == shown
    postgres.run("CREATE TABLE child (id BIGINT REFERENCES t ON DELETE CASCADE)", "INSERT INTO child VALUES (1)")
    with pytest.raises(BadInputError, match=r'view t: .*duplicate key value violates unique constraint "t_item_key"'):
        view(changelog(spark, SCHEMA, ("-U", 1, "b"), ("+U", 1, "c"), ("-U", 2, "c"), ("+U", 2, "b")), 2)
    assert postgres.rows("SELECT id, item, note, made, double FROM t WHERE id < 4") == shown
    assert postgres.rows("SELECT * FROM child") == [("1",)]


def test_errors_of_the_merge_are_ours(spark: Any, postgres: Postgres) -> None:
    """Those of constraints are of the rows, also of one that is checked at the end; a lock that is not had is not."""
    postgres.run(
        "CREATE TABLE items (item TEXT PRIMARY KEY)", "INSERT INTO items VALUES ('a'), ('b')",
        "CREATE TABLE t (id BIGINT PRIMARY KEY CHECK (id < 100), item TEXT NOT NULL REFERENCES items "
        "DEFERRABLE INITIALLY DEFERRED)",
    )  # fmt: skip
    view = sinks.postgres_view(f"{postgres.url}&options=-c%20lock_timeout=300", "t", "id", options=OPTIONS)
    view(changelog(spark, SCHEMA, ("+I", 1, "a")), 0)
    for row, message in [
        ((1000, "a"), "violates check constraint"), ((2, None), 'null value in column "item"'),
        ((2, "z"), "violates foreign key constraint"),
    ]:  # fmt: skip
        with pytest.raises(BadInputError, match=f"input 'changelog': view t: .*{message}"):
            view(changelog(spark, SCHEMA, ("+I", *row)), 1)
    (schema,) = postgres.rows("SELECT current_schema()")[0]
    other = Postgres(spark, schema)
    other.run("BEGIN", "LOCK TABLE t IN SHARE MODE")
    with pytest.raises(DatabaseError, match=r"view t: .*canceling statement due to lock timeout") as raised:
        view(changelog(spark, SCHEMA, ("+I", 2, "b")), 1)
    assert raised.value.state == "55P03"
    # one who reads the table beside it, as a backup does, is not waited for
    other.run("ROLLBACK", "BEGIN", "LOCK TABLE t_staged, t IN ACCESS SHARE MODE")
    view(changelog(spark, SCHEMA, ("+I", 2, "b")), 1)
    other.run("ROLLBACK")
    assert postgres.rows("SELECT * FROM t") == [("1", "a"), ("2", "b")]
    assert postgres.rows("SELECT id FROM t_staged") == [("2",)]


def test_a_database_that_is_not_there_is_said(spark: Any) -> None:
    with pytest.raises(DatabaseError, match=r"view t: Connection to localhost:1 refused.*: ConnectException|refused"):
        sinks.postgres_view("postgresql://localhost:1/x", "t", "id", options=OPTIONS)(changelog(spark, SCHEMA), 0)


def test_partitions_reserved_words_and_generated_keys(spark: Any, postgres: Postgres) -> None:
    postgres.run(
        'CREATE TABLE "order" ("user" BIGINT, "group" TEXT, PRIMARY KEY ("user", "group")) PARTITION BY LIST ("group")',
        "CREATE TABLE pa PARTITION OF \"order\" FOR VALUES IN ('a')",
        'CREATE TABLE pb PARTITION OF "order" DEFAULT', 'ALTER TABLE "order" ADD "select" TEXT DEFAULT \'x\'',
        "CREATE TABLE g (id BIGINT GENERATED ALWAYS AS (1) STORED, item TEXT)",
    )  # fmt: skip
    view = view_of(postgres, '"order"', "user")
    view(changelog(spark, "user LONG, group STRING", ("+I", 1, "a"), ("+I", 2, "b")), 0)
    postgres.run('UPDATE "order" SET "select" = \'y\'')
    view(changelog(spark, "user LONG, group STRING", ("-U", 1, "a"), ("+U", 1, "c"), ("-D", 2, "b")), 1)
    assert postgres.rows('SELECT * FROM "order"') == [("1", "c", "y")]
    with pytest.raises(DescriptionError, match=r'view g cannot be kept: .*cannot insert .* into column "id"'):
        view_of(postgres, "g", "id")(changelog(spark, SCHEMA, ("+I", 1, "a")), 0)


@pytest.mark.parametrize("key", [["id", "item"], None])
def test_null_keys_are_not_matched_row_by_row(
    spark: Any,
    postgres: Postgres,
    monkeypatch: pytest.MonkeyPatch,
    key: Any,
) -> None:
    count = "" if key else ", gpu_ops_count BIGINT"
    postgres.run(
        f"CREATE TABLE t (id BIGINT, item BIGINT, note TEXT{count})",
        "INSERT INTO t SELECT CASE WHEN n % 3 > 0 THEN n END, CASE WHEN n % 3 < 2 THEN n END, 'a'"
        f"{'' if key else ', 1'} FROM generate_series(1, 100000) n", "ANALYZE t",
    )  # fmt: skip
    numbers = ["CASE WHEN n % 3 > 0 THEN n END AS id", "CASE WHEN n % 3 < 2 THEN n END AS item"]
    changes = spark.range(1, 12001).toDF("n").where("n % 50 < 17")
    going = changes.selectExpr("'-U' AS row_kind", *numbers, "'a' AS note")
    coming = going.selectExpr("'+U' AS row_kind", "id", "item", "'b' AS note")
    gone = spark.range(50001, 60001, 7).toDF("n").selectExpr("'-D' AS row_kind", *numbers, "'a' AS note")
    new = spark.range(200000, 202000).toDF("n").selectExpr("'+I' AS row_kind", *numbers, "'c' AS note")
    statements, changed = [], Connection.changed
    monkeypatch.setattr(Connection, "changed", lambda own, sql: statements.append(sql) or changed(own, sql))
    view_of(postgres, "t", key)(going.unionByName(coming).unionByName(gone).unionByName(new), 0)
    expected = changes.count()
    assert postgres.rows("SELECT note, COUNT(*) FROM t GROUP BY note") == [
        ("a", str(100000 - expected - gone.count())), ("b", str(expected)), ("c", "2000")
    ]  # fmt: skip
    plans = [
        "\n".join(row[0] for row in postgres.rows(f"EXPLAIN {sql}"))
        for sql in statements
        if sql.startswith(("DELETE FROM t ", "UPDATE t ", "INSERT INTO t "))
        and "IN (-1)" not in sql
        and "1 = 0" not in sql  # which are tried first
    ]
    assert plans
    assert not [x for x in plans if "Nested Loop" in x]

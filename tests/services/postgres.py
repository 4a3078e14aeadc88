"""A schema of a test's own in a real Postgres, and views in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpu_ops import sinks
from services.views import POSTGRES

OPTIONS = {"user": "postgres", "driver": "org.postgresql.Driver"}


class Postgres:
    """Statements on a schema of the test's own, which is the first of the search path."""

    def __init__(self, spark: Any, schema: str) -> None:
        jvm = spark.sparkContext._jvm
        self.url = f"{POSTGRES}?currentSchema={schema}"
        url = f"jdbc:{self.url}&user=postgres"
        jdbc = jvm.org.apache.spark.sql.execution.datasources.jdbc
        of = jdbc.JdbcOptionsInWrite(url, "none", jvm.PythonUtils.toScalaMap(OPTIONS))
        self._connection = jvm.org.apache.spark.sql.jdbc.JdbcDialects.get(url).createConnectionFactory(of).apply(-1)

    def run(self, *statements: str) -> None:
        for sql in statements:
            self._connection.createStatement().execute(sql)

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        found = self._connection.createStatement().executeQuery(sql)
        count = found.getMetaData().getColumnCount()
        rows = []
        while found.next():
            rows.append(tuple(found.getString(n + 1) for n in range(count)))
        return sorted(rows, key=repr)

    def tables(self) -> set[str]:
        return {name for (name,) in self.rows("SELECT tablename FROM pg_tables WHERE schemaname = current_schema()")}


def changelog(spark: Any, schema: str, *rows: tuple[Any, ...]) -> Any:
    return spark.createDataFrame(list(rows), f"row_kind STRING, {schema}")


def view_of(postgres: Postgres, table: str, key: Any = "id") -> Callable[[Any, int], None]:
    return sinks.postgres_view(postgres.url, table, key, options=OPTIONS)

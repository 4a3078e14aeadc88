"""A connection from the driver to a database, through Spark's JDBC connection factory, with errors of ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final

from py4j.java_gateway import is_instance_of
from py4j.protocol import Py4JJavaError
from pyspark import SparkContext
from pyspark.sql import SparkSession

from gpu_ops.errors import DatabaseError

POSTGRES: Final = "jdbc:postgresql:"
"""The beginning of a JDBC address of Postgres."""


def with_driver(spark: SparkSession, url: str, options: Mapping[str, str]) -> dict[str, str]:
    """Options of Spark's JDBC reader or writer with the class of the driver that takes an address.

    Spark asks Java's ``DriverManager`` where they name none, and that does not know drivers in jars of the session.
    """
    if "driver" in {name.lower() for name in options}:
        return dict(options)
    jvm: Any = spark.sparkContext._jvm
    loader = jvm.org.apache.spark.util.Utils.getContextOrSparkClassLoader()
    with suppress(Py4JJavaError):  # a driver that cannot be loaded; then it is as Spark has it
        found = jvm.java.util.ServiceLoader.load(jvm.java.lang.Class.forName("java.sql.Driver"), loader).iterator()
        while found.hasNext():
            driver = found.next()
            if driver.acceptsURL(url):
                return {**options, "driver": str(driver.getClass().getName())}
    return dict(options)


def told_of_driver(problem: str) -> str:
    """Adds to an error of a database what to do where there is no driver."""
    if "No suitable driver" not in problem and "ClassNotFoundException" not in problem:
        return problem
    return (
        f"Spark has no JDBC driver for this url ({problem}); it comes with --packages (or SET 'spark.packages' = ...), "
        "such as org.postgresql:postgresql:42.7.7, when the session starts"
    )


class Connection:
    """A connection to a database; statements are run one by one.

    Args:
        spark: a session that has the driver.
        url: Spark's JDBC address.
        options: options of Spark's JDBC reader or writer, as of `with_driver`.
        what: the subject of errors, such as ``view shop``.

    Raises:
        DatabaseError: the database cannot be reached; raised by any method where it refuses something.
    """

    def __init__(self, spark: SparkSession, url: str, options: Mapping[str, str], what: str) -> None:
        self._what, self._url, self._options = what, url, options
        self._jvm: Any = spark.sparkContext._jvm
        self.postgres = url.startswith(POSTGRES)
        self.dialect: Any = self._jvm.org.apache.spark.sql.jdbc.JdbcDialects.get(url)
        with self._errors():
            self._java: Any = self.dialect.createConnectionFactory(self._of("none", {})).apply(-1)
            # of those that say nothing the names stay as they are
            self.longest_table = self._java.getMetaData().getMaxTableNameLength() or 2**31
            self.longest_column = self._java.getMetaData().getMaxColumnNameLength() or 2**31

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except Py4JJavaError as error:
            message, state = _told(error)
            raise DatabaseError(f"{self._what}: {told_of_driver(message)}", state) from error

    def _of(self, table: str, more: Mapping[str, str]) -> Any:
        jdbc = self._jvm.org.apache.spark.sql.execution.datasources.jdbc
        return jdbc.JdbcOptionsInWrite(self._url, table, self._jvm.PythonUtils.toScalaMap({**self._options, **more}))

    @property
    def _tools(self) -> Any:
        return self._jvm.org.apache.spark.sql.execution.datasources.jdbc.JdbcUtils

    def quoted(self, column: str) -> str:
        """A column's name as SQL of this database spells it."""
        return str(self.dialect.quoteIdentifier(column))

    def begin(self) -> None:
        """Begins a transaction; before that each statement is a transaction of its own."""
        with self._errors():
            self._java.setAutoCommit(False)

    def commit(self) -> None:
        """Commits the transaction; where that fails it may have been committed nevertheless."""
        with self._errors():
            self._java.commit()

    def rollback(self) -> None:
        """Rolls the transaction back."""
        with self._errors():
            self._java.rollback()

    def close(self) -> None:
        """Closes the connection, and rolls back what was not committed."""
        with suppress(Py4JJavaError):
            if not self._java.getAutoCommit():
                self._java.rollback()  # to close is to commit for some databases
        with suppress(Py4JJavaError):
            self._java.close()

    def execute(self, *statements: str) -> None:
        """Runs SQL statements, one after the other."""
        for sql in statements:
            self.changed(sql)

    def changed(self, sql: str, seconds: int = 0) -> int:
        """Runs a statement and returns the number of rows that it changed.

        Args:
            sql: the statement.
            seconds: the time limit, if the driver can keep it; 0 for the driver's own limit.
        """
        with self._errors():
            statement = self._java.createStatement()
            try:
                if seconds:
                    with suppress(Py4JJavaError):
                        statement.setQueryTimeout(seconds)
                return int(statement.executeUpdate(sql))
            finally:
                with suppress(Py4JJavaError):  # what it failed by is the error
                    statement.close()

    def rows(self, sql: str, most: int = 0) -> list[tuple[str, ...]]:
        """Returns the rows of a query, as text; null is the text ``None``.

        Args:
            sql: the query.
            most: the largest number of rows to return; 0 for all.
        """
        return self._query(sql, most)[2]

    def columns(self, table: str) -> list[str]:
        """The columns of a table or of a query in brackets."""
        return list(self.types(table))

    def types(self, table: str) -> dict[str, str]:
        """The types of the columns of a table or of a query in brackets, as the database calls them."""
        names, types, _ = self._query(f"SELECT * FROM {table} WHERE 1 = 0")  # noqa: S608 - the user's own
        return dict(zip(names, types, strict=True))

    def _query(self, sql: str, most: int = 0) -> tuple[list[str], list[str], list[tuple[str, ...]]]:
        with self._errors():
            statement = self._java.createStatement()
            try:
                statement.setMaxRows(most)
                answer = statement.executeQuery(sql)
                of = answer.getMetaData()
                numbers = range(1, of.getColumnCount() + 1)
                names = [str(of.getColumnName(n)) for n in numbers]
                types = [str(of.getColumnTypeName(n)) for n in numbers]
                rows = []
                while answer.next():
                    rows.append(tuple(str(answer.getString(n)) for n in numbers))
                return names, types, rows
            finally:
                with suppress(Py4JJavaError):
                    statement.close()

    def exists(self, table: str) -> bool:
        """True if the table exists."""
        with self._errors():
            return bool(self._tools.tableExists(self._java, self._of(table, {})))

    def create(self, table: str, schema: Any, more: Mapping[str, str] | None = None) -> None:
        """Creates a table with a Java schema, in Spark's types for the database.

        Args:
            table: the table's name.
            schema: a ``StructType`` of the JVM's.
            more: options of Spark's writer, in place of those of the connection.
        """
        with self._errors():
            self._tools.createTable(self._java, table, schema, True, self._of(table, more or {}))

    def truncation(self, table: str) -> str:
        """The statement that empties a table."""
        return str(self.dialect.getTruncateQuery(table))

    def has_type(self, kind: Any) -> bool:
        """True if Spark knows a type of the database for a Java ``DataType``."""
        try:
            self._tools.getJdbcType(kind, self.dialect)
        except Exception:  # pyspark's and py4j's, by version
            return False
        return True


def literal(text: str) -> str:
    """A text as a string literal of SQL."""
    return "'" + text.replace("'", "''") + "'"


def _told(error: Py4JJavaError) -> tuple[str, str]:
    """The message of a database's failure, with the causes of a lost connection, and its SQLSTATE."""
    gateway, java = SparkContext._gateway, error.java_exception
    told: list[str] = []
    state = ""
    while java is not None:
        message = str(java.getMessage() or java.getClass().getSimpleName())
        if message not in "".join(told):
            told.append(message)
        if gateway is not None and is_instance_of(gateway, java, "java.sql.SQLException"):
            state = state or str(java.getSQLState() or "")
        java = java.getCause()
    return ": ".join(x.rstrip(".") for x in told), state

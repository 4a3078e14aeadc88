"""The SQL statements that bring staged rows into a view, and the check of how many rows each changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final

from gpu_ops.errors import BadInputError, DatabaseError
from gpu_ops.spark.database import Connection, literal

STAGED: Final = "gpu_ops_staged"
"""The column of how many times a staged row comes or goes, and the name of the staged rows in a statement."""

_PATTERNS: Final = 8
"""Number of patterns of nulls in a key up to which each has a condition of its own, which an index can answer."""


@dataclasses.dataclass(frozen=True)
class Merge:
    """The statements of a view, in which all names are as SQL spells them.

    Attributes:
        table: the view's table.
        rows: a query of the staged rows, in brackets: the columns as ``staged`` has them, and ``count``. With a key
            that is -1 for a row that goes, 1 for a new one, 2 for one that replaces another; without a key the number
            of times that the row comes, negative if it goes.
        staged: by column of the changelog, the column of ``rows``.
        kept: by column of the changelog, the column of the view.
        key: columns of the changelog that identify a row; None for a view without a key.
        count: the column of ``rows`` with the count.
        total: without a key, the view's column of the number of times that a row is there.
        postgres: whether the database is Postgres, which has statements of its own for this.
        others: whether the view has columns that the changelog lacks.
        nulls: patterns of nulls in the key, ``1`` for each column that is null; without a key one pattern of all
            columns, ``1`` for each that has nulls.
        texts: the text columns among those by which rows are found.
    """

    table: str
    rows: str
    staged: Mapping[str, str]
    kept: Mapping[str, str]
    key: Sequence[str] | None
    count: str
    total: str
    postgres: bool
    others: bool
    nulls: Sequence[str]
    texts: Sequence[str]

    def matches(self) -> list[str]:
        """The conditions under which a staged row and a row of the view match; a row can meet one of them only."""
        columns = self.key if self.key is not None else list(self.kept)
        pairs = [(f"{self.table}.{self.kept[x]}", f"{STAGED}.{self.staged[x]}") for x in columns]
        if self.key is not None and len(self.nulls) <= _PATTERNS:
            return [
                " AND ".join(
                    f"{kept} IS NULL AND {staged} IS NULL" if null == "1" else f"{kept} = {staged}"
                    for (kept, staged), null in zip(pairs, pattern, strict=True)
                )
                for pattern in self.nulls
            ]
        has_nulls = ["1" in flags for flags in zip(*self.nulls, strict=True)] or [False] * len(pairs)
        terms = []
        for (kept, staged), null in zip(pairs, has_nulls, strict=True):
            if not null:
                terms.append(f"{kept} = {staged}")
            elif self.postgres:  # which equals nulls within arrays, and joins by their hashes
                terms += [f"ARRAY[{kept}] = ARRAY[{staged}]", f"({kept} IS NULL) = ({staged} IS NULL)"]
            else:
                terms.append(f"({kept} = {staged} OR ({kept} IS NULL AND {staged} IS NULL))")
        return [" AND ".join(terms)]

    def staged_where(self, match: str, kinds: str = "") -> str:
        """SQL condition on rows of the view: a staged row matches."""
        return f"EXISTS (SELECT 1 FROM {self.rows} {STAGED} WHERE {match}{f' AND {kinds}' if kinds else ''})"

    def missing(self) -> str:
        """SQL condition on staged rows: the view has no row that matches."""
        return " AND ".join(f"NOT EXISTS (SELECT 1 FROM {self.table} WHERE {match})" for match in self.matches())

    @property
    def counted(self) -> str:
        """The count of a staged row, as SQL."""
        return f"{STAGED}.{self.count}"

    def sizes(self) -> str:
        """The query for the number of staged rows: with a key per count, without one in all."""
        kind = (self.count, f" GROUP BY {self.count}") if self.key is not None else ("0", "")
        return f"SELECT {kind[0]}, COUNT(*) FROM {self.rows} {STAGED}{kind[1]}"

    def delete(self, kinds: str) -> list[str]:
        """Statements that delete the view's rows which match staged ones."""
        return [f"DELETE FROM {self.table} WHERE {self.staged_where(match, kinds)}" for match in self.matches()]

    def update(self, kinds: str) -> list[str]:
        """Statements that set the view's rows to the values of staged ones; columns that the changelog lacks stay."""
        values = {kept: f"{STAGED}.{self.staged[x]}" for x, kept in self.kept.items()}
        return [self._set(values, match, kinds) for match in self.matches()]

    def twice(self) -> str:
        """The query for different keys (as text) that become equal in the column types of a Postgres view.

        Several staged rows have such a key, or a new row and one of the view.
        """
        keys = [f"{STAGED}.{self.staged[x]}" for x in self.key or ()]
        shown = " || ', ' || ".join(f"COALESCE(CAST({x} AS TEXT), 'NULL')" for x in keys)
        comes = f"SUM(CASE WHEN {self.counted} > 0 THEN 1 ELSE 0 END) > 1"
        new = f"MIN({self.counted}) = 1 AND MAX({self.counted}) = 1"
        there = " OR ".join(f"EXISTS (SELECT 1 FROM {self.table} WHERE {match})" for match in self.matches())
        having = f"{comes} OR ({new} AND ({there}))"
        return f"SELECT {shown} FROM {self.rows} {STAGED} GROUP BY {', '.join(keys)} HAVING {having}"

    def texts_of(self, kinds: str = "") -> list[str]:
        """Queries for the texts by which rows match: first those of the view, then those of staged rows."""
        kept = [f"{self.table}.{self.kept[x]}" for x in self.texts]
        chosen = ", ".join([*kept, *(f"{STAGED}.{self.staged[x]}" for x in self.texts)])
        return [
            f"SELECT {chosen} FROM {self.table}, {self.rows} {STAGED} WHERE {match}{f' AND {kinds}' if kinds else ''}"
            for match in self.matches()
        ]

    def lacking(self) -> str:
        """The query for keys of rows that go or change and that the view lacks."""
        keys = ", ".join(f"{STAGED}.{self.staged[x]}" for x in self.key or ())
        return f"SELECT {keys} FROM {self.rows} {STAGED} WHERE {self.counted} <> 1 AND {self.missing()}"

    def replace(self, columns: Sequence[str]) -> list[str]:
        """Statements for Postgres that delete the rows to change and insert them with their new values.

        Args:
            columns: the view's columns that can be inserted.
        """
        new = {kept: f"{STAGED}.{self.staged[x]}" for x, kept in self.kept.items()}
        values = ", ".join(f"{new.get(x, f'{self.table}.{x}')} AS {x}" for x in columns)
        names, kind = ", ".join(columns), f"{self.counted} = 2"
        rows = " UNION ALL ".join(
            f"SELECT {values} FROM {self.table}, {self.rows} {STAGED} WHERE {match} AND {kind}"
            for match in self.matches()
        )
        return [
            f"CREATE TEMPORARY TABLE gpu_ops_replaced ON COMMIT DROP AS {rows}",
            *self.delete(kind),
            f"INSERT INTO {self.table} ({names}) OVERRIDING SYSTEM VALUE SELECT {names} FROM pg_temp.gpu_ops_replaced",
        ]

    def insert(self, kinds: str) -> str:
        """The statement that inserts staged rows into the view."""
        names, values = list(self.kept.values()), [f"{STAGED}.{self.staged[x]}" for x in self.kept]
        if self.key is None:
            names, values = [*names, self.total], [*values, self.counted]
        chosen = f"SELECT {', '.join(values)} FROM {self.rows} {STAGED} WHERE {kinds}"
        return f"INSERT INTO {self.table} ({', '.join(names)}) {chosen}"

    def add(self) -> list[str]:
        """Statements that add counts to the remaining rows of a view without a key."""
        total = f"{self.table}.{self.total} + {STAGED}.{self.count}"
        return [self._set({self.total: total}, match, f"{total} > 0") for match in self.matches()]

    def _set(self, values: Mapping[str, str], match: str, kinds: str) -> str:
        if self.postgres:
            changes = ", ".join(f"{kept} = {value}" for kept, value in values.items())
            return f"UPDATE {self.table} SET {changes} FROM {self.rows} {STAGED} WHERE {match} AND {kinds}"
        changes = ", ".join(
            f"{kept} = (SELECT {value} FROM {self.rows} {STAGED} WHERE {match})" for kept, value in values.items()
        )
        return f"UPDATE {self.table} SET {changes} WHERE {self.staged_where(match, kinds)}"


_UNIQUE: Final = "23505"
"""Postgres's error code for a violated unique constraint."""

_KEPT: Final = (
    "another program has changed them, or row level security, a trigger or a rule keeps them away. Nothing was written"
)


def bring(connection: Connection, merge: Merge, what: str, changelog: str) -> None:
    """Brings staged rows into a view, in the transaction that the connection is in.

    Args:
        connection: the connection to the database.
        merge: the statements.
        what: the view, for errors.
        changelog: the changelog's name, for errors.

    Raises:
        BadInputError: a database other than Postgres treats a text as equal to another one of the view.
        DatabaseError: the database refuses a statement, or changes other rows than it should.
    """
    sizes = {int(kind): int(rows) for kind, rows in connection.rows(merge.sizes())}
    if merge.key is None:
        _check_texts(connection, merge, what, changelog)
        stays = f"{merge.table}.{merge.total} + {merge.counted}"
        gone = _changed(connection, merge.delete(f"{stays} = 0"))
        added = _changed(connection, merge.add())
        new = connection.changed(merge.insert(f"{merge.counted} > 0 AND {merge.missing()}"))
        if gone + added + new != sum(sizes.values()):
            raise DatabaseError(
                f"{what}: of {sum(sizes.values())} rows that change {gone} were deleted, {added} changed and {new} "
                f"inserted: {_KEPT}"
            )
        return
    less, new, other = (sizes.get(kind, 0) for kind in (-1, 1, 2))

    def check(changed: int, rows: int, how: str) -> None:
        if changed != rows:
            connection.rollback()
            keys = connection.rows(merge.lacking(), most=1)
            sample = f" (there is no row of the key {', '.join(keys[0])})" if keys else ""
            raise DatabaseError(f"{what}: {rows} rows were to be {how}, and {changed} were{sample}: {_KEPT}")

    kind = merge.counted
    if not (merge.postgres or merge.others):
        check(_changed(connection, merge.delete(f"{kind} <> 1")), less + other, "deleted")
        _check_texts(connection, merge, what, changelog, f"{kind} = 1")
        _changed(connection, merge.delete(f"{kind} = 1"))
        check(connection.changed(merge.insert(f"{kind} > 0")), new + other, "inserted")
        return
    check(_changed(connection, merge.delete(f"{kind} = -1")), less, "deleted")
    check(_updated(connection, merge), other, "changed")
    inserted = connection.changed(merge.insert(f"{kind} = 1 AND {merge.missing()}"))
    if inserted != new:  # others are there from before the changelog
        _check_texts(connection, merge, what, changelog, f"{kind} = 1")
        check(_changed(connection, merge.update(f"{kind} = 1")), new, "inserted")


def _check_texts(connection: Connection, merge: Merge, what: str, changelog: str, kinds: str = "") -> None:
    """Checks that texts by which rows match are the same: a database's ``=`` may ignore case, accents or blanks.

    For Postgres `Merge.twice` finds that before; for others each text is compared here.
    """
    if merge.postgres or not merge.texts:
        return
    size = len(merge.texts)
    for query in merge.texts_of(kinds):
        differ = next((row for row in connection.rows(query) if row[:size] != row[size:]), None)
        if differ is not None:
            problem = f"the database holds it for equal to {', '.join(differ[:size])!r}, which {what} has"
            raise BadInputError(changelog, ", ".join(merge.texts), problem, ", ".join(differ[size:]))


def _changed(connection: Connection, statements: Sequence[str]) -> int:
    return sum(map(connection.changed, statements))


def _updated(connection: Connection, merge: Merge) -> int:
    """Updates the view's rows; if one takes a unique value of another that changes, too, deletes and inserts all."""
    statements = merge.update(f"{merge.counted} = 2")
    if not merge.postgres:
        return _changed(connection, statements)
    connection.execute("SAVEPOINT gpu_ops_update")
    try:
        return _changed(connection, statements)
    except DatabaseError as error:
        if error.state != _UNIQUE:
            raise
        connection.execute("ROLLBACK TO SAVEPOINT gpu_ops_update")
        table = f"{literal(merge.table)}::regclass"
        if connection.rows(
            f"SELECT conname FROM pg_constraint WHERE confrelid = {table} AND confdeltype NOT IN ('a', 'r')", most=1
        ):  # rows that refer to these would go with them
            raise
    columns = connection.rows(
        f"SELECT attname FROM pg_attribute WHERE attrelid = {table} AND attnum > 0 AND NOT attisdropped "
        "AND attgenerated = ''"
    )
    copy, *deletes, insert = merge.replace([connection.quoted(x) for (x,) in columns])
    connection.execute(copy)
    _changed(connection, deletes)
    return connection.changed(insert)

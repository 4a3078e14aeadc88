"""Spark's values in the column types of a Postgres table: how they are staged, cast and checked.

Days and times are staged as text: Java's own types, which JDBC takes, have the Julian calendar before 1582 and the time
zone of the JVM.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from pyspark.sql import Column
from pyspark.sql import functions as f
from pyspark.sql import types as st

from gpu_ops.spark.database import Connection, literal

_TIMES: Final = (st.DateType, st.TimestampType, st.TimestampNTZType)
_TEXTS: Final = ("text", "character varying", "bpchar")
_APPROXIMATE: Final = ("real", "double precision")
_INSTANT: Final = "timestamp with time zone"
_FRACTION: Final = r"([.]\d{0,6}0*)?"
_CLOCK: Final = rf"\d{{1,2}}:\d{{2}}(:\d{{2}}{_FRACTION})?"
_DAY: Final = rf"(\d{{4,6}}-\d{{1,2}}-\d{{1,2}}([ T]\s*{_CLOCK})?(\s+(AD|BC))?|[+-]?infinity|epoch)"
_EXACT_TEXTS: Final = {
    "date": rf"~* '^\s*{_DAY}\s*$'",
    "timestamp without time zone": rf"~* '^\s*{_DAY}\s*$'",
    "time without time zone": rf"~* '^\s*{_CLOCK}\s*$'",
    _INSTANT: r"!~ '[.]\d{6}\d*[1-9]'",
    "time with time zone": r"!~ '[.]\d{6}\d*[1-9]'",
}
"""Patterns of texts that Postgres converts to times without loss: it silently drops a zone where the type has none or a
day before a time of day, and rounds digits beyond microseconds."""


@dataclasses.dataclass(frozen=True)
class Type:
    """The type of a table's column, as Postgres spells it.

    Attributes:
        whole: the type with its length or precision; for a domain the type below it.
        bare: the type without length and precision.
        domain: the domain, or None.
        collation: the column's collation if different texts can be equal by it, else None.
    """

    whole: str
    bare: str
    domain: str | None
    collation: str | None

    @property
    def element(self) -> str:
        """The type of an array's elements, or the type itself."""
        return self.bare.rstrip("[]")


def types(connection: Connection, table: str) -> dict[str, Type]:
    """Reads the types of a table's columns."""
    rows = connection.rows(
        "WITH RECURSIVE below AS ("
        "SELECT attname, attnum, atttypid AS type, atttypmod AS length, NULL::text AS domain, "
        "attcollation AS order_id "
        f"FROM pg_attribute WHERE attrelid = {literal(table)}::regclass AND attnum > 0 AND NOT attisdropped "
        "UNION ALL SELECT attname, attnum, typbasetype, CASE WHEN typtypmod < 0 THEN length ELSE typtypmod END, "
        "coalesce(domain, format_type(type, -1)), order_id FROM below JOIN pg_type ON oid = type WHERE typtype = 'd') "
        "SELECT attname, format_type(type, length), format_type(type, -1), domain, "
        "(SELECT format('%I.%I', nspname, collname) FROM pg_collation c JOIN pg_namespace n ON n.oid = collnamespace "
        "WHERE c.oid = order_id AND NOT collisdeterministic) "
        "FROM below WHERE type NOT IN (SELECT oid FROM pg_type WHERE typtype = 'd')"
    )
    return {
        name: Type(whole, bare, None if domain == "None" else domain, None if collation == "None" else collation)
        for name, whole, bare, domain, collation in rows
    }


def staged_type(kind: st.DataType, *, within: bool = False) -> st.DataType:
    """The Spark type in which values of a given Spark type are staged; ``within``: in an array."""
    if isinstance(kind, st.ArrayType):
        return st.ArrayType(staged_type(kind.elementType, within=True), kind.containsNull)
    # Postgres' driver takes no bytes in arrays of objects, which Spark gives it
    as_text = isinstance(kind, _TIMES) or (within and isinstance(kind, st.BinaryType))
    return st.StringType() if as_text else kind


def staged_value(value: Column, kind: st.DataType, type: Type, *, within: bool = False) -> Column:  # noqa: A002
    """Converts a value of the changelog to the form in which it is staged.

    Args:
        value: the changelog's column.
        kind: its Spark type.
        type: the type of the view's column: in a column with a time zone a timestamp is an instant; in any other it is
            the time that a clock in the zone of Spark's session shows.
        within: whether it is an element of an array.
    """
    if staged_type(kind, within=within) == kind:
        return value
    if isinstance(kind, st.ArrayType):
        return f.transform(value, lambda x: staged_value(x, kind.elementType, type, within=True))
    if isinstance(kind, st.BinaryType):
        return f.concat(f.lit("\\x"), f.hex(value))
    text = _utc_text(value) if type.element == _INSTANT else value.cast("string")
    return f.regexp_replace(text, r"^\+", "")  # of years after 9999


def _utc_text(value: Column) -> Column:
    """A timestamp as text in UTC, so that the session's zone in Postgres does not matter.

    It is the text of a time without zone: patterns, and clocks that skip an hour, depend on the session's settings.
    """
    since = f.unix_micros(value.cast("timestamp")) * f.expr("INTERVAL '0.000001' SECOND")
    text = (f.expr("TIMESTAMP_NTZ'1970-01-01 00:00:00'") + since).cast("string")
    # east of Greenwich the year 1 begins before it does in UTC; Spark has a year 0
    return f.when(text.startswith("0000-"), f.concat(f.lit("0001"), text.substr(5, 30), f.lit("Z BC"))).otherwise(
        f.concat(text, f.lit("Z"))
    )


def before_year_one(value: Column, kind: st.DataType) -> Column | None:
    """Condition that a value has a day before the year 1, which most clients cannot read; None if none can have it."""
    if isinstance(kind, st.ArrayType):
        within = before_year_one(f.lit(None).cast(kind.elementType), kind.elementType)
        if within is None:
            return None
        return f.exists(value, lambda x: f.coalesce(before_year_one(x, kind.elementType), f.lit(False)))
    return f.year(value) < 1 if isinstance(kind, _TIMES) else None


def _element(kind: st.DataType) -> st.DataType:
    return _element(kind.elementType) if isinstance(kind, st.ArrayType) else kind


@dataclasses.dataclass(frozen=True)
class Cast:
    """The cast from a staged column to the view's column, as SQL.

    Attributes:
        name: the column's name in the changelog.
        staged: the staged column, as SQL spells it.
        kind: the column's Spark type.
        staged_type: the staged column's type, as Postgres spells it.
        type: the type of the view's column.
    """

    name: str
    staged: str
    kind: st.DataType
    staged_type: str
    type: Type

    @property
    def source(self) -> str:
        """The Postgres type that corresponds to Spark's type; text where the view keeps text."""
        of = _element(self.kind)
        if isinstance(of, st.BinaryType) and self.staged_type.startswith("text") and self.type.element == "bytea":
            return "bytea[]"
        if not isinstance(of, _TIMES) or self.type.element in _TEXTS:
            return self.staged_type
        whole = "timestamp without time zone" if not isinstance(of, st.DateType) else "date"
        return (_INSTANT if self.type.element == _INSTANT else whole) + "[]" * ("[]" in self.staged_type)

    @property
    def needed(self) -> bool:
        """True if the staged column has another type than the view's."""
        return self.staged_type != self.type.whole or self.type.domain is not None

    @property
    def folds(self) -> bool:
        """True if different values may be equal in the view.

        They may in another type, by a collation, and where a clock shows the same time at two instants.
        """
        clock = isinstance(_element(self.kind), st.TimestampType) and self.type.element != _INSTANT
        return self.type.collation is not None or clock or self.source != self.type.whole

    @property
    def described(self) -> str:
        """A null of the assigned type, as SQL, to find out whether Postgres allows the assignment."""
        assigned = self.type.domain or self.type.bare if self._is_text else self.source
        return f"CAST(NULL AS {assigned})"

    @property
    def _is_text(self) -> bool:
        return self.source.startswith(("text", "character"))

    @property
    def _exact(self) -> str:
        """The staged value in Spark's type, exactly: Postgres's own cast of floats to decimals keeps 15 digits."""
        value = self.staged if self.source == self.staged_type else f"CAST({self.staged} AS {self.source})"
        is_rounded = self.source.rstrip("[]") in _APPROXIMATE and self.type.element == "numeric"
        return f"CAST({value} AS text{'[]' * ('[]' in self.source)})" if is_rounded else value

    @property
    def value(self) -> str:
        """The staged value in the type of the view's column."""
        value = self.staged
        if self.needed:
            value = f"CAST({self._exact} AS {self.type.whole})"
        if self.type.domain is not None:
            value = f"CAST({value} AS {self.type.domain})"
        return value if self.type.collation is None else f"{value} COLLATE {self.type.collation}"

    @property
    def is_lossy(self) -> str | None:
        """SQL condition that a value changes in the type of the view's column; None if it never can."""
        if not self.needed or self.source == self.type.whole:
            return None
        kept = f"CAST({self._exact} AS {self.type.whole})"
        if not self._is_text:
            return f"CAST({kept} AS {self.source}) IS DISTINCT FROM CAST({self.staged} AS {self.source})"
        lossy, lists = [], "[]" * self.type.bare.endswith("[]")
        if self.type.element in _EXACT_TEXTS:
            texts = f"unnest(CAST({self.staged} AS text[]))" if lists else f"CAST({self.staged} AS text)"
            lossy.append(
                f"EXISTS (SELECT 1 FROM {texts} gpu_ops_text WHERE NOT gpu_ops_text {_EXACT_TEXTS[self.type.element]})"
            )
        if self.type.element in ("date", "name", '"char"'):  # whose input takes times, and long texts, and cuts them
            wider = ("timestamp without time zone" if self.type.element == "date" else "text") + lists
            lossy.append(f"CAST({self.staged} AS {wider}) IS DISTINCT FROM CAST({kept} AS {wider})")
        elif self.type.bare != self.type.whole:
            lossy.append(f"CAST({self.staged} AS {self.type.bare}) IS DISTINCT FROM {kept}")
        return " OR ".join(lossy) or None

    @property
    def sample(self) -> str:
        """SQL aggregate over staged rows: a value that the view's column cannot hold, as text, or null."""
        cast = f"COUNT({self.value})"
        if self.is_lossy is None:
            return f"CASE WHEN {cast} < 0 THEN '' END"
        return f"CASE WHEN {cast} >= 0 THEN MIN(CASE WHEN {self.is_lossy} THEN CAST({self.staged} AS text) END) END"

    @property
    def problem(self) -> str:
        """The error text for a value that the column cannot hold."""
        if self.type.element in _TEXTS:
            return f"value too long for type {self.type.whole}"
        return f"column {self.name!r} is of type {self.type.whole}, which would make another value of it"

"""One side of a join as a user writes it down: frozen, validated. No engine code."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, Self

import pyarrow as pa

from gpu_ops.descriptions.frames import as_table
from gpu_ops.descriptions.keys import key_type
from gpu_ops.descriptions.times import check_event_time
from gpu_ops.errors import DescriptionError
from gpu_ops.fields import ABSENT, check_fields
from gpu_ops.values import carried

BadRows = Literal["fail", "drop", "tag"]
"""What happens to a row that cannot be joined.

* *fail*: the micro-batch fails, before any state has changed.
* *drop*: the row is left out and counted.
* *tag*: likewise, and it comes out beside the changelog with the row kind ``bad``.
"""

Updates = Literal["upsert", "retract"]
"""How an input with a unique key brings updates.

* *upsert*: the new row may come alone and replaces the old one, wherever it is.
* *retract*: the old row always comes too (``-U`` or ``-D``), as Flink's changelogs and Delta's do.
"""

Layout = Literal["join_key_contains_unique_key", "unique_key", "multiset"]
"""The state layouts of Flink's ``JoinRecordStateViews``."""


class UnionParts(NamedTuple):
    """The parts of a union of streams, each of which has a watermark of its own.

    Attributes:
        column: the input's column with the number, from 0, of the part that a row is of.
        delays_ms: of each part the milliseconds by which its rows may come late; None of one that is there as a whole
            before there is a watermark, and holds it back no longer.
    """

    column: str
    delays_ms: tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class Input:
    """One side of a join: a stream of changes.

    Attributes:
        name: how SQL text and errors call it.
        schema: its columns, the row-kind column left out; dictionaries (pandas' categories) and views count as
            their values.
        unique_key: columns that identify a row among the live ones, or None.
        row_kind: the column that holds the row kind, or None for insert-only input.
        sequence_by: a column that orders the changes of a micro-batch, or None.
        ttl_ms: milliseconds after its last write at which a row is forgotten, or None.
        updates: see `Updates`.
        bad_rows: see `BadRows`.
        event_time: the column an interval join goes by: a timestamp, or int64 milliseconds since the epoch.
        delay_ms: milliseconds by which rows may come late: the watermark is the latest event time seen less
            this. None: it is given with each micro-batch.
        idle_timeout_ms: milliseconds without rows after which the input holds the other's watermark back no
            longer, or None for never.
        parts: of the only input of an operator that is a union of streams, these: its watermark is the smallest of
            theirs, and ``delay_ms`` the greatest of their delays.
    """

    name: str
    schema: pa.Schema
    unique_key: tuple[str, ...] | None = None
    row_kind: str | None = None
    sequence_by: str | None = None
    ttl_ms: int | None = None
    updates: Updates = "upsert"
    bad_rows: BadRows = "fail"
    event_time: str | None = dataclasses.field(default=None, metadata=ABSENT)
    delay_ms: int | None = dataclasses.field(default=None, metadata=ABSENT)
    idle_timeout_ms: int | None = dataclasses.field(default=None, metadata=ABSENT)
    parts: UnionParts | None = dataclasses.field(default=None, metadata=ABSENT)

    def __post_init__(self) -> None:
        check_fields(self, f"input {self.name!r}: ")
        names = self.schema.names
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise DescriptionError(f"input '{self.name}': column {twice[0]!r} appears twice")
        if not names:
            raise DescriptionError(f"input '{self.name}' has no columns")
        if self.row_kind in names:
            raise DescriptionError(f"input '{self.name}': the row-kind column {self.row_kind!r} is not data")
        if self.unique_key == ():
            raise DescriptionError(f"input '{self.name}': unique_key names no column")
        object.__setattr__(self, "schema", _carried_schema(self.name, self.schema))
        single = {"sequence_by": self.sequence_by, "event_time": self.event_time}
        named = [*(("unique_key", column) for column in self.unique_key or ()), *single.items()]
        check_columns(self, [(what, column) for what, column in named if column is not None])
        check_key_types(self, self.unique_key or ())
        if self.sequence_by is not None and pa.types.is_nested(self.schema.field(self.sequence_by).type):
            kind = self.schema.field(self.sequence_by).type
            raise DescriptionError(f"input '{self.name}': sequence_by {self.sequence_by!r} of type {kind} has no order")
        if self.ttl_ms is not None and self.ttl_ms <= 0:
            raise DescriptionError(f"input '{self.name}': ttl is positive, this one is {self.ttl_ms} ms")
        if self.event_time is not None:
            check_event_time(self.name, self.schema.field(self.event_time))
        if self.parts is not None:
            self._check_parts(self.parts)
        for option, ms in (("delay", self.delay_ms), ("idle_timeout", self.idle_timeout_ms)):
            if ms is not None and self.event_time is None:
                raise DescriptionError(f"input '{self.name}': {option} needs event_time")
            if ms is not None and ms < 0:
                raise DescriptionError(f"input '{self.name}': {option} is not negative, this one is {ms} ms")

    @classmethod
    def of(cls, frame: Any, *, name: str = "input", unique_key: str | Sequence[str] | None = None, **more: Any) -> Self:
        """An input with the columns of a DataFrame.

        Args:
            frame: a DataFrame of pandas, polars or cuDF, or an Arrow table; its rows do not matter. Or a schema.
            name: of the input.
            unique_key: a column, or several.
            more: as `Input` has them; the column that ``row_kind`` names is no data.

        Raises:
            DescriptionError: it has no columns that Arrow knows.
        """
        schema, kind = schema_of(name, frame), more.get("row_kind")
        if kind in schema.names:
            schema = schema.remove(schema.get_field_index(kind))
        key = (unique_key,) if isinstance(unique_key, str) else None if unique_key is None else tuple(unique_key)
        return cls(name, schema, key, **more)

    def refuse(self, why: str, *options: str) -> None:
        """Refuses options that have no place, by the names of their fields.

        Raises:
            DescriptionError: one of them was given; it says why not.
        """
        for option in options:
            if getattr(self, option) is not None:
                shown = option.removesuffix("_ms")
                raise DescriptionError(f"input '{self.name}': {why}, {shown}= has no place here")

    def _check_parts(self, parts: UnionParts) -> None:
        check_columns(self, [("parts", parts.column)])
        delays = [ms for ms in parts.delays_ms if ms is not None]
        if not pa.types.is_integer(self.schema.field(parts.column).type) or min(delays, default=0) < 0:
            raise DescriptionError(f"input '{self.name}': parts={parts} are no numbers of parts with their delays")
        if not delays or self.event_time is None:
            raise DescriptionError(f"input '{self.name}': no part of it has a watermark")
        self.refuse("a part without rows holds the watermark back", "idle_timeout_ms")
        object.__setattr__(self, "delay_ms", max(delays))

    @property
    def delays_ms(self) -> tuple[int | None, ...]:
        """The delay of each of its parts; its own where it has none."""
        return (self.delay_ms,) if self.parts is None else self.parts.delays_ms

    def watermark_ms(self, latest_ms: Iterable[int | None]) -> int | None:
        """The smallest watermark of its parts, ms; None as long as one of them has none.

        Args:
            latest_ms: the latest event time that has been seen of each part; what follows plays no part.
        """
        if self.delay_ms is None:
            return None
        each = zip(self.delays_ms, itertools.chain(latest_ms, itertools.repeat(None)), strict=False)
        marks = [None if latest is None else latest - delay for delay, latest in each if delay is not None]
        known = [mark for mark in marks if mark is not None]
        return min(known) if len(known) == len(marks) else None

    @property
    def insert_only(self) -> bool:
        """No row kinds and no unique key: nothing is ever retracted."""
        return self.row_kind is None and self.unique_key is None


def is_input(given: object) -> bool:
    """Tells whether this may be an input: an `Input`, a schema or what has rows."""
    return (
        isinstance(given, Input | pa.Schema) or hasattr(given, "to_pylibcudf") or hasattr(given, "__arrow_c_stream__")
    )


def schema_of(name: str, given: Any) -> pa.Schema:
    """The columns of a DataFrame of pandas, polars or cuDF, of an Arrow table, or a schema as it is.

    Args:
        name: the input's, for errors.
        given: what has columns.

    Raises:
        DescriptionError: it has none that Arrow knows.
    """
    if isinstance(given, pa.Schema):
        return given
    if hasattr(given, "to_pylibcudf"):  # of cuDF's: its columns' types, without its rows
        given = given.iloc[:0]
    if not hasattr(given, "__arrow_c_stream__"):
        raise DescriptionError(
            f"input '{name}' takes a DataFrame of pandas, polars or cuDF, an Arrow table, a pyarrow.Schema, or "
            f"gpu_ops.Input.of(...) of one, not {type(given).__name__}"
        )
    try:
        return as_table(given).schema.remove_metadata()
    except (TypeError, ValueError, NotImplementedError, pa.ArrowException) as error:
        raise DescriptionError(f"input '{name}': a {type(given).__name__} that is no Arrow table: {error}") from None


def _carried_schema(name: str, schema: pa.Schema) -> pa.Schema:
    """The columns in the types in which they are carried."""
    fields = []
    for field in schema:
        kind = carried(field.type)
        if kind is None:
            raise DescriptionError(
                f"input '{name}', column {field.name!r}: type {field.type} is not carried; CAST it first"
            )
        fields.append(field if kind == field.type else field.with_type(kind))
    return pa.schema(fields, schema.metadata)


def check_sequence(inputs: Sequence[Input]) -> pa.DataType | None:
    """The type in which changes of all inputs are ordered by their ``sequence_by``; None where not all have one.

    Raises:
        DescriptionError: two that do not compare without a CAST.
    """
    common: pa.Field | None = None
    for source in inputs:
        if source.sequence_by is None:
            return None
        field = source.schema.field(source.sequence_by)
        common = field if common is None else common.with_type(key_type(common, field, what="sequence_by"))
    return None if common is None else common.type


def check_columns(source: Input, named: Iterable[tuple[str, str]]) -> None:
    """Refuses names of columns that an input does not have, with a DescriptionError that says what names them."""
    names = source.schema.names
    for what, column in named:
        if column not in names:
            raise DescriptionError(f"input '{source.name}': {what} names {column!r}; {nearest(column, names)}")


def check_key_types(source: Input, columns: Iterable[str]) -> None:
    """Refuses columns that cannot be a key, with a DescriptionError."""
    for column in columns:
        kind = source.schema.field(column).type
        if pa.types.is_nested(kind):
            raise DescriptionError(f"input '{source.name}': column {column!r} of type {kind} cannot be a key")


def check_ordered(source: Input, what: str, column: str) -> None:
    """Refuses a column that nothing can be ordered by, with a DescriptionError."""
    kind = source.schema.field(column).type
    if pa.types.is_nested(kind) or pa.types.is_null(kind):
        raise DescriptionError(f"input '{source.name}': {what} {column!r} of type {kind} has no order")


def nearest(name: str, names: Sequence[str]) -> str:
    """Lists the names there are, for an error about one that is not; first the one that may have been meant."""
    near = difflib.get_close_matches(str(name), names, n=1)
    return (f"did you mean {near[0]!r}? There are " if near else "there are ") + ", ".join(names)


def check_equality(one: Input, column: str, other: Input, its: str) -> None:
    """Refuses two columns that cannot be compared as keys, with a DescriptionError."""
    for source, name in ((one, column), (other, its)):
        if name not in source.schema.names:
            raise DescriptionError(
                f"input '{source.name}' has no column {name!r} to join on; {nearest(name, source.schema.names)}"
            )
        check_key_types(source, [name])
    key_type(one.schema.field(column), other.schema.field(its))

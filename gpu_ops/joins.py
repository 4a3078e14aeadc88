"""What a user writes down: frozen, validated descriptions of inputs and joins. No engine code.

A description is complete: with the inputs' schemas it says everything an engine or a state server
needs, and it travels as JSON (no code ever does).
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast, get_args

import pyarrow as pa

from gpu_ops.changelog import ROW_KIND_COLUMN
from gpu_ops.conditions import Condition, parse
from gpu_ops.errors import DescriptionError
from gpu_ops.intervals import UNITS_MS, Interval, check_event_time, time_type

JoinType = Literal["inner", "left", "right", "full", "semi", "anti"]
"""Which rows come out.

* *inner*: pairs that match.
* *left*, *right*, *full*: pairs, and null pads for rows of that side (or both) without a match.
* *semi*: rows of the left input with at least one match.
* *anti*: rows of the left input with none.
"""

Emit = Literal["per_event", "per_batch", "at_end"]
"""What a micro-batch says.

* *per_event*: the changelog Flink emits record by record.
* *per_batch*: the net change; nothing appears and disappears within a micro-batch.
* *at_end*: nothing until the input ends.
"""

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

_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+?)s?\s*", re.IGNORECASE)


class Key(NamedTuple):
    """One pair of equality columns."""

    left: str
    right: str
    null_safe: bool = False
    """``IS NOT DISTINCT FROM`` instead of ``=``."""
    using: bool = False
    """One output column for both, as Spark's ``on="k"``."""

    def column(self, side: int) -> str:
        """The column of one side."""
        return self.right if side else self.left


class Shuffle(NamedTuple):
    """One value that rows are partitioned by: rows that may match have the same."""

    columns: tuple[str, ...]
    """Its column in each input."""
    type: pa.DataType
    """The type it is compared in."""


class OutputColumn(NamedTuple):
    """Where a column of the changelog comes from: ``side`` is 0 left, 1 right, 2 whichever is there.

    Side 3 is the later of both event times.
    """

    name: str
    side: int
    column: str
    other: str | None
    type: pa.DataType


def parse_duration(text: str | int) -> int:
    """Milliseconds of ``"7 days"``, ``"90 seconds"`` or a plain number of milliseconds.

    Raises:
        DescriptionError: no such unit, or not a positive duration.
    """
    if isinstance(text, int):
        ms = text
    else:
        found = _DURATION.fullmatch(text)
        unit = found.group(2).lower() if found else ""
        if found is None or unit not in UNITS_MS:
            raise DescriptionError(f"no duration: {text!r}; write for example '7 days' or '90 seconds'")
        ms = round(float(found.group(1)) * UNITS_MS[unit])
    if ms <= 0:
        raise DescriptionError(f"a duration is positive, this one is {text!r}")
    return ms


@dataclasses.dataclass(frozen=True)
class Input:
    """One side of a join: a stream of changes.

    Attributes:
        name: how SQL text and errors call it.
        schema: its columns, the row-kind column left out.
        unique_key: columns that identify a row among the live ones, or None.
        row_kind: the column that holds the row kind, or None for insert-only input.
        sequence_by: a column that orders the changes of a micro-batch, or None.
        ttl_ms: milliseconds after its last write at which a row is forgotten, or None.
        updates: see `Updates`.
        bad_rows: see `BadRows`.
        event_time: the column an interval join goes by: a timestamp, or int64 milliseconds since the epoch.
        delay_ms: milliseconds by which rows may come late: the watermark is the latest event time seen less
            this. None: it is only ever told.
        idle_timeout_ms: milliseconds without rows after which the input holds the other's watermark back no
            longer, or None for never.
    """

    name: str
    schema: pa.Schema
    unique_key: tuple[str, ...] | None = None
    row_kind: str | None = None
    sequence_by: str | None = None
    ttl_ms: int | None = None
    updates: Updates = "upsert"
    bad_rows: BadRows = "fail"
    event_time: str | None = None
    delay_ms: int | None = None
    idle_timeout_ms: int | None = None

    def __post_init__(self) -> None:
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
        named = ("unique_key", self.unique_key or ()), ("sequence_by", (self.sequence_by,))
        for what, columns in (*named, ("event_time", (self.event_time,))):
            for column in columns:
                if column is not None and column not in names:
                    raise DescriptionError(
                        f"input '{self.name}': {what} names {column!r}; there are {', '.join(names)}"
                    )
        for column in self.unique_key or ():
            check_key_type(self, column)
        if self.event_time is not None:
            check_event_time(self.name, self.schema.field(self.event_time))
        for option, ms in (("delay", self.delay_ms), ("idle_timeout", self.idle_timeout_ms)):
            if ms is not None and self.event_time is None:
                raise DescriptionError(f"input '{self.name}': {option} needs event_time")
            if ms is not None and ms < 0:
                raise DescriptionError(f"input '{self.name}': {option} is not negative, this one is {ms} ms")
        for option, values in (("updates", Updates), ("bad_rows", BadRows)):
            if getattr(self, option) not in get_args(values):
                raise DescriptionError(
                    f"input '{self.name}': {option}={getattr(self, option)!r}; "
                    f"it is one of {', '.join(get_args(values))}"
                )

    @property
    def insert_only(self) -> bool:
        """No row kinds and no unique key: nothing is ever retracted."""
        return self.row_kind is None and self.unique_key is None


@dataclasses.dataclass(frozen=True)
class Join:
    """A regular, semi, anti or interval join of two inputs.

    Attributes:
        how: see `JoinType`.
        left: the left input.
        right: the right input.
        keys: the equality columns; none makes every pair a candidate, in one partition.
        where: residual condition over both inputs' columns, SQL text, or None.
        emit: see `Emit`.
        null_aware: for anti: ``NOT IN`` (a null on the right suppresses every row).
        suffixes: appended to clashing column names of left and right, or None.
        interval: what makes it an interval join, or None.
    """

    how: JoinType
    left: Input
    right: Input
    keys: tuple[Key, ...] = ()
    where: str | None = None
    emit: Emit = "per_batch"
    null_aware: bool = False
    suffixes: tuple[str, str] | None = None
    interval: Interval | None = None

    def __post_init__(self) -> None:
        if self.how not in get_args(JoinType):
            raise DescriptionError(f"how={self.how!r}; it is one of {', '.join(get_args(JoinType))}")
        if self.emit not in get_args(Emit):
            raise DescriptionError(f"emit={self.emit!r}; it is one of {', '.join(get_args(Emit))}")
        if self.emit == "at_end":
            check_at_end(self.inputs)
            if self.interval is not None and self.interval.time == "processing":
                raise DescriptionError("emit='at_end' has no arrival times to go by: use event time")
        if self.left.name.lower() == self.right.name.lower():
            raise DescriptionError(f"both inputs are called {self.left.name!r}; give one another name")
        if self.how in ("semi", "anti") and self.right.bad_rows == "tag":
            raise DescriptionError(
                f"input '{self.right.name}': bad_rows='tag' has no place in a {self.how} join's output, "
                "which has the left's columns only; use 'drop' or 'fail'"
            )
        if self.null_aware and self.how != "anti":
            raise DescriptionError("null_aware=True is NOT IN: it needs how='anti'")
        if self.null_aware and not self.keys:
            raise DescriptionError("null_aware=True is NOT IN: it needs the columns that are compared")
        for key in self.keys:
            for side, column in ((self.left, key.left), (self.right, key.right)):
                if column not in side.schema.names:
                    raise DescriptionError(
                        f"input '{side.name}' has no column {column!r} to join on; "
                        f"there are {', '.join(side.schema.names)}"
                    )
                check_key_type(side, column)
            key_type(self.left.schema.field(key.left), self.right.schema.field(key.right))
        if self.interval is not None:
            self._check_interval(self.interval)
        names = [c.name for c in self.output]
        for name in names:
            if names.count(name) > 1 or name == ROW_KIND_COLUMN:
                raise DescriptionError(f"the changelog would have two columns {name!r}: rename one, or give suffixes=")
        _ = self.condition

    def _check_interval(self, interval: Interval) -> None:
        hows = ("inner",) if interval.keyed else ("inner", "left", "right", "full")
        if self.how not in hows:
            kind = "a keyed interval join" if interval.keyed else "an interval join"
            raise DescriptionError(f"how={self.how!r}; {kind} is one of {', '.join(hows)}")
        for source in self.inputs:
            if source.unique_key is not None:
                raise DescriptionError(
                    f"input '{source.name}': an interval join takes insert-only input, unique_key= has no place here"
                )
            if source.ttl_ms is not None:
                raise DescriptionError(f"input '{source.name}': an interval join keeps rows by their time, not by ttl=")
            if interval.time == "event" and source.event_time is None:
                raise DescriptionError(f"input '{source.name}': an interval join needs its event time")
            if interval.time == "processing" and source.event_time is not None:
                raise DescriptionError(f"input '{source.name}': by processing time, event time has no place")
        interval.units(self.time_type)

    @functools.cached_property
    def key_types(self) -> tuple[pa.DataType, ...]:
        """The types the keys are compared in."""
        left, right = self.left.schema, self.right.schema
        return tuple(key_type(left.field(k.left), right.field(k.right)) for k in self.keys)

    def key_columns(self, side: int, *, strict: bool = False) -> tuple[str, ...]:
        """One input's key columns; ``strict``: those in which null matches nothing."""
        return tuple(k.column(side) for k in self.keys if not (strict and k.null_safe))

    @functools.cached_property
    def time_type(self) -> pa.DataType:
        """The type an interval join compares times in."""
        kinds = [s.schema.field(s.event_time).type for s in self.inputs if s.event_time is not None]
        return time_type(kinds[0], kinds[1]) if len(kinds) == 2 else pa.timestamp("ms", "UTC")

    @property
    def inputs(self) -> tuple[Input, Input]:
        """Left and right."""
        return self.left, self.right

    @functools.cached_property
    def condition(self) -> Condition | None:
        """The residual condition, parsed and typed."""
        if self.where is None:
            return None
        return parse(self.where, {self.left.name: self.left.schema, self.right.name: self.right.schema})

    @property
    def outer(self) -> tuple[bool, bool]:
        """Whether left and right rows without a match are padded."""
        return self.how in ("left", "full"), self.how in ("right", "full")

    @functools.cached_property
    def output(self) -> tuple[OutputColumn, ...]:
        """The changelog's columns after ``row_kind``."""
        left, right = self.left.schema, self.right.schema
        if self.how in ("semi", "anti"):
            return tuple(OutputColumn(f.name, 0, f.name, None, f.type) for f in left)
        columns = []
        for key in self.keys:
            if key.using:
                kind = key_type(left.field(key.left), right.field(key.right))
                side = {"right": 1, "full": 2}.get(self.how, 0)
                own, other = (key.right, key.left) if side == 1 else (key.left, key.right)
                columns.append(OutputColumn(key.left, side, own, other if side == 2 else None, kind))
        used = {k.left for k in self.keys if k.using}, {k.right for k in self.keys if k.using}
        rest = [[f for f in schema if f.name not in used[s]] for s, schema in enumerate((left, right))]
        taken = [{f.name for f in fields} for fields in rest]
        for side, fields in enumerate(rest):
            for field in fields:
                suffix = self.suffixes[side] if self.suffixes and field.name in taken[1 - side] else ""
                columns.append(OutputColumn(field.name + suffix, side, field.name, None, field.type))
        if self.interval is not None and self.interval.timestamp is not None:
            times = str(self.left.event_time), str(self.right.event_time)
            columns.append(OutputColumn(self.interval.timestamp, 3, *times, self.time_type))
        return tuple(columns)

    @functools.cached_property
    def output_schema(self) -> pa.Schema:
        """The changelog's schema: ``row_kind``, then the columns."""
        fields = [pa.field(c.name, c.type) for c in self.output]
        return pa.schema([pa.field(ROW_KIND_COLUMN, pa.string(), nullable=False), *fields])

    def layout(self, side: int) -> Layout:
        """The state layout of one input (Flink: ``JoinInputSideSpec``)."""
        unique = self.inputs[side].unique_key
        if unique is None:
            return "multiset"
        own = {key.column(side) for key in self.keys}
        return "join_key_contains_unique_key" if set(unique) <= own else "unique_key"

    @property
    def distribution(self) -> tuple[int, ...]:
        """Which keys (by position) rows are partitioned by; none means a single partition.

        Rows that may match meet in one partition under any subset of the keys. An upsert input
        needs the old and the new row of a unique key in one partition as well, so only keys inside
        its unique key will do. ``NOT IN`` needs every row of the right in one place.
        """
        if self.null_aware:
            return ()
        positions = list(range(len(self.keys)))
        for side, source in enumerate(self.inputs):
            if source.unique_key is not None and source.updates == "upsert":
                inside = source.unique_key
                positions = [p for p in positions if self.keys[p].column(side) in inside]
        return tuple(positions)

    @property
    def shuffled_by(self) -> tuple[Shuffle, ...]:
        """What rows are partitioned by; empty means a single partition. See `distribution`."""
        return tuple(Shuffle((self.keys[p].left, self.keys[p].right), self.key_types[p]) for p in self.distribution)

    @property
    def sides(self) -> tuple[str, ...]:
        """What the inputs are called in metrics and snapshots."""
        return "left", "right"

    def to_json(self) -> str:
        """The description as JSON; equal descriptions give equal text."""
        data: dict[str, object] = {
            "kind": "join",
            "how": self.how,
            "keys": [list(k) for k in self.keys],
            "where": self.where,
            "emit": self.emit,
            "null_aware": self.null_aware,
            "suffixes": list(self.suffixes) if self.suffixes else None,
            "inputs": [input_to_dict(i) for i in self.inputs],
        }
        if self.interval is not None:
            data["interval"] = self.interval.to_dict()
        return json.dumps(data, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Join:
        """The inverse of `to_json`."""
        data: dict[str, Any] = json.loads(text)
        left, right = (input_from_dict(i) for i in data["inputs"])
        suffixes = data["suffixes"]
        return cls(
            how=data["how"],
            left=left,
            right=right,
            keys=tuple(Key(*k) for k in data["keys"]),
            where=data["where"],
            emit=data["emit"],
            null_aware=data["null_aware"],
            suffixes=(suffixes[0], suffixes[1]) if suffixes else None,
            interval=Interval(**data["interval"]) if data.get("interval") else None,
        )


On = str | Sequence[str | tuple[str, str] | Key] | None
"""``"k"``, ``["k", ("a", "b")]``, or `Key` objects; None for no equality columns."""


def normalize_on(on: On, *, null_safe: bool | Sequence[bool] = False) -> tuple[Key, ...]:
    """The keys that ``on=`` names.

    Raises:
        DescriptionError: something that is neither a column nor a pair of columns.
    """
    items: Sequence[Any] = () if on is None else (on,) if isinstance(on, str) else on
    safe = [null_safe] * len(items) if isinstance(null_safe, bool) else list(null_safe)
    if len(safe) != len(items):
        raise DescriptionError(f"null_safe has {len(safe)} entries for {len(items)} keys")
    keys = []
    for item, is_safe in zip(items, safe, strict=True):
        if isinstance(item, Key):
            keys.append(item)
        elif isinstance(item, str):
            keys.append(Key(item, item, is_safe, using=True))
        elif isinstance(item, tuple) and len(item) == 2 and all(isinstance(c, str) for c in item):
            keys.append(Key(item[0], item[1], is_safe))
        else:
            raise DescriptionError(f"on= takes columns and pairs of columns, not {item!r}")
    return tuple(keys)


def key_type(left: pa.Field, right: pa.Field) -> pa.DataType:
    """The type in which two key columns are compared.

    Raises:
        DescriptionError: types that have none without a CAST.
    """
    a, b = left.type, right.type
    if a == b:
        return a
    t = pa.types
    if t.is_signed_integer(a) and t.is_signed_integer(b):
        return max(a, b, key=lambda x: cast("int", x.bit_width))
    if t.is_floating(a) and t.is_floating(b):
        return pa.float64()
    for family in ((t.is_string, t.is_large_string), (t.is_binary, t.is_large_binary)):
        if any(f(a) for f in family) and any(f(b) for f in family):
            return a
    # nanoseconds reach only from 1677 to 2262: not every other timestamp has a place there
    zones_fit = t.is_timestamp(a) and t.is_timestamp(b) and (a.tz is None) == (b.tz is None)
    if zones_fit and "ns" not in (a.unit, b.unit):
        return pa.timestamp("us", a.tz)
    if t.is_decimal(a) and t.is_decimal(b):
        scale = max(a.scale, b.scale)
        whole = max(a.precision - a.scale, b.precision - b.scale)
        if whole + scale <= 38:
            return pa.decimal128(whole + scale, scale)
    raise DescriptionError(f"cannot compare key {left.name!r} ({a}) with {right.name!r} ({b}); CAST one of them first")


def check_key_type(source: Input, column: str) -> None:
    """Refuses a column that cannot be a key, with a DescriptionError."""
    kind = source.schema.field(column).type
    if pa.types.is_nested(kind):
        raise DescriptionError(f"input '{source.name}': column {column!r} of type {kind} cannot be a key")


def check_at_end(inputs: Sequence[Input]) -> None:
    """Refuses what has no meaning in a join that says nothing until its input ends."""
    for source in inputs:
        if source.ttl_ms is not None:
            raise DescriptionError(f"input '{source.name}': with emit='at_end' no row is forgotten, ttl= has no place")


def input_to_dict(source: Input) -> dict[str, object]:
    """An input as JSON takes it."""
    data: dict[str, object] = {f.name: getattr(source, f.name) for f in dataclasses.fields(source)}
    for name in ("event_time", "delay_ms", "idle_timeout_ms"):
        if data[name] is None:  # absent, so that folders written before there were interval joins still fit
            del data[name]
    data["schema"] = base64.b64encode(source.schema.remove_metadata().serialize().to_pybytes()).decode()
    return data


def input_from_dict(data: Mapping[str, Any]) -> Input:
    """The inverse of `input_to_dict`."""
    fields = dict(data)
    fields["schema"] = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(fields["schema"])))
    if fields["unique_key"] is not None:
        fields["unique_key"] = tuple(fields["unique_key"])
    return Input(**fields)

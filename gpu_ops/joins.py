"""What a user writes down: frozen, validated descriptions of joins (`gpu_ops.inputs`, `gpu_ops.keys`). No engine code.

A description is complete: with the inputs' schemas it says everything an engine or a state server
needs, and it travels as JSON (no code ever does).
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, get_args

import pyarrow as pa

from gpu_ops.changelog import ROW_KIND_COLUMN
from gpu_ops.conditions import Condition, parse, session_matters
from gpu_ops.errors import DescriptionError
from gpu_ops.fields import check_fields, reading
from gpu_ops.inputs import Input, Layout, check_at_end, check_key_type, check_sequence, input_from_dict, input_to_dict
from gpu_ops.intervals import Interval, time_type
from gpu_ops.keys import Key, Shuffle, key_type

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


def session_to_dict(
    wheres: Iterable[tuple[str, Mapping[str, pa.Schema]]], *, time_zone: str | None, ansi: bool
) -> dict[str, object]:
    """The session of conditions as JSON takes it: nothing of it that makes no difference to any.

    So a state folder fits a session in another time zone, and one written before there was this entry still fits,
    unless that would change what is joined.

    Args:
        wheres: conditions, each with the inputs it is over.
        time_zone: as in `Join`.
        ansi: as in `Join`.
    """
    matters = [session_matters(sql, schemas, time_zone=time_zone, ansi=ansi) for sql, schemas in wheres]
    found: dict[str, object] = {}
    if any(zone for zone, _ in matters):
        found["time_zone"] = next(zone for zone, _ in matters if zone)
    if any(mode for _, mode in matters):
        found["ansi"] = True
    return found


class OutputColumn(NamedTuple):
    """Where a column of the changelog comes from: ``side`` is 0 left, 1 right, 2 whichever is there.

    Side 3 is the later of both event times.
    """

    name: str
    side: int
    column: str
    other: str | None
    type: pa.DataType


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
        time_zone: the session's, in which the condition's times are read; by default that of the first zoned column,
            else UTC.
        ansi: whether the condition is one of a session with ``spark.sql.ansi.enabled``.
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
    time_zone: str | None = None
    ansi: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
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
        check_sequence(self.inputs)
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
        return parse(self.where, self._schemas, time_zone=self.time_zone, ansi=self.ansi)

    @property
    def _schemas(self) -> dict[str, pa.Schema]:
        return {source.name: source.schema for source in self.inputs}

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
        wheres = [] if self.where is None else [(self.where, self._schemas)]
        data |= session_to_dict(wheres, time_zone=self.time_zone, ansi=self.ansi)
        return json.dumps(data, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Join:
        """The inverse of `to_json`."""
        with reading("description of a join"):
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
                time_zone=data.get("time_zone"),
                ansi=data.get("ansi", False),
            )

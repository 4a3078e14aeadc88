"""What a user writes down for operators that only make sense once their input has ended: aggregates and co-groups.

Both are Flink's over a global window with the end-of-stream trigger (FLIP-331): a co-group gives a function both
inputs' rows key by key; an aggregate gives one row per group. Retractions count: it is the folded input that is
grouped.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple, cast, get_args

import pyarrow as pa

from gpu_ops.changelog import ROW_KIND_COLUMN
from gpu_ops.errors import DescriptionError
from gpu_ops.fields import check_fields, reading
from gpu_ops.inputs import Input, Layout, check_at_end, check_key_type, input_from_dict, input_to_dict
from gpu_ops.joins import Join, OutputColumn
from gpu_ops.keys import Key, Shuffle, key_type
from gpu_ops.multi import MultiJoin

Function = Literal["sum", "count", "min", "max", "avg", "count_distinct"]

_CALL: Final = re.compile(r"\s*(\w+)\s*\(\s*(distinct\s+)?([^()]*?)\s*\)\s*", re.IGNORECASE)


class Measure(NamedTuple):
    """One aggregate.

    Types and nulls are Spark's: nulls are left out, a sum or average of none is null; integers add up as bigint and
    wrap around, decimals of precision p as decimal(p + 10); NaN is greater than any other number.
    """

    name: str
    function: Function
    column: str | None
    """None for ``count(*)``."""


@dataclasses.dataclass(frozen=True)
class Aggregate:
    """One row per group of an input's rows, when the input has ended.

    Attributes:
        source: the input.
        by: the columns that make a group (null is a value of its own); none for one row in all.
        measures: the aggregates.
    """

    source: Input
    by: tuple[str, ...]
    measures: tuple[Measure, ...]

    @classmethod
    @reading("aggregate")
    def of(cls, source: Input, by: tuple[str, ...], aggregates: Mapping[str, str | tuple[str, str]]) -> Aggregate:
        """A description from what a user writes.

        Args:
            source: the input.
            by: its group columns.
            aggregates: result column to ``"sum(amount)"``, ``"count(*)"``, ``"count(distinct user)"``, or to a pair
                like ``("sum", "amount")``.
        """
        return cls(source, by, tuple(parse_measure(name, text) for name, text in aggregates.items()))

    def __post_init__(self) -> None:
        check_fields(self)
        check_at_end(self.inputs)
        names = self.source.schema.names
        if not self.measures:
            raise DescriptionError("an aggregate needs at least one of " + ", ".join(get_args(Function)))
        wanted = [*(("by", c) for c in self.by), *((m.name, m.column) for m in self.measures if m.column is not None)]
        for what, column in wanted:
            if column not in names:
                raise DescriptionError(
                    f"input '{self.source.name}': {what} names {column!r}; there are {', '.join(names)}"
                )
        for column in self.by:
            check_key_type(self.source, column)
        shown = [c.name for c in self.output]
        for name in shown:
            if shown.count(name) > 1 or name == ROW_KIND_COLUMN:
                raise DescriptionError(f"the result would have two columns {name!r}: name an aggregate otherwise")

    @property
    def emit(self) -> Literal["at_end"]:
        """When it speaks."""
        return "at_end"

    @property
    def inputs(self) -> tuple[Input]:
        """Its one input."""
        return (self.source,)

    @property
    def sides(self) -> tuple[str, ...]:
        """What the input is called in metrics and snapshots."""
        return (self.source.name,)

    @functools.cached_property
    def output(self) -> tuple[OutputColumn, ...]:
        """The result's columns after ``row_kind``."""
        schema = self.source.schema
        groups = [OutputColumn(c, 0, c, None, schema.field(c).type) for c in self.by]
        return (*groups, *(OutputColumn(m.name, 0, m.column or "", None, self._type(m)) for m in self.measures))

    def _type(self, measure: Measure) -> pa.DataType:
        if measure.function not in get_args(Function):
            raise DescriptionError(f"no aggregate {measure.function!r}; there are {', '.join(get_args(Function))}")
        if measure.column is None:
            if measure.function != "count":
                raise DescriptionError(f"{measure.function}(*): only count takes *")
            return pa.int64()
        kind = self.source.schema.field(measure.column).type
        t = pa.types
        text = f"input '{self.source.name}': {measure.function}({measure.column}) of type {kind}"
        if measure.function == "count_distinct" and (t.is_nested(kind) or t.is_null(kind)):
            raise DescriptionError(f"{text}: distinct values of this type are not counted")
        if measure.function in ("count", "count_distinct"):
            return pa.int64()
        if measure.function in ("min", "max"):
            if t.is_nested(kind):
                raise DescriptionError(f"{text}: there is no order")
            return kind
        if t.is_decimal(kind) and measure.function == "sum":
            return pa.decimal128(min(38, kind.precision + 10), kind.scale)
        if t.is_decimal(kind):
            raise DescriptionError(f"{text} is not exact: take sum and count, or CAST it to double first")
        if t.is_floating(kind) or (t.is_integer(kind) and measure.function == "avg"):
            return pa.float64()
        if t.is_integer(kind):
            return pa.int64()
        raise DescriptionError(f"{text} cannot be added up")

    @functools.cached_property
    def output_schema(self) -> pa.Schema:
        """The result's schema: ``row_kind``, then the columns."""
        return _with_row_kind(self.output)

    @property
    def shuffled_by(self) -> tuple[Shuffle, ...]:
        """What rows are partitioned by: the group, less what would part an upsert's old and new row."""
        unique = self.source.unique_key if self.source.updates == "upsert" else None
        columns = [c for c in self.by if unique is None or c in unique]
        return tuple(Shuffle((c,), self.source.schema.field(c).type) for c in columns)

    def layout(self, place: int) -> Layout:
        """The state layout of its input."""
        del place
        return "multiset" if self.source.unique_key is None else "unique_key"

    def to_json(self) -> str:
        """The description as JSON; equal descriptions give equal text."""
        data = {
            "kind": "aggregate",
            "by": list(self.by),
            "measures": [list(m) for m in self.measures],
            "inputs": [input_to_dict(self.source)],
        }
        return json.dumps(data, sort_keys=True)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Aggregate:
        """From what `to_json` wrote."""
        return cls(input_from_dict(data["inputs"][0]), tuple(data["by"]), tuple(Measure(*m) for m in data["measures"]))


@dataclasses.dataclass(frozen=True)
class CoGroup:
    """Both inputs' rows key by key, when they have ended.

    The function that takes them is not part of the description: no code travels to a state server.

    Attributes:
        left: the left input.
        right: the right input.
        keys: the equality columns; at least one. Rows with a null in a key compared by ``=`` are left out.
    """

    left: Input
    right: Input
    keys: tuple[Key, ...]

    def __post_init__(self) -> None:
        check_fields(self)
        check_at_end(self.inputs)
        if not self.keys:
            raise DescriptionError("a co-group needs the columns that rows are grouped by")
        _ = self.as_join

    @functools.cached_property
    def as_join(self) -> Join:
        """The full join of the same inputs; it has the same keys, partitions and refusals."""
        return Join("full", self.left, self.right, self.keys, emit="at_end", suffixes=("_left", "_right"))

    @property
    def emit(self) -> Literal["at_end"]:
        """When it speaks."""
        return "at_end"

    @property
    def inputs(self) -> tuple[Input, Input]:
        """Left and right."""
        return self.left, self.right

    @property
    def sides(self) -> tuple[str, ...]:
        """What the inputs are called in metrics and snapshots."""
        return "left", "right"

    @functools.cached_property
    def output(self) -> tuple[OutputColumn, ...]:
        """Columns of both sides' rows in one table: the side (0 or 1), then the left's columns, then the right's.

        `split` takes it apart again.
        """
        columns = [OutputColumn("side", 0, "", None, pa.int8())]
        for side, source in enumerate(self.inputs):
            columns += [
                OutputColumn(f"{'lr'[side]}{n}", side, f.name, None, f.type) for n, f in enumerate(source.schema)
            ]
        return tuple(columns)

    @functools.cached_property
    def output_schema(self) -> pa.Schema:
        """``row_kind``, then `output`."""
        return _with_row_kind(self.output)

    def split(self, table: pa.Table) -> tuple[pa.Table, pa.Table]:
        """Left and right rows out of rows of `output_schema`, in order, under their own names."""
        side = table["side"].to_numpy()
        parts = []
        for number, source in enumerate(self.inputs):
            rows = table.filter(pa.array(side == number))
            names = [f"{'lr'[number]}{n}" for n in range(len(source.schema))]
            parts.append(rows.select(names).rename_columns(source.schema.names))
        return parts[0], parts[1]

    @property
    def shuffled_by(self) -> tuple[Shuffle, ...]:
        """What rows are partitioned by."""
        return self.as_join.shuffled_by

    @property
    def key_types(self) -> tuple[pa.DataType, ...]:
        """The types the keys are compared in."""
        left, right = self.left.schema, self.right.schema
        return tuple(key_type(left.field(k.left), right.field(k.right)) for k in self.keys)

    def layout(self, side: int) -> Layout:
        """The state layout of one input."""
        return self.as_join.layout(side)

    def to_json(self) -> str:
        """The description as JSON; equal descriptions give equal text."""
        data = {
            "kind": "co_group",
            "keys": [list(k) for k in self.keys],
            "inputs": [input_to_dict(i) for i in self.inputs],
        }
        return json.dumps(data, sort_keys=True)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CoGroup:
        """From what `to_json` wrote."""
        left, right = (input_from_dict(i) for i in data["inputs"])
        return cls(left, right, tuple(Key(*k) for k in data["keys"]))


Description = Join | MultiJoin | Aggregate | CoGroup


def from_json(text: str) -> Description:
    """A description of any kind from its JSON.

    Raises:
        DescriptionError: it is no such text, or describes what cannot be.
    """
    with reading("description of a join"):
        data: dict[str, Any] = json.loads(text)
        if data["kind"] == "multi_join":
            return MultiJoin.from_dict(data)
        if data["kind"] == "aggregate":
            return Aggregate.from_dict(data)
        return CoGroup.from_dict(data) if data["kind"] == "co_group" else Join.from_json(text)


def parse_measure(name: str, text: str | tuple[str, str]) -> Measure:
    """An aggregate from what a user writes, see `Aggregate.of`."""
    if isinstance(text, tuple):
        function, column = text
        distinct = False
    else:
        call = _CALL.fullmatch(text)
        if call is None:
            raise DescriptionError(f"{name}={text!r} is no aggregate; write for example 'sum(amount)'")
        function, distinct, column = call.group(1), call.group(2) is not None, call.group(3).strip("`")
    function = function.lower()
    if distinct:
        if function != "count":
            raise DescriptionError(f"{name}={text!r}: DISTINCT goes with count only")
        function = "count_distinct"
    return Measure(name, cast("Function", function), None if column == "*" else column)


def _with_row_kind(columns: tuple[OutputColumn, ...]) -> pa.Schema:
    fields = [pa.field(c.name, c.type) for c in columns]
    return pa.schema([pa.field(ROW_KIND_COLUMN, pa.string(), nullable=False), *fields])

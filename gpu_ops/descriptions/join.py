"""Joins of two inputs as users write them down: regular, semi, anti and lookup joins, and co-groups."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Callable
from typing import ClassVar, Final, Literal, cast, get_args

import pyarrow as pa

from gpu_ops.conditions import Condition, Where, condition_of
from gpu_ops.descriptions.description import EITHER, Description, Emit, OutputColumn, condition_text, equality, line
from gpu_ops.descriptions.inputs import Input, Layout, check_equality, check_sequence
from gpu_ops.descriptions.keys import Chain, Equality, Key, Shuffle, key_type, of_chain
from gpu_ops.errors import DescriptionError
from gpu_ops.fields import ABSENT

JoinType = Literal["inner", "left", "right", "full", "semi", "anti"]
"""Which rows are emitted.

* *inner*: pairs that match.
* *left*, *right*, *full*: pairs, and the unmatched rows of that side (or both), with nulls.
* *semi*: rows of the left input with at least one match.
* *anti*: rows of the left input with none.
"""


_SPELLINGS: Final = {
    "outer": "full", "fullouter": "full", "leftouter": "left", "rightouter": "right",
    "leftsemi": "semi", "leftanti": "anti",
}  # fmt: skip
"""Other names of join types, those of Spark and pandas, underscores left out."""


def join_type(how: str) -> JoinType:
    """A join type as Spark, pandas or polars spell it, as it is written here; what is none stays as it is."""
    if not isinstance(how, str):
        raise DescriptionError(f"how={how!r}; it is one of {', '.join(get_args(JoinType))}")
    spelling = how.lower().replace("_", "")
    return cast("JoinType", _SPELLINGS.get(spelling, spelling))


def _no_type(how: str) -> str:
    """Suggests what to write in place of a join type that there is none of."""
    if how.lower() == "cross":
        return "write how='inner' with on=None, which joins each row with every other"
    near = difflib.get_close_matches(how, get_args(JoinType), n=1)
    return (f"did you mean {near[0]!r}? " if near else "") + f"it is one of {', '.join(get_args(JoinType))}"


@dataclasses.dataclass(frozen=True)
class Join(Description):
    """A regular, semi or anti join of two inputs.

    Attributes:
        how: see `JoinType`.
        left: the left input.
        right: the right input.
        keys: the equality columns; none makes every pair a candidate, in one partition.
        where: residual condition over both inputs' columns, given as SQL text or as a tree, or None.
        emit: see `Emit`.
        null_aware: for anti: ``NOT IN`` (a null on the right suppresses every row).
        suffixes: appended to clashing column names of left and right, or None.
        ansi: whether the condition is one of a session with ``spark.sql.ansi.enabled``.
    """

    how: JoinType
    left: Input
    right: Input
    keys: tuple[Key, ...] = ()
    where: Where = None
    emit: Emit = "per_batch"
    null_aware: bool = False
    suffixes: tuple[str, str] | None = None
    ansi: bool = dataclasses.field(default=False, metadata=ABSENT)

    kind: ClassVar[str] = "join"
    runs: ClassVar[str] = "regular"
    sorts_itself: ClassVar[bool] = True

    def _check(self) -> None:
        if self.how not in get_args(JoinType):
            raise DescriptionError(f"how={self.how!r}; {_no_type(str(self.how))}")
        self._check_emit()
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
            check_equality(self.left, key.left, self.right, key.right)
        check_sequence(self.inputs)
        self._check_names("rename one, or give suffixes=")
        object.__setattr__(self, "where", condition_of(self.where, self._schemas, ansi=self.ansi))

    def _check_how(self, what: str, *hows: str) -> None:
        if self.how not in hows:
            raise DescriptionError(f"how={self.how!r}; {what} is one of {', '.join(hows)}")

    @functools.cached_property
    def key_types(self) -> tuple[pa.DataType, ...]:
        """The types the keys are compared in."""
        left, right = self.left.schema, self.right.schema
        return tuple(key_type(left.field(k.left), right.field(k.right)) for k in self.keys)

    def key_columns(self, side: int, *, strict: bool = False) -> tuple[str, ...]:
        """One input's key columns; ``strict``: those in which null matches nothing."""
        return tuple(k.column(side) for k in self.keys if not (strict and k.null_safe))

    @property
    def inputs(self) -> tuple[Input, Input]:
        """The left and the right input."""
        return self.left, self.right

    @property
    def condition(self) -> Condition | None:
        """The residual condition, parsed and typed."""
        return cast("Condition | None", self.where)

    @property
    def conditions(self) -> tuple[Condition | None, ...]:
        """The `condition`, in a tuple."""
        return (self.condition,)

    @property
    def _schemas(self) -> dict[str, pa.Schema]:
        return {source.name: source.schema for source in self.inputs}

    @property
    def outer(self) -> tuple[bool, bool]:
        """Tells for left and right whether rows without a match come out as unmatched rows."""
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
                side = {"right": 1, "full": EITHER}.get(self.how, 0)
                own, other = (key.right, key.left) if side == 1 else (key.left, key.right)
                columns.append(OutputColumn(key.left, side, own, other if side == EITHER else None, kind))
        used = {k.left for k in self.keys if k.using}, {k.right for k in self.keys if k.using}
        rest = [[f for f in schema if f.name not in used[s]] for s, schema in enumerate((left, right))]
        taken = [{f.name for f in fields} for fields in rest]
        for side, fields in enumerate(rest):
            for field in fields:
                suffix = self.suffixes[side] if self.suffixes and field.name in taken[1 - side] else ""
                columns.append(OutputColumn(field.name + suffix, side, field.name, None, field.type))
        return tuple(columns)

    @property
    def insert_only(self) -> bool:
        """Tells whether nothing that comes out is ever taken back: of inner and semi joins of insert-only inputs."""
        return not self.by_time and self.how in ("inner", "semi") and self._grows

    def own_column(self, number: int, column: OutputColumn) -> str | None:
        """The input column that fills an output column in an unmatched or late row of that input; None for none."""
        if column.other is not None:
            return column.other if number == 1 else column.column
        if column.side == number:
            return column.column
        shared = (k for k in self.keys if k.using and k.left == column.name)
        return next((k.column(number) for k in shared), None)

    @property
    def equal_columns(self) -> list[tuple[str, ...]]:
        """The key columns of both inputs."""
        return [(key.left, key.right) for key in self.keys]

    @property
    def compared_columns(self) -> list[tuple[int, str]]:
        """The key columns, each with its input."""
        return [(number, key.column(number)) for key in self.keys for number in (0, 1)]

    def layout(self, side: int) -> Layout:
        """The state layout of one input (Flink: ``JoinInputSideSpec``)."""
        unique = self.inputs[side].unique_key
        if unique is None:
            return "multiset"
        own = {key.column(side) for key in self.keys}
        return "join_key_contains_unique_key" if set(unique) <= own else "unique_key"

    @property
    def distribution(self) -> tuple[int, ...]:
        """The keys (by position) that rows are partitioned by; none means a single partition.

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
        """The columns that rows are partitioned by; empty means a single partition. See `distribution`."""
        return tuple(Shuffle((self.keys[p].left, self.keys[p].right), self.key_types[p]) for p in self.distribution)

    @property
    def alone(self) -> tuple[int, ...]:
        """The inputs whose rows may come out without one of the other input."""
        return {"inner": (), "right": (1,), "full": (0, 1)}.get(self.how, (0,))

    @property
    def sides(self) -> tuple[str, ...]:
        """The names of the inputs in metrics and snapshots."""
        return "left", "right"

    def _unique_key(self) -> tuple[str, ...] | None:
        if self.how == "full":
            return None
        return self._of_left_rows() if self.how in ("semi", "anti") else of_chain(self._chain())

    def _of_left_rows(self) -> tuple[str, ...] | None:
        """The unique key of a semi or anti join's output, whose rows are the left input's; None for none."""
        key = self.left.unique_key
        if key is None:
            return None
        more: list[str] = []
        for position in self.distribution:
            by = self.keys[position]
            if by.left in (*key, *more):
                continue
            if self.how == "anti" or by.null_safe:
                return None  # may be null
            more.append(by.left)
        return (*key, *more)

    def _chain(self) -> Chain:
        order = (1, 0) if self.how == "right" else (0, 1)
        on = tuple(Equality(0, k.column(order[0]), k.column(order[1]), k.null_safe) for k in self.keys)
        return self._chain_of(order, (self.how != "inner",), (on,))

    @property
    def merges(self) -> bool:
        """Tells whether rows are found by keys, and by nothing else."""
        return bool(self.keys) and not self.null_aware and self.time_type is None

    @property
    def title(self) -> str:
        """The join in one line, for people."""
        on = condition_text([(k.left, k.null_safe, k.right) for k in self.keys], self.condition)
        return f"{self._before}{self.how} join on {on}"

    _before: ClassVar[str] = ""  # the join type, in `title`

    def equalities(self, written: Callable[[str], str] = str) -> list[str]:
        """Its equal columns, in words; ``written``: gives a column's name as it is to be written."""
        return [
            equality((self.left, k.left), (self.right, k.right), null_safe=k.null_safe, written=written)
            for k in self.keys
        ]

    def lines(self) -> list[str]:
        """The join in some lines, for people."""
        return [
            f"{self._kind}, {'NOT IN' if self.null_aware else self.how}: {self.left.name}, {self.right.name}",
            line("key", " AND ".join(self.equalities()) or "none: every pair of rows is a candidate"),
            *self._more_lines(),
            *([line("where", str(self.where))] if self.where is not None else []),
        ]

    @property
    def _kind(self) -> str:
        return "semi/anti join" if self.how in ("semi", "anti") else "regular join"

    def _more_lines(self) -> list[str]:
        return []


@dataclasses.dataclass(frozen=True)
class LookupJoin(Join):
    """A join of each left row with the rows that a table has in the row's micro-batch (``AS OF PROCTIME()``).

    The left input only grows, and is not kept. The right input is the table: static, or changing. Its changes
    touch nothing that came out before. After Flink's processing-time temporal join
    (``TemporalProcessTimeJoinOperator``); here the table may have several rows of a key.
    """

    kind: ClassVar[str] = "lookup_join"
    runs: ClassVar[str] = "lookup"
    emits: ClassVar[tuple[Emit, ...]] = ("per_batch", "at_end")

    def _check(self) -> None:
        self._check_how("a lookup join", "inner", "left")
        if not self.keys:
            raise DescriptionError("a lookup join needs on=: the columns that the table is looked up by")
        self.left.refuse("the left input of a lookup join is insert-only and not kept", "unique_key", "ttl_ms")
        super()._check()

    @property
    def insert_only(self) -> bool:
        """Tells whether nothing that comes out is ever taken back: so it is, but for tagged bad rows."""
        return all(source.bad_rows != "tag" for source in self.inputs)

    insertions_only = not_kept = (0,)

    _unique_key = Description._unique_key
    _before, _kind = "lookup ", "lookup join"

    def _more_lines(self) -> list[str]:
        return [line("table", f"{self.right.name}, as it is after its changes of the row's micro-batch")]


@dataclasses.dataclass(frozen=True)
class CoGroup(Join):
    """Both inputs' rows key by key, when they have ended: of the same keys, partitions and refusals as their full join.

    The function that takes them is not part of the description: no code travels to a state server.

    Attributes:
        left: the left input.
        right: the right input.
        keys: the equality columns; at least one. Rows with a null in a key compared by ``=`` are left out.
    """

    how: JoinType = dataclasses.field(default="full", init=False)
    left: Input
    right: Input
    keys: tuple[Key, ...]
    where: str | None = dataclasses.field(default=None, init=False)
    emit: Emit = dataclasses.field(default="at_end", init=False)
    null_aware: bool = dataclasses.field(default=False, init=False)
    suffixes: tuple[str, str] | None = dataclasses.field(default=None, init=False)
    ansi: bool = dataclasses.field(default=False, init=False)

    kind: ClassVar[str] = "co_group"
    runs_at_end: ClassVar[str] = "groups.at_end"
    takes_function: ClassVar[bool] = True

    def _check(self) -> None:
        if not self.keys:
            raise DescriptionError("a co-group needs the columns that rows are grouped by")
        super()._check()

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

    def own_column(self, number: int, column: OutputColumn) -> str | None:
        """The input column that fills an output column in a row of that input alone; None for none."""
        return column.column if column.side == number and column.column else None

    order_matters_at_end = True

    @property
    def title(self) -> str:
        """The co-group in one line, for people."""
        return f"co-group on {condition_text([(k.left, k.null_safe, k.right) for k in self.keys], None)}"

    def lines(self) -> list[str]:
        """The co-group in some lines, for people: its inputs and their keys."""
        return [f"co-group: {self.left.name}, {self.right.name}", line("key", " AND ".join(self.equalities()))]

    kept_at_end = "a co-group"

    def split(self, table: pa.Table) -> tuple[pa.Table, pa.Table]:
        """Left and right rows out of rows of `output_schema`, in order, under their own names."""
        side = table["side"].to_numpy()
        parts = []
        for number, source in enumerate(self.inputs):
            rows = table.filter(pa.array(side == number))
            names = [f"{'lr'[number]}{n}" for n in range(len(source.schema))]
            parts.append(rows.select(names).rename_columns(source.schema.names))
        return parts[0], parts[1]

"""What every description of an operator answers: the engine, state and Spark ask it and know no operator by name.

A description is complete: with the inputs' schemas it holds everything an engine or a state server
needs, and it travels as JSON (no code ever does).
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple, Self

import pyarrow as pa

from gpu_ops.descriptions.changelog import ROW_KIND_COLUMN, ROW_KIND_NAMES
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.keys import Chain
from gpu_ops.descriptions.times import show_ms
from gpu_ops.errors import DescriptionError
from gpu_ops.fields import check_fields, decoded, encoded, hints_of, unwritten

if TYPE_CHECKING:
    from gpu_ops.conditions import Condition
    from gpu_ops.descriptions.inputs import Layout
    from gpu_ops.descriptions.interval import Interval
    from gpu_ops.descriptions.keys import Equality, Shuffle

Emit = Literal["per_event", "per_batch", "at_watermark", "at_end"]
"""What comes out of a micro-batch.

* *per_event*: the changelog Flink emits record by record.
* *per_batch*: the net change; nothing appears and disappears within a micro-batch.
* *at_watermark*: rows that no later one changes, when the watermark passes them; of joins by time, and of aggregates.
* *at_end*: nothing until the input ends.
"""


EITHER: Final = 2
LATER: Final = 3


class OutputColumn(NamedTuple):
    """A column of the changelog, and the column of input number ``side`` that fills it.

    Of a column that two inputs show together, ``other`` is the second's: then ``side`` is `EITHER` where it is
    whichever is there, `LATER` where it is the later of both event times.
    """

    name: str
    side: int
    column: str
    other: str | None
    type: pa.DataType


@dataclasses.dataclass(frozen=True)
class OperatorAttributes:
    """An operator's treatment of the end of its input and of a backlog, after Flink's class of the name.

    Flink 2.3 knows the first two (FLIP-331); the third is what FLIP-327 asks of an operator.

    Attributes:
        output_only_after_end_of_stream: it keeps its input as it comes, without output and counts, and runs as a batch
            operator at the end.
        internal_sorter_supported: it sorts its input itself, if it needs it sorted.
        switches_from_backlog: it can take a backlog in silently, put out its net result, and go on live.
    """

    output_only_after_end_of_stream: bool = False
    internal_sorter_supported: bool = False
    switches_from_backlog: bool = False

    def __post_init__(self) -> None:
        if self.internal_sorter_supported and not self.output_only_after_end_of_stream:
            raise DescriptionError(
                "an operator sorts its input itself only if its output waits for the end of the stream"
            )
        if self.switches_from_backlog and self.output_only_after_end_of_stream:
            raise DescriptionError("an operator whose output waits for the end of the stream does not go on live")


class Description(abc.ABC):
    """One operator over some inputs.

    Attributes:
        kind: what its JSON calls it.
        takes_function: whether a user's function makes the result of what comes out.
        sorts_itself: whether it sorts a part of its input itself, at the end.
        emits: what ``emit`` may be.
        runs: the module of `gpu_ops.operators` that runs it before the end of the input.
        runs_at_end: the one that does with ``emit="at_end"``.
        not_kept: the inputs whose rows are forgotten with their micro-batch.
    """

    kind: ClassVar[str]

    takes_function: ClassVar[bool] = False

    sorts_itself: ClassVar[bool] = False

    emits: ClassVar[tuple[Emit, ...]] = ("per_event", "per_batch", "at_end")

    def __post_init__(self) -> None:
        check_fields(self)
        self._check()
        for source in self.inputs if len(self.inputs) > 1 else ():
            source.refuse("a union of streams with a watermark each is the only input of its operator", "parts")

    @abc.abstractmethod
    def _check(self) -> None:
        """Refuses what cannot be, with a DescriptionError; the fields have their types."""

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

        @property
        def inputs(self) -> tuple[Input, ...]:
            """Its inputs, in order."""

        @property
        def emit(self) -> Emit:
            """When it has output."""

        @property
        def interval(self) -> Interval | None:
            """The bounds in time within which rows match; None where time plays no part."""

        @property
        def time_type(self) -> pa.DataType | None:
            """The type event times are compared in; None where time plays no part."""

    else:
        interval = time_type = None  # no properties: a dataclass has its own

    def with_inputs(self, inputs: Sequence[Input], emit: Emit) -> Self:
        """Gives the same operator over other inputs."""
        sides = _inputs_of(type(self))
        own: dict[str, Any] = dict(zip(sides, inputs, strict=True)) if sides else {"inputs": tuple(inputs)}
        return dataclasses.replace(self, **own, emit=emit)

    # --- what runs it ------------------------------------------------------------------------

    runs: ClassVar[str]

    runs_at_end: ClassVar[str] = "at_end"

    @property
    def operator(self) -> str:
        """The module of `gpu_ops.operators` that runs it."""
        return self.runs_at_end if self.emit == "at_end" else self.runs

    # --- inputs and output -------------------------------------------------------------------

    @property
    def sides(self) -> tuple[str, ...]:
        """The names of the inputs in metrics and snapshots."""
        return tuple(source.name for source in self.inputs)

    @property
    def watermarked(self) -> tuple[str, ...]:
        """Names, for metrics, of what has a watermark of its own: each input, or each part of the only one."""
        parts = self.inputs[0].parts
        return self.sides if parts is None else tuple(f"{self.sides[0]}_{n}" for n in range(len(parts.delays_ms)))

    @property
    def state_names(self) -> tuple[str, ...]:
        """The names of the state's tables in metrics and snapshots: one an input."""
        return self.sides

    @functools.cached_property
    @abc.abstractmethod
    def output(self) -> tuple[OutputColumn, ...]:
        """The changelog's columns after ``row_kind``."""

    @functools.cached_property
    def output_schema(self) -> pa.Schema:
        """The changelog's schema: ``row_kind``, then the columns."""
        fields = [pa.field(c.name, c.type) for c in self.output]
        return pa.schema([pa.field(ROW_KIND_COLUMN, pa.string(), nullable=False), *fields])

    @functools.cached_property
    def values_schema(self) -> pa.Schema:
        """The changelog's columns without the row kind."""
        return pa.schema(list(self.output_schema)[1:])

    @property
    def insert_only(self) -> bool:
        """Tells whether nothing that comes out is ever taken back."""
        return False

    def as_input(self, name: str) -> Input:
        """Its changelog as an input of another operator."""
        row_kind = None if self.insert_only else ROW_KIND_COLUMN
        return Input(name, self.values_schema, self.unique_key, row_kind, updates="retract")

    @property
    def _grows(self) -> bool:
        """Tells whether all inputs are insert-only, and nothing but changes comes out."""
        return all(x.insert_only and x.ttl_ms is None and x.bad_rows != "tag" for x in self.inputs)

    @abc.abstractmethod
    def own_column(self, number: int, column: OutputColumn) -> str | None:
        """The input column that fills an output column in an unmatched or late row of that input; None for none."""

    @property
    def rename_hint(self) -> str:
        """Suggests what helps besides a new name where two output columns have one: the end of a sentence."""
        return ", or give suffixes=('_l', '_r')"

    def _check_emit(self) -> None:
        """Refuses an ``emit`` that there is none of, and a TTL where no output comes before the end."""
        if self.emit not in self.emits:
            raise DescriptionError(f"emit={self.emit!r}; it is one of {', '.join(self.emits)}")
        for source in self.inputs if self.emit == "at_end" else ():
            source.refuse("with emit='at_end' no row is forgotten", "ttl_ms")

    def _check_names(self, hint: str) -> None:
        """Refuses two output columns of one name.

        Raises:
            DescriptionError: names them.
        """
        names = [column.name for column in self.output]
        for name in names:
            if names.count(name) > 1 or name == ROW_KIND_COLUMN:
                raise DescriptionError(
                    f"the {self._noun} would have two columns {name!r}: {self._forgotten_kind(name)}{hint}"
                )

    def _forgotten_kind(self, name: str) -> str:
        """A question, where a column is called as row kinds are: as a plain column it would give a wrong table."""
        plain = [x for x in self.inputs if name in x.schema.names and pa.types.is_string(x.schema.field(name).type)]
        if name.lower() not in ROW_KIND_NAMES or len(plain) < 2:
            return ""
        return f"is it the kind of a change? Then say row_kind={name!r} of {plain[0].name} and {plain[1].name}; else "

    _noun: ClassVar[str] = "changelog"

    # --- keys --------------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def equal_columns(self) -> list[tuple[str, ...]]:
        """Columns that are compared with each other, one per input: what rows are distributed by is among them."""

    @property
    @abc.abstractmethod
    def compared_columns(self) -> list[tuple[int, str]]:
        """All (input, column) whose values are compared with others'."""

    @property
    @abc.abstractmethod
    def shuffled_by(self) -> tuple[Shuffle, ...]:
        """The columns that rows are partitioned by; empty means a single partition."""

    @property
    def alone(self) -> tuple[int, ...]:
        """The inputs whose rows may come out without one of another input; empty where rows of all come together."""
        return tuple(range(len(self.inputs)))

    def carries(self, by: Shuffle, column: OutputColumn) -> bool:
        """True if an output column has, in every row, the value by which the row's partition was found.

        Args:
            by: one of `shuffled_by`.
            column: one of `output`.
        """
        filled = [n for n, name in enumerate(by.columns) if self.own_column(n, column) == name]
        return bool(filled) and set(self.alone) <= set(filled)

    @abc.abstractmethod
    def layout(self, number: int) -> Layout:
        """The state layout of one input (Flink: ``JoinInputSideSpec``)."""

    @property
    def conditions(self) -> tuple[Condition | None, ...]:
        """The residual conditions, parsed and typed."""
        return ()

    @property
    def unique_key(self) -> tuple[str, ...] | None:
        """Columns of the changelog that identify a row of it and are never null; None where none is known.

        None as well where a TTL makes the join forget rows that it does not retract.
        """
        if any(source.ttl_ms is not None for source in self.inputs):
            return None
        return self._unique_key()

    def _unique_key(self) -> tuple[str, ...] | None:
        return None

    def _chain_of(self, order: Sequence[int], lefts: tuple[bool, ...], on: tuple[tuple[Equality, ...], ...]) -> Chain:
        """A join of the inputs in an order, step by step."""
        return Chain(
            keys=tuple(self.inputs[n].unique_key for n in order),
            lefts=lefts,
            on=on,
            single=tuple(self.layout(n) == "join_key_contains_unique_key" for n in order),
            shuffled=tuple(tuple(by.columns[n] for n in order) for by in self.shuffled_by),
            shown={(order.index(c.side), c.column): c.name for c in self.output},
        )

    # --- time --------------------------------------------------------------------------------

    @property
    def by_time(self) -> bool:
        """Tells whether rows come out and go as time passes: that of a watermark, or of the clock."""
        return self.interval is not None

    @property
    def behind_ms(self) -> int | None:
        """Milliseconds that what comes out may be behind the watermark; None for any distance."""
        return 0 if self.interval is None else self.interval.keep_ms

    def kept(self, number: int) -> str:
        """Tells in words how long rows of an input stay."""
        assert self.interval is not None
        ms = self.interval.kept_ms[number]
        if self.interval.time == "processing":
            return f"kept for {show_ms(ms)}" if ms else "not kept beyond its micro-batch"
        return f"kept until the watermark is {show_ms(ms)} past its time" if ms else "kept until it is late"

    @property
    def insertions_only(self) -> tuple[int, ...]:
        """The inputs whose rows are all insertions, so that a retraction among them is an error."""
        return ()

    not_kept: ClassVar[tuple[int, ...]] = ()

    @property
    def by_event_time(self) -> bool:
        """Tells whether a watermark moves the operator."""
        return self.by_time and (self.interval is None or self.interval.time == "event")

    @property
    def timed(self) -> Mapping[str, Description]:
        """The operators that a watermark moves, by their names in a dataflow; one alone has the name ``""``."""
        return {"": self} if self.by_event_time else {}

    @property
    def times_may_be_null(self) -> bool:
        """Tells whether rows without an event time are taken."""
        return False

    def times_of(self, source: Input) -> tuple[str, ...]:
        """The columns of an input that are compared with other times or a watermark."""
        return () if source.event_time is None else (source.event_time,)

    def ties_by(self, number: int) -> str | None:
        """The column of an input, integers or timestamps, that orders its rows of one event time; None for none."""
        return None

    @property
    def chosen_by(self) -> str | None:
        """The column by which a row is chosen over others of its key, so that none can be without; None for none."""
        return None

    # --- order, end and backlog --------------------------------------------------------------

    @property
    def order_matters_at_end(self) -> bool:
        """Tells whether the result at the end of input depends on the order in which rows came."""
        return any(not source.insert_only or source.sequence_by is not None for source in self.inputs)

    @property
    def merges(self) -> bool:
        """Tells whether rows are found by keys, and by nothing else, so that at the end sorted keys can be merged."""
        return False

    @property
    def result_without_rows(self) -> bool:
        """Tells whether there is a result though no row has come."""
        return False

    @property
    def by_clock(self) -> bool:
        """True if it matters at what time rows come: by a watermark, or a TTL."""
        return self.by_time or any(source.ttl_ms is not None for source in self.inputs)

    @property
    def attributes(self) -> OperatorAttributes:
        """The treatment of the end of input and of a backlog (Flink: ``getOperatorAttributes``)."""
        at_end = self.emit == "at_end"
        return OperatorAttributes(at_end, at_end and self.sorts_itself, self.why_no_backlog() is None)

    def why_no_backlog(self) -> str | None:
        """The reason why it cannot begin with a backlog; None if it can."""
        if self.emit == "at_end":
            return "with emit='at_end' all input is taken in silently"
        if self.by_time:
            return "a join by time goes by its watermark from the first row on"
        for source in self.inputs:
            if source.ttl_ms is not None:
                return f"the rows of input '{source.name}' expire a ttl= after they came, which a backlog does not say"
        return None

    def check_backlog(self) -> None:
        """Refuses a backlog where it cannot begin with one.

        Raises:
            DescriptionError: gives the reason.
        """
        why = self.why_no_backlog()
        if why is not None:
            raise DescriptionError(f"no backlog here: {why}")

    # --- in words ----------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def title(self) -> str:
        """The operator in one line, for people."""

    @abc.abstractmethod
    def lines(self) -> list[str]:
        """The operator in some lines, as `gpu_ops.explain` begins; the first ends where the operator's name follows."""

    @property
    def kept_at_end(self) -> str:
        """Names the option that keeps a stream until it ends."""
        return "emit='at_end'"

    # --- as JSON -----------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Gives the description for JSON: its kind, its inputs in order, and the other fields by their names."""
        sides, left_out = _inputs_of(type(self)), self._unwritten()
        names = [f.name for f in dataclasses.fields(self) if f.init and f.name not in left_out and f.name not in sides]
        inputs = {"inputs": encoded(self.inputs)}
        return {"kind": self.kind, **{name: encoded(getattr(self, name)) for name in names}, **inputs}

    def _unwritten(self) -> set[str]:
        """The fields that its JSON lacks.

        ANSI mode is there only where it makes a difference to a condition: so a state folder fits a session in the
        other mode, unless that would change what is joined.
        """
        matters = any(condition is not None and condition.mode_matters for condition in self.conditions)
        return unwritten(self) | (set() if matters else {"ansi"})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """From what `to_dict` gave; whatever goes wrong is an error of Python's, see `gpu_ops.fields.reading`."""
        sides, hints = _inputs_of(cls), hints_of(cls)
        given = {**data, **dict(zip(sides, data["inputs"], strict=True))} if sides else data
        fields = [
            f for f in dataclasses.fields(cls) if f.init and not (f.metadata.get("absent") and f.name not in data)
        ]
        return cls(**{f.name: decoded(hints[f.name], given[f.name]) for f in fields})

    def to_json(self) -> str:
        """The description as JSON; equal descriptions give equal text."""
        return json.dumps(self.to_dict(), sort_keys=True)


@functools.cache
def _inputs_of(kind: type) -> list[str]:
    """The fields of a kind of description that are one input each."""
    return [name for name, hint in hints_of(kind).items() if hint is Input]


def line(label: str, text: str) -> str:
    """A line of `gpu_ops.explain`."""
    return f"  {label:<11} {text}"


def as_written(text: str, inputs: Iterable[str]) -> str:
    """A text with columns as a query writes them, ``o.item``, where `gpu_ops.sql` calls them ``o__item``.

    Args:
        text: it may name an operator's input, too: ``o_p.o__item`` of a join of ``o`` and ``p`` is ``o.item``.
        inputs: names of inputs; that of what several tables have become has their aliases, with ``_`` between them.
    """
    parts = [name.split("_") for name in inputs]
    aliases = {"_".join(part[a:b]) for part in parts for a in range(len(part)) for b in range(a + 1, len(part) + 1)}
    named = "|".join(map(re.escape, sorted(aliases - {""}, key=len, reverse=True)))
    if not named:
        return text
    text = re.sub(rf"(?:\b\w+\.)?`({named})__([^`]+)`", r"\1.`\2`", text)
    text = re.sub(rf"(?:\b\w+\.)?\b({named})__(\w+)", r"\1.\2", text)
    text = re.sub(rf"`([^`]+)` AS ({named})\.`?\1`?(?![\w`])", r"\2.`\1`", text)
    return re.sub(rf"(?<![\w.])(\w+) AS (({named})\.\1)(?![\w`])", r"\2", text)


def equality(
    one: tuple[Input, str], other: tuple[Input, str], *, null_safe: bool, written: Callable[[str], str]
) -> str:
    """Columns of two inputs that are equal, in words; ``written``: gives a column's name as it is to be written."""
    left, right = (f"{source.name}.{written(column)}" for source, column in (one, other))
    return f"{left} {'IS NOT DISTINCT FROM' if null_safe else '='} {right}"


def condition_text(keys: list[tuple[str, bool, str]], where: Condition | None) -> str:
    """Equal columns and a residual condition, in a line.

    Args:
        keys: left column, whether it is null-safe, right column.
        where: the residual condition.
    """
    equal = ", ".join(f"{a} {'<=>' if null_safe else '='} {b}" for a, null_safe, b in keys)
    return (equal or "no equality column") + (f" where {where}" if where is not None else "")

"""A dataflow: operators that read one another's changelogs, described as one operator with one state and one version.

`docs/decisions/0014-one-dataflow.md` says why. The dataflow's inputs are those that come from outside; its output is
that of its last operator. A changelog between two operators is never written down: it is computed again where a
micro-batch is repeated.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

import pyarrow as pa

from gpu_ops.conditions.expressions import ColumnRef
from gpu_ops.descriptions.changelog import ROW_KIND_COLUMN
from gpu_ops.descriptions.description import Description, Emit, OutputColumn, line
from gpu_ops.descriptions.inputs import Input, Layout
from gpu_ops.descriptions.keys import Shuffle
from gpu_ops.descriptions.projection import Projection
from gpu_ops.errors import DescriptionError
from gpu_ops.fields import ABSENT

NUMBER = "output"
"""The column of an output's number, where a dataflow has several."""

_LAST = "output"
"""What the last operator of `Dataflow.over` is called."""


@dataclasses.dataclass(frozen=True)
class Vertex:
    """One operator of a dataflow, and what it reads (Flink: ``JobVertex``).

    Attributes:
        name: of the operator, unique among the dataflow's operators and inputs.
        description: what it does.
        sources: for each of its inputs the name of the input of the dataflow, or of the operator before it, that it
            reads.
        projections: for each input what it takes of the changes of the operator before it, of all but their row kinds;
            None for all. Empty: all of everything.
    """

    name: str
    description: Description
    sources: tuple[str, ...]
    projections: tuple[Projection | None, ...] = ()

    def __post_init__(self) -> None:
        if not any(self.projections):
            object.__setattr__(self, "projections", ())

    @property
    def edges(self) -> Iterator[tuple[Input, str, Projection | None]]:
        """Each input, the name of what it reads, and what it takes of that."""
        projections = self.projections or (None,) * len(self.sources)
        return zip(self.description.inputs, self.sources, projections, strict=True)

    def to_dict(self) -> dict[str, Any]:
        """Gives the vertex for JSON."""
        own = {"name": self.name, "description": self.description.to_dict(), "sources": list(self.sources)}
        if not any(self.projections):
            return own
        return {**own, "projections": [one and one.to_dict() for one in self.projections]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """From what `to_dict` gave, in which `gpu_ops.descriptions.kinds` has read the operators before it."""
        return cls(data["name"], data["description"], tuple(data["sources"]), tuple(data.get("projections", ())))


@dataclasses.dataclass(frozen=True)
class Dataflow(Description):
    """Operators of which each but the last is read by a later one, or is one of several outputs.

    Attributes:
        inputs: what comes from outside.
        operators: each behind those that it reads.
        outputs: the operators whose changelogs come out, in one: the number of the output, and columns that they share
            (see `shared_columns`). Empty: that of the last operator as it is.
    """

    inputs: tuple[Input, ...]
    operators: tuple[Vertex, ...]
    outputs: tuple[str, ...] = dataclasses.field(default=(), metadata=ABSENT)

    kind: ClassVar[str] = "dataflow"
    runs: ClassVar[str] = "dataflow"
    runs_at_end: ClassVar[str] = "dataflow"

    @classmethod
    def over(cls, description: Description, below: Mapping[str, Description]) -> Self:
        """An operator over the changelogs of others.

        Args:
            description: the operator that comes last.
            below: by the names of its inputs the descriptions that make them: those of its other inputs come from
                outside. A description of a dataflow brings all of its operators.

        Raises:
            DescriptionError: two inputs, or two operators, have one name and differ.
        """
        inputs: dict[str, Input] = {}
        operators: dict[str, Vertex] = {}

        def add(found: dict[str, Any], name: str, one: Any, what: str) -> None:
            if found.setdefault(name, one) != one:
                raise DescriptionError(f"two {what} are called {name!r} and differ: give one another name")

        for name, made_by in below.items():
            vertices = made_by.operators if isinstance(made_by, Dataflow) else (_vertex(name, made_by),)
            for source in made_by.inputs:
                add(inputs, source.name, source, "inputs")
            for vertex in (*vertices[:-1], dataclasses.replace(vertices[-1], name=name)):
                add(operators, vertex.name, vertex, "operators")
        for source in description.inputs:
            if source.name not in below:
                add(inputs, source.name, source, "inputs")
        return cls(tuple(inputs.values()), (*operators.values(), _vertex(_LAST, description)))

    def _check(self) -> None:
        if not self.operators:
            raise DescriptionError("a dataflow has one operator or more")
        known: dict[str, Input | Description] = {}
        read = set[str]()
        named: list[tuple[str, Input | Description]] = [(x.name, x) for x in self.inputs]
        named += [(v.name, v.description) for v in self.operators]
        for name, one in named:
            if name.lower() in {other.lower() for other in known}:
                raise DescriptionError(f"two of the dataflow's inputs and operators are called {name!r}")
            known[name] = one
        before = [x.name for x in self.inputs]
        for vertex in self.operators:
            if "." in vertex.name:  # which ends an operator's name in those of its tables
                raise DescriptionError(f"an operator of a dataflow cannot be called {vertex.name!r}: it has a dot")
            if len(vertex.sources) != len(vertex.description.inputs):
                count = len(vertex.description.inputs)
                raise DescriptionError(f"operator '{vertex.name}' has {count} inputs and reads {len(vertex.sources)}")
            for source, name, projection in vertex.edges:
                if name not in before:
                    raise DescriptionError(
                        f"operator '{vertex.name}' reads {name!r}; before it are {', '.join(before)}"
                    )
                _check_edge(vertex, source, known[name], projection)
            read.update(vertex.sources)
            before.append(vertex.name)
            self._check_vertex(vertex)
        read.update(self.outputs or before[-1:])
        unread = [name for name in before if name not in read]
        if unread:
            raise DescriptionError(f"{unread[0]!r} is read by no operator")
        unknown = [name for name in self.outputs if name not in {v.name for v in self.operators}]
        if unknown or len(set(self.outputs)) < len(self.outputs):
            raise DescriptionError(f"the outputs are {', '.join(self.outputs)}: operators of the dataflow, each once")

    def _check_vertex(self, vertex: Vertex) -> None:
        description, last = vertex.description, vertex is self.operators[-1] and not self.outputs
        if isinstance(description, Dataflow) or description.takes_function:
            raise DescriptionError(f"operator '{vertex.name}': {description.title} has no place within a dataflow")
        if not last and description.emit == "at_end":
            raise DescriptionError(f"operator '{vertex.name}' has no output before its input ends: it comes last")
        late = getattr(description, "late", None) or getattr(description.interval, "late", None)
        tagged = [source.name for source in description.inputs if source.bad_rows == "tag"]
        if tagged or (late == "tag" and not last):
            option = "bad_rows" if tagged else "late"
            raise DescriptionError(
                f"operator '{vertex.name}': {option}='tag' hands rows out beside a changelog, and here another one "
                "reads on: use 'drop' or 'fail'"
            )

    # --- inputs and output -------------------------------------------------------------------

    @property
    def last(self) -> Description:
        """The operator whose changelog comes out."""
        return self.operators[-1].description

    @property
    def emit(self) -> Emit:
        """When the last operator has output."""
        return self.last.emit

    def with_inputs(self, inputs: Sequence[Input], emit: Emit) -> Self:
        """Not of a dataflow, whose operators have inputs of their own."""
        raise DescriptionError("the inputs of a dataflow are those of its operators")

    @functools.cached_property
    def output(self) -> tuple[OutputColumn, ...]:
        """The changelog's columns after ``row_kind``; they come from the inputs of the last operator."""
        if not self.outputs:
            return self.last.output
        shared = ((f"c{number}", kind) for number, (_, kind) in enumerate(self.shared))
        return tuple(OutputColumn(name, 0, name, None, kind) for name, kind in ((NUMBER, pa.int8()), *shared))

    @functools.cached_property
    def shared(self) -> list[tuple[dict[int, str], pa.DataType]]:
        """The columns that several outputs share."""
        described = {vertex.name: vertex.description for vertex in self.operators}
        return shared_columns([described[name].values_schema for name in self.outputs])

    def own_column(self, number: int, column: OutputColumn) -> str | None:
        """The column of an input of the last operator that fills an output column in a row of this input alone."""
        return None if self.outputs else self.last.own_column(number, column)

    @property
    def insert_only(self) -> bool:
        """Tells whether nothing that comes out is ever taken back."""
        return self.last.insert_only and not self.outputs

    @property
    def state_names(self) -> tuple[str, ...]:
        """The operator and the input of each table."""
        return tuple(f"{v.name}.{side}" for v in self.operators for side in v.description.state_names)

    # --- time --------------------------------------------------------------------------------

    @property
    def by_time(self) -> bool:
        """Tells whether an operator goes by time."""
        return any(vertex.description.by_time for vertex in self.operators)

    @property
    def by_clock(self) -> bool:
        """True if one of its operators goes by the clock."""
        return any(vertex.description.by_clock for vertex in self.operators)

    @property
    def by_event_time(self) -> bool:
        """Tells whether a watermark moves an operator."""
        return bool(self.timed)

    @property
    def timed(self) -> Mapping[str, Description]:
        """The operators that a watermark moves, by their names."""
        return {v.name: v.description for v in self.operators if v.description.by_event_time}

    @property
    def watermarked(self) -> tuple[str, ...]:
        """Names, for metrics, of what has a watermark of its own."""
        return tuple(f"{name}.{place}" for name, one in self.timed.items() for place in one.watermarked)

    def followed(self, name: str) -> tuple[str | None, ...]:
        """The operators whose output watermarks are those of an operator's inputs; None where rows say the time.

        Nothing that such a one emits from then on is older, in the column that is the input's event time.

        Args:
            name: the operator's.
        """
        below = {vertex.name: vertex.description for vertex in self.operators}
        vertex = next(vertex for vertex in self.operators if vertex.name == name)
        found = list[str | None]()
        for source, read, projection in vertex.edges:
            time = None
            if read in below and source.event_time is not None:
                time = _read_as(source.event_time, source, below[read], projection)
            found.append(read if time is not None and time.name in bounded_times(below[read]) else None)
        return tuple(found)

    # --- keys, as far as others ask for them -------------------------------------------------

    @property
    def equal_columns(self) -> list[tuple[str, ...]]:
        """None: columns are compared within the operators."""
        return []

    @property
    def compared_columns(self) -> list[tuple[int, str]]:
        """The columns of inputs that come from outside whose values an operator compares with others'."""
        numbers = {source.name: number for number, source in enumerate(self.inputs)}
        found = {
            (numbers[vertex.sources[side]], column): None
            for vertex in self.operators
            for side, column in vertex.description.compared_columns
            if vertex.sources[side] in numbers
        }
        return list(found)

    @functools.cached_property
    def shuffled_by(self) -> tuple[Shuffle, ...]:
        """The columns of the inputs that rows are partitioned by; empty means a single partition.

        They are values that each operator may be partitioned by and that every changelog within the dataflow carries,
        so what an operator reads is in its own partition already. Rows from outside are where they are for their
        operator alone: by all of its `Description.shuffled_by`, in their order.
        """
        shuffles = []
        for places in self._places:
            readers = [
                {v.description.shuffled_by[places[v.name]].columns[side] for v, side in self._readers(source.name)}
                for source in self.inputs
            ]
            if any(len(columns) > 1 for columns in readers):
                return ()
            kind = self.last.shuffled_by[places[self.operators[-1].name]].type
            shuffles.append(Shuffle(tuple(column for columns in readers for column in columns), kind))
        return tuple(shuffles)

    def shuffles_of(self, vertex: Vertex) -> tuple[Shuffle, ...]:
        """The columns of an operator's inputs that have the values of `shuffled_by`."""
        by = vertex.description.shuffled_by
        return tuple(by[places[vertex.name]] for places in self._places) if self.shuffled_by else ()

    @functools.cached_property
    def _places(self) -> tuple[Mapping[str, int], ...]:
        """Finds each value of `shuffled_by` in the `Description.shuffled_by` of each operator, by its place there."""
        found = [places for place in range(len(self.last.shuffled_by)) if (places := self._followed(place))]
        names = {source.name for source in self.inputs}
        outside = [vertex for vertex in self.operators if not names.isdisjoint(vertex.sources)]
        ordered = {tuple(places[v.name] for v in outside): places for places in found}
        for number, vertex in enumerate(outside):
            if sorted(key[number] for key in ordered) != list(range(len(vertex.description.shuffled_by))):
                return ()
            if any(key[number] != key[0] for key in ordered):
                return ()
        return tuple(places for _, places in sorted(ordered.items(), key=lambda item: item[0]))

    def _followed(self, place: int) -> Mapping[str, int] | None:
        """The places of one value in all operators, followed down from the last one; None where one has not got it."""
        places, below = {self.operators[-1].name: place}, {vertex.name: vertex.description for vertex in self.operators}
        for vertex in reversed(self.operators):
            if vertex.name not in places:  # an output beside the last operator
                return None
            by = vertex.description.shuffled_by[places[vertex.name]]
            for column, (source, name, projection) in zip(by.columns, vertex.edges, strict=True):
                if name not in below:
                    continue
                shown = _read_as(column, source, below[name], projection)
                ways = [
                    number
                    for number, its in enumerate(below[name].shuffled_by)
                    if shown is not None and its.type == by.type and below[name].carries(its, shown)
                ]
                if not ways or places.setdefault(name, ways[0]) not in ways:
                    return None
        return places

    def _readers(self, name: str) -> list[tuple[Vertex, int]]:
        """The operators that read an input or an operator, each with the number of its own input."""
        return [(v, side) for v in self.operators for side, source in enumerate(v.sources) if source == name]

    def layout(self, number: int) -> Layout:
        """The state layout of an input in the operator that reads it first."""
        vertex, side = self._readers(self.inputs[number].name)[0]
        return vertex.description.layout(side)

    @property
    def unique_key(self) -> tuple[str, ...] | None:
        """Columns that identify a row of the output."""
        return None if self.outputs else self.last.unique_key

    def order_of_last(self, order: Sequence[int]) -> list[int]:
        """The numbers of the last operator's inputs in the order of the first rows from outside that lead to each.

        Args:
            order: the numbers of the dataflow's own inputs.
        """
        first = {self.inputs[number].name: place for place, number in enumerate(order)}
        for vertex in self.operators:
            places = [first[name] for name in vertex.sources]
            first[vertex.name] = min(places)
        return sorted(range(len(places)), key=places.__getitem__)

    @property
    def times_may_be_null(self) -> bool:
        """Always true: each operator says so of its own inputs."""
        return True

    def why_no_backlog(self) -> str | None:
        """The reason why it cannot begin with a backlog."""
        return "of a dataflow each operator would have to begin with one"

    # --- in words ----------------------------------------------------------------------------

    @property
    def title(self) -> str:
        """The dataflow in one line, for people."""
        return f"dataflow of {', '.join(v.description.title for v in self.operators)}"

    def lines(self) -> list[str]:
        """Each operator in some lines, behind those that it reads."""
        lines = [f"dataflow: {len(self.operators)} operators over {', '.join(x.name for x in self.inputs)}"]
        for vertex in self.operators:
            head, *more = vertex.description.lines()
            lines += [line(vertex.name, head), *(f"  {one}" for one in more)]
        return [*lines, line("outputs", ", ".join(self.outputs))] if self.outputs else lines


def shared_columns(schemas: Sequence[pa.Schema]) -> list[tuple[dict[int, str], pa.DataType]]:
    """Columns for the rows of several schemas: each has one type, and carries of each schema one column at most.

    Args:
        schemas: of the rows.

    Returns:
        For each of them the column of each schema that has one there, by the schema's number, and the type.
    """
    columns: list[tuple[dict[int, str], pa.DataType]] = []
    for number, schema in enumerate(schemas):
        for field in schema:
            free = next((its for its, kind in columns if kind == field.type and number not in its), None)
            if free is None:
                columns.append(({number: field.name}, field.type))
            else:
                free[number] = field.name
    return columns


def bounded_times(description: Description) -> frozenset[str]:
    """The columns of an operator's output that hold no time before its output watermark.

    They are the event times of its inputs, of an ASOF or temporal join the left one, and of an aggregate the end of its
    windows.
    """
    if not description.by_event_time or description.behind_ms is None:
        return frozenset()
    closes = getattr(description, "closes", None)
    if closes is not None:
        return frozenset({closes})
    sides = description.inputs if description.interval is not None else description.inputs[:1]
    return frozenset(
        column.name
        for column in description.output
        for side, source in enumerate(sides)
        if source.event_time is not None and description.own_column(side, column) == source.event_time
    )


def _vertex(name: str, description: Description) -> Vertex:
    return Vertex(name, description, tuple(source.name for source in description.inputs))


_SHARED = ("unique_key", "row_kind", "sequence_by", "bad_rows", "updates")
"""What an operator's input has as the dataflow's input that it reads has it."""


def _check_edge(vertex: Vertex, source: Input, read: Input | Description, projection: Projection | None = None) -> None:
    """Refuses what does not have the columns, or the row kinds, that an operator takes there."""
    where = f"operator '{vertex.name}', input '{source.name}'"
    schema = read.schema if isinstance(read, Input) else read.values_schema
    if projection is not None:
        if isinstance(read, Input):
            raise DescriptionError(f"{where}: what comes from outside is filtered and projected there")
        kinds = projection.types(schema)
        schema = pa.schema(list(zip(source.schema.names, kinds, strict=False)))
    if not source.schema.equals(schema):
        raise DescriptionError(f"{where}: its columns are {_shown(source.schema)}, and it reads {_shown(schema)}")
    if isinstance(read, Input):
        for name in _SHARED:
            if getattr(source, name) != getattr(read, name):
                raise DescriptionError(f"{where}: {name} is {getattr(source, name)!r}, not {getattr(read, name)!r}")
        return
    if source.row_kind not in (None, ROW_KIND_COLUMN) or (source.row_kind is None and not read.insert_only):
        raise DescriptionError(f"{where}: it reads a changelog, whose row kinds are in {ROW_KIND_COLUMN!r}")
    if source.sequence_by is not None:
        raise DescriptionError(f"{where}: sequence_by= has no place: a changelog comes in its own order")
    if source.unique_key is not None and source.updates == "upsert":
        raise DescriptionError(f"{where}: a changelog retracts what it replaces: updates='retract'")


def _read_as(column: str, source: Input, below: Description, projection: Projection | None) -> OutputColumn | None:
    """The output column of an operator that another one reads as a column of its input; None for a computed one."""
    position: int = source.schema.get_field_index(column)
    output = below.output
    if projection is None:
        return output[position]
    root = projection.columns[position].root
    return next((x for x in output if isinstance(root, ColumnRef) and x.name == root.name), None)


def _shown(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)

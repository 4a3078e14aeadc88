"""The requests of a Spark task to a state server and to the directory, as JSON, and the layout of all inputs' rows."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gpu_ops.descriptions.dataflow import shared_columns
from gpu_ops.descriptions.description import Description
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.kinds import from_json
from gpu_ops.descriptions.times import WatermarkMs
from gpu_ops.errors import BadInputError, DescriptionError
from gpu_ops.fields import fits, hints_of
from gpu_ops.kernels import DeviceRows
from gpu_ops.spark.wire.connection import Handler, as_json
from gpu_ops.state.address import StateAddress

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Read = TypeVar("_Read", bound="DataclassInstance")


class SideRows(NamedTuple):
    """The rows of a micro-batch and their sequences, by input."""

    tables: tuple[pa.Table | DeviceRows, ...]
    sequences: tuple[npt.NDArray[np.int64], ...]
    """One integer per row: the sequence of its change, over all inputs."""


@dataclasses.dataclass(frozen=True)
class Wire:
    """The layout in which the rows of all inputs travel in one stream.

    Attributes:
        side: an int8 column: the number of the row's input; 0 is left, 1 right.
        sequence: an int64 column: the sequence of the row's change in the micro-batch, over all inputs.
        union_columns: ``(column of input 0 or None, ..., column of the last or None, union column)`` each: one physical
            column carries a column of input 0 in rows of input 0, and so on.
    """

    side: str
    sequence: str
    union_columns: tuple[tuple[str | None, ...], ...]

    @classmethod
    def of(cls, schemas: Sequence[pa.Schema]) -> tuple[Wire, pa.Schema]:
        """A layout for rows of several inputs, and its columns; one carries columns of a type, of each input one.

        Args:
            schemas: of each input's rows, with their row kind.
        """
        columns, count = shared_columns(schemas), range(len(schemas))
        union = tuple((*(its.get(n) for n in count), f"c{place}") for place, (its, _) in enumerate(columns))
        fixed = [pa.field("__side", pa.int8()), pa.field("__order", pa.int64())]
        fields = [pa.field(f"c{place}", kind) for place, (_, kind) in enumerate(columns)]
        return cls("__side", "__order", union), pa.schema([*fixed, *fields])

    def to_dict(self) -> dict[str, Any]:
        """The layout for JSON, as in logs of state folders: a union column is a lane there, the sequence an order."""
        return {"side": self.side, "order": self.sequence, "lanes": self.union_columns}

    def to_json(self) -> str:
        """The layout as JSON text."""
        return as_json(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> Wire:
        """The inverse of `to_json`."""
        return cls.from_dict(json.loads(text))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Wire:
        """Reads a layout from parsed JSON.

        Raises:
            DescriptionError: the JSON is no layout.
        """
        try:
            return cls(_text(data, "side"), _text(data, "order"), tuple(map(_union_column, data["lanes"])))
        except (KeyError, TypeError, ValueError) as error:
            raise DescriptionError(f"no mapping of columns to union columns: {error!r}") from error

    def check(self, description: Description, schema: pa.Schema) -> None:
        """Refuses a stream that cannot carry the inputs.

        Types of columns are the engine's to check.

        Args:
            description: the description with the inputs.
            schema: the stream's schema.

        Raises:
            DescriptionError: the union columns do not carry each column of each input exactly once.
            BadInputError: the stream's columns are not the side, the sequence and the union columns.
        """
        for union_column in self.union_columns:
            if len(union_column) != len(description.inputs) + 1:
                raise DescriptionError(f"union column {union_column!r} is not one of {len(description.inputs)} inputs")
        for side, source in enumerate(description.inputs):
            names = [*source.schema.names, *([source.row_kind] if source.row_kind is not None else [])]
            carried = [union_column[side] for union_column in self.union_columns if union_column[side] is not None]
            if sorted(names) != sorted(c for c in carried if c is not None):
                raise DescriptionError(
                    f"input '{source.name}': the union columns carry {', '.join(map(repr, carried)) or 'nothing'}; "
                    f"its columns are {', '.join(map(repr, names))}"
                )
        named = [self.side, self.sequence, *(str(union_column[-1]) for union_column in self.union_columns)]
        if sorted(schema.names) != sorted(named):
            raise BadInputError(
                _all(description),
                None,
                f"the stream has the columns {', '.join(schema.names)}; expected are {', '.join(named)}",
            )
        for name, wanted_type in ((self.side, pa.int8()), (self.sequence, pa.int64())):
            if schema.field(name).type != wanted_type:
                raise BadInputError(
                    _all(description), name, f"has type {schema.field(name).type}, {wanted_type} is expected"
                )

    def union_column(self, side: int, column: str | None) -> str:
        """The name of the union column that carries a column of an input."""
        return next(str(carried[-1]) for carried in self.union_columns if carried[side] == column)

    def split(self, description: Description, table: pa.Table) -> SideRows:
        """Splits a stream into the rows of each input, in their order of arrival, under their own column names.

        Args:
            description: the description with the inputs.
            table: n rows of the stream.

        Raises:
            BadInputError: a null or unknown side, or a null in the sequence.
        """
        for name in (self.side, self.sequence):
            if table[name].null_count:
                raise BadInputError(_all(description), name, "holds nulls", "null")
        side, sequence = (_numpy(table[name]) for name in (self.side, self.sequence))
        known = (side >= 0) & (side < len(description.inputs))
        if not bool(known.all()):
            valid = (
                "0 (left) or 1 (right)"
                if description.sides == ("left", "right")
                else f"a number below {len(description.inputs)}"
            )
            raise BadInputError(_all(description), self.side, f"is {valid}", int(side[~known][0]))
        tables: list[pa.Table] = []
        sequences: list[npt.NDArray[np.int64]] = []
        for number, source in enumerate(description.inputs):
            rows = np.flatnonzero(side == number)
            sequences.append(sequence if rows.size == side.size else sequence[rows])
            tables.append(self._take(source, number, table, rows))
        return SideRows(tuple(tables), tuple(sequences))

    def _take(self, source: Input, side: int, table: pa.Table, rows: npt.NDArray[np.int64]) -> pa.Table:
        # Shuffle blocks are one-sided, so often a whole run of rows is, and needs no copy.
        whole = bool(rows.size) and int(rows[-1] - rows[0]) + 1 == rows.size
        index = None if whole else pa.array(rows)
        columns = {}
        for carried in self.union_columns:
            name = carried[side]
            if name is not None:
                column = table[carried[-1]]
                columns[name] = column.slice(rows[0], rows.size) if index is None else column.take(index)
        return pa.table(columns).select([c for c in (*source.schema.names, source.row_kind) if c is not None])


@dataclasses.dataclass(frozen=True)
class ApplyCommand:
    """The command of a DoExchange call: apply one micro-batch to one partition.

    Attributes:
        join_id: the join, unique in the Spark application.
        state: the state folder, or None to keep the state in memory only.
        description: the join as its `to_json` writes it.
        query_id: Spark's id of the query.
        batch_id: the micro-batch, from 0.
        partition: the partition's number.
        partitions: the number of partitions.
        backend: ``"auto"``, ``"cpu"`` or ``"gpu"``.
        wire: the layout in which the inputs travel.
        options: ``snapshot_every`` (micro-batches), ``memory_limit`` (bytes), ``tiny`` (tests), ``backlog``: the
            join may begin with one.
        counted: whether a message with the number of rows, ``{"rows": n}``, ends them; without it the stream has
            broken off.
        watermark: the watermark of the micro-batch, ms since the epoch, for an operator by event time; of a dataflow by
            the names of its operators.
        clock_ms: the micro-batch's time, the same for all partitions; None: the server's.
        backlog: whether the micro-batch is backlog.
        join_number: the join's number in its query, see `gpu_ops.state.manifest.Manifest`.
        union_order: the order in which the inputs stand in Spark's union, see there.
        reads_once: whether a source of several inputs is read once, see there.
        keeps_copies: whether records may name copies of Parquet files, see there; of a folder that is new.
        call: a name of this exchange, by which its progress is asked for.
        shared_in: a run of the query in which several operators take this micro-batch's changes, so that each asks for
            them: they are computed once.
        answers: the micro-batch's folder on this machine, in which the answer may be left (`gpu_ops.state.blocks`).
        least_bytes: the size from which an answer is left there.
        share: which part of the changes is asked for, from 0.
        shares: the number of parts, each of which another Spark task takes; all of these bring the same rows.
        rows: how many these are, where there are several parts.
        files: a `gpu_ops.spark.wire.files_request.FilesRequest`: where the server's backend can, it writes the changes
            into files, and the answer names these. Then the first part is all of the changes, in files or not.
        ahead: these rows are probably those of the next micro-batch, which may be prepared; there are no changes yet.
    """

    join_id: str
    state: StateAddress | None
    description: str
    query_id: str
    batch_id: int
    partition: int
    partitions: int
    backend: str
    wire: Wire
    options: Mapping[str, Any]
    counted: bool = False
    watermark: WatermarkMs = None
    clock_ms: int | None = None
    backlog: bool = False
    join_number: int | None = None
    union_order: str | None = None
    reads_once: bool = False
    keeps_copies: bool = False
    call: str | None = None
    shared_in: str | None = None
    answers: str | None = None
    least_bytes: int = 0
    share: int = 0
    shares: int = 1
    rows: int = 0
    files: Mapping[str, Any] | None = None
    ahead: bool = False

    def to_json(self) -> str:
        """The command as JSON text."""
        state = None if self.state is None else self.state.secret_uri
        return as_json({"op": "apply", **vars(self), "state": state, "wire": self.wire.to_dict()})

    @classmethod
    def parse(cls, content: bytes) -> ApplyCommand:
        """Reads and checks a command from JSON.

        Raises:
            DescriptionError: the JSON is no command of this version.
        """
        try:
            data = dict(json.loads(content))
            op, state, wire = data.pop("op"), data.pop("state"), data.pop("wire")
            address = None if state is None else StateAddress.of(state)
            command = cls(**data, state=address, wire=Wire.from_dict(wire))
            _check_types(command)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            if isinstance(error, DescriptionError):
                raise
            raise DescriptionError(f"not a command of this version of gpu-join: {error!r}") from error
        if op != "apply":
            raise DescriptionError(f"no operation {op!r}; there is apply")
        for name, value in command.options.items():
            if name not in _OPTIONS or not fits(value, _OPTIONS[name], 0):
                raise DescriptionError(f"no option {name}={value!r}; there are {', '.join(_OPTIONS)}")
        return command


def _check_types(request: DataclassInstance) -> None:
    """Refuses a request read from JSON whose values have the wrong types or are out of range."""
    for name, hint in hints_of(type(request)).items():
        value = getattr(request, name)
        least = 0 if name in _NOT_NEGATIVE else -1 << 63
        if not fits(value, hint, least, (1 << 63) - 1):
            raise TypeError(f"{name}={value!r}")
    for one, of in (("partition", "partitions"), ("share", "shares")):
        if getattr(request, one, 0) >= getattr(request, of, 1):
            raise ValueError(f"no {one} {getattr(request, one)} of {getattr(request, of)}")


_NOT_NEGATIVE: Final = (
    "batch_id", "partition", "partitions", "least_bytes", "join_number", "share", "shares", "rows", "file_bytes",
    "rows_per_group",
)  # fmt: skip

_OPTIONS: Final[Mapping[str, Any]] = {
    "snapshot_every": int | None, "memory_limit": int | None, "tiny": bool, "backlog": bool
}  # fmt: skip
"""The options of an `ApplyCommand` and their types."""


def parse_join(description: str) -> Description:
    """Reads the description of an operator from JSON.

    Raises:
        DescriptionError: the text describes no operator.
    """
    try:
        return from_json(description)
    except DescriptionError:
        raise
    except Exception as error:  # whatever a damaged text leads to: KeyError, ArrowInvalid, binascii.Error ...
        raise DescriptionError(f"not a join of this version of gpu-join: {error!r}") from error


def _union_column(names: Sequence[Any]) -> tuple[str | None, ...]:
    if not (all(isinstance(name, str | None) for name in names) and len(names) > 1 and isinstance(names[-1], str)):
        raise TypeError(f"union column {names!r}")
    return tuple(names)


def _all(description: Description) -> str:
    """The names of all inputs, to be put between quotation marks."""
    *others, last = (source.name for source in description.inputs)
    return "', '".join(others) + f"' and '{last}" if others else last


def _text(data: Mapping[str, Any], name: str) -> str:
    value = data[name]
    if not isinstance(value, str):
        raise TypeError(f"{name}={value!r}")
    return value


def _numpy(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    values: npt.NDArray[Any] = column.to_numpy()
    return values


# --- what a task asks the driver's directory -----------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LocateRequest:
    """Request to the directory for the server of a partition.

    Attributes:
        join_id: the join, unique in the Spark application: its plan's id and its query's.
        query_id: Spark's id of the query.
        run_id: Spark's id of the query's run.
        batch_id: the micro-batch.
        state: the state folder, or None.
        backend: ``"auto"``, ``"cpu"`` or ``"gpu"``.
        partition: the partition's number.
        partitions: the number of partitions.
        attempt: Spark's id of the task attempt.
        evaluation: an id that is new each time the task runs the join.
        failed: the location of a server that did not answer, or None.
        backlog: whether the join may begin with one.
        timed: whether the join has watermarks.
        waits: whether to wait for a server that has to be started; one that does not asks again where there is none.
    """

    join_id: str
    query_id: str
    run_id: str
    batch_id: int
    state: str | None
    backend: str
    partition: int
    partitions: int
    attempt: int
    evaluation: str
    failed: str | None = None
    backlog: bool = False
    timed: bool = False
    waits: bool = True


@dataclasses.dataclass(frozen=True)
class BatchContext:
    """The facts of a micro-batch that are the same in all partitions of a join; attributes as of `ApplyCommand`."""

    join_number: int | None = None
    watermark: WatermarkMs = None
    clock_ms: int | None = None
    backlog: bool = False
    shared_in: str | None = None


@dataclasses.dataclass(frozen=True)
class LocateReply:
    """The directory's reply: the server's location, and the facts of the micro-batch that go with the command.

    Attributes:
        location: None where no server runs, and the request does not wait.
        context: these facts.
    """

    location: str | None
    context: BatchContext


@dataclasses.dataclass(frozen=True)
class EventTimes:
    """The event times that one partition has seen after a micro-batch.

    Attributes:
        latest: the latest event time that it has ever seen of each input, or of each part of the only one, ms. Of a
            dataflow, those of its operators by event time behind each other; likewise the next.
        rows: per input, whether the micro-batch brought rows.
    """

    latest: tuple[int | None, ...]
    rows: tuple[bool, ...]

    @classmethod
    def of(cls, latest: Sequence[int | None], rows: Sequence[bool]) -> EventTimes:
        """Makes a report of sequences that JSON has."""
        return cls(tuple(latest), tuple(rows))


@dataclasses.dataclass(frozen=True)
class ReportRequest:
    """Report of one partition to the directory after a micro-batch: its metrics and event times.

    Attributes:
        join_id: the join, as in `LocateRequest`, like the next four.
        run_id: Spark's id of the query's run.
        batch_id: the micro-batch.
        partition: the partition's number.
        partitions: the number of partitions.
        numbers: its metrics, as `gpu_ops.spark.metrics.metrics.pack` has them.
        observed: whether Spark's progress has the metrics.
        times: the event times, for a join by event time.
    """

    join_id: str
    run_id: str
    batch_id: int
    partition: int
    partitions: int
    numbers: Sequence[int | None]
    observed: bool
    times: EventTimes | None = None


@dataclasses.dataclass(frozen=True)
class ReportReply:
    """The directory's reply to a report: the metrics of all partitions once all are observed, else None."""

    all: Sequence[Sequence[int | None]] | None = None


_NESTED: Final[Mapping[type, Mapping[str, Callable[[Any], object]]]] = {
    LocateReply: {"context": lambda data: read(BatchContext, data)},
    ReportRequest: {"times": lambda data: None if data is None else EventTimes.of(data["latest"], data["rows"])},
}
"""The attributes that are objects within another object, and their readers."""


def read(kind: type[_Read], data: Mapping[str, Any]) -> _Read:
    """Reads a request or reply from parsed JSON, the inverse of `as_json`.

    Raises:
        DescriptionError: the JSON is no such message.
    """
    try:
        nested = {name: make for name, make in _NESTED.get(kind, {}).items() if name in data}
        message = kind(**{**data, **{name: make(data[name]) for name, make in nested.items()}})
        _check_types(message)
    except (KeyError, TypeError, ValueError) as error:
        raise DescriptionError(f"no {kind.__name__} of this version of gpu-join: {error!r}") from error
    return message


def answering(kind: type[_Read], answer: Callable[[_Read], DataclassInstance]) -> Handler:
    """Makes an action of a `FlightServer` from a function that answers requests of one class, one after the other.

    A call costs more than what is asked in it, so one has many: ``{"each": [...]}``, as has its answer.
    """

    def answer_each(request: Mapping[str, Any], _: object) -> dict[str, Any]:
        each = request.get("each")
        if not isinstance(each, list):
            raise DescriptionError('this action takes {"each": [...]}')
        return {"each": [answer(read(kind, one)) for one in each]}

    return answer_each

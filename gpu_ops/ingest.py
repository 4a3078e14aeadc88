"""What comes in: checked before any state changes, decoded, and put in sequence, the micro-batch's total order."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol, TypeGuard

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gpu_ops.arrays import Mask
from gpu_ops.descriptions.changelog import (
    INSERT,
    KIND_BYTES,
    SHORT_STRINGS,
    SPELLINGS,
    UNKNOWN,
    codes_of,
    decode_row_kinds,
    places_of,
)
from gpu_ops.descriptions.description import Description
from gpu_ops.descriptions.frames import UnfitError, as_table, cast_exactly, index_names
from gpu_ops.descriptions.inputs import Input, check_sequence
from gpu_ops.descriptions.times import BEFORE_ALL, as_integers, farthest, too_far
from gpu_ops.errors import BadInputError
from gpu_ops.kernels import DataFrames, DeviceRows, Frame, HeldRows, Kernels
from gpu_ops.layouts import MAX_CHANGES
from gpu_ops.values import readable, sample, wrong_text


class ArrowStream(Protocol):
    """A table: of Arrow, pandas, polars, cuDF, DuckDB and others."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Gives the rows by Arrow's C data interface."""


_CLOSE: Final = 8
"""Numbers of a sequence lie close together if at most every so manieth of those between them is there."""

_LEAST_AHEAD: Final = 1 << 20
"""Bytes of rows that are copied to a card while they are looked at: fewer are looked at in no time."""

_Fault = tuple[str, str, object, Mask]


@dataclasses.dataclass(frozen=True)
class Ingested:
    """The changes of one input, in sequence.

    Attributes:
        rows: n rows of the input's schema, by ascending sequence; where they came in.
        kinds: n row-kind codes.
        sequence: n places in the micro-batch's total order, over all inputs.
        tagged: rows to hand out as they are.
        times: n event times in the unit of the join's ``time_type``, where it goes by them; `BEFORE_ALL` for none.
        ties: n numbers that order rows of one time, where the description names a column of them.
        copied: rows that are in the backend's memory already, beside their table.
    """

    rows: pa.Table | HeldRows
    kinds: npt.NDArray[np.int8]
    sequence: npt.NDArray[np.int64]
    rows_in: int
    bad_rows: int
    tagged: pa.Table | None
    times: npt.NDArray[np.int64] | None = None
    ties: npt.NDArray[np.int64] | None = None
    copied: tuple[pa.Table, Frame] | None = None

    def take(self, order: npt.NDArray[np.int64]) -> Ingested:
        """The changes at these positions; their sequence is left as it was."""
        rows = self.rows.take(pa.array(order) if isinstance(self.rows, pa.Table) else order)
        return dataclasses.replace(self, rows=rows, kinds=self.kinds[order])

    def pick(self, mask: npt.NDArray[np.bool_]) -> Ingested:
        """Keeps the changes whose flag is set."""
        rows = self.rows
        return dataclasses.replace(
            self,
            rows=rows.filter(pa.array(mask)) if isinstance(rows, pa.Table) else rows.take(np.flatnonzero(mask)),
            kinds=self.kinds[mask],
            sequence=self.sequence[mask],
            times=None if self.times is None else self.times[mask],
            ties=None if self.ties is None else self.ties[mask],
        )

    @property
    def table(self) -> pa.Table:
        """The rows in Arrow, copied out if they are in the backend's memory."""
        return self.rows if isinstance(self.rows, pa.Table) else self.rows.table()

    def column(self, name: str) -> pa.ChunkedArray:
        """One column in Arrow."""
        return self.rows[name] if isinstance(self.rows, pa.Table) else self.rows.column(name)

    def frame(self, kernels: Kernels) -> Frame:
        """The rows in the backend's memory."""
        if self.copied is not None and self.copied[0] is self.rows:
            return self.copied[1]
        return kernels.frame(self.rows) if isinstance(self.rows, pa.Table) else self.rows.frame


def repeatable(description: Description, batches: Sequence[ArrowStream | None]) -> list[Any]:
    """Makes an Arrow table of each batch that may give its rows only once; DataFrames on a card stay there.

    Raises:
        BadInputError: what is none of these.
    """
    stays = [
        batch is None or isinstance(batch, pa.Table) or _is_held(batch) or hasattr(batch, "to_pylibcudf")
        for batch in batches
    ]
    given = zip(description.inputs, batches, stays, strict=True)
    return [batch if stay else _to_table(source, batch) for source, batch, stay in given]


def _is_held(batch: ArrowStream | None) -> TypeGuard[DeviceRows]:
    """True for rows that the backend has made of something itself."""
    return hasattr(type(batch), "invalid_text")  # a DataFrame may have a column of any name


def ingest(
    description: Description,
    batches: Sequence[ArrowStream | None],
    sequences: Sequence[npt.ArrayLike | None],
    dataframes: DataFrames | None = None,
    ahead: Callable[[pa.Table], Frame] | None = None,
) -> tuple[Ingested, ...]:
    """Check, decode and order the changes of all inputs.

    Args:
        description: its description.
        batches: one per input; of rows in the backend's memory those that `DataFrames.as_rows` gave.
        sequences: one per input: integers, one a change, which order the changes of all inputs; None: by arrival.
        dataframes: how the backend takes rows that are in its memory already, if it can.
        ahead: copies rows to the backend's memory, where that goes on while they are looked at.

    Raises:
        BadInputError: names the input, the column and a sample value.
    """
    sides: list[Ingested] = []
    start = 0
    for source, batch, sequence in zip(description.inputs, batches, sequences, strict=True):
        rows = None
        if dataframes is not None and not (batch is None or isinstance(batch, pa.Table)):
            rows = batch if _is_held(batch) else dataframes.rows(batch, source.schema, source.row_kind)
        decoded = None if rows is None else _decode_there(source, rows, sequence, start, description)
        if decoded is None:
            decoded = _decode(source, batch, sequence, start, description, ahead)
        start += decoded.rows_in
        sides.append(decoded)
    _check_size(description, sides)
    ordered = _in_total_order(description.inputs, sides)
    return _as_taken(description, ordered)


def _check_size(description: Description, changes: Sequence[Ingested]) -> None:
    """Refuses more changes than a micro-batch may have."""
    total = sum(change.kinds.size for change in changes)
    if total > MAX_CHANGES:
        raise BadInputError(description.inputs[0].name, None, f"a micro-batch of {total} changes; use more partitions")


def ingest_checked(
    description: Description, changes: Sequence[Ingested]
) -> tuple[tuple[Ingested, ...], npt.NDArray[np.int64]]:
    """Changes that have been taken in before, or that another operator made, as an operator takes them.

    They have the columns and types that its inputs declare, row kinds that are known, and text that is valid.

    Args:
        description: the operator's description.
        changes: of each of its inputs, in sequence, which orders them among all inputs, whatever its numbers.

    Returns:
        The changes, and for each position in their total order the number that their sequence had before.

    Raises:
        BadInputError: as `ingest`.
    """
    admitted = []
    for source, change in zip(description.inputs, changes, strict=True):
        wrong = _mask_of(source, _faults(source, change.rows, description, text=False))
        bad = 0 if wrong is None else int(wrong.sum())
        admitted.append(change if wrong is None else dataclasses.replace(change.pick(~wrong), bad_rows=bad))
    _check_size(description, admitted)
    before = np.sort(np.concatenate([change.sequence for change in admitted]), kind="stable")  # few ascending runs
    return _as_taken(description, _ranked(admitted, None)), before


def _as_taken(description: Description, ordered: Sequence[Ingested]) -> tuple[Ingested, ...]:
    """Changes in their total order with the times and ties of their join; refuses retractions where there are none."""
    for number, (source, changes) in enumerate(zip(description.inputs, ordered, strict=True)):
        wrong = (
            np.flatnonzero(changes.kinds != INSERT) if number in description.insertions_only else np.empty(0, np.int64)
        )
        if wrong.size:
            found = SHORT_STRINGS[changes.kinds[wrong[0]]]
            raise BadInputError(source.name, source.row_kind, "this input takes insertions only", found)
    return with_times(description, ordered)


def with_times(description: Description, changes: Sequence[Ingested]) -> tuple[Ingested, ...]:
    """The changes of all inputs with the times and ties that their join goes by."""
    found = []
    for number, (source, change) in enumerate(zip(description.inputs, changes, strict=True)):
        times = ties = None
        if source.event_time is not None and description.time_type is not None:
            times = _numbers(
                change.column(source.event_time), functools.partial(as_integers, kind=description.time_type)
            )
        column = description.ties_by(number)
        if column is not None:
            ties = _numbers(change.column(column), lambda known: known.cast(pa.int64()).to_numpy())
        found.append(change if times is ties is None else dataclasses.replace(change, times=times, ties=ties))
    return tuple(found)


def _numbers(
    column: pa.ChunkedArray, integers: Callable[[pa.ChunkedArray], npt.NDArray[np.int64]]
) -> npt.NDArray[np.int64]:
    """A column's integers, `BEFORE_ALL` for nulls."""
    if not column.null_count:
        return integers(column)
    known = column.is_valid().to_numpy()
    found = np.full(len(column), BEFORE_ALL)
    found[known] = integers(column.drop_null())
    return found


def _decode(  # noqa: PLR0917
    source: Input,
    batch: Any,
    given_sequence: npt.ArrayLike | None,
    start: int,
    description: Description,
    ahead: Callable[[pa.Table], Frame] | None,
) -> Ingested:
    """Columns and row kinds checked; the sequence is the caller's yet."""
    if batch is None:
        batch = source.schema.empty_table()
        if source.row_kind is not None:
            batch = batch.append_column(source.row_kind, pa.array([], pa.string()))
    batch = _to_table(source, batch)
    _check_columns(source, batch)
    rows = batch.num_rows
    sequence = _checked_sequence(source, given_sequence, start, rows)
    table = _as_declared(source, batch)
    kind_column = None if source.row_kind is None else _row_kinds(batch[source.row_kind])
    copied = None
    if ahead is not None and source.bad_rows == "fail" and table.nbytes >= _LEAST_AHEAD:
        looked = _beside().submit(_bad_rows, source, table, kind_column, description)
        try:
            copied = table, ahead(table)
        finally:
            wrong = looked.result()  # none: a row that is bad is an error here
    else:
        wrong = _bad_rows(source, table, kind_column, description)
    tagged, bad = None, 0
    if wrong is not None:
        bad, keep = int(wrong.sum()), pa.array(~wrong)
        if source.bad_rows == "tag":
            tagged = _readable(table.filter(pa.array(wrong)))
        table, sequence = table.filter(keep), sequence[~wrong]
        kind_column = None if kind_column is None else pc.array_filter(kind_column, keep)
    if source.row_kind is None:
        kinds = np.full(table.num_rows, INSERT, np.int8)
    else:
        kinds = decode_row_kinds(
            kind_column,
            input_name=source.name,
            column_name=source.row_kind,
            has_unique_key=source.unique_key is not None,
        )
    return Ingested(table, kinds, sequence, rows, bad, tagged, copied=copied)


def _readable(table: pa.Table) -> pa.Table:
    """Bad rows, with text that can be shown."""
    return pa.Table.from_arrays([readable(column) for column in table.columns], schema=table.schema)


@functools.cache
def _beside() -> ThreadPoolExecutor:
    """Threads that look at rows while others copy them."""
    return ThreadPoolExecutor(4, "checks")


def _decode_there(
    source: Input, rows: DeviceRows, given_sequence: npt.ArrayLike | None, start: int, description: Description
) -> Ingested | None:
    """Decodes rows in the backend's memory like `_decode`.

    Returns:
        None where something is an error: `_decode` says which, and looks at all rows for a sample.
    """
    size = len(rows)
    sequence = _checked_sequence(source, given_sequence, start, size)
    needed = [*(source.unique_key or ()), *_needed_times(source, description)]
    if description.chosen_by is not None:
        needed.append(description.chosen_by)
        if pa.types.is_floating(source.schema.field(description.chosen_by).type):
            return None  # NaN is known on the host only
    if source.parts is not None:
        return None
    wrong = np.zeros(size, np.bool_)
    for field in source.schema:
        missing = rows.nulls(field.name) if field.name in needed or not field.nullable else None
        if missing is not None and not field.nullable:
            return None
        finer = _finer(source, field, description)
        far = None if finer is None else rows.beyond(field.name, farthest(field.type, finer))
        for mask in (missing, far, rows.invalid_text(field.name)):
            wrong |= False if mask is None else mask
    places = None if source.row_kind is None else rows.words(SPELLINGS)
    if places is not None:
        wrong |= places < 0
    tagged, bad = None, int(wrong.sum())
    if bad and source.bad_rows == "fail":
        return None
    if bad:
        tagged = _readable(rows.take(np.flatnonzero(wrong)).table()) if source.bad_rows == "tag" else None
        rows, sequence = rows.take(np.flatnonzero(~wrong)), sequence[~wrong]
        places = None if places is None else places[~wrong]
    if places is None:
        kinds: npt.NDArray[np.int8] | None = np.full(len(rows), INSERT, np.int8)
    else:
        kinds = codes_of(places, has_unique_key=source.unique_key is not None)
    return None if kinds is None else Ingested(rows, kinds, sequence, size, bad, tagged)


def _to_table(source: Input, batch: Any) -> pa.Table:
    """Reads the rows of others than Arrow's tables."""
    if not hasattr(batch, "__arrow_c_stream__"):
        problem = f"takes an Arrow table, or a DataFrame with __arrow_c_stream__, not {type(batch).__name__}"
        raise BadInputError(source.name, None, problem)
    try:
        return as_table(batch, source.schema.names)
    except (TypeError, ValueError, NotImplementedError, pa.ArrowException) as error:
        problem = f"a {type(batch).__name__} that does not become an Arrow table: {error}"
        raise BadInputError(source.name, None, problem) from None


def _check_columns(source: Input, batch: pa.Table) -> None:
    wanted = [*source.schema.names, *([source.row_kind] if source.row_kind is not None else [])]
    there = batch.column_names
    for name in wanted:
        if name not in there:
            raise BadInputError(source.name, name, f"is missing; there are {', '.join(there) or 'no columns'}")
    for name in there:
        if there.count(name) > 1:
            raise BadInputError(source.name, name, "appears twice")
        if name not in wanted:
            problem = f"is not expected; expected are {', '.join(wanted)}"
            if name in index_names(batch):
                problem = f"is the index of a pandas DataFrame, which {problem}: reset_index(drop=True) leaves it out"
            raise BadInputError(source.name, name, problem)


def _as_declared(source: Input, batch: pa.Table) -> pa.Table:
    """The input's columns in the types they are declared in."""
    columns = []
    for field in source.schema:
        column = batch[field.name]
        if column.type != field.type:
            try:
                made = cast_exactly(column, field.type)
                made.validate()  # of nested types of nulls Arrow's cast makes arrays that end beyond their elements
            except (UnfitError, pa.ArrowException) as error:
                at = error.at if isinstance(error, UnfitError) else None
                problem = str(error) if at is None else f"cannot be taken as {field.type}: {error}"
                if at is None:  # Arrow filters no views of text: the first value is looked for
                    at = next(iter(pc.indices_nonzero(column.is_valid())), pa.scalar(0)).as_py()
                raise BadInputError(source.name, field.name, problem, sample(column, at)) from None
            column = made
        if not field.nullable and column.null_count:
            raise BadInputError(source.name, field.name, "is declared NOT NULL and holds nulls", "null")
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=source.schema)


def _row_kinds(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column of row kinds as bytes or text, be it one of categories; of something else as it is, for an error."""
    if column.type == KIND_BYTES or pa.types.is_large_string(column.type):
        return column
    if pa.types.is_null(column.type) and len(column):
        return column
    try:
        return cast_exactly(column, pa.string())
    except UnfitError:
        return column


def _checked_sequence(source: Input, sequence: npt.ArrayLike | None, start: int, rows: int) -> npt.NDArray[np.int64]:
    """The sequence that the caller gives an input's changes; by default that of their arrival, from ``start`` on."""
    if sequence is None:
        return np.arange(start, start + rows, dtype=np.int64)
    try:
        numbers = np.asarray(sequence)
    except (ValueError, TypeError, pa.ArrowException):
        numbers = np.asarray(None)
    kind, most = numbers.dtype.kind, np.iinfo(np.int64).max
    integers = kind == "i" or (kind == "u" and bool((numbers <= most).all()))
    if numbers.ndim != 1 or (numbers.size and not integers):
        raise BadInputError(source.name, None, "its order must be one integer per row")
    if numbers.size != rows:
        raise BadInputError(source.name, None, f"its order has {numbers.size} entries for {rows} rows")
    return numbers.astype(np.int64, copy=False)


def _bad_rows(source: Input, table: pa.Table, kinds: pa.ChunkedArray | None, description: Description) -> Mask | None:
    """Mask of rows that cannot be joined, None for none; they are an error unless they may go."""
    bad = _mask_of(source, _faults(source, table, description))
    if source.row_kind is not None and source.bad_rows != "fail":
        unknown: Mask = places_of(kinds, input_name=source.name, column_name=source.row_kind, strict=False) == UNKNOWN
        if unknown.any():
            bad = unknown if bad is None else bad | unknown
    return bad


def _mask_of(source: Input, faults: Iterable[_Fault]) -> Mask | None:
    """Mask of rows with a fault, None for none; the first fault is an error unless such rows may go."""
    bad: Mask | None = None
    for name, problem, shown, wrong in faults:
        if source.bad_rows == "fail":
            raise BadInputError(source.name, name, problem, shown)
        bad = wrong if bad is None else bad | wrong
    return bad


def _faults(
    source: Input, table: pa.Table | HeldRows, description: Description, *, text: bool = True
) -> Iterator[_Fault]:
    """Lists the reasons why rows cannot be joined: the column, the problem, a sample, and flags of the rows.

    Args:
        source: the input.
        table: its rows.
        description: whose input it is.
        text: whether its text may be invalid.
    """
    needed = [(name, "is part of the unique key and holds nulls") for name in source.unique_key or ()]
    needed += [
        (name, f"is the {'event time' if name == source.event_time else 'end of a window'} and holds nulls")
        for name in _needed_times(source, description)
    ]
    for name, problem in needed:
        column = table.column(name)
        if column.null_count:
            yield name, problem, "null", column.is_null().to_numpy()
    if source.parts is not None:
        numbers = table.column(source.parts.column)
        known = pa.array(range(len(source.parts.delays_ms)), numbers.type)
        wrong = pc.invert(pc.is_in(numbers, value_set=known))
        if pc.any(wrong).as_py():
            shown = numbers.filter(wrong)[0].as_py()
            yield source.parts.column, f"is the number of a part, below {len(known)}", shown, wrong.to_numpy()
    chosen = description.chosen_by
    if chosen is not None:
        without = pc.is_null(table.column(chosen), nan_is_null=True)
        if pc.any(without).as_py():
            key = {name: table.column(name).filter(without)[0].as_py() for name in source.unique_key or ()}
            yield chosen, "nothing to order by: null or NaN in the row of", key, without.to_numpy()
    for field in source.schema:
        name, finer = field.name, _finer(source, field, description)
        invalid = wrong_text(table.column(name)) if text else None
        if invalid is not None:
            yield name, "holds text that is not valid UTF-8", invalid[1], invalid[0]
        far = None if finer is None else too_far(table.column(name), finer)
        if far is not None:
            shown = table.column(name).cast(pa.int64()).filter(pa.array(far))[0].as_py()
            yield name, f"is too far from 1970 to be compared in {finer}", shown, far


def _needed_times(source: Input, description: Description) -> tuple[str, ...]:
    """The columns with times that a row cannot be without."""
    return () if description.times_may_be_null else description.times_of(source)


def _finer(source: Input, field: pa.Field, description: Description) -> pa.DataType | None:
    """The type that a column's times have to reach in, to be compared; None where all do."""
    finer = description.time_type if field.name in description.times_of(source) else None
    if finer is None and pa.types.is_timestamp(field.type) and field.type.unit in ("s", "ms"):
        return pa.timestamp("us", field.type.tz)
    return finer


def _in_total_order(inputs: Sequence[Input], sides: Sequence[Ingested]) -> list[Ingested]:
    """Each input by its own sequence column, and sequences over all inputs instead of those given."""
    by, kind = [source.sequence_by for source in inputs], check_sequence(inputs)
    if kind is not None:
        values = [side.column(name) for side, name in zip(sides, by, strict=True) if name is not None]
        values = [v if v.type == kind else v.cast(kind) for v in values]
        return _ranked(sides, pa.chunked_array([chunk for v in values for chunk in v.chunks], kind))
    own = [_by_own_sequence(s, name) if name is not None else s for s, name in zip(sides, by, strict=True)]
    return _ranked(own, None)


def _by_own_sequence(side: Ingested, column: str) -> Ingested:
    """The input's changes by its sequence column; the numbers of their sequence stay the same."""
    numbers = np.sort(side.sequence)
    order = _order(side.column(column), side.sequence)
    return dataclasses.replace(side.take(order), sequence=numbers)


def _order(by: pa.ChunkedArray, sequence: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The positions that sort by a column, nulls first, and by sequence where it is equal."""
    # a column of its own puts nulls first: how to ask pyarrow for that differs between its versions
    columns = {"known": by.is_valid()} if by.null_count else {}
    table = pa.table({**columns, "by": by, "sequence": sequence})
    order: npt.NDArray[np.int64] = pc.sort_indices(
        table, sort_keys=[(name, "ascending") for name in table.column_names]
    ).to_numpy()
    return order


def _ranked(sides: Sequence[Ingested], by: pa.ChunkedArray | None) -> list[Ingested]:
    if by is None and _in_place(sides):
        return list(sides)
    given = [side.sequence for side in sides]
    sequences = _counted(given) if by is None else None
    if sequences is None:
        before = np.concatenate(given)
        order = np.argsort(before, kind="stable") if by is None else _order(by, before)
        sequence = np.empty(order.size, np.int64)
        sequence[order] = np.arange(before.size)
        sequences = np.split(sequence, np.cumsum([its.size for its in given])[:-1])
    return [
        dataclasses.replace(side, sequence=its)
        if _ascending(its)
        else dataclasses.replace(side.take(np.argsort(its)), sequence=np.sort(its, kind="stable"))
        for side, its in zip(sides, sequences, strict=True)
    ]


def _counted(given: Sequence[npt.NDArray[np.int64]]) -> list[npt.NDArray[np.int64]] | None:
    """The place of each number among all, without a sort; None where one comes twice or they lie far apart.

    Those of a micro-batch are the places of its changes already, or some of them: numbers that are there are marked,
    and the marks before each are counted.
    """
    there = [its for its in given if its.size]
    if not there:
        return list(given)
    total, least = sum(its.size for its in there), min(int(its.min()) for its in there)
    span = max(int(its.max()) for its in there) - least + 1
    if span > _CLOSE * total:
        return None
    places = [its - least for its in given] if least else list(given)
    marks = np.zeros(span, bool)
    for its in places:
        marks[its] = True
    if int(np.count_nonzero(marks)) < total:
        return None
    if span == total:
        return places
    before = np.cumsum(marks, dtype=np.int64) - 1
    return [before[its] for its in places]


def _in_place(sides: Sequence[Ingested]) -> bool:
    """Tells whether the sequence is 0, 1, 2, ... already: the caller gave none, and no row was bad."""
    start = 0
    for its in (side.sequence for side in sides):
        end = start + its.size
        if its.size and not (its[0] == start and its[-1] == end - 1 and bool((its[1:] > its[:-1]).all())):
            return False
        start = end
    return True


def _ascending(values: npt.NDArray[np.int64]) -> bool:
    return bool((values[1:] >= values[:-1]).all())

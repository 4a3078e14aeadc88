"""Runs a dataflow: the operators of a query one after the other, prepared, made final and taken back together.

**The law.** Let operator k be a function of state and changes, ``(S_k, Δ_in) -> (S_k', Δ_out)``. A micro-batch goes
through the operators in their order. The changes that k reads are those of inputs from outside and the ``Δ_out`` of
operators before it, each under the position of the change from outside that caused it. So a change has passed through
all operators before the next one is looked at, as record by record in Flink, where all of them emit ``per_event``;
where they emit net changes any order will do.

Between two operators a changelog is rows in the backend's memory and one byte a row for its kind: it is not encoded,
checked for invalid text or copied to the host.

**Time.** An operator by event time that reads another one's changelog goes by that one's output watermark after the
micro-batch before: nothing that it emits from then on is older. At the end the operators end one after the other, each
once all that the ones before it still had has come through.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gpu_ops import operators
from gpu_ops.conditions import Expression
from gpu_ops.conditions.expressions import ColumnRef
from gpu_ops.descriptions.changelog import LONG_STRINGS, ROW_KIND_COLUMN, SHORT_STRINGS
from gpu_ops.descriptions.dataflow import Dataflow, Vertex
from gpu_ops.descriptions.projection import ROWS, Projection, column_of, columns_in
from gpu_ops.descriptions.times import BEFORE_ALL
from gpu_ops.ingest import Ingested, ingest_checked
from gpu_ops.kernels import HeldRows, Kernels
from gpu_ops.operators.core.projection import project
from gpu_ops.operators.keyed import KeyedOperator
from gpu_ops.operators.operator import InputTable, Operator, Room, TimedOperator
from gpu_ops.output import Changelog, Output, SlotRows, changelog, values_table
from gpu_ops.state.pieces import FromSnapshot, Storable

CLOCK = "clock_ms"
"""What a snapshot calls the time of the last micro-batch; tables of operators have a dot in their names."""


class DataflowOperator(Operator):
    """All operators of a dataflow over one partition.

    Args:
        description: the dataflow.
        kernels: the backend, which they share.
    """

    description: Dataflow

    def __init__(self, description: Dataflow, kernels: Kernels) -> None:
        self.description, self.kernels = description, kernels
        self._clock_ms = 0
        self._operators: tuple[Operator, ...] = ()
        self._under: Mapping[str, int | None] | None = None

    @property
    def room(self) -> Room:
        """The guard of memory; once it is known the operators are made."""
        return self._operators[0].room

    @room.setter
    def room(self, room: Room) -> None:
        self._operators = tuple(operators.make(v.description, self.kernels, room) for v in self.description.operators)
        read = Counter(name for v in self.description.operators for name in v.sources)
        for vertex, operator in self._pairs():
            if isinstance(operator, KeyedOperator) and vertex.name not in self.description.outputs:
                operator.gathers = read[vertex.name] != 1  # several would each gather what all of them need

    @property
    def tables(self) -> Sequence[InputTable]:  # type: ignore[override]
        """The state of all operators, as `gpu_ops.descriptions.dataflow.Dataflow.state_names` names it."""
        return [table for operator in self._operators for table in operator.tables]

    # --- a micro-batch -----------------------------------------------------------------------

    def prepare(self, changes: tuple[Ingested, ...], clock_ms: int, watermark_ms: int | None) -> Output:
        """Compute one micro-batch; each operator has a watermark of its own."""
        return self._through(changes, clock_ms)

    def _through(self, changes: Sequence[Ingested], clock_ms: int, ending: Operator | None = None) -> Output:
        """Take changes through all operators; ``ending`` is one whose input has ended."""
        known = {source.name: change for source, change in zip(self.description.inputs, changes, strict=True)}
        metrics: dict[str, int | float] = {}
        outputs, several = dict[str, Output](), self.description.outputs
        for vertex, operator in self._pairs():
            edges = [
                known[name] if projection is None else _projected(self.kernels, known[name], projection, source.schema)
                for source, name, projection in vertex.edges
            ]
            taken, causes = ingest_checked(vertex.description, edges)
            ended = operator is ending
            watermark = operator.last_watermark_ms if ended else self._watermark(vertex, operator, clock_ms)
            output = operator.prepare(taken, clock_ms, watermark)
            output = dataclasses.replace(output, sequence=_caused(output.sequence, causes))
            if vertex.name in several:
                outputs[vertex.name] = output
            known[vertex.name] = _read(vertex, self.kernels, output)
            for side, change in zip(vertex.description.sides, taken, strict=True):
                metrics[f"{vertex.name}.{side}_rows_in"] = change.rows_in
                metrics[f"{vertex.name}.{side}_bad_rows"] = change.bad_rows
            if several or vertex is not self.description.operators[-1]:
                counts = np.bincount(output.kinds, minlength=len(LONG_STRINGS)).tolist()
                rows_out = dict(zip(LONG_STRINGS, counts, strict=True))
                metrics |= {f"{vertex.name}.rows_out_{kind}": rows for kind, rows in rows_out.items()}
            for name, value in output.metrics.items():
                shared = name.endswith("_ms") and not re.search("time_ms$|watermark_ms$", name)
                metrics |= {name: metrics.get(name, 0) + value} if shared else {f"{vertex.name}.{name}": value}
        return dataclasses.replace(self._together(outputs) if several else output, metrics=metrics)

    def _together(self, outputs: Mapping[str, Output]) -> Output:
        """The changelogs that come out as one: behind each other, in the columns that they share."""
        made = {v.name: v.description for v in self.description.operators}
        tables = [
            values_table(made[name], self.kernels, outputs[name].values, outputs[name].later)
            for name in self.description.outputs
        ]
        sizes = [len(table) for table in tables]
        columns = [pa.chunked_array([pa.array(np.repeat(np.arange(len(sizes), dtype=np.int8), sizes))])]
        for its, kind in self.description.shared:
            parts = [
                table[its[number]] if number in its else pa.chunked_array([pa.nulls(len(table), kind)])
                for number, table in enumerate(tables)
            ]
            columns.append(pa.chunked_array([chunk for part in parts for chunk in part.chunks], kind))
        ordered = [outputs[name] for name in self.description.outputs]
        return Output(
            pa.Table.from_arrays(columns, schema=self.description.values_schema),
            np.concatenate([output.kinds for output in ordered]),
            np.concatenate([output.sequence[:size] for output, size in zip(ordered, sizes, strict=True)]),
            {},
        )

    def _pairs(self) -> Iterator[tuple[Vertex, Operator]]:
        return zip(self.description.operators, self._operators, strict=True)

    def commit(self, clock_ms: int) -> None:
        """Make the prepared micro-batch final in all operators."""
        self._clock_ms, self._under = clock_ms, None
        for operator in self._operators:
            operator.commit(clock_ms)

    def discard(self) -> None:
        """Forget the prepared micro-batch in all operators."""
        self._under = None
        for operator in self._operators:
            operator.discard()

    # --- time and the end --------------------------------------------------------------------

    def under(self, watermarks: Mapping[str, int | None]) -> int | None:
        """Takes the watermarks of the operators by event time, for the next micro-batch; there is none of the whole."""
        self._under = watermarks
        return None

    def _watermark(self, vertex: Vertex, operator: Operator, clock_ms: int) -> int | None:
        """The watermark of an operator: that of the input which is behind."""
        if not isinstance(operator, TimedOperator) or not vertex.description.by_event_time:
            return operator.watermark_ms(clock_ms)
        if self._under is not None:
            return self._under[vertex.name]
        below = {v.name: (v, one) for v, one in self._pairs()}
        marks = [
            operator.input_watermark_ms(number) if name is None else self._output_watermark(*below[name])
            for number, name in enumerate(self.description.followed(vertex.name))
        ]
        known = [mark for mark in marks if mark is not None]
        return min(known) if len(known) == len(marks) else None

    @staticmethod
    def _output_watermark(vertex: Vertex, operator: Operator) -> int | None:
        """The time that nothing is older than which an operator emits from here on, ms; None if none is known."""
        behind = vertex.description.behind_ms
        if not isinstance(operator, TimedOperator) or behind is None or operator.clock.watermark == BEFORE_ALL:
            return None
        return int(operator.clock.watermark) // operator.per_ms - behind

    def finish(self) -> Iterator[Changelog]:
        """Ends one operator's input after the other, and yields what comes out; then the last one's result."""
        nothing = np.empty(0, np.int64)
        for operator in self._operators:
            if operator.last_watermark_ms is None:
                continue
            empty = [
                Ingested(source.schema.empty_table(), nothing.astype(np.int8), nothing, 0, 0, None)
                for source in self.description.inputs
            ]
            try:
                output = self._through(empty, self._clock_ms, operator)
            except BaseException:
                self.discard()
                raise
            self.half_ended = True
            self.commit(self._clock_ms)
            yield changelog(self.description, self.kernels, output)
        yield from self._operators[-1].finish()
        self.half_ended = False

    # --- state -------------------------------------------------------------------------------

    def kept(self) -> dict[str, Storable]:
        """The committed state of all operators, each name behind that of its operator; and the clock."""
        clock = {CLOCK: pa.table({CLOCK: pa.array([self._clock_ms], pa.int64())})}
        of_each = ((v.name, name, table) for v, operator in self._pairs() for name, table in operator.kept().items())
        return clock | {f"{vertex}.{name}": table for vertex, name, table in of_each}

    def restore(self, state: Mapping[str, FromSnapshot], settle: Callable[[], None]) -> None:
        """Take over a snapshot; see `gpu_ops.operators.operator.Operator`."""
        self._clock_ms = cast("pa.Table", state[CLOCK])[CLOCK][0].as_py()
        for vertex, operator in self._pairs():
            prefix = f"{vertex.name}."
            own = {name.removeprefix(prefix): table for name, table in state.items() if name.startswith(prefix)}
            operator.restore(own, settle)

    def close(self) -> None:
        """Give back what is not memory."""
        for operator in self._operators:
            operator.close()


make = DataflowOperator


def _read(vertex: Vertex, kernels: Kernels, output: Output) -> Ingested:
    """An operator's changelog as the next one takes it: on a card the rows stay there."""
    schema, size = vertex.description.values_schema, int(output.kinds.size)
    values = output.values
    if isinstance(values, SlotRows):
        return Ingested(values, output.kinds, output.sequence[:size], size, 0, None)
    frames = kernels.dataframes
    if frames is None or output.later is not None or hasattr(values, "schema"):
        rows: Any = values_table(vertex.description, kernels, values, output.later)
    else:
        rows = frames.as_rows(values, schema)
    return Ingested(rows, output.kinds, output.sequence[:size], size, 0, None)


_AT = "#"
"""The column of a row's place, which no other has: it is no name in SQL."""


def _projected(kernels: Kernels, changes: Ingested, projection: Projection, schema: pa.Schema) -> Ingested:
    """The changes that a filter leaves, with their columns as the next operator has them."""
    of_kinds, projection = projection.by_row_kind()
    if of_kinds:
        changes = changes.pick(_kinds_that_pass(of_kinds)[changes.kinds])
    rows = changes.rows
    if not isinstance(rows, pa.Table) and not projection.needs_host:
        for test in projection.where:
            frame = rows.columns(columns_in([test]))
            changes = changes.pick(kernels.asnumpy(kernels.evaluate(test, {ROWS: frame}, len(changes.kinds))))
            rows = cast("HeldRows", changes.rows)
        shown = {new: cast("ColumnRef", x.root).name for new, x in zip(schema.names, projection.columns, strict=True)}
        return dataclasses.replace(changes, rows=rows.called(shown, schema), rows_in=int(changes.kinds.size))
    if isinstance(rows, SlotRows):  # and of these the columns that are needed
        needed = projection.names or rows.description.values_schema.names[:1]
        changes = dataclasses.replace(changes, rows=rows.called({name: name for name in needed}, schema))
    table = changes.table.append_column(_AT, pa.array(np.arange(len(rows))))
    numbered = Projection((*projection.columns, column_of(table.schema.field(_AT))), projection.where)
    batches = table.combine_chunks().to_batches() or [pa.RecordBatch.from_pylist([], table.schema)]
    found = pa.Table.from_batches(
        [project(numbered, batch, schema.append(table.schema.field(_AT))) for batch in batches]
    )
    places = found[_AT].to_numpy()
    return dataclasses.replace(
        changes,
        rows=found.select(schema.names),
        kinds=changes.kinds[places],
        sequence=changes.sequence[places],
        rows_in=int(places.size),
    )


def _kinds_that_pass(tests: tuple[Expression, ...]) -> npt.NDArray[np.bool_]:
    """Tells of each row kind whether a filter that asks for it lets it pass."""
    kinds = pa.record_batch({ROW_KIND_COLUMN: SHORT_STRINGS, _AT: range(len(SHORT_STRINGS))})
    places = kinds.schema.field(_AT)
    found = project(Projection((column_of(places),), tests), kinds, pa.schema([places]))
    return np.isin(kinds[_AT].to_numpy(), found[_AT].to_numpy())


def _caused(sequence: npt.NDArray[np.int64], causes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Positions among the changes that an operator took as those of what caused these; below 0 they stay."""
    if not causes.size:
        return sequence
    return np.where(sequence < 0, sequence, causes[np.maximum(sequence, 0)])

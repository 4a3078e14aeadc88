"""Aggregates and co-groups over an input that has ended; the backend groups and sorts.

Law: the input is folded, so a retraction takes its row away, and the rows that are left are grouped. Null is a key of a
group; NaN is one value, and so is zero.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpu_ops import operators
from gpu_ops.descriptions.aggregate import MOMENTS, Aggregate, Measure
from gpu_ops.descriptions.changelog import INSERT, encode_row_kinds
from gpu_ops.descriptions.description import Description
from gpu_ops.descriptions.inputs import Input
from gpu_ops.ingest import Ingested
from gpu_ops.kernels import Kernels
from gpu_ops.operators.at_end import AtEnd
from gpu_ops.operators.core.order import one_nan, one_zero
from gpu_ops.operators.groups.aggregate import moments, sums
from gpu_ops.operators.groups.aggregate.extremes import called
from gpu_ops.operators.merge_join import present_rows
from gpu_ops.output import Changelog, changelog
from gpu_ops.values import one_array


def make(described: Description, kernels: Kernels) -> AtEnd:
    """See `gpu_ops.operators.operator.Make`."""
    kind: type[AtEnd] = CoGroupAtEnd
    if isinstance(described, Aggregate):
        kind = RowByRowAtEnd if described.goes_row_by_row else AggregateAtEnd
    return kind(described, kernels)


class AggregateAtEnd(AtEnd):
    """One row per group at the end of the input; what adds up is that of `sums`. Arguments as `AtEnd`."""

    def result(self, changes: tuple[Ingested, ...]) -> pa.Table:
        """The groups of a part."""
        description = self.description
        rows = _folded(self.kernels, description.source, changes[0])
        by = [f"k{n}" for n in range(len(description.by))]
        columns: dict[str, Any] = {
            k: one_nan(one_zero(one_array(rows[c]))) for k, c in zip(by, description.by, strict=True)
        }
        calls: list[Any] = []
        for number, measure in enumerate(description.measures):
            if measure.column is None:
                if ([], "count_all") not in calls:
                    calls.append(([], "count_all"))
                continue
            name, column = f"m{number}", one_array(rows[measure.column])
            if measure.function in MOMENTS:
                of_rows = moments.added_up(measure, [one_array(rows[own]) for own in measure.columns])
                columns |= {f"{name}_{part}": pa.array(values) for part, values in of_rows.items()}
                calls += [(f"{name}_{part}", "sum") for part in of_rows]
                continue
            if measure.function in ("sum", "avg"):
                calls.append((f"{name}_of", "count"))
                columns[f"{name}_of"] = column
                for part, values in sums.added_up(measure, column).items():
                    columns[f"{name}_{part}"] = pa.array(values)
                    calls.append((f"{name}_{part}", "sum"))
                continue
            if pa.types.is_duration(column.type):  # Arrow orders none within groups
                column = column.cast(pa.int64())
            columns[name] = one_nan(one_zero(column))
            calls.append((name, measure.function))
            if measure.function in ("min", "max") and pa.types.is_floating(column.type):
                nan = pc.is_nan(column)
                # Arrow leaves NaN out; it is the greatest number
                columns[name] = pc.if_else(nan, pa.scalar(None, column.type), columns[name])
                columns[f"{name}_nan"] = pc.fill_null(nan, False).cast(pa.int8())
                calls.append((f"{name}_nan", "max"))
        grouped = pa.table(columns) if columns else pa.table({"_": pa.nulls(rows.num_rows)})
        found = self.kernels.aggregate(grouped, by, calls)
        data = [found[k].cast(c.type) for k, c in zip(by, description.output, strict=False)]
        for number, measure in enumerate(description.measures):
            column = None if measure.column is None else description.source.schema.field(measure.column).type
            kind = description.output[len(by) + number].type
            data.append(_measured(found, f"m{number}", measure, (column, kind)).cast(kind))
        kinds = encode_row_kinds(np.full(found.num_rows, INSERT, np.int8))
        return pa.Table.from_arrays([kinds, *data], schema=description.output_schema)


class RowByRowAtEnd(AtEnd):
    """Aggregates that no ``groupby`` has: the rows that are left go through the operator that runs live."""

    def result(self, changes: tuple[Ingested, ...]) -> Changelog:
        """The groups of a part."""
        description = self.description
        rows = _folded(self.kernels, description.source, changes[0])
        if not rows.num_rows and not description.by:
            return self._of_nothing()
        source = dataclasses.replace(description.source, row_kind=None, unique_key=None)
        live = operators.make(
            dataclasses.replace(description, source=source, emit="per_batch"), self.kernels, self.room
        )
        count = rows.num_rows
        taken = Ingested(rows, np.full(count, INSERT, np.int8), np.arange(count, dtype=np.int64), count, 0, None)
        return changelog(live.description, self.kernels, live.prepare((taken,), self._clock_ms, None))

    def _of_nothing(self) -> pa.Table:
        """One row: without group columns there is one, though there is none in the input."""
        values: list[Any] = []
        for measure, column in zip(self.description.measures, self.description.output, strict=True):
            if measure.own is not None:
                values.append(called(measure, "result", 1, called(measure, "empty", 1, 1)))
            else:
                lists = measure.function in ("collect_list", "collect_set")
                nothing: Any = [] if lists else 0 if measure.function.startswith("count") else None
                values.append(pa.array([nothing], column.type))
        kinds = encode_row_kinds(np.full(1, INSERT, np.int8))
        return pa.Table.from_arrays([kinds, *values], schema=self.description.output_schema)


def _measured(found: pa.Table, name: str, measure: Measure, types: tuple[pa.DataType | None, pa.DataType]) -> Any:
    if measure.column is None:
        return found["count_all"]
    if measure.function in ("sum", "avg", *MOMENTS):
        assert types[0] is not None
        ends = f"{name}_", "_sum"
        totals = {
            column.removeprefix(ends[0]).removesuffix(ends[1]): pc.fill_null(one_array(found[column]), 0).to_numpy()
            for column in found.column_names
            if column.startswith(ends[0]) and column.endswith(ends[1])
        }
        if measure.function in MOMENTS:
            return moments.of_totals(measure, totals)
        return sums.of_totals(measure, totals, found[f"{name}_of_count"].to_numpy(), (types[0], types[1]))
    values = found[f"{name}_{measure.function}"]
    if f"{name}_nan_max" not in found.column_names:
        return values
    some = pc.fill_null(found[f"{name}_nan_max"], 0).cast(pa.bool_())
    wins = some if measure.function == "max" else pc.and_(some, values.is_null())
    return pc.if_else(wins, pa.scalar(float("nan"), values.type), values)


class CoGroupAtEnd(AtEnd):
    """Both inputs' rows, sorted by key, at their end. Arguments as `AtEnd`."""

    def result(self, changes: tuple[Ingested, ...]) -> pa.Table:
        """The rows of a part: the left's, then the right's, each sorted by key."""
        description = self.description
        parts = []
        for side, (source, change) in enumerate(zip(description.inputs, changes, strict=True)):
            rows = _folded(self.kernels, source, change)
            strict = [k.column(side) for k in description.keys if not k.null_safe and rows[k.column(side)].null_count]
            for name in strict:
                rows = rows.filter(rows[name].is_valid())
            names = [k.column(side) for k in description.keys]
            by = pa.table(
                [one_zero(rows[c].cast(t)) for c, t in zip(names, description.key_types, strict=True)],
                names=[f"k{n}" for n in range(len(names))],
            )
            sorted_rows = rows.take(self.kernels.sorted_order(by))
            data = [encode_row_kinds(np.full(rows.num_rows, INSERT, np.int8))]
            data.append(pa.array(np.full(rows.num_rows, side, np.int8)))
            for column in description.output[1:]:
                own = column.side == side
                data.append(sorted_rows[column.column] if own else pa.nulls(rows.num_rows, column.type))
            parts.append(pa.Table.from_arrays(data, schema=description.output_schema))
        return pa.concat_tables(parts)


def _folded(kernels: Kernels, source: Input, changes: Ingested) -> pa.Table:
    """The rows that are left of an input's changes."""
    return changes.table if source.insert_only else present_rows(kernels, source, changes).to_arrow()

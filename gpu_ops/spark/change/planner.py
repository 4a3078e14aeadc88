"""What a change does: where the rows of each table of the new query come from, and what becomes of each operator."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from gpu_ops.errors import DescriptionError, NotBuiltError
from gpu_ops.query.nodes import Calc, JoinNode, LocalAggregate, Plan, PlanNode, walk
from gpu_ops.query.relations import Scan
from gpu_ops.spark.api.finish import calculated
from gpu_ops.spark.api.query import PlannedQuery
from gpu_ops.spark.api.streams import Stream
from gpu_ops.spark.change.old_query import OldInput, OldOperator, OldQuery, grounds, said, tables_of, uses
from gpu_ops.spark.datatypes import named_column
from gpu_ops.spark.driver.queries import plans_of
from gpu_ops.spark.plan.changes import sliced
from gpu_ops.spark.plan.stored_query import differences, said_differences, same_rows
from gpu_ops.spark.server.present import why_no_result
from gpu_ops.state.address import StateAddress

_SECONDS_A_ROW: Final = 4e-6
"""What a row of the state costs on its way through Spark and the new query, about."""

_BY_TIME: Final = "the new query joins it by time, and the state does not say when its rows came"

RowOrigin = Literal["state", "source"]


class TableChange(NamedTuple):
    """A table of the new query, and the place that its rows come from.

    Attributes:
        name: the table's.
        origin: ``"state"``: from the old state folder; its source goes on where it stood. ``"source"``: from the
            source's beginning.
        why: the reason.
        rows: how many there are in the state; None where they are not counted.
    """

    name: str
    origin: RowOrigin
    why: str
    rows: int | None = None


class OperatorChange(NamedTuple):
    """An operator of either query, and its fate in a change.

    Attributes:
        name: the operator, and what it reads.
        becomes: ``"as it was"``, ``"changed"``, ``"new"`` or ``"dropped"``.
        why: what differs; empty where nothing does.
    """

    name: str
    becomes: Literal["as it was", "changed", "new", "dropped"]
    why: str


@dataclasses.dataclass(frozen=True)
class QueryChange:
    """The effects of a change of a query on its operators, tables and result; `str` shows them.

    Attributes:
        operators: of both queries.
        tables: of the new query.
        result: what of the SELECT differs, empty where nothing does.
        version: the number of micro-batches that the old state holds.
        unknown: why the old query's result does not follow from its state, so that only an empty sink can be filled;
            empty where it does.
    """

    operators: tuple[OperatorChange, ...]
    tables: tuple[TableChange, ...]
    result: str
    version: int
    unknown: str = ""

    @property
    def rows(self) -> int:
        """The number of rows that are brought from the old state into the new one."""
        return sum(table.rows or 0 for table in self.tables)

    @property
    def reads_sources(self) -> tuple[str, ...]:
        """The tables that are read from their sources' beginnings."""
        return tuple(table.name for table in self.tables if table.origin == "source")

    def __str__(self) -> str:
        lines = ["operators"]
        lines += [f"  {x.name}: {x.becomes}{', ' if x.why else ''}{x.why}" for x in self.operators]
        if self.result:
            lines.append(f"  result: {self.result}")
        if self.unknown:
            lines.append(f"  sink: a new one, to be filled with the whole result, as {self.unknown}")
        lines.append("tables")
        for table in self.tables:
            if table.origin == "state":
                rows = "" if table.rows is None else f" ({table.rows:,} rows)"
                lines.append(f"  {table.name}: its rows are in the state{rows}; its source goes on where it stood")
            else:
                lines.append(f"  {table.name}: its source is read from its beginning: {table.why}")
        about = max(1, round(self.rows * _SECONDS_A_ROW))
        sources = f", and for {', '.join(self.reads_sources)} what reading takes" if self.reads_sources else ""
        lines.append(f"time: about {about} s for {self.rows:,} rows of the state{sources}")
        return "\n".join(lines)


class TakenRows(NamedTuple):
    """Rows in the old state, and the way in which a new operator's input is made of them.

    Attributes:
        reading: the rows.
        source: by the source's column what the rows call it, where the filter and projection are applied to them;
            None where the rows are what is read.
        missing: columns of the source that are null.
    """

    reading: OldInput
    source: Mapping[str, str] | None
    missing: tuple[str, ...] = ()


class ChangePlanner:
    """A change from an old query to a new one: where the rows of each of the new one's tables come from.

    Args:
        planned: the new query.
        state: the old query's state folder.
        read_again: tables that may be read from their source's beginning.
        missing: what becomes of columns that the state does not hold.
        partitions: of the new query's operators; None for any number.
    """

    def __init__(
        self,
        planned: PlannedQuery,
        state: StateAddress,
        read_again: Sequence[str],
        missing: Literal["refuse", "null"],
        partitions: int | None = None,
    ) -> None:
        if missing not in ("refuse", "null"):
            raise DescriptionError(f"missing={missing!r}; it is 'refuse' or 'null'")
        self.planned, self.session = planned, planned.session
        self.old, self._missing = OldQuery(state, self.session), missing
        self._read_again = {name.lower() for name in read_again}
        unknown = self._read_again - {name.lower() for name in planned.streams}
        if unknown:
            raise DescriptionError(f"read_again={sorted(unknown)[0]!r}: the query has no such table")
        if planned.stored.emit in ("at_end", "at_watermark") or self.old.stored.emit in ("at_end", "at_watermark"):
            raise NotBuiltError(
                "a query whose rows are final (emit='at_end', 'at_watermark') is not changed: begin anew"
            )
        self.taken: dict[int, TakenRows] = {}
        self.tables: dict[str, TableChange] = {}
        self.kept: dict[int, OldOperator] = {}
        """By node, the operators whose state is copied as it is."""
        self.all_kept = False
        """Whether all are, so that only what is above them is another one."""
        self._choose(partitions)

    def _choose(self, partitions: int | None) -> None:
        """Finds the rows of each table, and operators that stay."""
        why = self._take()
        kept = self._all_as_they_were() or self._kept_without_rows(why)
        others = {one.partitions for one in kept.values()} - {partitions}
        if kept and partitions is not None and others:
            if any(name.lower() not in self._read_again for name in why):
                raise DescriptionError(
                    f"partitions={partitions}: an operator is taken over as it is, in {others.pop()} partitions; leave "
                    "partitions= out, or gpu_ops.rescale() the old state first"
                )
            kept = {}
        if kept:
            tables = {name for node in self.planned.plan.joins if id(node) in kept for name in tables_of(node)}
            self.kept = kept
            again = self._take()
            if tables & again.keys():  # they are read from their beginning for others, so for these as well
                self.kept = {}
                self._take()
            else:
                why = again
        self.all_kept = bool(self.kept) and len(self.kept) == len(self.planned.plan.joins)
        known = {name.lower() for name in self.old.stored.tables}
        for name, stream in self.planned.streams.items():
            if name not in why:
                self.tables[name] = TableChange(name, "state", "")
                continue
            new = name.lower() not in known
            if not (new or stream.load is not None or name.lower() in self._read_again):
                raise DescriptionError(
                    f"table {name!r}: {why[name]}. So its source has to be read from its beginning: where it still has "
                    f"everything, read_again=[{name!r}]. Else begin anew, or ask for what the state has"
                )
            self.tables[name] = TableChange(name, "source", "a new table" if new else why[name])

    def _take(self) -> dict[str, str]:
        """Finds the rows that operators read which do not stay; returns why the state has not all of some tables."""
        stays = {id(use) for node in self.planned.plan.joins if id(node) in self.kept for use in walk(node)}
        read = [use for use in uses(self.planned.plan) if id(use) not in stays]
        why = {name: reason for name, side in self.planned.streams.items() if (reason := _why_not_kept(side))}
        by_time = {
            id(use)
            for node in self.planned.plan.joins
            if node.description.by_time
            for below in node.inputs
            for use in grounds(below)
        }
        self.taken = {}
        for use in read:
            found = _BY_TIME if id(use) in by_time else self._rows_of(use)
            if isinstance(found, str):
                why.update((table, found) for table in tables_of(use) - why.keys())
            else:
                self.taken[id(use)] = found
        again = True
        while again:  # all uses of a table have its rows from one place, and so have those of tables united with it
            again = False
            for use in read:
                tables = tables_of(use)
                if tables & why.keys() and id(use) in self.taken:
                    del self.taken[id(use)]
                    other = next(iter(tables & why.keys()))
                    why.update((table, f"as {other!r} is") for table in tables - why.keys())
                    again = True
        return why

    def _same(self, node: JoinNode) -> OldOperator | None:
        """The operator of the old query that computes the same rows."""
        return next((one for one in self.old.operators.values() if same_rows(one.node, node)), None)

    def _all_as_they_were(self) -> dict[int, OldOperator]:
        """The operators of the old query for all those of the new one; none where one of them is another one."""
        old, new = self.old.plan, self.planned.plan
        if any(_why_not_kept(side) for side in self.planned.streams.values()) or self.old.why_no_result() is not None:
            return {}
        if len(old.joins) != len(new.joins) or [*map(_tops, old.parts)] != [*map(_tops, new.parts)]:
            return {}
        pairs = list(zip(old.joins, new.joins, strict=True))
        if not all(same_rows(*pair) and id(pair[0]) in self.old.operators for pair in pairs):
            return {}
        return {id(node): self.old.operators[id(was)] for was, node in pairs}

    def _kept_without_rows(self, why: Mapping[str, str]) -> dict[int, OldOperator]:
        """Operators that stay as they are, with those below them, as the state lacks rows to build them of."""
        kept: dict[int, OldOperator] = {}
        unknown = {name for name, side in self.planned.streams.items() if _why_not_kept(side)}
        unknown |= self.planned.streams.keys() - self.old.stored.tables.keys()
        for node in self.planned.plan.joins:
            direct = {name for below in node.inputs for use in grounds(below) if not isinstance(use, JoinNode)
                      for name in tables_of(use)}  # fmt: skip
            below = [one for one in walk(node) if isinstance(one, JoinNode)]
            same = {id(one): old for one in below if (old := self._same(one)) is not None}
            whole = len(same) == len(below) and why_no_result(same[id(node)].description) is None
            whole = whole and not any(one.completed for one in same.values())
            if direct & why.keys() and not tables_of(node) & unknown and whole:
                kept |= same
        return kept

    def _rows_of(self, use: PlanNode) -> TakenRows | str:
        """The rows in the state that something is made of, or the reason why there are none."""
        reasons = []
        for reading in self.old.readings:
            if tables_of(reading.node) != tables_of(use):
                continue
            if same_rows(reading.node, use):
                if reading.why_not is None:
                    return TakenRows(reading, None)
                reasons.append(reading.why_not)
                continue
            derived = self._derived(reading, use)
            if not isinstance(derived, str):
                return derived
            reasons.append(reading.why_not or derived)
        return next(iter(reasons), "no operator of the old query keeps its rows alone")

    def _derived(self, reading: OldInput, use: PlanNode) -> TakenRows | str:
        """Derives a source as one plan filters and projects it from rows of another plan; else gives the reason."""
        if reading.why_not is not None:
            return reading.why_not
        (was, old_scan), (now, scan) = _calc_of(reading.node), _calc_of(use)
        if old_scan is None or scan is None:
            return "it is united with others, or grouped, below its operator"
        different = next(differences(old_scan, scan), None)
        if different is not None:
            return different
        has, needs = _plain(was, old_scan), _needed(now, scan)
        narrower = set() if was is None else set(was.where) - set([] if now is None else now.where)
        if narrower:
            return f"rows that are not {' AND '.join(sorted(narrower))} are not in the state"
        old_schema, schema = old_scan.table.schema, scan.table.schema
        for column in needs & has.keys():
            if old_schema.field(column).type != schema.field(column).type:
                return f"column {column!r} is {schema.field(column).type}, and was {old_schema.field(column).type}"
        lacks = sorted(needs - has.keys())
        if lacks and self._missing == "refuse":
            return f"column {lacks[0]!r} is not in the state"
        if lacks and not (scan.table.insert_only or scan.table.unique_key is not None):
            return f"column {lacks[0]!r} is not in the state, and rows that are taken back are known by it"
        return TakenRows(reading, has, tuple(lacks))

    # --- in words ----------------------------------------------------------------------------

    def described(self) -> QueryChange:
        """The change in words."""
        operators, old = [], list(self.old.plan.joins)
        for node in self.planned.plan.joins:
            same = next((one for one in old if same_rows(one, node)), None)
            alike = next((one for one in old if one.kind == node.kind and tables_of(one) == tables_of(node)), None)
            was = same or alike
            if was is not None:
                old.remove(was)
            if same is not None:
                how = "its state is taken over" if id(node) in self.kept else "built of the rows in the state"
                operators.append(OperatorChange(said(node), "as it was", how))
            elif was is not None:
                operators.append(OperatorChange(said(node), "changed", next(said_differences(was, node))))
            else:
                operators.append(OperatorChange(said(node), "new", ""))
        operators += [OperatorChange(said(node), "dropped", "") for node in old]
        counts = {one: one.rows(self.session).count() for one in {x.reading for x in self.taken.values()}}
        tables = []
        for name, table in self.tables.items():
            its = {x.reading for use in uses(self.planned.plan) if name in tables_of(use)
                   for x in [self.taken.get(id(use))] if x is not None}  # fmt: skip
            tables.append(table._replace(rows=sum(counts[x] for x in its)) if its else table)
        roots = zip(self.old.plan.parts, self.planned.plan.parts, strict=False)
        tops = [(a.root, b.root) for a, b in roots]
        result = next((text for a, b in tops for text in _top_differences(a, b)), "")
        return QueryChange(tuple(operators), tuple(tables), result, self.old.version, self.old.why_no_result() or "")

    @property
    def _tops(self) -> dict[int, OldOperator]:
        """By node, the operators that stay and are read by others."""
        below = {
            id(one) for node in self.planned.plan.joins if id(node) in self.kept for x in node.inputs for one in walk(x)
        }
        return {number: old for number, old in self.kept.items() if number not in below}

    @property
    def readings(self) -> list[OldInput | OldOperator]:
        """The rows that are taken from the old state, each once."""
        return list(dict.fromkeys([*(taken.reading for taken in self.taken.values()), *self._tops.values()]))

    def stand_ins(self, rows: Callable[[OldInput | OldOperator], DataFrame]) -> dict[int, DataFrame]:
        """By node, what new operators read where it is made of rows in the old state; ``rows``: gives these."""
        found = {number: rows(old) for number, old in self._tops.items()}
        for use in uses(self.planned.plan):
            taken = self.taken.get(id(use))
            if taken is None:
                continue
            frame, kind = rows(taken.reading), f.lit("+I")
            if taken.source is None:
                row_kind = use.row_kind
                found[id(use)] = frame if row_kind is None else frame.withColumn(row_kind, kind)
                continue
            now, scan = _calc_of(use)
            assert scan is not None
            columns = [named_column(theirs).alias(name) for name, theirs in taken.source.items()]
            types = {x.name: x.dataType for x in self.planned.streams[scan.table.name].df.schema}
            columns += [f.lit(None).cast(types[name]).alias(name) for name in taken.missing]
            if scan.row_kind is not None:
                columns.append(kind.alias(scan.row_kind))
            made = frame.select(*columns)
            made = made if now is None else calculated(now, made)
            found[id(use)] = sliced(use, made) if isinstance(use, LocalAggregate) else made
        return found


def _tops(part: Plan) -> list[int | None]:
    """The places, among the operators of a SELECT, of those that its rows come from; None for rows without one."""
    places = {id(node): place for place, node in enumerate(part.joins)}
    return [places.get(id(node)) for node in grounds(part.root)]


def _why_not_kept(side: Stream) -> str | None:
    """The reason why a table is read from its beginning whatever the old state has; None if there is none."""
    if side.load is not None:
        return "a static table"
    if plans_of(side.df):
        return "an operator outside of the query makes its rows, and has a state of its own"
    return None


def _top_differences(old: PlanNode, new: PlanNode) -> Iterator[str]:
    """Differences above all operators, in words."""
    if isinstance(old, Calc) and isinstance(new, Calc):
        yield from (text for text in said_differences(dataclasses.replace(old, input=new.input), new))


def _calc_of(node: PlanNode) -> tuple[Calc | None, Scan | None]:
    """The filter and projection of an input's rows, and the input; None for what there is not."""
    node = node.input if isinstance(node, LocalAggregate) else node
    calc = node if isinstance(node, Calc) else None
    below = node if calc is None else calc.input
    return calc, below if isinstance(below, Scan) else None


def _plain(calc: Calc | None, scan: Scan) -> dict[str, str]:
    """By the source's columns, what a projection calls those that it leaves as they are."""
    if calc is None:
        return {name: name for name in scan.table.schema.names}
    return {x.column: x.name for x in calc.select if x.column is not None}


def _needed(calc: Calc | None, scan: Scan) -> set[str]:
    """The source's columns that a filter and projection need."""
    if calc is None:
        return set(scan.table.schema.names)
    return {x.column for x in calc.select if x.column is not None} | set(calc.known.values())

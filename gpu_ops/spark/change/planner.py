"""What a change does: where the rows of each table of the new query come from, and what becomes of each operator."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from gpu_ops.errors import DescriptionError, NotBuiltError
from gpu_ops.query.nodes import Calc, JoinNode, LocalAggregate, PlanNode
from gpu_ops.spark.api.statements import Statement, StatementSet
from gpu_ops.spark.api.streams import Stream
from gpu_ops.spark.change.old_query import (
    OldInput,
    OldOperator,
    OldStatement,
    OldStatements,
    grounds,
    reads,
    said,
    tables_of,
)
from gpu_ops.spark.change.rows_of_input import RowsOfInput, inserted
from gpu_ops.spark.driver.queries import plans_of
from gpu_ops.spark.plan.changes import sliced
from gpu_ops.spark.plan.stored_query import columns_called, differences, said_differences, same_rows
from gpu_ops.spark.server.present import why_no_copy, why_no_result
from gpu_ops.spark_types import named_column
from gpu_ops.state.address import StateAddress

_SECONDS_A_ROW: Final = 1e-6
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


class OutputChange(NamedTuple):
    """A result of either query, and what its sink gets in a change.

    Attributes:
        name: of the sink, or empty where it has none.
        becomes: ``"as it was"``: the sink gets nothing. ``"changed"``: it gets the difference. ``"new"``: all rows.
            ``"dropped"``: it stays as it is.
        why: what differs, of what is above all operators.
        unknown: why the old result does not follow from the state, so that only an empty sink can be filled; or empty.
    """

    name: str
    becomes: Literal["as it was", "changed", "new", "dropped"]
    why: str = ""
    unknown: str = ""


@dataclasses.dataclass(frozen=True)
class QueryChange:
    """The effects of a change of a query on its operators, tables and results; `str` shows them.

    Attributes:
        operators: of both queries.
        tables: of the new query.
        outputs: the results; one but for a job of several INSERTs.
        version: the number of micro-batches that the old state holds.
    """

    operators: tuple[OperatorChange, ...]
    tables: tuple[TableChange, ...]
    outputs: tuple[OutputChange, ...]
    version: int

    @property
    def rows(self) -> int:
        """The number of rows that are brought from the old state into the new one."""
        return sum(table.rows or 0 for table in self.tables)

    @property
    def reads_sources(self) -> tuple[str, ...]:
        """The tables that are read from their sources' beginnings."""
        return tuple(table.name for table in self.tables if table.origin == "source")

    @property
    def unknown(self) -> str:
        """The reason why an old result is not known, so that only an empty sink can be filled; empty where all are."""
        return next((one.unknown for one in self.outputs if one.unknown), "")

    def __str__(self) -> str:
        lines = ["operators"]
        lines += [f"  {x.name}: {x.becomes}{', ' if x.why else ''}{x.why}" for x in self.operators]
        if any(one.name for one in self.outputs):
            lines.append("sinks")
        for one in self.outputs:
            of = f"  {one.name}: " if one.name else "  "
            gets = {"as it was": "nothing differs", "new": "gets all rows", "dropped": "stays as it is"}
            if one.unknown:
                lines.append(f"{of}a new sink, to be filled with the whole result, as {one.unknown}")
            elif one.name:
                lines.append(f"{of}{gets.get(one.becomes, 'gets the difference')}{': ' * bool(one.why)}{one.why}")
            elif one.why:
                lines.append(f"  result: {one.why}")
        lines.append("tables")
        for table in self.tables:
            if table.origin == "state":
                rows = "" if table.rows is None else f" ({table.rows:,} rows)"
                lines.append(f"  {table.name}: its rows are in the state{rows}; its source goes on where it stood")
            else:
                lines.append(f"  {table.name}: its source is read from its beginning: {table.why}")
        if any(table.rows is not None for table in self.tables):
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


def refuse_final(emit: str) -> None:
    """Refuses a query of which no row is ever taken back.

    Raises:
        NotBuiltError: it is one.
    """
    if emit in ("at_end", "at_watermark"):
        raise NotBuiltError("a query whose rows are final (emit='at_end', 'at_watermark') is not changed: begin anew")


class ChangePlanner:
    """A change from old queries to new ones: where the rows of each of the new ones' tables come from.

    An operator that computes the rows that an old one does takes its state over. What another operator or a sink needs
    of it is its present result. Where a table's rows are not there, its source is read from its beginning, and
    everything that is made of it is built anew.

    Args:
        new: the new queries.
        state: the old state folder.
        read_again: tables that may be read from their source's beginning.
        missing: what becomes of columns that the state does not hold.
        partitions: of the new query's operators; None for any number.
    """

    def __init__(
        self,
        new: StatementSet,
        state: StateAddress,
        read_again: Sequence[str],
        missing: Literal["refuse", "null"],
        partitions: int | None = None,
    ) -> None:
        if missing not in ("refuse", "null"):
            raise DescriptionError(f"missing={missing!r}; it is 'refuse' or 'null'")
        self.new, self.session = new, new.statements[0].planned.session
        self.old, self._missing, self._partitions = OldStatements(state, self.session), missing, partitions
        self._read_again = {name.lower() for name in read_again}
        self.streams = {name: side for one in new.used for name, side in one.planned.streams.items()}
        known = dict(new.tables())
        unknown = self._read_again - {name.lower() for name in known}
        if unknown:
            raise DescriptionError(f"read_again={sorted(unknown)[0]!r}: the query has no such table")
        for stored in (*(one.planned.stored for one in new.used), *(one.stored for one in self.old.statements)):
            refuse_final(stored.emit)
        self.operators = [node for one in new.used for node in one.plan.joins]
        """Of the new queries, those below first."""
        self.taken: dict[int, TakenRows] = {}
        self.tables: dict[str, TableChange] = {}
        self.kept: dict[int, OldOperator] = {}
        """By node, the operators whose state is taken over."""
        self._from_source: frozenset[str] = frozenset()
        """Tables that are read from their sources' beginnings, as far as that is known."""
        self._choose(dict(new.tables()))

    def _choose(self, tables: Mapping[str, Stream]) -> None:
        """Finds operators that stay, and the rows of each table."""
        why = {name: reason for name, side in tables.items() if (reason := _why_not_kept(side))}
        why.update((name, "a new table") for name in tables if name.lower() not in self.old.tables)
        while True:  # what is read from its beginning for one operator is so for all
            before = len(why)
            self._keep(why)
            self._take(why)
            if len(why) == before:
                break
        for name in tables:
            if name not in why:
                self.tables[name] = TableChange(name, "state", "")
                continue
            new = name.lower() not in self.old.tables
            if not (new or tables[name].load is not None or name.lower() in self._read_again):
                self._check_partitions(name)
                raise DescriptionError(
                    f"table {name!r}: {why[name]}. So its source has to be read from its beginning: where it still has "
                    f"everything, read_again=[{name!r}] (--read-again {name}). Else begin anew "
                    f"(micro-batches to read again: {self.old.version:,}), or ask for what the state has"
                )
            self.tables[name] = TableChange(name, "source", why[name])

    def _keep(self, why: Mapping[str, str]) -> None:
        """Finds the operators that stay, where tables that are read from their beginning are known."""
        self.kept = {
            id(node): same
            for node in self.operators
            if not tables_of(node) & why.keys()
            and (same := self.same(node)) is not None
            and self._partitions in (None, same.partitions)
            and why_no_copy(same.description, same.description_of(node)) is None
        }

    def same(self, node: JoinNode) -> OldOperator | None:
        """The operator of the old queries that computes the same rows."""
        return next((one for one in self.old.operators.values() if same_rows(one.node, node)), None)

    def _check_partitions(self, table: str) -> None:
        """Says where another number of partitions would do."""
        for node in self.operators:
            same = self.same(node) if table in tables_of(node) else None
            if same is not None and self._partitions not in (None, same.partitions):
                raise DescriptionError(
                    f"partitions={self._partitions}: an operator is taken over as it is, in {same.partitions} "
                    "partitions; leave partitions= out, or gpu_ops.rescale() the old state first"
                )

    def needed(self) -> list[PlanNode]:
        """Finds what is read of the old state: present results of operators that stay, and rows of inputs."""
        built = [node for node in self.operators if id(node) not in self.kept]
        results = [root for one in self.new.outputs if not self.as_it_was(one) for root in one.roots]
        found = reads([*(below for node in built for below in node.inputs), *results])
        return [node for node in found if id(node) in self.kept or not isinstance(node, JoinNode)]

    def as_it_was(self, output: Statement) -> bool:
        """True if a sink gets nothing, as its result is what it was."""
        old = self.old_of(output)
        if old is None or len(old.plan.parts) != len(output.plan.parts):
            return False
        if any(table in self._from_source for root in output.roots for table in tables_of(root)):
            return False
        pairs = zip((part.root for part in old.plan.parts), output.roots, strict=True)
        return all(a.schema.names == b.schema.names and same_rows(a, b) for a, b in pairs)

    def old_of(self, output: Statement) -> OldStatement | None:
        """The old query whose sink a new one has: that of its name, or the only one if there is one in either."""
        return self.old.output(output.name, len(self.new.outputs))

    def _take(self, why: dict[str, str]) -> None:
        """Finds the rows of inputs that are needed, and adds why the state does not have all of some tables."""
        self._from_source = frozenset(why)
        read = self.needed()
        by_time = {
            id(use)
            for node in self.operators
            if node.description.by_time and id(node) not in self.kept
            for below in node.inputs
            for use in grounds(below)
        }
        self.taken = {}
        for use in read:
            if isinstance(use, JoinNode):
                no_result = why_no_result(self.kept[id(use)].description)
                if no_result is not None:
                    why.update((table, f"{said(use)}: {no_result}") for table in tables_of(use) - why.keys())
                continue
            found = _BY_TIME if id(use) in by_time else self._rows_of(use)
            if isinstance(found, str):
                why.update((table, found) for table in tables_of(use) - why.keys())
            else:
                self.taken[id(use)] = found
        self._leave_united(read, why)

    def _leave_united(self, read: Sequence[PlanNode], why: dict[str, str]) -> None:
        """Leaves rows in the old state of tables that are read from their beginnings, and of those united with them."""
        again = True
        while again:
            again = False
            for use in read:
                tables = tables_of(use)
                if tables & why.keys() and id(use) in self.taken:
                    del self.taken[id(use)]
                    other = next(iter(tables & why.keys()))
                    why.update((table, f"as {other!r} is") for table in tables - why.keys())
                    again = True

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
        was, now = RowsOfInput.of(reading.node), RowsOfInput.of(use)
        if was is None or now is None:
            return "it is united with others, or grouped, below its operator"
        different = next(differences(was.scan, now.scan, results=True), None)
        if different is not None:
            return different
        has, needs = was.left_as_is, now.needs
        narrower = set(was.where) - set(now.where)
        if narrower:
            return f"rows that are not {' AND '.join(sorted(narrower))} are not in the state"
        table = now.scan.table
        for column in needs & has.keys():
            types = [schema.field(column).type for schema in (table.schema, was.scan.table.schema)]
            if types[0] != types[1]:
                return f"column {column!r} is {types[0]}, and was {types[1]}"
        lacks = sorted(needs - has.keys())
        absent = f"column {lacks[0]!r} is not in the state" if lacks else ""
        if lacks and not (table.insert_only or table.unique_key is not None):
            return f"{absent}, and rows that are taken back are known by it"
        if lacks and self._missing == "refuse":
            return f'{absent} (missing="null", --missing null, takes null for it)'
        return TakenRows(reading, has, tuple(lacks))

    # --- in words ----------------------------------------------------------------------------

    def described(self, *, count: bool) -> QueryChange:
        """The change in words; ``count``: with the number of rows, which takes reading them."""
        operators, old = [], [node for plan in self.old.plans for node in plan.joins]
        for node in self.operators:
            same = next((one for one in old if same_rows(one, node)), None)
            alike = next((one for one in old if one.kind == node.kind and tables_of(one) == tables_of(node)), None)
            was = same or alike
            if was is not None:
                old.remove(was)
            if same is not None:
                how = "its state is taken over" if id(node) in self.kept else "built anew"
                operators.append(OperatorChange(said(node), "as it was", how))
            elif was is not None:
                why = next(said_differences(was, node, results=True), "")
                operators.append(OperatorChange(said(node), "changed", why))
            else:
                operators.append(OperatorChange(said(node), "new", ""))
        operators += [OperatorChange(said(node), "dropped", "") for node in old]
        tables = []
        for name, table in self.tables.items():
            its = {one for one in self.old.readings if count and table.origin == "state" and one.why_not is None
                   and {x.lower() for x in tables_of(one.node)} == {name.lower()}}  # fmt: skip
            taken = its & {x.reading for x in self.taken.values()} or set(list(its)[:1])
            tables.append(table._replace(rows=sum(x.rows(self.session).count() for x in taken)) if taken else table)
        return QueryChange(tuple(operators), tuple(tables), tuple(self._outputs()), self.old.version)

    def _outputs(self) -> Iterator[OutputChange]:
        """Yields what becomes of each result."""
        known = set[str]()
        for one in self.new.outputs:
            old = self.old_of(one)
            if old is None:
                yield OutputChange(one.name, "new")
                continue
            known.add(old.of.name)
            called = "" if old.of.name.lower() == one.name.lower() else f"it was called {old.of.name}"
            if self.as_it_was(one):
                yield OutputChange(one.name, "as it was", called)
                continue
            pairs = zip(old.plan.parts, one.roots, strict=False)
            why = next((text for a, b in pairs for text in _top_differences(a.root, b)), "")
            said = ", ".join(filter(None, (called, why)))
            yield OutputChange(one.name, "changed", said, self.old.why_no_result(old) or "")
        for before in self.old.statements:
            if before.of.is_output and before.of.name not in known:
                yield OutputChange(before.of.name, "dropped")

    @property
    def readings(self) -> list[OldInput | OldOperator]:
        """The rows that are taken from the old state, each once."""
        found = [self.kept.get(id(node)) or self.taken[id(node)].reading for node in self.needed()
                 if id(node) in self.kept or id(node) in self.taken]  # fmt: skip
        return list(dict.fromkeys(found))

    def stand_ins(self, rows: Callable[[OldInput | OldOperator], DataFrame]) -> dict[int, DataFrame]:
        """By node, what new operators read where it is made of rows in the old state; ``rows``: gives these."""
        found = {}
        for use in self.needed():
            if id(use) in self.kept:
                found[id(use)] = _as_called(rows(self.kept[id(use)]), self.kept[id(use)].node, use)
                continue
            taken = self.taken.get(id(use))
            if taken is None:
                continue
            frame = rows(taken.reading)
            if taken.source is None:
                found[id(use)] = inserted(_as_called(frame, taken.reading.node, use), use.row_kind)
                continue
            now = RowsOfInput.of(use)
            assert now is not None
            columns = [named_column(theirs).alias(name) for name, theirs in taken.source.items()]
            types = {x.name: x.dataType for x in self.streams[now.scan.table.name].df.schema}
            columns += [f.lit(None).cast(types[name]).alias(name) for name in taken.missing]
            made = now.made(frame.select(*columns))
            found[id(use)] = sliced(use, made) if isinstance(use, LocalAggregate) else made
        return found


def _as_called(rows: DataFrame, old: PlanNode, new: PlanNode) -> DataFrame:
    """Rows of a plan with their columns as the same one of another query calls them."""
    names = columns_called(old, new) or {}
    return rows.select(*(named_column(name).alias(names.get(name, name)) for name in rows.columns))


def _top_differences(old: PlanNode, new: PlanNode) -> Iterator[str]:
    """Differences above all operators, in words."""
    if isinstance(old, Calc) and isinstance(new, Calc):
        yield from (text for text in said_differences(dataclasses.replace(old, input=new.input), new))


def _why_not_kept(side: Stream) -> str | None:
    """The reason why a table is read from its beginning whatever the old state has; None if there is none."""
    if side.load is not None:
        return "a static table"
    if plans_of(side.df):
        return "an operator outside of the query makes its rows, and has a state of its own"
    return None

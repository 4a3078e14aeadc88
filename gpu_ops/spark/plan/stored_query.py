"""The query that a state folder belongs to, as it is kept there: its text, its tables, and how it was planned.

It is written when the query is started, and tells later what the rows and groups in the folder are of: `finish` applies
its SELECT, and `gpu_ops.change` compares it with another query.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final, Self

from pyspark.sql import SparkSession
from pyspark.sql import types as st

from gpu_ops.descriptions.description import Emit, as_written
from gpu_ops.descriptions.names import called_by_name, columns_of_same, paired_names
from gpu_ops.errors import StateError
from gpu_ops.fields import decoded, encoded
from gpu_ops.query.nodes import Calc, JoinNode, LocalAggregate, Plan, PlanNode, Union, made_of, walk
from gpu_ops.query.plan import MultiWay, plan
from gpu_ops.query.relations import Scan, Table
from gpu_ops.state.address import StateAddress
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import description_differences

QUERY: Final = "query.json"
"""The file of a query in its state folder: beside the manifest of its operator, or above the folders of several."""


OF_TABLE: Final = (
    "name", "schema", "row_kind", "unique_key", "updates", "event_times", "sequence_by", "ttl_ms", "grows",
)  # fmt: skip
"""The fields of a table that the file has."""


@dataclasses.dataclass(frozen=True)
class StoredQuery:
    """A query and all that its plan depends on.

    Attributes:
        text: of the query.
        tables: its inputs by name.
        schemas: by input the columns as Spark has them.
        multi_way: as in `gpu_ops.sql`.
        emit: likewise.
        operators: how many it has.
    """

    text: str
    tables: Mapping[str, Table]
    schemas: Mapping[str, st.StructType]
    multi_way: MultiWay
    emit: Emit
    operators: int

    def plan(self, session: SparkSession, views: Mapping[str, tuple[object, ...]] | None = None) -> Plan:
        """Plans the query as it was planned.

        Args:
            session: the session.
            views: by name the roots of the plans of those of its tables that other queries make.
        """
        tables = {
            name: dataclasses.replace(table, made_by=of_name(views or {}, name)) for name, table in self.tables.items()
        }
        return plan(self.text, tables, session, schemas=self.schemas, emit=self.emit, multi_way=self.multi_way)

    def _content(self) -> dict[str, Any]:
        tables = {
            name: {**{name: encoded(getattr(table, name)) for name in OF_TABLE}, "spark": self.schemas[name].json()}
            for name, table in self.tables.items()
        }
        content: dict[str, Any] = {"query": self.text, "multi_way": self.multi_way, "tables": tables}
        if self.operators > 1:
            content["operators"] = self.operators
        if self.emit != "at_end":
            content["emit"] = self.emit
        return content

    @classmethod
    def read(cls, files: Files) -> Self | None:
        """The query of a state folder; None where it is not known."""
        content = _content(files)
        if "tables" not in content:
            return None
        tables: dict[str, Table] = {}
        schemas: dict[str, st.StructType] = {}
        for name, given in content["tables"].items():
            schemas[name] = st.StructType.fromJson(json.loads(given.pop("spark")))
            tables[name] = decoded(Table, given)
        return cls(
            content["query"], tables, schemas, content["multi_way"], content.get("emit", "at_end"),
            content.get("operators", 1),
        )  # fmt: skip

    def same_text(self, other: StoredQuery) -> bool:
        """True if both are the same query over the same tables, word for word."""
        mine, theirs = self._content(), other._content()
        return all(mine.get(name) == theirs.get(name) for name in ("query", "multi_way", "tables", "emit"))

    def write(self, files: Files) -> None:
        """Writes the query into its state folder, in the place of what is there."""
        text = json.dumps(self._content(), sort_keys=True).encode()
        files.write(QUERY, lambda file: file.write(text))

    def create(self, files: Files) -> None:
        """Writes the query into its state folder.

        Raises:
            StateError: the folder has another query.
        """
        content = self._content()
        if not files.create(QUERY, json.dumps(content, sort_keys=True).encode()) and not _goes_on(
            _content(files), content
        ):
            raise StateError(
                f"state folder {files.location} belongs to another query, or to this one over other tables; "
                "gpu_ops.finish() would not know which result to give. Give state= a new folder"
            )


def _goes_on(was: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """True if two contents of the file are of one query, over tables that may have more columns now.

    What a query reads of a new column the operators have in their own state, and refuse.
    """
    old, new = (content.get("tables", {}) for content in (was, now))
    for name, table in old.items():
        other = new.get(name, {"spark": '{"fields": []}'})
        columns = {x["name"]: x for x in json.loads(other["spark"])["fields"]}
        if any(columns.get(x["name"]) != x for x in json.loads(table["spark"])["fields"]):
            return False
        if any(table[part] != other[part] for part in table if part not in ("schema", "spark")):
            return False
    return old.keys() == new.keys() and {**was, "tables": None} == {**now, "tables": None}


def state_of_part(state: StateAddress, number: int) -> StateAddress:
    """The folder of one SELECT of a UNION ALL."""
    return state.below("union").below(str(number))


def folders_of(plan: Plan, state: StateAddress) -> Iterator[tuple[JoinNode, StateAddress]]:
    """The operators of a query, and the folder that each has where it is alone in it; else it has its last one's."""
    for number, part in enumerate(plan.parts, 1):
        base = state_of_part(state, number) if plan.others else state
        for place, node in enumerate(part.joins, 1):
            yield node, base.below(str(place)) if len(part.joins) > 1 else base


def of_last(files: Files) -> Files:
    """The state folder of the operator that waits for the end: that of a query's last one, else the folder itself."""
    content = _content(files)
    operators = content.get("operators", 1) if content.get("emit", "at_end") == "at_end" else 1
    return files if operators == 1 else Files.at(files.address.below(str(operators)))


def query_in(files: Files) -> str | None:
    """The query that a state folder belongs to; None where it belongs to none, or it is not known."""
    return _content(files).get("query")


def _content(files: Files) -> dict[str, Any]:
    """The content of the query's file; empty where there is none."""
    content = files.read(QUERY)
    return {} if content is None else dict(json.loads(content.to_pybytes()))


# --- plans that are compared ------------------------------------------------------------------------


def differences(old: PlanNode, new: PlanNode, *, results: bool = False) -> Iterator[str]:
    """Yields in words what is different in two plans; nothing where they compute the same rows of the same inputs.

    Args:
        old: a plan.
        new: another one.
        results: whether only what follows from the rows counts, and not how changes are told (``emit=``), nor after
            which time rows are forgotten (``ttl=``).
    """
    if type(old) is not type(new):
        yield f"{_named(new)} is in the place of {_named(old)}"
        return
    if isinstance(old, Scan) and isinstance(new, Scan):
        yield from _of_inputs(old.table, new.table, results=results)
    elif isinstance(old, Calc) and isinstance(new, Calc):
        yield from _different("WHERE", " AND ".join(old.where), " AND ".join(new.where))
        yield from _different("SELECT", _selected(old), _selected(new))
        yield from _different("the column of row kinds", str(old.row_kind), str(new.row_kind))
    elif isinstance(old, JoinNode) and isinstance(new, JoinNode):
        described = _described(old, results=results), _described(new, results=results)
        if described[0] != described[1]:
            yield next(description_differences(*described), f"{_named(new)} is described otherwise")
    elif isinstance(old, LocalAggregate) and isinstance(new, LocalAggregate):
        one, other = (dataclasses.replace(node, input=old.input) for node in (old, new))
        if one != other:
            yield "groups of rows before the shuffle are others"
    below = made_of(old), made_of(new)
    if len(below[0]) != len(below[1]):
        yield f"{_named(new)} has {len(below[1])} inputs, and had {len(below[0])}"
        return
    for was, now in zip(*below, strict=True):
        yield from differences(was, now, results=results)


def _of_inputs(old: Table, new: Table, *, results: bool) -> Iterator[str]:
    """Differences of two inputs; of views the order of columns counts, as their plans have other names."""
    for field in ("name", "row_kind", "unique_key", "updates", "sequence_by", *([] if results else ["ttl_ms"])):
        was, now = getattr(old, field), getattr(new, field)
        if was != now:
            yield f"input {new.name!r}: {field} is {now!r}, and was {was!r}"
    if (old.made_by or new.made_by) and old.schema.names != new.schema.names:
        yield f"view {new.name!r} has the columns {', '.join(new.schema.names)}, and had {', '.join(old.schema.names)}"


def _described(node: JoinNode, *, results: bool) -> dict[str, Any]:
    """An operator's description as it is compared."""
    described: dict[str, Any] = json.loads(node.description.to_json())
    if results:
        described.pop("emit", None)
        for source in described["inputs"]:
            source.pop("ttl_ms", None)
    return described


def of_name(views: Mapping[str, tuple[object, ...]], name: str) -> tuple[object, ...]:
    """The roots of the plan of a view, whose name is told without regard to case; none of a table that is none."""
    return next((roots for view, roots in views.items() if view.lower() == name.lower()), ())


def said_differences(old: PlanNode, new: PlanNode, *, results: bool = False) -> Iterator[str]:
    """Yields the `differences` of two plans with columns as the queries write them."""
    scans = [node.alias for node in walk(old, new) if isinstance(node, Scan)]
    yield from (as_written(text, scans) for text in differences(old, new, results=results))


def columns_called(old: PlanNode, new: PlanNode) -> dict[str, str] | None:
    """By the columns of a plan what another one calls them that computes the same rows of the same inputs.

    None if it computes others. How they tell of changes does not matter.
    """
    if {type(old), type(new)} == {Scan, Calc}:
        old, new = _as_calc(old), _as_calc(new)
    if type(old) is not type(new) or len(made_of(old)) != len(made_of(new)):
        return None
    below = [columns_called(was, now) for was, now in zip(made_of(old), made_of(new), strict=True)]
    names = _together(*below)
    if isinstance(old, Scan) and isinstance(new, Scan):
        same = names is not None and next(_of_inputs(old.table, new.table, results=True), None) is None
        return {name: name for name in old.schema.names} if same else None
    own = paired_names([(old.schema.names, new.schema.names)])
    if names is None or own is None:
        return None
    same = True
    if isinstance(old, Calc) and isinstance(new, Calc):
        was, now = ([x.row_kind, *x.where, None, *(column.text for column in x.select)] for x in (old, new))
        same = [text and called_by_name(text, names) for text in was] == now
    elif isinstance(old, JoinNode) and isinstance(new, JoinNode):
        same = _together(names, columns_of_same(old.description, new.description)) is not None
    elif isinstance(old, LocalAggregate) and isinstance(new, LocalAggregate):
        same = dataclasses.replace(old, input=new.input) == new
    return own if same else None


def _together(*names: dict[str, str] | None) -> dict[str, str] | None:
    """The names of columns in another query, of several parts of one; None if they are not known of one of them."""
    return None if None in names else paired_names((x.keys(), x.values()) for x in names if x is not None)


def _as_calc(node: PlanNode) -> PlanNode:
    """An input as a projection that leaves all of its columns; of any other node the node itself."""
    if not isinstance(node, Scan):
        return node
    left = tuple((name, node.column(name)) for name in node.schema.names)
    return Calc(node, {column: name for name, column in left}, node, left=left, row_kind=node.row_kind)


def same_rows(old: PlanNode, new: PlanNode) -> bool:
    """True if two plans compute the same rows of the same inputs, whatever they call their columns."""
    return columns_called(old, new) is not None


def _different(what: str, was: str, now: str) -> Iterator[str]:
    if was != now:
        yield f"{what} is {now or 'not there'}, and was {was or 'not there'}"


def _selected(node: Calc) -> str:
    return ", ".join(x.text if x.text.strip("`") == x.name else f"{x.text} AS {x.name}" for x in node.select)


def _named(node: PlanNode) -> str:
    if isinstance(node, JoinNode):
        return f"operator '{node.kind}'"
    if isinstance(node, Scan):
        return f"input '{node.table.name}'"
    return "a UNION ALL" if isinstance(node, Union) else "a SELECT"

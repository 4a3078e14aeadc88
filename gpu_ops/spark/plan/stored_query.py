"""The query that a state folder belongs to, as it is kept there: its text, its tables, and how it was planned.

It is written when the query is started, and tells later what the rows and groups in the folder are of: `finish` applies
its SELECT, and `gpu_ops.change` compares it with another query.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple, Self, cast

from pyspark.sql import SparkSession
from pyspark.sql import types as st

from gpu_ops.descriptions.description import Emit, as_written
from gpu_ops.errors import StateError
from gpu_ops.fields import decoded, encoded
from gpu_ops.query.nodes import Calc, JoinNode, LocalAggregate, Plan, PlanNode, Union, walk
from gpu_ops.query.plan import MultiWay, plan
from gpu_ops.query.relations import Scan, Table
from gpu_ops.spark.driver.stream_sources import StreamSource
from gpu_ops.state.address import StateAddress
from gpu_ops.state.files import Files

QUERY: Final = "query.json"
"""The file of a query in its state folder: beside the manifest of its operator, or above the folders of several."""


OF_TABLE: Final = (
    "name", "schema", "row_kind", "unique_key", "updates", "event_times", "sequence_by", "ttl_ms", "grows",
)  # fmt: skip
"""The fields of a table that the file has."""


class StoredSource(NamedTuple):
    """A source of a query, in the order in which its checkpoint counts them.

    Attributes:
        table: the query's table that it belongs to; None for one that this package made.
        source: the source.
    """

    table: str | None
    source: StreamSource


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
        sources: of its checkpoint; empty where that is not known.
    """

    text: str
    tables: Mapping[str, Table]
    schemas: Mapping[str, st.StructType]
    multi_way: MultiWay
    emit: Emit
    operators: int
    sources: tuple[StoredSource, ...] = ()

    def plan(self, session: SparkSession) -> Plan:
        """Plans the query as it was planned."""
        return plan(self.text, self.tables, session, schemas=self.schemas, emit=self.emit, multi_way=self.multi_way)

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
        if self.sources:
            content["sources"] = [[one.table, one.source.to_dict()] for one in self.sources]
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
        sources = tuple(
            StoredSource(table, StreamSource.from_dict(source)) for table, source in content.get("sources", ())
        )
        return cls(
            content["query"], tables, schemas, content["multi_way"], content.get("emit", "at_end"),
            content.get("operators", 1), sources,
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


def differences(old: PlanNode, new: PlanNode) -> Iterator[str]:
    """Yields in words what is different in two plans; nothing where they compute the same rows of the same inputs."""
    if type(old) is not type(new):
        yield f"{_named(new)} is in the place of {_named(old)}"
        return
    if isinstance(old, Scan) and isinstance(new, Scan):
        fields = ("name", "row_kind", "unique_key", "updates", "sequence_by", "ttl_ms")
        for field in fields:
            was, now = getattr(old.table, field), getattr(new.table, field)
            if was != now:
                yield f"input {new.table.name!r}: {field} is {now!r}, and was {was!r}"
        return
    if isinstance(old, Calc) and isinstance(new, Calc):
        yield from _different("WHERE", " AND ".join(old.where), " AND ".join(new.where))
        yield from _different("SELECT", _selected(old), _selected(new))
        yield from _different("the column of row kinds", str(old.row_kind), str(new.row_kind))
    elif isinstance(old, JoinNode) and isinstance(new, JoinNode):
        if old.description.to_json() != new.description.to_json():
            yield f"{_named(new)} is described otherwise"
    elif isinstance(old, LocalAggregate) and isinstance(new, LocalAggregate):
        one, other = (dataclasses.replace(node, input=old.input) for node in (old, new))
        if one != other:
            yield "groups of rows before the shuffle are others"
    below = cast("tuple[PlanNode, ...]", old.inputs), cast("tuple[PlanNode, ...]", new.inputs)
    if len(below[0]) != len(below[1]):
        yield f"{_named(new)} has {len(below[1])} inputs, and had {len(below[0])}"
        return
    for was, now in zip(*below, strict=True):
        yield from differences(was, now)


def said_differences(old: PlanNode, new: PlanNode) -> Iterator[str]:
    """Yields the `differences` of two plans with columns as the queries write them."""
    scans = [node.alias for node in walk(old, new) if isinstance(node, Scan)]
    yield from (as_written(text, scans) for text in differences(old, new))


def same_rows(old: PlanNode, new: PlanNode) -> bool:
    """True if two plans compute the same rows of the same inputs."""
    return next(differences(old, new), None) is None


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

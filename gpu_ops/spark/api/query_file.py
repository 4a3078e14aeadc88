"""A query with ``emit="at_end"`` beside its state: so `gpu_ops.finish` gives its columns, in a later session, too."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any, Final

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql import types as st

from gpu_ops.descriptions.description import Description
from gpu_ops.errors import StateError
from gpu_ops.fields import decoded, encoded
from gpu_ops.query.by_time.text import read
from gpu_ops.query.catalyst import calc, check_plan, like, message_of, position
from gpu_ops.query.errors import SqlError
from gpu_ops.query.nodes import Calc, Named, Node, Plan
from gpu_ops.query.plan import MultiWay, Table, plan
from gpu_ops.state.files import Files

QUERY: Final = "query.json"
"""In the state folder of a query with an operator that waits for the end of its input: beside that one's manifest, or
above the folders of several operators."""


OF_TABLE: Final = (
    "name", "schema", "row_kind", "unique_key", "updates", "event_times", "sequence_by", "ttl_ms", "grows",
)  # fmt: skip
"""What the file has of a table."""


def calculated(node: Calc, rows: DataFrame) -> DataFrame:
    """Rows filtered and projected."""
    below = node.input.row_kind
    kind = (below, node.row_kind) if below is not None and node.row_kind is not None else None
    select = [(x.name, x.expr.java if x.expr is not None else x.column) for x in node.select]
    return calc(rows, node.known, [x.expr.java for x in node.where], select, kind)


def check_runs(node: Calc, rows: DataFrame, sql: str) -> None:
    """That Spark can run what `calculated` makes: the physical plan is made over rows like these, with its code.

    Args:
        node: filters and projections.
        rows: what they are of.
        sql: the query.

    Raises:
        SqlError: it cannot.
    """
    parts = [*(x.expr for x in node.where), *(x.expr for x in node.select if x.expr is not None)]
    if not parts:
        return
    stand_in = like(rows)
    try:
        check_plan(calculated(node, stand_in))
    except (PySparkException, Py4JJavaError) as error:
        text, at = read(sql), (1, 1)
        for part in parts:
            try:
                alone = dataclasses.replace(node, where=(), select=(Named("part", "", part, None),), row_kind=None)
                check_plan(calculated(alone, stand_in))
            except (PySparkException, Py4JJavaError):
                at = position(part.java.origin())
                break
        named = re.search(r"\[[A-Z_.]+\]", message_of(error))
        why = f" {named.group()}" if named else ""
        raise text.error(SqlError(f"Spark understands this, and cannot run it{why}", text.sql, *at)) from error


def remember(
    files: Files, tables: Mapping[str, Table], schemas: Mapping[str, st.StructType], planned: Plan, multi_way: MultiWay
) -> None:
    """Writes a query into its state folder.

    Raises:
        StateError: another one stands there.
    """
    given = {
        name: {
            **{name: encoded(getattr(table, name)) for name in OF_TABLE},
            "spark": schemas[name].json(),
        }
        for name, table in tables.items()
    }
    content: dict[str, Any] = {"query": planned.sql, "multi_way": multi_way, "tables": given}
    if len(planned.joins) > 1:
        content["operators"] = len(planned.joins)
    text = json.dumps(content, sort_keys=True)
    if not files.create(QUERY, text.encode()) and _content(files) != json.loads(text):
        raise StateError(
            f"state folder {files.location} belongs to another query, or to this one over other tables; "
            "gpu_ops.finish() would not know which result to give. Give state= a new folder"
        )


def of_last(files: Files) -> Files:
    """The state folder of the operator that waits for the end: a query's last one, else the folder itself."""
    operators = _content(files).get("operators", 1)
    return files if operators == 1 else Files.at(files.address.below(str(operators)))


def query_in(files: Files) -> str | None:
    """The query whose state folder this is; None where it is none's, or not known."""
    return _content(files).get("query")


def shown(files: Files, description: Description, rows: DataFrame) -> DataFrame:
    """What the query of a state folder selects of its operator's rows; these rows where it has none.

    Args:
        files: the state folder.
        description: of its last operator.
        rows: what that gives.

    Raises:
        StateError: the query means another operator in this session.
    """
    content = _content(files)
    if not content:
        return rows
    tables: dict[str, Table] = {}
    schemas: dict[str, st.StructType] = {}
    for name, given in content["tables"].items():
        schemas[name] = st.StructType.fromJson(json.loads(given.pop("spark")))
        tables[name] = decoded(Table, given)
    planned = plan(
        content["query"], tables, rows.sparkSession, schemas=schemas, emit="at_end", multi_way=content["multi_way"]
    )
    means = planned.joins[-1].description.output
    if [(c.name, c.type) for c in means] != [(c.name, c.type) for c in description.output]:
        raise StateError(
            f"state folder {files.location}: its query means another operator in this session than when it began; "
            "finish it with the settings and the version of that session"
        )

    def frame(node: Node) -> DataFrame:
        return calculated(node, frame(node.input)) if isinstance(node, Calc) else rows

    return frame(planned.root)


def _content(files: Files) -> dict[str, Any]:
    """Of the query's file; nothing where there is none."""
    content = files.read(QUERY)
    return {} if content is None else dict(json.loads(content.to_pybytes()))

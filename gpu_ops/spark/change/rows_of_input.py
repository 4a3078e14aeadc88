"""What filters and projections make of a table's rows below an operator, and whether one can be made of another."""

from __future__ import annotations

import dataclasses

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from gpu_ops.descriptions.names import called_by_name
from gpu_ops.query.nodes import Calc, LocalAggregate, PlanNode, made_of
from gpu_ops.query.relations import Scan
from gpu_ops.spark.api.finish import calculated


@dataclasses.dataclass(frozen=True)
class RowsOfInput:
    """The rows of an input as filters and projections make them, those of views that have no operators among them.

    Attributes:
        scan: the input.
        steps: the filters and projections, the lowest first, with the columns that the next one needs.
        row_kind: their row-kind column, or None.
    """

    scan: Scan
    steps: tuple[Calc, ...]
    row_kind: str | None

    @classmethod
    def of(cls, node: PlanNode) -> RowsOfInput | None:
        """The rows that a node takes; None if it is made of something else."""
        node, steps = node.input if isinstance(node, LocalAggregate) else node, list[Calc]()
        row_kind = node.row_kind
        while not isinstance(node, Scan) or node.table.made_by:
            if isinstance(node, Scan):
                (root, *others), names = made_of(node), node.table.schema.names
                if others or root.schema.names != names:
                    return None
                node = root
            elif isinstance(node, Calc):
                needed = _needed(steps[0]) if steps else set(node.schema.names)
                left = tuple((name, column) for name, column in node.left if name in needed)
                steps.insert(0, dataclasses.replace(node, left=left))
                node = node.input
            else:
                return None
        return cls(node, tuple(steps), row_kind)

    @property
    def needs(self) -> set[str]:
        """The input's columns that are needed."""
        return _needed(self.steps[0]) if self.steps else set(self.scan.table.schema.names)

    @property
    def left_as_is(self) -> dict[str, str]:
        """By the input's columns, what those are called above that are left as they are."""
        names = {name: name for name in self.scan.table.schema.names}
        for step in self.steps:
            above = {x.column: x.name for x in step.select if x.column is not None}
            names = {own: above[name] for own, name in names.items() if name in above}
        return names

    @property
    def where(self) -> list[str]:
        """The conditions that are true of the rows, over the input's columns."""
        texts, found = dict[str, str](), list[str]()
        for step in self.steps:
            found += [called_by_name(text, texts) for text in step.where]
            computed = {x.name: f"({called_by_name(x.text, texts)})" for x in step.select if x.expr is not None}
            left = {x.name: texts.get(x.column, x.column) for x in step.select if x.column is not None}
            texts = {**left, **computed}
        return found

    def made(self, rows: DataFrame) -> DataFrame:
        """Makes the rows of some of the input, which are insertions."""
        for step in self.steps:
            rows = calculated(step, inserted(rows, step.input.row_kind))
        return inserted(rows, self.row_kind)


def inserted(rows: DataFrame, row_kind: str | None) -> DataFrame:
    """Rows with the row kind of insertions in a column, where that is not there."""
    return rows if row_kind is None or row_kind in rows.columns else rows.withColumn(row_kind, f.lit("+I"))


def _needed(calc: Calc) -> set[str]:
    """The columns of the node below that a filter and projection need."""
    return {x.column for x in calc.select if x.column is not None} | set(calc.known.values())

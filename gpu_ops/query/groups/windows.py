"""Sliding windows over time, ``window(time, size, slide)``: a row has several.

A tumbling window is a column that Catalyst computes from the time; of sliding ones its ``Expand`` gives the row once
for each.
"""

from __future__ import annotations

import functools
from typing import Any, Final

from gpu_ops.query import errors
from gpu_ops.query.catalyst import arrow_type_of, id_of, items
from gpu_ops.query.expressions import Column
from gpu_ops.query.relations import Expand, Relation
from gpu_ops.query.scope import Scope

_WINDOW: Final = "spark.timeWindow"
"""Key of the metadata that Catalyst gives a column of windows."""


def expanded(scope: Scope, node: Any, below: Relation) -> Relation:
    """An Expand of Catalyst's, of sliding windows, as a relation.

    Args:
        scope: of the query; it gets to know the column of the windows.
        node: Catalyst's.
        below: the rows.

    Raises:
        SqlError: grouping sets and the like.
    """
    output = items(node.output())
    windows = [number for number, attribute in enumerate(output) if bool(attribute.metadata().contains(_WINDOW))]
    if len(windows) != 1:
        scope.fail(errors.NODES["Expand"], node)
    ((place,), found) = windows, output[windows[0]]
    value = scope.catalyst.exploded([projection.apply(place) for projection in items(node.projections())])
    column = Column(str(found.name()), "", functools.partial(arrow_type_of, found), nullable=False)
    scope.columns[id_of(found)] = column
    shown = (id_of(attribute) for attribute in output)
    ids = {number: scope.columns[number] for number in shown}
    return Expand(below, column, scope.expr(value), ids, node)

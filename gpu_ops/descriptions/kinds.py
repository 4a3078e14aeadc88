"""All kinds of descriptions, read from JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from gpu_ops.descriptions.aggregate import Aggregate
from gpu_ops.descriptions.by_time import AsofJoin, IntervalJoin, TemporalJoin
from gpu_ops.descriptions.dataflow import Dataflow
from gpu_ops.descriptions.description import Description
from gpu_ops.descriptions.groups import Latest, Top
from gpu_ops.descriptions.join import CoGroup, Join, LookupJoin
from gpu_ops.descriptions.multi_join import MultiJoin
from gpu_ops.descriptions.over import Over
from gpu_ops.descriptions.projection import Projection
from gpu_ops.descriptions.sessions import SessionAggregate
from gpu_ops.fields import reading


def from_json(text: str) -> Description:
    """A description of any kind from its JSON.

    Raises:
        DescriptionError: it is no such text, or describes what cannot be.
    """
    with reading("description of a join"):
        return _from_dict(json.loads(text))


def _from_dict(data: Mapping[str, Any]) -> Description:
    if data["kind"] == Dataflow.kind:
        return Dataflow.from_dict({**data, "operators": list(_vertices(data["operators"]))})
    # a join with an interval is one, as state folders have had it from the first
    kind = IntervalJoin if data["kind"] == "join" and data.get("interval") else _KINDS[data["kind"]]
    return kind.from_dict(data)


def _vertices(operators: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The operators of a dataflow, with their descriptions and projections read."""
    before: dict[str, Description] = {}
    for vertex in operators:
        edges = zip(vertex["sources"], vertex.get("projections", ()), strict=False)
        read = [data and Projection.from_dict(data, before[name].output_schema) for name, data in edges]
        before[vertex["name"]] = description = _from_dict(vertex["description"])
        yield {**vertex, "description": description, "projections": read}


_KINDS: Final[Mapping[str, type[Description]]] = {
    kind.kind: kind
    for kind in (
        Join, MultiJoin, Aggregate, SessionAggregate, CoGroup, Latest, AsofJoin, TemporalJoin, Top, Over, LookupJoin,
    )
}  # fmt: skip

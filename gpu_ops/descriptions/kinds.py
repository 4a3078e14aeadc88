"""All kinds of descriptions, to read one from its JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from gpu_ops.descriptions.by_time.asof_join import AsofJoin
from gpu_ops.descriptions.by_time.interval_join import IntervalJoin
from gpu_ops.descriptions.by_time.temporal_join import TemporalJoin
from gpu_ops.descriptions.co_group import CoGroup
from gpu_ops.descriptions.description import Description
from gpu_ops.descriptions.groups.aggregate import Aggregate
from gpu_ops.descriptions.groups.latest import Latest
from gpu_ops.descriptions.groups.top import Top
from gpu_ops.descriptions.join import Join
from gpu_ops.descriptions.lookup_join import LookupJoin
from gpu_ops.descriptions.multi_join import MultiJoin
from gpu_ops.fields import reading


def from_json(text: str) -> Description:
    """A description of any kind from its JSON.

    Raises:
        DescriptionError: it is no such text, or describes what cannot be.
    """
    with reading("description of a join"):
        data: Mapping[str, Any] = json.loads(text)
        if data["kind"] == "join":
            return IntervalJoin.from_dict(data) if data.get("interval") else Join.from_dict(data)
        return _KINDS[data["kind"]].from_dict(data)


_KINDS: Final[Mapping[str, type[Description]]] = {
    "multi_join": MultiJoin, "aggregate": Aggregate, "co_group": CoGroup, "latest": Latest,
    "asof_join": AsofJoin, "temporal_join": TemporalJoin, "top": Top, "lookup_join": LookupJoin,
}  # fmt: skip

"""All kinds of descriptions: read from JSON, or made of the options of an engine without Spark."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from gpu_ops.descriptions.aggregate import Aggregate
from gpu_ops.descriptions.by_time import Asof, AsofJoin, Direction, Interval, IntervalJoin, TemporalJoin
from gpu_ops.descriptions.dataflow import Dataflow
from gpu_ops.descriptions.description import Description, Emit
from gpu_ops.descriptions.groups import Latest, Top
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.join import CoGroup, Join, JoinType, LookupJoin
from gpu_ops.descriptions.keys import On, normalize_on
from gpu_ops.descriptions.multi_join import MultiJoin
from gpu_ops.descriptions.times import Duration, parse_bound
from gpu_ops.errors import DescriptionError
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
        operators = [{**vertex, "description": _from_dict(vertex["description"])} for vertex in data["operators"]]
        return Dataflow.from_dict({**data, "operators": operators})
    # a join with an interval is one, as state folders have had it from the first
    kind = IntervalJoin if data["kind"] == "join" and data.get("interval") else _KINDS[data["kind"]]
    return kind.from_dict(data)


_KINDS: Final[Mapping[str, type[Description]]] = {
    kind.kind: kind for kind in (Join, MultiJoin, Aggregate, CoGroup, Latest, AsofJoin, TemporalJoin, Top, LookupJoin)
}


def described(
    inputs: Mapping[str, Any],
    *,
    on: On = None,
    how: JoinType | Sequence[str] = "inner",
    where: str | None = None,
    suffixes: Sequence[str] | None = None,
    emit: Emit = "per_batch",
    time: tuple[str, str] | None = None,
    lower: Duration | None = None,
    upper: Duration | None = None,
    direction: Direction | None = None,
    tolerance: Duration | None = None,
    by: str | Sequence[str] = (),
    aggregates: Mapping[str, Any] | None = None,
) -> Description:
    """The operator that the options call for; arguments as `gpu_ops.engine`.

    Raises:
        DescriptionError: options that do not go together.
    """
    sources = {
        name: dataclasses.replace(given, name=name) if isinstance(given, Input) else Input.of(given, name=name)
        for name, given in inputs.items()
    }
    if aggregates is not None:
        if len(sources) != 1 or on is not None:
            raise DescriptionError(f"aggregates= is for one input and no on=, not {', '.join(sources) or 'none'}")
        (source,) = sources.values()
        return Aggregate.of(source, (by,) if isinstance(by, str) else tuple(by), aggregates, emit)
    if len(sources) < 2:
        raise DescriptionError("a join has two inputs or more, by name: gpu_ops.engine(orders=..., prices=..., on=...)")
    if time is None:
        by_time = {"lower": lower, "upper": upper, "direction": direction, "tolerance": tolerance}
        timed = [name for name, value in by_time.items() if value is not None]
        if timed:
            raise DescriptionError(f"{timed[0]}= is of a join by time: name its columns, as time=('at', 'paid_at')")
    if len(sources) > 2:
        if time is not None:
            raise DescriptionError("a join by time has two inputs")
        if on is None:
            raise DescriptionError("a join of more than two inputs has on=")
        shared = [on] if isinstance(on, str) else list(on)
        return MultiJoin.of(list(sources.values()), shared, how, where=where, emit=emit, suffixes=suffixes)  # type: ignore[arg-type]
    left, right = sources.values()
    options: dict[str, Any] = {"how": how, "keys": normalize_on(on), "where": where, "emit": emit}
    options["suffixes"] = None if suffixes is None else tuple(suffixes)
    if time is None:
        return Join(left=left, right=right, **options)
    left, right = (dataclasses.replace(one, event_time=own) for one, own in zip((left, right), time, strict=True))
    if direction is not None:
        within = None if tolerance is None else parse_bound(tolerance)
        return AsofJoin(left=left, right=right, asof=Asof(direction, within), **options)
    if lower is None or upper is None:
        raise DescriptionError("an interval join has lower= and upper=, an ASOF join direction=")
    bounds = Interval(parse_bound(lower), parse_bound(upper))
    return IntervalJoin(left=left, right=right, interval=bounds, **options)

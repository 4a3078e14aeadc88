"""What a join is, in words."""

from __future__ import annotations

from pyspark.sql import DataFrame

from gpu_ops.attributes import attributes, why_no_backlog
from gpu_ops.bounded import Aggregate, CoGroup, Measure
from gpu_ops.errors import DescriptionError
from gpu_ops.inputs import Input
from gpu_ops.intervals import show_ms
from gpu_ops.joins import Join
from gpu_ops.multi import Equality, MultiJoin
from gpu_ops.query.shown import recall
from gpu_ops.spark.directory import Directory
from gpu_ops.spark.plan import JoinPlan, plan_name, plans_of
from gpu_ops.spark.watermarks import kept_ms, timed

_LAYOUTS = {
    "join_key_contains_unique_key": "at most one row per join key",
    "unique_key": "rows by unique key, under each join key",
    "multiset": "a multiset of rows, under each join key",
}
_EMITS = {
    "per_batch": "the net changes of each micro-batch",
    "per_event": "the changelog Flink emits, change by change",
    "at_end": "nothing before the end of the input, then the result",
}
_LATES = {
    "join": "late rows join what is still there",
    "drop": "late rows are dropped and counted",
    "tag": "late rows come out with the row kind 'late'",
}


def explain(df: DataFrame) -> str:
    """Which operator, backend, key and state the joins in a DataFrame have, and what is kept how long.

    Args:
        df: a changelog of this pack, or something made from one.

    Returns:
        A text of some lines per join, the nearest first; before them the plan of a query of `gpu_ops.sql`.

    Raises:
        DescriptionError: no join of this pack is in it.
    """
    plans = plans_of(df)
    if not plans:
        raise DescriptionError("explain() takes what gpu_ops.join() returned; this plan has no join of ours")
    queries = recall(plan.plan_id for plan in plans)
    return "\n\n".join([*queries, *(_explain(plan, df) for plan in plans)])


def _explain(plan: JoinPlan, df: DataFrame) -> str:
    join = plan.join
    state = str(plan.placed.state or "in memory only: a restart on an old checkpoint is refused")
    if isinstance(join, MultiJoin):
        lines = _multi_way(join, plan.placed.name)
        if join.emit != "at_end":
            state += "; no intermediate state: a change is joined with the rows of the inputs, step by step"
    elif isinstance(join, (Aggregate, CoGroup)):
        lines = _grouped(join, plan.placed.name)
    else:
        lines = _two_way(join, plan)
    if plan.bounded:
        state = "none: the inputs are static, and joined at once in Spark's tasks"
    lines += [
        f"  emit        {join.emit}: {_EMITS[join.emit]}",
        f"  attributes  {_attributes(plan)}",
        f"  partitions  {plan.placed.partitions} ({plan.placed.partitions_reason}){_distribution(plan)}",
        f"  backend     {_backend(plan, df)}",
        f"  state       {state}",
    ]
    for side, source in enumerate(join.inputs):
        interval = timed(join)
        if join.emit == "at_end":
            kept = "kept as it comes until the input ends" if not plan.bounded else "read once"
        elif interval is None:
            kept = _kept(source, _LAYOUTS[join.layout(side)])
        else:
            kept = _kept_by_time(interval, plan, side)
        lines += _input(source, kept, derived=source.name in plan.placed.derived)
        if plan.read and plan.read[side] is not None:
            lines.append(f"              read by Arrow: {plan.read[side]}")
    if plan.read:
        lines.append("  shuffle     Arrow batches, many rows in one of Spark's")
    if plan.stamped:
        whose = ", ".join(join.inputs[n].name for n in plan.stamped)
        lines.append(f"  order       rows carry a stamp ({whose}): the GPU shuffle of this session may reorder them")
    if plan.reported:
        lines.append("  metrics     told to the driver by the tasks: join_progress() and listeners have them")
    return "\n".join(lines)


def _attributes(plan: JoinPlan) -> str:
    """What the operator does with the end of its input and with a backlog."""
    has = attributes(plan.join)
    words = ["speaks only when its input has ended" if has.output_only_after_end_of_input else "speaks as input comes"]
    words.append("sorts it itself" if has.sorts_itself else "sorts nothing")
    if has.switches_from_backlog:
        does = "begins with a backlog" if plan.placed.backlog else "can begin with a backlog"
        words.append(does + (": runs with availableNow are taken in silently" if plan.placed.backlog else ""))
    else:
        words.append(f"no backlog: {why_no_backlog(plan.join)}")
    return "; ".join(words)


def _grouped(described: Aggregate | CoGroup, name: str) -> list[str]:
    """What is grouped, by what."""
    if isinstance(described, CoGroup):
        left, right = described.inputs
        equal = [_equal(left, k.left, right, k.right, null_safe=k.null_safe) for k in described.keys]
        return [
            f"co-group: {left.name}, {right.name}  (metrics '{name}')",
            f"  key         {' AND '.join(equal)}",
        ]
    return [
        f"aggregate: {described.source.name}  (metrics '{name}')",
        f"  group by    {', '.join(described.by) or 'nothing: one row in all'}",
        f"  aggregates  {', '.join(_measure(m) for m in described.measures)}",
    ]


def _measure(measure: Measure) -> str:
    distinct = measure.function == "count_distinct"
    argument = measure.column or "*"
    return f"{measure.name} = {'count' if distinct else measure.function}({'DISTINCT ' if distinct else ''}{argument})"


def _two_way(join: Join, plan: JoinPlan) -> list[str]:
    """What kind of join it is, on what."""
    operator = "semi/anti join" if join.how in ("semi", "anti") else "regular join"
    if join.interval is not None:
        operator = "keyed interval join" if join.interval.keyed else "interval join"
    kind = "NOT IN" if join.null_aware else join.how
    equal = [_equal(join.left, k.left, join.right, k.right, null_safe=k.null_safe) for k in join.keys]
    lines = [
        f"{operator}, {kind}: {join.left.name}, {join.right.name}  (metrics '{plan.placed.name}')",
        f"  key         {' AND '.join(equal) or 'none: every pair of rows is a candidate'}",
        *_interval(join, plan),
    ]
    if join.where is not None:
        lines.append(f"  where       {join.where}")
    return lines


def _multi_way(join: MultiJoin, name: str) -> list[str]:
    """The plan as Flink prints it, then what it means."""
    inputs = join.inputs
    unique = [f"({', '.join(i.unique_key)})" if i.unique_key is not None else "noUniqueKey" for i in inputs]
    conditions, steps = [], []
    for number, step in enumerate(join.steps, start=1):
        equal = [_of_step(join, number, key) for key in step.on]
        conditions.append(" AND ".join([*equal, *([f"({step.where})"] if step.where is not None else [])]))
        where = "" if step.where is None else f"  where {step.where}"
        steps.append(f"  step {number:<6} {step.how} join {inputs[number].name} on {' AND '.join(equal)}{where}")
    parts = {
        "commonJoinKey": [f"{inputs[0].name}.{columns[0]}" for columns in join.common_key],
        "joinTypes": [step.how.upper() for step in join.steps],
        "inputUniqueKeys": unique,
        "joinConditions": conditions,
    }
    common = [" = ".join(f"{i.name}.{c}" for i, c in zip(inputs, key, strict=True)) for key in join.common_key]
    shown = ", ".join(what + "=[" + ", ".join(values) + "]" for what, values in parts.items())
    return [
        f"multi-way join: {', '.join(i.name for i in inputs)}  (metrics '{name}')",
        f"  plan        MultiJoin({shown})",
        f"  common key  {' AND '.join(common)}",
        *steps,
    ]


def _of_step(join: MultiJoin, number: int, key: Equality) -> str:
    return _equal(join.inputs[key.input], key.column, join.inputs[number], key.own, null_safe=key.null_safe)


def _equal(one: Input, column: str, other: Input, its: str, *, null_safe: bool) -> str:
    operator = "IS NOT DISTINCT FROM" if null_safe else "="
    return f"{one.name}.{column} {operator} {other.name}.{its}"


def _distribution(plan: JoinPlan) -> str:
    join, by = plan.join, plan.join.shuffled_by
    if isinstance(join, Aggregate):
        keys = len(join.by)
    else:
        keys = len(join.common_key if isinstance(join, MultiJoin) else join.keys)
    if not by or len(by) == keys:
        return ""
    names = ", ".join(value.columns[0] for value in by)
    return f", by {names} only: an upsert's old and new row must meet"


def _interval(join: Join, plan: JoinPlan) -> list[str]:
    """The bounds, whose time counts, and what the watermark does."""
    interval = join.interval
    if interval is None:
        return []
    if interval.time == "processing":
        times = [f"{source.name}'s arrival" for source in join.inputs]
        lines = ["  time        by the clock of the micro-batch; no row is late"]
    else:
        times = [f"{source.name}.{source.event_time}" for source in join.inputs]
        lines = [
            f"  time        event time; {_LATES[interval.late]}",
            "  watermark   the one of the input that is behind, over all partitions; it moves between micro-batches",
        ]
    if plan.heartbeat_ms is not None:
        lines.append(f"  heartbeat   a micro-batch every {show_ms(plan.heartbeat_ms)}, rows or not")
    return [f"  interval    {str(interval).replace('right - left', f'{times[1]} - {times[0]}')}", *lines]


def _backend(plan: JoinPlan, df: DataFrame) -> str:
    if plan.bounded:
        return "gpu (asked for)" if plan.placed.backend == "gpu" else "cpu (in Spark's tasks, which would share a card)"
    servers = Directory.of(df.sparkSession).servers
    pool = servers.pool(plan.placed.backend)
    if plan.placed.backend == "cpu":
        why = "asked for"
    elif pool.kind == "gpu":
        why = f"{len(pool)} GPU{'s' if len(pool) > 1 else ''} in sight; each state server asks its own"
    else:
        why = servers.no_gpu
    chosen = pool.kind if plan.placed.backend == "auto" else plan.placed.backend
    servers_text = (
        f"{len(pool)} state server{'s' if len(pool) > 1 else ''} {servers.where()}, {len(pool.running)} running"
    )
    return f"{chosen} ({why}); {servers_text}"


def _input(source: Input, kept: str, *, derived: bool) -> list[str]:
    changes = "insert-only" if source.insert_only else f"row kinds in {source.row_kind!r}"
    if source.row_kind is None and source.unique_key is not None:
        changes = "upserts"
    if source.unique_key is not None:
        found = "unique key derived:" if derived else "unique key"
        changes += f", {found} {', '.join(source.unique_key)} ({source.updates})"
    if source.sequence_by is not None:
        changes += f", ordered by {source.sequence_by}"
    if source.bad_rows == "drop":
        changes += ", bad rows dropped"
    return [
        f"  input       {source.name}: {changes}; {len(source.schema.names)} columns",
        f"              {kept}",
    ]


def _kept(source: Input, layout: str) -> str:
    kept = "for ever" if source.ttl_ms is None else f"{show_ms(source.ttl_ms)} after the last write"
    return f"kept as {layout}, {kept}"


def _kept_by_time(join: Join, plan: JoinPlan, side: int) -> str:
    """How an interval join's input brings time on, and how long its rows stay."""
    source = join.inputs[side]
    assert join.interval is not None
    ms = kept_ms(join)[side]
    kept = show_ms(ms)
    if join.interval.time == "processing":
        return f"kept for {kept}" if ms else "not kept beyond its micro-batch"
    if plan.upstream[side] is not None:
        comes = f"watermark from the join '{plan_name(str(plan.upstream[side]))}'"
    else:
        comes = "no watermark" if source.delay_ms is None else f"rows come up to {show_ms(source.delay_ms)} late"
    if source.idle_timeout_ms is not None:
        comes += f", idle after {show_ms(source.idle_timeout_ms)}"
    stuck = _without_watermark(join)
    if stuck is not None:
        return f"{comes}; kept for ever, as {stuck} has no watermark"
    return f"{comes}; kept until the watermark is {kept} past its time" if ms else f"{comes}; kept until it is late"


def _without_watermark(join: Join) -> str | None:
    """An input that keeps an interval join from forgetting anything."""
    return next((s.name for s in join.inputs if s.delay_ms is None and s.idle_timeout_ms is None), None)

"""The text and the picture of the operators in a DataFrame's plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from pyspark.sql import DataFrame

from gpu_ops.descriptions.description import Description, as_written, line
from gpu_ops.descriptions.groups import Grouped
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.times import show_ms
from gpu_ops.display import Explanation, changes_of, lookups_text, operator_box, source_box
from gpu_ops.errors import DescriptionError
from gpu_ops.kernels import LOOKUPS, Probe
from gpu_ops.spark.api.stateful import counted_twice
from gpu_ops.spark.driver.directory import Directory
from gpu_ops.spark.driver.queries import BY_CARD, JoinPlan, analyzed, children_of, plans_of
from gpu_ops.spark.failures import data_frame
from gpu_ops.spark.metrics.progress import join_progress
from gpu_ops.spark.plan.changes import files_by, of_changes, union_inputs_of
from gpu_ops.spark.plan.column_metadata import outputs_of
from gpu_ops.spark.plan.selection import selection_of_join
from gpu_ops.spark.settings import Settings

_LAYOUTS = {
    "join_key_contains_unique_key": "at most one row per join key",
    "unique_key": "rows by unique key, under each join key",
    "multiset": "a multiset of rows, under each join key",
}
_EMITS = {
    "per_batch": "the net changes of each micro-batch",
    "per_event": "the changelog Flink emits, change by change",
    "at_watermark": "rows that nothing changes any more, as the watermark passes them",
    "at_end": "nothing before the end of the input, then the result",
}


_PROBES: Final[Mapping[Probe, str]] = {
    "auto": "a search of the index, or cuDF's hash join where that costs less",
    "hash_join": "cuDF's hash join",
    "index": "a search of the index",
}


def explain(df: DataFrame) -> str:
    """Explains the operators in a DataFrame: keys, backend, partitions, state, and the time for which rows are kept.

    Args:
        df: a changelog of this package, or a DataFrame made from one.

    Returns:
        A text of some lines per operator, the nearest first; before them the plan of a query of `gpu_ops.sql`. A
        notebook shows it below a picture of the operators.

    Raises:
        DescriptionError: the DataFrame has no operator of this package.

    Example:
        >>> orders = spark.createDataFrame([(1, 10)], "id INT, amount INT")
        >>> payments = spark.createDataFrame([(1, 4)], "id INT, paid INT")
        >>> text = gpu_ops.explain(gpu_ops.join(orders, payments, on="id", name="paid", partitions=1))
        >>> print(text.splitlines()[0].strip())
        regular join, inner: left, right  (metrics 'paid')
    """
    plans = plans_of(data_frame(df, "what explain() takes"))
    if not plans:
        raise DescriptionError("explain() takes what gpu_ops.join() returned; this plan has no join of ours")
    queries = [plan.query for plan in plans if plan.query is not None]
    names = {plan.plan_id: plan.name for plan in plans}
    last = {one.plan_id: plan for plan in plans if plan.dataflow is not None for one in plan.chained}
    reading = {use: told for plan in plans for use, told in _reading(plan)}
    texts = [_explain(plan, names, df, reading, last.get(plan.plan_id)) for plan in plans]
    selection = selection_of_join(df)
    outputs = outputs_of(df)
    if outputs:
        made = [line(name, its["made"]) for name, its in outputs.items()]
        texts.insert(0, "\n".join([f"outputs: {', '.join(outputs)}", *made]))
    elif not plans[0].bounded:
        by_spark = f"write_files() would take Spark's rows, not Arrow's: {selection}"
        files = by_spark if isinstance(selection, str) else files_by(df)
        texts[0] += "" if files is None else f"\n  files       {files}"
    wrong = counted_twice(df)
    text = "\n\n".join([*([f"WARNING: {wrong}"] if wrong else []), *queries, *texts])
    return Explanation(text, "".join(_pictures(analyzed(df))))


def _pictures(node: Any) -> list[str]:
    """The pictures of the operators nearest to a node of a logical plan, each with its inputs."""
    plan = JoinPlan.of(node)
    below = children_of(node)
    if plan is None:
        return [picture for child in below for picture in _pictures(child)]
    if plan.bounded:
        while len(below) == 1 < len(plan.description.inputs):  # down to where the inputs are brought together
            below = children_of(below[0])
        union_inputs = {f"{plan.plan_id}.{number}": child for number, child in enumerate(below)}
    else:
        union_inputs = union_inputs_of(node, plan)
    boxes: dict[str, str] = {}
    for one in plan.in_task:
        sides: list[str] = []
        brought = [union_inputs.get(f"{one.plan_id}.{number}") for number in range(len(one.description.inputs))]
        for number, source in enumerate(one.description.inputs):
            own = [boxes[made] for made in one.sources[number : number + 1] if made is not None]
            found = [] if brought[number] is None else _pictures(brought[number])
            if sum(other is brought[number] for other in brought) > 1:  # a task packs for several
                place = sum(other is brought[number] for other in brought[:number])
                found = found[place : place + 1]
            sides += own or found or [source_box(source.name)]
        what = one.description.lines()[0].split(":")[0]
        boxes[one.plan_id] = operator_box(f"{one.name}: {what}", sides)
    return [boxes[plan_id] for plan_id in plan.outputs or (plan.plan_id,)]


def _explain(
    plan: JoinPlan,
    names: Mapping[str, str],
    df: DataFrame,
    reading: Mapping[str, tuple[str, str]],
    last: JoinPlan | None = None,
) -> str:
    """Puts an operator into words.

    Args:
        plan: of the operator.
        names: of all operators, by their plan ids.
        df: what they are of.
        reading: see `_reading`.
        last: of the operators in its engine the one whose changes come out, if that is another.
    """
    description = plan.description
    state = str(plan.state or "in memory only: a restart on an old checkpoint is refused")
    if description.emit != "at_end" and len(description.inputs) > 2:
        state = f"{state}; no intermediate state: a change is joined with the rows of the inputs, step by step"
    inputs = [source.name for source in description.inputs]
    head, *lines = as_written("\n".join(description.lines()), inputs).split("\n")
    lines.insert(0, f"{head}  (metrics '{plan.name}')")
    if plan.row_times:
        times = as_written(", ".join(plan.row_times), inputs)
        lines.append(line("row time", f"{times}: not in what comes out, which may be of any age"))
    if plan.heartbeat_ms is not None:
        lines.append(line("heartbeat", f"a micro-batch every {show_ms(plan.heartbeat_ms)}, rows or not"))
    where = "Spark task" if plan.dataflow is None and last is None else "engine"
    if last is not None:
        state = f"in the folder of {last.name}, whose engine has it"
    if plan.bounded:
        state = "none: the inputs are static, and joined at once in Spark's tasks"
    lines += [
        line("emit", f"{description.emit}: {_EMITS[description.emit]}"),
        line("attributes", _attributes(plan)),
        line("partitions", f"{plan.partitions} ({plan.partitions_reason}){_distribution(plan)}"),
        *([line("tasks", f"{plan.tasks}, each with a share of the changes")] if plan.tasks > plan.partitions else []),
        *(line("with", f"{names[x]}, in the same {where}") for x in dict.fromkeys(plan.sources) if x is not None),
        line("backend", _backend(plan, df)),
        *_lookups(plan, df),
        line("state", state),
    ]
    for side, source in enumerate(description.inputs):
        if description.emit == "at_end":
            kept = "kept as it comes until the input ends" if not plan.bounded else "read once"
        elif side in description.not_kept:
            kept = "not kept beyond its micro-batch"
        elif not description.by_time:
            kept = _kept(description, side)
        else:
            kept = _kept_by_time(plan, names, side)
        lines += _input(source, kept, derived=source.name in plan.derived)
        if side in plan.loaded:
            lines.append("              static: read once, before the first micro-batch")
        if plan.read and plan.read[side] is not None:
            who, more = reading.get(f"{plan.plan_id}.{side}", ("Arrow", ""))
            more = "" if of_changes(plan.read[side]) else more
            lines.append(f"              read by {who}: {plan.read[side]}{more}")
        if plan.by_spark and plan.by_spark[side] is not None:
            lines.append(f"              rows of Spark's own: {plan.by_spark[side]}")
    if plan.reported:
        lines.append(line("metrics", "reported to the driver by the tasks: join_progress() and listeners have them"))
    return "\n".join(lines)


def _reading(plan: JoinPlan) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yields for inputs of a task, by their use, who reads them, and what there is to say behind that."""
    for number, use in enumerate(plan.union_inputs):
        reader, count = plan.files_by[number] if plan.files_by else None, plan.read_together.get(use)
        more = f", read once for {count} inputs" if count else ""
        if reader == BY_CARD:
            yield use, ("the card, where a file has the declared types, else by Arrow", more)
        else:
            yield use, ("Arrow", more if reader is None else f"{more}; not by the card: {reader}")


def _attributes(plan: JoinPlan) -> str:
    """The operator's behaviour at the end of its input and with a backlog, in words."""
    has = plan.description.attributes
    words = ["output only once the input has ended" if has.output_only_after_end_of_stream else "output as input comes"]
    words.append("sorts it itself" if has.internal_sorter_supported else "sorts nothing")
    if has.switches_from_backlog:
        does = "begins with a backlog" if plan.backlog else "can begin with a backlog"
        words.append(does + (": runs with availableNow give no output" if plan.backlog else ""))
    else:
        words.append(f"no backlog: {plan.description.why_no_backlog()}")
    return "; ".join(words)


def _distribution(plan: JoinPlan) -> str:
    by = plan.description.shuffled_by
    if not by or len(by) == len(plan.description.equal_columns):
        return ""
    names = as_written(", ".join(value.columns[0] for value in by), [x.name for x in plan.description.inputs])
    return f", by {names} only: an upsert's old and new row must meet"


def _backend(plan: JoinPlan, df: DataFrame) -> str:
    way = Settings.of_application(df.sparkSession.sparkContext).gpu_probe
    probe = f"; probe {way}: {_PROBES[way]}"
    if plan.bounded:
        asked = plan.backend == "gpu"
        return f"gpu (asked for){probe}" if asked else "cpu (in Spark's tasks, which would share a card)"
    servers = Directory.of(df.sparkSession).servers
    pool = servers.pool(plan.backend)
    why = "asked for" if plan.backend == "cpu" else servers.gpus
    servers_text = (
        f"{len(pool)} state server{'s' if len(pool) > 1 else ''} {servers.where()}, {len(pool.running)} running"
    )
    on_cpu = "".join(f"; WARNING: one computes on the CPU: {s.on_cpu}" for s in pool.running if s.on_cpu is not None)
    return f"{pool.kind} ({why}); {servers_text}{probe if pool.kind == 'gpu' else ''}{on_cpu}"


def _lookups(plan: JoinPlan, df: DataFrame) -> list[str]:
    """The number of lookups of each way on GPUs, as running queries have reported it."""
    lines = []
    for query in df.sparkSession.streams.active:
        found = [x for progress in query.recentProgress for x in join_progress(progress) if x.name == plan.name]
        found = [entry for entry in found if entry.backend != "cpu"]
        if found:
            counts = {way: sum(int(entry.metrics[f"lookups_{way}"]) for entry in found) for way in LOOKUPS}
            batches = f"{len(found)} micro-batch{'es' if len(found) > 1 else ''}"
            lines.append(line("lookups", f"{lookups_text(counts)}, in the last {batches} of {query.name or query.id}"))
    return lines


def _input(source: Input, kept: str, *, derived: bool) -> list[str]:
    changes = changes_of(source)
    if source.unique_key is not None:
        found = "unique key derived:" if derived else "unique key"
        changes += f", {found} {as_written(', '.join(source.unique_key), [source.name])} ({source.updates})"
    if source.sequence_by is not None:
        changes += f", ordered by {as_written(source.sequence_by, [source.name])}"
    if source.bad_rows == "drop":
        changes += ", bad rows dropped"
    return [f"  input       {source.name}: {changes}; {len(source.schema.names)} columns", f"              {kept}"]


def _kept(description: Description, side: int) -> str:
    """The layout in which rows of an input are kept, and for how long, in words."""
    source, layout = description.inputs[side], _LAYOUTS[description.layout(side)]
    kept = "for ever" if source.ttl_ms is None else f"{show_ms(source.ttl_ms)} after the last write"
    if isinstance(description, Grouped) and source.insert_only:
        return f"its groups are kept, of its rows what they need, {kept}"
    if isinstance(description, Grouped):
        layout = layout.replace("join key", "group")
    return f"kept as {layout}, {kept}"


def _kept_by_time(plan: JoinPlan, names: Mapping[str, str], side: int) -> str:
    """The watermark of an input of a join by time, and the time for which its rows are kept, in words."""
    description, upstream = plan.description, plan.upstream[side]
    source = description.inputs[side]
    if description.interval is not None and description.interval.time == "processing":
        return description.kept(side)
    if upstream is not None:
        comes = f"watermark from the join '{names[upstream]}'"
    else:
        late = ", ".join(show_ms(ms) for ms in source.delays_ms if ms is not None)
        whose = "rows" if source.parts is None else "rows of its parts"
        comes = f"{whose} come up to {late} late" if late else "no watermark"
    if source.idle_timeout_ms is not None:
        comes += f", idle after {show_ms(source.idle_timeout_ms)}"
    stuck = next((s.name for s in description.inputs if s.delay_ms is None and s.idle_timeout_ms is None), None)
    if stuck is not None:
        return f"{comes}; kept for ever, as {stuck} has no watermark"
    return f"{comes}; {description.kept(side)}"

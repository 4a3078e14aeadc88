"""Applies an operator to its inputs: the checks that all operators share, the choice of partitions, the plan."""

from __future__ import annotations

import dataclasses
import itertools
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar, cast

from pyspark.sql import DataFrame

from gpu_ops.descriptions import arguments
from gpu_ops.descriptions.changelog import ROW_KIND_COLUMN
from gpu_ops.descriptions.description import Description, Emit
from gpu_ops.descriptions.groups import Latest, without_upserts
from gpu_ops.descriptions.join import Join
from gpu_ops.descriptions.keys import On
from gpu_ops.errors import DescriptionError, NotBuiltError, StateError
from gpu_ops.query.catalyst import ansi_mode
from gpu_ops.spark.api.stateful import final_only
from gpu_ops.spark.api.static import beside_streams, has_result, is_stream
from gpu_ops.spark.api.streams import (
    Stream,
    as_input,
    engine_condition,
    refuse_event_time,
    resolve_keys,
    without_hidden,
)
from gpu_ops.spark.driver.directory import Directory
from gpu_ops.spark.driver.executors import warn_of_local_folder
from gpu_ops.spark.driver.queries import JoinPlan, plans_of
from gpu_ops.spark.plan.build import build, build_bounded, collated_key
from gpu_ops.spark.plan.column_metadata import delays, lost_row_time, retracting
from gpu_ops.spark.settings import PREFIX, Settings, given_at_start
from gpu_ops.spark.tasks.functions import CoGroupTask
from gpu_ops.spark_types import ignores_case, unlike_bytes
from gpu_ops.state.address import StateAddress
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import LATEST, Manifest, check_open

PARTITIONS_PER_GPU: Final = 2
"""On a cluster, where rows come to one task for each partition; on one machine there is one, and several tasks."""

_numbers = itertools.count(1)
TwoSidedJoin = TypeVar("TwoSidedJoin", bound=Join)


class MemoryOnlyStateWarning(UserWarning):
    """Warning: a join without ``state=`` cannot resume from a checkpoint."""


class NoWatermarkWarning(UserWarning):
    """Warning: an interval join never forgets a row, because an input has no watermark."""


def _check_conditions(description: Description, sides: Sequence[Stream]) -> None:
    """Refuses text that Spark does not compare by its bytes, in conditions that do more than test it for null."""
    for condition in description.conditions:
        for source, side in zip(description.inputs, sides, strict=True):
            for column in condition.compared.get(source.name, ()) if condition is not None else ():
                unlike = unlike_bytes(side.df.schema[column])
                if unlike is not None:
                    raise NotBuiltError(
                        f"input '{source.name}': column {column!r} has {unlike}, and a join's condition compares text "
                        f"by its bytes. Compare another column, made below the join: COLLATE(LOWER({column}), "
                        "'UTF8_BINARY') or the like"
                    )


def two_sided(
    kind: type[TwoSidedJoin],
    how: str,
    on: On,
    sides: tuple[Stream, Stream],
    options: Mapping[str, Any],
    *,
    derive: bool = True,
    **more: Any,
) -> tuple[TwoSidedJoin, tuple[Stream, Stream], bool]:
    """Makes the description of a join of two inputs, and adds columns for its condition to the inputs.

    Args:
        kind: the class of the description.
        how: the join type, also as Spark spells it.
        on: the keys.
        sides: the inputs.
        options: the function's options, of which ``where``, ``null_safe`` and ``suffixes`` are read.
        derive: whether a changelog gets the unique key that follows from its join, see `as_input`.
        more: further fields of the description.

    Returns:
        The description, the inputs, and True if they have further columns.

    Raises:
        DescriptionError: the join is not possible.
    """
    where, (first, second), hidden = engine_condition(options.get("where"), sides)
    sides = first, second
    left, right = (as_input(side, derive=derive) for side in sides)
    description = arguments.two_sided(
        kind, (left, right), how=how, on=resolve_keys(on, sides, options), suffixes=options.get("suffixes"),
        where=where, ansi=ansi_mode(first.df.sparkSession), **more,
    )  # fmt: skip
    return description, sides, bool(hidden)


def apply_operator(
    description: Description,
    sides: Sequence[Stream],
    options: Mapping[str, Any],
    *,
    upstream: tuple[str | None, str | None] = (None, None),
    heartbeat_ms: int | None = None,
    function: CoGroupTask | None = None,
    query: str | None = None,
    stacklevel: int = 2,
) -> DataFrame:
    """Applies an operator to its inputs: a static DataFrame for static inputs, else a streaming one.

    Args:
        description: the operator.
        sides: its inputs, in its order.
        options: the options of `gpu_ops.spark.api.streams.RunOptions`, and ``backlog``.
        upstream: see `gpu_ops.spark.driver.queries.JoinPlan`.
        heartbeat_ms: see `gpu_ops.spark.driver.queries.JoinPlan`.
        function: the function of a co-group, else None.
        query: the plan of the query of `gpu_ops.sql` that ends in it, or None.
        stacklevel: the stack level of warnings, seen from the caller.

    Raises:
        DescriptionError: the operator is not possible.
        NotBuiltError: a key, or a column that a condition compares, has a collation.
        StateError: the state folder belongs to something else.
    """
    given = sides
    if description.time_type is None:
        for side in sides:
            refuse_event_time(side)
    for number in description.insertions_only:
        if retracting(sides[number].df):
            raise DescriptionError(
                f"input '{description.inputs[number].name}' of {description.title} is a changelog that takes rows "
                "back, and it takes insertions alone: join by time first, then join or group what that gives"
            )
    description, sides = _in_partitions(description, sides, options)
    plan, state, notes = plan_of(description, sides, options)
    for warning in notes:
        warnings.warn(warning, stacklevel=stacklevel + 1)
    frames, session = [side.df for side in sides], sides[0].df.sparkSession
    if state is not None:
        warn_of_local_folder(session.sparkContext, state, stacklevel=stacklevel + 1)
    plan = dataclasses.replace(plan, query=query, upstream=upstream, heartbeat_ms=heartbeat_ms)
    if plan.bounded:
        return without_hidden(build_bounded(plan, frames, function))
    if function is not None:
        assert state is not None
        Directory.of(session).functions[state.identity] = function
    for load in (side.load for side in given if side.load is not None):
        load()
    made = without_hidden(build(plan, frames, state))
    return has_result(made, state) if description.emit == "at_end" else made


def _in_partitions(
    description: Description, sides: Sequence[Stream], options: Mapping[str, Any]
) -> tuple[Description, Sequence[Stream]]:
    """Replaces upsert inputs that would force one partition by changelogs with retractions.

    See `gpu_ops.descriptions.groups.without_upserts`. `gpu_ops.latest` adds the old row to the new one; its state is in
    the join's folder, too. A folder that was begun with one partition keeps it.
    """
    if not sides[0].df.isStreaming or options.get("backlog"):
        return description, sides
    retracting, state = without_upserts(description), _state_of(options)
    if retracting is None or (state is not None and _begun_alone(Files.at(state))):
        return description, sides
    made, upserts = retracting
    changed = list(sides)
    for number in upserts:
        source, side = description.inputs[number], sides[number]
        more = {name: options[name] for name in ("backend", "partitions") if name in options}
        more["name"] = None if options.get("name") is None else f"{options['name']}_{source.name}"
        more["state"] = None if state is None else state.below(LATEST).below(str(number))
        plan, its_state, _ = plan_of(Latest(source, description.emit), [side], more)  # of which the join warns
        changed[number] = Stream(
            source.name,
            source.unique_key,
            ROW_KIND_COLUMN,
            ttl_ms=source.ttl_ms,
            updates="retract",
            df=build(plan, [side.df], its_state),
            load=side.load,
        )
    return made, changed


def _begun_alone(files: Files) -> bool:
    """True if a folder was begun with the operator alone, and no other in its engine or in a folder of its own."""
    stored = Manifest.read(files)
    return stored is not None and not files.folders(LATEST) and not stored.of_dataflow


def _state_of(options: Mapping[str, Any]) -> StateAddress | None:
    return None if options.get("state") is None else StateAddress.of(options["state"])


def plan_of(
    description: Description, sides: Sequence[Stream], options: Mapping[str, Any]
) -> tuple[JoinPlan, StateAddress | None, list[Warning]]:
    """Makes the plan of an operator, its state folder and its warnings; raises as `apply_operator` does."""
    df, backend, backlog = sides[0].df, options.get("backend", "auto"), bool(options.get("backlog"))
    state, static = _state_of(options), not df.isStreaming
    if backend not in ("auto", "cpu", "gpu"):
        raise DescriptionError(f"backend={backend!r}; it is one of auto, cpu, gpu")
    collated = collated_key(description, [side.df.schema for side in sides])
    if collated is not None:
        raise NotBuiltError(
            f"key {collated!r} has a collation; keys are compared by their bytes. "
            f"Join on COLLATE(LOWER({collated}), 'UTF8_BINARY') or the like"
        )
    _check_conditions(description, sides)
    _check_output(description, df)
    inputs = list(zip(description.inputs, sides, strict=True))
    final = () if static else tuple(i.name for i, s in inputs if final_only(s.df, i.name, s.unique_key, s.row_kind))
    _check_state(description, static=static, state=state, backlog=backlog)
    name = options.get("name") or f"join_{next(_numbers)}"
    if not static:
        _check_lineage(sides, name, state)
    partitions, why = choose_partitions(description, df, state, backend, options.get("partitions"))
    plan = JoinPlan(
        plan_id=uuid.uuid4().hex[:12],
        description=description,
        name=name,
        backend=backend,
        partitions=partitions,
        partitions_reason=why,
        shares=1 if static else _shares(df, backend, partitions),
        state=None if state is None else str(state),
        state_identity=None if state is None else state.identity,
        backlog=backlog,
        derived=tuple(source.name for source, side in inputs if source.unique_key and not side.unique_key),
        final_only=final,
        bounded=static,
        loaded=tuple(number for number, side in enumerate(sides) if side.load is not None),
        row_times=() if static or description.by_time else _row_times(description, sides),
    )
    return plan, state, list(_warnings(description, sides, name, in_memory=state is None and not static))


def _warnings(description: Description, sides: Sequence[Stream], name: str, *, in_memory: bool) -> Iterator[Warning]:
    if in_memory:
        yield MemoryOnlyStateWarning(
            f"join '{name}' has no state= folder: its state lives in memory only, and a restart on an "
            "old checkpoint will be refused"
        )
    for source, side in zip(description.inputs, sides, strict=True):
        if source.delay_ms is None and description.by_event_time and description.emit != "at_end":
            lost = lost_row_time(side.df)
            yield NoWatermarkWarning(
                f"input '{source.name}' has no watermark{f' ({lost})' if lost else ''}, so the join has none and "
                "forgets no row: give it withWatermark(), or stream(..., delay=)"
            )


SideInputs = TypeVar("SideInputs", bound=tuple[Stream, ...])


def settled(sides: SideInputs, options: Mapping[str, Any]) -> tuple[SideInputs, Emit]:
    """Loads static inputs beside streams, and returns the inputs and ``emit``, ``at_end`` where all are static.

    Args:
        sides: the inputs.
        options: the function's options.

    Raises:
        DescriptionError: see `check_frames` and `gpu_ops.spark.api.static.beside_streams`.
        StateError: see `gpu_ops.spark.api.static.beside_streams`.
    """
    if check_frames([side.df for side in sides]):
        return sides, "at_end"
    if not all(is_stream(side) for side in sides):
        sides = cast("SideInputs", tuple(beside_streams(sides, _state_of(options))))
    return sides, options.get("emit", "per_batch")


def _row_times(description: Description, sides: Sequence[Stream]) -> tuple[str, ...]:
    """The event-time columns of all inputs, ``input.column`` each."""
    found = [
        f"{source.name}.{column}"
        for source, side in zip(description.inputs, sides, strict=True)
        for column in dict.fromkeys([*delays(side.df), *([source.event_time] if source.event_time else [])])
    ]
    return tuple(found)


def check_frames(frames: Sequence[DataFrame]) -> bool:
    """Checks the applications and settings of DataFrames; True if all of them are static.

    Args:
        frames: the inputs.

    Raises:
        DescriptionError: they belong to two applications, or a setting of ours was changed while the application runs.
    """
    context = frames[0].sparkSession.sparkContext
    if any(df.sparkSession.sparkContext is not context for df in frames):
        raise DescriptionError("the inputs belong to different Spark applications")
    for session in dict.fromkeys(df.sparkSession for df in frames):
        # All names in one text, and few values: a call into the JVM for each of some hundred settings takes longer.
        names = str(session._jsparkSession.conf().getAll().keys().mkString("\n")).splitlines()
        own = {name: str(session.conf.get(name)) for name in names if name.startswith(PREFIX)}
        Settings.check_session(own, given_at_start(session.sparkContext))
    return not any(df.isStreaming for df in frames)


def _check_state(description: Description, *, static: bool, state: StateAddress | None, backlog: bool) -> None:
    """Refuses a state folder where it has no place, and its absence where it is needed."""
    if static and (state is not None or backlog):
        option = "state=" if state is not None else "backlog="
        raise DescriptionError(f"{option} has no place here: bounded input is joined at once and needs no state folder")
    if backlog:
        description.check_backlog()
    if not static and state is None and description.emit == "at_end":
        raise DescriptionError(
            f"{description.kept_at_end} of a stream keeps it until it ends, and gpu_ops.finish(spark, state=...) gives "
            "the result: give it a state= folder"
        )


def _check_output(description: Description, df: DataFrame) -> None:
    if description.takes_function or not ignores_case(df.sparkSession):
        return  # of a function its own columns come out
    names = [c.name.lower() for c in description.output]
    for column in description.output:
        if names.count(column.name.lower()) > 1:
            raise DescriptionError(
                f"the changelog would have {column.name!r} twice (Spark ignores case): "
                f"rename one{description.rename_hint}"
            )


def _check_lineage(sides: Sequence[Stream], name: str, state: StateAddress | None) -> None:
    for plan in [p for side in sides for p in plans_of(side.df)]:
        if plan.description.emit == "at_end":
            raise DescriptionError(
                f"'{plan.name}' has no output before its input ends: join it as it is, beside a stream that goes on, "
                "or what gpu_ops.finish() gives, a static DataFrame"
            )
        if plan.name == name:
            raise DescriptionError(f"two joins of one query are called {name!r}; give each its own name=")
        if state is not None and plan.state_identity == state.identity:
            raise StateError(f"state folder {state} is in use by join '{plan.name}'; give each join its own")
    if state is not None:
        user = Directory.of(sides[0].df.sparkSession).state_in_use(state)
        if user is not None:
            raise StateError(
                f"state folder {state} is in use by the running query {user}; stop it first, or give another folder"
            )
        check_open(Files.at(state))


def choose_partitions(
    description: Description, df: DataFrame, state: StateAddress | None, backend: str, asked: int | None
) -> tuple[int, str]:
    """Chooses the number of partitions of an operator, and says why.

    Args:
        description: the operator.
        df: one of its inputs.
        state: its state folder, or None.
        backend: the backend that was asked for.
        asked: the option ``partitions=``.

    Raises:
        DescriptionError: the option is no positive whole number.
    """
    if not description.shuffled_by:
        return 1, "one partition: no equality column that rows could be distributed by"
    if asked is not None:
        if not isinstance(asked, int):
            raise DescriptionError(f"partitions={asked!r}; it is a whole number")
        if asked < 1:
            raise DescriptionError(f"partitions={asked}; there is at least one")
        return asked, "asked for"
    manifest = None if state is None else Manifest.read(Files.at(state))
    if manifest is not None:
        return manifest.partitions, "as the state folder is cut"
    session = df.sparkSession
    shuffle = int(str(session.conf.get("spark.sql.shuffle.partitions")))
    servers = Directory.of(session).servers if df.isStreaming else None
    taken = servers.tasks if servers is not None else 0
    pool = servers.pool(backend) if servers is not None else None
    gpus = len(pool) if pool is not None and pool.kind == "gpu" else 0
    return default_partitions(shuffle, max(1, session.sparkContext.defaultParallelism - taken), taken, gpus)


def _shares(df: DataFrame, backend: str, partitions: int) -> int:
    """Chooses the number of Spark tasks of each partition: with GPUs there are as many tasks as cores."""
    context, directory = df.sparkSession.sparkContext, Directory.of(df.sparkSession)
    if directory.blocks is None:
        return 1  # each task would get all rows over the network
    tasks = Settings.of_application(context).tasks
    if tasks is None:
        tasks = int(context.defaultParallelism) if directory.servers.pool(backend).kind == "gpu" else partitions
    return max(1, -(-tasks // partitions))


def default_partitions(shuffle: int, cores: int, taken: int, gpus: int) -> tuple[int, str]:
    """Chooses the number of partitions where the user gave none, and says why.

    Engines on one GPU take turns, and each micro-batch of each costs the same number of calls: a second one on a GPU
    only adds calls, except on a cluster, where a partition's rows and changes go through one task.

    Args:
        shuffle: ``spark.sql.shuffle.partitions``, the most.
        cores: the cores for tasks, besides those of state servers.
        taken: the number of tasks that run state servers.
        gpus: the number of state servers with a GPU; 0 if the join runs on none.
    """
    most, why = cores, "one per core beside state servers" if taken else "one per core"
    each = PARTITIONS_PER_GPU if taken else 1
    if gpus and each * gpus <= cores:
        most, why = each * gpus, f"{each} per GPU, {gpus} in sight"
    if shuffle <= most:
        return shuffle, "spark.sql.shuffle.partitions"
    return most, f"{why}; spark.sql.shuffle.partitions is {shuffle}"

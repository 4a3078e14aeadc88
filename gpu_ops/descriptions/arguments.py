"""From a user's arguments to a description: one function an operator, whose signature is what that operator reads.

`gpu_ops.engine`, `gpu_ops.join` and its like and the planner of SQL come through here. An argument that the operator
does not read is refused, with the word that it goes by here, if there is one: users come from pandas, polars and Spark.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

from gpu_ops.descriptions.aggregate import Aggregate
from gpu_ops.descriptions.by_time import Asof, AsofJoin, Direction, IntervalJoin
from gpu_ops.descriptions.description import Description, Emit
from gpu_ops.descriptions.inputs import Input, is_input
from gpu_ops.descriptions.interval import Interval
from gpu_ops.descriptions.join import Join, join_type
from gpu_ops.descriptions.keys import On, normalize_on
from gpu_ops.descriptions.multi_join import MultiJoin
from gpu_ops.descriptions.sessions import SessionAggregate
from gpu_ops.descriptions.times import Duration, Late
from gpu_ops.errors import DescriptionError

TwoSided = TypeVar("TwoSided", bound=Join)
Engine = TypeVar("Engine", bound=Callable[..., Any])
"""The function `gpu_ops.engine`."""

_KEY: Final = "on= is the key, one column or several"
_PAIRS: Final = "on=[('left column', 'right column')] is the key"
_BOUNDS: Final = "lower= and upper= say how far apart the times may be"
_SUFFIXES: Final = "suffixes=('_l', '_r') is for columns that both inputs have"
_GROUPS: Final = "by= are the columns of groups"
_TEXTS: Final = (
    ("by left_by right_by", (
        ("direction", "on= is the key (pandas' and polars' by), and time= are the columns of times (their on)"),
        ("on", _KEY), ("key", "key= is the key"),
    )),
    ("left_on right_on left_keys right_keys", (("on", _PAIRS),)),
    ("key keys using join_key", (("on", _KEY), ("by", _GROUPS))),
    ("on group_by groupby groups partition_by", (("by", _GROUPS), ("key", "key= is the key"), ("on", _KEY))),
    ("strategy", (("direction", "direction= is 'backward', 'forward' or 'nearest'"),)),
    ("tolerance within window", (("tolerance", "tolerance= says how far apart the times may be"), ("lower", _BOUNDS))),
    ("session gap timeout session_window", (("session_gap", "session_gap= says how long a pause ends a session"),)),
    ("lower upper", (("tolerance", "tolerance= says how far apart the times may be"),)),
    ("condition filter predicate where residual", (
        ("where", "where= is the condition, SQL text"), ("", "filter the inputs, or what comes out"),
    )),
    ("suffix lsuffix rsuffix", (("suffixes", _SUFFIXES),)),
    ("checkpoint checkpoint_location checkpointlocation state_dir", (
        ("state", "state= is the folder of the state; checkpointLocation is an option of Spark's writer"),
    )),
    ("outer", (("how", "how='full', 'left' or 'right' is an outer join"),)),
    ("type join_type jointype", (("how", "how= is the type of the join"),)),
    ("left_time right_time time_column event_time timestamp_column", (
        ("time", "time=('left column', 'right column') are the columns of times"),
    )),
    ("agg aggs aggregations measures", (("aggregates", "aggregates= are the functions"),)),
    ("k limit top head", (("n", "n= is how many rows of a group"),)),
    ("sort sort_by order orderby ascending", (("order_by", "order_by= is the order, such as 'amount DESC'"),)),
    ("join_nulls nulls_equal eqnullsafe", (("null_safe", "null_safe=True lets null meet null"),)),
    ("num_partitions numpartitions parallelism", (("partitions", "partitions= is how many there are"),)),
    ("output_mode outputmode mode", (("emit", "emit= says when rows come out"),)),
    ("device gpu cpu", (("backend", "backend= is 'auto', 'cpu' or 'gpu'"),)),
)  # fmt: skip
_WORDS: Final = {word: texts for words, texts in _TEXTS for word in words.split()}
"""Words of others: for each, by the argument that a function has, what is to be written; '' for any function."""


def right_word(name: str, known: Sequence[str]) -> str:
    """Suggests what to write in place of an argument that a function does not have: a sentence, or nothing.

    Args:
        name: the argument.
        known: those that the function has.
    """
    for own, text in _WORDS.get(name.lower(), ()):
        if own in known or not own:
            return text
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.6) if len(name) > 2 else []
    return f"did you mean {near[0]}=?" if near else ""


def check_options(function: Callable[..., Any], given: Iterable[str], options: type) -> None:
    """Refuses an option that a function does not have.

    Args:
        function: whose it is; its own parameters count.
        given: names.
        options: a TypedDict of what it takes besides.

    Raises:
        TypeError: names it, what to write in its place, and all arguments that there are.
    """
    named = [p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    known = list(dict.fromkeys([*named, *options.__annotations__]))
    for name in given:
        if name not in options.__annotations__:
            word = right_word(name, known)
            hint = f"; {word}" if word else ""
            stop = "" if word.endswith("?") else "."
            raise TypeError(f"{function.__name__}() has no option {name}={hint}{stop} There are {', '.join(known)}")


# --- joins of two inputs -----------------------------------------------------------------------


def two_sided(
    kind: Callable[..., TwoSided],
    inputs: tuple[Input, Input],
    *,
    how: str,
    on: On,
    null_safe: bool | Sequence[bool] = False,
    **more: Any,
) -> TwoSided:
    """The description of a join of two inputs.

    Args:
        kind: its class, or what makes one of such arguments.
        inputs: left and right.
        how: its type, as `join_type` takes it.
        on: its keys.
        null_safe: whether null keys match, for all keys or one by one.
        more: of the description.

    Raises:
        DescriptionError: a join that cannot be.
    """
    left, right = inputs
    return kind(how=join_type(how), left=left, right=right, keys=normalize_on(on, null_safe=null_safe), **more)


# --- of an engine without Spark ----------------------------------------------------------------


def _aggregate(
    inputs: Sequence[Input],
    *,
    aggregates: Mapping[str, Any],
    by: str | Sequence[str] = (),
    emit: Emit = "per_batch",
    window_end: str | None = None,
    session_gap: Duration | None = None,
    time: str | None = None,
) -> Aggregate:
    (source,) = inputs
    if time is not None and session_gap is None and emit != "at_watermark":
        raise DescriptionError("time= of an aggregate goes with session_gap=, or with emit='at_watermark'")
    if time is not None:
        source = dataclasses.replace(source, event_time=time)
    groups = (by,) if isinstance(by, str) else tuple(by)
    if session_gap is None:
        return Aggregate.of(source, groups, aggregates, emit, window_end)
    if window_end is not None:
        raise DescriptionError("a session is a window of its own: window_end= has no place beside session_gap=")
    return SessionAggregate.of_gap(source, groups, session_gap, aggregates, emit)


def _regular(
    inputs: Sequence[Input],
    *,
    on: On = None,
    how: str = "inner",
    where: str | None = None,
    suffixes: Sequence[str] | None = None,
    emit: Emit = "per_batch",
    null_safe: bool | Sequence[bool] = False,
    null_aware: bool = False,
) -> Join:
    more = {"where": where, "suffixes": _pair(suffixes), "emit": emit, "null_aware": null_aware}
    return two_sided(Join, (inputs[0], inputs[1]), how=how, on=on, null_safe=null_safe, **more)


def _multi(
    inputs: Sequence[Input],
    *,
    on: str | Sequence[Any],
    how: str | Sequence[str] = "inner",
    where: str | Sequence[str | None] | None = None,
    suffixes: Sequence[str] | None = None,
    emit: Emit = "per_batch",
) -> MultiJoin:
    hows = join_type(how) if isinstance(how, str) else [join_type(each) for each in how]
    shared: Any = [on] if isinstance(on, str) else list(on)
    return MultiJoin.of(list(inputs), shared, hows, where=where, emit=emit, suffixes=suffixes)


def _interval(
    inputs: Sequence[Input],
    *,
    lower: Duration,
    upper: Duration,
    time: str | tuple[str, str] | None = None,
    on: On = None,
    how: str = "inner",
    where: str | None = None,
    suffixes: Sequence[str] | None = None,
    emit: Emit = "per_batch",
    null_safe: bool | Sequence[bool] = False,
    lower_inclusive: bool = True,
    upper_inclusive: bool = True,
    keyed: bool = False,
    late: Late | None = None,
    min_cleanup: Duration = 0,
    timestamp: str | None = None,
) -> IntervalJoin:
    interval = Interval.of(
        lower, upper, lower_inclusive=lower_inclusive, upper_inclusive=upper_inclusive, keyed=keyed, late=late,
        min_cleanup=min_cleanup, timestamp=timestamp, time="processing" if time == "processing" else "event",
    )  # fmt: skip
    sides = _timed(inputs, None if time == "processing" else time)
    more = {"where": where, "suffixes": _pair(suffixes), "emit": emit, "interval": interval}
    return two_sided(IntervalJoin, sides, how=how, on=on, null_safe=null_safe, **more)


def _asof(
    inputs: Sequence[Input],
    *,
    time: str | tuple[str, str] | None = None,
    direction: Direction = "backward",
    tolerance: Duration | None = None,
    allow_exact_matches: bool = True,
    on: On = None,
    how: str = "inner",
    suffixes: Sequence[str] | None = None,
    emit: Emit = "per_batch",
    null_safe: bool | Sequence[bool] = False,
) -> AsofJoin:
    asof = Asof.of(direction, tolerance, allow_exact_matches=allow_exact_matches)
    more = {"suffixes": _pair(suffixes), "emit": emit, "asof": asof}
    return two_sided(AsofJoin, _timed(inputs, time), how=how, on=on, null_safe=null_safe, **more)


def _pair(suffixes: Sequence[str] | None) -> tuple[str, ...] | None:
    return None if suffixes is None else tuple(suffixes)


def _timed(inputs: Sequence[Input], time: str | tuple[str, str] | None) -> tuple[Input, Input]:
    """Left and right with their event times."""
    left, right = inputs
    if time is None:
        return left, right
    times = (time, time) if isinstance(time, str) else time
    if not (isinstance(times, tuple | list) and len(times) == 2 and all(isinstance(each, str) for each in times)):
        raise DescriptionError(f"time={time!r}; it is the event-time columns of left and right, or one name for both")
    return dataclasses.replace(left, event_time=times[0]), dataclasses.replace(right, event_time=times[1])


_OPERATORS: Final[Mapping[str, Callable[..., Description]]] = {
    "an aggregate": _aggregate,
    "a regular join": _regular,
    "a multi-way join": _multi,
    "an interval join": _interval,
    "an ASOF join": _asof,
}


def _read(operator: str) -> list[str]:
    """The arguments that an operator reads."""
    return [name for name in inspect.signature(_OPERATORS[operator]).parameters if name != "inputs"]


ENGINE_OPTIONS: Final = tuple(dict.fromkeys(name for operator in _OPERATORS for name in _read(operator)))
"""What any operator of `gpu_ops.engine` reads."""


def with_engine_options(function: Engine) -> Engine:
    """Shows the options of all operators as keyword arguments in the signature of `gpu_ops.engine`."""
    signature = inspect.signature(function)
    *named, inputs = signature.parameters.values()
    read = {x.name: x for operator in _OPERATORS.values() for x in inspect.signature(operator).parameters.values()}
    more = [
        x.replace(default=None if x.default is x.empty else x.default)
        for name, x in read.items()
        if name != "inputs" and name not in signature.parameters
    ]
    vars(function)["__signature__"] = signature.replace(parameters=[*named, *more, inputs])
    return function


def described(inputs: Mapping[str, Any], options: Mapping[str, Any]) -> Description:
    """The operator that the options of `gpu_ops.engine` call for.

    Args:
        inputs: by name: an `Input`, or what `Input.of` takes.
        options: of `ENGINE_OPTIONS`, those that were given.

    Raises:
        DescriptionError: an option that the operator does not read, or options that do not go together.
    """
    of_input = {field.name for field in dataclasses.fields(Input)}
    frames = {name: given for name, given in inputs.items() if name not in of_input or is_input(given)}
    for name in inputs.keys() - frames.keys():
        first = next(iter(frames), "left")
        raise DescriptionError(f"{name}= is said of an input: {first}=gpu_ops.Input.of(rows, {name}={inputs[name]!r})")
    sources = [
        dataclasses.replace(given, name=name) if isinstance(given, Input) else Input.of(given, name=name)
        for name, given in inputs.items()
    ]
    options = {name: value for name, value in options.items() if value is not None}
    operator = _called_for(sources, options)
    known = _read(operator)
    for name in options:
        if name not in known:
            word = right_word(name, known)
            raise DescriptionError(
                f"{operator} does not read {name}={f': {word}' if word else ''}; it reads {', '.join(known)}"
            )
    timed = all(source.event_time is not None for source in sources) or "time" in options
    if operator in ("an interval join", "an ASOF join") and not timed:
        first = next(name for name in options if name not in _read("a regular join"))
        raise DescriptionError(f"{first}= is of a join by time: name its columns, as time=('at', 'paid_at')")
    if operator == "an interval join" and not {"lower", "upper"} <= options.keys():
        raise DescriptionError("an interval join has lower= and upper=, an ASOF join direction=")
    if operator == "a multi-way join" and "on" not in options:
        raise DescriptionError("a join of more than two inputs has on=")
    return _OPERATORS[operator](sources, **options)


def _called_for(sources: Sequence[Input], options: Mapping[str, Any]) -> str:
    """The operator that options call for, by name."""
    if "aggregates" in options:
        if len(sources) != 1:
            names = ", ".join(source.name for source in sources) or "none"
            raise DescriptionError(f"aggregates= is for one input and no on=, not {names}")
        return "an aggregate"
    if len(sources) < 2:
        raise DescriptionError("a join has two inputs or more, by name: gpu_ops.engine(orders=..., prices=..., on=...)")
    if len(sources) > 2:
        if "time" in options:
            raise DescriptionError("a join by time has two inputs")
        return "a multi-way join"
    if "direction" in options:
        return "an ASOF join"
    if options.keys() & {"lower", "upper"}:
        return "an interval join"
    if options.keys() & {"tolerance", "allow_exact_matches"}:
        return "an ASOF join"
    return "an interval join" if "time" in options else "a regular join"


def check_engine_option(name: str) -> None:
    """Refuses an argument of `gpu_ops.engine` that is no input, as it has no columns.

    Raises:
        DescriptionError: there is a word for it here, or an option that is nearly called so.
    """
    word = right_word(name, ENGINE_OPTIONS)
    if word:
        stop = "" if word.endswith("?") else "."
        raise DescriptionError(
            f"engine() has no option {name}=; {word}{stop} There are the inputs, and {', '.join(ENGINE_OPTIONS)}"
        )

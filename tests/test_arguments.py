"""From arguments to a description: nothing is dropped, what is not read is refused with the right word beside it."""

from __future__ import annotations

import doctest
import inspect
import os
import random
import warnings
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import gpu_ops
from gpu_ops.descriptions.arguments import ENGINE_OPTIONS, check_options, described, right_word
from gpu_ops.errors import DescriptionError, GpuJoinError

S = pa.schema([("s", pa.string()), ("t", pa.int64()), ("x", pa.int64())])
Q = pa.schema([("s", pa.string()), ("u", pa.int64()), ("y", pa.int64())])
R = pa.schema([("s", pa.string()), ("v", pa.int64()), ("z", pa.int64())])
COUNT = {"n": "count(*)"}
TIMES = {"on": "s", "time": ("t", "u")}


@pytest.mark.parametrize(
    ("inputs", "options", "said"),
    [
        (1, {"by": "s", "aggregates": COUNT, "where": "x > 1"}, "an aggregate does not read where=: filter the"),
        (1, {"by": "s", "aggregates": COUNT, "how": "left"}, "does not read how=; it reads aggregates, by"),
        (1, {"by": "s", "aggregates": COUNT, "suffixes": ("", "_r")}, "does not read suffixes="),
        (1, {"aggregates": COUNT, "on": "s"}, "does not read on=: by= are the columns of groups"),
        (1, {"by": "s", "aggregates": COUNT, "time": ("t", "t"), "lower": 0}, "does not read (time|lower)="),
        (2, {"on": "s", "by": "t"}, "a regular join does not read by=: on= is the key"),
        (2, {**TIMES, "direction": "backward", "by": "s"}, r"an ASOF join does not read by=: .*time= are the columns"),
        (2, {**TIMES, "direction": "backward", "lower": 0}, "does not read lower=: tolerance= says how far apart"),
        (2, {**TIMES, "direction": "backward", "where": "x > y"}, "an ASOF join does not read where=: filter the"),
        (2, {**TIMES, "lower": 0, "upper": 5, "tolerance": 1}, "an interval join does not read tolerance=: lower= and"),
        (2, {**TIMES, "lower": 0, "upper": 5, "aggregates": COUNT}, "aggregates= is for one input"),
        (2, {"null_safe": True}, "null_safe= is of the keys, and on= names none"),
        (3, {"on": "s", "null_safe": True}, "a multi-way join does not read null_safe="),
        (3, {"on": "s", "time": ("t", "u")}, "a join by time has two inputs"),
        (2, {"on": "s", "left_on": "s"}, r"no option left_on=; on=\[\('left column', 'right column'\)\] is the key"),
        (2, {"on": "s", "strategy": "backward"}, "no option strategy=; direction= is 'backward'"),
        (2, {"on": "s", "condition": "x > y"}, "no option condition=; where= is the condition"),
        (2, {"on": "s", "suffix": "_r"}, "no option suffix=; suffixes="),
        (2, {"on": "s", "hwo": "left"}, r"no option hwo=; did you mean how=\?"),
    ],
)  # fmt: skip
def test_what_an_operator_does_not_read_is_refused(inputs: int, options: dict[str, Any], said: str) -> None:
    given = dict(zip(("l", "r", "third"), (S, Q, R)[:inputs], strict=False))
    with pytest.raises(DescriptionError, match=said):
        gpu_ops.engine(**given, **options)


def test_merge_asofs_words_are_not_another_join() -> None:
    """pandas' ``merge_asof(on=<time>, by=<key>)`` was a regular join on the time, whatever the key."""
    quotes = pa.schema([("s", pa.string()), ("t", pa.int64()), ("y", pa.int64())])
    with pytest.raises(DescriptionError, match="does not read by="):
        gpu_ops.engine(l=S, r=quotes, on="t", by="s", suffixes=("_l", "_r"))


SPELLINGS = {
    "full": ("full", "outer", "full_outer", "fullouter", "FULL", "Outer"),
    "left": ("left", "left_outer", "leftouter"),
    "right": ("right", "right_outer", "rightouter"),
    "semi": ("semi", "left_semi", "leftsemi"),
    "anti": ("anti", "left_anti", "leftanti"),
}


def test_join_types_as_pandas_polars_and_spark_spell_them() -> None:
    """Each gives what pandas' merge and polars' join of this name give."""
    orders, prices = pd.DataFrame({"id": [1, 2], "item": ["a", "b"]}), pd.DataFrame({"id": [2, 3], "price": [1, 2]})
    for how, spellings in SPELLINGS.items():
        for spelling in spellings:
            engine = gpu_ops.engine(o=orders, p=prices, on="id", how=spelling)
            engine.process(o=orders, p=prices)
            rows = {tuple(row.values()) for row in engine.table().to_pylist()}
            own = {"how": how, "on": "id", **({"coalesce": True} if how in ("full", "right", "left") else {})}
            joined = pl.from_pandas(orders).join(pl.from_pandas(prices), **own)  # type: ignore[arg-type]
            assert rows == set(joined.select(engine.table().column_names).rows()), spelling
            if how in ("left", "right"):
                assert len(rows) == len(orders.merge(prices, on="id", how=how))
    multi = gpu_ops.engine(l=S, r=Q, third=R, on="s", how=["left_outer", "inner"])
    assert [step.how for step in multi.description.steps] == ["left", "inner"]
    with pytest.raises(DescriptionError, match="how='sideways'"):
        gpu_ops.engine(o=orders, p=prices, on="id", how="sideways")
    with pytest.raises(DescriptionError, match="how=3"):
        gpu_ops.engine(o=orders, p=prices, on="id", how=3)


CHOICES: dict[str, tuple[Any, ...]] = {
    "aggregates": ({"n": "sum(x)"},), "by": ("s", ["s", "t"]), "on": ("s", [("s", "s")], [("t", "u")]),
    "how": ("left", "full", "outer", "semi", ["left", "inner"]), "where": ("x > y", "l.x > 0"),
    "suffixes": (("_l", "_r"), ("", "_r")), "emit": ("per_event", "at_end"), "null_safe": (True, [True]),
    "null_aware": (True,), "time": (("t", "u"), "t", "processing"), "lower": (-5, "1 second"), "upper": (7, "1 hour"),
    "lower_inclusive": (False,), "upper_inclusive": (False,), "keyed": (True,), "late": ("drop", "tag"),
    "min_cleanup": (9, "1 minute"), "timestamp": ("at",), "direction": ("forward", "nearest"),
    "tolerance": (3, "1 second"), "allow_exact_matches": (False,), "window_end": ("t",), "session_gap": (5, "1 minute"),
}  # fmt: skip
"""Of each option values that are not its default."""


def check_that_nothing_is_dropped(number: int) -> bool:
    """Options at random: refused, or each of them is in the description. Whether they were taken."""
    rng = random.Random(f"arguments-{number}")
    inputs = dict(zip(("l", "r", "third"), (S, Q, R)[: rng.choice((1, 2, 2, 2, 2, 3))], strict=False))
    likely = rng.choice(
        ((), ("aggregates", "by"), ("on",), ("on", "time", "lower", "upper"), ("on", "time", "direction"))
    )
    names = {*likely, *rng.sample(ENGINE_OPTIONS, rng.choice((0, 1, 1, 2, 3)))}
    options = {name: rng.choice(CHOICES[name]) for name in names}
    try:
        whole = described(inputs, options).to_json()
    except GpuJoinError:
        return False
    for name in options:
        if name == "emit" and options.get("window_end"):
            continue
        if name == "late" and options["late"] == "drop" and "how" not in options:
            continue  # an inner join drops late rows by itself
        try:
            less = described(inputs, {other: value for other, value in options.items() if other != name}).to_json()
        except GpuJoinError:
            continue
        assert less != whole, (number, name, options)
    return True


def test_nothing_that_is_given_is_dropped() -> None:
    assert set(CHOICES) == set(ENGINE_OPTIONS)
    assert sum(check_that_nothing_is_dropped(number) for number in range(400)) > 15


@pytest.mark.slow
def test_nothing_that_is_given_is_dropped_at_length() -> None:
    for number in range(1000, 1000 + int(os.environ.get("GPU_JOIN_ARGUMENTS", "30000"))):
        check_that_nothing_is_dropped(number)


def test_did_you_mean_says_what_is_near_and_lists_all_arguments() -> None:
    from gpu_ops.spark.api import by_time, groups, joins, streams

    for function, options, name, said in (
        (by_time.asof_join, by_time.AsofJoinOptions, "by", r"on= is the key \(pandas' and polars' by\), and time="),
        (by_time.asof_join, by_time.AsofJoinOptions, "strategy", "direction= is"),
        (by_time.asof_join, by_time.AsofJoinOptions, "where", "filter the inputs, or what comes out"),
        (joins.join, streams.JoinOptions, "left_on", r"on=\[\('left column', 'right column'\)\] is the key"),
        (joins.join, streams.JoinOptions, "condition", "where= is the condition"),
        (joins.join, streams.JoinOptions, "outer", "how='full'"),
        (joins.join, streams.JoinOptions, "checkpointLocation", "state= is the folder of the state"),
        (joins.join, streams.JoinOptions, "statte", r"did you mean state=\?"),
        (groups.top, streams.ChangelogOptions, "k", "n= is how many rows of a group"),
        (groups.aggregate, streams.ChangelogOptions, "group_by", "by= are the columns of groups"),
        (groups.latest, streams.ChangelogOptions, "by", "key= is the key"),
    ):
        with pytest.raises(TypeError, match=rf"{function.__name__}\(\) has no option {name}=; {said}") as caught:
            check_options(function, [name], options)
        listed = str(caught.value).rpartition("There are ")[2].split(", ")
        assert set(options.__annotations__) < set(listed)
        assert len(set(listed)) == len(listed)
        assert "options" not in listed
    assert {"left", "right", "on", "time", "direction", "tolerance", "how"} <= set(listed_by(by_time.asof_join))
    with pytest.raises(TypeError, match=r"join\(\) has no option zzz=\. There are left, right, on, how, "):
        check_options(joins.join, ["zzz"], streams.JoinOptions)
    assert right_word("zzz", ENGINE_OPTIONS) == ""


def listed_by(function: Any) -> list[str]:
    from gpu_ops.spark.api.by_time import AsofJoinOptions

    with pytest.raises(TypeError) as caught:
        check_options(function, ["zzz"], AsofJoinOptions)
    return str(caught.value).rpartition("There are ")[2].split(", ")


def test_an_input_that_is_not_there_is_told_only_a_near_name() -> None:
    engine = gpu_ops.engine(orders=S, prices=Q, on="s")
    with pytest.raises(DescriptionError, match=r"no input 'price'; did you mean prices=\? There are orders, prices"):
        engine.process(price=S)
    with pytest.raises(DescriptionError, match="no input 'customers'; there are orders, prices"):
        engine.process(customers=S)


def test_an_engine_by_processing_time_and_by_the_event_times_of_its_inputs() -> None:
    engine = gpu_ops.engine(l=S, r=Q, on="s", time="processing", lower=0, upper="1 minute")
    assert engine.description.interval.time == "processing"
    timed = {name: gpu_ops.Input.of(schema, event_time=time) for name, schema, time in (("l", S, "t"), ("r", Q, "u"))}
    assert gpu_ops.engine(**timed, on="s", lower=0, upper=5).description.by_event_time
    assert gpu_ops.engine(**timed, on="s", direction="nearest", tolerance=5).description.asof.tolerance_ms == 5


def public_functions() -> dict[str, Any]:
    """The functions that users call, by their whole names."""
    modules = {"gpu_ops": gpu_ops, "gpu_ops.spark": gpu_ops.spark, "gpu_ops.sinks": gpu_ops.sinks}
    named = {f"{m}.{name}": getattr(module, name) for m, module in modules.items() for name in module.__all__}
    return {name: value for name, value in named.items() if inspect.isfunction(value)}


def test_help_lists_each_option_and_explains_it_and_has_an_example() -> None:
    """`help(gpu_ops.join)` showed ``**options``, and said ``as in join`` of what they mean."""
    functions = public_functions()
    assert len(functions) > 30
    for name, function in functions.items():
        parameters = inspect.signature(function).parameters
        rest = {x.name for x in parameters.values() if x.kind is x.VAR_KEYWORD}
        # inputs and outputs by name; options of Spark's readers, by Spark's names
        own = {
            **{f"gpu_ops.{one}": {"inputs"} for one in ("sql", "plan_change", "change", "undo_change")},
            "gpu_ops.engine": {"inputs"},
            "gpu_ops.outputs": {"changelogs"},
            "gpu_ops.sinks.each": {"views"},
        }.get(name, set())
        assert rest == ({"options"} if name.endswith(".read_files") else own), name
        text = inspect.getdoc(function) or ""
        for parameter in parameters.values():
            assert f"    {parameter.name}: " in text or f"``{parameter.name}``" in text, (name, parameter.name)
        assert ">>> " in text, name


def test_the_signature_has_what_the_function_takes() -> None:
    from gpu_ops.spark.api import by_time, joins, streams

    for function, options in (
        (joins.join, streams.JoinOptions),
        (joins.anti_join, streams.SemiJoinOptions),
        (by_time.asof_join, by_time.AsofJoinOptions),
    ):
        names = list(inspect.signature(function).parameters)
        assert set(options.__annotations__) < set(names)
        assert len(set(names)) == len(names)
    parameters = inspect.signature(joins.join).parameters
    defaults = {name: parameters[name].default for name in ("state", "backend", "emit", "null_safe", "backlog")}
    assert defaults == {"state": None, "backend": "auto", "emit": "per_batch", "null_safe": False, "backlog": False}
    assert {*ENGINE_OPTIONS, "backend", "output", "inputs"} < set(inspect.signature(gpu_ops.engine).parameters)


@pytest.mark.slow
@pytest.mark.spark
def test_the_examples_of_public_functions_give_what_they_say(tmp_path: Any) -> None:
    """One Spark session for all; what needs a server of its own is skipped in the example itself."""
    from gpu_ops.spark.testing import arrive

    session = gpu_ops.spark.session("examples", master="local[2]", config={"spark.sql.shuffle.partitions": "2"})
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for number, (name, function) in enumerate(public_functions().items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        names = {"gpu_ops": gpu_ops, "spark": session, "pa": pa, "arrive": arrive, "folder": str(folder)}
        example = doctest.DocTestParser().get_doctest(inspect.getdoc(function) or "", names, name, None, 0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of examples without a state folder
            runner.run(example)
    session.stop()
    assert runner.summarize(verbose=False).failed == 0

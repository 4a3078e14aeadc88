"""Variances, correlations and collected values, on any backend: after every micro-batch what fractions say."""

from __future__ import annotations

import decimal
import math
import random
from collections import Counter
from fractions import Fraction
from typing import Any

import pyarrow as pa
import pytest
from oracle.drive import Backend

from gpu_ops.descriptions.aggregate import MOMENTS, Aggregate, parse_measure
from gpu_ops.descriptions.description import Emit
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.kinds import from_json
from gpu_ops.errors import DescriptionError
from kernels.conftest import EMULATED, only_on
from kernels.test_aggregate import KINDS, Event, Folded, finished, table_of

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        ("g", pa.string()),
        ("x", pa.float64()),
        ("y", pa.float64()),
        ("i", pa.int64()),
        ("s", pa.string()),
    ]
)
NUMBERS = {f"{name}_{column}": f"{name}({column})" for name in ("stddev", "stddev_pop", "var_pop") for column in "xi"}
NUMBERS |= {"variance": "variance(x)", "samp": "covar_samp(x, y)", "pop": "covar_pop(y, i)", "corr": "corr(x, y)"}
LISTS = {"list": "collect_list(x)", "set": "collect_list(distinct i)", "all": "array_agg(s)", "text": "string_agg(s)"}
LISTS |= {"joined": "string_agg(s, ', ')", "n": "approx_count_distinct(s)"}
EXACT = decimal.Context(prec=400, Emax=999_999, Emin=-999_999)
ODD = [None, math.nan, math.inf, -math.inf]
TINY: list[float | None] = [5e-324, 1e-160, -3e-165]
LARGE: list[float | None] = [1e300, -1.7e308, 1e154]


def some_events(kind: str, seed: int, count: int, more: list[float | None]) -> list[Event]:
    choice, found = random.Random(seed), list[Event]()
    values = [None, 0.0, -0.0, 0.1, 1e9 + 0.25, 1e9 + 0.5, 3.0, *more]
    for _ in range(count):
        row = (
            choice.randrange(6),
            choice.choice(["a", "b"]),
            choice.choice([*values, choice.random()]),
            choice.choice([*values, choice.random()]),
            choice.choice([None, 1, 2, 7, 2**62 + 1, -(2**63)]),
            choice.choice([None, "", "a", "b", "ä"]),
        )
        word = "+I" if kind == "insert only" else choice.choice(["+I", "+I", "-D"])
        if word == "-D" and found and choice.random() < 0.9:
            row = choice.choice(found)[1]
        found.append((word, row))
    return found


def _decimal(number: Fraction) -> decimal.Decimal:
    return EXACT.divide(decimal.Decimal(number.numerator), decimal.Decimal(number.denominator))


def _float(number: decimal.Decimal) -> float:
    return float(number)


def moment(function: str, pairs: list[tuple[Any, Any]]) -> float | None:
    """A function of MOMENTS over the pairs of its columns' values; of one column both are the same."""
    known = [(float(one), float(other)) for one, other in pairs if one is not None and other is not None]
    least = 2 if function.endswith("_samp") or function == "corr" else 1
    if len(known) < least:
        return None
    if not all(math.isfinite(value) for pair in known for value in pair):
        return math.nan
    n = len(known)
    exact = [(Fraction(one), Fraction(other)) for one, other in known]

    def spread(a: int, b: int) -> Fraction:
        products = sum((pair[a] * pair[b] for pair in exact), Fraction())
        return n * products - sum((p[a] for p in exact), Fraction()) * sum((p[b] for p in exact), Fraction())

    if function == "corr":
        below = spread(0, 0) * spread(1, 1)
        if not below:
            return None
        return _float(EXACT.divide(_decimal(spread(0, 1)), EXACT.sqrt(_decimal(below))))
    value = _decimal(spread(0, 1) / (n * (n - function.endswith("_samp"))))
    return _float(EXACT.sqrt(value) if function.startswith("stddev") else value)


def near(found: Any, wanted: Any) -> bool:
    """Equal, or of numbers apart by less than some of the last digits."""
    if not isinstance(found, float) or not isinstance(wanted, float) or found == wanted:
        return bool(found == wanted)
    if math.isnan(found) or math.isnan(wanted):
        return math.isnan(found) and math.isnan(wanted)
    return math.isclose(found, wanted, rel_tol=8 * 2.0**-52, abs_tol=5e-324)


def numbers_of(rows: list[tuple[Any, ...]]) -> list[Any]:
    found = []
    for name, text in NUMBERS.items():
        measure = parse_measure(name, text)
        places = [SCHEMA.names.index(column) for column in measure.columns]
        found.append(moment(measure.function, [(row[places[0]], row[places[-1]]) for row in rows]))
    return found


def lists_of(rows: list[tuple[Any, ...]]) -> list[Any]:
    x, i, s = ([row[n] for row in rows if row[n] is not None] for n in (2, 4, 5))
    texts = sorted(s, key=str.encode)
    ordered = sorted(value + 0.0 for value in x if not math.isnan(value)), [v for v in x if math.isnan(v)]
    return [
        [*ordered[0], *ordered[1]],
        sorted(set(i)),
        texts,
        "".join(texts) if s else None,
        ", ".join(texts) if s else None,
        len(set(s)),
    ]


def same(found: list[Any], wanted: list[Any]) -> bool:
    """Compares results; numbers may be apart as `near` says, in lists they are the same."""
    return all(near(a, b) or repr(a) == repr(b) for a, b in zip(found, wanted, strict=True))


def follow(engines: Backend, aggregate: Aggregate, kind: str, events: list[Event], size: int) -> None:
    """After each micro-batch, with a restart between, each group is what the rows that are there say."""
    input_, there, live, state = Folded(kind), Counter[str](), dict[str, list[Any]](), None
    wanted_of = numbers_of if aggregate.measures[0].function in MOMENTS else lists_of
    half = len(events) // 2
    for part in (events[:half], events[half:]):
        with engines.engine(from_json(aggregate.to_json())) as engine:
            if state is not None:
                engine.restore(state)
            for start in range(0, len(part), size):
                input_.take(part[start : start + size])
                for row in engine.process(table_of(kind, part[start : start + size], SCHEMA)).to_pylist():
                    word, *values = row.values()
                    there[repr(values)] += 1 if word[0] == "+" else -1
                    assert there[repr(values)] in (0, 1), (word, values)
                    live[repr(values)] = values
                there = +there
                groups = {name: [row for row in input_.rows if row[1] == name] for name in ("a", "b")}
                found = {live[text][0]: live[text][1:] for text in there}
                assert found.keys() == {name for name, own in groups.items() if own}
                for name, values in found.items():
                    assert same(values, wanted_of(groups[name])), (values, wanted_of(groups[name]))
            state = engine.snapshot()


def described(kind: str, emit: Emit, calls: dict[str, str]) -> Aggregate:
    return Aggregate.of(Input("t", SCHEMA, **KINDS[kind]), ("g",), calls, emit)  # type: ignore[arg-type]


@pytest.mark.one_in(24, all=9)
@only_on("cpu-tiny", "gpu", *EMULATED)
@pytest.mark.parametrize("more", [[], ODD, TINY, LARGE], ids=["plain", "odd", "tiny", "large"])
@pytest.mark.parametrize("emit", ["per_batch", "per_event"])
@pytest.mark.parametrize("kind", KINDS)
def test_variances_and_correlations(engines: Backend, kind: str, emit: Emit, more: list[float | None]) -> None:
    follow(engines, described(kind, emit, NUMBERS), kind, some_events(kind, len(more), 48, more), 8)


@pytest.mark.one_in(9, all=4)
@only_on("cpu-tiny", "gpu", *EMULATED)
@pytest.mark.parametrize("emit", ["per_batch", "per_event"])
@pytest.mark.parametrize("kind", KINDS)
def test_collected_values_are_in_order(engines: Backend, kind: str, emit: Emit) -> None:
    follow(engines, described(kind, emit, LISTS), kind, some_events(kind, 5, 48, [math.nan, math.inf]), 8)


@pytest.mark.one_in(9)
@only_on("cpu-tiny", "gpu", *EMULATED)
@pytest.mark.parametrize("kind", KINDS)
def test_the_end_of_input_gives_the_same_bits(engines: Backend, kind: str) -> None:
    """Whatever the order of rows was, and what was taken back."""
    events = some_events(kind, 9, 60, [*ODD, *TINY, *LARGE])
    for calls in (NUMBERS, LISTS):
        parts = [table_of(kind, events[start : start + 15], SCHEMA) for start in range(0, 60, 15)]
        last = finished(engines, described(kind, "at_end", calls), parts)
        with engines.engine(described(kind, "per_batch", calls)) as engine:
            folded = Counter[str]()
            for part in parts:
                for word, *values in (row.values() for row in engine.process(part).to_pylist()):
                    folded[repr(values)] += 1 if word == "+I" else -1
        assert Counter(repr(list(row.values())[1:]) for row in last.to_pylist()) == +folded


@only_on("cpu-tiny", *EMULATED)
def test_a_large_offset_costs_no_digits(engines: Backend) -> None:
    """1e9 + 4, 7, 13, 16 has the variance of 4, 7, 13, 16; what was there before has left nothing."""
    schema = pa.schema([("x", pa.float64())])
    calls = {"v": "var_samp(x)", "d": "stddev_pop(x)"}
    with engines.engine(Aggregate.of(Input("t", schema, row_kind="op"), (), calls, "per_batch")) as engine:
        engine.process(pa.table({"op": ["+I"] * 3, "x": [1e300, math.inf, -1e17]}))
        changes = pa.table(
            {"op": ["-D"] * 3 + ["+I"] * 4, "x": [1e300, math.inf, -1e17, *(1e9 + n for n in (4, 7, 13, 16))]}
        )
        assert engine.process(changes).to_pylist()[-1] == {"row_kind": "+I", "v": 30.0, "d": math.sqrt(22.5)}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("corr(x)", "it takes two columns"),
        (("stddev_pop", "x", "y"), "it takes a column"),
        ("stddev(s)", r"stddev_samp\(s\) of type string: it takes numbers"),
        ("corr(x, s)", r"corr\(s\) of type string: it takes numbers"),
        ("corr(x, none)", "none"),
        ("collect_list(l)", "there is no order, in which values are collected"),
        ("string_agg(x)", "it takes text, CAST it"),
        ("stddev(distinct x)", "DISTINCT goes with count and collect_list only"),
        ("median(x)", "no aggregate 'median'"),
    ],
)
def test_what_is_refused(call: Any, message: str) -> None:
    schema = SCHEMA.append(pa.field("l", pa.list_(pa.int64())))
    with pytest.raises(DescriptionError, match=message):
        Aggregate.of(Input("t", schema), ("g",), {"n": call}, "per_batch")

"""One definition of each aggregate: to the bit the same, however its result comes out and rows are cut, and the right one."""

from __future__ import annotations

import datetime as dt
import decimal
import math
import random
import struct
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from oracle.drive import Backend

from gpu_ops.descriptions.aggregate import Aggregate
from gpu_ops.descriptions.description import Emit
from gpu_ops.descriptions.inputs import Input
from gpu_ops.spark.tasks.rows import Slices
from kernels.test_aggregate import exactly

pytestmark = pytest.mark.thorough

END = dt.datetime(2026, 1, 1, 0, 1)
NAN_OF_OTHER_BITS = struct.unpack("<d", struct.pack("<Q", 0xFFF8000000000123))[0]
Made = Callable[[random.Random], Any]


def _digits(kind: pa.Decimal128Type) -> Made:
    """Decimals of a type: the greatest, halves of the next digit, and any other."""
    most = 10**kind.precision - 1
    some = [most, -most, most // 2 + 1, 5, -5, 1, 0, 7, most // 3]
    wide = decimal.Context(prec=60)
    return lambda choice: decimal.Decimal(choice.choice([*some, choice.randrange(-most, most + 1)])).scaleb(
        -kind.scale, wide
    )


def _integers(kind: pa.DataType) -> Made:
    low, high = int(np.iinfo(kind.to_pandas_dtype()).min), int(np.iinfo(kind.to_pandas_dtype()).max)
    return lambda choice: choice.choice([low, high, low + 1, high - 1, 3, 0, 1, choice.randrange(low, high)])


def _doubles(choice: random.Random) -> float:
    most = math.nextafter(math.inf, 0)
    odd = [0.0, -0.0, 1e300, -1e300, most, -most, 5e-324, 2.0**53, 1.0, 0.1, -0.1, 1e16]
    rare = [math.nan, NAN_OF_OTHER_BITS, math.inf, -math.inf]
    if choice.random() < 0.05:
        return choice.choice(rare)
    return choice.choice([choice.choice(odd), math.ldexp(choice.uniform(-1, 1), choice.randrange(-1074, 1025))])


def _floats(choice: random.Random) -> float:
    return float(np.float32(choice.choice([0.0, -0.0, math.nan, math.inf, 3e38, -3e38, 0.1, choice.uniform(-9, 9)])))


_WHOLE = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
_DECIMALS = [(9, 2), (18, 0), (19, 3), (28, 2), (30, 10), (38, 0), (38, 4), (38, 38)]
_TEXT: Made = lambda choice: choice.choice(["", "a", "A", "é", "a\0", "ab", "\U0001f600", "z" * 40])  # noqa: E731
KINDS: dict[str, tuple[pa.DataType, Made]] = {
    **{str(kind): (kind, _integers(kind)) for kind in _WHOLE},
    **{f"d{p}_{s}": (pa.decimal128(p, s), _digits(pa.decimal128(p, s))) for p, s in _DECIMALS},
    "double": (pa.float64(), _doubles),
    "float": (pa.float32(), _floats),
    "text": (pa.string(), _TEXT),
    "bytes": (pa.binary(), lambda choice: choice.choice([b"", b"\0", b"\x7f", b"\x80", b"\xff", b"\xff\0", b"ab"])),
    "bool": (pa.bool_(), lambda choice: choice.random() < 0.5),
    "date": (pa.date32(), lambda choice: choice.choice([-(2**31), 2**31 - 1, -1, 0, 20000])),
    "stamp": (pa.timestamp("us", "UTC"), lambda choice: choice.choice([-(2**63), 2**63 - 1, -1, 0, 10**15])),
    "span": (pa.duration("us"), lambda choice: choice.choice([-(2**63), 2**63 - 1, -1, 0, 5])),
}
ADDED, ORDERED = ("sum", "avg"), ("min", "max", "first", "last", "count")


def calls_of(kind: pa.DataType) -> dict[str, str]:
    t = pa.types
    adds = t.is_integer(kind) or t.is_floating(kind) or t.is_decimal(kind)
    found = {function: f"{function}(x)" for function in (*ORDERED, *(ADDED if adds else ()))}
    return {**found, "different": "count(distinct x)", "n": "count(*)"}


def bits(value: Any) -> Any:
    """A value such that two are equal where their bits are; every NaN is one."""
    if isinstance(value, float):
        return "nan" if math.isnan(value) else value.hex()
    return repr(value)


Event = tuple[str, int, Any, Any]
"""A row kind, a number, a group, a value."""


def some_events(made: Made, choice: random.Random, *, only_inserts: bool) -> list[Event]:
    """Changes of rows, all of which are there; every fifth value is null."""
    there: list[Event] = []
    found: list[Event] = []
    for number in range(choice.randrange(5, 40)):
        if there and not only_inserts and choice.random() < 0.35:
            found.append(("-D", *there.pop(choice.randrange(len(there)))[1:]))
            continue
        value = None if choice.random() < 0.2 else made(choice)
        row = ("+I", number, choice.choice(["a", "b", None]), value)
        found.append(row)
        there.append(row)
    return found


def table_of(events: list[Event], kind: pa.DataType, *, row_kind: bool) -> pa.Table:
    whole = pa.types.is_temporal(kind)
    values = [event[3] for event in events]
    column = (
        pa.array(values, pa.int32() if kind == pa.date32() else pa.int64()).cast(kind)
        if whole
        else pa.array(values, kind)
    )
    columns = {
        "id": pa.array([event[1] for event in events], pa.int64()),
        "g": pa.array([event[2] for event in events], pa.string()),
        "x": column,
        "t": pa.array([dt.datetime(2026, 1, 1)] * len(events), pa.timestamp("us")),
        "w": pa.array([END] * len(events), pa.timestamp("us")),
    }
    if row_kind:
        columns["op"] = pa.array([event[0] for event in events], pa.string())
    return pa.table(columns)


def result(engines: Backend, events: list[Event], kind: pa.DataType, emit: Emit, cut: int, *, row_kind: bool) -> Any:
    """Each group's row, by bits, after all micro-batches."""
    empty = table_of([], kind, row_kind=row_kind)
    schema = empty.schema if not row_kind else empty.drop(["op"]).schema
    timed = {"event_time": "t"} if emit == "at_watermark" else {}
    source = Input("t", schema, row_kind="op" if row_kind else None, sequence_by=None, **timed)  # type: ignore[arg-type]
    by = ("w", "g") if emit == "at_watermark" else ("g",)
    window = {"window_end": "w"} if emit == "at_watermark" else {}
    aggregate = Aggregate.of(source, by, calls_of(kind), emit, **window)  # type: ignore[arg-type]
    found: dict[Any, Any] = {}
    changes: list[pa.Table] = []
    with engines.engine(aggregate) as engine:
        for start in range(0, len(events), cut):
            table = table_of(events[start : start + cut], kind, row_kind=row_kind)
            changes.append(engine.process(table, **({"watermark": 0} if timed else {})))
        if emit == "at_watermark":
            changes.append(engine.process(empty, watermark=int(END.timestamp() * 1000) + 10**8))
        if emit == "at_end":
            changes.append(engine.finish())
    for table in changes:
        columns = {name: _plain(table[name]) for name in table.column_names}
        for place, word in enumerate(columns.pop("row_kind")):
            columns.pop("w", None)
            row = tuple((name, bits(values[place])) for name, values in columns.items())
            group = columns["g"][place]
            if word[0] == "-":
                assert found.pop(group) == row
            else:
                found[group] = row
    return found


def _plain(column: pa.ChunkedArray) -> list[Any]:
    kind = column.type
    if pa.types.is_temporal(kind):
        column = column.cast(pa.int32() if kind == pa.date32() else pa.int64())
    return column.to_pylist()


def right(events: list[Event], kind: pa.DataType) -> dict[Any, Any]:
    """What it has to be, by Python's own numbers; ``first`` and ``last`` aside."""
    rows: dict[int, Event] = {}
    for event in events:
        if event[0] == "+I":
            rows[event[1]] = event
        else:
            del rows[event[1]]
    groups: dict[Any, list[Any]] = {}
    for event in rows.values():
        groups.setdefault(event[2], []).append(event[3])
    return {group: _row(values, kind) for group, values in groups.items()}


def _row(values: list[Any], kind: pa.DataType) -> dict[str, Any]:
    some = [x for x in values if x is not None]
    t = pa.types
    found: dict[str, Any] = {"n": len(values), "count": len(some)}
    one = [_code(x) for x in some]
    found["different"] = len(set(one))
    order = sorted(some, key=_code)
    found["min"], found["max"] = (order[0], order[-1]) if some else (None, None)
    if t.is_floating(kind):
        found["min"], found["max"] = (x if x is None else x + 0.0 for x in (found["min"], found["max"]))
    if not some:
        return found | (dict.fromkeys(ADDED) if "sum" in calls_of(kind) else {})
    if t.is_integer(kind):
        total = sum(some)
        found["sum"] = (total + 2**63) % 2**64 - 2**63
        found["avg"] = float(Fraction(total)) / len(some)
    elif t.is_floating(kind):
        finite = exactly([x for x in some if math.isfinite(x)])
        odd = [x for x in some if not math.isfinite(x)]
        found["sum"] = sum(odd) if odd else finite
        found["avg"] = found["sum"] / len(some) + 0.0
    elif t.is_decimal(kind):
        total = sum(int(x.scaleb(kind.scale, decimal.Context(prec=60))) for x in some)
        found["sum"] = _decimal(total, min(38, kind.precision + 10), kind.scale)
        more = min(38, kind.scale + 4) - kind.scale
        twice = (2 * abs(total) * 10**more + len(some)) // (2 * len(some))
        mean = _decimal(-twice if total < 0 else twice, 38, kind.scale + more)
        found["avg"] = None if abs(total) >= 10**38 else mean
    return found


def _decimal(whole: int, precision: int, scale: int) -> decimal.Decimal | None:
    return None if abs(whole) >= 10**precision else decimal.Decimal(whole).scaleb(-scale, decimal.Context(prec=60))


def _code(value: Any) -> Any:
    """By which values are ordered, and told apart."""
    if isinstance(value, float):
        return (1, 0.0) if math.isnan(value) else (0, value + 0.0)
    return value.encode() if isinstance(value, str) else value


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", KINDS)
def test_every_way_of_emitting_gives_the_same_bits(engines: Backend, name: str) -> None:
    """All functions of a type: event by event, by micro-batches of any size, at the watermark, at the end."""
    kind, made = KINDS[name]
    choice = random.Random(name)
    for turn in range(2):
        row_kind = bool(turn % 2)
        events = some_events(made, choice, only_inserts=not row_kind)
        wanted = right(events, kind)
        all_at_once = result(engines, events, kind, "at_end", len(events), row_kind=row_kind)
        assert all_at_once.keys() == wanted.keys()
        for group, row in all_at_once.items():
            told = dict(row)
            assert {k: told[k] for k in wanted[group]} == {k: bits(v) for k, v in wanted[group].items()}, group
        emits: tuple[Emit, ...] = ("per_event", "per_batch", "at_watermark", "at_end")
        for emit in emits:
            for cut in (3, 40):
                assert result(engines, events, kind, emit, cut, row_kind=row_kind) == all_at_once, (emit, cut)


@pytest.mark.parametrize("name", ["int8", "int64", "uint64", "d38_4", "d9_2", "date"])
def test_windows_in_two_phases_give_the_same_bits(engines: Backend, name: str) -> None:
    """What `gpu_ops.query.rewrite` merges: aggregates of slices, aggregated."""
    kind, made = KINDS[name]
    choice = random.Random(name)
    sums = pa.types.is_integer(kind)
    functions = ("count", "min", "max", *(("sum",) if sums else ()))
    merged = {"count": "sum", "min": "min", "max": "max", "sum": "sum"}
    types = {"count": pa.int64(), "sum": pa.int64(), "min": kind, "max": kind}
    for _ in range(5):
        rows = table_of(some_events(made, choice, only_inserts=True), kind, row_kind=False)
        fields = [("w", pa.timestamp("us")), ("g", pa.string()), *((f, types[f]) for f in functions)]
        minute = 60_000_000
        slices = Slices(
            "t",
            minute,
            minute,
            0,
            (("w", 1), ("g", None)),
            tuple((f, "x") for f in functions),
            rows.schema,
            pa.schema(fields),
        )
        local = pa.Table.from_batches(slices.of(rows.to_batches(max_chunksize=5)), pa.schema(fields))
        local = pa.concat_tables([local, pa.schema(fields).empty_table()])
        outer = Aggregate.of(
            Input("t", local.schema), ("w", "g"), {f: f"{merged[f]}({f})" for f in functions}, "per_batch"
        )
        plain = Aggregate.of(Input("t", rows.schema), ("w", "g"), {f: f"{f}(x)" for f in functions}, "per_batch")
        found = []
        for aggregate, table in ((outer, local), (plain, rows)):
            with engines.engine(aggregate) as engine:
                given = engine.process(table)
            found.append(sorted(map(repr, zip(*(_plain(given[c]) for c in given.column_names), strict=True))))
        assert found[0] == found[1]

"""Whatever is described and whatever comes, a public call ends in a result or in an error of the pack.

Types and values are drawn at random, hostile ones among them. What is refused must have changed nothing: an engine that
never saw it says the same from then on, and keeps the same.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kernels.support import plain_rows
from oracle.drive import InPieces

from gpu_ops.descriptions.aggregate import Aggregate
from gpu_ops.descriptions.by_time import IntervalJoin
from gpu_ops.descriptions.description import Description
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.interval import Interval
from gpu_ops.descriptions.join import CoGroup, Join
from gpu_ops.descriptions.keys import Key, normalize_on
from gpu_ops.descriptions.kinds import from_json
from gpu_ops.descriptions.multi_join import MultiJoin
from gpu_ops.descriptions.times import parse_bound, parse_duration
from gpu_ops.errors import GpuJoinError
from gpu_ops.join_engine import JoinEngine
from gpu_ops.values import carried, check_array, readable, wrong_text

pytestmark = pytest.mark.thorough

NAMES = ("k", "v", "t", "K", "op", "row_kind", "ä", "a.b", "`x`", "select", "", " ", "left")
LEAVES = (
    *(getattr(pa, f"{u}int{b}")() for b in (8, 16, 32, 64) for u in ("", "u")),
    pa.float32(), pa.float64(), pa.float16(), pa.bool_(), pa.null(), pa.string(), pa.string(), pa.large_string(),
    pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(0), pa.binary(3),
    pa.date32(), pa.date64(),
    *(pa.timestamp(u, z) for u in ("s", "ms", "us", "ns") for z in (None, "UTC")), pa.timestamp("us", "Europe/Berlin"),
    pa.timestamp("us", "Mars/Olympus"), pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns"),
    *(pa.duration(u) for u in ("s", "us", "ns")), pa.month_day_nano_interval(),
    pa.decimal128(5, 2), pa.decimal128(38, 0),
    pa.decimal128(38, 38), pa.decimal128(10, -3), pa.decimal256(50, 3),
)  # fmt: skip
COMMON = (
    pa.int64(),
    pa.int32(),
    pa.string(),
    pa.float64(),
    pa.timestamp("us"),
    pa.timestamp("ns"),
    pa.decimal128(9, 2),
)
TEXTS = (b"", b"a", b"b", b"ab", b"\xc3\xa4", b"\xff", b"a\xc3", b"\x00", b"x" * 300, b"%", b"+I")
KINDS = (b"+I", b"+I", b"+I", b"-D", b"+U", b"-U", b"c", b"d", b"insert")
GARBAGE = (
    None,
    0,
    -1,
    10**30,
    1.5,
    True,
    "x",
    "\ud800",
    b"k",
    ("k",),
    ["k"],
    {"k": 1},
    float("nan"),
    object(),
    pa.int64(),
)


class Anything:
    """Draws descriptions, columns and calls; ``hostile`` is how often something is none of what it should be."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.hostile = self.rng.choice((0.0, 0.02, 0.15))

    def odd(self) -> bool:
        return self.rng.random() < self.hostile

    def kind(self, depth: int = 0) -> pa.DataType:
        """A type; one that is not carried only now and then."""
        kind = self._kind(depth)
        return kind if self.odd() or carried(kind) is not None else self.rng.choice(COMMON)

    def _kind(self, depth: int) -> pa.DataType:
        rng = self.rng
        if rng.random() < 0.75 - depth / 10:
            return rng.choice(COMMON)
        if depth > 2 or rng.random() < 0.6:
            return rng.choice(LEAVES)
        inner = functools.partial(self.kind, depth + 1)
        return rng.choice(
            (
                lambda: pa.list_(inner()),
                lambda: pa.large_list(inner()),
                lambda: pa.list_(inner(), rng.randrange(3)),
                lambda: pa.map_(rng.choice(COMMON), inner()),
                lambda: pa.struct([nullable_or_not(n, inner(), rng) for n in rng.sample("abc", rng.randrange(4))]),
                lambda: pa.dictionary(rng.choice((pa.int8(), pa.uint32())), inner()),
                lambda: pa.list_view(inner()),
                lambda: pa.run_end_encoded(pa.int32(), rng.choice(COMMON)),
            )
        )()

    def array(self, kind: pa.DataType, size: int, *, nulls: float = 0.2) -> pa.Array:
        """Values of a type, in a slice of a longer array."""
        before = self.rng.choice((0, 0, 1, 9))
        return self._array(kind, before + size + self.rng.choice((0, 2)), nulls).slice(before, size)

    def _array(self, kind: pa.DataType, size: int, nulls: float) -> pa.Array:
        rng, t = self.rng, pa.types
        mask = pa.array([rng.random() < nulls for _ in range(size)], pa.bool_())
        if t.is_null(kind):
            return pa.nulls(size)
        if t.is_dictionary(kind):
            return pa.DictionaryArray.from_arrays(
                self._places(kind.index_type, size, 3, mask), self._array(kind.value_type, 3, nulls)
            )
        if t.is_run_end_encoded(kind):
            values = pa.chunked_array([self._array(kind.value_type, size, nulls)], kind.value_type)
            if pa.types.is_string(kind.value_type):  # Arrow makes none with text that is no UTF-8
                values = readable(values)
            return pa.RunEndEncodedArray.from_arrays(pa.array(range(1, size + 1), pa.int32()), values.chunk(0))
        if t.is_struct(kind):
            children = [self._array(f.type, size, nulls if f.nullable else 0) for f in kind]
            if not children:
                return pa.array([{}] * size, kind)
            return pa.StructArray.from_arrays(children, fields=list(kind), mask=mask)
        if t.is_fixed_size_list(kind):
            return (
                pa.FixedSizeListArray.from_arrays(
                    self._array(kind.value_type, size * kind.list_size, nulls), type=kind, mask=mask
                )
                if kind.list_size
                else pa.array([[]] * size, kind)
            )
        if t.is_list_view(kind):
            sizes = [rng.randrange(3) for _ in range(size)]
            starts = [rng.randrange(3) for _ in range(size)]
            return pa.ListViewArray.from_arrays(
                pa.array(starts, pa.int32()),
                pa.array(sizes, pa.int32()),
                self._array(kind.value_type, 6, nulls),
                type=kind,
            )
        if t.is_nested(kind):
            ends = list(itertools.accumulate((rng.randrange(3) for _ in range(size)), initial=rng.randrange(2)))
            if t.is_map(kind):
                keys = self._array(kind.key_type, ends[-1], 0)
                return pa.MapArray.from_arrays(
                    pa.array(ends, pa.int32()), keys, self._array(kind.item_type, ends[-1], nulls), kind
                )
            made = pa.LargeListArray if t.is_large_list(kind) else pa.ListArray
            offsets = pa.array(ends, pa.int64() if t.is_large_list(kind) else pa.int32())
            return made.from_arrays(offsets, self._array(kind.value_type, ends[-1], nulls), type=kind, mask=mask)
        return self._plain(kind, size, mask)

    def _places(self, kind: pa.DataType, size: int, count: int, mask: pa.Array) -> pa.Array:
        return pa.array([None if m else self.rng.randrange(count) for m in mask.to_pylist()], kind)

    def _plain(self, kind: pa.DataType, size: int, mask: pa.Array) -> pa.Array:
        rng, t = self.rng, pa.types
        gone = mask.to_pylist()
        if t.is_string(kind) or t.is_large_string(kind) or t.is_string_view(kind):
            own = TEXTS if self.hostile else TEXTS[:5]
            bytes_ = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}.get(kind, pa.binary_view())
            return pa.array([None if m else rng.choice(own) for m in gone], bytes_).view(kind)
        if t.is_boolean(kind):
            return pa.array([None if m else rng.random() < 0.5 for m in gone], kind)
        if t.is_fixed_size_binary(kind):
            return pa.array(
                [None if m else rng.choice((b"abc", b"\0\0\0", b"abd"))[: kind.byte_width] for m in gone], kind
            )
        if t.is_binary(kind) or t.is_large_binary(kind) or t.is_binary_view(kind):
            return pa.array([None if m else rng.choice(TEXTS) for m in gone], kind)
        width = kind.bit_width // 8
        edge = (1 << (8 * min(width, 8) - 1)) - 1
        if t.is_decimal(kind):
            edge = min(edge, 10 ** min(kind.precision, 18) - 1)
        elif t.is_time(kind):
            edge = 86_399
        elif kind == pa.date64():
            edge = 86_400_000 * 10**6
        some = [0, 1, 1, 2, 3, -1, 1000] if not t.is_time(kind) else [0, 1, 2]
        numbers = np.array(
            [rng.choice((*some, edge, -edge) if self.hostile and not t.is_time(kind) else some) for _ in gone], np.int64
        )
        if t.is_floating(kind):
            special = np.array([rng.choice((0.0, 1.0, -0.0, 1.5, np.nan, np.inf)) for _ in gone])
            data = special.astype(f"f{width}")
        elif width > 8:
            data = np.zeros((size, width // 8), np.int64)
            data[:, 0] = numbers
            data[:, 1:] = np.where(numbers < 0, -1, 0)[:, None]
        else:
            if kind == pa.date64():
                numbers = numbers // 86_400_000 * 86_400_000
            data = numbers.astype(f"i{width}")
        valid = pa.py_buffer(np.packbits(~np.array(gone, bool), bitorder="little"))
        return pa.Array.from_buffers(kind, size, [valid, pa.py_buffer(data.tobytes())])

    # --- what is described -------------------------------------------------------------------

    def source(self, name: str, shared: tuple[pa.DataType, ...], **options: Any) -> Input:
        """An input with columns of the shared types first, so that there is something to join by."""
        rng = self.rng
        names = rng.sample(NAMES, rng.randrange(1, 4)) if self.odd() else [f"{name}{n}" for n in range(4)]
        kinds = [*shared, *(self.kind() for _ in names)][: len(names)]
        schema = pa.schema([nullable_or_not(n, k, rng) for n, k in zip(names, kinds, strict=True)], {b"m": b"1"})
        told: dict[str, Any] = {}
        for option, values in (
            ("unique_key", [tuple(rng.sample(names, 1)), (names[0],)]),
            ("row_kind", ["kind", "kind", "op"]),
            ("sequence_by", [names[-1], names[0]]),
            ("ttl_ms", [1, 100, 10**12]),
            ("updates", ["retract", "upsert"]),
            ("bad_rows", ["drop", "tag", "drop"]),
        ):
            if rng.random() < 0.3:
                told[option] = rng.choice(GARBAGE) if self.odd() else rng.choice(values)
        told |= options
        return Input(rng.choice(GARBAGE) if self.odd() else name, schema, **told)  # type: ignore[arg-type]

    def condition(self, left: Input, right: Input) -> Any:
        rng = self.rng
        if rng.random() < 0.6:
            return None
        if self.odd():
            return rng.choice((*GARBAGE, "", "1", "(" * 500, "l0 = ", "'", "l.nothing", "NULL", "\0", "1=1 --"))
        a, b = rng.choice(left.schema.names), rng.choice(right.schema.names)
        a, b = ("`" + x.replace("`", "``") + "`" for x in (a, b))
        a, b = f"{left.name}.{a}", f"{right.name}.{b}"
        return rng.choice(
            (
                f"{a} = {b}", f"{a} < {b}", f"{a} <=> {b}", f"{a} IS NULL", f"{a} + {b} > 1", f"upper({a}) = {b}",
                f"CAST({a} AS BIGINT) > 0", f"CAST({a} AS DOUBLE) <= {b}", f"{a} > 'a'", f"-{a} < {b}",
                f"{a} IN (1, 2)", f"{a} BETWEEN {b} AND {b}", f"coalesce({a}, {b}) IS NOT NULL",
                f"{a} > DATE '2020-01-01'", f"{a} % {b} = 1",
                f"{a} > TIMESTAMP '2020-01-01 00:00:00Z'", f"{a} > TIMESTAMP_NTZ '2020-01-01 00:00:00'",
                f"NOT {a} = 1.5", f"{a} / {b} = 1", f"{a} * {b} <> 2",
                f"CASE WHEN {a} = {b} THEN TRUE ELSE {a} IS NULL END",
            )
        )  # fmt: skip

    def description(self) -> Description:
        rng = self.rng
        shared = (self.kind(), rng.choice(COMMON))
        make = rng.choice((self._join, self._join, self._interval, self._multi, self._aggregate, self._co_group))
        return make(shared)

    def _keys(self, left: Input, right: Input) -> Any:
        rng = self.rng
        if self.odd():
            return rng.choice((*GARBAGE, (("a", "b"),), (Key("no", "column"),), (Key(1, None),)))  # type: ignore[arg-type]
        names = list(zip(left.schema.names, right.schema.names, strict=False))
        return tuple(Key(a, b, null_safe=rng.random() < 0.3) for a, b in names[: rng.choice((0, 1, 1, 1, 2))])

    def _join(self, shared: tuple[pa.DataType, ...]) -> Description:
        rng = self.rng
        left, right = self.source("l", shared), self.source("r", shared)
        return Join(
            rng.choice(("inner", "left", "right", "full", "semi", "anti", *(["x"] if self.odd() else []))),
            left,
            right,
            self._keys(left, right),
            where=self.condition(left, right),
            emit=rng.choice(("per_event", "per_batch", "at_end")),
            null_aware=rng.random() < 0.1,
            suffixes=rng.choice((None, ("_l", "_r"), *(GARBAGE if self.odd() else ()))),
        )

    def _interval(self, shared: tuple[pa.DataType, ...]) -> Description:
        rng = self.rng
        times = [rng.choice((pa.int64(), pa.timestamp("s"), pa.timestamp("us"), pa.timestamp("ns"))) for _ in "lr"]
        told: dict[str, Any] = {"unique_key": None, "ttl_ms": None, "delay_ms": rng.choice((None, 0, 5))}
        sides = [self.source(n, (k, shared[0]), event_time=f"{n}0", **told) for n, k in zip("lr", times, strict=True)]
        left, right = sides
        interval = Interval(
            *(rng.choice(((-5, 5), (0, 0), (-(10**12), 10**12), (3, 9), (10**18, 2 * 10**18)))),
            late=rng.choice(("join", "drop", "tag")),
            keyed=rng.random() < 0.2,
            min_cleanup_ms=rng.choice((0, 0, 0, 7)),
            timestamp=rng.choice((None, "ts")),
        )
        keys = (Key("l1", "r1", null_safe=rng.random() < 0.3),) if rng.random() < 0.8 else ()
        return IntervalJoin(
            rng.choice(("inner", "left", "full")), left, right, keys, where=self.condition(left, right),
            emit=rng.choice(("per_event", "per_batch", "at_end")), interval=interval,
        )  # fmt: skip

    def _multi(self, shared: tuple[pa.DataType, ...]) -> Description:
        rng = self.rng
        inputs = [self.source(n, shared) for n in "lrs"[: rng.choice((2, 3))]]
        on: Any = [[(f"{a.name}.{a.schema.names[0]}", b.schema.names[0])] for a, b in itertools.pairwise(inputs)]
        if self.odd():
            on = rng.choice((*GARBAGE, [[]], [("l0", "r0")]))
        return MultiJoin.of(
            inputs, on, rng.choice(("inner", "left", "right", ["left"] * (len(inputs) - 1))),
            where=self.condition(*inputs[:2]), emit=rng.choice(("per_event", "per_batch", "at_end")),
        )  # fmt: skip

    def _aggregate(self, shared: tuple[pa.DataType, ...]) -> Description:
        rng = self.rng
        source = self.source("l", shared, ttl_ms=None)
        calls = [f"{f}({c})" for f in ("sum", "count", "min", "max", "avg") for c in source.schema.names]
        text: Any = (
            rng.choice(GARBAGE)
            if self.odd()
            else rng.choice([*calls, "count(*)", f"count(distinct {source.schema.names[0]})"])
        )
        by = tuple(rng.sample(source.schema.names, rng.randrange(2)))
        return Aggregate.of(source, by, {"m": text, "n": "count(*)"})

    def _co_group(self, shared: tuple[pa.DataType, ...]) -> Description:
        left, right = self.source("l", shared, ttl_ms=None), self.source("r", shared, ttl_ms=None)
        return CoGroup(left, right, self._keys(left, right))

    # --- what comes --------------------------------------------------------------------------

    def batch(self, source: Input, now: int) -> Any:
        rng = self.rng
        if rng.random() < 0.1:
            return None
        if self.odd():
            return rng.choice((*GARBAGE, pa.table({}), pa.table({"k": [1]}), pa.record_batch({"k": [1]})))
        size, columns = rng.choice((0, 1, 3, 6)), {}
        for field in source.schema:
            kind = self.kind() if self.odd() else field.type
            array = self.array(kind, size, nulls=0.2 if field.nullable or self.odd() else 0)
            if field.name == source.event_time:
                array = pa.array([now + rng.randrange(-9, 9) for _ in range(size)], pa.int64()).cast(field.type)
            columns[field.name] = (
                pa.chunked_array([array.slice(0, size // 2), array.slice(size // 2)]) if rng.random() < 0.3 else array
            )
        if source.row_kind is not None:
            own = KINDS if self.odd() or source.event_time is None else KINDS[:1]
            columns[source.row_kind] = pa.array(
                [rng.choice(TEXTS if self.odd() else own) for _ in range(size)], pa.binary()
            ).view(pa.string())
            if rng.random() < 0.2:
                columns[source.row_kind] = columns[source.row_kind].dictionary_encode()
        names = list(columns)
        if self.odd():
            names = rng.choice((names[1:], [*names, names[0]], names[::-1]))
        return pa.Table.from_arrays([columns[n] for n in names], names)

    def call(self, join: Description, number: int) -> dict[str, Any]:
        rng, now = self.rng, 1000 + 10 * number
        batches = [self.batch(source, now) for source in join.inputs]
        told: dict[str, Any] = {"inputs": batches, "clock_ms": rng.choice(GARBAGE) if self.odd() else now}
        if rng.random() < 0.3 or self.odd():
            sizes = [b.num_rows if isinstance(b, pa.Table) else 0 for b in batches]
            places = rng.sample(range(sum(sizes)), sum(sizes))
            told["orders"] = [[places.pop() for _ in range(n)] for n in sizes]
            if self.odd():
                told["orders"] = rng.choice((*GARBAGE[1:], [[]] * len(sizes), [None] * len(sizes), [[0.5]], [[1, "x"]]))
        if isinstance(join, Join) and join.interval is not None and rng.random() < 0.5:
            told["watermark"] = rng.choice((*GARBAGE, (1, 2, 3), ("a", 1))) if self.odd() else now - 5
        return told


def nullable_or_not(name: str, kind: pa.DataType, rng: random.Random) -> pa.Field:
    return pa.field(name, kind, pa.types.is_null(kind) or rng.random() < 0.95)


def apply(engine: JoinEngine, told: dict[str, Any]) -> tuple[pa.Table, np.ndarray, dict[str, Any]]:
    inputs = told["inputs"]
    result = engine.prepare(*inputs, **{k: v for k, v in told.items() if k != "inputs"})
    engine.commit()
    sound(result.changelog)
    assert result.changelog.schema.equals(engine.description.output_schema)
    counts = {k: v for k, v in result.metrics.items() if k.endswith(("_in", "_bad_rows", "_late", "_retractions"))}
    return result.changelog, result.sequence, counts


def sound(table: pa.Table) -> None:
    """What is said can be read. (Behind a null in a struct or list there may be anything, as it came.)"""
    for column in table.columns:
        assert wrong_text(column) is None
        for chunk in column.chunks:
            check_array(chunk)


def same(one: dict[str, pa.Table], other: dict[str, pa.Table]) -> None:
    assert one.keys() == other.keys()
    for name, table in one.items():
        assert table.schema.equals(other[name].schema)
        assert sorted(printed(table)) == sorted(printed(other[name])), name


def printed(table: pa.Table) -> list[str]:
    """Rows as Arrow prints them: it can, also where Python has no such value."""
    whole = table.combine_chunks()
    return ["|".join(c.slice(n, 1).to_string() for c in whole.columns) for n in range(table.num_rows)]


def shown_rows(table: pa.Table) -> list[str]:
    """Rows as text, dates as the numbers that they are: Python has none after the year 9999."""
    numbers = {pa.date32(): pa.int32(), pa.date64(): pa.int64()}
    plain = [c.cast(numbers.get(c.type, c.type)) for c in table.columns]
    return [repr(row) for row in plain_rows(pa.table(plain, table.column_names))]


def attempt(seed: int) -> str:
    """One description and what comes to it; says how far it got."""
    any_ = Anything(seed)
    for function in (parse_duration, parse_bound, normalize_on):
        with contextlib.suppress(GpuJoinError):
            function(any_.rng.choice(GARBAGE))  # type: ignore[operator]
    join = None
    for _ in range(4):
        with contextlib.suppress(GpuJoinError):
            join = any_.description()
            break
    if join is None:
        return "refused"
    assert from_json(join.to_json()) == join
    try:
        engine, untroubled = JoinEngine(join, "cpu"), JoinEngine(join, "cpu", tiny=True)
    except GpuJoinError:  # a time zone that is not known here, where NOT IN becomes a condition
        return "refused"
    taken: list[dict[str, Any]] = []
    folder = InPieces()
    for number in range(6):
        told = any_.call(join, number)
        if told.get("clock_ms") is None:  # two engines do not read the clock in the same millisecond
            told["clock_ms"] = 1000 + 10 * number  # no earlier than others are: a restored engine knows none
        before = engine.snapshot()
        try:
            said = apply(engine, told)
        except GpuJoinError:
            same(engine.snapshot(), before)
            continue
        taken.append(told)
        wanted = apply(untroubled, told)
        assert printed(said[0]) == printed(wanted[0])
        assert said[1].tolist() == wanted[1].tolist()
        assert said[2] == wanted[2]
        stored = folder.stored(engine)
        if number == 3:
            state, engine = stored if seed % 2 else engine.snapshot(), JoinEngine(join, "cpu")
            engine.restore(state)
    same(engine.snapshot(), untroubled.snapshot())
    check_pairs(join, taken, engine)
    ended = engine.finish()
    sound(ended)
    same({"end": ended}, {"end": untroubled.finish()})
    return "taken" if taken else "nothing taken"


def check_pairs(join: Description, taken: list[dict[str, Any]], engine: JoinEngine) -> None:
    """An inner join of inputs that only grow, by equality of one type: the pairs that a loop finds."""
    if not isinstance(join, Join) or join.interval is not None or join.how != "inner" or join.where or not join.keys:
        return
    kinds = [[s.schema.field(k.column(n)).type for k in join.keys] for n, s in enumerate(join.inputs)]
    plain = all(
        s.insert_only and s.ttl_ms is None and s.bad_rows == "fail" and s.sequence_by is None for s in join.inputs
    )
    if not plain or kinds[0] != kinds[1] or join.emit == "at_end":
        return
    counts = []
    for side, source in enumerate(join.inputs):
        tables = [t["inputs"][side] for t in taken if side < len(t["inputs"]) and t["inputs"][side] is not None]
        tables = [t.select(source.schema.names).cast(source.schema) for t in tables]
        rows = pa.concat_tables([source.schema.empty_table(), *tables]).select([k.column(side) for k in join.keys])
        known = functools.reduce(
            np.logical_and,
            [rows[n].is_valid().to_numpy() for n, k in enumerate(join.keys) if not k.null_safe],
            np.ones(rows.num_rows, bool),
        )
        counts.append(Counter(shown_rows(rows.filter(pa.array(known)))))
    fresh = JoinEngine(join, "cpu")
    said = sum(apply(fresh, told)[0].num_rows for told in taken)
    assert said == sum(n * counts[1][row] for row, n in counts[0].items())


@given(st.integers(0, 2**32))
@example(15355)  # a view of text where lists are expected
@example(2607695)  # text below a null struct that is no UTF-8
def test_every_call_ends_in_a_result_or_an_error_of_the_pack(seed: int) -> None:
    attempt(seed)


@pytest.mark.slow
def test_most_of_what_is_drawn_is_taken() -> None:
    """So that the property is not one of refusals."""
    found = Counter(attempt(seed) for seed in range(40))
    assert found["taken"] > 20, found


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 20_000, 2_000))
def test_no_process_ends(first: int) -> None:
    """The same in a process of its own, as what Arrow checks by aborting would end this one."""
    code = f"import test_anything; [test_anything.attempt(seed) for seed in range({first}, {first + 2000})]"
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", code], cwd=here, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]

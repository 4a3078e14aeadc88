"""DataFrames of cuDF's, in and out: row for row what the CPU makes of Arrow; on a card by cuDF, else by stand-ins."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import sys
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from conftest import backend_param
from kernels import emulated_cudf
from kernels.conftest import EMULATED, running
from kernels.counting import counting
from kernels.engines import CPU, Batches, alike, run
from kernels.support import same
from oracle.drive import Backend, cuts
from oracle.interval_drive import ends, timed_cuts
from oracle.interval_traces import IntervalShape, TimedRecipe, timed_trace
from oracle.multi_traces import SHAPES as MULTI
from oracle.multi_traces import multi_recipe, multi_trace
from oracle.traces import Shape, recipe, trace

from gpu_ops.descriptions.aggregate import Aggregate, Measure
from gpu_ops.descriptions.by_time import IntervalJoin
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.interval import Interval
from gpu_ops.descriptions.join import Join
from gpu_ops.descriptions.keys import Key
from gpu_ops.errors import BackendError, BadInputError, DescriptionError
from gpu_ops.join_engine import JoinEngine

pytestmark = pytest.mark.thorough

ON = [backend_param(Backend("gpu")), backend_param(Backend("gpu-tiny")), pytest.param(Backend("emulated-tiny"))]


@contextlib.contextmanager
def with_cudf(backend: Backend) -> Iterator[Backend]:
    """The backend as engines call it, with cuDF beside it; emulated if need be."""
    with running(backend) as called, pytest.MonkeyPatch.context() as patch:
        if backend.name in EMULATED:
            for name, module in emulated_cudf.modules().items():
                patch.setitem(sys.modules, name, module)
        yield called


@pytest.fixture(params=ON, ids=lambda backend: backend.name)
def engines(request: Any) -> Iterator[Backend]:
    with with_cudf(request.param) as backend:
        pytest.importorskip("cudf")
        yield backend


def frame(table: pa.Table, *, sliced: bool = False, indexed: bool = False) -> Any:
    """A DataFrame; as a slice its columns begin within another's memory; indexed, as rows picked from another."""
    import cudf

    if indexed:
        made = cudf.DataFrame.from_arrow(table)
        made.index = [7 * n for n in range(len(made))]
        return made
    if not sliced:
        return cudf.DataFrame.from_arrow(table)
    return cudf.DataFrame.from_arrow(pa.concat_tables([table.slice(0, 1), table, table.slice(0, 1)])).iloc[1:-1]


def arrow(given: Any, schema: pa.Schema) -> pa.Table:
    """A changelog that came as a DataFrame."""
    import cudf

    assert isinstance(given, cudf.DataFrame)
    table = given.to_arrow(preserve_index=False)
    assert table.column_names == schema.names
    return pa.Table.from_arrays([c.cast(f.type) for c, f in zip(table.columns, schema, strict=True)], schema=schema)


def scribble(given: Any) -> None:
    """Write over all fixed-width values of a DataFrame, where they lie."""
    import cupy as cp

    for column in given.to_pylibcudf()[0].columns():
        if len(given) and not column.offset() and column.type().id().name not in ("STRING", "LIST"):
            span = column.data()
            memory = cp.cuda.UnownedMemory(span.ptr, span.size, column)
            cp.ndarray(span.size, np.uint8, cp.cuda.MemoryPointer(memory, 0))[:] = np.uint8(1)


def check(engines: Backend, join: Any, batches: Batches) -> None:
    """What came as DataFrames, and went as such, is what the CPU makes of Arrow; nobody writes to others' memory."""
    plain = [given if isinstance(given, tuple) else ((), given) for given in batches]
    framed, used = [], []
    for number, (inputs, named) in enumerate(plain):
        made = [None if i is None else frame(i, sliced=bool(number % 2)) for i in inputs]
        also = {k: frame(v, sliced=bool(number % 3)) if isinstance(v, pa.Table) else v for k, v in named.items()}
        used.append([x for x in [*made, *also.values()] if hasattr(x, "to_pylibcudf")])
        framed.append((made, also))
    wanted = run(CPU, join, plain)
    # the state may keep what came in two micro-batches: whatever is written over is the caller's alone
    found = run(engines, join, framed, before=lambda _, n: n and [scribble(g) for g in used[n - 1]], output="cudf")
    tables = [arrow(changelog, join.output_schema) for changelog in found[0]]
    alike((tables, *found[1:]), wanted)


@pytest.mark.parametrize("emit", ["per_event", "per_batch"])
@pytest.mark.parametrize(
    "shape",
    [
        Shape("full", "multiset", "unique_key", keys="string"),
        Shape("left", "join_key_contains_unique_key", "multiset", keys="mixed_width"),
        Shape("anti", "unique_key", "multiset", keys="composite", residual=(("a_x", ">", "b_x"),)),
    ],
    ids=str,
)
def test_same_as_the_cpu(engines: Backend, shape: Shape, emit: Any) -> None:
    join = shape.join(emit)
    made = trace(shape, recipe(shape, 160, 5, live=30, malformed=True))
    check(engines, join, [cut.inputs for cut in cuts(join, made, (50, 1, 17, 30), shuffle=3)])


@pytest.mark.parametrize(
    "shape",
    [
        IntervalShape("full", late="tag", keys="mixed_width", clock="mixed", stamped=True),
        IntervalShape("left", clock="int64", late="drop"),
    ],
    ids=str,
)
def test_interval_joins(engines: Backend, shape: IntervalShape) -> None:
    join = shape.join("per_event")
    made = ends(timed_trace(shape, TimedRecipe(120, 4, start=1000)))
    check(engines, join, [cut.inputs for cut in timed_cuts(join, made, (40, 1, 17), shuffle=2)])


def test_many_inputs(engines: Backend) -> None:
    join = MULTI[9].join("per_batch")
    made = multi_trace(MULTI[9], multi_recipe(MULTI[9], 100, 2, malformed=True))
    check(engines, join, [(cut.batches, cut.inputs) for cut in cuts(join, made, (40, 1, 17), shuffle=1)])


_DAY = dt.datetime(2026, 11, 22)
KINDS: dict[pa.DataType, list[Any]] = {
    pa.bool_(): [True, None, False],
    pa.int8(): [-128, 127, None],
    pa.uint64(): [0, None, (1 << 64) - 1],
    pa.float32(): [1.5, None, float("nan")],
    pa.string(): ["", None, "ä"],
    pa.large_string(): ["b", "", None],
    pa.decimal128(10, 2): [Decimal("-1.50"), None, Decimal("99999999.99")],
    pa.timestamp("s"): [_DAY, None, _DAY],
    pa.timestamp("ns"): [_DAY, _DAY, None],
    pa.duration("ms"): [dt.timedelta(milliseconds=-1), None, dt.timedelta(1)],
}


def wide(count: int, kinds: dict[pa.DataType, list[Any]]) -> pa.Table:
    columns = {f"c{n}": pa.array((values * count)[:count], kind) for n, (kind, values) in enumerate(kinds.items())}
    return pa.table({"k": pa.array(np.arange(count) % 5), **columns, "op": pa.array((["c", "d"] * count)[:count])})


def test_every_type(engines: Backend) -> None:
    """Also in and out again: what an engine gave another one takes."""
    table = wide(24, KINDS)
    source = Input("l", table.schema.remove(len(table.schema) - 1), row_kind="op")
    join = Join("left", source, Input("r", pa.schema([("k", pa.int64())])), keys=(Key("k", "k", using=True),))
    check(engines, join, [{"left": table.slice(at, 6)} for at in range(0, 24, 6)])
    again = Input("l", join.output_schema.remove(0), row_kind=None)
    follows = Join("inner", again, Input("r", pa.schema([("k", pa.int64())])), keys=(Key("k", "k", using=True),))
    one = pa.table({"k": pa.array([0])})
    with engines.engine(join, output="cudf") as first, engines.engine(follows, output="cudf") as second:
        given = first.process(frame(table.slice(0, 1)), frame(one))
        rows = second.process(given[list(again.schema.names)], one)
        assert len(rows) == 1
        same(arrow(rows, follows.output_schema).select(["c4"]), table.slice(0, 1).select(["c4"]))


def test_what_goes_by_the_host(engines: Backend) -> None:
    """Nested and categorical columns, zones on their way out; an index never counts."""
    table = wide(12, {pa.list_(pa.int32()): [[1, None], None, []], pa.timestamp("us", "UTC"): [_DAY, None, _DAY]})
    source = Input("l", table.schema.remove(len(table.schema) - 1), row_kind="op")
    join = Join("left", source, Input("r", pa.schema([("k", pa.int64())])), keys=(Key("k", "k", using=True),))
    words = table.set_column(3, "op", table["op"].combine_chunks().dictionary_encode())
    flat = Input("l", source.schema.remove(1), row_kind="op")
    plain = dataclasses.replace(join, left=flat)
    for described, host, batch in ((join, table, words), (plain, table.drop_columns("c0"), table.drop_columns("c0"))):
        with CPU.engine(described) as cpu, engines.engine(described) as gpu:
            wanted = cpu.process(host)
            assert wanted.num_rows
            same(gpu.process(frame(batch, indexed=True)), wanted)
    with pytest.raises(BackendError, match=r"output='cudf': column 'c0' is list<.*which cuDF takes from the host only"):
        engines.engine(join, output="cudf")
    with pytest.raises(BackendError, match=r"column 'c1' is timestamp\[us, tz=UTC\]"):
        engines.engine(plain, output="cudf")


# --- bad input -------------------------------------------------------------------------------


SCHEMA = pa.schema([
    pa.field("k", pa.int64(), nullable=False), ("id", pa.string()), ("at", pa.timestamp("s")), ("n", pa.int32()),
    ("text", pa.string()),
])  # fmt: skip


def source(**options: Any) -> Input:
    return Input("l", SCHEMA, unique_key=("id",), row_kind="op", **options)


def given(**columns: Any) -> pa.Table:
    """Four changes, some columns of which are others."""
    plain = {
        "k": pa.array([1, 2, 3, 4]),
        "id": pa.array(["a", "b", "c", "d"]),
        "at": pa.array([1, None, 3, 4], pa.timestamp("s")),
        "n": pa.array([1, 2, 3, None], pa.int32()),
        "text": pa.array(["", "\u00e4", None, "\U0001f600"]),
        "op": pa.array(["insert", "+U", "c", "update_postimage"]),
    }
    return pa.table({name: array for name, array in {**plain, **columns}.items() if array is not None})


_NO_TEXT = pa.Array.from_buffers(
    pa.string(), 4, pa.array([b"", b"\xc3\xa4", None, b"a\xe2\x82"], pa.binary()).buffers()
)

WRONG = {
    "text": given(text=_NO_TEXT),
    "missing": given(n=None),
    "unexpected": given(more=pa.array([1, 2, 3, 4])),
    "type": given(n=pa.array(["1", "2", "3", "4"])),
    "not null": given(k=pa.array([1, None, 3, 4])),
    "null in unique key": given(id=pa.array(["a", None, "c", "d"])),
    "too far": given(at=pa.array([1, (1 << 62) // 1000, None, 4], pa.timestamp("s"))),
    "row kind": given(op=pa.array(["+I", "+I", "no", "+I"])),
    "no row kind": given(op=pa.array(["+I", "+I", None, "+I"])),
    "number as row kind": given(op=pa.array([1, 2, 3, 4])),
}


@pytest.mark.parametrize("how", ["fail", "drop", "tag"])
def test_bad_rows(engines: Backend, how: Any) -> None:
    """The same errors, the same rows left out or handed out; nothing changes where there is an error."""
    join = Join(
        "left", source(bad_rows=how), Input("r", pa.schema([("k", pa.int64())])), keys=(Key("k", "k", using=True),)
    )
    with CPU.engine(join) as cpu, engines.engine(join, output="cudf") as gpu:
        for what, table in {"nothing": given(), **WRONG}.items():
            told = []
            for engine, batch in ((cpu, table), (gpu, frame(table))):
                try:
                    made = engine.prepare(batch)
                    engine.commit()
                    told.append(made)
                except BadInputError as error:
                    told.append(str(error))
            assert isinstance(told[0], str) == isinstance(told[1], str), (what, told)
            if isinstance(told[0], str):
                assert told[0] == told[1].replace("large_string", "string"), what  # which cuDF's text is
                continue
            assert what not in ("missing", "unexpected", "type", "not null", "number as row kind"), what
            assert how != "fail" or what == "nothing"
            same(arrow(told[1].changelog, join.output_schema), told[0].changelog)
            np.testing.assert_array_equal(told[1].sequence, told[0].sequence)
            assert told[1].metrics["left_bad_rows"] == told[0].metrics["left_bad_rows"] == (what != "nothing")
        same(gpu.snapshot()["left"], cpu.snapshot()["left"])


def test_bad_event_times(engines: Backend) -> None:
    schema = pa.schema([("k", pa.int64()), ("t", pa.timestamp("s"))])
    inputs = [Input(name, schema, event_time="t") for name in "lr"]
    join = IntervalJoin("inner", *inputs, keys=(Key("k", "k"),), interval=Interval(-1000, 1000), suffixes=("_l", "_r"))
    for time in (None, 1 << 60):
        table = pa.table({"k": [1, 2], "t": pa.array([1, time], pa.timestamp("s"))})
        said = []
        for backend, batch in ((CPU, table), (engines, frame(table))):
            with backend.engine(join) as engine, pytest.raises(BadInputError) as error:
                engine.process(batch)
            said.append(str(error.value))
        assert said[0] == said[1]


def test_an_update_without_its_old_row(engines: Backend) -> None:
    schema = pa.schema([("k", pa.int64())])
    join = Join("left", Input("l", schema, row_kind="op"), Input("r", schema), keys=(Key("k", "k", using=True),))
    with engines.engine(join) as engine, pytest.raises(BadInputError, match="without its old row needs unique_key="):
        engine.process(frame(pa.table({"k": [1, 2], "op": ["c", "u"]})))


# --- the end, and what is made on the host ---------------------------------------------------


@pytest.mark.parametrize("emit", ["at_end", "per_batch"])
def test_the_end(engines: Backend, emit: Any) -> None:
    """Changes that are only kept, and a backlog's net result; an interval join's pads; what the host has grouped."""
    schema = pa.schema([("k", pa.int64()), ("v", pa.string())])
    left, right = Input("l", schema, unique_key=("k",), row_kind="op"), Input("r", pa.schema([("k", pa.int64())]))
    join = Join("left", left, right, keys=(Key("k", "k", using=True),), emit=emit)
    first = pa.table({"k": [1, 2, 2], "v": ["a", "b", "c"], "op": ["+I", "+I", "+U"]})
    second = pa.table({"k": [1, 1]})

    def told(backend: Backend, made: Any, **options: Any) -> list[Any]:
        with backend.engine(join, backlog=emit != "at_end", **options) as engine:
            out = [engine.process(left=made(first), backlog=emit != "at_end"), engine.process(right=made(second))]
            return [*out, engine.finish()] if emit == "at_end" else out

    wanted, found = told(CPU, lambda table: table), told(engines, frame, output="cudf")
    assert wanted[-1].num_rows
    for ours, theirs in zip(found, wanted, strict=True):  # parts come in the order of a backend's hashes
        rows = [sorted(map(str, table.to_pylist())) for table in (arrow(ours, join.output_schema), theirs)]
        assert rows[0] == rows[1]


def test_pads_at_the_end(engines: Backend) -> None:
    schema = pa.schema([("k", pa.int64()), ("t", pa.timestamp("ms"))])
    inputs = [Input(name, schema, event_time="t") for name in "lr"]
    described = {"keys": (Key("k", "k"),), "interval": Interval(-1000, 1000), "suffixes": ("_l", "_r")}
    join = IntervalJoin("full", *inputs, **described)
    table = pa.table({"k": [1, 2], "t": pa.array([1, 2], pa.timestamp("ms"))})
    with CPU.engine(join) as cpu, engines.engine(join, output="cudf") as gpu:
        for engine, made in ((cpu, lambda t: t), (gpu, frame)):
            engine.process(left=made(table), right=made(table.slice(0, 1)))
        wanted = cpu.finish()
        assert wanted.num_rows == 1
        same(arrow(gpu.finish(), join.output_schema), wanted)


def test_groups(engines: Backend) -> None:
    measured = Input("l", pa.schema([("k", pa.int64()), ("v", pa.int32())]))
    join = Aggregate(measured, by=("k",), measures=(Measure("n", "count", None), Measure("most", "max", "v")))
    table = pa.table({"k": [1, 2, 1], "v": pa.array([5, None, 7], pa.int32())})
    with CPU.engine(join) as cpu, engines.engine(join, output="cudf") as gpu:
        cpu.process(table), gpu.process(frame(table))
        parts = [arrow(part, join.output_schema) for part in gpu.finish_parts()]
        # parts come in the order of a backend's hashes
        told = [pa.concat_tables(made).sort_by("k") for made in (parts, cpu.finish_parts())]
        same(*told)


# --- no copies, and refusals -----------------------------------------------------------------


@pytest.mark.parametrize("emit", ["per_event", "per_batch"])
def test_nothing_of_it_is_copied_to_the_host(emit: Any) -> None:
    """But row kinds, a byte each, and in ``per_event`` the logical times of what comes out, four."""
    shape = Shape("full", "unique_key", "multiset", keys="string")
    join = shape.join(emit)
    made = trace(shape, recipe(shape, 3000, 7, live=500, malformed=False))
    with with_cudf(Backend("emulated")) as backend, counting() as found:
        found.on = False
        with backend.engine(join, output="cudf") as engine:
            *before, last = [cut.inputs for cut in cuts(join, made, 1500)]
            for inputs in before:
                engine.process(**{k: frame(v) if isinstance(v, pa.Table) else v for k, v in inputs.items()})
            batch = {k: frame(v) if isinstance(v, pa.Table) else v for k, v in last.items()}
            copied = sys.modules["cudf"].DataFrame.copied
            found.on = True
            changelog = engine.process(**batch)
            found.on = False
            assert sys.modules["cudf"].DataFrame.copied == copied
            assert len(changelog) > 1000
    moved = Counter[str]()
    for (_, name), number in found.bytes.items():
        moved[name] += number
    assert moved["column.to_arrow"] < 100, "more than the types, of no rows"
    assert moved["cp.memcpyAsync"] == 0
    size = sum(len(batch[side]) for side in ("left", "right"))
    assert moved["cp.asnumpy"] / 2 <= size + (5 if emit == "per_event" else 1) * len(changelog)


def test_refused() -> None:
    join = Shape("left").join("per_batch")
    with pytest.raises(DescriptionError, match="output='dask'; it is one of arrow, cudf, pandas, polars"):
        JoinEngine(join, "cpu", output="dask")  # type: ignore[arg-type]
    with pytest.raises(
        BackendError, match=r"output='cudf': the GPU backend is needed, this is the CPU's \(asked for\)"
    ):
        JoinEngine(join, "cpu", output="cudf")
    with running(Backend("emulated")), pytest.MonkeyPatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda _: None)
        with pytest.raises(BackendError, match="output='cudf': the package cudf is not installed"):
            JoinEngine(join, "gpu", output="cudf")

"""Groups and order of rows that are all there: each backend's are the CPU's, to the last bit; groups come in any order."""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from cpu_fallback import CpuKernels
from gpu_ops.descriptions.aggregate import Aggregate
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.join import CoGroup
from gpu_ops.descriptions.keys import normalize_on
from gpu_ops.join_engine import JoinEngine
from gpu_ops.kernels import Columns, Kernels
from gpu_ops.operators.core.order import Groups

VALUES: dict[pa.DataType, list[Any]] = {
    pa.int8(): [-1, 0, 100],
    pa.int64(): [-(2**63), 2**63 - 1, 7],
    pa.uint64(): [0, 2**64 - 1, 7],
    pa.float64(): [float("nan"), 0.0, 1.5, float("inf"), -2.0],
    pa.float32(): [float("nan"), 0.0, -3.5],
    pa.bool_(): [True, False],
    pa.string(): ["", "a", "ä", "a\0", "zz"],
    pa.large_string(): ["b", "a"],
    pa.date32(): [dt.date(1950, 1, 1), dt.date(2030, 1, 1)],
    pa.timestamp("us"): [dt.datetime(1950, 1, 1), dt.datetime(2030, 1, 1, 1, 1, 1, 7)],
    pa.decimal128(20, 2): [Decimal("-1.25"), Decimal("3.00")],
    pa.binary(): [b"\xff", b"a"],
    pa.list_(pa.int32()): [[1], [2, 3]],
}
NUMBERS = [kind for kind in VALUES if pa.types.is_primitive(kind) and not pa.types.is_boolean(kind)]
KEYS = [kind for kind in VALUES if not pa.types.is_nested(kind)]


def column(kind: pa.DataType, rows: int, seed: int, nulls: float = 0.2) -> pa.Array:
    rng = np.random.default_rng(seed)
    known = VALUES[kind]
    picked = [None if rng.random() < nulls else known[rng.integers(len(known))] for _ in range(rows)]
    return pa.array(picked, kind)


def same(one: pa.Table, other: pa.Table) -> bool:
    """The same rows; NaN is NaN."""
    first, second = (sorted(map(repr, table.to_pylist())) for table in (one, other))
    return one.schema == other.schema and first == second


@pytest.mark.parametrize("kind", KEYS, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 60])
def test_groups_by_keys_of_every_type(kernels: Kernels, kind: pa.DataType, rows: int) -> None:
    table = pa.table({"k": column(kind, rows, 1), "j": column(pa.int8(), rows, 2), "v": column(pa.int64(), rows, 3)})
    calls: list[tuple[Any, str]] = [([], "count_all"), ("v", "count"), ("v", "min"), ("v", "max"), ("k", "count")]
    for by in (["k"], ["k", "j"], []):
        found, wanted = (on.aggregate(table, by, calls) for on in (kernels, CpuKernels()))
        assert same(found, wanted)


@pytest.mark.parametrize("kind", NUMBERS, ids=str)
def test_functions_of_numbers_of_every_type(kernels: Kernels, kind: pa.DataType) -> None:
    """Those that the card does not do, or does otherwise, too."""
    values = column(kind, 80, 4)
    if pa.types.is_floating(kind):  # as the operator gives them
        values = pc.if_else(pc.is_nan(values), pa.scalar(None, kind), values)
    table = pa.table({"k": column(pa.int8(), 80, 5), "v": values, "none": pa.nulls(80, kind)})
    calls = [(name, function) for name in ("v", "none") for function in ("count", "min", "max", "count_distinct")]
    if not pa.types.is_temporal(kind):
        calls += [(name, function) for name in ("v", "none") for function in ("sum", "mean")]
    for some in ([call] for call in calls):
        found, wanted = (on.aggregate(table, ["k"], some) for on in (kernels, CpuKernels()))
        assert same(found, wanted), some


@pytest.mark.parametrize("kind", KEYS, ids=str)
def test_order(kernels: Kernels, kind: pa.DataType) -> None:
    for rows, nulls in ((0, 0.2), (1, 0.2), (60, 0.2), (60, 0.0)):
        one = pa.table({"a": column(kind, rows, 6, nulls)})
        for keys in (one, one.append_column("b", column(pa.int8(), rows, 7))):
            found, wanted = (on.sorted_order(keys) for on in (kernels, CpuKernels()))
            assert found.to_pylist() == wanted.to_pylist()


@pytest.mark.parametrize("names", [["a"], ["a", "s"]])
def test_only_what_collides_is_parted(kernels: Kernels, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups whose hashes look alike by chance; of others no row is looked at again, and the order stays."""
    rng = np.random.default_rng(3)
    values = rng.integers(0, 700, 2000)
    hashes = (values + 1).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for one, others in ((5, (9, 300)), (11, (12,))):
        for other in others:
            hashes[values == other] = hashes[values == one][0]
    looked, honest = [], kernels.equal_at
    frame = kernels.frame(pa.table({"a": values, "s": pa.array(values.astype(str))}))
    types = (pa.int64(), pa.string())[: len(names)]
    plain = kernels.grouped(types, Columns(frame, names), kernels.asarray(hashes))
    monkeypatch.setattr(kernels, "equal_at", lambda *given: (looked.append(given[1][1].size), honest(*given))[1])
    groups = Groups(kernels, frame, tuple(names), types, kernels.asarray(hashes))
    monkeypatch.undo()
    order, bounds, group = (kernels.asnumpy(part) for part in (groups.order, groups.bounds, groups.group))
    parts = [order[low:high].tolist() for low, high in itertools.pairwise(bounds)]
    assert sorted(parts) == sorted(np.flatnonzero(values == value).tolist() for value in np.unique(values))
    assert np.array_equal(group, np.repeat(np.arange(len(parts)), np.diff(bounds)))
    assert np.array_equal(hashes[order], hashes[kernels.asnumpy(plain[0])])
    assert 0 < sum(looked) < 60


def test_aggregates_and_co_groups_at_the_end(engines: Any) -> None:
    """Whole operators, with retractions; their parts' order, which follows hashes, is the backend's own."""
    schema = pa.schema([("g", pa.int32()), ("x", pa.float64()), ("i", pa.int64()), ("s", pa.string())])
    columns = [column(kind, 200, n) for n, kind in enumerate([pa.int8(), *schema.types[1:]])]
    table = pa.table([c.cast(t) for c, t in zip(columns, schema.types, strict=True)], schema=schema)
    gone = table.slice(0, 40)
    kinds = pa.array(["+I"] * 200 + ["-D"] * 40)
    other = table.select(["g", "i"]).rename_columns(["g", "y"])
    changes = pa.concat_tables([table, gone]).append_column("op", kinds)
    source = Input("t", schema, row_kind="op")
    calls: dict[str, Any] = {
        "n": "count(*)",
        "top": "max(x)",
        "low": "min(x)",
        "all": "sum(i)",
        "f": "sum(x)",
        "m": "min(s)",
    }
    described = [
        Aggregate.of(source, ("g",), calls),
        Aggregate.of(source, ("g", "s"), {"n": "count(x)", "low": "min(i)", "top": "max(x)"}),
        CoGroup(source, Input("u", other.schema), normalize_on("g")),
    ]
    for join in described:
        said = []
        for made in (engines.engine(join), contextlib.closing(JoinEngine(join, "cpu"))):
            with made as engine:
                engine.process(changes, *([other.slice(50)] if isinstance(join, CoGroup) else []))
                said.append(engine.finish())
        assert sorted(map(repr, said[0].to_pylist())) == sorted(map(repr, said[1].to_pylist()))
        assert said[0].num_rows >= 4

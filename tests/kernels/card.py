"""Beside `kernels.emulation`: what only the benchmarks ask of a card, its libraries and its driver."""

from __future__ import annotations

import contextlib
import sys
import time
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from kernels import emulated_cupy
from kernels.emulated_cupy import HOST, ndarray, plain, wrapped
from kernels.emulated_libcudf import Column, NullEquality, Table
from kernels.emulation import emulated

MEMORY = 1 << 34
NAME = "Emulated Card 9000"


class Event(emulated_cupy.Event):
    """Also a moment on the host's clock."""

    def __init__(self, *, disable_timing: bool = False) -> None:
        self.timed = not disable_timing

    def record(self, stream: Any = None) -> None:
        super().record(stream)
        self.at = time.perf_counter()


def _to_card(self: Any, values: np.ndarray) -> None:
    assert not isinstance(values, ndarray), "host memory"
    assert self.dtype == values.dtype
    self.view(HOST)[:] = values


def _to_host(self: Any, out: np.ndarray) -> np.ndarray:
    assert not isinstance(out, ndarray), "host memory"
    out[:] = self.view(HOST)
    return out


def _values(table: Table) -> list[np.ndarray]:
    assert all(column.null_count() == 0 for column in table.columns())
    return [column.array.to_numpy() for column in table.columns()]


def _pairs(left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    assert left.dtype == right.dtype, "libcudf joins columns of one type"
    order = np.argsort(right, kind="stable")
    low, high = (np.searchsorted(right[order], left, side) for side in ("left", "right"))
    count = high - low
    ours = np.repeat(np.arange(left.size), count)
    step = np.arange(ours.size) - np.repeat(np.cumsum(count) - count, count)
    return ours, order[np.repeat(low, count) + step]


def _maps(*sides: np.ndarray) -> tuple[Column, ...]:
    mixed = np.random.default_rng(1).permutation(sides[0].size)
    return tuple(Column.of(pa.array(side[mixed].astype(np.int32))) for side in sides)


def inner_join(left_keys: Table, right_keys: Table, nulls_equal: NullEquality) -> tuple[Column, ...]:
    assert nulls_equal is NullEquality.UNEQUAL
    return _maps(*_pairs(_values(left_keys)[0], _values(right_keys)[0]))


def left_join(left_keys: Table, right_keys: Table, nulls_equal: NullEquality) -> tuple[Column, ...]:
    """Rows without a partner get the least int32, as libcudf's ``JoinNoMatch``."""
    assert nulls_equal is NullEquality.UNEQUAL
    left, right = _values(left_keys)[0], _values(right_keys)[0]
    ours, theirs = _pairs(left, right)
    alone = np.setdiff1d(np.arange(left.size), ours)
    return _maps(np.concatenate([ours, alone]), np.concatenate([theirs, np.full(alone.size, -(1 << 31))]))


class Operation:
    """An expression's value, given the columns of both tables at some pairs."""

    def __init__(self, op: Any, left: Any, right: Any = None) -> None:
        self.op, self.left, self.right = op, left, right

    def __call__(self, tables: Any) -> np.ndarray:
        return self.op(self.left(tables), self.right(tables))


def _column(index: int, table: int = 0) -> Any:
    return lambda tables: tables[table][index]


def mixed_inner_join(
    left_keys: Table,
    right_keys: Table,
    left_conditional: Table,
    right_conditional: Table,
    binary_predicate: Operation,
    nulls_equal: NullEquality,
) -> tuple[Column, ...]:
    assert nulls_equal is NullEquality.UNEQUAL
    assert left_keys.num_rows() == left_conditional.num_rows()
    assert right_keys.num_rows() == right_conditional.num_rows()
    ours, theirs = _pairs(_values(left_keys)[0], _values(right_keys)[0])
    at = [v[ours] for v in _values(left_conditional)], [v[theirs] for v in _values(right_conditional)]
    assert at[0][0].dtype == at[1][0].dtype, "an expression compares values of one type"
    kept = binary_predicate(at)
    return _maps(ours[kept], theirs[kept])


_EXPRESSIONS = {
    "ASTOperator": types.SimpleNamespace(
        GREATER_EQUAL=np.greater_equal, LESS_EQUAL=np.less_equal, LOGICAL_AND=np.logical_and
    ),
    "TableReference": types.SimpleNamespace(LEFT=0, RIGHT=1),
    "ColumnReference": _column,
    "Operation": Operation,
}


@contextlib.contextmanager
def emulated_card(free: int = MEMORY) -> Iterator[Any]:
    """Within it benchmarks find a card with so much free memory; gives the stand-in for cupy."""
    with emulated(), pytest.MonkeyPatch.context() as patch:
        cupy: Any = sys.modules["cupy"]
        properties = {"name": NAME.encode(), "major": 9, "minor": 0, "totalGlobalMem": MEMORY}
        cupy.cuda.Event = Event
        cupy.cuda.get_elapsed_time = lambda start, end: 1e3 * (end.at - start.at)
        cupy.cuda.runtime.getDeviceProperties = lambda _device: properties
        cupy.cuda.runtime.memGetInfo = lambda: (free, MEMORY)
        cupy.cuda.runtime.driverGetVersion = cupy.cuda.runtime.runtimeGetVersion = lambda: 13000
        cupy.array_equal = lambda a, b: wrapped(np.array_equal(plain(a), plain(b)))
        patch.setattr(ndarray, "set", _to_card, raising=False)
        patch.setattr(ndarray, "get", _to_host, raising=False)
        sys.modules["cupyx"].__dict__["empty_pinned"] = np.empty
        plc: Any = sys.modules["pylibcudf"]
        plc.join = types.SimpleNamespace(inner_join=inner_join, left_join=left_join, mixed_inner_join=mixed_inner_join)
        expressions = types.ModuleType("pylibcudf.expressions")
        expressions.__dict__.update(_EXPRESSIONS)
        patch.setitem(sys.modules, "pylibcudf.expressions", expressions)
        patch.setattr("benchmarks.gpu.bench.gpu_available", lambda: (True, "emulated"))
        yield cupy

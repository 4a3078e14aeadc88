"""The contract of `gpu_ops.kernels.Kernels`: frames and arrays."""

from __future__ import annotations

import functools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from gpu_ops.errors import BackendError
from gpu_ops.kernels import Kernels
from kernels.conftest import only_on
from kernels.support import TYPES, every, everything, frame_of, integral, plain_values, rows_of, same

EACH = pytest.mark.parametrize("name", TYPES)


@EACH
def test_arrow_and_back(kernels: Kernels, name: str) -> None:
    array = every(name)
    for part in (array, array.slice(1), array.slice(3, 2), array.slice(0, 0)):
        table = pa.table({"c": part})
        frame = kernels.frame(table)
        assert kernels.num_rows(frame) == len(part)
        same(kernels.to_arrow(frame, table.schema), table)


@EACH
def test_columns_in_pieces(kernels: Kernels, name: str) -> None:
    array = every(name)
    pieces = pa.chunked_array([array.slice(0, 1), array.slice(0, 0), array.slice(1)])
    for column in (pieces, pa.chunked_array([], array.type)):
        table = pa.table({"c": column})
        same(kernels.to_arrow(kernels.frame(table), table.schema), table)


def test_more_text_than_offsets_reach(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_ops.values.MOST_TEXT", 100)
    for name in ("string", "binary"):
        table = pa.table({"c": pa.chunked_array([every(name)] * 3)})
        assert table.nbytes > 100
        frame = kernels.frame(table)
        if kernels.name == "cpu":
            assert frame.columns["c"].type in (pa.large_string(), pa.large_binary())
        found = kernels.to_arrow(frame, table.schema)
        same(found, table)
        assert kernels.name != "cpu" or found["c"].num_chunks > 1


def test_lists_without_offsets(kernels: Kernels) -> None:
    """Lists of no rows may come without a first offset, from IPC files of others for one."""
    numbers = pa.list_(pa.int32())
    nothing = pa.Array.from_buffers(numbers, 0, [None, None], children=[pa.array([], pa.int32())])
    lists = pa.list_(numbers)
    below = pa.Array.from_buffers(lists, 2, [None, pa.py_buffer(bytes(12))], children=[nothing])
    struct = pa.StructArray.from_arrays([nothing], ["a"])
    for array in (nothing, below, struct):
        table = pa.table({"c": array})
        wanted = pa.table({"c": pa.array(array.to_pylist(), array.type)})
        same(kernels.to_arrow(kernels.frame(table), table.schema), wanted)


def test_dictionaries_are_decoded(kernels: Kernels) -> None:
    frame = frame_of(kernels, c=pa.array(["a", None, "b", "a"]).dictionary_encode())
    wanted = pa.table({"c": pa.array(["a", None, "b", "a"])})
    same(kernels.to_arrow(frame, wanted.schema), wanted)


def test_other_types_of_the_schema(kernels: Kernels) -> None:
    """A frame may hold a narrower type than the schema says; columns go by position."""
    frame = frame_of(kernels, a=pa.array([1, None], pa.int32()), b=pa.array(["x", None], pa.large_string()))
    wanted = pa.table({"n": pa.array([1, None], pa.int64()), "s": pa.array(["x", None])})
    same(kernels.to_arrow(frame, wanted.schema), wanted)


@EACH
def test_take(kernels: Kernels, name: str) -> None:
    table = pa.table({"other": pa.array(range(len(every(name)))), "c": every(name)})
    frame = kernels.frame(table)
    last = table.num_rows - 1
    for rows in ([0, last, 0, -1, last, -1], [-1, -1], [], list(range(last, -1, -1))):
        wanted = table.take(pa.array([None if row < 0 else row for row in rows], pa.int64()))
        taken = kernels.take(frame, rows_of(kernels, rows), ["c"])
        assert kernels.num_rows(taken) == len(rows)
        same(kernels.to_arrow(taken, wanted.select(["c"]).schema), wanted.select(["c"]))
        both = kernels.take(frame, rows_of(kernels, rows), ["c", "other"])
        same(kernels.to_arrow(both, wanted.select(["c", "other"]).schema), wanted.select(["c", "other"]))


@EACH
def test_take_from_nothing(kernels: Kernels, name: str) -> None:
    frame = frame_of(kernels, c=every(name).slice(0, 0))
    wanted = pa.table({"c": pa.nulls(2, TYPES[name][0])})
    same(kernels.to_arrow(kernels.take(frame, rows_of(kernels, [-1, -1]), ["c"]), wanted.schema), wanted)


def test_take_one_column_twice(kernels: Kernels) -> None:
    """A column may be part of two keys."""
    table = pa.table({"a": pa.array([1, None]), "b": pa.array(["x", "y"])})
    frame, rows = kernels.frame(table), rows_of(kernels, [1, -1, 0])
    store = kernels.store(table.schema)
    store.append(frame)
    wanted = pa.table({"b": pa.array(["y", None, "x"])})
    for taken in (kernels.take(frame, rows, ["b", "b"]), store.take(rows, ["b", "b"])):
        same(kernels.to_arrow(taken, wanted.schema), wanted)


def test_take_no_columns(kernels: Kernels) -> None:
    taken = kernels.take(frame_of(kernels, c=pa.array([1, 2])), rows_of(kernels, [1, -1, 0]), [])
    assert kernels.num_rows(taken) == 3


def test_combine(kernels: Kernels) -> None:
    first = frame_of(kernels, a=pa.array([1, 2]), b=pa.array(["x", None]))
    second = frame_of(kernels, a=pa.array([0.5, None]))
    found = kernels.combine([("z", second, "a"), ("b", first, "b"), ("y", first, "a"), ("x", second, "a")])
    wanted = pa.table(
        {"z": pa.array([0.5, None]), "b": pa.array(["x", None]), "y": pa.array([1, 2]), "x": pa.array([0.5, None])}
    )
    same(kernels.to_arrow(found, wanted.schema), wanted)


@EACH
def test_coalesce(kernels: Kernels, name: str) -> None:
    first = every(name)
    second = first.take(pa.array(list(range(1, len(first))) + [0]))
    found = kernels.coalesce(frame_of(kernels, a=first), "a", frame_of(kernels, b=second), "b")
    sides = (integral(side).to_pylist() for side in (first, second))
    merged = pa.array([b if a is None else a for a, b in zip(*sides, strict=True)], integral(first).type)
    wanted = pa.table({"a": merged.cast(first.type)})
    same(kernels.to_arrow(found, wanted.schema), wanted)


@pytest.mark.parametrize(
    ("left", "right", "kind"),
    [
        (pa.array([1, None], pa.int32()), pa.array([5, 1 << 40], pa.int64()), pa.int64()),
        (pa.array([1 << 40, None], pa.int64()), pa.array([5, 7], pa.int8()), pa.int64()),
        (pa.array([1.5, None], pa.float32()), pa.array([5, 0.1], pa.float64()), pa.float64()),
        (pa.array([None, "a"], pa.string()), pa.array(["b", "c"], pa.large_string()), pa.string()),
        (pa.array([None, b"a"], pa.large_binary()), pa.array([b"b", b"c"], pa.binary()), pa.large_binary()),
        (pa.array([1, None], pa.timestamp("s")), pa.array([5, -7], pa.timestamp("us")), pa.timestamp("us")),
        (
            pa.array([Decimal("1.5"), None], pa.decimal128(3, 1)),
            pa.array([None, Decimal("-2.25")], pa.decimal128(5, 2)),
            pa.decimal128(5, 2),
        ),
    ],
    ids=lambda value: str(getattr(value, "type", value)),
)
def test_coalesce_of_two_types(kernels: Kernels, left: pa.Array, right: pa.Array, kind: pa.DataType) -> None:
    """The pairs of types that `gpu_ops.descriptions.keys.key_type` lets two key columns have, either way round."""
    for a, b in ((left, right), (right, left)):
        found = kernels.coalesce(frame_of(kernels, x=a), "x", frame_of(kernels, y=b), "y")
        wide = [side.cast(kind).to_pylist() for side in (a, b)]
        merged = [y if x is None else x for x, y in zip(*wide, strict=True)]
        wanted = pa.table({"x": pa.array(merged, kind)})
        same(kernels.to_arrow(found, wanted.schema), wanted)


def test_valid(kernels: Kernels) -> None:
    table = everything(60, np.random.default_rng(1))
    frame = kernels.frame(table)
    for names in (["int32"], ["string", "struct"], ["map", "double", "boolean"], ["null"]):
        mask = kernels.valid(frame, names)
        assert mask is not None
        wanted = [
            all(value is not None for value in row) for row in zip(*(table[n].to_pylist() for n in names), strict=True)
        ]
        assert kernels.asnumpy(mask).tolist() == wanted
    whole = frame_of(kernels, a=pa.array([1.0, float("nan")]), b=pa.array(["", "x"]))
    assert kernels.valid(whole, ["a", "b"]) is None
    assert kernels.valid(frame, []) is None


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_scatter_add(kernels: Kernels, dtype: Any) -> None:
    rng = np.random.default_rng(3)
    target, index = rng.integers(-5, 5, 50).astype(dtype), rng.integers(0, 50, 2000)
    values = rng.integers(-(1 << 20), 1 << 20, 2000).astype(dtype)
    wanted = target.copy()
    np.add.at(wanted, index, values)
    # a view, as the state table's columns are: the add must reach what it is a view of
    whole = kernels.asarray(np.concatenate([target, np.zeros(9, dtype)]))
    kernels.scatter_add(whole[:50], kernels.asarray(index), kernels.asarray(values))
    np.testing.assert_array_equal(kernels.asnumpy(whole), np.concatenate([wanted, np.zeros(9, dtype)]))
    kernels.scatter_add(whole, kernels.asarray(index[:0]), kernels.asarray(values[:0]))
    np.testing.assert_array_equal(kernels.asnumpy(whole)[:50], wanted)


def test_scatter_min(kernels: Kernels) -> None:
    rng = np.random.default_rng(3)
    target, index = rng.integers(0, 1 << 63, 40, np.uint64), rng.integers(0, 40, 500)
    values = rng.integers(0, 1 << 64, 500, np.uint64, endpoint=False)
    wanted = target.copy()
    for at, value in zip(index, values, strict=True):
        wanted[at] = min(wanted[at], value)
    found = kernels.asarray(target)
    kernels.scatter_min(found, kernels.asarray(index), kernels.asarray(values))
    np.testing.assert_array_equal(kernels.asnumpy(found), wanted)
    kernels.scatter_min(found, kernels.asarray(index[:0]), kernels.asarray(values[:0]))
    np.testing.assert_array_equal(kernels.asnumpy(found), wanted)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 63, 64, 65, 1000])
def test_cumulative_min(kernels: Kernels, size: int) -> None:
    values = np.random.default_rng(size).integers(-(1 << 62), 1 << 62, size)
    given = kernels.asarray(values.copy())
    np.testing.assert_array_equal(kernels.asnumpy(kernels.cumulative_min(given)), np.minimum.accumulate(values))
    np.testing.assert_array_equal(kernels.asnumpy(given), values)


def test_plain_values_tell_values_apart() -> None:
    """The model that `test_equality` compares with: every type has values that differ."""
    for name in TYPES:
        assert len(set(map(repr, plain_values(every(name))))) > (0 if name == "null" else 2)


@only_on("gpu", "emulated")
def test_types_that_do_not_fit(kernels: Kernels) -> None:
    """A type that the GPU cannot hold is refused where the state is made, not in a micro-batch."""
    for kind in (pa.dense_union([pa.field("a", pa.int8())]), pa.struct([]), pa.list_(pa.struct([]))):
        with pytest.raises(BackendError, match="cannot hold"):
            kernels.store(pa.schema([("c", kind)]))


@only_on("gpu", "emulated")
def test_streams_are_one(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDF_PER_THREAD_STREAM", "1")
    with pytest.raises(BackendError, match="CUDF_PER_THREAD_STREAM"):
        type(kernels)()


@only_on("gpu", "emulated")
def test_memory_goes_back(kernels: Kernels) -> None:
    """All backends of the process share a pool; the last gives it back, and closing twice counts once."""
    from gpu_ops.cudf_backend import device

    assert device.allocated() == 0
    limited = type(kernels)(memory_limit=1 << 30)
    assert limited.memory_limit == kernels.memory_limit != 1 << 30, "the first backend said how much"
    kernels.close()
    kernels.close()
    limited.close()
    assert device.allocated() is None
    alone = type(kernels)(memory_limit=1 << 30)
    assert device.allocated() == 0
    assert alone.memory_limit == 1 << 30
    alone.close()
    assert device.allocated() is None


@only_on("gpu", "emulated")
def test_page_locked_memory_is_used_again(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """An array out of GPU memory keeps its memory for as long as it is held, and no longer."""
    from gpu_ops.cudf_backend import device

    table = everything(300, np.random.default_rng(4))
    frame = kernels.frame(table)
    held = kernels.to_arrow(frame, table.schema)
    once = device.PAGES.total
    assert once > 0
    totals = set()
    for _ in range(3):
        same(kernels.to_arrow(frame, table.schema), table)
        totals.add(device.PAGES.total)
    assert len(totals) == 1
    assert once < max(totals) <= 2 * once
    same(held, table)
    part = held["string"].slice(7, 5)
    wanted = table["string"].slice(7, 5).to_pylist()
    del held
    kernels.to_arrow(frame, table.schema)
    assert part.to_pylist() == wanted
    monkeypatch.setattr(device, "_MOST_LOCKED", 2 * once)
    beyond = [kernels.to_arrow(frame, table.schema) for _ in range(3)]
    assert device.PAGES.total <= 2 * once
    for found in beyond:
        same(found, table)
    del beyond, found, part
    kernels.close()
    assert device.PAGES.total == 0


@only_on("gpu", "emulated")
def test_page_locked_memory_has_room_for_two_results(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """A result of three columns is made while the one before is held; blocks of other sizes go when there is no room."""
    from gpu_ops.cudf_backend import device

    pages, size, most = device.Pages(), 131 << 16, 1 << 26
    monkeypatch.setattr(device, "_MOST_LOCKED", most)
    before = [pages.block(size) for _ in range(3)]
    assert None not in before
    for _ in range(3):
        result = [pages.block(size - 1000 * number) for number in range(3)]
        assert None not in result
        before = result
    assert size * 6 <= pages.total <= size * 6 * 9 // 8 <= most
    del before, result
    larger = [pages.block(size * 2) for _ in range(3)]
    assert None not in larger
    assert pages.block(most) is None
    assert pages.total <= most
    del larger
    assert pages.block(most) is not None
    kernels.close()


@only_on("gpu", "emulated")
@EACH
def test_pieces_meet_in_page_locked_memory(kernels: Kernels, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put together there, once, and waited for: the memory is used again."""
    from gpu_ops.cudf_backend import device, frame

    monkeypatch.setattr(frame, "_LEAST_STAGED", 1)
    array = every(name)
    chunks = [array.slice(3, 4), array.slice(0, 0), array, array.slice(1)]
    table = pa.table({"c": pa.chunked_array(chunks)})
    taken: list[tuple[pa.Array, int]] = []
    own = frame.from_arrow

    def from_arrow(array: pa.Array) -> Any:
        taken.append((array, device.PAGES.total))
        return own(array)

    monkeypatch.setattr(frame, "from_arrow", from_arrow)
    for _ in range(3):
        found = kernels.frame(table)
        same(kernels.to_arrow(found, table.schema), table)
    kind = array.type
    plain = pa.types.is_primitive(kind) or pa.types.is_decimal(kind) or pa.types.is_fixed_size_binary(kind)
    text = kind in (pa.string(), pa.binary(), pa.large_string(), pa.large_binary())
    staged = text or (plain and not pa.types.is_boolean(kind))
    assert all(bool(total) == staged for _, total in taken[:1])
    for array, _ in taken:
        same(pa.table({"c": array}), table)
    totals = {total for _, total in taken}
    assert len(totals) <= 3


@only_on("gpu", "emulated")
def test_what_is_copied_from_page_locked_memory_is_waited_for(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the card has no room for the next column."""
    import cupy as cp

    from gpu_ops.cudf_backend import frame

    monkeypatch.setattr(frame, "_LEAST_STAGED", 1)
    said: list[str] = []
    own = frame.from_arrow

    def from_arrow(array: pa.Array) -> Any:
        said.append("copied")
        if said.count("copied") == 4:
            raise MemoryError("full")
        return own(array)

    class Event(cp.cuda.Event):  # type: ignore[misc]
        def synchronize(self) -> None:
            said.append("waited")
            super().synchronize()

    monkeypatch.setattr(frame, "from_arrow", from_arrow)
    monkeypatch.setattr(cp.cuda, "Event", Event)
    table = pa.table({name: pa.chunked_array([["", ""], [""]]) for name in "ab"})
    made = kernels.frame(table)
    assert said == ["copied", "copied", "waited"]
    same(kernels.to_arrow(made, table.schema), table)
    said[3:] = []
    with pytest.raises(MemoryError):
        kernels.frame(table)
    assert said == ["copied", "copied", "waited"] * 2
    kernels.frame(table.combine_chunks())
    assert said[6:] == ["copied", "copied", "waited"]  # in one piece as well


@only_on("gpu", "emulated")
@pytest.mark.parametrize("threads", [1, 3])
def test_a_column_is_staged_while_the_one_before_is_copied(
    kernels: Kernels, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each by several threads; nothing waits in between, and all is held until the end."""
    from gpu_ops.cudf_backend import device, frame

    monkeypatch.setattr(frame, "_LEAST_STAGED", 1)
    monkeypatch.setattr(frame, "_AT_A_TIME", 1000)
    monkeypatch.setattr(frame, "MOST_THREADS", threads)
    monkeypatch.setattr(frame, "_threads", functools.cache(lambda: ThreadPoolExecutor(threads)))
    said: list[str] = []
    staged, own, copy = frame._staged, frame.from_arrow, frame._copy
    by: set[int] = set()

    def copies(part: Any) -> None:
        by.add(threading.get_ident())
        time.sleep(0.001)
        copy(part)

    monkeypatch.setattr(frame, "_copy", copies)
    monkeypatch.setattr(frame, "_staged", lambda column: said.append("staged") or staged(column))
    monkeypatch.setattr(frame, "from_arrow", lambda array: said.append("copied") or own(array))
    numbers, rng = np.arange(5000), np.random.default_rng(1)
    text = pa.array([("" if n % 3 else "ä") * int(rng.integers(0, 9)) + str(n) for n in numbers])
    table = pa.table({"a": numbers, "b": text, "c": pa.chunked_array([text[:17], text[17:].cast(pa.string())])})
    made = kernels.frame(table)
    assert said == ["staged", "copied"] * 3
    assert len(by) == threads
    assert device.PAGES.total > table.nbytes
    same(kernels.to_arrow(made, table.schema), table)


@only_on("gpu", "emulated")
def test_small_arrays_give_way(kernels: Kernels) -> None:
    """What small arrays leave unused in cupy's pool is there for whatever finds no memory."""
    import cupy as cp

    from gpu_ops.cudf_backend import device

    kernels.close()
    alone = type(kernels)(memory_limit=64 << 20)
    small = [cp.cuda.alloc(1 << 20) for _ in range(40)]
    del small
    assert (device.allocated(), device.reserved()) == (0, 40 << 20)
    again = cp.cuda.alloc(1 << 20)
    assert (device.allocated(), device.reserved()) == (1 << 20, 40 << 20)
    large = cp.cuda.alloc(60 << 20)
    assert device.allocated() == device.reserved() == 61 << 20
    with pytest.raises(MemoryError):
        cp.cuda.alloc(4 << 20)
    del large, again
    assert (device.allocated(), device.reserved()) == (0, 1 << 20)
    alone.close()
    assert device.allocated() is None


@only_on("gpu", "emulated")
def test_memory_is_shared(kernels: Kernels) -> None:
    """What shares memory on a card shares it in the emulation, where a write after it would go unnoticed otherwise."""
    from gpu_ops.cudf_backend.frame import from_lanes, from_values, to_arrow, values

    def held(column: Any, kind: pa.DataType) -> list[Any]:
        return list(to_arrow(column, kind).to_pylist())

    numbers, flags = kernels.asarray(np.arange(3)), kernels.asarray(np.array([True, False, True]))
    assert kernels.xp.asarray(numbers) is numbers
    last, column, bools = numbers[-1], from_values(numbers), from_values(flags)
    part = from_values(numbers[1:])
    numbers[:], flags[:] = numbers + 7, ~flags
    assert int(last) == 9
    assert (held(column, pa.int64()), held(part, pa.int64())) == ([7, 8, 9], [8, 9])
    assert held(bools, pa.bool_()) == [False, True, False]
    halves = kernels.asarray(np.array([[1, 0], [2, 0]]))
    decimals = from_lanes(halves)
    halves[1, 0] = 5
    assert held(decimals, pa.decimal128(38, 0)) == [Decimal(1), Decimal(5)]

    kind = pa.struct({"a": pa.int32(), "b": pa.list_(pa.int16())})
    nested = frame_of(kernels, c=pa.array([{"a": 1, "b": [4]}, {"a": 2, "b": [5]}], kind))
    below, elements = (nested.columns["c"].child(i) for i in range(2))
    values(below, np.int32)[0] = 3
    values(elements.list_view().child(), np.int16)[1] = 6
    assert held(nested.columns["c"], kind) == [{"a": 3, "b": [4]}, {"a": 2, "b": [6]}]

    array = np.arange(2)
    copy, frame = kernels.asarray(array), frame_of(kernels, c=pa.array(array))
    array[:] = 9
    given = kernels.asnumpy(copy)
    copy[:] = 4
    assert given.tolist() == held(frame.columns["c"], pa.int64()) == [0, 1]


def test_close_twice(kernels: Kernels) -> None:
    kernels.close()
    kernels.close()

"""The backend's CUDA kernels themselves: compiled as C++ they do what their numpy twins do; NVRTC takes them for a card.

As C++ they run under g++'s sanitizers, too: on arrays of exactly their size, and on several of the host's threads at a
time. Each part is skipped where its compiler is not installed.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from cpu_fallback import CpuKernels
from gpu_ops import layouts
from gpu_ops.kernels import Among, Columns, Flagged, SoleLookup, TimeLimits
from gpu_ops.operators.core.nearest import Nearest
from gpu_ops.operators.core.order import least
from gpu_ops.state.index import HashIndex
from gpu_ops.state.time_index import TimeIndex
from kernels import emulated_cupy
from kernels.conftest import only_on
from kernels.twins import TWINS

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
PRELUDE = Path(__file__).parent / "fake_cuda" / "kernel.h"
SANITIZER = os.environ.get("KERNEL_SANITIZER", "undefined")
"""Of these very tests: another one needs a process of its own, see `test_under_a_sanitizer`."""
COMPILER = ["g++", "-O1", "-g1", "-std=c++20", "-w", "-fPIC", "-shared", f"-fsanitize={SANITIZER}"]
COMPILER += ["-pthread", "-DHOST_THREADS=4"] if SANITIZER == "thread" else ["-fno-sanitize-recover=all"]


_MADE: dict[str, Compiled] = {}
"""By source: it takes longer to compile than to test."""


class Compiled:
    """The kernels of a source, launched on host memory beside their twins.

    Args:
        source: CUDA C.
        folder: for the library.
    """

    def __init__(self, source: str, folder: Path) -> None:
        names = [name for name in TWINS if f"__global__ void {name}(" in source]
        code, library = folder / "kernels.cpp", folder / "kernels.so"
        runs = [
            f'extern "C" void run__{n}(void** p, unsigned g, unsigned b) {{ launch({n}, p, g, b); }}' for n in names
        ]
        code.write_text("\n".join(["#define SYNC 0", PRELUDE.read_text(), source, *runs]))
        subprocess.run([*COMPILER, str(code), "-o", str(library)], check=True)
        self._library, self.launched = ctypes.CDLL(str(library)), dict.fromkeys(names, 0)

    def launch(self, name: str, grid: int, block: int, args: tuple[Any, ...]) -> None:
        """Run a kernel; arrays are passed as pointers, scalars and structures by value."""
        pointers, kept = [], []
        alone: dict[int, tuple[Any, Any]] = {}  # arrays may be parts of larger ones; behind a copy nothing is
        for arg in args:
            if isinstance(arg, emulated_cupy.ndarray):
                own = emulated_cupy.plain(arg)
                _, copy = alone.setdefault(arg.data.ptr, (own, own.copy() if SANITIZER != "undefined" else own))
                assert copy.nbytes >= own.nbytes, "one array of two sizes"
                value: Any = ctypes.c_void_p(copy.__array_interface__["data"][0])
                kept.append(value)
                pointers.append(ctypes.addressof(value))
            else:
                held = np.asarray(arg)
                kept.append(held)
                pointers.append(held.__array_interface__["data"][0])
        getattr(self._library, f"run__{name}")((ctypes.c_void_p * len(args))(*pointers), grid, block)
        for own, copy in alone.values():
            own[...] = copy
        self.launched[name] += 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cuda")


@pytest.fixture
def compiled(kernels: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Launches run the source, and its twin once more; both must write the same."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    del kernels
    launched: dict[str, int] = {}

    class Both(emulated_cupy.RawKernel):
        def __init__(self, code: str, name: str) -> None:
            super().__init__(code, name)
            if code not in _MADE:
                _MADE[code] = Compiled(code, folder)
            self._compiled, self._name = _MADE[code], name

        def __call__(self, grid: tuple[int], block: tuple[int], args: tuple[Any, ...]) -> None:
            arrays = [at for at, arg in enumerate(args) if isinstance(arg, emulated_cupy.ndarray)]
            before = [np.array(emulated_cupy.plain(args[at])) for at in arrays]
            super().__call__(grid, block, args)
            wanted = [np.array(emulated_cupy.plain(args[at])) for at in arrays]
            for at, values in zip(arrays, before, strict=True):
                emulated_cupy.plain(args[at])[...] = values
            self._compiled.launch(self._name, grid[0], block[0], args)
            for at, values in zip(arrays, wanted, strict=True):
                np.testing.assert_array_equal(emulated_cupy.plain(args[at]), values)
            launched[self._name] = launched.get(self._name, 0) + 1

    monkeypatch.setattr(sys.modules["cupy"], "RawKernel", Both)
    return launched


def _hashes(rng: np.random.Generator, size: int) -> np.ndarray:
    return rng.integers(0, 40, size).astype(np.uint64) << np.uint64(58)


@only_on("emulated")
def test_search(kernels: Any, compiled: dict[str, int]) -> None:
    rng, total = np.random.default_rng(1), 0
    kernels.probe = "index"
    index, timed = HashIndex(kernels), TimeIndex(kernels)
    for size in (600, 40, 3, 1):
        hashes, slots = kernels.asarray(_hashes(rng, size)), kernels.asarray(np.arange(total, total + size))
        for made, more in ((index, ()), (timed, (kernels.asarray(rng.integers(-50, 50, size)),))):
            made.stage(hashes, slots, *more)
            made.commit()
        total += size
    needles = kernels.asarray(_hashes(rng, 300))
    low = kernels.asarray(rng.integers(-60, 50, 300))
    assert len(index.runs) > 1
    assert index.probe(needles, staged=True)[0].size > 1000
    assert timed.probe(needles, low, low + 9)[0].size > 100
    assert sum(needle.size for needle, _ in timed.first(needles, low)) > 100
    assert compiled["find"] > 1
    assert compiled["write_pairs"] > 1
    assert compiled["bisect_run"] == len(timed.runs)


@only_on("emulated")
@pytest.mark.parametrize("sizes", [(0, 0), (0, 5), (400, 0), (1000, 70), (3, 900)])
def test_runs(kernels: Any, compiled: dict[str, int], sizes: tuple[int, int]) -> None:
    rng = np.random.default_rng(sum(sizes))
    entries = np.unique(rng.integers(0, 1 << 63, sum(sizes), np.uint64) * np.uint64(2))
    mine = rng.permutation(entries.size) < sizes[0]
    first, second = (kernels.asarray(entries[part]) for part in (mine, ~mine))
    merged = kernels.merge(first, first.size, second)
    assert np.array_equal(kernels.asnumpy(merged), entries)
    for shift in (31, 24, 20):
        wanted = CpuKernels().directory(entries, shift)
        assert np.array_equal(kernels.asnumpy(kernels.directory(merged, shift)), wanted)
    assert compiled["begin_prefixes"] == 3


@only_on("emulated")
@pytest.mark.parametrize("missing", [False, True])
def test_gather(kernels: Any, compiled: dict[str, int], missing: bool) -> None:
    """More columns than one launch takes, of every width, in segments of every size."""
    kinds = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.decimal128(30, 2), pa.float64(), pa.bool_(), pa.date32()]
    schema = pa.schema([(f"c{at}", kind) for at, kind in enumerate(kinds)])
    store, parts = kernels.store(schema), []
    for size in (3000, 200, 13, 1):
        numbers = pa.array(np.arange(size) % 100 + len(parts))
        parts.append(pa.table([_cast(numbers, kind) for kind in kinds], schema=schema))
        store.append(kernels.frame(parts[-1]))
    whole = pa.concat_tables(parts)
    rows = np.random.default_rng(1).integers(-1 if missing else 0, whole.num_rows, 500)
    taken = kernels.to_arrow(store.take(kernels.asarray(rows), schema.names, present=not missing), schema)
    assert taken.equals(whole.take(pa.array(rows, mask=rows < 0)))
    assert len(store.segments) > 2
    assert compiled["gather_rows"] == 2


@only_on("emulated")
@pytest.mark.parametrize("every", [False, True])
def test_flagged(kernels: Any, compiled: dict[str, int], every: bool) -> None:
    """Parts of several blocks, of one row and of none; columns that are given, counted and -1; numbers beside them."""
    rng, parts, wanted = np.random.default_rng(6), [], []
    for number, size in enumerate((700, 0, 1, 300)):
        flags, values = rng.random(size) < 0.4, rng.integers(0, 1 << 50, size)
        columns = [values, None if number % 2 else 10 * number]
        unless, places = rng.random(size) < 0.3, rng.permutation(size)
        by_row = np.zeros(size, bool)
        by_row[places if number else slice(None)] = flags & ~unless
        rows = np.arange(size) if every else np.flatnonzero(by_row)
        wanted.append((values[rows].tolist(), (rows * 0 - 1 if number % 2 else 10 * number + rows).tolist()))
        parts.append(
            Flagged(
                None if every else kernels.asarray(flags),
                [kernels.asarray(values), *columns[1:]],
                None if every else kernels.asarray(unless),
                None if every or not number else kernels.asarray(places),
            )
        )
    numbers = [kernels.asarray(np.array([9, at])).sum() for at in range(3)]
    found, sizes, told = kernels.flagged(parts, numbers)
    assert sizes == [len(rows) for rows, _ in wanted]
    assert told == [9, 10, 11]
    assert [tuple(kernels.asnumpy(column).tolist() for column in own) for own in found] == wanted
    assert (compiled.get("flag_rows", 0), compiled["put_flagged"]) == (0 if every else 1, 1)


@only_on("emulated")
def test_added_numbers(kernels: Any, compiled: dict[str, int]) -> None:
    """Some go to one place; what adds nothing may have none."""
    rng = np.random.default_rng(5)
    index, values = rng.integers(0, 9, 700), rng.integers(-2, 3, 700).astype(np.int32)
    index[values == 0] = -1
    target = kernels.asarray(np.arange(9, dtype=np.int32))
    kernels.scatter_add(target, kernels.asarray(index), kernels.asarray(values))
    kernels.scatter_add(target, kernels.asarray(index[:0]), kernels.asarray(values[:0]))
    wanted = [at + int(values[index == at].sum()) for at in range(9)]
    assert kernels.asnumpy(target).tolist() == wanted
    assert compiled["add_numbers"] == 1


@only_on("emulated")
@pytest.mark.parametrize("size", [1, 31, 32, 33, 512, 513, 9000])
def test_masks(kernels: Any, compiled: dict[str, int], size: int) -> None:
    """How many rows are missing is told, and which are is written as bits, or looked at: both give the same."""
    schema = pa.schema([("a", pa.int64()), ("b", pa.int8())])
    store = kernels.store(schema)
    store.append(kernels.frame(pa.table([np.arange(50), np.arange(50, dtype=np.int8)], schema=schema)))
    rows = np.random.default_rng(size).integers(-1, 3, size)
    rows[0] = -1
    slots, missing = kernels.asarray(rows), int((rows < 0).sum())
    told, looked = (store.take(slots, schema.names, nulls=nulls) for nulls in (missing, None))
    wanted = pa.table([pa.array(rows, mask=rows < 0)] * 2, names=["a", "b"])
    for frame in (told, looked):
        assert kernels.to_arrow(frame, schema).cast(wanted.schema).equals(wanted)
    assert compiled["gather_rows"] == 2


FIXED = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.decimal128(30, 2), pa.float32(), pa.float64(), pa.bool_()]


@only_on("emulated")
@pytest.mark.parametrize("kinds", [(kind,) for kind in FIXED] + [(pa.int64(), pa.float64(), pa.date32())], ids=str)
def test_compare(kernels: Any, compiled: dict[str, int], kinds: tuple[pa.DataType, ...]) -> None:
    """Rows of a frame against those of a store in several segments, some of whom do not count."""
    rng, names = np.random.default_rng(3), [f"c{at}" for at in range(len(kinds))]
    schema = pa.schema(zip(names, kinds, strict=True))
    store, parts = kernels.store(schema), []
    for size in (300, 20, 1):
        parts.append(pa.table([_cast(pa.array(rng.integers(0, 6, size)), kind) for kind in kinds], schema=schema))
        store.append(kernels.frame(parts[-1]))
    there = pa.concat_tables(parts)
    own = there.take(pa.array(rng.integers(0, there.num_rows, 90)))
    rows = rng.permutation(90)[:70]
    looking = Columns(kernels.frame(own), names, kernels.asarray(rows))
    states = rng.integers(0, 3, there.num_rows).astype(np.int8)
    needle, slot = (index.ravel() for index in np.mgrid[:70, : there.num_rows])
    mine, theirs = own.take(pa.array(rows)).to_pylist(), there.to_pylist()
    same = np.array([mine[a] == theirs[b] for a, b in zip(needle, slot, strict=True)])
    columns, given = (looking, Columns(store, names)), [kernels.asarray(array) for array in (needle, slot)]
    for where in (None, rng.random(same.size) < 0.5):
        found = kernels.equal_at(
            kinds,
            (columns[0], given[0]),
            (columns[1], given[1]),
            None if where is None else kernels.asarray(where),
        )
        assert np.array_equal(kernels.asnumpy(found), same if where is None else same & where)
    order = rng.permutation(same.size)
    for among, counts in ((None, states >= 0), ((1, 1), states == 1), ((1, 2), states > 0)):
        those = None if among is None else Among(kernels.asarray(states), *among)
        wanted = np.flatnonzero(same & counts[slot])
        for by_candidate in (False, True):
            pairs = layouts.pairs(*((slot, needle) if by_candidate else (needle, slot)))
            got = kernels.matches(kinds, kernels.asarray(pairs[order]), columns, those, by_candidate=by_candidate)
            by = wanted[np.lexsort((needle[wanted], slot[wanted]))] if by_candidate else wanted
            assert [kernels.asnumpy(part).tolist() for part in got] == [needle[by].tolist(), slot[by].tolist()]
        sole = wanted[np.unique(needle[wanted], return_index=True)[1]]
        others = np.setdiff1d(order, wanted)[:50]
        pairs = kernels.asarray(layouts.pairs(needle, slot)[np.concatenate([sole, others])])
        put = np.full(70, -1)
        put[needle[sole]] = slot[sole]
        assert kernels.asnumpy(kernels.sole_matches(kinds, pairs, columns, those, size=70)).tolist() == put.tolist()
    assert min(compiled[name] for name in ("compare_rows", "mark_matches", "put_matches")) >= 2


@only_on("emulated")
def test_groups(kernels: Any, compiled: dict[str, int]) -> None:
    """Hashes that are alike to the last bit that counts, of rows that are equal and of others."""
    rng = np.random.default_rng(4)
    values = rng.integers(0, 50, 400)
    own = Columns(kernels.frame(pa.table({"a": values})), ["a"])
    for sharing in (1, 3):
        hashes = (values // sharing).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        found = kernels.grouped([pa.int64()], own, kernels.asarray(hashes))
        order, bounds, group, unlike = (kernels.asnumpy(array) for array in found)
        differs = (np.diff(hashes[order].view(np.int64)) == 0) & (np.diff(values[order]) != 0)
        assert np.array_equal(unlike, np.flatnonzero(differs) + 1)
        assert (unlike.size == 0) == (sharing == 1)
        parts = [order[low:high].tolist() for low, high in itertools.pairwise(bounds)]
        assert sorted(parts) == sorted(np.flatnonzero(hashes == one).tolist() for one in np.unique(hashes))
        assert np.array_equal(group, np.repeat(np.arange(len(parts)), np.diff(bounds)))
    assert compiled["begin_groups"] == compiled["number_groups"] == 2


@only_on("emulated")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("keyed", [False, True])
def test_nearest(kernels: Any, compiled: dict[str, int], keyed: bool, tied: bool) -> None:
    """Step by step the same is found; where too many rows are gone side by side, the kernel says so."""
    rng, total = np.random.default_rng(5), 700
    keys, times, ties = rng.integers(0, 9, total), rng.integers(0, 60, total), rng.integers(0, 3, total)
    states = rng.integers(0, 3, total).astype(np.int8)
    index, at = TimeIndex(kernels), 0
    for size in (600, 70, 30):
        own = slice(at, at + size)
        given = (_of_keys(keys[own]), np.arange(total)[own], times[own], *((ties[own],) if tied else ()))
        index.stage(*(kernels.asarray(array) for array in given))
        index.commit()
        at += size
    needles = rng.integers(0, 10, 200)
    wanted, whole = (kernels.frame(pa.table({"k": one})) for one in (needles, keys))
    looking, far = (kernels.asarray(rng.integers(-5, 65, 200)) for _ in range(2))
    rows, among = kernels.asarray(rng.permutation(200)), Among(kernels.asarray(states), 1, 2)
    told = kernels, index, (pa.int64(),) if keyed else (), Columns(whole, ("k",))
    newer = kernels.asarray(ties) if tied else None
    quick = Nearest(*told, among, newer=newer)
    slow = Nearest(*told, lambda slots: among.states[slots] >= 1, newer=newer)
    hashes = kernels.asarray(_of_keys(needles))[rows]
    for direction, exact, farthest in itertools.product(("backward", "forward"), (True, False), (None, far)):
        options = {"exact": exact, "farthest": farthest}
        found, other = (
            each.search((Columns(wanted, ("k",)), rows), hashes, looking, direction, **options)
            for each in (quick, slow)
        )
        assert kernels.asnumpy(found).tolist() == kernels.asnumpy(other).tolist()
        assert (kernels.asnumpy(found) >= 0).sum() > 20
    assert compiled["nearest_in_run"] == 8 * len(index.runs)
    gone = dataclasses.replace(quick, alive=Among(kernels.asarray(np.zeros(total, np.int8)), 1, 1))
    alike, no_types = kernels.asarray(np.zeros(total, np.uint64)), TimeIndex(kernels)
    no_types.stage(alike, kernels.asarray(np.arange(total)), kernels.asarray(times))
    no_types.commit()
    limits = TimeLimits(looking, True, True, None)
    columns = Columns(wanted, ("k",), rows), Columns(whole, ("k",))
    assert kernels.nearest(no_types.runs, (), columns, alike[:200], among=gone.alive, limits=limits) is None


def _of_keys(keys: np.ndarray) -> np.ndarray:
    """Hashes, of which two keys share the half that an index knows."""
    return (keys // 2).astype(np.uint64) << np.uint64(58)


@only_on("emulated")
def test_text(kernels: Any, compiled: dict[str, int]) -> None:
    """Every sequence of up to four bytes that may begin or end a character, and what stands at the end of a row."""
    edges = [0x00, 0x41, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC1, 0xC2, 0xDF, 0xE0, 0xE1, 0xEC, 0xED, 0xEE]
    edges += [0xEF, 0xF0, 0xF1, 0xF3, 0xF4, 0xF5, 0xFF]
    few = [0x41, 0x80, 0x8F, 0x90, 0xBF, 0xC2]
    texts = [bytes(t) for size in (1, 2) for t in itertools.product(edges, repeat=size)]
    texts += [bytes(t) for t in itertools.product(edges[13:], *([edges[3:10]] * 2), few)]
    texts += [b"", None, "\u00e4\U0001f600".encode(), b"\xf0\x9f\x98"]
    data = pa.array(texts, pa.binary())
    column = pa.Array.from_buffers(pa.string(), len(data), data.buffers(), data.null_count)
    schema = pa.schema([("t", pa.string())])
    rows = kernels.dataframes.as_rows(kernels.frame(pa.table([column], schema=schema)), schema)
    wanted = [text is not None and _no_text(text) for text in texts]
    assert 100 < sum(wanted) < len(texts) - 100
    assert rows.invalid_text("t").tolist() == wanted
    assert compiled["find_invalid_text"] == 1
    plain = pa.table([pa.array(["a", None, ""])], schema=schema)
    assert kernels.dataframes.as_rows(kernels.frame(plain), schema).invalid_text("t") is None
    assert compiled["find_invalid_text"] == 1, "text of ASCII alone is not looked at"
    beyond = pa.table([pa.array(["\u00e4", None, ""])], schema=schema)
    assert kernels.dataframes.as_rows(kernels.frame(beyond), schema).invalid_text("t") is None


def _no_text(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return True
    return False


@only_on("emulated")
@pytest.mark.parametrize("columns", [1, 2, 3])
def test_ranges(kernels: Any, compiled: dict[str, int], columns: int) -> None:
    rng = np.random.default_rng(columns)
    stored = np.sort(rng.integers(0, 4**columns, 500))
    wanted = rng.integers(-1, 4**columns + 1, 300)
    parts = [
        [kernels.asarray(one // 4**digit % 4 if digit else one % 4) for digit in range(columns)]
        for one in (stored, wanted % 4**columns)
    ]
    low = rng.integers(0, 500, 300)
    high = np.minimum(low + rng.integers(0, 200, 300), 500)
    ranges, than = (kernels.asarray(low), kernels.asarray(high)), wanted % 4**columns
    for after, side in ((False, "left"), (True, "right")):
        found = kernels.bisect_ranges(parts[0][::-1], ranges, parts[1][::-1], after=after)
        expected = [a + int(np.searchsorted(stored[a:b], t, side)) for a, b, t in zip(low, high, than, strict=True)]
        assert kernels.asnumpy(found).tolist() == expected
        host = [[kernels.asnumpy(array) for array in part[::-1]] for part in parts]
        assert CpuKernels().bisect_ranges(host[0], (low, high), host[1], after=after).tolist() == expected
    assert compiled["bisect_ranges"] == 2


@only_on("emulated")
@pytest.mark.parametrize("rows", [1, 2, 33, 64, 3000])
def test_trees_of_lives(kernels: Any, compiled: dict[str, int], rows: int) -> None:
    """Some levels at a time the same trees are made as level by level, and as by looking at all that is below."""
    rng = np.random.default_rng(rows)
    born = rng.integers(0, 50, rows)
    given, width = (born, born + rng.integers(0, 9, rows)), 1 << (rows - 1).bit_length()
    found = [kernels.asnumpy(tree) for tree in kernels.lives(*map(kernels.asarray, given))]
    for tree, of_host, own, of_all in zip(found, CpuKernels().lives(*given), given, (np.min, np.max), strict=True):
        assert np.array_equal(tree[1:], of_host[1:])
        assert np.array_equal(tree[width : width + rows], own)
        assert tree[1] == of_all(own)
    assert compiled["fold_lives"] == max(1, -(-(width.bit_length() - 1) // 5))


@only_on("emulated")
@pytest.mark.parametrize("rows", [1, 2, 37, 64])
def test_lives(kernels: Any, compiled: dict[str, int], rows: int) -> None:
    """The last row of a range that is there at a state of a span, against a look at all."""
    rng, width = np.random.default_rng(rows), 1 << (rows - 1).bit_length()
    born, died = np.full(2 * width, 1 << 40), np.zeros(2 * width, np.int64)
    born[width : width + rows] = rng.integers(0, 50, rows)
    died[width : width + rows] = born[width : width + rows] + rng.integers(0, 9, rows)
    for node in range(width - 1, 0, -1):
        born[node], died[node] = born[2 * node :][:2].min(), died[2 * node :][:2].max()
    low = rng.integers(0, rows + 1, 200)
    high = np.minimum(low + rng.integers(0, rows + 1, 200), rows)
    begin = rng.integers(0, 50, 200)
    end = begin + rng.integers(1, 9, 200)
    expected = [
        max((r for r in range(a, b) if born[width + r] < f and died[width + r] > e), default=-1)
        for a, b, e, f in zip(low, high, begin, end, strict=True)
    ]
    given = (born, died), (low, high), (begin, end)
    found = kernels.last_there(*(tuple(kernels.asarray(array) for array in pair) for pair in given))
    assert kernels.asnumpy(found).tolist() == CpuKernels().last_there(*given).tolist() == expected
    assert compiled["last_there"] == 1


@only_on("emulated")
@pytest.mark.parametrize("every", [False, True])
def test_sole(kernels: Any, compiled: dict[str, int], every: bool) -> None:
    """The one row of each key, in several runs and among others of its hash; what is gone is not found."""
    rng = np.random.default_rng(6)
    keys = rng.permutation(900)[:600]
    states = np.ones(600, np.int8) if every else (rng.random(600) < 0.6).astype(np.int8)
    index, at = HashIndex(kernels), 0
    for size in (580, 19, 1):
        own = slice(at, at + size)
        index.stage(kernels.asarray(_of_keys(keys[own] // 4)), kernels.asarray(np.arange(600)[own]))
        index.commit()
        at += size
    asked = rng.permutation(900)
    rows = rng.permutation(900)[:500]
    frames = [kernels.frame(pa.table({"k": one})) for one in (asked, keys)]
    columns = Columns(frames[0], ("k",), kernels.asarray(rows)), Columns(frames[1], ("k",))
    among = None if every else Among(kernels.asarray(states), 1, 1)
    given = (pa.int64(),), columns, kernels.asarray(_of_keys(asked // 4)), among
    kernels.probe = "index"
    found = kernels.asnumpy(kernels.sole(index.runs, *given))
    slot_of = {int(key): slot for slot, key in enumerate(keys) if states[slot]}
    assert found.tolist() == [slot_of.get(int(asked[row]), -1) for row in rows]
    assert len(index.runs) > 1
    assert compiled["sole_in_runs"] == 1
    kernels.probe = "hash_join"
    assert kernels.sole(index.runs, *given) is None
    assert kernels.asnumpy(kernels.sole([], *given)).tolist() == [-1] * 500


@only_on("emulated")
@pytest.mark.parametrize("every", [False, True])
def test_sole_pairs(kernels: Any, compiled: dict[str, int], every: bool) -> None:
    """The one row of each key in each of two indexes, one of more runs than a launch takes."""
    rng, many = np.random.default_rng(8), 18
    kernels.probe = "index"
    keys = np.concatenate([rng.permutation(900)[:600], rng.permutation(900)[:600]])
    states = np.ones(1200, np.int8) if every else (rng.random(1200) < 0.6).astype(np.int8)
    indexes = [HashIndex(kernels), HashIndex(kernels)]
    for number, parts in enumerate((np.array_split(np.arange(600), many), [np.arange(600, 1200)])):
        for own in parts:
            added = HashIndex(kernels)
            added.stage(kernels.asarray(_of_keys(keys[own] // 4)), kernels.asarray(own))
            added.commit()
            indexes[number].runs += added.runs
    asked = rng.permutation(900)
    frames = [kernels.frame(pa.table({"k": one})) for one in (asked, keys)]
    columns = Columns(frames[0], ("k",)), Columns(frames[1], ("k",))
    among = None if every else Among(kernels.asarray(states), 1, 1)
    rows = kernels.sort(kernels.entries(kernels.asarray(_of_keys(asked // 4)), 0))
    own = kernels.asnumpy(layouts.entry_slots(rows))
    slots = [{int(keys[slot]): slot for slot in range(first, first + 600) if states[slot]} for first in (0, 600)]
    wanted = [[of.get(int(asked[row]), -1) for row in own] for of in slots]
    pairs = [[-1 if slot < 0 else slot << 32 | int(row) for slot, row in zip(one, own, strict=True)] for one in wanted]
    runs, of = [index.runs for index in indexes], ((pa.int64(),), columns, rows, among)
    for given, expected in ((runs, pairs[0] + pairs[1]), ([[], runs[1]], pairs[1]), ([runs[0], []], pairs[0])):
        found = kernels.sole_pairs([SoleLookup(0, given, *of)])
        assert kernels.asnumpy(found).tolist() == expected
    assert len(runs[0]) == many
    assert compiled["sole_in_runs"] == 2 + 1 + 2
    other = [pair if pair < 0 else pair - (1 << 63) for pair in pairs[0]]
    found = kernels.sole_pairs([SoleLookup(0, runs[1:], *of), SoleLookup(1, runs[:1], *of), SoleLookup(1, [[]], *of)])
    assert kernels.asnumpy(found).tolist() == pairs[1] + other
    assert kernels.sole_pairs([SoleLookup(0, [[], []], *of)]) is None
    kernels.probe = "hash_join"
    assert kernels.sole_pairs([SoleLookup(0, runs, *of)]) is None


@only_on("emulated")
@pytest.mark.parametrize("size", [1, 2, 7, 900])
def test_neighbours(kernels: Any, compiled: dict[str, int], size: int) -> None:
    """Rows by hash, the one before each, and the last of each; of unlike rows of one hash it is said that they are."""
    rng = np.random.default_rng(size)
    values, flags = rng.integers(0, 1 + size // 2, size), rng.random(size) < 0.5
    own = Columns(kernels.frame(pa.table({"a": values})), ["a"])
    for sharing in (1, 3):
        hashes = (values // sharing).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        found = kernels.neighbours([pa.int64()], own, kernels.asarray(hashes), kernels.asarray(flags))
        order, mine, before, last = (kernels.asnumpy(array) for array in found)
        wanted = np.argsort(hashes >> np.uint64(size.bit_length()), kind="stable")
        assert np.array_equal(order, wanted)
        follows = np.concatenate([[False], np.diff(hashes[order].view(np.int64)) == 0])
        same = np.concatenate([[False], np.diff(values[order]) == 0])
        assert np.array_equal(mine, flags[order])
        assert np.array_equal(before, np.where(~follows, -1, np.where(same, np.roll(mine, 1), -2)))
        assert np.array_equal(last, ~np.concatenate([follows[1:], [False]]))
    assert compiled["find_neighbours"] == 2
    text = Columns(kernels.frame(pa.table({"a": pa.array(["x"] * size)})), ["a"])
    assert kernels.neighbours([pa.string()], text, kernels.asarray(hashes), kernels.asarray(flags)) is None


@only_on("emulated")
@pytest.mark.parametrize("n", [1, 3])
def test_least(kernels: Any, compiled: dict[str, int], n: int) -> None:
    """Many spans at a time write to the same nodes; level by level the same is found."""
    rng, size, spans = np.random.default_rng(n), 700, 3000
    begins = rng.integers(0, size, spans)
    ends = np.minimum(begins + rng.integers(0, size, spans), size)
    ranks = rng.permutation(spans)
    given = [kernels.asarray(array) for array in (begins, ends, ranks)]
    found = kernels.asnumpy(kernels.least(*given, size=size, n=n))
    assert np.array_equal(found, least(CpuKernels(), begins, ends, ranks, size=size, n=n))
    assert compiled["put_spans"] == compiled["least_at_moments"] == 1
    assert kernels.least(*given, size=size, n=17) is None


@pytest.mark.one_in(1)
@only_on("emulated")
@pytest.mark.parametrize("rows", [None, [2, 0, 2]])
def test_entries(kernels: Any, compiled: dict[str, int], rows: list[int] | None) -> None:
    hashes = np.array([1 << 63 | 5, 7 << 32, 3 << 40], np.uint64)
    picked = None if rows is None else np.array(rows)
    made = kernels.entries(kernels.asarray(hashes), 11, None if picked is None else kernels.asarray(picked))
    assert np.array_equal(kernels.asnumpy(made), CpuKernels().entries(hashes, 11, picked))  # type: ignore[arg-type]
    given = kernels.asarray(np.array([2, 0])), kernels.asarray(np.array([70, 5]))
    made = kernels.entries(kernels.asarray(hashes), 11, None if picked is None else kernels.asarray(picked), given)
    upper = [int(one) >> 32 << 32 for one in hashes]
    counted = [upper[row] | 11 + at for at, row in enumerate(rows or range(3))]
    assert kernels.asnumpy(made).tolist() == [upper[2] | 70, upper[0] | 5, *counted]
    assert compiled["make_entries"] == 2


def _cast(numbers: pa.Array, kind: pa.DataType) -> pa.Array:
    if pa.types.is_boolean(kind):
        return pc.greater(numbers, 50)
    return numbers.cast(pa.int32()).cast(kind) if pa.types.is_date(kind) else numbers.cast(kind)


_PASTS = {
    "address,undefined": 'extern "C" __global__ void past(int* a, int n) { a[n] = 1; }',
    "thread": 'extern "C" __global__ void past(int* a, int n) { a[0] = threadIdx.x; }',
}
"""Kernels with the fault that each is for."""


@pytest.mark.skipif(SANITIZER != "undefined", reason="this is what is run")
@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", _PASTS)
def test_under_a_sanitizer(sanitizer: str) -> None:
    """All tests here, in a process that has its library from the beginning: NVRTC does not find its own parts there."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    name = f"lib{sanitizer[0]}san.so"
    found = subprocess.run(
        ["g++", f"-print-file-name={name}"], check=True, capture_output=True, text=True
    ).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip(f"no {name}")
    options = "detect_leaks=0:exitcode=66:halt_on_error=1:malloc_context_size=2"
    environment = {
        **os.environ, "LD_PRELOAD": found, "KERNEL_SANITIZER": sanitizer, "ASAN_OPTIONS": options, "TSAN_OPTIONS": options,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]),
        "OPENBLAS_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, "-k", "(emulated or finds) and not nvrtc", __file__],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert re.search(r"\b[2-9]\d passed", done.stdout), done.stdout


@pytest.mark.skipif(SANITIZER == "undefined", reason="a sanitizer of another process")
def test_the_sanitizer_finds_what_it_is_for(tmp_path: Path) -> None:
    """In one more process, which it ends."""
    code = tmp_path / "past.cpp"
    run = 'extern "C" void run__past(void** p, unsigned g, unsigned b) { launch(past, p, g, b); }'
    code.write_text("\n".join(["#define SYNC 0", PRELUDE.read_text(), _PASTS[SANITIZER], run]))
    subprocess.run([*COMPILER, str(code), "-o", str(tmp_path / "past.so")], check=True)
    script = (
        "import ctypes, numpy as np; a = np.zeros(1000, np.int32); n = ctypes.c_int(1000); "
        "p = ctypes.c_void_p(a.ctypes.data); v = ctypes.c_void_p; "
        f"ctypes.CDLL({str(tmp_path / 'past.so')!r}).run__past("
        "(v * 2)(ctypes.addressof(p), ctypes.addressof(n)), 1, 32)"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert done.returncode == 66, done.stderr
    assert "heap-buffer-overflow" in done.stderr or "data race" in done.stderr


@only_on("emulated")
def test_every_kernel_has_a_twin(kernels: Any) -> None:
    del kernels
    text = sys.modules["gpu_ops.cudf_backend.device"].SOURCE
    assert text.count("__global__ void ") == len(TWINS)
    assert all(f"__global__ void {name}(" in text for name in TWINS)


_REGISTERS = 1 << 16
"""Of a multiprocessor."""
_THREADS = {70: 2048, 75: 1024, 80: 2048, 86: 1536, 89: 1536, 90: 2048, 100: 2048, 120: 1536}
"""That a multiprocessor has at a time, by compute capability."""


def test_nvrtc_compiles_them_and_no_thread_needs_a_stack() -> None:
    """For every card there is, by the ptxas in NVRTC; no card is needed for that, and no stand-in, which hides NVRTC.

    A spill, or a local copy of the structures of 3 KB that kernels get by value, would cost each thread memory.
    """
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="not installed, it comes with pylibcudf")
    source = (ROOT / "gpu_ops" / "cudf_backend" / "kernels.cu").read_text()
    _, *answer = nvrtc.nvrtcGetSupportedArchs()
    cards = [arch for arch in _THREADS if arch in answer[-1]]
    assert 90 in cards
    for arch in cards:
        options = [f"-arch=sm_{arch}".encode(), b"--std=c++17", b"--ptxas-options=-v"]
        _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"kernels.cu", 0, [], [])
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, log.decode()
        found = re.findall(r"Function properties for (\w+)\n.*?(\d+ bytes stack frame, .*)", log.decode())
        assert {name for name, _ in found} == set(TWINS)
        assert {used for _, used in found} == {"0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"}
        registers = [int(used) for used in re.findall(r"Used (\d+) registers", log.decode())]
        used = dict(zip((name for name, _ in found), registers, strict=True))
        for name in ("nearest_in_run", "sole_in_runs"):
            assert used.pop(name) <= 48, "two thirds of them fit: each does what were six kernels and a wait"
        most = _REGISTERS // _THREADS[arch] // 8 * 8  # they are given out by eights
        assert max(used.values()) <= most, f"all threads that a multiprocessor has fit with {most}"

"""However the GPU finds candidates, rows and their order are the same: golden cases and random traces, each way."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conformance.case import check_events
from oracle.drive import Backend
from oracle.interval_traces import IntervalShape
from oracle.traces import LAYOUTS, Shape

from gpu_ops import DescriptionError, JoinEngine
from gpu_ops.descriptions.description import Emit
from gpu_ops.kernels import Probe, TooMany
from gpu_ops.state.index import HashIndex
from gpu_ops.state.time_index import TimeIndex
from kernels import test_engine
from kernels.conftest import only_on
from kernels.emulated_libcudf import HashJoin
from kernels.engines import CPU, alike, run
from kernels.support import same
from kernels.test_engine import INTERVAL, MULTI, batches_of

pytestmark = [pytest.mark.one_in(6), pytest.mark.thorough]

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
WAYS: dict[str, tuple[Probe, set[str]]] = {
    "hash_join": ("hash_join", {"hash_join"}),
    "index": ("index", {"index"}),
    "kept_table": ("hash_join", {"kept_table", "hash_join"}),
    "auto": ("auto", {"index", "hash_join"}),  # the latter at the end of input only
    "auto, some of each": ("auto", {"hash_join", "index"}),
}
"""What is asked for, and the ways that lookups may go then."""
REGULAR = [Shape(how, LAYOUTS[i], LAYOUTS[(i + 2) % 3]) for i, how in enumerate(("full", "left", "anti"))]
REGULAR += [Shape("full", "multiset", "unique_key", keys="composite", residual=(("a_x", ">", "b_x"),))]
GOLDEN = {name: case for name, case in test_engine.GOLDEN.items() if case.kind != "multi"}
FIRST = [name for name in GOLDEN if name.endswith("_1")]


@pytest.fixture
def ways(engines: Backend, request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    """The backend with one way of a lookup; where tables are kept, of every run."""
    way, allowed = WAYS[request.param]
    kernels: Any = importlib.import_module("gpu_ops.cudf_backend.kernels")
    taken: Counter[str] = Counter()
    if request.param == "kept_table":
        keeping(monkeypatch)
    if request.param == "auto, some of each":
        unlike(monkeypatch)

    class Counted(dict[str, int]):
        def __setitem__(self, name: str, count: int) -> None:
            taken[name] += count - self[name]
            super().__setitem__(name, count)

    made = kernels.CudfKernels.__init__

    def counts(self: Any, **options: Any) -> None:
        made(self, **options)
        self.host.lookups = self.lookups = Counted(self.lookups)

    monkeypatch.setattr(kernels.CudfKernels, "__init__", counts)
    yield dataclasses.replace(engines, probe=way)
    by_time = isinstance(request.node.callspec.params.get("shape"), IntervalShape)
    by_time |= any(name in request.node.name for name in ("interval", "asof", "temporal"))
    timers = {"index"} if by_time else set()  # the first row of a key, and the nearest one, are always searched
    said = {name for name, count in taken.items() if count}
    assert said
    assert said <= allowed | timers


def keeping(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Tables are kept of all runs, by the stand-in's class where the library has none; gives the module that does."""
    probe: Any = importlib.import_module("gpu_ops.cudf_backend.probe")
    join = sys.modules["pylibcudf"].join
    if isinstance(join, SimpleNamespace):
        monkeypatch.setattr(join, "HashJoin", HashJoin, raising=False)
    probe.table_class.cache_clear()
    monkeypatch.setattr(probe, "LEAST_KEPT", 1)
    monkeypatch.setattr(probe, "BUILT_SECONDS", 0.0)
    return probe


def unlike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small runs are joined, others searched."""
    probe: Any = importlib.import_module("gpu_ops.cudf_backend.probe")
    for name in ("JOIN_SECONDS", "BUILT_SECONDS", "SEARCH_SECONDS"):
        monkeypatch.setattr(probe, name, 0.0)


@only_on("gpu-tiny", "emulated-tiny")
@pytest.mark.parametrize("ways", WAYS, indirect=True)
@pytest.mark.parametrize(
    ("shape", "emit"),
    [
        *itertools.product(REGULAR, test_engine.EMITS),
        *((INTERVAL[n], "per_event") for n in (3, 4, 7)),
        (MULTI[0], "per_event"),
    ],
    ids=str,
)
def test_same_as_the_cpu(engines: Backend, ways: Backend, shape: Any, emit: Emit) -> None:
    join = shape.join(emit)
    batches = batches_of(shape, join, seed=5, events=120)
    alike(run(ways, join, batches), run(CPU, join, batches))


@only_on("gpu-tiny", "emulated-tiny")
@pytest.mark.parametrize("ways", WAYS, indirect=True)
@pytest.mark.parametrize("how", ["full", "semi", "anti"])
def test_at_the_end(engines: Backend, ways: Backend, how: Any) -> None:
    """The same rows in the same order, whether all are joined at once or all are looked up."""
    shape = Shape(how, "unique_key", "multiset")
    join = shape.join("at_end")
    batches = batches_of(shape, join, seed=5, events=120)

    def result(backend: Backend) -> Any:
        with backend.engine(join) as engine:
            for batch in batches:
                engine.process(**batch)
            return engine.finish()

    found = result(ways)
    assert found.num_rows > 5
    same(found, result(Backend("cpu-tiny")))  # which takes the same parts at once


@only_on("gpu-tiny", "emulated-tiny")
@pytest.mark.parametrize(
    "ways", ["kept_table", "auto", "index", pytest.param("hash_join", marks=pytest.mark.slow)], indirect=True
)
@pytest.mark.parametrize(
    "name", [name if name in FIRST else pytest.param(name, marks=pytest.mark.slow) for name in GOLDEN]
)
def test_golden_cases(engines: Backend, ways: Backend, name: str) -> None:
    check_events(GOLDEN[name], ways, 40)


def test_no_such_way() -> None:
    shape = REGULAR[0]
    with pytest.raises(DescriptionError, match="probe='sorted'; it is one of auto, hash_join, index"):
        JoinEngine(shape.join("per_batch"), "cpu", probe="sorted")  # type: ignore[arg-type]


ROWS, CHANGES = (10**6, 10**7, 2 * 10**7, 3 * 10**7, 10**8, 10**9), (10**3, 10**4, 10**5, 10**6, 10**7)
AUTO = """
s100    s100    s100    s100    j50 s50
s100    s100    s100    s100    s100
s100    s100    s100    s100    s100
s100    s100    s100    s100    s100
s100    s100    s100    s100    s100
s100    s100    s100    s100    s100
"""
JOINED = """
j100    k41 j59 j100    j100    j100
k40 j60 k40 j60 k51 j49 j100    j100
k40 j60 k40 j60 k46 j54 j100    j100
k40 j60 k40 j60 k44 j56 j100    j100
k40 j60 k40 j60 k40 j60 k51 j49 j100
k40 j60 k40 j60 k40 j60 k40 j60 k10 j90
"""
"""Of lookups how many per cent are joined, searched, or asked of a table that is kept."""


@only_on("emulated")
@pytest.mark.parametrize(("way", "wanted"), [("auto", AUTO), ("hash_join", JOINED)])
def test_where_lookups_go(kernels: Any, way: Probe, wanted: str) -> None:
    """Micro-batches of `CHANGES` in an index of `ROWS` rows of one partition, where tables can be kept."""
    del kernels
    probe: Any = importlib.import_module("gpu_ops.cudf_backend.probe")
    found = [" ".join(f"{simulated(probe, way, n, m):7}" for m in CHANGES).rstrip() for n in ROWS]
    assert found == wanted.strip().split("\n")


@only_on("emulated")
def test_the_model_is_what_a_card_said(kernels: Any) -> None:
    del kernels
    probe: Any = importlib.import_module("gpu_ops.cudf_backend.probe")
    file = max(RESULTS.glob("gpu-nvidia-h100-*.json"))
    measured = json.loads(file.read_text())["results"]["probe"]["sizes"]
    assert len(measured) == 8
    for one in measured:
        rows, needles = one["rows"], one["needles"]
        by_model = {
            "search": probe.search_seconds(1, needles),
            "search_by_join": probe.join_seconds(rows, needles),
        }
        for name, seconds in by_model.items():
            assert 1e3 * seconds == pytest.approx(one[name]["ms"]["median"], rel=0.3), (name, rows, needles)


def simulated(probe: Any, way: Probe, rows: int, changes: int) -> str:
    """How micro-batches of changes are looked up in an index of rows, which grows by them: each way's per cent."""
    runs, taken = [(rows, False)], Counter[str]()
    for _ in range(max(2, min(50, rows // changes))):
        ways = probe.choose(way, [size for size, _ in runs], changes, [kept for _, kept in runs], 10**9)
        runs = [(size, at in ways.kept) for at, (size, _) in enumerate(runs)] + [(changes, False)]
        while len(runs) > 1 and runs[-2][0] <= HashIndex.growth * runs[-1][0]:
            runs[-2:] = [(runs[-2][0] + runs[-1][0], False)]
        taken.update({name: len(getattr(ways, name)) for name in ways._fields})
    return " ".join(f"{name[0]}{100 * taken[name] / taken.total():.0f}" for name in ways._fields if taken[name])


@pytest.fixture
def looked(kernels: Any) -> Any:
    """An index of three runs and a timed one, hashes to look up with their times, and what a search finds."""
    rng, total = np.random.default_rng(7), 0
    index, timed = HashIndex(kernels), TimeIndex(kernels)
    for size in (900, 60, 4):
        hashes, slots = (kernels.asarray(x) for x in (_hashes(rng, size), np.arange(total, total + size)))
        index.stage(hashes, slots)
        index.commit()
        timed.stage(hashes, slots, kernels.asarray(rng.integers(-50, 50, size)))
        timed.commit()
        total += size
    needles, low = kernels.asarray(_hashes(rng, 80)), kernels.asarray(rng.integers(-60, 50, 80))

    def found() -> Any:
        staged = {"staged": True}
        return [
            kernels.asnumpy(x).tolist() for x in (*index.probe(needles, **staged), *timed.probe(needles, low, low + 9))
        ]

    kernels.probe = "index"
    wanted = found()
    assert len(index.runs) == 3
    kernels.probe = "auto"
    kernels.lookups.update(dict.fromkeys(kernels.lookups, 0))
    return SimpleNamespace(index=index, timed=timed, hashes=needles, found=found, wanted=wanted)


def _hashes(rng: np.random.Generator, size: int) -> np.ndarray:
    return rng.integers(0, 40, size).astype(np.uint64) << np.uint64(58)


@only_on("emulated")
def test_lookups_are_counted(kernels: Any, looked: Any) -> None:
    """Each needle in each run."""
    assert looked.found() == looked.wanted
    assert kernels.lookups == {"hash_join": 0, "kept_table": 0, "index": 80 * (3 + len(looked.timed.runs))}


@only_on("emulated")
@pytest.mark.parametrize("error", [MemoryError("std::bad_alloc"), OverflowError("more than 2^31 pairs")])
def test_what_cannot_be_joined_is_searched(
    kernels: Any, looked: Any, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(sys.modules["pylibcudf"].join, "inner_join", fails)
    for kernels.probe in ("auto", "hash_join"):
        assert looked.found() == looked.wanted
    assert kernels.lookups["hash_join"] == 0
    run = looked.index.runs[0].entries
    joined = np.sort(kernels.asnumpy(kernels.join(run[:9], run)))
    kernels.probe = "index"
    assert np.array_equal(joined, np.sort(kernels.asnumpy(kernels.join(run[:9], run))))
    kernels.probe = "hash_join"
    needles = kernels.entries(looked.index.runs[0].entries[:5], 0)
    pairs = looked.index.meet(needles, staged=False)
    assert looked.index.meet(needles, staged=False, at_most=int(pairs.size)).size == pairs.size
    with pytest.raises(TooMany):
        looked.index.meet(needles, staged=False, at_most=int(pairs.size) - 1)


@only_on("emulated")
def test_hot_keys_of_an_interval_are_searched(kernels: Any, looked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A join would list all their rows before those of other times are dropped."""
    probe: Any = importlib.import_module("gpu_ops.cudf_backend.probe")
    monkeypatch.setattr(probe, "SEARCH_SECONDS", 1.0)  # so that a join costs less
    by_hash = probe.count_candidates(looked.timed.runs, kernels.entries(looked.hashes, 0), None)
    monkeypatch.setattr(probe, "PAIRS_A_PROBE_ROW", 0)
    for few, way in ((by_hash, "hash_join"), (by_hash - 1, "index")):
        monkeypatch.setattr(probe, "FEW_PAIRS", few)
        before = dict(kernels.lookups)
        assert looked.found() == looked.wanted
        counted = {name: kernels.lookups[name] - before[name] for name in before}
        assert counted[way] >= 80 * len(looked.timed.runs)
        assert counted["index"] == (80 * len(looked.timed.runs) if way == "index" else 0)


@only_on("emulated")
def test_tables_are_kept_while_their_runs_are(kernels: Any, looked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is built once, goes with its run, and before anything else when memory runs out."""
    probe, built = keeping(monkeypatch), []
    kernels.probe = "hash_join"
    made = probe.KeptTable.__init__
    monkeypatch.setattr(
        probe.KeptTable, "__init__", lambda self, entries: (built.append(entries.size), made(self, entries))[1]
    )
    for _ in range(3):
        assert looked.found() == looked.wanted
    runs = len(looked.index.runs) + len(looked.timed.runs)
    assert len(built) == runs
    assert kernels.lookups == {"hash_join": 0, "kept_table": 3 * 80 * runs, "index": 0}
    assert probe.TABLES.nbytes == probe.KEPT_BYTES * sum(built)
    size = sum(run.entries.size for run in looked.index.runs) + 100
    looked.index.stage(kernels.asarray(_hashes(np.random.default_rng(1), 100)), kernels.asarray(np.arange(964, 1064)))
    looked.index.commit()
    (run,) = looked.index.runs  # all are merged
    gc.collect()
    assert probe.TABLES.nbytes == probe.KEPT_BYTES * sum(run.entries.size for run in looked.timed.runs)
    looked.found()
    assert built[runs:] == [size]
    held = probe.TABLES.nbytes
    device: Any = importlib.import_module("gpu_ops.cudf_backend.device")
    assert device._give_back(1)
    assert probe.TABLES.nbytes == 0
    assert run.entries not in probe.TABLES
    assert probe.TABLES.room(10**12) == held // 2 // probe.KEPT_BYTES
    looked.found()
    assert 0 < probe.TABLES.nbytes <= held // 2
    assert kernels.lookups["hash_join"] > 0


@only_on("emulated")
def test_tables_have_their_part_of_the_memory(kernels: Any, looked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = keeping(monkeypatch)
    kernels.probe = "hash_join"
    kernels.memory_limit = 5 * probe.KEPT_BYTES * 70  # of which a fifth: for runs of 60 and 4, and a timed one of 4
    assert looked.found() == looked.wanted
    assert probe.TABLES.nbytes == probe.KEPT_BYTES * 68
    assert kernels.lookups["kept_table"] == 3 * 80


@only_on("emulated")
def test_a_table_class_that_is_another(kernels: Any, looked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is installed one day may be built or asked otherwise than is known now."""

    class Keyword(HashJoin):
        def __init__(self, *, build: Any, nulls: Any) -> None:
            super().__init__(build, nulls)

    class Turned(HashJoin):
        def inner_join(self, left: Any) -> Any:
            return super().inner_join(left)[::-1]

    kernels.probe = "hash_join"
    for other in (Keyword, Turned):
        probe = keeping(monkeypatch)
        monkeypatch.setattr(sys.modules["pylibcudf"].join, "HashJoin", other)
        assert probe.table_class() is None
        assert looked.found() == looked.wanted
    assert kernels.lookups["kept_table"] == 0


@only_on("emulated-tiny")
def test_an_engine_says_how_its_lookups_went(engines: Backend) -> None:
    shape = REGULAR[0]
    join = shape.join("per_batch")
    with engines.engine(join) as engine:
        counted: Counter[str] = Counter()
        for batch in batches_of(shape, join, seed=5, events=40):
            metrics = engine.prepare(**batch).metrics
            engine.commit()
            counted.update({name: metrics[f"lookups_{name}"] for name in engine.kernels.lookups})
        assert counted == Counter(engine.kernels.lookups)
        assert counted["index"] > 0
        assert f"lookups     0 by hash join, 0 by kept table, {counted['index']:,} by index" in repr(engine)

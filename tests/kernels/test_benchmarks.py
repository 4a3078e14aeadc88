"""Every benchmark for a card runs, at tiny sizes on stand-ins for its libraries; what it says has all promised keys."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pytest

from benchmarks.gpu import bench, first, interval, others, partitions, peers, probe, smoke, snapshot, state, transfer
from benchmarks.gpu.bench import PARTS, Sizes
from benchmarks.gpu.card import Clock, Plan, copy_bandwidth, device
from benchmarks.gpu.feed import KEYS, Feed, description
from benchmarks.gpu.steady import Case, one_core, steady
from benchmarks.gpu.targets import CHANGES, MANY, STATE_ROWS, targets
from benchmarks.gpu.turns import take_turns
from benchmarks.gpu.watch import HOST, TRANSFERS, Watch
from gpu_ops.backends import make_kernels
from gpu_ops.join_engine import JoinEngine
from gpu_ops.kernels import Kernels, Probe
from kernels.card import NAME, emulated_card
from kernels.test_probe import keeping

pytestmark = pytest.mark.thorough

PLAN = Plan(rounds=3, bandwidth=1e9)
TINY = Sizes(
    copied_bytes=1 << 16, changes=200, sweep=(120, 400), partitions=(1, 3), batches=3, warmup=1, first=100, state=(2000, 1000), probe=(1000, 2000), needles=(200, 20), appended=2000,
    append_batch=100, counted=1000, merged=((1000, 100), (400, 40)), grown=2000, interval_batches=10, multi_way=1000,
    at_end=500, ways=(1000,), ways_needles=100, snapshot=1000, peers=500, cpu=(2000,), rounds=2,
)  # fmt: skip
FIGURE = {"ms", "bytes", "gb_per_second", "share_of_copy_bandwidth"}


@pytest.fixture
def card() -> Iterator[Any]:
    with emulated_card() as cupy:
        yield cupy


@pytest.fixture
def gpu(card: Any) -> Iterator[Kernels]:
    made, _ = make_kernels("gpu")
    yield made
    made.close()


def measured(figure: dict[str, Any]) -> bool:
    return figure.keys() >= FIGURE and figure["bytes"] > 0 and len(figure["ms"].values) >= 1


def test_copy(gpu: Kernels) -> None:
    found = copy_bandwidth(gpu, 1 << 16, 3)
    assert found["bytes"] == 2 << 16
    assert found["bytes_per_second"] > 0
    assert len(found["ms"].values) == 3


def test_smoke(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it at a small size; and it says what is wrong."""
    del card
    honest = smoke.memory
    steps = tuple(step for step in smoke.STEPS if step is not honest)  # the stand-in has no limit
    monkeypatch.setattr(smoke, "STEPS", steps)
    smoke.run(600)
    monkeypatch.setattr(smoke, "STEPS", (honest,))
    with pytest.raises(AssertionError, match="was not refused"):
        smoke.run(600)


def test_probe(gpu: Kernels) -> None:
    found = probe.probe(gpu, [1000, 3000], [500, 50], PLAN)
    sizes = [(entry["rows"], entry["needles"]) for entry in found["sizes"]]
    assert sizes == [(1000, 500), (1000, 50), (3000, 500), (3000, 50)]
    ways = ("search", "search_by_join", "sorted_run", "inner_join", "mixed_inner_join")
    for entry in found["sizes"]:
        assert all(measured(entry[way]) for way in ways)
        assert 0.25 < entry["matches"] / entry["needles"] < 0.75  # half of the needles are there
        assert entry["candidates"] >= entry["matches"]
        assert 0 < entry["by_model"]["search"] < 1
        assert not entry.keys() & {"search_by_table", "build_table"}  # which pylibcudf has no class for yet
    assert not found["tables"]


def test_a_kept_table_is_probed_where_there_is_one(gpu: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = keeping(monkeypatch).TABLES
    found = probe.probe(gpu, [1000], [500, 50], PLAN)
    assert found["tables"]
    for entry in found["sizes"]:
        assert all(measured(entry[way]) for way in ("search", "search_by_join", "search_by_table", "build_table"))
        assert entry["by_model"]["search_by_table"] < entry["by_model"]["search_by_join"]
        assert "build_table" in entry["by_model"]
    assert not tables.nbytes  # they went with the state


def test_ways_that_differ_are_found(gpu: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose_one(self: Any, keys: Any) -> Any:
        needles, slots = honest(self, keys)
        return needles[1:], slots[1:]

    honest = probe.State.sorted_run
    monkeypatch.setattr(probe.State, "sorted_run", lose_one)
    with pytest.raises(AssertionError, match="_join differs from sorted_run: 500 needles, 1000 rows"):
        probe.probe(gpu, [1000], [500], PLAN)


def test_what_does_not_fit_is_left_out() -> None:
    with emulated_card(free=100_000):
        kernels, _ = make_kernels("gpu")
        found = probe.probe(kernels, [1000, 1_000_000_000], [100], PLAN)
        late = probe.probe(kernels, [1000], [100], Plan(clock=Clock(0)))
        kernels.close()
    assert [entry["rows"] for entry in found["sizes"]] == [1000]
    assert found["left_out"]["1000000000"].startswith("memory: about 74.5 GiB needed")
    assert late["left_out"]["1000"].startswith("time: ")


def test_out_of_memory_leaves_out(gpu: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise MemoryError("std::bad_alloc")

    with monkeypatch.context() as patch:
        patch.setattr(probe, "mixed_join", refuse)
        (entry,) = probe.probe(gpu, [1000], [100], PLAN)["sizes"]
    assert entry["mixed_inner_join"] == {"left_out": "memory: std::bad_alloc"}
    assert measured(entry["inner_join"])
    monkeypatch.setattr(probe, "State", refuse)
    assert probe.probe(gpu, [1000], [100], PLAN)["left_out"] == {"1000": "memory: std::bad_alloc"}


def test_state(gpu: Kernels) -> None:
    found = state.rows_and_gathers(gpu, 2000, 100, PLAN)
    assert measured(found["append"])
    assert measured(found["take"])
    assert len(found["append"]["ms"].values) == 20
    assert found["append"]["bytes_per_row"] > 16
    assert measured(state.scatter_add(gpu, 1000, 300, PLAN))
    merged, left_out = state.merges(gpu, [(1000, 100), (1 << 40, 1 << 36)], PLAN)
    assert merged["runs_after"] == 1
    assert measured(merged["stage"])
    assert measured(merged["commit"])
    assert merged["commit"]["bytes"] > 16 * 1100
    assert left_out["left_out"].startswith("memory: ")
    grown = state.growth(gpu, 1000, 100)
    assert grown["rows"] == 1000
    assert len(grown["commit_ms"].values) == 10


def test_transfer(gpu: Kernels) -> None:
    found = transfer.transfer(gpu, 300, 2)
    names = [f"{way}_{what}" for way in ("arrow_to_frame", "frame_to_arrow") for what in ("numbers", "text")]
    names += [f"{way}_{memory}" for way in ("to_card", "to_host") for memory in ("pageable", "pinned")]
    assert all(measured(found[name]) for name in [*names, "row_kinds"])


def test_interval_ways(gpu: Kernels) -> None:
    even, hot = interval.ways(gpu, [2000], 200, PLAN)
    assert (even["hot_key"], hot["hot_key"]) == (False, True)
    for entry in (even, hot):
        assert entry["matches"] > 0
        assert measured(entry["sorted_runs"])
        assert measured(entry["mixed_inner_join"])


@pytest.mark.parametrize(("mix", "unique"), [("changes", True), ("changes", False), ("inserts", False)])
def test_the_feed_fits_the_state(mix: str, unique: bool) -> None:
    """Every retraction is of a row that is there, and the changelog is that of the join."""
    feed = Feed(400, 200, mix)
    with contextlib.closing(
        JoinEngine(description("per_batch", unique=unique, insert_only=mix == "inserts"), "cpu")
    ) as engine:
        engine.restore(feed.start())
        said = [engine.prepare(*pair) for pair in feeding(engine, feed, 5)]
        snapshot = engine.snapshot()
    for batch in said:
        assert not batch.metrics["left_unknown_retractions"]
        assert not batch.metrics["right_unknown_retractions"]
    assert len(said) == 5
    right = dict(zip(*(snapshot["right"][name].to_pylist() for name in "kb"), strict=True))
    left = dict(zip(*(snapshot["left"][name].to_pylist() for name in "ka"), strict=True))
    assert snapshot["left"].num_rows == len(left)
    joined = Counter((key, value, right.get(key)) for key, value in left.items())
    start = feed.start()
    before = {k: (a, b) for k, a, b in begun(start)}
    folded = Counter({(k, *v): 1 for k, v in before.items()})
    for batch in said:
        for kind, *row in zip(*batch.changelog.to_pydict().values(), strict=True):
            folded[tuple(row)] += 1 if kind in ("+I", "+U") else -1
    assert +folded == joined
    assert min(folded.values()) >= 0


def feeding(engine: JoinEngine, feed: Feed, count: int) -> Iterator[tuple[pa.Table, pa.Table]]:
    for pair in feed.batches(count):
        yield pair
        engine.commit()


def begun(start: dict[str, pa.Table]) -> Iterator[tuple[int, int, int]]:
    right = dict(zip(*(start["right"][name].to_pylist() for name in "kb"), strict=True))
    for key, value in zip(*(start["left"][name].to_pylist() for name in "ka"), strict=True):
        yield key, value, right[key]


def test_the_feed_ends() -> None:
    feed = Feed(100, 80)
    assert feed.most == 10
    with pytest.raises(ValueError, match="11 micro-batches touch more than 100 rows; 10 are possible"):
        list(feed.batches(11))


@pytest.mark.parametrize("emit", ["per_batch", "per_event"])
def test_engines_say_the_same(card: Any, emit: Any) -> None:
    case = Case(2000, changes=200, batches=3, warmup=1, emit=emit)
    ours, theirs = steady("gpu", case, PLAN), steady("cpu", case, PLAN)
    assert ours.keys() == theirs.keys()
    for name in ("rows_out", "state_rows_at_the_end", "changes"):
        assert ours[name] == theirs[name] > 0
    assert measured(ours["plain"])
    assert ours["plain"]["changes_per_second"] > 0
    for name in (*TRANSFERS, *HOST, "transfer", "without_transfer", "join_alone"):
        assert len(ours["watched"]["ms"][name].values) == 3
    for name in ("frame", "to_arrow", "ingest", "row_kinds"):
        assert ours["watched"]["ms"][name].low > 0
    assert ours["watched"]["changes_per_second_join_alone"] > ours["watched"]["changes_per_second_without_transfer"]
    first, second = (interval.engine(backend, 200, 10, emit, PLAN) for backend in ("gpu", "cpu"))
    assert first["rows_out"] == second["rows_out"] > 0
    assert first["state_rows"] < 6 * 200  # old rows go
    first, second = (others.multi_way(backend, 800, 300, emit, PLAN) for backend in ("gpu", "cpu"))
    assert first["rows_out"] == second["rows_out"] > 0


@pytest.mark.parametrize("keys", KEYS)
def test_keys_and_probes(card: Any, keys: str) -> None:
    """The engines say the same, of keys of every sort, with every way of probing."""
    case = Case(2000, changes=200, batches=3, warmup=1, keys=keys)
    cpu = steady("cpu", case, PLAN)["rows_out"]
    found = [steady("gpu", dataclasses.replace(case, probe=way), PLAN)["rows_out"] for way in get_args(Probe)]
    assert found == [cpu] * len(get_args(Probe))


def test_partitions(card: Any) -> None:
    case = Case(2400, changes=240, batches=3, warmup=1)
    one, three = (partitions.partitions("gpu", count, case, PLAN) for count in (1, 3))
    cpu = partitions.partitions("cpu", 3, case, PLAN)
    assert one["rows_out"] > 0
    assert cpu["rows_out"] == three["rows_out"] > 0
    assert len(three["ms"].values) == 3


def test_first_micro_batches() -> None:
    found = first.processes("cpu", 100, 60)
    for name in ("cold", "warm"):
        assert len(found[name]["micro_batches_s"]) == first.MICRO_BATCHES
        assert found[name]["process_s"] > found[name]["import_s"] > 0
    assert first.processes("cpu", 100, 0.01)["left_out"].startswith("time: ")


def test_snapshot(card: Any) -> None:
    found = snapshot.stall("gpu", 1000, 100, 3)
    assert found["bytes"] > 1000
    assert len(found["drain_ms"].values) == 3
    assert found["times"] > 0


def test_peers(gpu: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are here find the rows that they must; one that does not is found."""
    here = ("libcudf", "polars", "duckdb")
    found = peers.peers("gpu", 500, 200, PLAN)
    assert found["all_rows"]["ours"]["rows_out"] == 500
    for asked in ("all_rows", "micro_batch"):
        assert {name for name in peers.PEERS if "alone" in found[asked][name]} == set(here)
        assert all(found[asked][name]["arrow_to_arrow"]["ms"].median > 0 for name in here)
        assert found[asked]["cudf.merge"]["left_out"] == "not installed: cudf"

    def loses(left: Any, right: Any) -> Any:
        return None, lambda: peers.polars(left, right)[1]().slice(1)

    monkeypatch.setitem(peers.PEERS, "polars", (loses, ()))
    with pytest.raises(AssertionError, match="polars found "):
        peers.peers("gpu", 500, 200, PLAN)


def test_at_end(card: Any) -> None:
    first, second = (others.at_end(backend, 500, 200) for backend in ("gpu", "cpu"))
    assert first["rows_out"] == second["rows_out"] == 500


def test_a_watch_leaves_no_trace() -> None:
    with contextlib.closing(JoinEngine(description("per_batch", unique=True), "cpu")) as engine:
        feed = Feed(100, 80)
        engine.restore(feed.start())
        (pair,) = feed.batches(1)
        before = dict(vars(engine.kernels))
        with Watch(engine, lambda: None).on() as parts:
            engine.process(*pair)
        assert all(parts[name] > 0 for name in ("frame", "ingest", "row_kinds"))
        said = dict(parts)
        engine.process(*(table.slice(0, 0) for table in pair))
        assert parts == said
        assert vars(engine.kernels) == before


def test_a_rate_of_one_micro_batch_is_refused() -> None:
    """Also where the clock has ended: the least number is counted, however long it takes."""
    feed = Feed(1000, 80)
    given = list(feed.batches(7))
    with contextlib.closing(JoinEngine(description("per_batch", unique=True), "cpu")) as engine:
        engine.restore(feed.start())
        with pytest.raises(ValueError, match="7 micro-batches are no measurement: 2 warm up, and 3 plain"):
            take_turns(engine, given, 2, PLAN)
        found = take_turns(engine, given, 1, dataclasses.replace(PLAN, clock=Clock(0)))
        assert len(found["plain"]["ms"].values) == len(found["watched"]["ms"]["frame"].values) == 3
    with pytest.raises(ValueError, match="4 micro-batches are no measurement: 2 warm up, 3 are counted"):
        partitions.partitions("cpu", 1, Case(100, changes=100, batches=3, warmup=2), PLAN)


def test_one_core() -> None:
    case = Case(2000, changes=200, batches=3, warmup=1)
    found = one_core(case, 60)
    assert found["cores"] == 1
    assert (found["backend"], found["rows"]) == ("cpu", 2000)
    assert found["plain"]["changes_per_second"] > 0
    assert one_core(case, 0.01)["left_out"].startswith("time: ")


@pytest.mark.slow
def test_all_parts(card: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "results" / "gpu.json"
    monkeypatch.setattr(first, "processes", lambda *_: {"cold": {}})  # a process of its own has no stand-ins
    written = bench.measure(out, tuple(PARTS), TINY, Clock())
    assert json.loads(out.read_text()) == written
    results = written["results"]
    assert written.keys() == {"benchmark", "time", "machine", "versions", "settings", "results"}
    assert written["versions"].keys() >= {"python", "numpy", "pyarrow"}
    assert results["device"].keys() >= {"name", "driver", "driver_cuda", "runtime_cuda", "memory_gib"}
    assert results["device"]["name"] == NAME
    assert {name: part["status"] for name, part in results["parts"].items()} == dict.fromkeys(PARTS, "done")
    assert results.keys() == {"device", "parts", "targets", *PARTS}
    assert [case["emit"] for case in results["regular"]] == ["per_batch", "per_event", "per_batch", "per_batch"]
    assert [case["changes"] for case in results["sweep"]] == [120, 400]
    assert [case["backend"] for case in results["cpu"]] == ["cpu", "cpu"]
    assert results["regular"][0]["plain"]["share_of_copy_bandwidth"] > 0
    for spread in (results["regular"][0]["plain"]["ms"], results["probe"]["sizes"][0]["inner_join"]["ms"]):
        assert spread.keys() == {"median", "low", "high", "spread", "values"}
    assert {target["name"] for target in results["targets"]} >= {"join alone", "Arrow to Arrow", "probe", "demo"}


@pytest.mark.slow
def test_parts_one_by_one(card: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "gpu.json"
    first = bench.measure(out, ["transfer"], TINY, Clock())["results"]
    assert first["parts"].keys() == {"copy", "transfer"}  # figures need the bandwidth

    def fails(*_: Any) -> None:
        raise MemoryError("too much")

    monkeypatch.setitem(bench.PARTS, "probe", fails)
    second = bench.measure(out, ["probe", "at_end"], TINY, Clock())["results"]
    assert second["transfer"] == first["transfer"]
    assert second["copy"] == first["copy"]
    assert second["parts"]["probe"]["status"] == "failed: MemoryError: too much"
    assert second["parts"]["at_end"]["status"] == "done"
    monkeypatch.undo()
    again = bench.measure(out, ["probe", "at_end"], TINY, Clock(), resume=True)["results"]
    assert again["parts"]["at_end"] == second["parts"]["at_end"]  # it was done
    assert again["parts"]["probe"]["status"] == "done"
    again["at_end"]["left_out"] = "time: 5 s needed"
    out.write_text(json.dumps({**json.loads(out.read_text()), "results": again}))
    assert "left_out" not in bench.measure(out, ["at_end"], TINY, Clock(), resume=True)["results"]["at_end"]
    third = bench.measure(out, ["state"], TINY, Clock(0))["results"]
    assert third["parts"]["state"]["status"].startswith("left out: time: ")
    assert "state" not in third
    monkeypatch.setattr(bench, "device", lambda: {**device(), "name": "another"})
    assert "transfer" not in bench.measure(out, ["at_end"], TINY, Clock())["results"]


def test_targets() -> None:
    def case(rows: int, rate: float) -> dict[str, Any]:
        whole = dataclasses.asdict(Case(rows, changes=CHANGES))
        watched = {"changes_per_second_without_transfer": rate, "changes_per_second_join_alone": 2 * rate}
        return {**whole, "plain": {"changes_per_second": rate / 2}, "watched": watched}

    def size(rows: int, ms: float) -> dict[str, Any]:
        return {"rows": rows, "needles": CHANGES, "sorted_run": {"ms": {"median": ms}}}

    nothing = targets({})
    assert all(target["reached"] is None and target["measured"] is None for target in nothing)
    results = {
        "regular": [{**case(STATE_ROWS, 9e9), "emit": "per_event"}, case(STATE_ROWS, 60e6), case(1000, 1e9)],
        "sweep": [{**case(STATE_ROWS, 99e6), "changes": MANY}],
        "cpu": [case(10_000_000, 4e6), {**case(STATE_ROWS, 1.0), "left_out": "time"}],
        "probe": {"sizes": [size(1_000_000, 2.0), size(100_000_000, 7.0)]},
        "verify": {"demo": {"status": "left out", "problems": ["no Java"]}},
    }
    found = {target["name"]: target for target in targets(results)}
    assert found["join alone"]["measured"] == 120e6
    assert found["join alone"]["reached"]
    assert found["Arrow to Arrow"]["measured"] == 30e6
    assert not found["Arrow to Arrow"]["reached"]
    assert found["join alone, aimed at"]["measured"] == 198e6
    assert not found["join alone, aimed at"]["reached"]
    times = found["times the CPU engine, without transfer"]
    assert times["measured"] == 15
    assert not times["reached"]
    assert "one core at 10000000 state rows" in times["of"]
    assert found["probe"]["measured"] == 3.5
    assert not found["probe"]["reached"]
    assert found["demo"]["reached"] is None
    assert "no Java" in found["demo"]["of"]
    results["verify"]["demo"] = {"status": "passed", "problems": []}
    assert targets(results)[-1]["reached"]


def test_hosts_need_not_say_more(card: Any) -> None:
    assert device()["driver"] is None or isinstance(device()["driver"], str)
    assert np.isclose(device()["memory_gib"], 16)

"""The golden cases: what Flink's own operators emitted, event by event.

    pytest tests/conformance --cases DIR

reads the same format from any folder. Every case runs at several micro-batch splits on each backend;
``per_event`` is compared event by event, ``per_batch`` by folding after each micro-batch. Joins by time are
cut at every watermark besides; temporal ones have one way to emit.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from conftest import backend_param, backends
from oracle.drive import Backend, Change, Row, cuts, difference, fold, run
from oracle.interval_drive import timed_cuts, timed_run
from oracle.sql import reference

from conformance.case import BUILT, Case, check_events, read_cases
from gpu_ops.descriptions.description import Emit

ALL = 1_000_000_000
SPLITS = {"split1": 1, "split7": 7, "all": ALL}
EMITS: tuple[Emit, ...] = ("per_event", "per_batch")
FIRST_MULTI = ("multi_4way_mixed_1", "multi_left_inner_residual", "multi_left_left_chain_1", "multi_two_keys")
"""Multi-way joins differ less: the short run has the others in one micro-batch only."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per case, split, emit and backend; one visible skip per case that is not built."""
    if "case" not in metafunc.fixturenames:
        return
    params: list[Any] = []
    begun: dict[str, str] = {}
    for case in read_cases(Path(metafunc.config.getoption("--cases"))):
        if case.kind not in BUILT:
            skip = pytest.mark.skip(reason=f"not built: {case.kind} join ({case.name})")
            params.append(pytest.param(case, 1, EMITS[0], Backend("cpu"), id=f"{case.kind}-{case.name}", marks=skip))
            continue
        first = not further(case) and begun.setdefault(case.kind, case.name) == case.name
        for backend in backends(metafunc.config):
            for label, split in SPLITS.items():
                for emit in EMITS if case.kind != "temporal" else EMITS[:1]:
                    marks = [pytest.mark.slow] if slow(case, label, emit, backend, first=first) else []
                    name = f"{case.kind}-{case.name}-{label}-{backend.name}-{emit}"
                    params.append(backend_param(backend, case, split, emit, name=name, marks=marks))
    metafunc.parametrize(("case", "split", "emit", "backend"), params)


def further(case: Case) -> bool:
    """Whether it is like another case of its kind, over another trace."""
    return case.name.endswith(("_2", "_3", "_long")) or "_late" in case.name


def slow(case: Case, label: str, emit: Emit, backend: Backend, *, first: bool) -> bool:
    """Small micro-batches take their time: the long run has every case every way, the short run each two ways together.

    A case runs in seven events and in one micro-batch, with plain and with tiny segments, in both ways to emit: in
    seven events ``per_event`` has tiny segments and ``per_batch`` plain ones, in one micro-batch it is the other way
    round. In seven events ``per_batch`` is for the first case of each kind, which runs in one event as well; further
    cases run in one micro-batch only.
    """
    tiny, each = backend.name.endswith("-tiny"), emit == "per_event"
    if label != "all" and case.kind == "multi" and case.name not in FIRST_MULTI:
        return True
    if label == "split1":
        return not (first and each and backend.name == "cpu")
    if label == "split7" and (further(case) or not (each or first)):
        return True
    return (tiny == each) != (label == "split7")


def test_case(case: Case, split: int, emit: Emit, backend: Backend) -> None:
    if case.informative:
        check_view(case, split, emit, backend)
    elif emit == "per_event":
        check_events(case, backend, split)
    elif case.timed:
        check_timed_batches(case, split, backend)
    else:
        check_folds(case, split, backend)


def check_timed_batches(case: Case, split: int, backend: Backend) -> None:
    """Per micro-batch the same: nothing is ever taken back, so there is nothing to fold."""
    events, expected = case.timed_events, case.expected
    with backend.engine(case.join("per_batch")) as engine:
        for cut in timed_cuts(engine.description, events, split):
            want: Counter[Change] = Counter()
            for event in range(cut.start, cut.stop):
                want += expected.get(event, Counter())
            wrong = difference(want, Counter(timed_run(engine, cut)[0]))
            assert not wrong, f"events {cut.start} to {cut.stop - 1}:\n{wrong}"


def check_folds(case: Case, split: int, backend: Backend) -> None:
    """After each micro-batch the changelogs fold to the same, and nothing comes and goes within it."""
    events, expected = case.events, case.expected
    want: Counter[Row] = Counter()
    got: Counter[Row] = Counter()
    with backend.engine(case.join("per_batch")) as engine:
        for cut in cuts(engine.description, events, split):
            for event in range(cut.start, cut.stop):
                fold(list(expected.get(event, Counter()).elements()), want)
            changes, _, _ = run(engine, cut)
            fold(changes, got)
            assert got == want, f"after event {cut.stop - 1}:\n{difference(want, got)}"
            added = {row for kind, row in changes if kind in ("+I", "+U")}
            both = [row for kind, row in changes if kind in ("-U", "-D") and row in added]
            assert not both, f"events {cut.start} to {cut.stop - 1} both add and remove {both[:3]}"


def check_view(case: Case, split: int, emit: Emit, backend: Backend) -> None:
    """Where Flink is known to be wrong: the changelog folds to the SQL join of the folded inputs.

    One event at a time, the join is asked for every seventh time and at the end.
    """
    events = [(s, k, typed(case, s, row)) for s, k, row in case.events]
    view = reference(case.join(emit))
    with contextlib.closing(view), backend.engine(view.join) as engine:
        for number, cut in enumerate(cuts(engine.description, events, split)):
            view.change(events[cut.start : cut.stop])
            _, _, batch = run(engine, cut)
            view.fold(batch.changelog)
            if split > 1 or number % 7 == 0 or cut.stop == len(events):
                wrong = view.differences()
                assert not wrong, f"after event {cut.stop - 1}:\n{wrong}"


def typed(case: Case, side: int, row: Row) -> Row:
    """The values as the column types want them (a JSON 1 may be a DOUBLE)."""
    types = [t for _, t in case.data["inputs"][side]["columns"]]
    return tuple(float(v) if t == "DOUBLE" and v is not None else v for v, t in zip(row, types, strict=True))


def test_every_case_is_in_the_manifest(request: pytest.FixtureRequest) -> None:
    """The copies here are complete: as many cases, of the sizes that the manifest lists."""
    import json

    folder = Path(request.config.getoption("--cases"))
    if not (folder / "manifest.json").exists():
        pytest.skip("this folder of cases has no manifest.json")
    listed = {c["name"]: c for c in json.loads((folder / "manifest.json").read_text())["cases"]}
    found = {c.name: c for c in read_cases(folder)}
    assert sorted(found) == sorted(listed)
    for name, case in found.items():
        assert len(case.data["events"]) == listed[name]["events"]
        assert len(case.data["expected"]) == listed[name]["expected"]

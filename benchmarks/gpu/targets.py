"""What the GPU backend must reach, and whether a card's results do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STATE_ROWS, CHANGES, MANY = 100_000_000, 1_000_000, 10_000_000
LEAST_CHANGES, AIM = 50e6, 200e6
TIMES_CPU = 20.0
PROBE_SMALL, PROBE_LARGE, PROBE_TIMES = 1_000_000, 100_000_000, 3.0


def targets(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each target, what was measured of it, and whether it is reached.

    Args:
        results: of `benchmarks.gpu.bench`, as they stand in its JSON, perhaps incomplete.

    Returns:
        ``name``, ``asked``, ``measured`` and ``reached`` (None where nothing was measured), ``of`` in words.
    """
    left_join = f"left join, per_batch, {CHANGES} changes a micro-batch, {STATE_ROWS} state rows"
    gpu, large = _left_join(results.get("regular", []), CHANGES), _left_join(results.get("sweep", []), MANY)
    alone, whole = "changes per second of the join alone", "changes per second from Arrow to Arrow"
    found = [
        _entry("join alone", LEAST_CHANGES, _alone(gpu), f"{left_join}: {alone}"),
        _entry(
            "Arrow to Arrow",
            LEAST_CHANGES,
            gpu["plain"]["changes_per_second"] if gpu else None,
            f"{left_join}: {whole}",
        ),
        _entry("join alone, aimed at", AIM, _alone(large), f"{left_join.replace(str(CHANGES), str(MANY), 1)}: {alone}"),
    ]
    for name, part, key in (
        ("times the CPU engine, without transfer", "watched", "changes_per_second_without_transfer"),
        ("times the CPU engine, Arrow to Arrow", "plain", "changes_per_second"),
    ):
        cpu, rows = _largest_cpu(results.get("cpu", []))
        ratio = gpu[part][key] / cpu[part][key] if gpu and cpu else None
        there = f"; the CPU engine on one core at {rows} state rows" if cpu else ""
        found.append(_entry(name, TIMES_CPU, ratio, left_join + there))
    sizes = {e["rows"]: e for e in results.get("probe", {}).get("sizes", []) if e["needles"] == CHANGES}
    both = sizes.get(PROBE_SMALL), sizes.get(PROBE_LARGE)
    times = _median(both[1]["sorted_run"]) / _median(both[0]["sorted_run"]) if both[0] and both[1] else None
    of = f"time of a probe of {CHANGES} changes at {PROBE_LARGE} rows over that at {PROBE_SMALL}, sorted run"
    found.append(_entry("probe", PROBE_TIMES, times, of, most=True))
    found.append(_demo(results.get("verify", {})))
    return found


def _entry(name: str, asked: float, measured: float | None, of: str, *, most: bool = False) -> dict[str, Any]:
    reached = None if measured is None else bool(measured <= asked if most else measured >= asked)
    bound = f"{'at most' if most else 'at least'} {asked:g}"
    return {"name": name, "asked": bound, "measured": measured, "reached": reached, "of": of}


def _demo(verified: Mapping[str, Any]) -> dict[str, Any]:
    said = verified.get("demo")
    status = said["status"] if said else None
    why = f": {'; '.join(said['problems'])}" if said and said["problems"] else ""
    reached = {"passed": True, "failed": False}.get(status or "")
    return {
        "name": "demo",
        "asked": "passes",
        "measured": status,
        "reached": reached,
        "of": f"the demo end to end on Spark with backend=gpu{why}",
    }


def _wanted(case: Mapping[str, Any]) -> bool:
    return case["emit"] == "per_batch" and case["mix"] == "changes" and "left_out" not in case


def _left_join(cases: list[dict[str, Any]], changes: int) -> dict[str, Any] | None:
    return next((c for c in cases if _wanted(c) and (c["rows"], c["changes"]) == (STATE_ROWS, changes)), None)


def _alone(case: Mapping[str, Any] | None) -> float | None:
    return case["watched"]["changes_per_second_join_alone"] if case else None


def _largest_cpu(cases: list[dict[str, Any]]) -> tuple[dict[str, Any] | None, int]:
    """The CPU engine with as many rows as it was measured with, at most as many as the target's."""
    there = [c for c in cases if _wanted(c) and c["rows"] <= STATE_ROWS]
    largest = max(there, key=lambda c: c["rows"], default=None)
    return largest, largest["rows"] if largest else 0


def _median(figure: Mapping[str, Any]) -> float:
    ms = figure["ms"]
    return float(ms["median"] if isinstance(ms, Mapping) else ms.median)

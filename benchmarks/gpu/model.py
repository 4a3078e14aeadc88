"""What a card is expected to say, written down before one was asked, beside what it says.

A micro-batch costs the host its library calls and its waits, the card the bytes that they touch, and what surrounds the
join the bus and the host's own work. Each is a line of ``by_model``; a figure that is off by more than `FACTOR` refutes
its line, and the constants below, or those of `gpu_ops.cudf_backend.probe`, are to be changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.gpu.steady import Case

COUNTED = {
    ("per_batch", "changes"): (207, 25, 1800),
    ("per_batch", "inserts"): (91, 10, 1200),
    ("per_event", "changes"): (387, 35, 4100),
}
"""Of a micro-batch: library calls, waits, and bytes for each change, as the tests' ``kernels.counting`` says."""
BYTES_PER_SECOND = 4.0e12
"""Of an H200's memory: 4.8 TB/s by its data sheet, of which a copy reaches some five sixths."""
WAIT_SECONDS = 15e-6
"""Until the host knows what the card said, and the card has work again."""
SORTED_BYTES = 400
"""For each change of a large micro-batch besides: sorts pass over their keys some eight times."""
ARROW_BYTES = 60
"""For each change, to the card and back: two int64, and one and a third rows of three of them with a row kind."""
BUS_BYTES_PER_SECOND = 2.0e10
"""Of memory that is not page-locked, both ways."""
HOST_SECONDS = 16e-9
"""For each change: checks, row kinds, order; 13 ns in, 3 ns for a row out, on one core of a machine without a card."""
FACTOR = 2.0


def micro_batch(case: Case, engines: int = 1) -> dict[str, float] | None:
    """Milliseconds of a micro-batch of `benchmarks.gpu.steady`, by part; None of keys that the model does not know.

    Args:
        case: what runs.
        engines: partitions that share its changes, on one card and one thread's worth of Python.
    """
    from gpu_ops.cudf_backend.probe import CALL_SECONDS, JOIN_CALLS, choose, join_seconds

    if case.keys != "int64" or (case.emit, case.mix) not in COUNTED:
        return None
    calls, waits, size = COUNTED[case.emit, case.mix]
    found = {
        "calls": 1e3 * engines * calls * CALL_SECONDS,
        "waits": 1e3 * engines * waits * WAIT_SECONDS,
        "bytes": 1e3 * case.changes * (size + SORTED_BYTES) / BYTES_PER_SECOND,
    }
    rows, needles = case.rows // 2, case.changes // 2
    if choose(case.probe, [rows], needles).joined:  # of each input's rows with its own changes, and with the other's
        found["joins"] = 1e3 * 4 * (join_seconds(rows, needles) - JOIN_CALLS * CALL_SECONDS)  # those are counted
    found["join_alone"] = sum(found.values())
    found["bus"] = 1e3 * case.changes * ARROW_BYTES / BUS_BYTES_PER_SECOND
    found["host"] = 1e3 * case.changes * HOST_SECONDS
    found["arrow_to_arrow"] = found["join_alone"] + found["bus"] + found["host"]
    return found


def compared(results: Any, where: str = "") -> Iterator[dict[str, Any]]:
    """Each prediction that results hold with what was measured of it.

    Args:
        results: of `benchmarks.gpu.bench`, as they stand in its JSON.
        where: the way to them.

    Returns:
        ``where``, ``by_model`` and ``measured`` (milliseconds), ``times`` (measured over predicted), ``refuted``.
    """
    if isinstance(results, list):
        for number, value in enumerate(results):
            yield from compared(value, f"{where}[{number}]")
    elif isinstance(results, dict):
        predictions = results.get("by_model")
        for name, predicted in (predictions if isinstance(predictions, dict) else {}).items():
            measured = _measured(results, name)
            if measured is not None:
                times = measured / predicted
                refuted = not 1 / FACTOR <= times <= FACTOR
                of = {"where": f"{where}.{name}", "by_model": predicted, "measured": measured}
                yield {**of, "times": times, "refuted": refuted}
        for name, value in results.items():
            yield from compared(value, f"{where}.{name}" if where else name)


def _measured(results: Mapping[str, Any], name: str) -> float | None:
    at = {"join_alone": ("watched", "ms", "join_alone"), "arrow_to_arrow": ("plain", "ms")}.get(name, (name, "ms"))
    found: Any = results
    for step in at:
        found = found.get(step) if isinstance(found, dict) else None
    return float(found["median"]) if found else None

"""Feeding engines of interval joins: rows and watermarks as micro-batches."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from gpu_ops.descriptions.join import Join
from oracle.drive import Backend, Change, Event, changes, rows_between, tables
from oracle.interval_rules import END, WATERMARK, Clock, IntervalRules, TimedEvent


@dataclasses.dataclass(frozen=True)
class TimedCut:
    """One micro-batch: events ``start`` to ``stop`` of a trace.

    Attributes:
        start: number of its first event.
        stop: number after its last.
        rows: number of its first row: ``start``, or the next if that is a watermark.
        inputs: arguments of ``JoinEngine.prepare``.
    """

    start: int
    stop: int
    rows: int
    inputs: Mapping[str, Any]


def pieces(events: Sequence[TimedEvent], split: int | Sequence[int]) -> Iterator[tuple[int, int]]:
    """Where to cut: before every watermark, and after as many events as ``split`` says."""
    sizes = [split] if isinstance(split, int) else list(split)
    start = number = 0
    for at in range(1, len(events) + 1):
        full = at - start >= max(1, sizes[number % len(sizes)])
        if full or at == len(events) or events[at][1] == WATERMARK:
            yield start, at
            start, number = at, number + 1


def timed_cuts(
    join: Join, events: Sequence[TimedEvent], split: int | Sequence[int], *, shuffle: int | None = None
) -> Iterator[TimedCut]:
    """The events as micro-batches; a watermark is the first event of its micro-batch, and in force there.

    Args:
        join: for the schemas.
        events: in total order.
        split: events per micro-batch, or the size of each (repeated as often as needed).
        shuffle: a seed: rows come in any order, and only the order arrays tell the right one.
    """
    places = np.array([i for i, e in enumerate(events) if e[1] != WATERMARK], np.int64)
    own: list[Event] = [events[i] for i in places]
    sides = [(table, places[position]) for table, position in tables(join, own)]
    rng = None if shuffle is None else np.random.default_rng(shuffle)
    clock = Clock()
    for number, (start, stop) in enumerate(pieces(events, split)):
        side, kind, value = events[start]
        if kind == WATERMARK:
            clock.update(side, value)
        # The operator's own watermark will do as well, once there is one.
        known = None not in clock.pair
        inputs: dict[str, Any] = {"watermark": clock.now if known and number % 3 == 0 else clock.pair}
        inputs |= rows_between(sides, start, stop, rng, keep_empty=bool(number % 2))
        yield TimedCut(start, stop, start + (kind == WATERMARK), inputs)


def timed_run(engine: Any, cut: TimedCut, **options: Any) -> tuple[list[Change], list[int], Any]:
    """Process one micro-batch: its changes, the event each belongs to, and the `MicroBatch`."""
    batch = engine.prepare(**cut.inputs, **options)
    engine.commit()
    assert batch.changelog.schema.equals(engine.description.output_schema)
    found = changes(batch.changelog)
    assert len(batch.sequence) == len(found)
    return found, [int(s) + cut.rows for s in batch.sequence], batch


def timed_run_all(
    backend: Backend, join: Join, events: Sequence[TimedEvent], split: int | Sequence[int], **options: Any
) -> tuple[list[Change], list[int]]:
    """A whole trace through a fresh engine: all changes in order, and the event of each (``per_event``)."""
    found: list[Change] = []
    position: list[int] = []
    with backend.engine(join) as engine:
        for cut in timed_cuts(join, events, split, **options):
            got, event, _ = timed_run(engine, cut)
            outside = [(e, c) for e, c in zip(event, got, strict=True) if not cut.start <= e < cut.stop]
            assert not outside, f"changes of events outside of {cut.start} to {cut.stop - 1}: {outside[:4]}"
            found += got
            position += event
    return found, position


def said(rules: IntervalRules, events: Sequence[TimedEvent], first: int = 0) -> dict[int, Counter[Change]]:
    """The multiset of changes of each event that causes any, by the transcription; ``first`` is the first's number."""
    groups = {}
    for number, event in enumerate(events, first):
        group = Counter(rules.process(event))
        if group:
            groups[number] = group
    return groups


def ends(events: Sequence[TimedEvent]) -> list[TimedEvent]:
    """The events, and that both inputs are over."""
    return [*events, (0, WATERMARK, END), (1, WATERMARK, END)]

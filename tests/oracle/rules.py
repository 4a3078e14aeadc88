"""Flink's join operators, one change at a time, in plain Python: an expectation for every single event.

Transcribed from the rules of ``StreamingJoinOperator`` and ``StreamingSemiAntiJoinOperator`` (2.3.0), with
the two places where the contract is right instead of alike: a bare upsert first retracts the row it
replaces (FLINK-40681), and a retraction of a row that is not there does nothing. Slow, and meant to be.

State TTL: what has expired is absent, and nothing is said of it. The matches that a row has had still count for it
until they are retracted, so that only a pad that was given is ever taken back (Flink: that of a row without a match).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gpu_ops.descriptions.join import Join
from oracle.drive import ADDS, Change, Event, Row, canonical

Residual = tuple[str, str, str]
"""Left column, operator, right column."""

OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "<>": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def where(residual: Sequence[Residual], left: str, right: str) -> str | None:
    """The residual condition as SQL text over inputs of these names."""
    return " AND ".join(f"{left}.{a} {op} {right}.{b}" for a, op, b in residual) or None


def ordered(value: Any) -> tuple[int, Any]:
    """NaN is the largest value, as in Spark and in DuckDB."""
    return (1, 0) if value == ("NaN",) else (0, value)


class Entry:
    """A row in a state view: the association count of each of its copies, the oldest first, and its last write."""

    __slots__ = ("counts", "row", "written")

    def __init__(self, row: Row, written: int) -> None:
        self.row, self.written = row, written
        self.counts: list[int] = []


class Rules:
    """One join operator."""

    def __init__(self, join: Join, residual: Sequence[Residual] = ()) -> None:
        self.join, self.unknown, self.expired = join, [0, 0], [0, 0]
        self.state: tuple[dict[Row, Entry], dict[Row, Entry]] = ({}, {})
        names = [source.schema.names for source in join.inputs]
        self._identity = [
            [names[s].index(c) for c in source.unique_key or names[s]] for s, source in enumerate(join.inputs)
        ]
        self._keys = [(names[0].index(k.left), names[1].index(k.right), k.null_safe) for k in join.keys]
        self._residual = [(names[0].index(a), OPERATORS[op], names[1].index(b)) for a, op, b in residual]
        self._width = [len(n) for n in names]
        self._now = 0

    def process(self, event: Event, now: int = 0) -> list[Change]:
        """What this change, at a time in ms, makes the operator say."""
        self.expire(now)
        side, kind, values = event
        row = tuple(canonical(v) for v in values)
        identity = tuple(row[i] for i in self._identity[side])
        present = self.state[side].get(identity)
        if kind in ADDS:
            found: list[Change] = []
            if present is not None and self.join.inputs[side].unique_key is not None:
                found += self._change(side, "-U", present.row, identity)
            return found + self._change(side, kind, row, identity)
        if present is None:
            self.unknown[side] += 1
            return []
        return self._change(side, kind, present.row, identity)

    def table(self, side: int) -> list[Row]:
        """The live rows of one input, copies included."""
        return [e.row for e in self.state[side].values() for _ in e.counts]

    def expire(self, now: int) -> None:
        """Forget what was last written a TTL ago; for each input, `expired` counts the rows."""
        self._now = now
        for side, source in enumerate(self.join.inputs):
            if source.ttl_ms is None:
                continue
            for identity, entry in list(self.state[side].items()):
                if entry.written + source.ttl_ms <= now:
                    self.expired[side] += len(entry.counts)
                    del self.state[side][identity]

    def _change(self, side: int, kind: str, row: Row, identity: Row) -> list[Change]:
        matches = [e for e in self.state[1 - side].values() if self._match(side, row, e.row)]
        if self.join.how in ("semi", "anti"):
            found = list(self._semi_anti(side, kind, row, matches))
        else:
            found = list(self._regular(side, kind, row, matches))
        if self._counted(1 - side):
            for entry in matches:
                entry.counts = [count + (1 if kind in ADDS else -1) for count in entry.counts]
                entry.written = self._now
        entry = self.state[side].setdefault(identity, Entry(row, self._now))
        entry.written = self._now
        if kind in ADDS:
            entry.counts.append(sum(len(e.counts) for e in matches))
        else:
            del entry.counts[0]
            if not entry.counts:
                del self.state[side][identity]
        return found

    def _counted(self, side: int) -> bool:
        """Whether the matches of this input's rows are counted."""
        return side == 0 if self.join.how in ("semi", "anti") else self.join.outer[side]

    def _matched(self, side: int, kind: str, row: Row, matches: list[Entry]) -> bool:
        """Whether the row of a change has, or (a retraction) has had, a match that still counts for it."""
        if kind in ADDS or not self._counted(side):
            return bool(matches)
        return self.state[side][tuple(row[i] for i in self._identity[side])].counts[0] > 0

    def _regular(self, side: int, kind: str, row: Row, matches: list[Entry]) -> Iterator[Change]:
        own_outer, other_outer = self.join.outer[side], self.join.outer[1 - side]
        adds = kind in ADDS
        if own_outer and not self._matched(side, kind, row, matches):
            yield ("+I" if adds else "-D"), self._joined(side, row, None)
        # The kind of the input goes through, except where pads make it a lie (section 2.1 of the rules).
        plain = own_outer or (adds and other_outer)
        for entry in matches:
            for count in entry.counts:
                if adds and other_outer and count == 0:
                    yield "-D", self._joined(side, None, entry.row)
                shown = ("+I" if adds else "-D") if plain else kind
                yield shown, self._joined(side, row, entry.row)
                if not adds and other_outer and count == 1:
                    yield "+I", self._joined(side, None, entry.row)

    def _semi_anti(self, side: int, kind: str, row: Row, matches: list[Entry]) -> Iterator[Change]:
        semi = self.join.how == "semi"
        if side == 0:
            if self._matched(side, kind, row, matches) == semi:
                yield kind, row
            return
        adds = kind in ADDS
        for entry in matches:
            shown = kind if semi else "-D" if adds else "+I"
            for count in entry.counts:
                if count == (0 if adds else 1):
                    yield shown, entry.row

    def _joined(self, side: int, own: Row | None, other: Row | None) -> Row:
        parts = [own, other] if side == 0 else [other, own]
        left, right = (p if p is not None else (None,) * w for p, w in zip(parts, self._width, strict=True))
        return left + right

    def _match(self, side: int, own: Row, other: Row) -> bool:
        left, right = (own, other) if side == 0 else (other, own)
        for a, b, null_safe in self._keys:
            x, y = left[a], right[b]
            if x is None or y is None:
                # NOT IN: what is not known to differ counts as equal.
                if not (x is None and y is None if null_safe else self.join.null_aware):
                    return False
            elif x != y:
                return False
        for a, compare, b in self._residual:
            x, y = left[a], right[b]
            if x is None or y is None or not compare(ordered(x), ordered(y)):
                return False
        return True

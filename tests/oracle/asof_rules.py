"""The ASOF join by hand, one event after the other: the reference for engines, and random traces for it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pyarrow as pa

from gpu_ops.descriptions.by_time import Asof, AsofJoin
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.keys import Key
from oracle.drive import Change, Event, Row, canonical

LEFT = pa.schema([("k", pa.float64()), ("t", pa.int64()), ("id", pa.int64())])
RIGHT = pa.schema([("rk", pa.float64()), ("s", pa.int64()), ("v", pa.int64())])
LAYOUTS = ("insert_only", "multiset", "unique_key")


def described(
    how: str,
    asof: Asof,
    emit: str = "per_event",
    layouts: Sequence[str] = ("multiset", "multiset"),
    *,
    null_safe: bool = False,
    keyless: bool = False,
    ties: str | None = None,
) -> AsofJoin:
    """Left rows (k, t, id) and right rows (rk, s, v); a unique key is ``id``, and ``(rk, v)``."""
    unique = ("id",), ("v",)
    inputs = [
        Input(
            name,
            schema,
            unique_key=key if layout == "unique_key" else None,
            row_kind=None if layout == "insert_only" else "op",
            event_time=time,
            sequence_by=ties if name == "r" else None,
        )
        for name, schema, key, time, layout in zip("lr", (LEFT, RIGHT), unique, "ts", layouts, strict=True)
    ]
    keys = () if keyless else (Key("k", "rk", null_safe),)
    return AsofJoin(how, *inputs, keys=keys, emit=emit, asof=asof)  # type: ignore[arg-type]


class ByHand:
    """Both tables, and what comes out as they change."""

    def __init__(self, join: AsofJoin) -> None:
        self.join, self.tables = join, ([], [])

    def best(self, left: Row) -> Row | None:
        """The right row that a left row meets: the last one of the best."""
        asof, found, rank = self.join.asof, None, None
        for right in self.tables[1]:
            if not self._same(left[0], right[0]) or left[1] is None or right[1] is None:
                continue
            apart = left[1] - right[1]
            fits = asof.direction == "nearest" or (apart >= 0) == (asof.direction == "backward") or apart == 0
            if not fits or (apart == 0 and not asof.exact):
                continue
            if asof.tolerance_ms is not None and abs(apart) > asof.tolerance_ms:
                continue
            tie = (right[2],) if self.join.right.sequence_by else ()
            mine = (-abs(apart), apart > 0, *tie)
            if rank is None or mine >= rank:
                found, rank = right, mine
        return found

    def _same(self, one: object, other: object) -> bool:
        if not self.join.keys:
            return True
        if one is None or other is None:
            return self.join.keys[0].null_safe and one is other
        return canonical(one) == canonical(other)

    def result(self) -> Counter[Row]:
        """All rows of the result."""
        rows = ((left, self.best(left)) for left in self.tables[0])
        return Counter(self._row(left, right) for left, right in rows if right is not None or self.join.how == "left")

    @staticmethod
    def _row(left: Row, right: Row | None) -> Row:
        return tuple(map(canonical, (*left, *(right or (None, None, None)))))

    def apply(self, event: Event) -> list[Change]:
        """One event, and what it puts out."""
        side, kind, row = event
        before = [(left, self.best(left)) for left in self.tables[0]]
        old, new = self._taken(side, kind, row)
        if side == 0:
            out = []
            if old is not None:
                out += self._shown("-U" if new is not None else kind, old, self.best(old))
            if new is not None:
                out += self._shown("+U" if old is not None else kind, new, self.best(new))
        if old is not None:
            at = next(i for i, own in enumerate(self.tables[side]) if canonical(own) == canonical(old))
            del self.tables[side][at]
        if new is not None:
            self.tables[side].append(new)
        if side == 0:
            return out
        found: list[Change] = []
        inner = self.join.how == "inner"
        for left, met in before:
            meets = self.best(left)
            if (met is None) is (meets is None) and self._row(left, met) == self._row(left, meets):
                continue
            found += self._shown("-D" if inner and meets is None else "-U", left, met)
            found += self._shown("+I" if inner and met is None else "+U", left, meets)
        return found

    def _taken(self, side: int, kind: str, row: Row) -> tuple[Row | None, Row | None]:
        """The row that a change takes, and the one that it brings."""
        unique, comes = self.join.inputs[side].unique_key, kind in ("+I", "+U")
        if unique is None and comes:
            return None, row
        if unique is None:
            same = (own for own in self.tables[side] if canonical(own) == canonical(row))
        else:
            same = (own for own in self.tables[side] if own[2] == row[2])
        return next(same, None), row if comes else None

    def _shown(self, kind: str, left: Row, right: Row | None) -> list[Change]:
        there = right is not None or self.join.how == "left"
        return [(kind, self._row(left, right))] if there else []


def trace(join: AsofJoin, events: int, seed: int) -> list[Event]:
    """Random changes of few keys and times; null and NaN among the keys, null among the times, unknown retractions."""
    choice, live, found = random.Random(seed), ([], []), []
    number = 0
    for _ in range(events):
        side = int(choice.random() < 0.6)
        source = join.inputs[side]
        key = choice.choice([1.0, 1.0, 1.0, 2.0, -0.0, 0.0, float("nan"), None])
        time = None if choice.random() < 0.05 else choice.randrange(24)
        if source.unique_key is None:
            number += 1
            row: Row = (key, time, number if side == 0 else choice.randrange(3))
        else:
            row = (key, time, choice.randrange(12))
        kind = "+I"
        if not source.insert_only:
            kind = choice.choice(["+I", "+U"]) if source.unique_key is not None else "+I"
            if choice.random() < 0.4 and live[side]:
                kind = choice.choice(["-D", "-U"])
                row = live[side].pop(choice.randrange(len(live[side])))
            elif choice.random() < 0.03:
                kind = "-D"  # of a row that is not there, perhaps
        if kind in ("+I", "+U"):
            live[side].append(row)
        found.append((side, kind, row))
    return found

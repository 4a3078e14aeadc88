"""Flink's multi-way join operator, one change at a time, in plain Python: an expectation for every single event.

Transcribed from ``StreamingMultiJoinOperator`` (2.3.0) and its state views, call for call. Two places are right
instead of alike, unless asked for: a bare upsert first retracts the row it replaces, and a retraction of a
row that is not there does nothing. Slow, and meant to be: association counts are recounted for every event.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpu_ops.descriptions.multi_join import MultiJoin
from oracle.drive import ADDS, Change, Event, Row, canonical
from oracle.rules import OPERATORS, ordered

Atom = tuple[str, str, str | None]
"""``INPUT.column``, an operator of `OPERATORS`, ``INPUT.column``; or ``INPUT.column``, ``IS NULL``, None."""
Residual = tuple[tuple[Atom, ...], ...]
"""The residual condition of one step: every clause has an atom that is true."""


def clauses(residual: Residual) -> str | None:
    """A residual condition as SQL text."""
    text = [" OR ".join(" ".join(part for part in atom if part) for atom in clause) for clause in residual]
    return " AND ".join(f"({t})" if " OR " in t else t for t in text) or None


class Entry:
    """A row in a state view: how often it is there, and when it was last written."""

    __slots__ = ("copies", "row", "written")

    def __init__(self, row: Row, written: int) -> None:
        self.row, self.copies, self.written = row, 0, written


class MultiRules:
    """One multi-way join operator.

    Args:
        join: its description, but for the conditions' text.
        residual: the residual condition of each step.
        as_flink: whatever Flink does, also where the contract has it otherwise.
    """

    def __init__(self, join: MultiJoin, residual: Sequence[Residual] = (), *, as_flink: bool = False) -> None:
        self.join, self.as_flink = join, as_flink
        count = len(join.inputs)
        self.unknown, self.expired = [0] * count, [0] * count
        names = [source.schema.names for source in join.inputs]
        # The operator's keyed state: rows of one value of the common key see each other and no others.
        self._key = [names[i].index(column) for i, column in enumerate(join.common_key[0])]
        self._state: list[dict[object, dict[Row, Entry]]] = [{} for _ in names]
        self._home: list[dict[Row, object]] = [{} for _ in names]
        self._unique = [source.unique_key is not None for source in join.inputs]
        self._identity = [[n.index(c) for c in s.unique_key or n] for n, s in zip(names, join.inputs, strict=True)]
        self._nulls = [(None,) * len(n) for n in names]
        self._left = [False, *(step.how == "left" for step in join.steps)]
        self._on = [
            [(k.input, names[k.input].index(k.column), names[place].index(k.own), k.null_safe) for k in step.on]
            for place, step in enumerate(join.steps, start=1)
        ]
        place = {f"{s.name}.{c}": (i, p) for i, s in enumerate(join.inputs) for p, c in enumerate(s.schema.names)}
        told = list(residual) or [()] * (count - 1)
        self._residual = [
            [[(place[a], op, place[b] if b is not None else None) for a, op, b in clause] for clause in step]
            for step in told
        ]
        self._says: list[Change] = []
        self._side, self._kind, self._row = 0, "", ()

    def process(self, event: Event, now: int = 0) -> list[Change]:
        """What this change, at a time in ms, makes the operator say."""
        self._says = []
        self._expire(now)
        side, kind, values = event
        row = tuple(canonical(v) for v in values)
        if self.as_flink:
            self._change(side, kind, row, now)
            return self._says
        identity = self._identify(side, row)
        present = self._state[side].get(self._home[side].get(identity), {}).get(identity)
        if kind in ADDS:
            if present is not None and self._unique[side]:
                self._change(side, "-U", present.row, now)
            self._change(side, kind, row, now)
        elif present is None:
            self.unknown[side] += 1
        else:
            self._change(side, kind, present.row, now)
        return self._says

    def table(self, side: int) -> list[Row]:
        """The live rows of one input, copies included."""
        return [e.row for rows in self._state[side].values() for e in rows.values() for _ in range(e.copies)]

    # --- state: MultiJoinStateViews -----------------------------------------------------------

    def _identify(self, side: int, row: Row) -> Row:
        own = tuple(row[i] for i in self._identity[side])
        # Flink keeps rows by the columns of the step first, which shows only where a changelog is not well formed.
        return (*(row[k] for _, _, k, _ in self._on[side - 1]), *own) if self.as_flink and side else own

    def _add(self, side: int, row: Row, now: int) -> None:
        identity, key = self._identify(side, row), row[self._key[side]]
        entry = self._state[side].setdefault(key, {}).setdefault(identity, Entry(row, now))
        entry.row, entry.written = row, now
        entry.copies = 1 if self._unique[side] else entry.copies + 1
        self._home[side][identity] = key

    def _retract(self, side: int, row: Row, now: int) -> None:
        identity, key = self._identify(side, row), row[self._key[side]]
        entry = self._state[side].get(key, {}).get(identity)
        if entry is None:
            return
        entry.copies, entry.written = entry.copies - 1, now
        if not entry.copies:
            self._forget(side, key, identity)

    def _forget(self, side: int, key: object, identity: Row) -> None:
        del self._state[side][key][identity]
        self._home[side].pop(identity, None)

    def _expire(self, now: int) -> None:
        for side, source in enumerate(self.join.inputs):
            if source.ttl_ms is None:
                continue
            for key, rows in self._state[side].items():
                for identity, entry in list(rows.items()):
                    if entry.written + source.ttl_ms <= now:
                        self.expired[side] += entry.copies
                        self._forget(side, key, identity)

    # --- the operator --------------------------------------------------------------------------

    def _change(self, side: int, kind: str, row: Row, now: int) -> None:
        """``processElement``: the output is made before the state changes."""
        self._side, self._kind, self._row = side, kind, row
        self._recurse(0, (), active=False)
        if kind in ADDS:
            self._add(side, row, now)
        else:
            self._retract(side, row, now)

    def _recurse(self, depth: int, prefix: tuple[Row, ...], *, active: bool) -> None:
        if depth == len(self._state):
            self._says.append((self._kind, tuple(value for row in prefix for value in row)))
            return
        associations = self._scan(depth, prefix, active=active)
        matched = associations is not None
        if depth == self._side:
            self._input_level(depth, prefix, associations or 0, matched=matched)
        elif self._left[depth] and not matched:
            self._recurse(depth + 1, (*prefix, self._nulls[depth]), active=active)

    def _scan(self, depth: int, prefix: tuple[Row, ...], *, active: bool) -> int | None:
        """Goes on with every row that matches, and counts them; None if there is none."""
        own, left, adds = depth == self._side, self._left[depth], self._kind in ADDS
        if own and not left:
            return None
        matched, associations = False, 0
        for row in self._rows(depth):
            if depth and not self._match(depth, prefix, row):
                continue
            matched = True
            if left:
                associations += 1 if not active or adds else -1
                if depth and own and associations > (0 if adds else 1):
                    return associations
            if own and not active:
                continue
            self._recurse(depth + 1, (*prefix, row), active=active)
        return associations if matched else None

    def _rows(self, depth: int) -> Iterator[Row]:
        for entry in self._state[depth].get(self._row[self._key[self._side]], {}).values():
            for _ in range(entry.copies):
                yield entry.row

    def _input_level(self, depth: int, prefix: tuple[Row, ...], associations: int, *, matched: bool) -> None:
        if depth and not self._match(depth, prefix, self._row):
            return
        kind, left, adds = self._kind, self._left[depth], self._kind in ADDS
        if left:
            associations += 1 if adds else -1
        if adds and left and not matched:
            self._pad("-D", depth, prefix)
        self._kind = kind
        self._recurse(depth + 1, (*prefix, self._row), active=True)
        if not adds and left and associations == 0:
            self._pad("+I", depth, prefix)
        self._kind = kind

    def _pad(self, kind: str, depth: int, prefix: tuple[Row, ...]) -> None:
        self._kind = kind
        self._recurse(depth + 1, (*prefix, self._nulls[depth]), active=True)

    def _match(self, depth: int, prefix: tuple[Row, ...], row: Row) -> bool:
        """The whole ON condition of one step."""
        rows = (*prefix, row)
        for place, column, own, null_safe in self._on[depth - 1]:
            a, b = rows[place][column], row[own]
            if (a is None or b is None) and not (null_safe and a is None and b is None):
                return False
            if a != b:
                return False
        return all(any(self._holds(rows, *atom) for atom in clause) for clause in self._residual[depth - 1])

    @staticmethod
    def _holds(rows: tuple[Row, ...], left: tuple[int, int], operator: str, right: tuple[int, int] | None) -> bool:
        a = rows[left[0]][left[1]]
        if right is None:
            return a is None
        b = rows[right[0]][right[1]]
        return a is not None and b is not None and OPERATORS[operator](ordered(a), ordered(b))

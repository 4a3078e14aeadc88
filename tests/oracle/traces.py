"""Random traces of changes, and the joins they are for."""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from typing import Any, Literal

import pyarrow as pa

from gpu_ops.descriptions.description import Emit
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.join import Join, JoinType
from gpu_ops.descriptions.keys import Key
from oracle.drive import Event, Row, canonical
from oracle.rules import Residual, where

LayoutName = Literal["multiset", "unique_key", "join_key_contains_unique_key"]
LAYOUTS: tuple[LayoutName, ...] = ("multiset", "unique_key", "join_key_contains_unique_key")
HOWS: tuple[str, ...] = ("inner", "left", "right", "full", "semi", "anti", "null_aware_anti")
KeyStyle = Literal["int", "string", "double", "composite", "mixed_width", "none"]
SPECIAL = (math.nan, 0.0, -0.0, 1.5, -1.5, math.inf, -math.inf, 1e300)


@dataclasses.dataclass(frozen=True)
class Shape:
    """A join and the inputs it is over.

    Attributes:
        how: one of `HOWS`.
        left: the left state layout.
        right: the right state layout.
        keys: what kind of equality columns.
        null_safe: ``IS NOT DISTINCT FROM`` on the (last) key.
        residual: further conditions.
    """

    how: str
    left: LayoutName = "multiset"
    right: LayoutName = "multiset"
    keys: KeyStyle = "int"
    null_safe: bool = False
    residual: tuple[Residual, ...] = ()

    @property
    def layouts(self) -> tuple[LayoutName, LayoutName]:
        return self.left, self.right

    def __str__(self) -> str:
        short = {"multiset": "none", "unique_key": "uk", "join_key_contains_unique_key": "jk"}
        parts = [self.how, short[self.left], short[self.right]]
        parts += [self.keys] if self.keys != "int" else []
        parts += ["null_safe"] if self.null_safe else []
        parts += ["residual"] if self.residual else []
        return "-".join(parts)

    def join(self, emit: Emit = "per_event", **options: Any) -> Join:
        """The description."""
        null_aware = self.how == "null_aware_anti"
        pairs = {"composite": ("k", "g"), "none": ()}.get(self.keys, ("k",))
        keys = tuple(
            Key(f"a_{c}", f"b_{c}", null_safe=self.null_safe and i == len(pairs) - 1) for i, c in enumerate(pairs)
        )
        how: JoinType = "anti" if null_aware else self.how  # type: ignore[assignment]
        return Join(
            how=how,
            left=self._input(0),
            right=self._input(1),
            keys=keys,
            where=where(self.residual, "A", "B"),
            emit=emit,
            null_aware=null_aware,
            **options,
        )

    def _input(self, side: int) -> Input:
        layout, p = self.layouts[side], "ab"[side]
        if self.keys == "none" and layout == "join_key_contains_unique_key":
            raise ValueError("no equality column contains a unique key")
        kind = {
            "string": pa.string(),
            "composite": pa.int32(),
            "double": pa.float64(),
            "mixed_width": (pa.int32(), pa.int64())[side],
        }.get(self.keys, pa.int64())
        columns = [(f"{p}_id", pa.int64())] if layout == "unique_key" else []
        columns += [(f"{p}_k", kind)]
        columns += [(f"{p}_g", pa.string())] if self.keys == "composite" else []
        columns += [(f"{p}_x", pa.int32()), (f"{p}_s", pa.string()), (f"{p}_d", pa.float64())]
        unique = {"multiset": None, "unique_key": (f"{p}_id",)}.get(layout, (f"{p}_k",))
        return Input("AB"[side], pa.schema(columns), unique_key=unique, row_kind="row_kind")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a trace is made.

    Attributes:
        events: length, at least.
        seed: of all choices.
        live: rows of an input that deletions hold it near.
        fan_out: rows of an input per key, about.
        null_keys: share of null join keys.
        malformed: bare upserts and retractions of absent rows as well.
        special: NaN, -0.0 and infinities in doubles.
    """

    events: int = 400
    seed: int = 0
    live: int = 40
    fan_out: float = 3.0
    null_keys: float = 0.06
    malformed: bool = False
    special: bool = True


class _Maker:
    """The state of one trace in the making."""

    def __init__(self, shape: Shape, recipe: Recipe) -> None:
        # Equal seeds give equal traces whatever the join type, so that results can be compared.
        self.shape, self.recipe = shape, recipe
        self.rng = random.Random(f"{recipe.seed}-{shape.left}-{shape.right}-{shape.keys}")
        self.domain = max(2, round(recipe.live / recipe.fan_out))
        self.names = [s.schema.names for s in shape.join().inputs]
        self.live: tuple[list[Row], list[Row]] = ([], [])
        self.used: tuple[dict[Any, int], dict[Any, int]] = ({}, {})
        self.pending: list[tuple[int, Row]] = []
        self.events: list[Event] = []
        self.next_id = 0

    def make(self) -> list[Event]:
        while len(self.events) < self.recipe.events or self.pending:
            if self.pending and self.rng.random() < 0.7:
                side, row = self.pending.pop()
                self._add(side, "+U", row)
            else:
                # Between a -U and its +U only the other input goes on.
                self._step(1 - self.pending[-1][0] if self.pending else self.rng.randrange(2))
        return self.events

    def _step(self, side: int) -> None:
        rng, live, recipe = self.rng, self.live[side], self.recipe
        crowded = len(live) > recipe.live
        draw = rng.random()
        if recipe.malformed and draw < 0.12:
            self._malformed(side)
        elif not live or draw < (0.3 if crowded else 0.62):
            row = self._row(side)
            if row is not None:
                self._add(side, "+I", row)
            else:
                self._remove(side, "-D", rng.randrange(len(live)))
        elif draw < 0.8:
            self._remove(side, "-D", rng.randrange(len(live)))
        else:
            old = self._remove(side, "-U", rng.randrange(len(live)))
            self.pending.append((side, self._changed(side, old)))

    def _malformed(self, side: int) -> None:
        """A bare upsert, or a retraction of a row that is not there."""
        rng, live = self.rng, self.live[side]
        if self.shape.layouts[side] != "multiset" and live and rng.random() < 0.6:
            at = rng.randrange(len(live))
            row = self._changed(side, live[at], same_unique_key=True)
            live[at] = row
            self.events.append((side, rng.choice(("+U", "+I", "+U")), row))
            return
        row = self._row(side)
        if row is not None and not self._present(side, row):
            self.events.append((side, rng.choice(("-D", "-U")), row))

    def _add(self, side: int, kind: str, row: Row) -> None:
        if self._unique(side) and self._present(side, row):
            return  # the place was taken between -U and +U
        self.live[side].append(row)
        self.used[side][self._identity(side, row)] = self.used[side].get(self._identity(side, row), 0) + 1
        self.events.append((side, kind, row))

    def _remove(self, side: int, kind: str, at: int) -> Row:
        live = self.live[side]
        live[at], live[-1] = live[-1], live[at]
        row = live.pop()
        identity = self._identity(side, row)
        self.used[side][identity] -= 1
        if not self.used[side][identity]:
            del self.used[side][identity]
        self.events.append((side, kind, row))
        return row

    def _unique(self, side: int) -> bool:
        return self.shape.layouts[side] != "multiset"

    def _identity(self, side: int, row: Row) -> Any:
        return canonical(row[0]) if self._unique(side) else canonical(row)

    def _present(self, side: int, row: Row) -> bool:
        return self._identity(side, row) in self.used[side]

    def _row(self, side: int) -> Row | None:
        """A new row, a copy of a live one where that is allowed; None if no unique key is free."""
        rng, live = self.rng, self.live[side]
        if not self._unique(side) and live and rng.random() < 0.15:
            return rng.choice(live)
        for _ in range(4):
            row = tuple(self._value(side, name) for name in self.names[side])
            if not self._unique(side) or not self._present(side, row):
                return row
        return None

    def _changed(self, side: int, row: Row, *, same_unique_key: bool = False) -> Row:
        """The row with some values changed: at times the join key, now and then nothing."""
        rng = self.rng
        keep_first = self.shape.layouts[side] == "unique_key" or (same_unique_key and self._unique(side))
        new = list(row)
        for i, name in enumerate(self.names[side]):
            key = name[2:] in ("k", "g", "id")
            if not (i == 0 and keep_first) and rng.random() < (0.25 if key else 0.5):
                new[i] = self._value(side, name)
        if self._unique(side) and new[0] != row[0] and self._present(side, tuple(new)):
            new[0] = row[0]
        return tuple(new)

    def _value(self, side: int, name: str) -> Any:
        rng = self.rng
        column = name[2:]
        if column == "id":
            self.next_id += 1
            return self.next_id if rng.random() < 0.7 else rng.randrange(1, self.next_id + 1)
        nulls = self.recipe.null_keys if column in ("k", "g") else 0.06
        if rng.random() < nulls and not (column == "k" and self.shape.layouts[side] == LAYOUTS[2]):
            return None
        if column == "k":
            # A unique join key needs room for all live rows.
            wide = self.shape.layouts[side] == LAYOUTS[2]
            n = rng.randrange(self.recipe.live * 2 if wide and rng.random() < 0.5 else self.domain)
            if self.shape.keys == "double":
                return SPECIAL[n] if self.recipe.special and n < len(SPECIAL) else n / 2
            return f"k{n}" if self.shape.keys == "string" else n - 2
        if column == "g":
            return rng.choice("xyz")
        if column == "x":
            return rng.randrange(-3, 6)
        if column == "s":
            return rng.choice(("", "a", "b", "C", "0", "a b")) if self.recipe.special else rng.choice("abcC")
        return rng.choice(SPECIAL) if self.recipe.special and rng.random() < 0.2 else rng.randrange(-8, 9) / 4


@functools.lru_cache(maxsize=64)
def _trace(shape: Shape, recipe: Recipe) -> tuple[Event, ...]:
    return tuple(_Maker(shape, recipe).make())


def recipe(shape: Shape, events: int, seed: int, *, live: int, malformed: bool) -> Recipe:
    """What suits a join: NOT IN says nothing while there is a null on the right, so nulls are rare."""
    if shape.how == "null_aware_anti":
        return Recipe(events, seed, min(live, 60), fan_out=0.8, null_keys=0.3 / live, malformed=malformed)
    if shape.how == "anti":
        return Recipe(events, seed, live, fan_out=0.8, malformed=malformed)
    # Without keys every pair is a candidate.
    return Recipe(events, seed, 8 if shape.keys == "none" else live, malformed=malformed)


def trace(shape: Shape, recipe: Recipe) -> tuple[Event, ...]:
    """A random trace; the same for all join types, residuals and null-safety."""
    return _trace(Shape("inner", shape.left, shape.right, shape.keys), recipe)

"""Random traces of changes, and the joins they are for."""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Sequence
from decimal import Decimal
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


class Maker:
    """The state of one trace in the making.

    Args:
        names: the columns of each input, without their prefix.
        unique: those of its unique key; none for a multiset.
        keys: the type of the join key.
        recipe: how it is made.
        seed: of all choices.
        few: columns that are not keys have few values, for conditions that compare them.
    """

    def __init__(
        self,
        names: Sequence[Sequence[str]],
        unique: Sequence[Sequence[str]],
        keys: str,
        recipe: Recipe,
        *,
        seed: str,
        few: bool = False,
    ) -> None:
        self.names, self.unique, self.keys, self.recipe, self.few = names, unique, keys, recipe, few
        self.rng = random.Random(seed)
        self.domain = max(2, round(recipe.live / recipe.fan_out))
        self.live: list[list[Row]] = [[] for _ in unique]
        self.used: list[dict[Any, int]] = [{} for _ in unique]
        self.pending: list[tuple[int, Row]] = []
        self.events: list[Event] = []
        self.next_id = 0

    def make(self) -> list[Event]:
        while len(self.events) < self.recipe.events or self.pending:
            if self.pending and self.rng.random() < 0.7:
                side, row = self.pending.pop()
                self._add(side, "+U", row)
            else:
                # Between a -U and its +U only other inputs go on.
                waiting = {side for side, _ in self.pending}
                self._step(self.rng.choice([s for s in range(len(self.live)) if s not in waiting]))
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
            elif live:
                self._remove(side, "-D", rng.randrange(len(live)))
        elif draw < 0.8 or len({s for s, _ in self.pending}) == len(self.live) - 1:
            self._remove(side, "-D", rng.randrange(len(live)))
        else:
            old = self._remove(side, "-U", rng.randrange(len(live)))
            self.pending.append((side, self._changed(side, old)))

    def _malformed(self, side: int) -> None:
        """A bare upsert, or a retraction of a row that is not there."""
        rng, live = self.rng, self.live[side]
        if self.unique[side] and live and rng.random() < 0.6:
            at = rng.randrange(len(live))
            live[at] = self._changed(side, live[at], same_unique_key=True)
            self.events.append((side, rng.choice(("+U", "+I", "+U")), live[at]))
            return
        row = self._row(side)
        if row is not None and self._identity(side, row) not in self.used[side]:
            self.events.append((side, rng.choice(("-D", "-U")), row))

    def _add(self, side: int, kind: str, row: Row) -> None:
        identity = self._identity(side, row)
        if self.unique[side] and identity in self.used[side]:
            return  # the place was taken between -U and +U
        self.live[side].append(row)
        self.used[side][identity] = self.used[side].get(identity, 0) + 1
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

    def _identity(self, side: int, row: Row) -> Any:
        unique = self.unique[side]
        return tuple(canonical(v) for v, c in zip(row, self.names[side], strict=True) if not unique or c in unique)

    def _row(self, side: int) -> Row | None:
        """A new row, at times a copy of a live one where that is allowed; None if no unique key is free."""
        rng, live, unique = self.rng, self.live[side], self.unique[side]
        if not unique and live and rng.random() < 0.15:
            return rng.choice(live)
        for _ in range(4):
            row = tuple(self._value(side, name) for name in self.names[side])
            if not unique or self._identity(side, row) not in self.used[side]:
                return row
        return None

    def _changed(self, side: int, row: Row, *, same_unique_key: bool = False) -> Row:
        """The row with some values changed: at times the join key, now and then nothing."""
        rng, unique, names = self.rng, self.unique[side], self.names[side]
        kept = {"id"} | (set(unique) if same_unique_key else set())
        new = tuple(
            self._value(side, c) if c not in kept and rng.random() < (0.25 if c in ("k", "g") else 0.5) else v
            for v, c in zip(row, names, strict=True)
        )
        if unique and self._identity(side, new) in self.used[side]:
            return tuple(old if c in unique else v for v, old, c in zip(new, row, names, strict=True))
        return new

    def _value(self, side: int, column: str) -> Any:
        rng, recipe, unique = self.rng, self.recipe, self.unique[side]
        if column == "id":
            self.next_id += 1
            return self.next_id if rng.random() < 0.7 else rng.randrange(1, self.next_id + 1)
        nulls = recipe.null_keys if column in ("k", "g") else 0.08 if self.few else 0.06
        if column not in unique and rng.random() < nulls:
            return None
        if column == "k":
            # A unique join key needs room for all live rows.
            wide = tuple(unique) == ("k",) and rng.random() < 0.5
            return self._key(rng.randrange(recipe.live * 2 if wide else self.domain))
        if column == "g":
            return rng.choice("xxy" if self.few else "xyz")
        if column == "x":
            return rng.randrange(3) if self.few else rng.randrange(-3, 6)
        if column == "s":
            return rng.choice(("", "a", "b", "C", "0", "a b")) if recipe.special else rng.choice("abcC")
        return rng.choice(SPECIAL) if recipe.special and rng.random() < 0.2 else rng.randrange(-8, 9) / 4

    def _key(self, n: int) -> Any:
        if self.keys == "double":
            return SPECIAL[n] if self.recipe.special and n < len(SPECIAL) else n / 2
        if self.keys == "decimal":
            return Decimal(n - 2) / 4 if n % 2 else Decimal(n) / 2
        return f"k{n}" if self.keys == "string" else n - 2


@functools.lru_cache(maxsize=64)
def _trace(shape: Shape, recipe: Recipe) -> tuple[Event, ...]:
    # Equal seeds give equal traces whatever the join type, so that results can be compared.
    names = [[name[2:] for name in source.schema.names] for source in shape.join().inputs]
    unique = [{"multiset": (), "unique_key": ("id",)}.get(layout, ("k",)) for layout in shape.layouts]
    seed = f"{recipe.seed}-{shape.left}-{shape.right}-{shape.keys}"
    return tuple(Maker(names, unique, shape.keys, recipe, seed=seed).make())


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

"""Random join graphs for the multi-way join, and random traces of changes for them."""

from __future__ import annotations

import dataclasses
import functools
import random
from decimal import Decimal
from typing import Any, Literal

import pyarrow as pa

from gpu_ops.descriptions.description import Emit
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.keys import Equality
from gpu_ops.descriptions.multi_join import MultiJoin, Step, StepType
from oracle.drive import Event, Row, canonical
from oracle.multi_rules import Atom, MultiRules, Residual, clauses
from oracle.traces import SPECIAL, Recipe

LETTERS = "abcde"
Graph = Literal["star", "chain", "mixed"]
MultiKeys = Literal["int", "string", "double", "decimal", "timestamp", "mixed_width"]
UNIQUE: tuple[tuple[str, ...], ...] = ((), ("id",), ("k",), ("k", "g"))
"""Unique keys: none, apart from the join's, its common key, and one with a column that a step may join on."""
FAN_OUTS = (1.2, 1.7, 2.4, 3.4, 4.8, 7.0)
"""Rows of an input per key, to choose from."""


@dataclasses.dataclass(frozen=True)
class MultiStep:
    """One step of a shape.

    Attributes:
        how: inner or left.
        on: its equalities: an input to the left, the letter of its column, of the own column, and null-safe.
        residual: its further conditions.
    """

    how: StepType
    on: tuple[tuple[int, str, str, bool], ...]
    residual: Residual = ()


@dataclasses.dataclass(frozen=True)
class MultiShape:
    """A multi-way join and the inputs it is over: A, B, ... with columns ``a_k``, ``b_k``, ...

    Attributes:
        unique: the letters of each input's unique key; none for a multiset.
        steps: one per input but the first; each leads with the common key, column ``k``.
        keys: the type of ``k``.
    """

    unique: tuple[tuple[str, ...], ...]
    steps: tuple[MultiStep, ...]
    keys: MultiKeys = "int"

    def __str__(self) -> str:
        parts = []
        for place, unique in enumerate(self.unique):
            text = "".join(unique) or "none"
            if place:
                step = self.steps[place - 1]
                on = "".join(f"{LETTERS[i]}{c}{'s' * safe}" for i, c, _, safe in step.on)
                text = f"{step.how}_{on}{'_where' * bool(step.residual)}_{text}"
            parts.append(text)
        return "-".join([*parts, *([self.keys] if self.keys != "int" else [])])

    def join(self, emit: Emit = "per_event", **options: Any) -> MultiJoin:
        """The description; ``options`` are for all inputs."""
        steps = []
        for place, step in enumerate(self.steps, start=1):
            on = [Equality(i, f"{LETTERS[i]}_{c}", f"{LETTERS[place]}_{own}", safe) for i, c, own, safe in step.on]
            steps.append(Step(step.how, tuple(on), clauses(step.residual)))
        inputs = tuple(self._input(place, options) for place in range(len(self.unique)))
        return MultiJoin(inputs, tuple(steps), emit)

    def rules(self, **options: Any) -> MultiRules:
        """The operator's rules for it."""
        return MultiRules(self.join(), [s.residual for s in self.steps], **options)

    def letters(self, place: int) -> tuple[str, ...]:
        """The columns of one input, without their prefix."""
        return ("id",) * ("id" in self.unique[place]) + ("k", "g", "x", "d")

    def _input(self, place: int, options: dict[str, Any]) -> Input:
        p = LETTERS[place]
        kinds = {
            "id": pa.int64(),
            "k": {
                "int": pa.int64(),
                "string": pa.string(),
                "double": pa.float64(),
                "decimal": pa.decimal128(10 + place, 2 + place % 2),
                "timestamp": pa.timestamp("us", "UTC"),
                "mixed_width": (pa.int32(), pa.int64())[place % 2],
            }[self.keys],
            "g": pa.string(),
            "x": pa.int32(),
            "d": pa.float64(),
        }
        schema = pa.schema([(f"{p}_{c}", kinds[c]) for c in self.letters(place)])
        unique = tuple(f"{p}_{c}" for c in self.unique[place])
        return Input(p.upper(), schema, unique_key=unique or None, row_kind="row_kind", **options)


# --- random shapes ---------------------------------------------------------------------------


def random_shape(rng: random.Random, inputs: int | None = None, *, plain: bool = False) -> MultiShape:
    """A join graph: star, chain or mixed, inner and left, with what else a step can have.

    Args:
        rng: draws everything.
        inputs: how many, or None for 2 to 5.
        plain: nothing that a planner would move out of the join or write differently.
    """
    count = inputs or rng.randrange(2, 6)
    graph = rng.choice(("star", "chain", "mixed"))
    keys = rng.choice(("int", "int", "string") if plain else ("int", "int", "string", "double", "mixed_width"))
    steps = []
    for place in range(1, count):
        source = 0 if graph == "star" else place - 1 if graph == "chain" else rng.randrange(place)
        on = [(source, "k", "k", False)]
        if rng.random() < 0.3:
            column = rng.choice("gx")
            on.append((rng.randrange(place), column, column, not plain and rng.random() < 0.3))
        if not plain and place > 1 and rng.random() < 0.1:
            other = rng.randrange(place)
            on += [(other, "k", "k", False)] if other != source else []
        residual = _residual(rng, place, {own for _, _, own, _ in on}, plain=plain) if rng.random() < 0.4 else ()
        steps.append(MultiStep(rng.choice(("inner", "left", "left")), tuple(on), residual))
    return MultiShape(tuple(rng.choice(UNIQUE) for _ in range(count)), tuple(steps), keys)


def _residual(rng: random.Random, place: int, equal: set[str], *, plain: bool) -> Residual:
    """One or two clauses over the step's input and all to its left; plain ones do not contradict each other."""
    columns = [c for c in rng.sample("xd", 2) if c not in equal] if plain else rng.choices("xd", k=2)
    found = []
    for column in columns[: rng.choice((1, 1, 2))]:
        left = rng.randrange(place)
        own = place if plain or left == 0 or rng.random() < 0.8 else rng.randrange(left)
        atoms: list[Atom] = [(_name(left, column), rng.choice(("<", "<=", "<>", ">", ">=")), _name(own, column))]
        if not plain and rng.random() < 0.3:
            atoms.append((_name(rng.randrange(place + 1), rng.choice("xd")), "IS NULL", None))
        found.append(tuple(atoms))
    return tuple(found)


def _name(place: int, letter: str) -> str:
    return f"{LETTERS[place].upper()}.{LETTERS[place]}_{letter}"


def shape(
    hows: str, graph: Graph = "star", unique: str = "", keys: MultiKeys = "int", extra: str = "", **residual: Residual
) -> MultiShape:
    """A shape in short.

    Args:
        hows: of each step, ``i`` or ``l``.
        graph: which input each step's common key comes from; ``mixed`` is the first and the last by turns.
        unique: per input the number of its unique key in `UNIQUE`; a multiset where left out.
        keys: the type of the common key.
        extra: a second equality of every step, on this column of the first input; with ``~`` null-safe.
        residual: of step ``s1``, ``s2`` ...
    """
    steps = []
    for place, how in enumerate(hows, start=1):
        source = 0 if graph == "star" or (graph == "mixed" and place % 2) else place - 1
        on = [(source, "k", "k", False)]
        on += [(0, extra[0], extra[0], extra.endswith("~"))] if extra else []
        steps.append(MultiStep("left" if how == "l" else "inner", tuple(on), residual.get(f"s{place}", ())))
    return MultiShape(tuple(UNIQUE[int(n)] for n in unique.ljust(len(hows) + 1, "0")), tuple(steps), keys)


SHAPES: tuple[MultiShape, ...] = (
    shape("i"),
    shape("l", unique="12"),
    shape("ll"),
    shape("li", unique="123"),
    shape("il", "chain", unique="201"),
    shape("ll", "chain", unique="032", extra="g"),
    shape("ii", "chain", "111", extra="x~"),
    shape("ll", "chain", "100", keys="double"),
    shape("li", keys="string", s1=((("A.a_x", ">", "B.b_x"),),), s2=((("A.a_d", "<=", "C.c_d"),),)),
    shape(
        "ll", "chain", "013", s2=((("A.a_x", "<", "C.c_x"), ("B.b_x", "IS NULL", None)), (("B.b_d", "<>", "C.c_d"),))
    ),
    shape("ll", unique="210", keys="mixed_width", s2=((("A.a_x", "<=", "B.b_x"),),)),
    shape("lil", "mixed", "0123"),
    shape("lll", "star", "1300", keys="decimal", s3=((("A.a_x", ">=", "D.d_x"), ("C.c_x", ">", "D.d_x")),)),
    shape("ill", "chain", "2001", keys="timestamp"),
    shape("llll", "mixed", "00120", extra="g"),
    shape("lili", "chain", "12031"),
    MultiShape(
        ((), ("id",), ()),
        (MultiStep("left", ((0, "k", "k", False),)), MultiStep("left", ((0, "k", "k", False), (1, "k", "k", False)))),
    ),
    MultiShape(
        ((), (), ("k", "g"), ()),
        (
            MultiStep("left", ((0, "k", "k", False), (0, "g", "g", False))),
            MultiStep("inner", ((0, "k", "k", False), (1, "g", "g", True))),
            MultiStep("left", ((2, "k", "k", False), (1, "x", "x", False)), ((("B.b_d", "<", "D.d_d"),),)),
        ),
    ),
)
"""Graphs, types of step, unique keys, key types and conditions by turns."""


# --- random traces ---------------------------------------------------------------------------


def multi_recipe(shape: MultiShape, events: int, seed: int, *, malformed: bool = False, special: bool = True) -> Recipe:
    """What suits a shape: as few keys as it takes for one row of output per event."""
    live = 16 if len(shape.unique) < 4 else 10
    return Recipe(events, seed, live, _fan_out(shape, live), malformed=malformed, special=special)


@functools.cache
def _fan_out(shape: MultiShape, live: int) -> float:
    for fan_out in FAN_OUTS:
        rules = shape.rules()
        trace = _Maker(shape, Recipe(200, 0, live, fan_out)).make()
        if sum(len(rules.process(event)) for event in trace) >= len(trace):
            return fan_out
    return FAN_OUTS[-1]


class _Maker:
    """The state of one trace in the making."""

    def __init__(self, shape: MultiShape, recipe: Recipe) -> None:
        self.shape, self.recipe = shape, recipe
        self.rng = random.Random(f"{recipe.seed}-{shape.unique}-{shape.keys}")
        self.domain = max(2, round(recipe.live / recipe.fan_out))
        self.names = [shape.letters(place) for place in range(len(shape.unique))]
        self.live: list[list[Row]] = [[] for _ in shape.unique]
        self.used: list[dict[Any, int]] = [{} for _ in shape.unique]
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
        if self.shape.unique[side] and live and rng.random() < 0.6:
            at = rng.randrange(len(live))
            live[at] = self._changed(side, live[at], same_unique_key=True)
            self.events.append((side, rng.choice(("+U", "+I", "+U")), live[at]))
            return
        row = self._row(side)
        if row is not None and self._identity(side, row) not in self.used[side]:
            self.events.append((side, rng.choice(("-D", "-U")), row))

    def _add(self, side: int, kind: str, row: Row) -> None:
        identity = self._identity(side, row)
        if self.shape.unique[side] and identity in self.used[side]:
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
        unique = self.shape.unique[side]
        return tuple(canonical(v) for v, c in zip(row, self.names[side], strict=True) if not unique or c in unique)

    def _row(self, side: int) -> Row | None:
        """A new row, at times a copy of a live one where that is allowed; None if no unique key is free."""
        rng, live, unique = self.rng, self.live[side], self.shape.unique[side]
        if not unique and live and rng.random() < 0.15:
            return rng.choice(live)
        for _ in range(4):
            row = tuple(self._value(side, name) for name in self.names[side])
            if not unique or self._identity(side, row) not in self.used[side]:
                return row
        return None

    def _changed(self, side: int, row: Row, *, same_unique_key: bool = False) -> Row:
        """The row with some values changed: at times the join key, now and then nothing."""
        rng, unique, names = self.rng, self.shape.unique[side], self.names[side]
        kept = {"id"} | (set(unique) if same_unique_key else set())
        new = tuple(
            self._value(side, c) if c not in kept and rng.random() < (0.25 if c in ("k", "g") else 0.5) else v
            for v, c in zip(row, names, strict=True)
        )
        if unique and self._identity(side, new) in self.used[side]:
            return tuple(old if c in unique else v for v, old, c in zip(new, row, names, strict=True))
        return new

    def _value(self, side: int, column: str) -> Any:
        rng, recipe, unique = self.rng, self.recipe, self.shape.unique[side]
        if column == "id":
            self.next_id += 1
            return self.next_id if rng.random() < 0.7 else rng.randrange(1, self.next_id + 1)
        if column not in unique and rng.random() < (recipe.null_keys if column in ("k", "g") else 0.08):
            return None
        if column == "k":
            # A unique join key needs room for all live rows.
            return self._key(rng.randrange(recipe.live * 2 if unique == ("k",) and rng.random() < 0.5 else self.domain))
        if column == "g":
            return rng.choice("xxy")
        if column == "x":
            return rng.randrange(3)
        return rng.choice(SPECIAL) if recipe.special and rng.random() < 0.2 else rng.randrange(-8, 9) / 4

    def _key(self, n: int) -> Any:
        keys = self.shape.keys
        if keys == "double":
            return SPECIAL[n] if self.recipe.special and n < len(SPECIAL) else n / 2
        if keys == "decimal":
            return Decimal(n - 2) / 4 if n % 2 else Decimal(n) / 2
        return f"k{n}" if keys == "string" else n - 2


@functools.lru_cache(maxsize=64)
def multi_trace(shape: MultiShape, recipe: Recipe) -> tuple[Event, ...]:
    """A random trace; the same for all steps and conditions over the same inputs."""
    return tuple(_Maker(shape, recipe).make())

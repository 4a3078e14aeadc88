"""Random join graphs for the multi-way join, and random traces of changes for them."""

from __future__ import annotations

import dataclasses
import functools
import random
from typing import Any, Literal

import pyarrow as pa

from gpu_ops.descriptions.description import Emit
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.keys import Equality
from gpu_ops.descriptions.multi_join import JoinStep, MultiJoin, StepType
from oracle.drive import Event
from oracle.multi_rules import Atom, MultiRules, Residual, clauses
from oracle.traces import Maker, Recipe

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
            steps.append(JoinStep(step.how, tuple(on), clauses(step.residual)))
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
        trace = _maker(shape, Recipe(200, 0, live, fan_out)).make()
        if sum(len(rules.process(event)) for event in trace) >= len(trace):
            return fan_out
    return FAN_OUTS[-1]


def _maker(shape: MultiShape, recipe: Recipe) -> Maker:
    names = [shape.letters(place) for place in range(len(shape.unique))]
    return Maker(names, shape.unique, shape.keys, recipe, seed=f"{recipe.seed}-{shape.unique}-{shape.keys}", few=True)


@functools.lru_cache(maxsize=64)
def multi_trace(shape: MultiShape, recipe: Recipe) -> tuple[Event, ...]:
    """A random trace; the same for all steps and conditions over the same inputs."""
    return tuple(_maker(shape, recipe).make())

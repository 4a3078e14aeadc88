"""Writes into the README which operator takes what and gives it when, by asking each description for it.

``python docs/draw_support.py`` writes it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa

import gpu_ops
from benchmarks.common import between
from gpu_ops.descriptions.description import Description, Emit
from gpu_ops.descriptions.join import JoinType
from gpu_ops.descriptions.keys import normalize_on

PAGE = Path(__file__).resolve().parents[1] / "README.md"
MARKS = ("<!-- support: python docs/draw_support.py -->\n", "\n<!-- end of support -->")

KINDS: dict[str, dict[str, Any]] = {
    "insert-only": {},
    "changelog": {"row_kind": "op"},
    "upserts": {"row_kind": "op", "unique_key": ("k",), "updates": "upsert"},
}
"""What an input may be: rows that come and stay, rows that also go, rows that replace the one of their key."""

SHORT = {"per_event": "`per_event`", "per_batch": "`per_batch`", "at_watermark": "`at_watermark`", "at_end": "`at_end`"}


def source(name: str, kind: str) -> gpu_ops.Input:
    """An input with a key, a time and a value."""
    schema = pa.schema([("k", pa.int64()), ("t", pa.timestamp("us", "UTC")), ("v", pa.int64())])
    return gpu_ops.Input(name, schema, event_time="t", **KINDS[kind])


def two(kind: type[gpu_ops.Join], **more: Any) -> Callable[..., Description]:
    """Makes a join of two inputs."""

    def make(how: JoinType, emit: Emit, left: gpu_ops.Input, right: gpu_ops.Input) -> Description:
        return kind(how, left, right, normalize_on("k"), emit=emit, suffixes=("_l", "_r"), **more)

    return make


def multi(how: str, emit: Emit, left: gpu_ops.Input, right: gpu_ops.Input) -> Description:
    """Makes a join of three inputs."""
    given = [dataclasses.replace(each, event_time=None) for each in (left, right)]
    given.append(dataclasses.replace(given[1], name="third"))
    return gpu_ops.MultiJoin.of(given, "k", how, emit=emit, suffixes=("_l", "_r", "_t"))


def one(name: str) -> Callable[..., Description]:
    """Makes an operator of one input."""

    def make(_: str, emit: Emit, given: gpu_ops.Input) -> Description:
        if name == "aggregate":
            return gpu_ops.Aggregate.of(given, ("v", "t"), {"n": "count(*)"}, emit)
        if name == "top":
            return gpu_ops.Top(given, ("v",), (gpu_ops.Order("t"),), 1, emit)
        if emit == "at_end":
            raise gpu_ops.DescriptionError("gpu_ops.latest() does not take it; gpu_ops.sql() has it for static inputs")
        return gpu_ops.Latest(dataclasses.replace(given, unique_key=("k",)), emit)

    return make


def rows() -> Iterator[tuple[str, list[str], Callable[..., Description], int]]:
    """Operators: what they are called, their join types, how one is made, and of how many inputs."""
    hows = list(get_args(JoinType))
    hour = gpu_ops.Interval(0, 3_600_000)
    yield "`join`, `semi_join`, `anti_join`", hows, two(gpu_ops.Join), 2
    yield "`multi_join`", hows, multi, 2
    yield "`interval_join`", hows, two(gpu_ops.IntervalJoin, interval=hour), 2
    yield "`temporal_join`", hows, two(gpu_ops.TemporalJoin), 2
    yield "`asof_join`", hows, two(gpu_ops.AsofJoin, asof=gpu_ops.Asof()), 2
    yield "`lookup_join`", hows, two(gpu_ops.LookupJoin), 2
    yield "`aggregate`", [""], one("aggregate"), 1
    yield "`top`", [""], one("top"), 1
    yield "`latest`", [""], one("latest"), 1


def accepted(make: Callable[..., Description], how: str, emit: str, inputs: int) -> set[tuple[str, ...]]:
    """The kinds of inputs with which it can be made."""
    found = set()
    for kinds in itertools.product(KINDS, repeat=inputs):
        try:
            description = make(how, emit, *(source(name, kind) for name, kind in zip("lr", kinds, strict=False)))
        except gpu_ops.GpuJoinError:
            continue
        takes_less = (n in description.insertions_only and kind != "insert-only" for n, kind in enumerate(kinds))
        if description.emit == emit and not any(takes_less):
            found.add(kinds)
    return found


def matrix() -> str:
    """The table, as Markdown."""
    lines = ["| operator | join types | left, or only input | right | `emit=` |", "|---|---|---|---|---|"]
    for name, hows, make, inputs in rows():
        found: dict[tuple[tuple[str, ...], ...], dict[str, list[str]]] = {}
        for how in hows:
            by_kinds: dict[frozenset[tuple[str, ...]], list[str]] = {}
            for emit in get_args(Emit):
                kinds = accepted(make, how, emit, inputs)
                if kinds:
                    by_kinds.setdefault(frozenset(kinds), []).append(SHORT[emit])
            for kinds, emits in by_kinds.items():
                sides = tuple(_sides(kinds, n) for n in range(inputs))
                found.setdefault(sides, {}).setdefault(", ".join(emits), []).append(how)
        for sides, by_emit in found.items():
            for emits, those in by_emit.items():
                cells = [", ".join(side) if len(side) < len(KINDS) else "any" for side in sides]
                lines.append(f"| {' | '.join([name, ', '.join(those), *cells, *[''] * (2 - inputs), emits])} |")
    return "\n".join(lines)


def _sides(kinds: frozenset[tuple[str, ...]], number: int) -> tuple[str, ...]:
    found = {each[number] for each in kinds}
    return tuple(kind for kind in KINDS if kind in found)


def with_support(text: str) -> str:
    """The README's text with the table as it is now."""
    return between(MARKS, text, matrix())


if __name__ == "__main__":
    PAGE.write_text(with_support(PAGE.read_text()))

"""Work that is done side by side for several inputs, so that the host looks once at what each of them has to tell it.

On a GPU each look is a wait, however little it is about. A step of such work ends where it needs to know a size, or a
number: it gives what it asks, and goes on with the answers.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple, TypeVar

from gpu_ops.arrays import Array
from gpu_ops.kernels import Flagged, Kernels

_T = TypeVar("_T")


class Asked(NamedTuple):
    """A step's questions; see `gpu_ops.kernels.Kernels.flagged`.

    Attributes:
        parts: rows that are wanted, of one column each.
        numbers: int64 of no dimensions.
    """

    parts: Sequence[Flagged]
    numbers: Sequence[Array] = ()


class Seen(NamedTuple):
    """Answers to a step's questions.

    Attributes:
        rows: of each part its column.
        numbers: on the host.
    """

    rows: list[Array]
    numbers: list[int]


Steps = Generator[Asked, Seen, _T]
"""Work in steps, which has a result in the end."""


def side_by_side(kernels: Kernels, works: Sequence[Steps[_T]]) -> list[_T]:
    """The results of works, of whose steps each is looked at together with those of the others."""
    results: dict[int, _T] = {}
    answers: dict[int, Seen | None] = dict.fromkeys(range(len(works)))
    while answers:
        looks: dict[int, Asked] = {}
        for number, seen in answers.items():
            try:
                looks[number] = next(works[number]) if seen is None else works[number].send(seen)
            except StopIteration as end:
                results[number] = end.value
        answers = dict(zip(looks, _seen(kernels, list(looks.values())), strict=True)) if looks else {}
    return [results[number] for number in range(len(works))]


def _seen(kernels: Kernels, looks: Sequence[Asked]) -> list[Seen]:
    parts = [part for look in looks for part in look.parts]
    found, _, numbers = kernels.flagged(parts, [number for look in looks for number in look.numbers])
    rows, told = iter([column for (column,) in found]), iter(numbers)
    return [Seen([next(rows) for _ in look.parts], [next(told) for _ in look.numbers]) for look in looks]

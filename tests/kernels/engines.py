"""Running engines on two backends and comparing all they say and keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from oracle.drive import Backend

from gpu_ops.descriptions.description import Description
from gpu_ops.descriptions.kinds import from_json
from kernels.support import same

CPU = Backend("cpu")
Batches = Sequence[Mapping[str, Any] | tuple[Sequence[Any], Mapping[str, Any]]]
"""Arguments of ``JoinEngine.prepare``: by name, or those by position before them."""
Result = tuple[list[pa.Table], list[np.ndarray], dict[str, pa.Table]]


def run(
    backend: Backend,
    join: Description,
    batches: Batches,
    start: dict[str, pa.Table] | None = None,
    before: Callable[[Any, int], object] = lambda _engine, _number: None,
    **options: Any,
) -> Result:
    """Changelogs, their sequences and the state after; every other micro-batch is first discarded once.

    ``before`` each micro-batch, and after the last, something may be done to the engine. ``options`` are
    the engine's.
    """
    tables, sequences = [], []
    with backend.engine(join, **options) as engine:
        if start is not None:
            engine.restore(start)
        for number, given in enumerate(batches):
            before(engine, number)
            inputs, named = given if isinstance(given, tuple) else ((), given)
            if number % 2:
                engine.prepare(*inputs, **named)
                engine.discard()
            batch = engine.prepare(*inputs, **named)
            engine.commit()
            tables.append(batch.changelog)
            sequences.append(batch.sequence)
        before(engine, len(batches))
        return tables, sequences, engine.snapshot()


def alike(found: Result, wanted: Result) -> None:
    """The same changelogs, sequences and state, row for row."""
    for number, (ours, theirs) in enumerate(zip(found[0], wanted[0], strict=True)):
        try:
            same(ours, theirs)
        except AssertionError as error:
            raise AssertionError(f"micro-batch {number}: {error}") from None
    for ours, theirs in zip(found[1], wanted[1], strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert found[2].keys() == wanted[2].keys()
    for name, table in wanted[2].items():
        same(found[2][name], table)


def restarting(backend: Backend, join: Description, every: int = 3) -> Iterator[Any]:
    """An engine for each micro-batch: after so many another one, which goes on from a snapshot and a stored description."""
    state = None
    while True:
        with backend.engine(from_json(join.to_json())) as engine:
            if state is not None:
                engine.restore(state)
            for _ in range(every):
                yield engine
            state = engine.snapshot()

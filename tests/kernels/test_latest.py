"""The latest row of each key on any backend, after every micro-batch against a dictionary kept change by change."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pyarrow as pa
import pytest
from oracle.drive import Backend

from gpu_ops.descriptions.description import Emit
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.kinds import from_json
from gpu_ops.descriptions.latest import Latest
from gpu_ops.errors import DescriptionError
from kernels.conftest import EMULATED, only_on
from kernels.engines import CPU, alike, run

SCHEMA = pa.schema([("id", pa.int64()), ("group", pa.string()), ("item", pa.string()), ("price", pa.float64())])
KEY = ("group", "id")
Change = tuple[str, int, str, str | None, float | None]


def described(emit: Emit, **options: Any) -> Latest:
    return Latest(Input("orders", SCHEMA, unique_key=KEY, row_kind="op", **options), emit)


def trace(seed: int, events: int = 200) -> list[Change]:
    choice = random.Random(seed)
    return [
        (
            choice.choice(["+I", "+U", "+U", "-D", "-U"]),
            choice.randrange(4),
            choice.choice("ab"),
            choice.choice(["x", "y", None]),
            choice.choice([1.5, float("nan"), None]),
        )
        for _ in range(events)
    ]


def table(changes: list[Change]) -> pa.Table:
    schema = pa.schema([("op", pa.string()), *SCHEMA])
    return pa.Table.from_pylist([dict(zip(schema.names, change, strict=True)) for change in changes], schema)


def by_hand(changes: list[Change], kept: dict[tuple[int, str], tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The changelog of changes, one by one; rows as text, so that NaN equals itself."""
    out = []
    for kind, *row in changes:
        key, shown = (row[0], row[1]), tuple(map(str, row))
        before = kept.pop(key, None)
        if kind in ("+I", "+U"):
            kept[key] = shown
            out += [("+I", *shown)] if before is None else [("-U", *before), ("+U", *shown)]
        elif before is not None:
            out.append(("-D", *before))
    return out


def told(changelog: pa.Table) -> list[tuple[str, ...]]:
    return [tuple(map(str, row.values())) for row in changelog.to_pylist()]


def net(changes: list[tuple[str, ...]]) -> Counter[tuple[str, ...]]:
    count: Counter[tuple[str, ...]] = Counter()
    for kind, *row in changes:
        count[tuple(row)] += 1 if kind[0] == "+" else -1
    return Counter({row: n for row, n in count.items() if n})


@pytest.mark.parametrize("size", [1, 7, 60])
@pytest.mark.parametrize("emit", ["per_event", "per_batch"])
def test_after_every_micro_batch(backend: Backend, emit: Emit, size: int) -> None:
    changes, kept = trace(size), dict[tuple[int, str], tuple[str, ...]]()
    with backend.engine(described(emit)) as engine:
        for start in range(0, len(changes), size):
            part = changes[start : start + size]
            wanted, found = by_hand(part, kept), told(engine.process(table(part)))
            if emit == "per_event":
                assert found == wanted
            else:
                assert net(found) == net(wanted)
                assert len(found) == sum(abs(n) for n in net(wanted).values())


@only_on("cpu-tiny", "gpu", "gpu-tiny", *EMULATED)
@pytest.mark.parametrize("emit", ["per_event", "per_batch"])
def test_same_as_the_cpu(engines: Backend, emit: Emit) -> None:
    batches = [([table(trace(seed, 40))], {}) for seed in range(4)]
    alike(run(engines, described(emit), batches), run(CPU, described(emit), batches))


def test_rows_that_expire_are_forgotten() -> None:
    with CPU.engine(described("per_event", ttl_ms=1000)) as engine:
        assert told(engine.process(table([("+I", 1, "a", "x", None)]), clock_ms=0)) == [("+I", "1", "a", "x", "None")]
        again = engine.process(table([("+I", 1, "a", "y", None)]), clock_ms=5000)
        assert told(again) == [("+I", "1", "a", "y", "None")]


def test_what_it_says() -> None:
    latest = described("per_batch")
    assert latest.unique_key == KEY
    assert [shuffle.columns for shuffle in latest.shuffled_by] == [("group",), ("id",)]
    assert from_json(latest.to_json()) == latest
    assert latest.title == "latest row of orders by group, id"
    with pytest.raises(DescriptionError, match="input 'orders': the latest row of what"):
        Latest(Input("orders", SCHEMA))
    with pytest.raises(DescriptionError, match="emit='at_end' has no place here"):
        described("at_end")

"""The latest row of each key on any backend, after every micro-batch against a dictionary kept change by change."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from decimal import Decimal
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from oracle.drive import Backend, same_state

from gpu_ops.descriptions.description import Emit
from gpu_ops.descriptions.groups import Keep, Latest
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.kinds import from_json
from gpu_ops.errors import BadInputError, DescriptionError
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


@only_on("cpu-tiny", "gpu", "gpu-tiny", *EMULATED)
@pytest.mark.parametrize("way", [("moment", "last"), (None, "first")])
def test_the_first_and_the_last_are_the_same_as_the_cpus(engines: Backend, way: tuple[str | None, Keep]) -> None:
    choice = random.Random(2)
    parts = [[choice.randrange(9) for _ in range(30)] for _ in range(4)]
    batches = [([pa.table([ids, ids[::-1], list(map(str, ids))], schema=PLAIN)], {}) for ids in parts]
    for emit in ("per_event", "per_batch"):
        alike(run(engines, chosen(*way, emit), batches), run(CPU, chosen(*way, emit), batches))


PLAIN = pa.schema([("id", pa.int64()), ("moment", pa.int32()), ("text", pa.string())])


def chosen(order_by: str | None, keep: Keep, emit: Emit = "per_batch") -> Latest:
    return Latest(Input("orders", PLAIN, unique_key=("id",)), emit, order_by, keep)


def by_duckdb(rows: pa.Table, order_by: str | None, keep: str) -> list[tuple[Any, ...]]:
    """The first or last row of each key; of those with an equal order the first or last that arrived."""
    way = "DESC" if keep == "last" else "ASC"
    order = ", ".join(f"{column} {way}" for column in ([order_by] if order_by else []) + ["number"])
    with duckdb.connect() as connection:
        connection.register("rows", rows.append_column("number", pa.array(range(len(rows)))))
        sql = f"SELECT id, moment, text FROM rows QUALIFY row_number() OVER (PARTITION BY id ORDER BY {order}) = 1"
        return sorted(connection.sql(sql).fetchall())


@pytest.mark.parametrize("emit", ["per_event", "per_batch"])
@pytest.mark.parametrize("way", [("moment", "last"), ("moment", "first"), ("text", "last"), (None, "first")])
def test_the_first_and_the_last_by_a_column(other_backend: Backend, way: tuple[str | None, Keep], emit: Emit) -> None:
    choice, table = random.Random(1), Counter[tuple[Any, ...]]()
    parts = [
        pa.table([[choice.randrange(12) for _ in range(n)], [choice.randrange(6) for _ in range(n)],
                  [choice.choice("abcde") for _ in range(n)]], schema=PLAIN)
        for n in (1, 9, 0, 40, 3, 25)
    ]  # fmt: skip
    with other_backend.engine(chosen(*way, emit)) as engine:
        for number, part in enumerate(parts):
            changes = [tuple(row.values()) for row in engine.process(part).to_pylist()]
            for kind, *row in changes:
                table[tuple(row)] += 1 if kind[0] == "+" else -1
                assert table[tuple(row)] in (0, 1)
            wanted = by_duckdb(pa.concat_tables(parts[: number + 1]), *way)
            assert sorted(table.elements()) == wanted
            if emit == "per_event":
                assert sum(kind == "+I" for kind, *_ in changes) == len(wanted) - (
                    len(by_duckdb(pa.concat_tables(parts[:number]), *way)) if number else 0
                )


def test_what_cannot_be_ordered() -> None:
    with CPU.engine(chosen("moment", "last")) as engine:
        engine.process(pa.table([[1], [5], ["x"]], schema=PLAIN))
        with pytest.raises(BadInputError, match=r"input 'orders', column 'moment': nothing to order by.*\{'id': 2\}"):
            engine.process(pa.table([[1, 2], [9, None], ["y", "z"]], schema=PLAIN))
        assert told(engine.process(pa.table([[1], [4], ["z"]], schema=PLAIN))) == []
    assert from_json(chosen("moment", "first").to_json()) == chosen("moment", "first")
    for wrong, message in [
        (lambda: chosen("no", "last"), "order_by names 'no'; there are id, moment, text"),
        (lambda: chosen(None, "best"), "keep='best'; it is one of first, last"),
        (lambda: Latest(Input("o", SCHEMA, unique_key=KEY, row_kind="op"), keep="first"), "are for insertions only"),
    ]:
        with pytest.raises(DescriptionError, match=message):
            wrong()


@pytest.mark.parametrize("bad", ["fail", "drop", "tag"])
@pytest.mark.parametrize("keep", ["first", "last"])
def test_rows_without_anything_to_order_by_are_bad_rows(other_backend: Backend, keep: Keep, bad: str) -> None:
    """``bad_rows`` says what becomes of them, as of a null in the unique key; of text, numbers, times, and of NaN."""
    values: list[tuple[pa.DataType, list[Any]]] = [
        (pa.float64(), [5.0, None, float("nan"), 7.0, 1.0]),
        (pa.string(), ["5", None, None, "7", "1"]),
        (pa.timestamp("us"), [5, None, None, 7, 1]),
        (pa.decimal128(9, 2), [Decimal(5), None, None, Decimal(7), Decimal(1)]),
    ]
    for kind, order in values:
        schema = pa.schema([("id", pa.int64()), ("x", kind), ("n", pa.int64())])
        rows = pa.table([[1, 1, 2, 1, None], pa.array(order, kind), range(5)], schema=schema)
        source = Input("orders", schema, unique_key=("id",), bad_rows=bad)  # type: ignore[arg-type]
        with other_backend.engine(Latest(source, "per_batch", "x", keep)) as engine:
            good = rows.slice(0, 1)
            engine.process(good)
            before = engine.snapshot()
            if bad == "fail":
                with pytest.raises(BadInputError, match=r"input 'orders'.*(nothing to order by|unique key)"):
                    engine.process(rows)
                with pytest.raises(BadInputError, match=r"column 'x': nothing to order by.*\{'id': 1\}"):
                    engine.process(rows.slice(1, 3))
                same_state(engine, before)
                continue
            batch = engine.prepare(rows)
            engine.commit()
            found = [
                (kind, row["n"])
                for kind, row in zip(batch.changelog["row_kind"].to_pylist(), batch.changelog.to_pylist(), strict=True)
            ]
            told = [("-D", 0), ("+I", 3)] if keep == "last" else []
            assert found == told + ([("bad", 1), ("bad", 2), ("bad", 4)] if bad == "tag" else [])
            assert batch.metrics["orders_bad_rows"] == 3


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
    schema = SCHEMA.append(pa.field("gone", pa.list_(pa.string())))
    source = Input("orders", schema, unique_key=KEY, row_kind="op")
    with pytest.raises(DescriptionError, match=r"goes by the row that came before: not with .* at_end"):
        dataclasses.replace(described("at_end"), source=source, unavailable="gone")

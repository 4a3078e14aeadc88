"""A partition of a multi-way join: its wire, restarts, repetitions, snapshots, and what inspect shows of it."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from rich.console import Console

from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.multi_join import MultiJoin
from gpu_ops.errors import BadInputError, DescriptionError, StateError
from gpu_ops.join_engine import JoinEngine
from gpu_ops.spark.server import inspection
from gpu_ops.spark.wire.command import ApplyCommand, Wire
from gpu_ops.state.address import StateAddress
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import Manifest
from state.support import PartitionState

USERS = pa.schema([("k", pa.int64()), ("u", pa.string())])
ORDERS = pa.schema([("k", pa.int64()), ("o", pa.int64())])
PAYMENTS = pa.schema([("k", pa.int64()), ("p", pa.int64()), ("o", pa.int64())])
JOIN = MultiJoin.of(
    [
        Input("users", USERS, unique_key=("k",), row_kind="op", updates="retract"),
        Input("orders", ORDERS, row_kind="op"),
        Input("payments", PAYMENTS),
    ],
    "k",
    ["left", "left"],
    where=[None, "orders.o = payments.o"],
    suffixes=["", "", "_paid"],
)
WIRE = Wire(
    "__side",
    "__order",
    (("k", "k", "k", "c0"), ("op", "op", None, "c1"), (None, "o", "o", "c2"), ("u", None, None, "c3"),
     (None, None, "p", "c4")),
)  # fmt: skip
WIRE_SCHEMA = pa.schema(
    [("__side", pa.int8()), ("__order", pa.int64()), ("c0", pa.int64()), ("c1", pa.string()), ("c2", pa.int64()),
     ("c3", pa.string()), ("c4", pa.int64())]
)  # fmt: skip


def batches(count: int, rows: int = 30) -> list[pa.Table]:
    """Users that come and go, orders that come and go, payments that come; lines as they arrive, in any order."""
    rng = np.random.default_rng(11)
    users: dict[int, str] = {}
    orders: list[tuple[int, int]] = []
    made, place = [], 0
    for _ in range(count):
        lines: list[dict[str, Any]] = []
        for _ in range(rows):
            place += 1
            line: dict[str, Any] = {"__side": int(rng.integers(3)), "__order": place, "c0": int(rng.integers(6))}
            if line["__side"] == 0:
                gone = users.pop(line["c0"], None)
                line |= {"c1": "+I" if gone is None else "-D", "c3": gone or f"u{place}"}
                if gone is None:
                    users[line["c0"]] = line["c3"]
            elif line["__side"] == 1:
                if orders and rng.random() < 0.4:
                    key, order = orders.pop(int(rng.integers(len(orders))))
                    line |= {"c0": key, "c1": "-D", "c2": order}
                else:
                    line |= {"c1": "+I", "c2": int(rng.integers(4))}
                    orders.append((line["c0"], line["c2"]))
            else:
                line |= {"c2": int(rng.integers(4)), "c4": place}
            lines.append(line)
        made.append(pa.Table.from_pylist([lines[n] for n in rng.permutation(rows)], schema=WIRE_SCHEMA))
    return made


BATCHES = batches(10)


def expected() -> list[pa.Table]:
    engine = JoinEngine(JOIN, "cpu")
    rows = [WIRE.split(JOIN, batch) for batch in BATCHES]
    return [engine.process(*r.tables, orders=r.sequences, clock_ms=1) for r in rows]


ANSWERS = expected()


def command(state: Path | None, **changes: Any) -> ApplyCommand:
    folder = None if state is None else StateAddress.of(state)
    made = ApplyCommand("j", folder, JOIN.to_json(), "q", 0, 0, 2, "cpu", WIRE, {})
    return dataclasses.replace(made, **changes)


def opened(state: Path | None, **options: Any) -> PartitionState:
    return PartitionState(command(state, options=options))


def test_the_trace_has_what_it_is_to_test() -> None:
    changes = pa.concat_tables(ANSWERS)
    assert {"+I", "-D"} == set(changes["row_kind"].to_pylist())
    paid = [row for row in changes.to_pylist() if row["p"] is not None]
    padded = [row for row in changes.to_pylist() if row["o"] is None]
    assert len(paid) > 20
    assert len(padded) > 15


@pytest.mark.parametrize("options", [{}, {"snapshot_every": 1}, {"snapshot_every": 3}])
@pytest.mark.parametrize("kept", ["folder", "memory"])
def test_restarts_and_repetitions_answer_alike(tmp_path: Path, options: dict[str, Any], kept: str) -> None:
    partition = opened(tmp_path if kept == "folder" else None, **options)
    for batch, answer in enumerate(ANSWERS):
        for time in range(1 + batch % 3):
            if kept == "folder" and time:
                partition = opened(tmp_path, **options)
            found = partition.apply(batch, BATCHES[batch], WIRE)
            assert found.changelog.equals(answer)
        names = {f"{name}_{what}" for name in ("users", "orders", "payments") for what in ("rows_in", "state_rows")}
        assert names <= found.metrics.keys()
        assert sum(found.metrics[f"{name}_rows_in"] for name in JOIN.sides) == BATCHES[batch].num_rows
    assert bool(list(tmp_path.rglob("*.snapshot"))) == (kept == "folder" and bool(options))


def test_a_state_folder_belongs_to_one_multi_way_join(tmp_path: Path) -> None:
    opened(tmp_path).apply(0, BATCHES[0], WIRE)
    other = MultiJoin.of(list(JOIN.inputs), "k", ["left", "inner"], where=[None, "orders.o = payments.o"],
                         suffixes=["", "", "_paid"])  # fmt: skip
    fewer = MultiJoin.of(list(JOIN.inputs[:2]), "k", ["left"])
    rows = BATCHES[1].filter(pa.compute.field("__side") < 2)
    for join, message in (
        (other, "the step to 'payments' had how='left', now 'inner'"),
        (fewer, "had 3 inputs, now 2"),
    ):
        wire = Wire("__side", "__order", tuple((*x[: len(join.inputs)], x[-1]) for x in WIRE.union_columns))
        with pytest.raises(StateError, match=message):
            PartitionState(command(tmp_path, description=join.to_json(), wire=wire)).apply(1, rows, wire)


def test_split_takes_three_inputs_apart() -> None:
    for rows in (BATCHES[0], BATCHES[0].sort_by("__side"), BATCHES[0].slice(0, 0)):
        sides = WIRE.split(JOIN, rows)
        assert [t.column_names for t in sides.tables] == [["k", "u", "op"], ["k", "o", "op"], ["k", "p", "o"]]
        for number, (table, order) in enumerate(zip(sides.tables, sides.sequences, strict=True)):
            own = [line for line in rows.to_pylist() if line["__side"] == number]
            union_column_of = {
                column[number]: column[-1] for column in WIRE.union_columns if column[number] is not None
            }
            assert table.to_pylist() == [
                {name: line[union_column_of[name]] for name in table.column_names} for line in own
            ]
            assert order.tolist() == [line["__order"] for line in own]


def test_rows_and_union_columns_that_do_not_fit() -> None:
    table = BATCHES[0].slice(0, 3).set_column(0, "__side", pa.array([0, 1, 3], pa.int8()))
    with pytest.raises(BadInputError, match=r"'users', 'orders' and 'payments'.* a number below 3 \(for example 3\)"):
        WIRE.split(JOIN, table)
    short = dataclasses.replace(WIRE, union_columns=(("k", "k", "c0"), *WIRE.union_columns[1:]))
    with pytest.raises(DescriptionError, match="is not one of 3 inputs"):
        short.check(JOIN, WIRE_SCHEMA)
    without = dataclasses.replace(WIRE, union_columns=WIRE.union_columns[:-1])
    with pytest.raises(DescriptionError, match="input 'payments': the union columns carry 'k', 'o'; its columns are"):
        without.check(JOIN, WIRE_SCHEMA)
    WIRE.check(JOIN, WIRE_SCHEMA)
    for union_columns in ([["c0"]], [["k", 3, "c0"]], [["k", "k", None]], ["kkk0", 7]):
        with pytest.raises(DescriptionError, match="no mapping of columns to union columns"):
            Wire.from_dict({"side": "s", "order": "o", "lanes": union_columns})


def test_the_command_of_two_inputs_is_as_it_was() -> None:
    """State folders hold it: the JSON of an older version has to be understood, and is written again."""
    text = '{"side": "__side", "order": "__order", "lanes": [["item", "item", "c0"], ["id", null, "c1"]]}'
    wire = Wire.from_json(text)
    assert wire.union_columns == (("item", "item", "c0"), ("id", None, "c1"))
    assert wire.to_json() == text
    assert ApplyCommand.parse(command(None).to_json().encode()) == command(None)
    assert Wire.from_json(WIRE.to_json()) == WIRE


def test_inspect_shows_every_input(tmp_path: Path) -> None:
    partition = opened(tmp_path, snapshot_every=2)
    for batch in range(4):
        partition.apply(batch, BATCHES[batch], WIRE)
    files = Files.at(str(tmp_path))
    manifest = Manifest.read(files)
    assert manifest is not None
    held = inspection.read_partition(files, manifest, 0, rows=True)
    assert held.snapshot is not None
    assert held.rows is not None
    assert held.records
    engine = JoinEngine(JOIN, "cpu")
    for batch in BATCHES[:4]:
        rows = WIRE.split(JOIN, batch)
        engine.process(*rows.tables, orders=rows.sequences)
    assert held.rows == tuple(engine.state_size()[f"{name}_rows"] for name in ("users", "orders", "payments"))
    assert all(held.rows)
    out = io.StringIO()
    inspection.describe(str(tmp_path), Console(file=out, width=160))
    shown = out.getvalue()
    title = (
        "multi-way join of users, left join orders on users.k = orders.k, left join payments on "
        "users.k = payments.k where orders.o = payments.o, emit per_batch"
    )
    assert title in " ".join(shown.split())
    for source in JOIN.inputs:
        assert shown.count(source.name) >= 2
    assert all(str(rows) in shown for rows in held.rows)

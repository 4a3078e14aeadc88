"""Changes that do not bring all values, on any backend: those of the row before, against a dictionary kept by hand."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from typing import Any

import pyarrow as pa
import pytest
from oracle.drive import Backend, canonical, fold
from oracle.drive import changes as changes_of

from gpu_ops.descriptions.description import Emit
from gpu_ops.descriptions.groups import Latest
from gpu_ops.descriptions.inputs import BadRows, Input
from gpu_ops.descriptions.kinds import from_json
from gpu_ops.errors import BadInputError, DescriptionError
from kernels.conftest import EMULATED, only_on
from kernels.engines import CPU, alike, run

pytestmark = pytest.mark.thorough

SCHEMA = pa.schema(
    [("id", pa.int64()), ("text", pa.string()), ("tags", pa.list_(pa.string())), ("data", pa.binary()),
     ("n", pa.int32()), ("gone", pa.list_(pa.string()))]
)  # fmt: skip
LARGE = ("text", "tags", "data")
Row = dict[str, Any]


def described(emit: Emit = "per_event", bad_rows: BadRows = "drop", **options: Any) -> Latest:
    source = Input("orders", SCHEMA, unique_key=("id",), row_kind="op", bad_rows=bad_rows, **options)
    return Latest(source, emit, unavailable="gone")


def trace(seed: int, size: int = 12) -> list[list[Row]]:
    """Micro-batches; an update and its old row are in one, as they are in one message."""
    choice, batches = random.Random(seed), list[list[Row]]()
    for number in range(size):
        batch: list[Row] = []
        for _ in range(choice.choice([0, 1, 5, 20])):
            row: Row = {"op": choice.choice(["+I", "+U", "+U", "u", "-D", "-U"]), "id": choice.randrange(4)}
            row |= {
                "text": choice.choice(["x", None, str(number)]),
                "tags": choice.choice([[], [None], ["a", "b"], None]),
            }
            row |= {"data": choice.choice([b"", b"1", None]), "n": choice.randrange(3), "gone": None}
            if row["op"] == "-U":
                batch.append(row | {"gone": ["text"]})
                row = row | {"op": "+U"}
            if row["op"] != "-D" and choice.random() < 0.6:
                row["gone"] = choice.sample([*LARGE, "other"], choice.randrange(4))
                row |= {name: None for name in row["gone"] if name in LARGE}
            batch.append(row)
        batches.append(batch)
    return batches


def by_hand(batch: list[Row], kept: dict[int, Row]) -> tuple[list[Row], int]:
    """The whole rows of changes, and how many lack what nobody knows.

    A change that is left out counts for what it brings: the next one may lack that.
    """
    whole, bad, known = list[Row](), 0, {key: dict(row) for key, row in kept.items()}
    for change in batch:
        row = {name: value for name, value in change.items() if name != "gone"}
        gone = [name for name in change["gone"] or () if name in LARGE]
        if row["op"] in ("-D", "-U"):
            if row["op"] == "-D":
                known.pop(row["id"], None)
            kept.pop(row["id"], None)
            whole.append(row)
            continue
        before = known.setdefault(row["id"], {})
        before |= {name: value for name, value in row.items() if name not in gone}
        if all(name in before for name in gone):
            row |= {name: before[name] for name in gone}
            kept[row["id"]] = row
            whole.append(row)
        else:
            bad += 1
    return whole, bad


def table(batch: list[Row]) -> pa.Table:
    return pa.Table.from_pylist(batch, pa.schema([("op", pa.string()), *SCHEMA]))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("emit", ["per_event", "per_batch"])
def test_values_that_a_change_does_not_bring_are_those_from_before(backend: Backend, emit: Emit, seed: int) -> None:
    """Also where a micro-batch is undone first, and after a restart."""
    kept, result, described_here = dict[int, Row](), Counter[Any](), described(emit)
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(backend.engine(described_here))
        for number, batch in enumerate(trace(seed)):
            if number == 6:
                state = engine.snapshot()
                engine = stack.enter_context(CPU.engine(described_here))
                engine.restore(state)
            _, bad = by_hand(batch, kept)
            if number % 2:
                engine.prepare(table(batch))
                engine.discard()
            done = engine.prepare(table(batch))
            assert done.metrics[f"{described_here.sides[0]}_bad_rows"] == bad
            assert done.changelog.column_names == ["row_kind", "id", *LARGE, "n"]
            result = fold(changes_of(done.changelog), result)
            engine.commit()
            assert result == Counter(canonical([row[x] for x in ("id", *LARGE, "n")]) for row in kept.values())


@only_on("cpu-tiny", "gpu", "gpu-tiny", *EMULATED)
@pytest.mark.parametrize("emit", ["per_event", "per_batch"])
def test_same_as_the_cpu(engines: Backend, emit: Emit) -> None:
    batches = [([table(batch)], {}) for batch in trace(7)]
    alike(run(engines, described(emit), batches), run(CPU, described(emit), batches))


def test_nothing_to_keep() -> None:
    """An error that names the column; before that, nothing has changed."""
    row = {"op": "+I", "id": 1, "text": "a", "tags": None, "data": b"", "n": 1, "gone": None}
    lacks = row | {"op": "u", "text": None, "gone": ["text"]}
    with CPU.engine(described(bad_rows="fail")) as engine:
        engine.process(table([row]))
        with pytest.raises(BadInputError, match=r"column 'text': a change does not bring it.*REPLICA.*\{'id': 2\}"):
            engine.process(table([row | {"text": "b"}, lacks | {"id": 2}]))
        assert engine.process(table([lacks]))["text"].to_pylist() == ["a", "a"]
        with pytest.raises(BadInputError, match="column 'id': is of the key"):
            engine.process(table([row | {"gone": ["id"]}]))
        engine.process(table([row | {"op": "-D"}]))
        with pytest.raises(BadInputError, match="there is no row of its key"):
            engine.process(table([lacks]))
    with CPU.engine(described(bad_rows="tag")) as engine:
        done = engine.process(table([lacks, row, lacks]))
        assert done["row_kind"].to_pylist() == ["+I", "-U", "+U", "bad"]
    with CPU.engine(described("per_event", "fail", ttl_ms=1000)) as engine:
        engine.process(table([row]), clock_ms=0)
        engine.process(table([lacks]), clock_ms=900)
        with pytest.raises(BadInputError, match="there is no row of its key"):
            engine.process(table([lacks]), clock_ms=5000)


def test_what_it_says() -> None:
    latest = described()
    assert from_json(latest.to_json()) == latest
    assert "columns named in gone keep the value from before" in "\n".join(latest.lines())
    for wrong, problem in (
        (lambda: Latest(latest.source, unavailable="x"), "unavailable='x' is no column; there are id, text"),
        (lambda: Latest(latest.source, unavailable="text"), "unavailable='text' is string; it is a list of the names"),
        (lambda: Latest(Input("o", SCHEMA, unique_key=("id",)), keep="first", unavailable="gone"), "not with order_by"),
    ):
        with pytest.raises(DescriptionError, match=problem):
            wrong()


def test_bad_rows_of_a_backlog_come_out_with_its_result() -> None:
    whole = {"op": "+I", "tags": [], "data": b"", "n": 0, "gone": None}
    lacking = {"op": "+U", "id": 2, "text": None, "tags": [], "data": b"", "n": 0, "gone": ["text"]}

    def table(*rows: Row) -> pa.Table:
        return pa.Table.from_pylist(list(rows), SCHEMA.append(pa.field("op", pa.string())))

    with CPU.engine(described("per_batch", "tag"), backlog=True) as engine:
        engine.process(table({**whole, "id": 1, "text": "a"}, lacking), backlog=True)
        found = engine.prepare(table({**whole, "id": 3, "text": "c"}))
        assert found.changelog["row_kind"].to_pylist() == ["+I", "+I", "bad"]
        assert found.sequence.tolist() == [-1, 0, -1]

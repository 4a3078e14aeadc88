"""Sources that get columns, fields and wider types while a query reads them by the schema that it began with."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.orc as porc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_ops.errors import BadInputError
from gpu_ops.files import new_columns
from gpu_ops.files.formats import FileFormat
from gpu_ops.files.new_columns import log_new_columns, undeclared

FEED = {"delta.enableChangeDataFeed": "true"}
SCHEMA = pa.schema([("id", pa.int32()), ("name", pa.string()), ("s", pa.struct([("a", pa.int32())]))])
OLD = pa.table({"id": [1], "name": ["x"], "s": [{"a": 1}]}, SCHEMA)
GROWN = {
    "a column and a field are added, in the middle": pa.table(
        {
            "vat": [0.5],
            "s": pa.array([{"b": "y", "a": 2}], pa.struct([("b", pa.string()), ("a", pa.int32())])),
            "name": ["y"],
            "id": pa.array([2], pa.int32()),
        }
    ),
    "a type is widened": pa.table({"id": [2], "name": ["y"], "s": [{"a": 2}]}),
}


@pytest.fixture(autouse=True)
def forgotten() -> None:
    new_columns._known.clear()


def put(path: Path, name: str, table: pa.Table) -> str:
    """A file, or a commit of a Delta table; gives what is read."""
    path.mkdir(exist_ok=True)
    if name == "delta":
        at = str(path / "table")
        deltalake.write_deltalake(at, table, mode="append", configuration=FEED, schema_mode="merge")
        return f"{at}/_delta_log/{deltalake.DeltaTable(at).version():020}.json"
    file = path / f"{len(list(path.iterdir()))}.{name}"
    if name == "json":
        file.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    elif name == "arrow":
        with pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    else:
        {"parquet": pq.write_table, "orc": porc.write_table, "csv": pcsv.write_csv}[name](table, file)
    return str(file)


def flat(name: str, table: pa.Table) -> pa.Table:
    """A table as the format can hold it: CSV has no structs."""
    return table.drop_columns("s") if name == "csv" else table


def read(name: str, uri: str, schema: pa.Schema = SCHEMA) -> list[dict[str, Any]]:
    schema = schema.remove(schema.get_field_index("s")) if name == "csv" and "s" in schema.names else schema
    options = (("header", "true"),) if name == "csv" else ()
    made = FileFormat(name, schema, options)
    return [row for batch in made.read(uri, schema.names, "orders") for row in batch.to_pylist()]


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, how) for how in GROWN for name in ("parquet", "orc", "arrow", "csv", "json")),
        ("delta", next(iter(GROWN))),  # deltalake widens no types; tables of Spark's that do are in tests/services
    ],
)
def test_files_that_grow_are_read_as_declared(
    name: str, how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What is new is left out, and named in one line of the log."""
    grown = flat(name, GROWN[how])
    expected = [{"id": 1, "name": "x", "s": {"a": 1}}, {"id": 2, "name": "y", "s": {"a": 2}}]
    expected = [{x: row[x] for x in SCHEMA.names if name != "csv" or x != "s"} for row in expected]
    found = [read(name, put(tmp_path / "f", name, table)) for table in (flat(name, OLD), grown, grown, grown)]
    assert found == [[row] for row in (expected[0], *expected[1:] * 3)]
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    if "widened" in how:
        assert lines == []
        return
    (line,) = lines
    assert line.startswith("input 'orders': ")
    new = {"vat"} if name == "csv" else {"vat", "s.b"}
    assert set(line.rpartition(": ")[2].split(", ")) == new


@pytest.mark.parametrize("name", ["parquet", "orc", "arrow", "csv", "delta"])
def test_a_dropped_column_is_an_error_that_names_it(name: str, tmp_path: Path) -> None:
    """JSON has no other way to write a null than to leave it out, so there it is null."""
    put(tmp_path / "f", name, flat(name, OLD))
    if name == "delta":
        at = str(tmp_path / "f" / "table")
        deltalake.write_deltalake(
            at, OLD.drop_columns("name"), mode="overwrite", schema_mode="overwrite", configuration=FEED
        )
        uri = f"{at}/_delta_log/{deltalake.DeltaTable(at).version():020}.json"
    else:
        uri = put(tmp_path / "f", name, flat(name, OLD).drop_columns("name"))
    with pytest.raises(BadInputError, match="not among its columns") as raised:
        read(name, uri)
    assert (raised.value.input_name, raised.value.column) == ("orders", "name")
    assert uri in str(raised.value)


@pytest.mark.parametrize("name", ["parquet", "orc", "arrow", "csv", "json"])
def test_a_value_that_a_widened_type_allows_and_ours_does_not_is_an_error(name: str, tmp_path: Path) -> None:
    uri = put(tmp_path / "f", name, flat(name, pa.table({"id": [1 << 40], "name": ["y"], "s": [{"a": 2}]})))
    with pytest.raises(BadInputError, match="1099511627776") as raised:
        read(name, uri)
    assert raised.value.column == "id"


def test_columns_that_were_left_out_from_the_start_are_not_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A schema need not name all columns."""
    for _ in range(3):
        read("parquet", put(tmp_path / "f", "parquet", OLD), SCHEMA.remove(1))
    assert caplog.records == []


def test_all_workers_of_an_executor_log_a_column_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker that had no task for a minute ends, and the next one knows nothing."""
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{tmp_path}/blockmgr-1,/elsewhere")
    (tmp_path / "blockmgr-1").mkdir()
    for there in ({"id": 0, "old": 0}, {"id": 0, "old": 0, "vat": 0}, {"vat": 0, "id": 0}, {"id": 0, "b": 0}):
        new_columns._known.clear()
        log_new_columns("orders", "a message", SCHEMA, there)
    new = [record.getMessage().rpartition(": ")[2] for record in caplog.records]
    assert new == ["vat", "b"]
    caplog.clear()
    for number in range(300):  # members that are no columns
        log_new_columns("orders", "a message", SCHEMA, {f"key {number}": 0})
    assert len(caplog.records) < 110


NAMES = st.sampled_from("abcde")
KINDS: Any = st.recursive(
    st.just(pa.int32()),
    lambda inner: st.one_of(
        st.dictionaries(NAMES, inner, min_size=1, max_size=4).map(lambda x: pa.struct(list(x.items()))),
        inner.map(pa.list_),
    ),
    max_leaves=8,
)


@given(st.dictionaries(NAMES, KINDS, max_size=4), st.dictionaries(NAMES, KINDS, max_size=4))
def test_random_types_differ_by_the_paths_that_one_lacks(there: dict[str, Any], declared: dict[str, Any]) -> None:
    def within(kind: pa.DataType) -> pa.DataType:
        return within(kind.value_type) if pa.types.is_list(kind) else kind

    def paths(kind: pa.DataType, other: pa.DataType | None, path: str) -> list[str]:
        if other is None:
            return [path]
        kind, other = within(kind), within(other)
        if pa.types.is_struct(kind) and pa.types.is_struct(other):
            fields = {x.name: x.type for x in other}
            return [one for x in kind for one in paths(x.type, fields.get(x.name), f"{path}.{x.name}")]
        return []

    def names(kind: pa.DataType) -> Any:
        kind = within(kind)
        return {x.name: names(x.type) for x in kind} if pa.types.is_struct(kind) else None

    one, other = pa.struct(list(there.items())), pa.struct(list(declared.items()))
    assert undeclared(names(one), other) == [x.removeprefix(".") for x in paths(one, other, "")]


def test_nothing_is_said_of_texts_that_are_no_objects() -> None:
    assert undeclared(None, pa.struct([("a", pa.int32())])) == []
    assert undeclared([1], pa.struct([("a", pa.int32())])) == []


def test_messages_that_get_members_and_fields_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """JSON, Debezium's envelopes with and without Kafka Connect's schema, Avro of a schema, later of another one."""
    fastavro = pytest.importorskip("fastavro")
    from gpu_ops.messages.rows import MessageFormat
    from gpu_ops.spark.tasks.messages import VALUE, ReadMessages

    def record(*fields: tuple[str, str]) -> dict[str, Any]:
        listed = [{"name": name, "type": ["null", kind], "default": None} for name, kind in fields]
        return {"type": "record", "name": "row", "fields": listed}

    def avro(row: dict[str, Any], *fields: tuple[str, str]) -> bytes:
        out = io.BytesIO()
        fastavro.schemaless_writer(out, fastavro.parse_schema(record(*fields)), row)
        return out.getvalue()

    schema = pa.schema([("id", pa.int64()), ("s", pa.struct([("a", pa.int64())]))])
    old, new = {"id": 1, "s": {"a": 1}}, {"vat": 1, "id": 2, "s": {"b": 1, "a": 2}}
    rows = [json.dumps(row).encode() for row in (old, new)]
    changes = [json.dumps({"op": "c", "after": row}).encode() for row in (old, new)]
    wrapped = [json.dumps({"schema": None, "payload": {"op": "c", "after": row}}).encode() for row in (old, new)]
    kinds = ("id", "long"), ("vat", "long")
    for name, messages, options in (
        ("json", rows, {}),
        ("debezium-json", changes, {"row_kind": "op"}),
        ("debezium-json", wrapped, {"row_kind": "op"}),
        ("avro", [avro({"id": 1, "vat": 1}, *kinds)] * 2, {"avro_schema": json.dumps(record(*kinds))}),
    ):
        new_columns._known.clear()
        caplog.clear()
        if name == "avro":  # a topic without a registry has one schema: the first message had another one
            log_new_columns("orders", "a message", schema, {"id": None})
        made = MessageFormat(name, schema, **options)
        task = ReadMessages(made, "orders", made.output, "fail", None)
        for message in (messages[0], messages[1], messages[1]):
            values = pa.record_batch({VALUE: pa.array([message], pa.binary())})
            (batch,) = task.run(iter([values]))
            assert batch.num_rows == 1
        assert batch["id"].to_pylist() == ([1] if name == "avro" else [2])
        if name != "avro":
            assert batch["s"].to_pylist() == [{"a": 2}]
        (line,) = (entry.getMessage() for entry in caplog.records)
        assert line.rpartition(": ")[2] == ("vat" if name == "avro" else "vat, s.b")

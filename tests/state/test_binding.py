"""Files that lie where they do not belong, and manifests that are damaged: refused, whichever they are."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpu_ops.errors import StateError
from gpu_ops.spark.server.partition import stored_state
from gpu_ops.spark.server.rescale import rescale
from gpu_ops.spark.tasks.engine import left_over
from gpu_ops.state import durable
from gpu_ops.state.durable import PartitionLog, Record, Times
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import ARROW, MANIFEST, SPARK, Manifest, ensure
from state.support import WIRE, make_join, wire_batches
from state.test_partition import opened

BATCHES = wire_batches(4, rows=12)
JOIN = make_join().to_json()
MINE = Manifest(JOIN, 2, "query-1", join_number=1)
PLACES = {
    "mine": (MINE, 0, 3),
    "another batch": (MINE, 0, 2),
    "another partition": (MINE, 1, 3),
    "another number of partitions": (dataclasses.replace(MINE, partitions=3), 0, 3),
    "another query": (dataclasses.replace(MINE, query_id="query-2"), 0, 3),
    "another join": (dataclasses.replace(MINE, description=make_join(how="left").to_json()), 0, 3),
    "another generation": (dataclasses.replace(MINE, generation=1), 0, 3),
    "another join that reads alike": (dataclasses.replace(MINE, join_number=2), 0, 3),
}
READERS: dict[str, tuple[str, Callable[[PartitionLog, int], object]]] = {
    "record": ("arrow", PartitionLog.read_record),
    "head of a record": ("arrow", PartitionLog.record_times),
    "backlog": ("arrow", lambda log, number: log.in_backlog(number + 1)),
    "snapshot": ("snapshot", PartitionLog.read_snapshot),
    "head of a snapshot": ("snapshot", PartitionLog.snapshot_times),
}


def write(folder: Path, manifest: Manifest, partition: int, number: int) -> dict[str, Path]:
    """A record and a snapshot; where they lie."""
    log = PartitionLog(Files.at(str(folder)), manifest, partition)
    log.write_record(number, Record(BATCHES[0], 5, WIRE.to_json(), Times(3, (4, 5))))
    log.write_snapshot(number, {"left": BATCHES[0], "right": BATCHES[1]}, 5, Times(3, (4, 5)))
    return {path.suffix[1:]: path for path in folder.rglob(f"{number:020d}.*")}


@pytest.mark.parametrize(("there", "here"), [*itertools.permutations(PLACES, 2)])
def test_a_file_from_elsewhere_is_refused(there: str, here: str, tmp_path: Path) -> None:
    """Of 26 files of another partition, query, join or generation, 26 were taken."""
    sources, targets = write(tmp_path / "there", *PLACES[there]), write(tmp_path / "here", *PLACES[here])
    manifest, partition, number = PLACES[here]
    log = PartitionLog(Files.at(str(tmp_path / "here")), manifest, partition)
    for _, read in READERS.values():
        read(log, number)
    for suffix, target in targets.items():
        target.unlink()
        shutil.copy(sources[suffix], target)
    for suffix, read in READERS.values():
        with pytest.raises(StateError, match=re.escape(str(targets[suffix]))):
            read(log, number)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("lacking", [*MINE.facts(0), "check"])
def test_a_file_that_does_not_say_where_it_belongs_is_refused(
    lacking: str, reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suffix, read = READERS[reader]

    def less(parts: list[tuple[pa.Table, dict[str, str]]]) -> list[tuple[pa.Table, dict[str, str]]]:
        return [(table, {name: value for name, value in facts.items() if name != lacking}) for table, facts in parts]

    whole = durable._write
    with monkeypatch.context() as patch:
        patch.setattr(durable, "_write", lambda files, path, parts, lz: whole(files, path, less(parts), lz))
        if lacking == "check":
            patch.setattr(durable, "_CHECK", "other")
        written = write(tmp_path, MINE, 0, 3)
    log = PartitionLog(Files.at(str(tmp_path)), MINE, 0)
    with pytest.raises(StateError, match=re.escape(str(written[suffix]))):
        read(log, 3)
    # a folder of an earlier version has files that do not say it
    read(PartitionLog(Files.at(str(tmp_path)), dataclasses.replace(MINE, format=2), 0), 3)


@pytest.mark.parametrize("reader", ["head of a record", "head of a snapshot"])
def test_damage_in_the_head_is_found_without_reading_the_rest(reader: str, tmp_path: Path) -> None:
    suffix, read = READERS[reader]
    path = write(tmp_path, MINE, 0, 3)[suffix]
    content, log = path.read_bytes(), PartitionLog(Files.at(str(tmp_path)), MINE, 0)
    right = read(log, 3)
    for position in range(content.index(b"ARROW:schema") if b"ARROW:schema" in content else 1500):
        path.unlink()
        path.write_bytes(content[:position] + bytes([content[position] ^ 0x10]) + content[position + 1 :])
        with contextlib.suppress(StateError):
            assert read(log, 3) == right, f"byte {position}"


def folder_of(path: Path, **changes: Any) -> Path:
    """A state folder whose two partitions have done three micro-batches."""
    for number in (0, 1):
        partition = opened(path, **{"options": {"snapshot_every": 2}, **changes, "partition": number})
        for batch in range(3):
            partition.apply(batch, BATCHES[batch], WIRE, clock_ms=1000)
    return path


def opens(folder: Path) -> None:
    """Goes on with it."""
    opened(folder).apply(3, BATCHES[3], WIRE)


def looks(folder: Path) -> None:
    """Asks how many rows there are."""
    files = Files.at(str(folder))
    for partition in (0, 1):
        stored_state(files, Manifest.of(files), partition).rows_at(3)


def ends(folder: Path) -> None:
    """Ends its input."""
    manifest = Manifest.of(Files.at(str(folder)))
    for partition in (0, 1):
        list(left_over(str(folder), manifest, partition, 3))


@pytest.mark.parametrize("use", [opens, looks, ends, lambda folder: rescale(str(folder), 3)])
def test_swapped_partition_folders_are_refused(use: Callable[[Path], object], tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "state")
    use(folder_of(tmp_path / "other"))
    (folder / "p/0").rename(folder / "p/x")
    (folder / "p/1").rename(folder / "p/0")
    (folder / "p/x").rename(folder / "p/1")
    with pytest.raises(StateError, match=r"belongs to partition 1, not 0\. It was put here from elsewhere"):
        use(folder)


@pytest.mark.parametrize("use", [opens, looks, ends, lambda folder: rescale(str(folder), 3)])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_id": "query-2"}, "belongs to query query-2, not query-1"),
        ({"description": make_join(left=dataclasses.replace(make_join().left, ttl_ms=9)).to_json()}, "another join"),
    ],
)
def test_a_partition_of_another_query_or_join_is_refused(
    use: Callable[[Path], object], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder, other = folder_of(tmp_path / "state"), folder_of(tmp_path / "other", **changes)
    shutil.rmtree(folder / "p/0")
    shutil.copytree(other / "p/0", folder / "p/0")
    with pytest.raises(StateError, match=message):
        use(folder)


@pytest.mark.parametrize("number", [1, 2])
def test_folders_of_earlier_formats_are_taken_over(number: int, tmp_path: Path) -> None:
    """Their files say nothing of where they belong; those that are written now do, and are checked."""
    files = Files.at(str(tmp_path))
    manifest = dataclasses.replace(MINE, format=number, distribution=SPARK if number == 1 else ARROW)
    files.create(MANIFEST, manifest.to_json().encode())
    bare = dataclasses.replace(manifest)
    object.__setattr__(bare, "facts", lambda _: {})
    for partition in (0, 1):
        log = PartitionLog(files, bare, partition)
        for batch in range(3):
            log.write_record(batch, Record(BATCHES[batch], 1000, WIRE.to_json()))
    looks(tmp_path)
    if number == 1:
        with pytest.raises(StateError, match="to its 2 partitions by another hash"):
            opens(tmp_path)
        rescale(str(tmp_path), 2)
        assert Manifest.of(files).bound
        return
    opens(tmp_path)
    assert Manifest.of(files).format == number
    assert PartitionLog(files, MINE, 0).read_record(3).clock_ms
    shutil.copy(tmp_path / f"p/0/{3:020d}.arrow", tmp_path / f"p/1/{3:020d}.arrow")
    with pytest.raises(StateError, match="belongs to partition 0, not 1"):
        stored_state(files, Manifest.of(files), 1).rows_at(4)
    (tmp_path / f"p/1/{3:020d}.arrow").unlink()
    opened(tmp_path, partition=1).apply(3, BATCHES[3], WIRE)
    rescale(str(tmp_path), 3)
    assert Manifest.of(files).bound


# --- the manifest --------------------------------------------------------------------------------

CONTENT: dict[str, Any] = json.loads(MINE.to_json())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("format", value) for value in (None, -1, 0, 1.5, True, "3", [], 1e300)),
        *(("partitions", value) for value in (None, 0, -2, 2.0, "2", False, {})),
        *(("generation", value) for value in (None, -1, 0.0, "0", True)),
        *(("query_id", value) for value in (None, "", 7, ["query-1"])),
        *(("join_number", value) for value in (0, -1, 1.0, "1", False)),
        *(("distribution", value) for value in (None, "", "Spark", 1)),
        *(("join", value) for value in (None, {}, "full", [], {**CONTENT["join"], "how": "sideways"})),
        ("join", {name: value for name, value in CONTENT["join"].items() if name != "keys"}),
    ],
)
def test_each_field_of_a_manifest_is_checked(field: str, value: object, tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(json.dumps({**CONTENT, field: value}))
    with pytest.raises(StateError, match=rf"manifest\.json is damaged: {field}=") as found:
        ensure(Files.at(str(tmp_path)), MINE, create=True)
    assert repr(value)[:50] in str(found.value)


@pytest.mark.parametrize("field", ["format", "partitions", "generation", "query_id", "distribution", "join"])
def test_a_manifest_that_lacks_a_field_is_refused(field: str, tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(json.dumps({name: value for name, value in CONTENT.items() if name != field}))
    with pytest.raises(StateError, match=f"manifest.json is damaged: it has no '{field}'"):
        ensure(Files.at(str(tmp_path)), MINE, create=True)


def test_what_else_a_manifest_says_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(json.dumps({**CONTENT, "remark": "mine", "schemas": None, "created": 5}))
    assert ensure(Files.at(str(tmp_path)), MINE, create=True) == MINE


def test_the_first_format_knew_neither_generations_nor_other_distributions(tmp_path: Path) -> None:
    old = {name: value for name, value in CONTENT.items() if name not in ("generation", "distribution")}
    (tmp_path / MANIFEST).write_text(json.dumps({**old, "format": 1}))
    assert Manifest.of(Files.at(str(tmp_path))) == dataclasses.replace(MINE, format=1, distribution=SPARK)
    (tmp_path / MANIFEST).write_text(json.dumps({**old, "format": 1, "generation": 1}))
    with pytest.raises(StateError, match="is damaged"):
        Manifest.of(Files.at(str(tmp_path)))


def places(value: object, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where a JSON value can be changed."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for name, part in inner for place in places(part, (*path, name)))]


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=3,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.sampled_from(places(CONTENT)), value=ANYTHING, drop=st.booleans())
def test_a_mutated_manifest_is_read_or_refused(
    place: tuple[Any, ...], value: object, drop: bool, tmp_path: Path
) -> None:
    content = json.loads(json.dumps(CONTENT))
    target: Any = content
    for name in place[:-1]:
        target = target[name]
    if not place:
        content = value
    elif drop:
        del target[place[-1]]
    else:
        target[place[-1]] = value
    (tmp_path / MANIFEST).write_text(json.dumps(content))
    with contextlib.suppress(StateError):
        ensure(Files.at(str(tmp_path)), MINE, create=True)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, len(MINE.to_json()) - 1), byte=st.integers(0, 255))
def test_a_manifest_with_a_changed_byte_is_read_or_refused(position: int, byte: int, tmp_path: Path) -> None:
    content = MINE.to_json().encode()
    (tmp_path / MANIFEST).write_bytes(content[:position] + bytes([byte]) + content[position + 1 :])
    with contextlib.suppress(StateError):
        ensure(Files.at(str(tmp_path)), MINE, create=True)


def test_inputs_in_another_order_are_refused(tmp_path: Path) -> None:
    """A query's checkpoint counts its sources by that order."""
    files = Files.at(str(tmp_path))
    ensure(files, dataclasses.replace(MINE, union_order="0,1"), create=True)
    with pytest.raises(StateError, match=r"stand in another order .* \(0,1, now 1,0\).* read it as before"):
        ensure(files, dataclasses.replace(MINE, union_order="1,0"), create=False)
